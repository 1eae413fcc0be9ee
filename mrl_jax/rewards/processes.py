"""Processes that answer requests, and are killed if they do not.

Code that works on a model's text may never end, or take all memory, in ways that
no thread and no exception can stop. Requests are lines of JSON and replies are
plain words: nothing is unpickled.
"""

import collections
from collections.abc import Iterable, Sequence
import contextlib
import importlib
import json
from multiprocessing import connection
import os
import resource
import signal
import subprocess
import sys
import time
import weakref

TIMEOUT, CRASH = 'timeout', 'crash'

_READY = 'ready'
_START = -1  # The task of a process that imports its function.
_START_S = 120.0  # Time for it.
_GRACE_S = 1.0  # Time after the deadline until a process kills itself.
_MEMORY_BYTES = 2**30  # Address space of a process.
_MAX_PROCESSES = 4
_REPLY_BYTES = 64  # Replies are single words, which arrive in one piece.


class Pool:
  """Calls a function in several processes, each call with a deadline.

      with contextlib.closing(Pool('package.module:function', 5.0)) as pool:
        replies = pool.map([('an', 'argument'), ...])

  Processes are started when they are first needed. They run a fresh
  interpreter, so that they share no threads and no devices with this process,
  and they end when it ends, however it ends. For one thread at a time.
  """

  def __init__(
    self, function: str, timeout_s: float, processes: int | None = None
  ):
    """Starts nothing yet.

    Args:
      function: 'package.module:function'; it takes what JSON can express, and
        returns a word.
      timeout_s: seconds that a call may take.
      processes: the most processes; by default one per core, up to four.
    """
    self._function, self._timeout_s = function, timeout_s
    self._most = processes or min(_MAX_PROCESSES, os.cpu_count() or 1)
    self._children = []
    # Kills all processes; also if the pool is garbage or the interpreter exits.
    self.close = weakref.finalize(self, _end_all, self._children)

  def map(self, requests: Iterable[Sequence]) -> list[str]:
    """Calls the function for each request; returns its replies in order.

    A reply is 'timeout' if a call takes too long, 'crash' if its process ends.

    Args:
      requests: the arguments of each call; small enough for a pipe's buffer.

    Raises:
      RuntimeError: the pool is closed, or a process does not start.
    """
    if not self.close.alive:
      raise RuntimeError('this pool of processes is closed')
    requests, replies = list(requests), {}
    waiting = collections.deque(enumerate(requests))
    self._keep(lambda child: child.process.poll() is None)
    try:
      while len(replies) < len(requests):
        needed = min(self._most, len(requests) - len(replies))
        while len(self._children) < needed:
          self._children.append(_Child(self._function, self._timeout_s))
        for child in self._children:
          if child.task is None and waiting:
            child.send(*waiting.popleft())
        replies |= self._receive()
    finally:
      # After an exception, nothing waits for the replies of busy children.
      self._keep(lambda child: child.task in (None, _START))
    return [replies[i] for i in range(len(requests))]

  def _keep(self, keeps):
    for child in [*self._children]:
      if not keeps(child):
        self._children.remove(child)
        child.end()

  def _receive(self) -> dict[int, str]:
    """Waits for a reply or a deadline; kills children that miss theirs."""
    busy = [child for child in self._children if child.task is not None]
    patience = min(child.deadline for child in busy) - time.monotonic()
    heard = connection.wait(
      [child.process.stdout for child in busy], max(0.0, patience)
    )
    replies = {}
    for child in busy:
      if child.process.stdout in heard:
        reply = child.receive()
      elif time.monotonic() >= child.deadline:
        reply = TIMEOUT
        child.end()
      else:
        continue
      if child.task != _START:
        replies[child.task] = reply
      elif reply != _READY:
        raise RuntimeError(
          f'a process for {self._function} does not start ({reply}): '
          f'{child.errors[-2000:].decode(errors="replace")}'
        )
      child.task = None
    self._keep(lambda child: not child.ended)
    return replies


class _Child:
  """A process; its task is the index of a request, `_START`, or None if idle."""

  def __init__(self, function, timeout_s):
    # A fresh interpreter: forking a process with JAX's threads can deadlock.
    self.process = subprocess.Popen(
      [sys.executable, '-P', '-m', __name__, function, str(timeout_s)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    self._timeout_s = timeout_s
    self.task, self.deadline = _START, time.monotonic() + _START_S
    self.ended, self.errors = False, b''  # Its standard error, once it ended.

  def send(self, task, request):
    self.task, self.deadline = task, time.monotonic() + self._timeout_s
    # If the process has ended, `receive` will notice.
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.write(json.dumps(request).encode() + b'\n')

  def receive(self) -> str:
    reply = self.process.stdout.read(_REPLY_BYTES)
    if reply:
      return reply.decode()
    self.end()
    alarmed = self.process.returncode == -signal.SIGALRM
    return TIMEOUT if alarmed else CRASH

  def end(self) -> None:
    if not self.ended:
      self.ended = True
      with self.process:  # It waits for the end, and closes the pipes.
        self.process.kill()
        self.errors = self.process.stderr.read()


def _end_all(children) -> None:
  for child in children:
    child.end()
  children.clear()


def _serve(function: str, timeout_s: float) -> None:
  """Answers the requests of a pool until the pool ends."""
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # The pool handles it.
  replies, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)  # What the function prints must not be a reply.
  module, _, name = function.partition(':')
  call = getattr(importlib.import_module(module), name)
  os.dup2(nowhere, 2)
  os.write(replies, _READY.encode())
  for line in sys.stdin.buffer:
    # The kernel kills this process if the pool was killed before it could.
    signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
    reply = call(*json.loads(line))
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.write(replies, reply.encode())


if __name__ == '__main__':
  _serve(sys.argv[1], float(sys.argv[2]))
