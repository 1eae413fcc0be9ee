"""Samples completions of many prompts, in few slots.

Rows end at different lengths. When some have ended, rows of other prompts take
their slots, and at the end there are fewer slots. The device runs compiled
programs of many steps (`slots`), and the host decides what comes next.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import NamedTuple

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import sharding
from mrl_jax.sampling import slots as slots_lib

WIDTH = 64  # The most tokens of a row between two decisions of the host.
_REFILL = 8  # One in so many slots is free before prompts are read for them.
_TAIL = 4  # At the end, slots are fewer by this factor, ...
_SHORT = 64  # ... unless completions have fewer tokens than this.
_LONG = 1024  # Tokens from which on the ring of the cache grows in stages.
# Slots of prompts from which on shorter ones are read in half of them.
_LONG_CONTEXT = 128


class Completion(NamedTuple):
  """A finished row."""

  prompt: int  # Index of its prompt.
  sample: int  # Its number among the samples of the prompt.
  ids: np.ndarray  # i32, with the stop token.
  sampling_logp: np.ndarray  # f32, in the density that was sampled from.
  policy_logp: np.ndarray  # f32, in softmax(logits).
  finish: str  # How it ended, as in `records.Finish`.


# Given the ids of a completion so far, and how many of them are new: how many
# there are up to the new one that ends the completion, or None if it goes on.
Ends = Callable[[np.ndarray, int], int | None]


class Shape(NamedTuple):
  """How many are sampled together."""

  many: int  # Prompts that fill all slots, ...
  few: int  # ... or a part of them.
  rows: int  # Slots, ...
  tail: int  # ... and how many there are at the end.


class Sampler:
  """Samples completions of a policy on its sampling mesh.

  sampler = Sampler(model, mesh, settings, prompts=16, context=64)
  for completions in sampler(params, frozen, prompt_ids, key):
    ...  # As soon as they have ended, in no particular order.

  The fsdp axis of the mesh has size 1. Of the last call, `used` counts the tokens
  that slots had time for, and `real` those of completions among them.
  """

  def __init__(
    self,
    model: ModelConfig,
    mesh: Mesh,
    settings: slots_lib.Settings,
    *,
    prompts: int,
    context: int,
  ):
    """Samples `prompts` prompts of at most `context` tokens at a time."""
    self.model, self.mesh, self.settings = model, mesh, settings
    self.prompts, self.context = prompts, context
    self.rings = rings(settings.length)
    self.admit = slots_lib.build_admit(model, mesh, settings)
    self.decode = slots_lib.build_decode(
      model, mesh, settings, min(WIDTH, settings.length)
    )
    self.resize = slots_lib.build_resize(model, mesh)
    self.empty = functools.cache(
      functools.partial(slots_lib.build_empty, model, mesh, context=context)
    )
    self.used = self.real = 0

  def shape(self, prompts: int) -> Shape:
    """How many of so many prompts are sampled together."""
    spread = self.mesh.shape['data']
    many = _multiple(min(self.prompts, prompts), spread)
    rows = tail = many * self.settings.samples
    if self.settings.length >= _SHORT:
      tail = _multiple(-(-rows // _TAIL), spread)
    few = _multiple(-(-many // _REFILL), spread)
    return Shape(many, few, rows, tail)

  def __call__(
    self,
    params: nnx.State,
    frozen: nnx.State,
    prompts: Sequence[np.ndarray],
    key: jax.Array,
    ends: Ends | None = None,
  ) -> Iterator[list[Completion]]:
    """Samples G completions of every prompt, given as token ids.

    The same key gives the same completions, however rows share the slots. `ends`
    finds stop strings, which the device does not know.
    """
    self.used = self.real = 0
    batch = _Batch(self, (params, frozen), prompts, key, ends)
    while batch.waiting or batch.table.live_B.any():
      with jax.set_mesh(self.mesh):
        completions = batch.advance()
      if completions:
        yield completions


class _Batch:
  """Prompts that are being sampled."""

  def __init__(self, sampler, weights, prompts, key, ends):
    self._sampler, self._weights = sampler, weights
    self._prompts, self._ends = prompts, ends
    self._key = sharding.arguments(key, sharding.replicated(sampler.mesh))
    self._shape = sampler.shape(len(prompts))
    # Prompts that are read together are about as long.
    self.waiting = collections.deque(
      sorted(range(len(prompts)), key=lambda p: -len(prompts[p]))
    )
    settings = sampler.settings
    self.table = Table(self._shape.rows, settings.length, settings.stop_ids)
    self._ring = sampler.rings[0]
    with jax.set_mesh(sampler.mesh):
      self._slots = sampler.empty(rows=self._shape.rows, ring=self._ring)(
        self._key
      )

  def advance(self) -> list[Completion]:
    """Reads prompts if there is room for some, or samples some tokens."""
    table, sampler, shape = self.table, self._sampler, self._shape
    free = len(table.live_B) - int(table.live_B.sum())
    needed = min(shape.few, len(self.waiting)) * sampler.settings.samples
    if self.waiting and free >= needed:
      is_empty = free == len(table.live_B)
      drawn = self._admit(shape.many if is_empty else shape.few)
      sampler.used += int(drawn.count_B.sum())
    else:
      needed = needed or len(table.live_B) - shape.tail
      drawn = self._decode(free, needed)
      sampler.used += len(drawn.count_B) * int(drawn.count_B.max())
    completions = table.add(drawn, self._ends)
    if (table.live_B != drawn.live_B).any():  # Stop strings ended rows.
      live_B = sharding.put(table.live_B, self._slots.live_B.sharding)
      self._slots = dataclasses.replace(self._slots, live_B=live_B)
    sampler.real += sum(len(completion.ids) for completion in completions)
    return completions

  def _admit(self, count) -> slots_lib.Drawn:
    """Reads the next `count` prompts."""
    count_now = min(count, len(self.waiting))
    group = [self.waiting.popleft() for _ in range(count_now)]
    longest = max(len(self._prompts[p]) for p in group)
    context = next(n for n in contexts(self._sampler.context) if n >= longest)
    prompt_PC = np.zeros((count, context), np.int32)
    valid_PC = np.zeros((count, context), bool)
    index_P = np.zeros(count, np.int32)
    for i, p in enumerate(group):
      ids = self._prompts[p]
      prompt_PC[i, context - len(ids) :] = ids
      valid_PC[i, context - len(ids) :] = True
      index_P[i] = p
    row_B = self.table.place(group, self._sampler.settings.samples)
    arrays = sharding.arguments(
      (prompt_PC, valid_PC, index_P, row_B),
      slots_lib.admitted(self._sampler.mesh),
    )
    self._slots, drawn = self._sampler.admit(
      *self._weights, self._slots, *arrays, self._key
    )
    return jax.device_get(drawn)

  def _decode(self, free, needed) -> slots_lib.Drawn:
    """Samples until `needed` slots are free, or none is live."""
    table, sampler = self.table, self._sampler
    rows, ring, kept_B = len(table.live_B), self._fitting_ring(), None
    if not self.waiting and free >= needed > 0:
      rows, needed = self._shape.tail, 0
      kept_B = np.argsort(~table.live_B, kind='stable')[:rows]
      ring = sampler.rings[-1]  # One program is enough for what is left.
      table.keep(kept_B)
    if kept_B is not None or ring != self._ring:
      self._slots = sampler.resize(self._slots, kept_B, ring)
      self._ring = ring
    self._slots, drawn = sampler.decode(
      *self._weights,
      self._slots,
      np.int32(needed or rows),
      np.int32(min(WIDTH, ring + 1 - table.oldest)),
    )
    return jax.device_get(drawn)

  def _fitting_ring(self) -> int:
    """The smallest ring for the oldest row; twice that, if it is to shrink."""
    oldest = self.table.oldest
    return next(
      n
      for n in self._sampler.rings
      if n >= (oldest if n >= self._ring else 2 * oldest)
    )


class Table:
  """What the host knows of the rows in the slots."""

  def __init__(self, rows: int, length: int, stop_ids: Sequence[int]):
    """Slots without rows."""
    self._stop_ids = frozenset(stop_ids)
    self.live_B = np.zeros(rows, bool)
    self._prompt_B = np.zeros(rows, np.int32)
    self._sample_B = np.zeros(rows, np.int32)
    self._count_B = np.zeros(rows, np.int32)
    self._ids_BT = np.zeros((rows, length), np.int32)
    self._sampling_logp_BT = np.zeros((rows, length), np.float32)
    self._policy_logp_BT = np.zeros((rows, length), np.float32)

  @property
  def oldest(self) -> int:
    """The most tokens that a live row has."""
    return int(self._count_B.max(where=self.live_B, initial=1))

  def place(self, prompts: Sequence[int], samples: int) -> np.ndarray:
    """Gives free slots to the samples of prompts; returns `admit`'s `row_B`."""
    rows = np.arange(len(prompts) * samples)
    slots = np.flatnonzero(~self.live_B)[: len(rows)]
    row_B = np.full(len(self.live_B), -1, np.int32)
    row_B[slots] = rows
    self._prompt_B[slots] = np.repeat(prompts, samples)
    self._sample_B[slots] = rows % samples
    self._count_B[slots] = 0
    return row_B

  def keep(self, slots: np.ndarray) -> None:
    """Leaves these slots only, in this order."""
    for name, value in vars(self).items():
      if isinstance(value, np.ndarray):
        setattr(self, name, value[slots])

  def add(self, drawn: slots_lib.Drawn, ends: Ends | None) -> list[Completion]:
    """Adds tokens to their rows; returns the rows that have ended with them."""
    most = drawn.token_BN.shape[1]
    b, n = np.nonzero(np.arange(most)[None, :] < drawn.count_B[:, None])
    t = self._count_B[b] + n
    self._ids_BT[b, t] = drawn.token_BN[b, n]
    self._sampling_logp_BT[b, t] = drawn.sampling_logp_BN[b, n]
    self._policy_logp_BT[b, t] = drawn.policy_logp_BN[b, n]
    self._count_B += drawn.count_B
    string_B = np.zeros_like(self.live_B)
    for slot in np.flatnonzero(drawn.count_B) if ends else ():
      ids = self._ids_BT[slot, : self._count_B[slot]]
      if count := ends(ids, drawn.count_B[slot]):
        self._count_B[slot], string_B[slot] = count, True
    self.live_B = drawn.live_B & ~string_B
    ended_B = (drawn.count_B > 0) & ~self.live_B
    return [
      self._completion(slot, string_B[slot]) for slot in np.flatnonzero(ended_B)
    ]

  def _completion(self, slot, by_string) -> Completion:
    count = self._count_B[slot]
    ids = self._ids_BT[slot, :count].copy()
    finish = 'stop' if int(ids[-1]) in self._stop_ids else 'length'
    return Completion(
      prompt=int(self._prompt_B[slot]),
      sample=int(self._sample_B[slot]),
      ids=ids,
      sampling_logp=self._sampling_logp_BT[slot, :count].copy(),
      policy_logp=self._policy_logp_BT[slot, :count].copy(),
      finish='stop_string' if by_string else finish,
    )


def rings(length: int) -> list[int]:
  """The numbers of sampled tokens of a row that the cache may have room for."""
  return [length // 4, length // 2, length] if length >= _LONG else [length]


def contexts(context: int) -> list[int]:
  """The numbers of slots that prompts are padded to when they are read."""
  return [context // 2, context] if context >= _LONG_CONTEXT else [context]


def _multiple(n, of):
  return -(-n // of) * of
