"""Metrics on disk: JSON lines, and events for TensorBoard."""

import collections
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
import json
import os

from absl import logging
import msgspec
import numpy as np
import tensorboardX

from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax import texts
from mrl_jax import workdir

# TensorBoard has a section for each topic, and a chart has all policies.
_TOPICS = {
  'learning': 'reward accuracy all_fail_groups zero_signal_groups '
  'rows_with_signal rescue_rate rescued_by',
  'responses': 'response_length stopped entropy rollouts verified',
  'update': 'grad_norm slots own peer mismatch',
  'exchange': 'exchange peer_records peer_records_unused '
  'peer_responses_judged peer_rows peer_rows_refused refused',
  'thl': 'residuals',
  'method': 'method',
  'timing': 'timing',
}
_TOPIC = {n: topic for topic, names in _TOPICS.items() for n in names.split()}
_HEADLINE = 'heldout_accuracy'
_NOT_EVENTS = ('round', 'policy', _HEADLINE)  # The last is in evaluations.
_HISTOGRAM = 'log_ratio_counts'
# Of the bins of the histogram: its two open ones become as wide as the others.
_ENDS = np.linspace(-2.05, 2.05, len(config_lib.LOG_RATIO_EDGES) + 2)
_DAMAGED = '.damaged'  # Suffix of the file of lines that cannot be read.


class Writer:
  """Writes the metrics of a run to its work dir, and events for TensorBoard.

  `metrics.jsonl` has a line for each round and policy, `evaluations.jsonl` one
  for each evaluation and policy. A resumed run appends to them. Events are written
  by a thread, while the run goes on; an error there is raised by what is written
  next, or by `close`.
  """

  def __init__(
    self, folder: str, rounds_done: int | None, config: Mapping[str, object]
  ):
    """Opens the files of a work dir; `config` is the flat config.

    Lines about rounds after `rounds_done`, the rounds of the checkpoint that the
    run resumes from, are removed: they will be written again. A run that starts
    has None. Lines that cannot be read are moved to another file, and counted in
    a warning.
    """
    self._folder, self._config = folder, config
    self._done = -1 if rounds_done is None else rounds_done
    self._keep(workdir.ROUNDS, 'round', self._done - 1)
    self._keep(workdir.EVALUATIONS, 'rounds', self._done)
    self._events, self._accuracy, self._evaluated = {}, {}, 0
    self._thread = futures.ThreadPoolExecutor(1, 'events')
    self._pending = collections.deque()

  def _keep(self, name, key, last):
    """Keeps lines up to the round `last`; sets aside what cannot be read."""
    path = os.path.join(self._folder, name)
    if not os.path.exists(path):
      return
    with open(path, 'rb') as f:
      lines = f.read().splitlines(keepends=True)
    kept, damaged = [], []
    for line in lines:
      round = _round(line, key)
      if round is None:
        damaged.append(line.rstrip(b'\n') + b'\n')
      elif round <= last:
        kept.append(line)
    if damaged:
      with open(path + _DAMAGED, 'ab') as f:
        f.writelines(damaged)
      logging.warning(
        '%s: %d of %d lines could not be read, as a kill or damage leaves them. '
        'They were moved to %s; the others are kept',
        path,
        len(damaged),
        len(lines),
        path + _DAMAGED,
      )
    files.write(path, b''.join(kept))

  def round(self, row: workdir.RoundMetrics) -> None:
    """Writes the metrics of a policy's round."""
    values = msgspec.to_builtins(row)
    for sender, residual in row.residuals.items():
      values['residuals'][sender]['segmentation_error'] = (
        residual.segmentation_error
      )
    self._append(workdir.ROUNDS, values)
    self._later(self._round_events, row.policy, row.round, values)

  def _later(self, function: Callable, *arguments):
    while self._pending and self._pending[0].done():
      self._pending.popleft().result()
    self._pending.append(self._thread.submit(function, *arguments))

  def _round_events(self, policy, round, values):
    events = self._of(policy)
    for name, value in _leaves(values):
      first = name.partition('/')[0]
      if first in _NOT_EVENTS:
        continue
      topic = _TOPIC[first]
      tag = name if first == topic else f'{topic}/{name}'
      if name.endswith(_HISTOGRAM):
        middles = (_ENDS[:-1] + _ENDS[1:]) / 2
        log_ratios = np.repeat(middles, value)
        events.add_histogram(tag, log_ratios, round, bins=_ENDS)
      else:
        events.add_scalar(tag, value, round)
    events.flush()

  def evaluation(self, evaluation: workdir.Evaluation) -> None:
    """Writes an evaluation of a policy."""
    self._append(workdir.EVALUATIONS, msgspec.to_builtins(evaluation))
    self._accuracy[evaluation.policy] = evaluation.accuracy[workdir.OVERALL]
    self._evaluated = evaluation.rounds
    self._later(self._evaluation_events, evaluation)

  def _evaluation_events(self, evaluation):
    events, rounds = self._of(evaluation.policy), evaluation.rounds
    for part in ('accuracy', 'error'):
      for family, value in getattr(evaluation, part).items():
        if value is not None:
          events.add_scalar(f'heldout/{part}/{family}', value, rounds)
    for part in ('best', 'worst'):
      text = _markdown(getattr(evaluation, part))
      events.add_text(f'completions/{part}', text, global_step=rounds)
    events.flush()

  def flush(self) -> None:
    """Waits until all files are written."""
    while self._pending:
      self._pending.popleft().result()

  def close(self) -> None:
    """Closes the files; writes hyper-parameters with the last accuracies."""
    self._thread.shutdown()
    self.flush()
    for events in self._events.values():
      events.close()
    if self._accuracy:
      accuracy = {f'{_HEADLINE}/{p}': a for p, a in self._accuracy.items()}
      config = {
        key: value
        if isinstance(value, bool | int | float | str)
        else str(value)
        for key, value in self._config.items()
      }
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
      events = tensorboardX.SummaryWriter(
        self._place(policy), purge_step=max(self._done, 0)
      )
      # Without its thread: that ends at the first error, of which nobody hears,
      # and then its queue blocks as soon as it is full.
      writer = events.file_writer.event_writer
      writer._worker.stop()
      writer.add_event = writer._ev_writer.write_event
      self._events[policy] = events
    return self._events[policy]

  def _place(self, name):
    return os.path.join(self._folder, workdir.TENSORBOARD, name)


class Silent:
  """A `Writer` of a process that does not lead: it writes nothing."""

  def round(self, row: workdir.RoundMetrics) -> None:
    del row

  def evaluation(self, evaluation: workdir.Evaluation) -> None:
    del evaluation

  def flush(self) -> None:
    pass

  def close(self) -> None:
    pass


def _round(line: bytes, key: str) -> int | None:
  """The round that a line is about; None if it is no whole line of its file."""
  try:
    row = json.loads(line)
  except ValueError:
    return None
  if not (line.endswith(b'\n') and isinstance(row, dict)):
    return None
  is_whole = type(row.get(key)) is int and isinstance(row.get('policy'), str)
  return row[key] if is_whole else None


def _leaves(values, prefix='') -> Iterable[tuple[str, object]]:
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _leaves(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value


def _markdown(completions) -> str:
  """Completions as code blocks, so that nothing in them is markup."""
  return '\n\n'.join(
    f'{c.verdict}, reward {c.reward:g}, {c.tokens} tokens, '
    f'{c.logp:.3f} nats a token\n\n'
    + _code(f'{c.prompt}\n{c.completion}\n[gold answer: {c.answer}]')
    for c in completions
  )


def _code(text):
  return '\n'.join('    ' + texts.printable(line) for line in text.split('\n'))
