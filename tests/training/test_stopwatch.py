import contextlib
import time

import pytest

from mrl_jax.training import stopwatch


class Time:
  """A clock, and one that only runs during verification."""

  def __init__(self, monkeypatch):
    self.now = self.verified = 0.0
    monkeypatch.setattr(time, 'perf_counter', lambda: self.now)

  def work(self, seconds):
    self.now += seconds

  def verify(self, seconds):
    self.now += seconds
    self.verified += seconds


@pytest.fixture
def clock(monkeypatch):
  return Time(monkeypatch)


@pytest.fixture
def watch(clock):
  return stopwatch.Stopwatch({'verification': lambda: clock.verified})


def test_every_second_counts_for_one_phase(clock, watch):
  with watch('sampling'):
    clock.work(4)
    clock.verify(2)
  clock.work(1)
  clock.verify(3)
  with watch('sampling'):
    clock.work(8)
  with watch('updates'):
    clock.work(16)
  assert watch.lap() == {
    'sampling': 12, 'updates': 16, 'verification': 5, 'other': 1,
  }  # fmt: skip


def test_every_lap_begins_at_zero(clock, watch):
  with watch('sampling'):
    clock.verify(1)
  watch.lap()
  clock.verify(2)
  assert watch.lap() == {'verification': 2, 'other': 0}


def test_the_time_of_a_phase_that_fails_is_counted(clock, watch):
  with contextlib.suppress(RuntimeError), watch('sampling'):
    clock.work(1)
    raise RuntimeError
  assert watch.lap()['sampling'] == 1


def test_threads_share_the_time_that_they_are_in_phases(clock, watch):
  with watch('sampling'):
    clock.work(4)
    with watch('updates'):  # Of another thread.
      clock.work(8)
      clock.verify(2)
    clock.work(1)
  clock.work(3)
  assert watch.lap() == {
    'sampling': 4 + 4 + 0.5 + 1, 'updates': 4 + 0.5, 'verification': 1,
    'other': 3,
  }  # fmt: skip
