"""Imports a model, and prints the peak memory of the process as JSON.

python tests/imports.py FOLDER
"""

import json
import re
import sys
import time

import jax
import numpy as np

from mrl_jax import config as config_lib
from mrl_jax import hugging_face
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from mrl_jax.training import pretrained


def main(folder: str) -> None:
  jax.config.update('jax_num_cpu_devices', 2)
  model = families.from_hugging_face(hugging_face.load_config(folder))
  mesh = jax.make_mesh((1, 2, 1), config_lib.MESH_AXES)
  jax.device_put(np.zeros(8)).block_until_ready()
  before = _kib('VmRSS')
  began = time.monotonic()
  params = jax.block_until_ready(pretrained.read(folder, model, mesh))
  seconds = time.monotonic() - began
  peak = _kib('VmHWM')
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  files = hf_weights.num_bytes(folder)
  print(
    json.dumps(
      {
        'peak_over_parameters': (peak - before) * 1024 / size,
        'megabytes': files / 1e6,
        'megabytes_per_second': files / 1e6 / seconds,
      }
    )
  )


def _kib(field: str) -> int:
  """A field of /proc/self/status: VmRSS is resident memory, VmHWM its peak."""
  with open('/proc/self/status') as f:
    return int(re.search(rf'{field}:\s+(\d+) kB', f.read())[1])


if __name__ == '__main__':
  main(sys.argv[1])
