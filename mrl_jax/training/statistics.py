"""Metrics of one policy's round."""

from collections.abc import Mapping, Sequence

import numpy as np

from mrl_jax import records
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.training import metrics


def of_round(
  groups: Sequence[Sequence[records.Rollout]],
  lesson: lesson_lib.Lesson,
  updates: Sequence[Mapping[str, np.ndarray]],
  *,
  exchanged: Mapping[str, Mapping[str, Mapping[str, int]]],
  exchange_seconds: Mapping[str, float],
  seconds: float,
) -> dict:
  """Means over the policy's own rollouts, its rows and its updates.

  Args:
    groups: the policy's own rollouts.
    lesson: what it learnt from.
    updates: statistics of its mini-batches.
    exchanged: `Ledger.since_last` of it.
    exchange_seconds: `Ledger.timing` of the round.
    seconds: that the round took.
  """
  rollouts = [rollout for group in groups for rollout in group]
  success_PG = np.array([[r.success for r in group] for group in groups])
  row = {
    'reward': _mean(r.reward for r in rollouts),
    'accuracy': float(success_PG.mean()),
    'response_length': _mean(len(r.ids) for r in rollouts),
    'stopped': _mean(r.finish == 'stop' for r in rollouts),
    'all_fail_groups': float((~success_PG.any(1)).mean()),
    'rows_with_signal': _mean(r.advantage != 0 for r in lesson.own),
    'grad_norm': _mean(u['grad_norm'] for u in updates),
    'peer_records': lesson.peer_records,
    'peer_records_unused': lesson.peer_records_unused,
    'peer_rows': len(lesson.peer),
    'peer_rows_refused': sum(
      sum(residual.refused.values()) for residual in lesson.residuals.values()
    ),
  }
  for part in ('own', 'peer'):
    row |= _ratios(part, updates)
  tokens = sum(len(r.ids) for r in rollouts)
  row[metrics.TIMING] = {
    'seconds': seconds,
    'tokens_per_second': tokens / seconds,
    **exchange_seconds,
  }
  if exchanged:
    row['exchange'] = exchanged
  return row


def _ratios(part, updates):
  """Means over the tokens of a part; nothing if no row of it had a signal."""

  def total(name):
    return sum(float(u.get(f'{part}/{name}', 0)) for u in updates)

  tokens, ratios, squares = map(total, ('tokens', 'ratio', 'ratio_square'))
  if not tokens:
    return {}
  return {
    part: {
      'loss': total('loss') / len(updates),
      'ratio': ratios / tokens,
      'ratio_second_moment': squares / tokens,
      'ess_fraction': ratios**2 / (squares * tokens) if squares else 0.0,
      'clip_fraction': total('clipped') / tokens,
    }
  }


def _mean(values) -> float:
  return float(np.mean([*values]))
