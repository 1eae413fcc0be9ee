"""Trains policies together, on a pod, a TPU VM or a laptop.

  python launch/tpu_pod.py --config=configs/xgrpo.py
  python launch/tpu_pod.py --config=configs/xgrpo.py --config.seed=1 \
    --config.train.rounds=20 --workdir=runs/mine
"""

import datetime
import os
import pathlib
import sys

from absl import app
from absl import flags
import jax
from ml_collections import config_flags
from rich import console as console_lib

# Config files import the one they are based on; they are not installed.
sys.path.append(os.fspath(pathlib.Path(__file__).parents[1]))

from mrl_jax import checks
from mrl_jax.training import loop

_CONFIG = config_flags.DEFINE_config_file('config', lock_config=True)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Where to write; the same folder again resumes. By default a fresh one '
  'under runs/.',
)


def main(argv):
  del argv
  config = _CONFIG.value
  workdir = _WORKDIR.value or os.path.join(
    'runs', f'{datetime.datetime.now():%Y%m%d-%H%M%S}-{config.method.name}'
  )
  jax.config.update('jax_num_cpu_devices', config.mwra.emulated_devices)
  loop.run(config, workdir, console_lib.Console())


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main)
