"""What the benchmarks have in common; see `launch/bench.py`."""

from collections.abc import Callable
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
