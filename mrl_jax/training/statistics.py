"""Metrics of one policy's round."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from mrl_jax import records
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.training import metrics


def of_round(
  groups: Sequence[Sequence[records.Rollout]],
  lesson: lesson_lib.Lesson,
  updates: Sequence[Mapping[str, np.ndarray]],
  *,
  rollouts: int,
  exchanged: Mapping[str, Mapping[str, Mapping[str, int]]],
  exchange_seconds: Mapping[str, float],
  verified: Mapping[str, int],
  seconds: float,
) -> dict:
  """Means over the policy's own rollouts, its rows and its updates.

  Args:
    groups: the policy's own rollouts of the prompts that all share.
    lesson: what it learnt from.
    updates: statistics of its mini-batches.
    rollouts: that it sampled, refills and all.
    exchanged: `Ledger.since_last` of it.
    exchange_seconds: `Ledger.timing` of the round.
    verified: answers by what came of their verification, if that is counted.
    seconds: that the round took.
  """
  samples = [rollout for group in groups for rollout in group]
  success_PG = np.array([[r.success for r in group] for group in groups])
  row = {
    'reward': _mean(r.reward for r in samples),
    'accuracy': float(success_PG.mean()),
    'response_length': _mean(len(r.ids) for r in samples),
    'stopped': _mean(r.finish == 'stop' for r in samples),
    'entropy': -_mean(p for r in samples for p in r.policy_logp),
    'all_fail_groups': float((~success_PG.any(1)).mean()),
    'zero_signal_groups': _mean(_all_equal(group) for group in groups),
    'rollouts': rollouts,
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
  # Before its first update a policy's ratios are those to its sampler.
  row |= _mismatch(updates[:1])
  row |= lesson.metrics
  if lesson.residuals:
    row['residuals'] = {
      sender: {
        **dataclasses.asdict(residual),
        'segmentation_error': residual.segmentation_error,
      }
      for sender, residual in lesson.residuals.items()
    }
  tokens = sum(len(r.ids) for r in samples)
  row[metrics.TIMING] = {
    'seconds': seconds,
    'tokens_per_second': tokens / seconds,
    **exchange_seconds,
  }
  if exchanged:
    row['exchange'] = exchanged
  if verified:
    row['verified'] = dict(verified)
  return row


def _ratios(part, updates):
  """Means over the tokens of a part; nothing if no row of it had a signal."""
  total = _totals(part, updates)
  tokens = total('tokens')
  if not tokens:
    return {}
  found = {'loss': total('loss') / len(updates)}
  if any(f'{part}/ratio' in u for u in updates):
    found |= {
      'ratio': total('ratio') / tokens,
      'ratio_second_moment': total('ratio_square') / tokens,
      'ess_fraction': _ess_fraction(total),
      'clip_fraction': total('clipped') / tokens,
      'max_ratio': max(float(u.get(f'{part}/max_ratio', 0)) for u in updates),
      'log_ratio_counts': _counts(part, updates),
    }
  for name in ('kl', 'logp', 'truncated'):
    if any(f'{part}/{name}' in u for u in updates):
      found[name] = total(name) / tokens
  return {part: found}


def _mismatch(first):
  """What sampler and trainer differ in, over the tokens of the first update."""
  total = _totals('own', first)
  if not total('tokens'):
    return {}
  # Where the ratios are of whole responses, those of tokens are there too.
  of = '_of_tokens' if any('own/ratio_of_tokens' in u for u in first) else ''
  return {
    'mismatch': {
      'kl': -total(f'log_ratio{of}') / total('tokens'),
      'max_ratio': max(float(u[f'own/max_ratio{of}']) for u in first),
      'ess_fraction': _ess_fraction(total, of),
    }
  }


def _counts(part, updates) -> list[int]:
  """Tokens by the bins of `metrics.LOG_RATIO_EDGES`."""
  name = f'{part}/log_ratio_counts'
  return sum(u[name] for u in updates if name in u).astype(int).tolist()


def _totals(part, updates):
  return lambda name: sum(float(u.get(f'{part}/{name}', 0)) for u in updates)


def _ess_fraction(total, of='') -> float:
  squares = total(f'ratio_square{of}') * total('tokens')
  return total(f'ratio{of}') ** 2 / squares if squares else 0.0


def _all_equal(group) -> bool:
  return len({rollout.reward for rollout in group}) == 1


def _mean(values) -> float:
  """0 where there is nothing."""
  values = [*values]
  return float(np.mean(values)) if values else 0.0
