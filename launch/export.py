"""Writes a trained policy as a Hugging Face folder.

python launch/export.py --checkpoint=runs/DIR --policy=llama --out=DIR

`transformers.AutoModelForCausalLM.from_pretrained(DIR)` loads it; with
--adapters, `peft` does.
"""

import sys

from absl import app
from absl import flags
from absl import logging

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'The work dir of a run.')
_POLICY = flags.DEFINE_string('policy', None, 'The name of the policy.')
_OUT = flags.DEFINE_string('out', None, 'The folder to write.')
_ROUNDS = flags.DEFINE_integer(
  'rounds', None, 'Of the checkpoint; by default the newest.'
)
_DTYPE = flags.DEFINE_string(
  'dtype',
  '',
  'float32, bfloat16 or float16; by default as the model was imported.',
)
_ADAPTERS = flags.DEFINE_bool(
  'adapters', False, 'Only the adapters, as PEFT has them; else merged.'
)
_SHARD_MIB = flags.DEFINE_integer(
  'shard_mib', 4096, 'Of one file of weights, at most.', lower_bound=1
)


def main(argv):
  if len(argv) > 1:
    sys.exit(f'not a flag: {argv[1]!r}')
  # Imported when a mistake in the flags has been reported.
  import jax

  from mrl_jax import checks
  from mrl_jax.training import export

  logging.set_verbosity(logging.ERROR)  # Orbax warns that it only reads.
  jax.config.update('jax_platforms', 'cpu')
  try:
    rounds = export.export(
      _CHECKPOINT.value,
      _POLICY.value,
      _OUT.value,
      rounds=_ROUNDS.value,
      dtype=_DTYPE.value,
      adapters=_ADAPTERS.value,
      shard_bytes=_SHARD_MIB.value * 2**20,
    )
  except (checks.InputError, OSError) as error:
    sys.exit(f'{error}')
  print(f'{_POLICY.value} after {rounds} rounds is in {_OUT.value}')


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'policy', 'out'])
  app.run(main)
