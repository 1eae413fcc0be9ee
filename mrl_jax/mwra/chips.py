"""The accelerators that slices are planned for, with the source of each figure.

Figures are those of one device as jax lists it. A device is a chip, with two
exceptions: a chip of tpu7x is two devices, each with half of everything; and
v4, whose two cores are one device on hardware, is listed as two devices a chip
in topologies for ahead-of-time compilation, where the figures do not hold.
"""

import dataclasses
import math

from mrl_jax import checks

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """What one device of an accelerator holds and how fast it is."""

  kinds: tuple[str, ...]  # Names in `jax.Device.device_kind`.
  hbm_bytes: float  # Memory that programs can use.
  flops: float  # Peak bf16 operations a second, without sparsity.
  hbm_bandwidth: float  # Bytes a second.
  # Bytes a second that a device sends over all its links (ICI, NVLink) together;
  # data sheets give both directions together, which is twice that.
  link_bandwidth: float
  # Seconds of a message between neighbours, whatever its size: about a
  # microsecond on TPU, https://jax-ml.github.io/scaling-book/sharding.
  hop: float = 1e-6
  # Packed rows of a device in a micro-batch, where more are not faster.
  rows: int | None = None


# Memory of TPUs: "exceeds available HBM" in the error of a program that is too
# large, compiled ahead of time with libtpu 0.0.42. jax names kinds in
# jax/_src/pallas/mosaic/tpu_info.py.
CHIPS = {
  # https://cloud.google.com/tpu/docs/v4: 275 TFLOPs, 1200 GBps. Memory:
  # github.com/erfanzar/EasyDeL/issues/166 ("of 30.75G hbm"). Links: six of
  # 45 GB/s, https://jax-ml.github.io/scaling-book/tpus.
  'v4': Chip(
    kinds=('TPU v4',),
    hbm_bytes=30.75 * _GIB,
    flops=275e12,
    hbm_bandwidth=1.2e12,
    link_bandwidth=270e9,
  ),
  # https://cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 819 GBps, ICI of 400 GBps
  # both ways.
  'v5e': Chip(
    kinds=('TPU v5 lite', 'TPU v5e'),
    hbm_bytes=15.75 * _GIB,
    flops=197e12,
    hbm_bandwidth=819e9,
    link_bandwidth=200e9,
  ),
  # https://cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 2765 GBps, ICI of
  # 1200 GBps both ways.
  'v5p': Chip(
    kinds=('TPU v5', 'TPU v5p'),
    hbm_bytes=95.73 * _GIB,
    flops=459e12,
    hbm_bandwidth=2765e9,
    link_bandwidth=600e9,
  ),
  # https://cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 1638 GBps, ICI of 800 GBps
  # both ways.
  'v6e': Chip(
    kinds=('TPU v6 lite', 'TPU v6e'),
    hbm_bytes=31.24 * _GIB,
    flops=918e12,
    hbm_bandwidth=1638e9,
    link_bandwidth=400e9,
  ),
  # https://cloud.google.com/tpu/docs/tpu7x, halved for two devices a chip: 2307
  # TFLOPs, 7380 GBps, ICI of 1200 GBps both ways.
  'tpu7x': Chip(
    kinds=('TPU7x',),
    hbm_bytes=94.74 * _GIB,
    flops=2307e12 / 2,
    hbm_bandwidth=7380e9 / 2,
    link_bandwidth=300e9,
  ),
  # https://www.nvidia.com/en-us/data-center/h100, the SXM column: 1,979 TFLOPS
  # with sparsity, 80 GB, 3.35 TB/s, NVLink of 900 GB/s both ways. DGX H100 has
  # eight.
  'h100': Chip(
    kinds=('NVIDIA H100 80GB HBM3',),
    hbm_bytes=80e9,
    flops=1979e12 / 2,
    hbm_bandwidth=3.35e12,
    link_bandwidth=450e9,
  ),
  # https://www.nvidia.com/en-us/data-center/h200, the SXM column: 1,979 TFLOPS
  # with sparsity, 141 GB, 4.8 TB/s, NVLink of 900 GB/s both ways.
  'h200': Chip(
    kinds=('NVIDIA H200',),
    hbm_bytes=141e9,
    flops=1979e12 / 2,
    hbm_bandwidth=4.8e12,
    link_bandwidth=450e9,
  ),
  # Devices emulated on one machine share its memory and cores: the figures are
  # of the right order for a core, and only their ratios matter.
  'cpu': Chip(
    kinds=('cpu',),
    hbm_bytes=math.inf,
    flops=5e10,
    hbm_bandwidth=1e10,
    link_bandwidth=5e9,
    hop=1e-4,
    # An odd number has no half that would have to be compiled too.
    rows=3,
  ),
}

_FLAT = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_SOLID = ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8')
# Shapes of TPU slices, in chips; Cloud TPU has one of each number of chips.
SLICES = {
  'v4': _SOLID,
  'v5e': _FLAT,
  'v5p': _SOLID,
  'v6e': _FLAT,
  'tpu7x': _SOLID,
}

KINDS = {kind: chip for chip in CHIPS.values() for kind in chip.kinds}


def by_kind(kind: str) -> Chip:
  """The chip that jax calls `kind`; raises InputError for one not in the table."""
  return checks.choose(kind, KINDS, 'kind of device')
