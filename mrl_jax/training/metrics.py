"""Metrics on disk: JSON lines, and events for TensorBoard."""

from collections.abc import Iterable, Mapping
import json
import os

import numpy as np
import tensorboardX

from mrl_jax import files
from mrl_jax import texts

TIMING = 'timing'  # What differs from run to run is kept apart under this key.
ROUNDS, EVALUATIONS = 'metrics.jsonl', 'evaluations.jsonl'

# Between the bins in which the logs of importance ratios are counted, in nats;
# the first and the last bin are open.
_BIN = 0.1
LOG_RATIO_EDGES = np.linspace(-1.95, 1.95, 40)
_HISTOGRAM = 'log_ratio_counts'

# TensorBoard has a section for each topic, and all policies in one chart.
_TOPICS = {
  'learning': ('reward', 'accuracy', 'all_fail_groups', 'zero_signal_groups',
               'rows_with_signal', 'rescue_rate', 'rescued_by'),
  'responses': ('response_length', 'stopped', 'entropy', 'rollouts',
                'verified'),
  'update': ('grad_norm', 'own', 'peer', 'mismatch'),
  'exchange': ('exchange', 'peer_records', 'peer_records_unused', 'peer_rows',
               'peer_rows_refused', 'refused'),
  'thl': ('residuals',),
  TIMING: (TIMING,),
}  # fmt: skip
_TOPIC = {name: topic for topic, names in _TOPICS.items() for name in names}
_OF_METHOD, _OF_EVALUATION = 'method', 'heldout'
_HEADLINE = 'heldout_accuracy'


class Writer:
  """Writes what a run finds, for people and for TensorBoard.

  `metrics.jsonl` has an object for each round and policy, `evaluations.jsonl`
  one for each evaluation and policy. A run that goes on continues them.
  """

  def __init__(
    self, folder: str, rounds_done: int | None, config: Mapping[str, object]
  ):
    """Opens the files of a work dir.

    Args:
      folder: the work dir.
      rounds_done: of the run so far; None if it has not even begun.
      config: its flat config, TensorBoard's hyper-parameters.
    """
    self._folder, self._config = folder, config
    self._done = -1 if rounds_done is None else rounds_done
    # What was written after the checkpoint will be written again.
    self._keep(ROUNDS, lambda row: row['round'] < self._done)
    self._keep(EVALUATIONS, lambda row: row['rounds'] <= self._done)
    self._events, self._accuracy, self._evaluated = {}, {}, 0

  def _keep(self, name, is_kept):
    path = os.path.join(self._folder, name)
    if os.path.exists(path):
      rows = filter(is_kept, read(path))
      files.write(path, ''.join(json.dumps(row) + '\n' for row in rows))

  def round(self, round: int, policy: str, values: Mapping) -> None:
    """Writes a row of a policy's round."""
    self._append(ROUNDS, {'round': round, 'policy': policy, **values})
    events = self._of(policy)
    for name, value in _leaves(values):
      first = name.partition('/')[0]
      if first == _HEADLINE:
        continue  # It is in the evaluation.
      topic = _TOPIC.get(first, _OF_METHOD)
      tag = name if first == topic else f'{topic}/{name}'
      if name.endswith(_HISTOGRAM):
        _add_histogram(events, tag, value, round)
      else:
        events.add_scalar(tag, value, round)

  def evaluation(self, rounds: int, policy: str, values: Mapping) -> None:
    """Writes an evaluation of a policy after so many rounds."""
    self._append(EVALUATIONS, {'rounds': rounds, 'policy': policy, **values})
    events = self._of(policy)
    self._accuracy[policy] = values['accuracy']['all']
    self._evaluated = rounds
    for part in ('accuracy', 'error'):
      for name, value in values[part].items():
        if value is not None:
          events.add_scalar(f'{_OF_EVALUATION}/{part}/{name}', value, rounds)
    for part in ('best', 'worst'):
      events.add_text(
        f'completions/{part}', _markdown(values[part]), global_step=rounds
      )

  def close(self) -> None:
    """Ends the files; the run's hyper-parameters have its last accuracies."""
    for events in self._events.values():
      events.close()
    if self._accuracy:
      accuracy = {f'{_HEADLINE}/{p}': a for p, a in self._accuracy.items()}
      config = {key: _plain(value) for key, value in self._config.items()}
      # `add_hparams` would also begin an empty run one folder up.
      with tensorboardX.SummaryWriter(self._place('hyperparameters')) as events:
        for part in tensorboardX.summary.hparams(config, accuracy):
          events.file_writer.add_summary(part)
        for name, value in accuracy.items():
          events.add_scalar(name, value, self._evaluated)

  def _append(self, name, row):
    with open(os.path.join(self._folder, name), 'a', encoding='utf-8') as lines:
      lines.write(json.dumps(row) + '\n')

  def _of(self, policy):
    if policy not in self._events:
      self._events[policy] = tensorboardX.SummaryWriter(
        self._place(policy), purge_step=max(self._done, 0)
      )
    return self._events[policy]

  def _place(self, name):
    return os.path.join(self._folder, 'tensorboard', name)


def _leaves(values, prefix='') -> Iterable[tuple[str, object]]:
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value


def _add_histogram(events, tag, counts, step):
  counts = np.asarray(counts, np.float64)
  ends = [*LOG_RATIO_EDGES, LOG_RATIO_EDGES[-1] + _BIN]
  middles = np.array(ends) - _BIN / 2
  there = middles[counts > 0]
  events.add_histogram_raw(
    tag,
    min=there.min(initial=0.0),
    max=there.max(initial=0.0),
    num=counts.sum(),
    sum=counts @ middles,
    sum_squares=counts @ middles**2,
    bucket_limits=ends,
    bucket_counts=counts,
    global_step=step,
  )


def _markdown(completions) -> str:
  """Each between its facts and as code, so that nothing in it is markup."""
  return '\n\n'.join(
    f'{c["verdict"]}, reward {c["reward"]:g}, {c["tokens"]} tokens, '
    f'{c["logp"]:.3f} nats a token\n\n'
    + _code(f'{c["prompt"]}\n{c["completion"]}\n[gold answer: {c["answer"]}]')
    for c in completions
  )


def _code(text):
  return '\n'.join('    ' + texts.printable(line) for line in text.split('\n'))


def _plain(value):
  return value if isinstance(value, bool | int | float | str) else str(value)


def read(path: str) -> list[dict]:
  """The rows of a file of lines, up to a line that a kill cut short."""
  rows = []
  if os.path.exists(path):
    with open(path, encoding='utf-8') as lines:
      for line in lines:
        if not line.endswith('\n'):
          break
        rows.append(json.loads(line))
  return rows
