"""Runs the same function for every policy at the same time."""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures

from mrl_jax.training import worker as worker_lib


def each(
  function: Callable[[worker_lib.Worker], object],
  workers: Mapping[str, worker_lib.Worker],
) -> Iterator[tuple[str, object]]:
  """Yields the name of each policy and its result, in the order of finishing.

  Policies that share a device take turns: programs of several devices must be
  started on all of them in one order.
  """
  devices = [d for w in workers.values() for d in w.spec.mesh.devices.flat]
  takes_turns = len({*devices}) < len(devices)
  with futures.ThreadPoolExecutor(1 if takes_turns else len(workers)) as pool:
    started = {pool.submit(function, w): name for name, w in workers.items()}
    for future in futures.as_completed(started):
      yield started[future], future.result()
