import contextlib
import os
import pathlib
import types

import jax
import pytest

from mrl_jax.training import profiling
from mrl_jax.training import progress as progress_lib
from mrl_jax.training import stopwatch


@pytest.mark.parametrize(
  ('first', 'rounds', 'traced'), [(2, 0, 0), (1, 2, 2), (3, 5, 1), (4, 1, 0)]
)
def test_the_rounds_that_are_asked_for_are_traced(
  first, rounds, traced, monkeypatch
):
  folders = []

  def trace(folder):
    folders.append(folder)
    return contextlib.nullcontext()

  monkeypatch.setattr(jax.profiler, 'trace', trace)
  job = types.SimpleNamespace(
    config=types.SimpleNamespace(
      profile=types.SimpleNamespace(first=first, rounds=rounds)
    ),
    home=types.SimpleNamespace(folder='run'),
  )
  for round in range(4):
    with profiling.of_round(job, progress_lib.Progress(rounds=round)):
      pass
  assert folders == ['run/tensorboard'] * traced


def test_a_trace_has_the_phases_of_the_round_by_name(tmp_path):
  watch = stopwatch.Stopwatch({})
  with jax.profiler.trace(os.fspath(tmp_path)), watch('sampling'):
    jax.block_until_ready(jax.numpy.zeros(3) + 1)
  (trace,) = pathlib.Path(tmp_path).rglob('*.xplane.pb')
  assert b'sampling' in trace.read_bytes()
