"""Processes that answer requests, and are killed where they do not.

What works on the text of a model may never end, or take all memory, in ways
that no thread and no exception stops. Requests cross as lines of JSON and
replies as plain words: nothing is unpickled.
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
_START_S = 120.0  # What a process may take to import its function.
_GRACE_S = 1.0  # After the deadline, until a process kills itself.
_MEMORY_BYTES = 2**30  # Of a process's address space.
_MAX_PROCESSES = 4
_REPLY_BYTES = 64  # Replies are single words; so short, they arrive whole.


class Pool:
  """Calls a function in several processes, each call with a deadline.

      with contextlib.closing(Pool('package.module:function', 5.0)) as pool:
        replies = pool.map([('an', 'argument'), ...])

  Processes are started when they are first needed. They are children that run
  a fresh interpreter, so that they share no threads and no devices with this
  one, and end with it however it ends. For one thread at a time.
  """

  def __init__(
    self,
    function: str,
    timeout_s: float,
    *,
    processes: int | None = None,
    memory_bytes: int = _MEMORY_BYTES,
  ):
    """Starts nothing yet.

    Args:
      function: its module and name, 'package.module:function'; it takes what
        JSON can express, and returns a word.
      timeout_s: seconds that a call may take.
      processes: at most so many; by default one a core, up to four.
      memory_bytes: address space that each may use.
    """
    self._function, self._timeout_s = function, timeout_s
    self._memory_bytes = memory_bytes
    self._most = processes or min(_MAX_PROCESSES, os.cpu_count() or 1)
    self._children = []
    # Also runs when this is garbage, and when the interpreter exits.
    self._end = weakref.finalize(self, _end_all, self._children)

  def map(self, requests: Iterable[Sequence]) -> list[str]:
    """What the function returned for each request.

    'timeout' where it did not in time, and 'crash' where its process ended.

    Args:
      requests: the arguments of each call; small enough for a pipe's buffer.

    Raises:
      RuntimeError: the pool is closed, or a process does not start.
    """
    if not self._end.alive:
      raise RuntimeError('this pool of processes is closed')
    requests = list(requests)
    waiting = collections.deque(enumerate(requests))
    replies = {}
    self._keep(lambda child: child.process.poll() is None)
    try:
      while len(replies) < len(requests):
        self._start(len(requests) - len(replies))
        for child in self._children:
          if child.idle and waiting:
            child.send(*waiting.popleft(), self._timeout_s)
        replies |= self._receive()
    finally:
      # After an exception nobody waits for these replies.
      self._keep(lambda child: child.task is None)
    return [replies[i] for i in range(len(requests))]

  def close(self) -> None:
    """Ends all processes, whatever they are doing."""
    self._end()

  def _start(self, needed):
    while len(self._children) < min(self._most, needed):
      self._children.append(
        _Child(self._function, self._timeout_s, self._memory_bytes)
      )

  def _keep(self, keeps):
    for child in [*self._children]:
      if not keeps(child):
        self._children.remove(child)
        child.end()

  def _receive(self) -> dict[int, str]:
    """Waits for a reply, or a deadline; a child without a reply is ended."""
    busy = [child for child in self._children if not child.idle]
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
      if child.task is not None:
        replies[child.task] = reply
      elif reply != _READY:
        raise RuntimeError(
          f'a process for {self._function} does not start ({reply}): '
          f'{child.errors[-2000:]}'
        )
      child.idle, child.task = True, None
    self._keep(lambda child: not child.ended)
    return replies


class _Child:
  """A process, and what it is doing.

  Attributes:
    process: it.
    idle: whether it waits for a request.
    task: the number of the request that it works on; None as it starts.
    deadline: by `time.monotonic`, of what it is doing.
    ended: whether it is no more.
    errors: what it said of why it did not start.
  """

  def __init__(self, function, timeout_s, memory_bytes):
    # A fresh interpreter: forking one with JAX's threads can deadlock.
    self.process = subprocess.Popen(
      [
        *(sys.executable, '-P', '-m', __name__),
        *(function, str(timeout_s), str(memory_bytes)),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    self.idle, self.task, self.ended = False, None, False
    self.deadline = time.monotonic() + _START_S
    self.errors = ''

  def send(self, task, request, timeout_s):
    self.idle, self.task = False, task
    self.deadline = time.monotonic() + timeout_s
    # If it has ended, `receive` will find that.
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
    if self.ended:
      return
    self.ended = True
    self.process.kill()
    self.process.wait()
    self.errors = self.process.stderr.read().decode(errors='replace')
    for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
      pipe.close()


def _end_all(children) -> None:
  for child in children:
    child.end()
  children.clear()


def _serve(function: str, timeout_s: float, memory_bytes: int) -> None:
  """Answers the requests of a pool until there is no pool."""
  resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # For the pool to handle.
  replies, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)  # Whatever is printed is no reply.
  module, _, name = function.partition(':')
  call = getattr(importlib.import_module(module), name)
  os.dup2(nowhere, 2)
  os.write(replies, _READY.encode())
  for line in sys.stdin.buffer:
    # The kernel ends it where the pool was killed before it could.
    signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
    reply = call(*json.loads(line))
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.write(replies, reply.encode())


if __name__ == '__main__':
  _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
