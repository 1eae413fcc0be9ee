"""How policies do on held-out prompts."""

import collections
from collections.abc import Mapping, Sequence
import math
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from mrl_jax import records
from mrl_jax.rewards import functions
from mrl_jax.training import worker as worker_lib


class Evaluation(NamedTuple):
  """How a policy does on held-out prompts.

  Attributes:
    accuracy: the share of right answers, the mean of several samples a prompt;
      under 'all', and under each family's name.
    error: its standard error over prompts, under the same names; None where
      there is one prompt only.
    best: completions with the highest rewards, those first whose prompts are
      solved least often, as plain values; each of another family, if it can be.
    worst: completions with the lowest rewards, those first of which the policy
      is surest; as `best`.
  """

  accuracy: dict[str, float]
  error: dict[str, float | None]
  best: list[dict]
  worst: list[dict]


def evaluate(
  workers: Mapping[str, worker_lib.Worker],
  prompts: Sequence[records.Prompt],
  judge: functions.Judge,
  config: ml_collections.ConfigDict,
  keys: Mapping[str, jax.Array],
) -> dict[str, Evaluation]:
  """Evaluates every policy.

  Args:
    workers: the policies; they sample at the same time.
    prompts: held out from their training.
    judge: what says whether an answer is right.
    config: `config.eval`.
    keys: of each policy's sampling.
  """
  found = {name: _Found() for name in workers}
  for i in range(math.ceil(len(prompts) / config.batch)):
    part = list(prompts[i * config.batch : (i + 1) * config.batch])
    # The last batch is filled up, so that one shape is compiled.
    full = part + part[:1] * (config.batch - len(part))
    sampling = {
      name: worker.start_sampling(
        full,
        config.samples,
        jax.random.fold_in(keys[name], i),
        config.temperature,
      )
      for name, worker in workers.items()
    }
    for name, worker in workers.items():
      groups = worker.finish_sampling(
        sampling[name], judge, run='evaluation', round=0
      )
      for prompt, group in zip(part, groups, strict=False):
        found[name].add(prompt, group)
  return {
    name: one.evaluation(config.completions) for name, one in found.items()
  }


class _Found:
  """What is found of a policy, prompt by prompt."""

  def __init__(self):
    self._right = collections.defaultdict(list)  # Of each prompt, by family.
    self._groups = []

  def add(self, prompt, group):
    right = [rollout.success for rollout in group]
    for name in {'all', prompt.family} - {''}:
      self._right[name].append(right)
    self._groups.append((prompt, np.mean(right), group))

  def evaluation(self, completions: int) -> Evaluation:
    right = {name: np.array(x_PG) for name, x_PG in sorted(self._right.items())}
    best, worst = map(_best, self._groups), map(_worst, self._groups)
    return Evaluation(
      accuracy={name: float(x_PG.mean()) for name, x_PG in right.items()},
      error={name: _error(x_PG) for name, x_PG in right.items()},
      best=_first(best, completions),
      worst=_first(worst, completions),
    )


def _error(right_PG) -> float | None:
  """Samples of a prompt are alike, so that it is prompts that are counted."""
  share_P = right_PG.mean(1)
  if len(share_P) < 2:
    return None
  return float(share_P.std(ddof=1) / math.sqrt(len(share_P)))


def _best(one):
  """What comes first, and the completion of a prompt that it is about."""
  prompt, accuracy, group = one
  rollout = max(group, key=lambda r: (r.reward, _mean_logp(r)))
  return (-rollout.reward, accuracy, prompt.id), prompt, rollout


def _worst(one):
  prompt, _, group = one
  rollout = min(group, key=lambda r: (r.reward, -_mean_logp(r)))
  return (rollout.reward, -_mean_logp(rollout), prompt.id), prompt, rollout


def _first(ranked, count) -> list[dict]:
  """The first so many, those first that are the first of their family."""
  seen, places = collections.Counter(), []
  for key, prompt, rollout in sorted(ranked, key=lambda one: one[0]):
    places.append((seen[prompt.family], key, prompt, rollout))
    seen[prompt.family] += 1
  places.sort(key=lambda place: place[:2])
  return [_shown(prompt, rollout) for _, _, prompt, rollout in places[:count]]


def _mean_logp(rollout) -> float:
  """Nats a token."""
  return float(rollout.policy_logp.sum()) / max(len(rollout.ids), 1)


def _shown(prompt, rollout) -> dict:
  return {
    'prompt': prompt.text,
    'answer': prompt.answer,
    'completion': rollout.payload.decode('utf-8', errors='replace'),
    'reward': rollout.reward,
    'verdict': rollout.verdict,
    'finish': rollout.finish,
    'tokens': len(rollout.ids),
    'logp': _mean_logp(rollout),
  }
