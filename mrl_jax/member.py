"""A process of a cluster: its messages to the other hosts, and who is lost.

They go through the key-value store that `jax.distributed` has in process 0.
"""

from collections.abc import Callable, Collection, Mapping
import contextlib
import ctypes
import hashlib
import itertools
import math
import os
import signal
import socket
import sys
import time

import jax
import msgspec

from mrl_jax import checks

_CHUNK = 2**20  # Bytes of a message: gRPC refuses those above 4 MiB.
_BEATS = 10  # Signs of life in the time after which a host is lost.
_LATE = 2  # If jax says that one is lost, it is one that missed so many.
_PROBE_S = 2.0  # To connect to process 0.
_LAST_S = 1.0  # The leader ends so much later than the others.
_ALIVE, _END = 'mrl_jax/alive', 'mrl_jax/end'
_HELP = (
  'Look into the log there; then start all hosts again with the same command, '
  'which resumes the run'
)


_HANDLERS = []  # Those that C may call stay in memory.


class LostHostError(RuntimeError):
  """A host did not come in time; the message names it."""


def on_abort(explain: Callable[[], object]) -> None:
  """Calls `explain` before this process aborts.

  jax aborts when a host is lost or refused, in a thread of C++: it has no
  callback that Python can have, and no handler of Python's `signal` would run.
  """
  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: explain())
  _HANDLERS.append(handler)
  ctypes.CDLL(None).signal(signal.SIGABRT, handler)


class Member:
  """One of several processes; all call the same methods in the same order."""

  def __init__(self, state, wait_s: float, lost_s: float):
    """`state` is that of `jax.distributed`."""
    self.process, self.processes = state.process_id, state.num_processes
    self._client, self._address = state.client, state.coordinator_address
    self._wait_s, self._lost_s = wait_s, lost_s
    self._steps = itertools.count()
    self._read = []  # Keys that every process has read by the next `gather`.
    self._names = [f'host {i}' for i in range(self.processes)]
    self._is_watching = True
    self._seen = {}  # The last beat of each host, and when it was heard.

  def introduce(self) -> None:
    """Learns the names of all hosts."""
    found = self.gather('the start', (socket.gethostname(), self.processes))
    self._names = [f'host {i} ({name})' for i, (name, _) in enumerate(found)]
    counts = sorted({count for _, count in found})
    checks.require(
      counts == [len(found)],
      f'cluster.processes is {" and ".join(map(str, counts))} in {len(found)} '
      'processes of one cluster; give all of them the same number',
    )

  def gather(self, what: str, value, wait_s: float = 0.0) -> list:
    key, wait_s = self._key(), wait_s or self._wait_s
    data = msgspec.msgpack.encode((what, value))
    self._client.key_value_set_bytes(f'{key}/{self.process}', data)
    try:
      self._client.wait_at_barrier(key, math.ceil(1000 * wait_s))
    except jax.errors.JaxRuntimeError as error:
      raise self._lost(error, key, f'reach {what}', wait_s) from error
    found = self._values(key)
    values = [msgspec.msgpack.decode(found[i]) for i in sorted(found)]
    self._require_same_step({i: name for i, (name, _) in enumerate(values)})
    if self.process == 0:
      for old in self._read:
        self._client.key_value_delete(f'{old}/')
    self._read = [key]
    return [value for _, value in values]

  def share(self, what: str, data: bytes | None, wait_s: float) -> bytes:
    key, wait_s = self._key(), wait_s or self._wait_s
    self._read.append(key)
    if self.process == 0:
      chunks = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]
      for i, chunk in enumerate(chunks):
        self._client.key_value_set_bytes(f'{key}/{i + 1}', chunk)
      head = msgspec.msgpack.encode((what, len(chunks)))
      self._client.key_value_set_bytes(f'{key}/0', head)  # Last: all is there.
      return data

    def get(i):
      return self._client.blocking_key_value_get_bytes(
        f'{key}/{i}', math.ceil(1000 * wait_s)
      )

    try:
      theirs, count = msgspec.msgpack.decode(get(0))
      data = b''.join(get(i + 1) for i in range(count))
    except jax.errors.JaxRuntimeError as error:
      raise self._lost(error, '', f'share {what}', wait_s) from error
    self._require_same_step({0: theirs, self.process: what})
    return data

  def differing(self, what: str, digests: Mapping[str, str]) -> str:
    """Values of other hosts that are not the leader's; empty if there are none."""
    whole = hashlib.sha256(repr(sorted(digests.items())).encode()).digest()
    if len({*self.gather(what, whole)}) == 1:
      return ''
    leader, *others = self.gather(what, dict(digests))
    lines = []
    for i, mine in enumerate(others, 1):
      names = sorted({*leader, *mine})
      names = [n for n in names if leader.get(n) != mine.get(n)]
      if names:
        lines.append(f'{self._names[i]}: {", ".join(names)}')
    return '; '.join(lines)

  def end(self) -> None:
    """Waits a little until all hosts end; from now on, none is lost."""
    wait_s = self._lost_s + 1  # `watch` names a host that is lost first.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.wait_at_barrier(_END, math.ceil(1000 * wait_s))
    self._is_watching = False
    if self.process == 0:  # jax aborts those whose leader is gone.
      time.sleep(_LAST_S)

  def watch(self) -> None:
    """Ends this process when another one has been silent for too long."""
    for beat in itertools.count():
      try:
        self._client.key_value_set_bytes(
          f'{_ALIVE}/{self.process}', b'%d' % beat, allow_overwrite=True
        )
        found = self._values(_ALIVE)
      except jax.errors.JaxRuntimeError:  # Without a leader, jax aborts.
        found = {}
      for i, theirs in found.items():
        if i not in self._seen or self._seen[i][0] != theirs:
          self._seen[i] = theirs, time.monotonic()
      silent = self._silent(self._lost_s)
      if silent and self._is_watching:
        self._exit(silent, f'nothing was heard for {self._lost_s:g} s')
      time.sleep(self._lost_s / _BEATS)

  def explain_abort(self) -> None:
    """Says which host is lost, if jax aborts for that."""
    if not self._is_watching:
      return
    silent = self._silent(self._lost_s / _BEATS * _LATE)
    if not _is_reachable(self._address):
      self._exit([0], 'it cannot be reached')
    elif silent:
      self._exit(silent, 'it fell silent, or was started again')
    else:
      print(
        'This process aborts for what the lines above say. If they name no '
        'reason, two processes may have the same number',
        file=sys.stderr,
        flush=True,
      )

  def _silent(self, seconds) -> list[int]:
    now = time.monotonic()
    return [i for i, (_, at) in self._seen.items() if now - at > seconds]

  def _exit(self, lost, why):
    print(self._explained(lost, why), file=sys.stderr, flush=True)
    os._exit(os.EX_TEMPFAIL)  # As a run that was stopped and can resume.

  def _explained(self, lost: Collection[int], why: str) -> str:
    return f'{self._list(lost)} of the cluster is lost: {why}. {_HELP}'

  def _lost(self, error, key, what, wait_s) -> LostHostError:
    """The error of a wait that failed: for the leader, or for values at `key`."""
    if 'DEADLINE_EXCEEDED' not in str(error) and not _is_reachable(
      self._address
    ):
      return LostHostError(self._explained([0], 'it cannot be reached'))
    late = {*range(self.processes)} - {*self._values(key)} if key else {0}
    return LostHostError(
      f'{self._list(late)} did not {what} within {wait_s:g} s of '
      f'{self._names[self.process]}. {_HELP}'
    )

  def _key(self) -> str:
    return f'mrl_jax/{next(self._steps)}'

  def _values(self, key) -> dict[int, bytes]:
    """What processes have set, by process."""
    found = self._client.key_value_dir_get_bytes(f'{key}/')
    return {int(name.rpartition('/')[2]): data for name, data in found}

  def _require_same_step(self, steps: Mapping[int, str]):
    checks.require(
      len({*steps.values()}) == 1,
      'the hosts do not run in step: '
      + ', '.join(f'{self._names[i]} is at {s}' for i, s in steps.items())
      + '. Give all of them the same flags, files and versions',
    )

  def _list(self, processes: Collection[int]) -> str:
    return ' and '.join(self._names[i] for i in sorted(processes)) or 'a host'


def _is_reachable(address: str) -> bool:
  host, _, port = address.rpartition(':')
  try:
    socket.create_connection((host.strip('[]'), int(port)), _PROBE_S).close()
  except OSError:
    return False
  return True
