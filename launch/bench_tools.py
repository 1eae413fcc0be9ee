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


def rollout(
  ids: np.ndarray,
  byte_lengths: np.ndarray,
  payload: bytes,
  rng: np.random.Generator,
  **header,
) -> records.Rollout:
  """A wrong completion of these tokens, with random log-probabilities."""
  logp = -rng.random(len(ids), np.float32)
  return records.Rollout(
    header=records.Header(round=0, version=0, created=0.0, **header),
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
