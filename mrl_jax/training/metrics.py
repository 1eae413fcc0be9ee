"""Metrics on disk: `metrics.jsonl` and TensorBoard events."""

from collections.abc import Mapping
import json
import os

import tensorboardX

from mrl_jax import files

TIMING = 'timing'  # What differs from run to run is kept apart under this key.


class Writer:
  """Writes one object a round and policy; a resumed run continues the file."""

  def __init__(self, folder: str, rounds_done: int):
    self._path = os.path.join(folder, 'metrics.jsonl')
    kept = [row for row in read(self._path) if row['round'] < rounds_done]
    # What was written after the checkpoint will be written again.
    files.write(self._path, ''.join(json.dumps(row) + '\n' for row in kept))
    self._events = tensorboardX.SummaryWriter(
      os.path.join(folder, 'tensorboard'), purge_step=rounds_done
    )

  def write(self, round: int, policy: str, values: Mapping) -> None:
    row = {'round': round, 'policy': policy, **values}
    with open(self._path, 'a', encoding='utf-8') as lines:
      lines.write(json.dumps(row) + '\n')
    for name, value in _scalars(values):
      self._events.add_scalar(f'{policy}/{name}', value, round)

  def close(self) -> None:
    self._events.close()


def _scalars(values, prefix=''):
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _scalars(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value


def read(path: str) -> list[dict]:
  """The rows of a `metrics.jsonl`, up to a line that a kill cut short."""
  rows = []
  if os.path.exists(path):
    with open(path, encoding='utf-8') as lines:
      for line in lines:
        if not line.endswith('\n'):
          break
        rows.append(json.loads(line))
  return rows
