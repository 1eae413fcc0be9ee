"""Work dirs such as runs leave, made without running anything; no jax."""

from collections.abc import Mapping
import json
import pathlib

FAMILIES = ('formula/add', 'words/add', 'words/sub')
SETTINGS = {
  'train.rounds': 4,
  'train.prompts': 8,
  'train.samples': 4,
  'mwra.emulated_devices': 8,
  'method.name': 'grpo',
  'cache_dir': 'somewhere',
}


def row(round: int, policy: str, **values) -> dict:
  """A row of the metrics, as far as a study reads it."""
  return {
    'round': round,
    'policy': policy,
    'accuracy': 0.5,
    'all_fail_groups': 0.25,
    'grad_norm': 1.0,
    'own': {'ratio': 1.0},
    'timing': {'seconds': 2.0},
    **values,
  }


def write(
  folder: pathlib.Path,
  after: Mapping[str, float],
  *,
  before: float = 0.25,
  seed: int = 0,
  seconds: float = 100.0,
  rows: list[dict] | None = None,
  **settings,
) -> pathlib.Path:
  """Writes a run that is whole; settings as `train__rounds=2`."""
  changes = {key.replace('__', '.'): value for key, value in settings.items()}
  inputs = f'those of seed {seed}'
  shown = {f'policies.{n}.warm_start_families': FAMILIES[:2] for n in after}
  config = {**SETTINGS, **shown, 'seed': seed, 'inputs': inputs, **changes}
  rounds = config['train.rounds']
  if rows is None:
    rows = [row(r, policy) for r in range(rounds) for policy in after]
  summary = {
    'rounds': rounds,
    'seed': seed,
    'timing': {'seconds': seconds, 'exchange': 1.0},
    'policies': {
      name: {
        'heldout_accuracy': {'before': before, 'after': value},
        'heldout_accuracy_by_family': {
          'before': dict.fromkeys(FAMILIES, before),
          'after': dict.fromkeys(FAMILIES, value),
        },
      }
      for name, value in after.items()
    },
  }
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / 'summary.json').write_text(json.dumps(summary))
  lines = ''.join(json.dumps(values) + '\n' for values in rows)
  (folder / 'metrics.jsonl').write_text(lines)
  return folder
