"""Policies at the same time, if they have devices of their own."""

import threading
import types

import numpy as np
import pytest

from mrl_jax.training import parallel


def workers(*devices):
  return {
    name: types.SimpleNamespace(
      name=name,
      spec=types.SimpleNamespace(
        mesh=types.SimpleNamespace(devices=np.array([each]))
      ),
    )
    for name, each in zip('abc', devices, strict=False)
  }


def test_policies_with_devices_of_their_own_run_at_the_same_time():
  both = threading.Barrier(2, timeout=20)
  found = parallel.each(
    lambda w: both.wait() and w.name, workers((0, 1), (2, 3))
  )
  assert {name for name, _ in found} == {'a', 'b'}


def test_policies_that_share_a_device_take_turns():
  running, most = [], []

  def run(worker):
    running.append(worker)
    most.append(len(running))
    running.pop()
    return worker.name.upper()

  found = [*parallel.each(run, workers((0, 1), (1, 2), (3, 4)))]
  assert dict(found) == {'a': 'A', 'b': 'B', 'c': 'C'}
  assert max(most) == 1


def test_an_error_of_one_policy_is_raised():
  def fail(worker):
    if worker.name == 'b':
      raise ValueError('of b')

  with pytest.raises(ValueError, match='of b'):
    dict(parallel.each(fail, workers((0,), (1,))))


def test_an_error_of_one_policy_cancels_the_others():
  cancelled = threading.Event()

  def run(worker):
    if worker.name == 'a':
      raise ValueError('of a')
    assert cancelled.wait(20)

  with pytest.raises(ValueError, match='of a'):
    dict(parallel.each(run, workers((0,), (1,)), cancelled.set))
  assert cancelled.is_set()
