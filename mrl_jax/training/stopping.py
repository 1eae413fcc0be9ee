"""Ends a run within a bounded time when the system or a user asks for it.

A machine that is taken away gives some 30 s after SIGTERM. A round may take
longer, and all the while the main thread may wait for a device, where Python
cannot interrupt it. So a thread of its own hears the signals. The run finishes
its round if there is time; if not, the thread leaves the round behind and saves
the state before it. Once an update has begun to replace that state, only the end
of the round can be saved, or else the last checkpoint stays the newest.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import select
import signal
import threading
import time

from absl import logging

EXIT = os.EX_TEMPFAIL  # Exit status of a run that was stopped and can resume.
_SIGNALS = signal.SIGTERM, signal.SIGINT
# Share of the time after which a round is left behind; or at once, if it is not
# expected to end by then.
_ABANDON = 0.5
_ONCE_S = 1.0  # Wrappers and shells may send one signal twice in this time.


class Stop:
  """A request to stop; before `listen`, nobody can make it.

      stop.listen(seconds=25.0, end=report)
      ...                        # A signal raises KeyboardInterrupt.
      with stop.deferred():
        while rounds_are_left:
          with stop.leaving_behind(save, expected_s):
            play_round()         # If it takes too long: save, end, exit.
          if stop.asked:
            save()
            stop.leave()         # end, exit.

  After `seconds`, or at a second signal, the process exits whatever it does.
  """

  def __init__(self):
    self.asked = False
    self._end = lambda has_time: None
    self._deferred, self._save = False, None
    self._is_late = False  # Whether the time for the round in progress is over.
    self._done_by = 0.0  # When a round is expected to end.
    self._turn = threading.Lock()  # Held by the thread that may save and exit.

  def listen(self, seconds: float, end: Callable[[bool], None]) -> None:
    """Starts to hear signals; call it in the main thread.

    `end` is called before the process exits, in any thread; its argument says
    whether there is time to write a report.
    """
    self._end = end
    heard, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in _SIGNALS:
      signal.signal(number, self._interrupt)
    threading.Thread(
      target=self._watch, args=(heard, seconds), name='stop', daemon=True
    ).start()

  @contextlib.contextmanager
  def deferred(self) -> Iterator[None]:
    """Within it, no signal raises: see `asked`. Nor after it, in what is left."""
    self._deferred = True
    with self._turn:
      yield

  @contextlib.contextmanager
  def leaving_behind(
    self, save: Callable[[], bool], expected_s: float
  ) -> Iterator[None]:
    """Within it, another thread may `save` the state before it, and exit.

    `save` returns whether there was anything that could be saved. What is within
    is expected to take so many seconds; 0 if that is unknown.
    """
    if self._is_late and save():
      self.leave()
    self._save, self._done_by = save, time.monotonic() + expected_s
    self._turn.release()
    try:
      yield
    finally:
      self._turn.acquire()  # For ever, if the process is about to exit.
      self._save = None

  def leave(self) -> None:
    """Ends the process; threads and peers that it waits for are left."""
    self._exit(has_time=True)

  def _exit(self, has_time):
    try:
      self._end(has_time)
    finally:  # Whatever fails, such as printing to a terminal that is gone.
      os._exit(EXIT)

  def _interrupt(self, *_):
    self.asked = True
    if not self._deferred:
      raise KeyboardInterrupt

  def _watch(self, heard, seconds):
    _signalled(heard, None)
    self.asked, began = True, time.monotonic()
    once_s = min(_ONCE_S, seconds / 10)
    while _signalled(heard, began + once_s - time.monotonic()):
      pass
    soon = _ABANDON * seconds
    if self._done_by > began + soon:
      soon = 0.0
    for after, act in ((soon, self._abandon), (seconds, self._cut)):
      if _signalled(heard, began + after - time.monotonic()):
        os._exit(EXIT)
      threading.Thread(target=act, daemon=True).start()

  def _abandon(self):
    with self._turn:
      try:
        if self._save is None or not self._save():
          self._is_late = True  # What comes after the round is left behind.
          return
      except Exception:
        # E.g. the update that replaces the state has just begun.
        logging.exception('no checkpoint could be written of the last round')
      self.leave()

  def _cut(self):
    self._exit(has_time=False)


def _signalled(heard: int, timeout_s: float | None) -> bool:
  """Waits for a signal to stop; returns whether there was one."""
  deadline = None if timeout_s is None else time.monotonic() + timeout_s
  while True:
    left = None if deadline is None else max(deadline - time.monotonic(), 0)
    if not select.select([heard], [], [], left)[0]:
      return False
    if {*os.read(heard, 64)} & {*_SIGNALS}:
      return True
