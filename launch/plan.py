"""Plans a run on devices that need not be there, and lets XLA check the plan.

python launch/plan.py --config=configs/pairs/mrl.py --topology=v5e:2x4 --compile

It needs neither weights nor data: prompts are as long as the config allows. With
--compile, XLA compiles every program of every policy; the exit status is 1 if one
does not fit.
"""

import sys

from absl import app
from absl import flags
from absl import logging
import msgspec
from rich import console as console_lib
import tpu_pod

_TOPOLOGY = flags.DEFINE_string(
  'topology',
  None,
  'A TPU slice such as v5p:2x2x4; by default, the devices of this machine. '
  "Needs pip install -e '.[tpu]', but no TPU.",
)
_COMPILE = flags.DEFINE_bool('compile', False, 'Let XLA check the plan.')
_JSON = flags.DEFINE_string('json', None, 'A file to write the figures to.')


def main(_):
  # Imported after flags are parsed: a mistake in them is reported at once.
  import jax

  from mrl_jax import algorithms
  from mrl_jax import checks
  from mrl_jax import config as config_lib
  from mrl_jax import files
  from mrl_jax.training import display
  from mrl_jax.training import planning
  from mrl_jax.training import proof

  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)
  config, console = tpu_pod.CONFIG.value, console_lib.Console()
  devices = config_lib.settle_devices(config)
  jax.config.update('jax_num_cpu_devices', devices)
  try:
    config_lib.check(config)
    topology = _TOPOLOGY.value
    devices = proof.devices(topology) if topology else jax.devices()
    method = algorithms.build(config.method)
    sizes = planning.without_data(config)
    plan = planning.plan(config, method, sizes, devices, planning.load_config)
    described, proofs = planning.describe(config, plan, devices), {}
    display.show_plan(console, described)

    def write():
      figures = {
        'plan': msgspec.to_builtins(described),
        'proofs': proof.figures(proofs),
      }
      text = msgspec.json.format(msgspec.json.encode(figures), indent=2)
      files.write(_JSON.value, text + b'\n')

    if _JSON.value:
      write()
    if _COMPILE.value:
      with console.status('') as status:
        for name, result in proof.prove(
          config, method, sizes, plan, devices, status.update, topology
        ):
          proofs.setdefault(name, []).append(result)
          console.out(proof.line(name, result), highlight=False)
          if _JSON.value:  # Of what is known so far: the rest takes minutes.
            write()
      proof.show(console, proofs)
  except (checks.InputError, OSError) as error:
    sys.exit(f'{error}')
  sys.exit(not all(p.fits for each in proofs.values() for p in each))


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main, flags_parser=tpu_pod.parse)
