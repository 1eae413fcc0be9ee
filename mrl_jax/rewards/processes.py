"""Processes that answer requests, and are killed if they do not.

Code that works on a model's text may never end, or take all memory, in ways that
no thread and no exception can stop. Requests are lines of JSON and replies are
plain words: nothing is unpickled.
"""

from collections.abc import Iterable, Sequence
from concurrent import futures
import contextlib
import importlib
import json
from multiprocessing import connection
import os
import queue
import resource
import signal
import subprocess
import sys
import weakref

TIMEOUT, CRASH = 'timeout', 'crash'

_READY = 'ready'
_START_S = 120.0  # Time for a process to import its function.
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

    The function takes what JSON can express, and returns a word. There are at
    most so many processes, by default one per core, up to four.
    """
    self._function, self._timeout_s = function, timeout_s
    most = processes or min(_MAX_PROCESSES, os.cpu_count() or 1)
    self._children = [None] * most  # Until they are needed.
    self._idle = queue.LifoQueue()  # Indices of children.
    for i in range(most):
      self._idle.put(i)
    # Kills all processes; also if the pool is garbage or the interpreter exits.
    self.close = weakref.finalize(self, _end_all, self._children)

  def map(self, requests: Iterable[Sequence]) -> list[str]:
    """Calls the function for each request; returns its replies in order.

    A reply is 'timeout' if a call takes too long, 'crash' if its process ends.
    The arguments of a call must fit in a pipe's buffer. Raises RuntimeError if
    the pool is closed, or a process does not start.
    """
    if not self.close.alive:
      raise RuntimeError('this pool of processes is closed')
    with futures.ThreadPoolExecutor(len(self._children)) as threads:
      try:
        return list(threads.map(self._ask, requests))
      except BaseException:
        for child in filter(None, self._children):
          child.process.kill()  # Its thread stops waiting for a reply.
        raise

  def _ask(self, request: Sequence) -> str:
    i = self._idle.get()
    try:
      child = self._children[i]
      if child is None or child.process.poll() is not None:
        _end_all([child])
        child = self._children[i] = _Child(self._function)
        reply = child.receive(_START_S)
        if reply != _READY:
          raise RuntimeError(
            f'a process for {self._function} does not start ({reply}): '
            f'{child.errors[-2000:].decode(errors="replace")}'
          )
      child.send(request, self._timeout_s)
      return child.receive(self._timeout_s)
    finally:
      self._idle.put(i)


class _Child:
  """A process, which says when it is ready and then answers requests."""

  def __init__(self, function: str):
    # A fresh interpreter: forking a process with JAX's threads can deadlock.
    self.process = subprocess.Popen(
      [sys.executable, '-P', '-m', __name__, function],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    self.errors = b''  # Its standard error, once it ended.

  def send(self, request: Sequence, timeout_s: float) -> None:
    # If the process has ended, `receive` will notice.
    with contextlib.suppress(BrokenPipeError):
      line = json.dumps([timeout_s, *request])
      self.process.stdin.write(line.encode() + b'\n')

  def receive(self, timeout_s: float) -> str:
    """Waits for a reply; ends the process if there is none."""
    heard = connection.wait([self.process.stdout], timeout_s)
    reply = self.process.stdout.read(_REPLY_BYTES) if heard else b''
    if reply:
      return reply.decode()
    self.end()
    alarmed = self.process.returncode == -signal.SIGALRM
    return CRASH if heard and not alarmed else TIMEOUT

  def end(self) -> None:
    with self.process:  # It waits for the end, and closes the pipes.
      self.process.kill()
      if not self.process.stderr.closed:
        self.errors = self.process.stderr.read()


def _end_all(children) -> None:
  for child in filter(None, children):
    child.end()


def _serve(function: str) -> None:
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
    timeout_s, *request = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
    reply = call(*request)
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.write(replies, reply.encode())


if __name__ == '__main__':
  _serve(sys.argv[1])
