"""Measures where the time of a run goes."""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import time


class Stopwatch:
  """Seconds of the host by phase, at work or waiting for a device.

  watch = Stopwatch({'verification': lambda: judge.seconds})
  with watch('sampling'):
    ...  # Time of verification in here does not count as sampling.
  watch.lap()  # {'verification': 0.1, 'sampling': 0.4, 'other': 0.02}
  """

  def __init__(self, clocks: Mapping[str, Callable[[], float]]):
    """Starts; `clocks` are phases that measure their own total seconds."""
    self._clocks = clocks
    self._phases = collections.defaultdict(float)
    self._began, self._before = time.perf_counter(), self._read()

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Adds the seconds inside, less those of the clocks, to a phase."""
    began, before = time.perf_counter(), self._read()
    try:
      yield
    finally:
      seconds = time.perf_counter() - began
      inside = sum(self._since(before).values())
      self._phases[phase] += seconds - inside

  def lap(self) -> dict[str, float]:
    """Returns seconds by phase since the last lap; 'other' is the rest."""
    now = time.perf_counter()
    phases = {**self._phases, **self._since(self._before)}
    phases['other'] = now - self._began - sum(phases.values())
    self._phases.clear()
    self._began, self._before = now, self._read()
    return phases

  def _read(self):
    return {name: seconds() for name, seconds in self._clocks.items()}

  def _since(self, before):
    return {name: now - before[name] for name, now in self._read().items()}
