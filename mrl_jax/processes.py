"""Processes that answer requests, and are killed if they do not.

Code that works on untrusted text may never end, or take all memory, in ways that
no thread and no exception can stop. Requests and replies are lines of JSON:
nothing is unpickled.
"""

from collections.abc import Iterable, Sequence
from concurrent import futures
import contextlib
import functools
import importlib
import json
import mmap
from multiprocessing import connection
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref

TIMEOUT, CRASH = 'timeout', 'crash'

_READY = 'ready'
_START_S = 120.0  # Time for a process to import its function.
_PATIENCE = 30.0  # A call may take so much longer than its CPU time.
_GRACE_S = 1.0  # Time after that, until its process is killed from outside.
_MEMORY_BYTES = 2**30  # Address space of a process.
_MAX_PROCESSES = 4  # Unless a number is given.
_READ_BYTES = 2**16
_BLOCKED = signal.SIGINT, signal.SIGTERM  # The pool kills its processes.


class Pool:
  """Calls a function in several processes, each call with a deadline.

      with contextlib.closing(Pool('package.module:function', 5.0)) as pool:
        replies = pool.map([('an', 'argument'), ...])

  Deadlines are in seconds of the call's CPU time, so that results do not depend
  on what else the machine does. Processes are started when they are first
  needed. They run a fresh interpreter, so that they share no threads and no
  devices with this process, and they end when it ends, however it ends. For one
  thread at a time.
  """

  def __init__(self, function: str, timeout_s: float, processes: int = 0):
    """Starts nothing yet.

    The function takes and returns what JSON can express. There are at most so
    many processes; 0 is one per core, up to four.
    """
    self._function, self._timeout_s = function, timeout_s
    self.size = processes or min(_MAX_PROCESSES, os.cpu_count() or 1)
    self._children = [None] * self.size  # Until they are needed.
    self._idle = queue.LifoQueue()  # Indices of children.
    for i in range(self.size):
      self._idle.put(i)
    self.cpu_s = 0.0  # CPU time of all calls so far.
    self._counting = threading.Lock()
    # Kills all processes; also if the pool is garbage or the interpreter exits.
    self.close = weakref.finalize(self, _end_all, self._children)

  def map(
    self, requests: Iterable[Sequence], timeout_s: float | None = None
  ) -> list:
    """Calls the function for each request; returns its replies in order.

    A reply is 'timeout' if a call takes more CPU time than `timeout_s`, by
    default that of the pool; 'crash' if its process ends, or takes `_PATIENCE`
    times as long. The arguments of a call must fit in a pipe's buffer. Raises
    RuntimeError if the pool is closed, or a process does not start.
    """
    if not self.close.alive:
      raise RuntimeError('this pool of processes is closed')
    ask = functools.partial(self._ask, timeout_s or self._timeout_s)
    with futures.ThreadPoolExecutor(self.size) as threads:
      try:
        return list(threads.map(ask, requests))
      except BaseException:
        for child in filter(None, self._children):
          child.kill()  # Its thread stops waiting for a reply.
        raise

  def _ask(self, timeout_s: float, request: Sequence):
    i = self._idle.get()
    try:
      child = self._children[i]
      if child is None or child.process.poll() is not None:
        _end_all([child])
        child = self._children[i] = _Child(self._function)
        reply, _ = child.receive(_START_S)
        if reply != _READY:
          raise RuntimeError(
            f'a process for {self._function} does not start ({reply}): '
            f'{child.errors[-2000:].decode(errors="replace")}'
          )
      wait_s = timeout_s * _PATIENCE
      child.send([timeout_s, wait_s, *request])
      reply, seconds = child.receive(wait_s + _GRACE_S)
      with self._counting:
        self.cpu_s += timeout_s if reply == TIMEOUT else seconds
      return reply
    finally:
      self._idle.put(i)


class _Child:
  """A process, which says when it is ready and then answers requests."""

  def __init__(self, function: str):
    # A fresh interpreter: forking a process with JAX's threads can deadlock.
    # It inherits the mask: a signal to all processes of a job must not end it
    # before the round that needs its replies.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
      self.process = subprocess.Popen(
        [sys.executable, '-P', '-m', __name__, function],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={
          **os.environ,
          'PYTHONPATH': os.pathsep.join(sys.path),
          'PYTHONHASHSEED': '0',  # Replies must not depend on it.
          'OPENBLAS_NUM_THREADS': '1',  # On many cores they exceed the memory.
        },
        start_new_session=True,  # To kill it with its worker.
      )
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    self.errors = b''  # Its standard error, once it ended.

  def send(self, request: Sequence) -> None:
    # If the process has ended, `receive` will notice.
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.write(json.dumps(request).encode() + b'\n')

  def receive(self, wait_s: float) -> tuple[object, float]:
    """Waits for a reply and its CPU time; ends the process if there is none."""
    end, line = time.monotonic() + wait_s, b''
    while not line.endswith(b'\n'):
      left = max(end - time.monotonic(), 0)
      heard = connection.wait([self.process.stdout], left)
      part = self.process.stdout.read(_READ_BYTES) if heard else b''
      if not part:
        self.end()
        return CRASH, 0.0
      line += part
    return tuple(json.loads(line))

  def kill(self) -> None:
    if self.process.poll() is None:
      with contextlib.suppress(ProcessLookupError):  # It has just ended.
        os.killpg(self.process.pid, signal.SIGKILL)

  def end(self) -> None:
    with self.process:  # It waits for the end, and closes the pipes.
      self.kill()
      if not self.process.stderr.closed:
        self.errors = self.process.stderr.read()


def _end_all(children) -> None:
  for child in filter(None, children):
    child.end()


def _serve(function: str) -> None:
  """Answers in a worker; forks another one if it dies, which needs no imports."""
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  replies, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)  # What the function prints must not be a reply.
  module, _, name = function.partition(':')
  call = getattr(importlib.import_module(module), name)
  os.dup2(nowhere, 2)
  busy = mmap.mmap(-1, 1)  # Whether the worker is at a request.
  _reply(replies, _READY)
  while True:
    worker = os.fork()
    if not worker:
      try:
        _work(call, replies, busy)
      finally:
        os._exit(busy[0])
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if code == 0:
      return  # There are no more requests.
    if busy[0]:
      busy[0] = 0
      _reply(replies, TIMEOUT if code == -signal.SIGPROF else CRASH)


def _work(call, replies, busy) -> None:
  for line in sys.stdin.buffer:
    busy[0] = 1
    cpu_s, wait_s, *request = json.loads(line)
    began = time.process_time()
    # The kernel kills this process at either, even if the pool has ended.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wait_s)
    value = call(*request)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    busy[0] = 0
    _reply(replies, value, time.process_time() - began)


def _reply(replies, value, cpu_s=0.0) -> None:
  os.write(replies, json.dumps([value, cpu_s]).encode() + b'\n')


if __name__ == '__main__':
  _serve(sys.argv[1])
