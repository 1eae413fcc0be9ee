"""Measures where the time of a run goes."""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import threading
import time

import jax


class Stopwatch:
  """Seconds of the host by phase, at work or waiting for a device.

  watch = Stopwatch({'verification': lambda: judge.seconds})
  with watch('sampling'):
    ...  # Time of verification in here does not count as sampling.
  watch.lap()  # {'verification': 0.1, 'sampling': 0.4, 'other': 0.02}

  Where several threads are in a phase at the same time, each has an equal share
  of it: phases add up to the seconds of the clock on the wall.
  """

  def __init__(self, clocks: Mapping[str, Callable[[], float]]):
    """Starts; `clocks` are phases that measure their own total seconds."""
    self._clocks, self._lock = clocks, threading.Lock()
    self._phases = collections.defaultdict(float)
    self._active = []  # A phase for every thread that is in one.
    self._began, self._before = time.perf_counter(), self._read()

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Adds the seconds inside, less those of the clocks, to a phase.

    In a trace of the profiler, they have the name of the phase.
    """
    with self._lock:
      self._settle()
      self._active.append(phase)
    try:
      with jax.profiler.TraceAnnotation(phase):
        yield
    finally:
      with self._lock:
        self._settle()
        self._active.remove(phase)

  def lap(self) -> dict[str, float]:
    """Returns seconds by phase since the last lap; 'other' is the rest."""
    with self._lock:
      self._settle()
      phases, self._phases = self._phases, collections.defaultdict(float)
    return {**dict.fromkeys((*self._clocks, 'other'), 0.0), **phases}

  def _settle(self):
    """Shares the time since the last call out."""
    now, after = time.perf_counter(), self._read()
    active = self._active or ['other']
    left = now - self._began
    for name, seconds in after.items():
      share = (seconds - self._before[name]) / len(active)
      self._phases[name] += share
      left -= share
    for phase in active:
      self._phases[phase] += left / len(active)
    self._began, self._before = now, after

  def _read(self):
    return {name: seconds() for name, seconds in self._clocks.items()}
