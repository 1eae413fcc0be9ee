"""Topologies by the names of libtpu, such as 'v5p:2x2x4', 'h100:16' or 'cpu:8'."""

import itertools
import math

from mrl_jax.mwra import topology

# Chips of a host along each dimension: `process_index` of the devices in
# `jax.experimental.topologies`.
_HOSTS = {
  'v4': (2, 2, 1),
  'v5e': (2, 2),
  'v5p': (2, 2, 1),
  'v6e': (2, 2),
  'tpu7x': (2, 2, 1),
  'h100': (8,),
  'h200': (8,),
  'cpu': (math.inf,),
}
# Slices of up to so many chips also come as a single host.
_ALONE = {'v5e': (2, 4), 'v6e': (2, 4)}
_CORES = {'tpu7x': 2}  # Devices of a chip.


def named(name: str) -> topology.Topology:
  """The topology of a name.

  Devices are in the order in which jax lists them: host by host, the first
  coordinate fastest.
  """
  kind, _, text = name.partition(':')
  sizes, host = [int(size) for size in text.split('x')], _HOSTS[kind]
  alone = _ALONE.get(kind, ())
  if alone and math.prod(sizes) <= math.prod(alone):
    host = alone
  host = tuple(map(min, host, sizes))
  coords = itertools.product(*map(range, reversed(sizes)))
  places = [
    (tuple(x // n for x, n in zip(at, host[::-1], strict=True)), at[::-1])
    for at in coords
  ]
  hosts = {host: i for i, host in enumerate(sorted({h for h, _ in places}))}
  places.sort(key=lambda place: place[0])
  return topology.build(
    [
      topology.Place(
        process=hosts[host], coords=at if len(at) > 1 else (), core=core
      )
      for host, at in places
      for core in range(_CORES.get(kind, 1))
    ]
  )
