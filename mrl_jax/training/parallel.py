"""Runs the same function for every policy at the same time."""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures

from mrl_jax import cluster
from mrl_jax.training import worker as worker_lib


def each(
  function: Callable[[worker_lib.Worker], object],
  workers: Mapping[str, worker_lib.Worker],
  cancel: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, object]]:
  """Yields the name of each policy and its result, in the order of finishing.

  Every policy has a thread. Policies that share a device take turns: programs of
  several devices must be started on all of them in one order. So do all policies
  of a cluster, whose hosts start programs in one order too. After an error, or an
  interruption, `cancel` is called, and what runs is waited for.
  """
  devices = [d for w in workers.values() for d in w.spec.mesh.devices.flat]
  takes_turns = len({*devices}) < len(devices) or cluster.size() > 1
  with futures.ThreadPoolExecutor(
    1 if takes_turns or not workers else len(workers)
  ) as pool:
    started = {pool.submit(function, w): name for name, w in workers.items()}
    try:
      for future in futures.as_completed(started):
        yield started[future], future.result()
    except BaseException:
      cancel()
      pool.shutdown(cancel_futures=True)
      raise
