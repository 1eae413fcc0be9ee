"""Packed rows against one response at a time, and how often they compile."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from mrl_jax import algorithms
from mrl_jax.models import decoder
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.training import packing
from mrl_jax.update import objectives
from mrl_jax.update import state as state_lib
from mrl_jax.update import update
from tests import decoders
from tests import examples

MODEL = examples.model(num_layers=1)
ONE = decoders.mesh(1, 1, 1)
KL = {'kl_weight': 0.1, 'entropy_weight': 0.05}


def rows(rng, count):
  """Prompts, and rows with what any objective reads."""
  prompts = [rng.integers(0, 48, n) for n in rng.integers(1, 8, count)]
  made = []
  for i, n in enumerate(rng.integers(1, 14, count)):
    made.append(
      rows_lib.Row(
        prompt=i,
        ids=rng.integers(0, 48, n).astype(np.int32),
        old_logp=rng.normal(-4, 0.4, n).astype(np.float32),
        advantage=rng.normal(),
        # Of one to three tokens.
        chunk=np.cumsum(rng.random(n) < 0.5).astype(np.int32),
        mask=rng.random(n) < 0.8,
        weight=rng.uniform(0.5, 1.5, n).astype(np.float32),
        reference_logp=rng.normal(-4, 0.4, n).astype(np.float32),
      )
    )
  return prompts, made


def packer(slots, micro_rows=2):
  train = examples.train(packed_tokens=slots, micro_rows=micro_rows)
  return packing.Packer(
    context=7, lengths={'own': 13}, train=train, reference=True
  )


@functools.cache
def params():
  spec = state_lib.StateSpec(model=MODEL, mesh=ONE, optimizer=optax.identity())
  return spec.random_params(jax.random.key(0))


def differentiate(add, micro_batches):
  """The gradients of micro-batches, and their statistics."""
  grads, statistics = update.build_zeros(MODEL, ONE)(), {}
  for part in micro_batches:
    grads, more = add(grads, params(), decoder.NO_PARAMS, part)
    for name, x in more.items():
      statistics.setdefault(f'own/{name}', []).append(x)
  grads, statistics = jax.device_get((grads, statistics))
  return grads, update.joined(statistics)


# The method and its settings, the part of its rows, and the mini-batch.
CASES = {
  'own tokens': ('grpo', {}, 'own', 1),
  'own sequences': ('gspo', {}, 'own', 1),
  'first mini-batch': ('gspo', {'by_trainer': True}, 'own', 0),
  'penalty and bonus': ('grpo', KL, 'own', 1),
  'prp': ('prp', {}, 'peer', 0),
  'sgt': ('sgt', {}, 'peer', 0),
  'hacpo': ('hacpo', {}, 'peer', 2),
  'graft': ('graft', {}, 'peer', 0),
  'luffy': ('grpo', {'which': 'random', 'how': 'luffy'}, 'peer', 0),
}


@pytest.mark.parametrize(
  'case',
  [
    name
    if name in ('prp', 'own sequences', 'penalty and bonus')
    else pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
  ],
)
def test_packing_changes_neither_gradients_nor_statistics(case):
  name, changes, part, mini_batch = CASES[case]
  by_trainer = 'by_trainer' in changes
  settings = {key: x for key, x in changes.items() if key != 'by_trainer'}
  method = algorithms.build(examples.settings(name, **settings))
  objective = method.objectives(by_trainer)[part]
  prompts, made = rows(np.random.default_rng(0), 12)
  add = update.build_gradient(MODEL, ONE, objective, 64)
  weighed = [(row, 1 / 50) for row in made]
  packed = packer(48).pack(prompts, weighed, 'own', mini_batch)
  assert len(packed) > 1
  assert max(part.row_BS.max() for part in packed) >= 3
  alone = [
    one
    for each in weighed
    for one in packer(24).pack(prompts, [each], 'own', mini_batch)
  ]
  assert len(alone) == 12
  found, statistics = differentiate(add, packed)
  expected, sums = differentiate(add, alone)
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())
  assert statistics.keys() == sums.keys()
  for key, value in sums.items():
    np.testing.assert_allclose(
      statistics[key], value, rtol=2e-5, atol=1e-4, err_msg=key
    )


def test_rounds_of_any_lengths_compile_two_programs_at_most():
  rng = np.random.default_rng(0)
  add = update.build_gradient(MODEL, ONE, objectives.LOG_LIKELIHOOD, 64)
  score = update.build_scorer(MODEL, ONE, 64)
  made = dataclasses.replace(packer(24, 4), reference=False)
  sizes = set()
  for _ in range(50):
    prompts, each = rows(rng, rng.integers(1, 20))
    packed = made.pack(prompts, [(row, 1.0) for row in each], 'own')
    sizes |= {len(part.tokens_BS) for part in packed}
    grads, _ = differentiate(add, packed)
    for part in packed:
      score(params(), decoder.NO_PARAMS, part)
  assert sizes == {1, 4}
  assert add._cache_size() == score._cache_size() == 2
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
