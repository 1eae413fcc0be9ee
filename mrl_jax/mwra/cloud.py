"""Where a run on Cloud TPU is: its project, its bucket, a slice for each policy."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import NamedTuple

import ml_collections

from mrl_jax import checks
from mrl_jax.mwra import chips

_SLICE = re.compile(r'(\w+)=(\w+):([\dx]+)@([a-z0-9-]+)', re.ASCII)
_FOLDER = re.compile(r'(gs://[a-z0-9._-]+)/([a-z](?:[a-z0-9-]*[a-z0-9])?)/?')
_MAX_NAME = 61  # Characters of a TPU's name.
# Keys whose values the commands choose.
_CHOSEN = re.compile(
  r'cluster\..*|see\.(listen|tls\..*)|policies\.[^.]+\.(address|journal)'
)


class _Generation(NamedTuple):
  """How Cloud TPU names slices of a generation, and its image for jax."""

  type: str
  cores: int  # TensorCores of a chip, which `type` counts.
  runtime: str


# https://cloud.google.com/tpu/docs/runtimes. Slices of tpu7x are no queued
# resources.
_GENERATIONS = {
  'v4': _Generation('v4', 2, 'tpu-ubuntu2204-base'),
  'v5e': _Generation('v5litepod', 1, 'v2-alpha-tpuv5-lite'),
  'v5p': _Generation('v5p', 2, 'v2-alpha-tpuv5'),
  'v6e': _Generation('v6e', 1, 'v2-alpha-tpuv6e'),
}


class Slice(NamedTuple):
  """A TPU slice: 'v6e', '2x4', 'us-east5-b'."""

  generation: str
  shape: str
  zone: str

  @property
  def topology(self) -> str:
    return f'{self.generation}:{self.shape}'

  @property
  def accelerator(self) -> str:
    """The name of its type: 'v6e-8', or for v5p:2x2x4 'v5p-32'."""
    kind, sizes = _GENERATIONS[self.generation], self.shape.split('x')
    return f'{kind.type}-{math.prod(map(int, sizes)) * kind.cores}'

  @property
  def runtime(self) -> str:
    """The name of the image that its hosts boot."""
    return _GENERATIONS[self.generation].runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cloud:
  """Where a run is: its project, its folder in a bucket, and its slices."""

  project: str
  folder: str  # gs://BUCKET/RUN; each policy has its work dir in it.
  slices: Mapping[str, Slice]  # By policy.
  spot: bool = False  # Slices that may be taken away, for less.

  @property
  def run(self) -> str:
    return _FOLDER.fullmatch(self.folder)[2]

  @property
  def bucket(self) -> str:
    return _FOLDER.fullmatch(self.folder)[1]

  @property
  def inputs(self) -> str:
    return f'{self.bucket}/{self.run}/_inputs'  # No policy has such a name.

  def name(self, policy: str) -> str:
    """The name of a policy's slice."""
    return f'{self.run}-{policy.lower().replace("_", "-")}'


def parse_slices(given: Sequence[str]) -> dict[str, Slice]:
  """Slices from 'POLICY=GENERATION:SHAPE@ZONE'; raises InputError."""
  slices = {}
  for text in given:
    parts = _SLICE.fullmatch(text)
    checks.require(
      parts is not None,
      f'--slice={text}; it must be POLICY=GENERATION:SHAPE@ZONE, for example '
      'qwen3=v6e:2x4@us-east5-b',
    )
    policy, generation, shape, zone = parts.groups()
    checks.choose(generation, _GENERATIONS, f'generation in --slice={text}')
    shapes = dict.fromkeys(chips.SLICES[generation])
    checks.choose(shape, shapes, f'shape in --slice={text}')
    checks.require(policy not in slices, f'--slice={policy}=... is given twice')
    slices[policy] = Slice(generation, shape, zone)
  return slices


def check(
  cloud: Cloud, config: ml_collections.ConfigDict, given: Mapping[str, object]
) -> None:
  """Raises InputError unless the policies have slices, and names on them.

  `given` are the keys that the user set, with their values.
  """
  checks.require(
    _FOLDER.fullmatch(cloud.folder) is not None,
    f'--workdir={cloud.folder}; it must be gs://BUCKET/RUN, with a RUN of '
    'lowercase letters, digits and, within it, hyphens: slices are named after '
    'it',
  )
  checks.require(bool(cloud.project), '--project is missing')
  chosen = [key for key in given if _CHOSEN.fullmatch(key)]
  checks.require(
    not chosen,
    f'--config.{", --config.".join(chosen)}: the commands set what connects '
    'slices, and every policy is trained; leave it out',
  )
  for name in cloud.slices:
    checks.choose(name, dict(config.policies), 'policy in --slice')
  for name, policy in config.policies.items():
    checks.require(
      name in cloud.slices,
      f'policy {name} has no slice; give --slice={name}=v6e:2x4@ZONE or another',
    )
    checks.require(
      not (policy.address or policy.journal),
      f'policies.{name} has an address or a journal; every policy is trained',
    )
  names = [cloud.name(policy) for policy in config.policies]
  checks.require(
    len({*names}) == len(names)
    and all(
      len(n) <= _MAX_NAME and n.isascii() and n[-1].isalnum() for n in names
    ),
    f'the slices would be called {", ".join(names)}; names must differ, in '
    f'ASCII, end in a letter or digit, and have at most {_MAX_NAME} characters',
  )
