"""How policies do on held-out prompts."""

import collections
from collections.abc import Mapping, Sequence
import math

import jax
import ml_collections
import numpy as np

from mrl_jax import records
from mrl_jax import workdir
from mrl_jax.sampling import drawing
from mrl_jax.training import parallel
from mrl_jax.training import worker as worker_lib


def evaluate(
  workers: Mapping[str, worker_lib.Worker],
  prompts: Sequence[records.Prompt],
  config: ml_collections.ConfigDict,
  keys: Mapping[str, jax.Array],
  rounds: int,
) -> dict[str, workdir.Evaluation]:
  """Evaluates every policy, after `rounds` rounds, as `config.eval` says.

  Policies sample at the same time, each with its own random key.
  """
  density = drawing.Density(temperature=config.temperature)

  def evaluated(worker):
    groups = worker.sample(
      prompts,
      config.samples,
      keys[worker.name],
      density,
      'evaluation',
      round=0,
      batch=config.batch,
    )
    return _summarise(prompts, groups, config.completions, worker.name, rounds)

  evaluations = dict(parallel.each(evaluated, workers))
  return {name: evaluations[name] for name in workers}


def _summarise(prompts, groups, completions, policy, rounds):
  """Accuracies with errors, and the best and worst `completions`."""
  pairs = list(zip(prompts, groups, strict=True))
  successes = collections.defaultdict(list)  # Of each prompt, by family.
  for prompt, group in pairs:
    for family in {workdir.OVERALL, prompt.family} - {''}:
      successes[family].append([rollout.success for rollout in group])
  success_PG = {name: np.array(x) for name, x in sorted(successes.items())}
  return workdir.Evaluation(
    rounds=rounds,
    policy=policy,
    accuracy={name: float(x_PG.mean()) for name, x_PG in success_PG.items()},
    error={name: _error(x_PG) for name, x_PG in success_PG.items()},
    best=_top(map(_best, pairs), completions),
    worst=_top(map(_worst, pairs), completions),
  )


def _error(success_PG) -> float | None:
  """The standard error over prompts: samples of one prompt are correlated."""
  share_P = success_PG.mean(1)
  if len(share_P) < 2:
    return None
  return float(share_P.std(ddof=1) / math.sqrt(len(share_P)))


def _best(pair):
  """The sort key of a prompt's best completion, the prompt and the rollout."""
  prompt, group = pair
  accuracy = np.mean([rollout.success for rollout in group])
  rollout = max(group, key=lambda r: (r.reward, _mean_logp(r)))
  return (-rollout.reward, accuracy, prompt.id), prompt, rollout


def _worst(pair):
  prompt, group = pair
  rollout = min(group, key=lambda r: (r.reward, -_mean_logp(r)))
  return (rollout.reward, -_mean_logp(rollout), prompt.id), prompt, rollout


def _top(ranked, count) -> list[workdir.Completion]:
  """The first `count`; every family gets one before any gets a second."""
  seen, turns = collections.Counter(), []
  for key, prompt, rollout in sorted(ranked, key=lambda entry: entry[0]):
    turns.append((seen[prompt.family], key, prompt, rollout))
    seen[prompt.family] += 1
  turns.sort(key=lambda turn: turn[:2])
  return [
    workdir.Completion(
      prompt=prompt.text,
      answer=prompt.answer,
      completion=rollout.payload.decode('utf-8', errors='replace'),
      reward=rollout.reward,
      verdict=rollout.verdict,
      finish=rollout.finish,
      tokens=len(rollout.ids),
      logp=_mean_logp(rollout),
    )
    for _, _, prompt, rollout in turns[:count]
  ]


def _mean_logp(rollout) -> float:
  return float(rollout.policy_logp.sum()) / max(len(rollout.ids), 1)
