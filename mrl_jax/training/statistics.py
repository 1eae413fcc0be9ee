"""Metrics of one policy's round: means over its rollouts, rows and updates."""

from collections.abc import Mapping, Sequence

from absl import logging
import numpy as np

from mrl_jax import algorithms
from mrl_jax import records
from mrl_jax import workdir
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import rows as rows_lib

# Effective sample size of ratios of trainer to sampler, over the number of
# tokens; below it the standard deviation of the ratios is above 0.1.
_LEAST_ESS = 0.99


def round_metrics(
  policy: str,
  round: int,
  groups: Sequence[Sequence[records.Rollout]],
  context: context_lib.Context,
  batch: rows_lib.Batch,
  updates: Sequence[Mapping[str, np.ndarray]],
) -> workdir.RoundMetrics:
  """The metrics of a round, without what the exchange and the clock tell.

  `groups` are the policy's own rollouts of the prompts that all policies share,
  `updates` the statistics of its mini-batches.
  """
  samples = [rollout for group in groups for rollout in group]
  success_PG = np.array([[r.success for r in group] for group in groups])
  log, used = context.log, len(context.peer_records)
  return workdir.RoundMetrics(
    round=round,
    policy=policy,
    reward=_mean(r.reward for r in samples),
    accuracy=float(success_PG.mean()),
    response_length=_mean(len(r.ids) for r in samples),
    stopped=_mean(r.finish in records.ENDED for r in samples),
    entropy=-_mean(p for r in samples for p in r.sampling_logp),
    all_fail_groups=float((~success_PG.any(1)).mean()),
    zero_signal_groups=_mean(
      len({r.reward for r in group}) == 1 for group in groups
    ),
    rollouts=sum(map(len, context.groups)),
    rows_with_signal=_mean(r.advantage != 0 for r in batch.own),
    grad_norm=_mean(u['grad_norm'] for u in updates),
    own=_ratios(_sums('own', updates), len(updates)),
    peer=_ratios(_sums('peer', updates), len(updates)),
    # A correction of own rows has measured the mismatch itself.
    mismatch=workdir.Ratios(**log.mismatch)
    if log.mismatch
    else _mismatch(_sums('own', updates[:1])),
    peer_records=used,
    peer_records_unused=len(context.received) - used,
    peer_responses_judged=log.judged,
    peer_rows=len(batch.peer),
    peer_rows_refused=sum(
      sum(residual.refused.values()) for residual in log.residuals.values()
    ),
    refused=dict(+log.refused),
    residuals=log.residuals,
    method=log.metrics,
    **algorithms.rescues(context),
  )


def warn_of_mismatch(result: workdir.RoundMetrics) -> None:
  """Warns if ratios of trainer to sampler vary much before any update."""
  mismatch = result.mismatch
  if mismatch.kl is not None and mismatch.ess_fraction < _LEAST_ESS:
    logging.log_first_n(
      logging.WARNING,
      'round %d: sampler and trainer of %s differ: ratios of up to %.2f before '
      'any update, a KL of %.4f nats a token. float32 lets them agree '
      '(policies.NAME.model.dtype), method.correction.level=token corrects',
      3,
      result.round,
      result.policy,
      mismatch.max_ratio,
      mismatch.kl,
    )


def _sums(part, updates) -> dict[str, float | list[float]]:
  """A part's statistics over mini-batches: sums, or maxima of 'max_...'."""
  sums = {}
  for update in updates:
    for key, value in update.items():
      if key.startswith(f'{part}/'):
        name = key.removeprefix(f'{part}/')
        add = np.maximum if name.startswith('max_') else np.add
        sums[name] = add(sums.get(name, 0.0), np.asarray(value, np.float64))
  return {name: x.tolist() for name, x in sums.items()}


def _ratios(sums, updates: int) -> workdir.Ratios:
  """Means over the tokens of a part; empty if no row of it had a signal."""
  tokens = sums.get('tokens')
  if not tokens:
    return workdir.Ratios()

  def mean(name):
    return sums[name] / tokens if name in sums else None

  return workdir.Ratios(
    loss=sums['loss'] / updates,
    ratio=mean('ratio'),
    ratio_second_moment=mean('ratio_square'),
    ess_fraction=_ess_fraction(sums) if 'ratio' in sums else None,
    clip_fraction=mean('clipped'),
    truncated=mean('truncated'),
    max_ratio=sums.get('max_ratio'),
    kl=mean('kl'),
    logp=mean('logp'),
    log_ratio_counts=[int(n) for n in sums.get('log_ratio_counts', ())],
  )


def _mismatch(sums) -> workdir.Ratios:
  """How much trainer and sampler differ, over tokens of the first update.

  Before its first update a policy's ratios are those of trainer to sampler.
  """
  if not sums.get('tokens'):
    return workdir.Ratios()
  # If the objective's denominators are not the sampler's, or its ratios are of
  # sequences, it reports ratios of tokens to the sampler as well.
  suffixes = ('_to_sampler', '_of_tokens')
  of = next((of for of in suffixes if f'ratio{of}' in sums), '')
  return workdir.Ratios(
    kl=-sums[f'log_ratio{of}'] / sums['tokens'],
    max_ratio=sums[f'max_ratio{of}'],
    ess_fraction=_ess_fraction(sums, of),
  )


def _ess_fraction(sums, of='') -> float:
  squares = sums[f'ratio_square{of}'] * sums['tokens']
  return sums[f'ratio{of}'] ** 2 / squares if squares else 0.0


def _mean(values) -> float:
  """The mean, or 0 of no values."""
  values = [*values]
  return float(np.mean(values)) if values else 0.0
