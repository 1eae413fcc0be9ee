"""Accuracy on held-out prompts."""

import collections
from collections.abc import Mapping, Sequence
import math

import jax
import ml_collections

from mrl_jax import records
from mrl_jax.rewards import functions
from mrl_jax.training import worker as worker_lib


def accuracy(
  workers: Mapping[str, worker_lib.Worker],
  prompts: Sequence[records.Prompt],
  judge: functions.Judge,
  config: ml_collections.ConfigDict,
  keys: Mapping[str, jax.Array],
) -> dict[str, dict[str, float]]:
  """The share of right answers, the mean of several samples a prompt.

  Args:
    workers: the policies; they sample at the same time.
    prompts: held out from their training.
    judge: what says whether an answer is right.
    config: `config.eval`.
    keys: of each policy's sampling.

  Returns:
    Of each policy, the accuracy under 'all' and under each family's name.
  """
  counts = {name: _Count() for name in workers}
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
        counts[name].add(prompt, group)
  return {name: count.shares() for name, count in counts.items()}


class _Count:
  """Right answers and answers, of all prompts and of each family."""

  def __init__(self):
    self.right, self.total = collections.Counter(), collections.Counter()

  def add(self, prompt, group):
    for name in {'all', prompt.family} - {''}:
      self.right[name] += sum(rollout.success for rollout in group)
      self.total[name] += len(group)

  def shares(self) -> dict[str, float]:
    return {
      name: self.right[name] / n for name, n in sorted(self.total.items())
    }
