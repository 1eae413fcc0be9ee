"""What the benchmarks have in common; see `launch/bench.py`."""

from collections.abc import Callable, Mapping
import math
import threading
import time
from typing import NamedTuple

import numpy as np

from mrl_jax import records


class Result(NamedTuple):
  """What `run` of a benchmark returns, to be shown and written as JSON."""

  about: dict[str, float]  # What was measured: numbers by plural noun.
  rows: dict[str, dict[str, float]]  # Figures by row and column of a table.


def seconds(function: Callable, *arguments) -> float:
  start = time.perf_counter()
  function(*arguments)
  return time.perf_counter() - start


WARM_UPS = 2  # A training step may compile again when it sees its own result.


def best(functions: Mapping[str, Callable], repeat: int) -> dict[str, float]:
  """The least seconds of each function in `repeat` runs, in which they alternate.

  Before that each runs `WARM_UPS` times: nothing is compiled while it is measured.
  """
  least = dict.fromkeys(functions, math.inf)
  for function in [*functions.values()] * WARM_UPS:
    function()
  for turn in range(repeat):
    for name in [*functions][:: -1 if turn % 2 else 1]:
      least[name] = min(least[name], seconds(functions[name]))
  return least


class Steps:
  """A training loop of another library, one step at a time.

  steps = Steps(train)  # Runs until the loop calls `pause()` for the first time.
  steps()  # Runs until the next `pause()`, or the end.

  `train(pause)` runs in a thread; it calls `pause()` before every step. The loop
  must be run to its end.
  """

  def __init__(self, train: Callable[[Callable[[], None]], None]):
    self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
    self._error = None

    def run():
      try:
        train(self._pause)
      except BaseException as error:
        self._error = error
      self._stopped.release()

    threading.Thread(target=run, daemon=True).start()
    self._wait()

  def __call__(self) -> None:
    self._go.release()
    self._wait()

  def _pause(self) -> None:
    self._stopped.release()
    self._go.acquire()

  def _wait(self) -> None:
    self._stopped.acquire()
    if self._error:
      raise self._error


def beside(ours: float, others: Mapping[str, float]) -> dict[str, float]:
  """Columns of a row: our seconds, those of others, and their ratios to ours."""
  columns = {'s': ours}
  for name, theirs in others.items():
    columns |= {f'{name}, s': theirs, f'{name} takes, x': theirs / ours}
  return columns


def machine() -> dict[str, float]:
  """How fast this machine is in this process, to compare figures of several."""
  import jax
  import jax.numpy as jnp

  size = 1024
  x, y = jnp.ones((size, size)), jnp.ones(2**24)
  product, copy = jax.jit(lambda x: x @ x), jax.jit(jnp.negative)
  least = best(
    {
      'product': lambda: product(x).block_until_ready(),
      'copy': lambda: copy(y).block_until_ready(),
    },
    repeat=10,
  )
  return {
    'GFLOP/s of a matrix product': 2 * size**3 / least['product'] / 1e9,
    'GB/s read and written by a copy': 2 * y.nbytes / least['copy'] / 1e9,
  }


_HEADER = {'run': 'bench', 'round': 0, 'policy': 'a', 'prompt': 'p0',
           'sample': 0, 'tokenizer': 'bytes'}  # fmt: skip


def rollout(
  ids: np.ndarray, byte_lengths: np.ndarray, payload: bytes, **header
) -> records.Rollout:
  """A wrong completion of these tokens, with random log-probabilities."""
  logp = -np.random.default_rng(0).random(len(ids), np.float32)
  return records.Rollout(
    header=records.Header(version=0, created=0.0, **{**_HEADER, **header}),
    payload=payload,
    finish='length',
    ids=ids,
    byte_lengths=byte_lengths,
    sampling_logp=logp,
    policy_logp=logp,
    mask=np.ones(len(ids), bool),
    temperature=1.0,
    reward=0.0,
    verdict='wrong',
  )
