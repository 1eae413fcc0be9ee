"""The hosts that train together: a cluster of `jax.distributed` processes.

All of them run the same program on the same data, and each has its part of
every array. Process 0 leads: it decides what could differ between hosts, such
as what peers sent, what a verifier found in time, or whether a file exists, and
it alone writes. The functions here are called in the same order by all
processes, each by one thread at a time. No wait outlives a host that is late or
lost, and errors name it.

A process that never called `start` is a cluster of its own: it decides, and
nothing else here does anything.
"""

from collections.abc import Callable, Mapping
import hashlib
import math
import os
import socket
import sys
import threading
from typing import NoReturn, TypeVar

import jax
import ml_collections
import msgspec
import numpy as np

from mrl_jax import checks
from mrl_jax import member as member_lib

AUTO = 'auto'  # Has jax find the hosts of a Cloud TPU slice by itself.
_DECIDED = (
  b'='  # Before what the leader decided; before an error is another byte.
)
LostHostError = member_lib.LostHostError
# Of those who wait for a leader that may be waiting for peers, or verify for
# long; if it is lost, they end.
PATIENCE_S = 30 * 24 * 3600.0
_Value = TypeVar('_Value')


class _Alone:
  """One process."""

  process, processes = 0, 1


_member: _Alone | member_lib.Member = _Alone()


def start(config: ml_collections.ConfigDict) -> None:
  """Joins the cluster of `config.cluster`, if it names one.

  Call it before anything touches a device. On a Cloud TPU VM, 'auto' has jax ask
  the metadata server (on GKE, the environment) for the hosts of this slice, and
  the first of them listens on port 8482. Slices that are created one by one are
  clusters of their own. Those that are created as one multislice, which sets
  MEGASCALE_COORDINATOR_ADDRESS, are one cluster, and can train one policy.

  Raises InputError if the cluster cannot be joined.
  """
  global _member
  if not config.coordinator:
    checks.require(
      not (config.processes or config.process),
      'cluster.processes and cluster.process are given without '
      'cluster.coordinator = HOST:PORT, where process 0 listens',
    )
    return
  arguments = {} if config.coordinator == AUTO else _arguments(config)
  jax.config.update('jax_enable_preemption_service', False)  # It hears SIGTERM.
  member_lib.on_abort(lambda: _give_up(config, 'was refused by others'))
  # After its own deadline, jax would end the process with a stack trace.
  waited = f'is still waiting for others after {config.wait_s:g} s'
  late = threading.Timer(config.wait_s, _give_up, [config, waited])
  late.daemon = True
  late.start()
  try:
    jax.distributed.initialize(
      **arguments,
      cluster_detection_method='deactivate' if arguments else None,
      initialization_timeout=math.ceil(config.wait_s) + 60,
      shutdown_timeout_seconds=math.ceil(config.wait_s),
      # Twice that of `watch`, which says more.
      heartbeat_timeout_seconds=math.ceil(2 * config.lost_s),
    )
  except (RuntimeError, ValueError) as error:
    raise checks.InputError(
      f'cluster.coordinator = {config.coordinator}: {error}'
    ) from error
  finally:
    late.cancel()
  state = jax._src.distributed.global_state  # No public function has these.
  checks.require(
    config.processes in (0, state.num_processes),
    f'cluster.processes = {config.processes}, but jax finds '
    f'{state.num_processes} hosts: the slice has another size than planned',
  )
  if state.num_processes > 1:
    _member = member_lib.Member(state, config.wait_s, config.lost_s)
    _member.introduce()
    member_lib.on_abort(_member.explain_abort)
    threading.Thread(target=_member.watch, name='hosts', daemon=True).start()


def _arguments(config) -> dict:
  """How jax reaches a cluster that it cannot find by itself."""
  checks.require(
    0 <= config.process < config.processes,
    f'cluster.process = {config.process} with cluster.processes = '
    f'{config.processes}; processes are numbered from 0',
  )
  if config.process == 0:
    _check_port(config.coordinator)
  # On CPU. A process with one device would start a program before the last one
  # has ended, and gloo would mix up their messages.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  return {
    'coordinator_address': config.coordinator,
    'num_processes': config.processes,
    'process_id': config.process,
  }


def _check_port(coordinator):
  """Refuses a second leader: gRPC would let both listen, and neither starts."""
  _, _, port = coordinator.rpartition(':')
  checks.require(
    port.isdigit() and 0 < int(port) < 2**16,
    f'cluster.coordinator = {coordinator}; it must be HOST:PORT, or {AUTO}',
  )
  try:
    socket.create_server(('', int(port))).close()
  except OSError as error:
    raise checks.InputError(
      f'cluster.coordinator = {coordinator}: process 0 cannot listen there: '
      f'{error.strerror}. Has another process the number 0?'
    ) from error


def _give_up(config, why):
  print(
    f'cluster.coordinator = {config.coordinator}: process {config.process} of '
    f'{config.processes or "the slice"} {why}. Is every process started once, '
    'with a number of its own, and can it reach this address?',
    file=sys.stderr,
    flush=True,
  )
  os._exit(1)


def leads() -> bool:
  """Whether this process decides, writes, and talks to peers."""
  return _member.process == 0


def size() -> int:
  """The number of processes."""
  return _member.processes


def gather(what: str, value: _Value) -> list[_Value]:
  """The values of all processes, which msgpack can hold, in their order.

  `what` names the place in the program, for errors.
  """
  return [value] if size() == 1 else _member.gather(what, value)


def barrier(what: str, wait_s: float = 0.0) -> None:
  """Waits for all processes; raises `LostHostError` after `wait_s`.

  By default, that is `cluster.wait_s`.
  """
  if size() > 1:
    _member.gather(what, None, wait_s)


def share(what: str, data: bytes | None, wait_s: float = 0.0) -> bytes:
  """The leader's bytes; others give None, and wait `wait_s` at most for them."""
  return data if size() == 1 else _member.share(what, data, wait_s)


def decided(
  what: str,
  decide: Callable[[], _Value],
  type: object = object,
) -> _Value:
  """What `decide()` returns in the leader, which alone calls it.

  Its type is one that msgspec can convert to and from msgpack. An error is raised
  in all processes.
  """
  if size() == 1:
    return decide()
  if not leads():
    data = share(what, None, PATIENCE_S)
    if data[:1] == _DECIDED:
      return msgspec.msgpack.decode(memoryview(data)[1:], type=type)
    raise checks.InputError(data[1:].decode())
  try:
    value = decide()
    data = _DECIDED + msgspec.msgpack.encode(value)
  except Exception as error:
    share(what, f'!host 0, at {what}: {error or repr(error)}'.encode())
    raise
  share(what, data)
  return value


def leader_first(what: str, function: Callable[[], _Value]) -> _Value:
  """Calls a function in all processes, but in the leader before the others.

  If they share a folder, those find there what it makes.
  """
  found = []
  decided(what, lambda: found.append(function()))
  return found[0] if found else function()


def agree(what: str, values: Mapping[str, object]) -> None:
  """Requires that all processes have the same values, before they are used.

  Values are compared by digests: text, numbers, and trees of numpy arrays.
  Arrays that are on devices already are compared by their shapes. Raises
  InputError, which names hosts and values that differ, in every process.
  """
  if size() == 1:
    return
  digests = {name: digest(value) for name, value in values.items()}
  differing = _member.differing(what, digests)
  checks.require(
    not differing,
    f'the hosts differ at {what}. Against host 0, {differing}. Give all of '
    'them the same flags, files and versions',
  )


def digest(tree) -> str:
  """Sixteen characters that are equal for equal trees."""
  leaves, structure = jax.tree.flatten(tree)
  made = hashlib.blake2b(str(structure).encode(), digest_size=8)
  for leaf in leaves:
    if isinstance(leaf, np.ndarray):
      made.update(f'{leaf.dtype}{leaf.shape}'.encode())
      made.update(np.ascontiguousarray(leaf).tobytes())
    elif isinstance(leaf, jax.Array):
      made.update(f'{leaf.dtype}{leaf.shape}'.encode())
    else:
      made.update(repr(leaf).encode())
  return made.hexdigest()


def end() -> None:
  """Waits some seconds for the others, before processes exit one by one."""
  if size() > 1:
    _member.end()


def leave(status: int) -> NoReturn:
  """Ends this process after an error; in a cluster, without the others.

  Those that failed for the same reason can say so first. For others this
  process is lost.
  """
  if size() == 1:
    sys.exit(status)
  _member.end()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
