"""Accuracy on held-out prompts."""

import collections
from collections.abc import Sequence

import jax

from mrl_jax import records
from mrl_jax.training import worker as worker_lib


def accuracy(
  worker: worker_lib.Worker,
  prompts: Sequence[records.Prompt],
  judge: worker_lib.Judge,
  *,
  samples: int,
  batch: int,
  temperature: float,
  key: jax.Array,
) -> dict[str, float]:
  """The share of right answers, the mean of several samples a prompt.

  Args:
    worker: the policy.
    prompts: held out from its training.
    judge: what says whether an answer is right.
    samples: a prompt.
    batch: prompts sampled at a time.
    temperature: of sampling.
    key: of sampling.

  Returns:
    The accuracy under 'all', and under each family's name.
  """
  right, total = collections.Counter(), collections.Counter()
  for start in range(0, len(prompts), batch):
    part = list(prompts[start : start + batch])
    # The last batch is filled up, so that one shape is compiled.
    full = part + part[:1] * (batch - len(part))
    sampling = worker.start_sampling(
      full, samples, jax.random.fold_in(key, start), temperature
    )
    groups = worker.finish_sampling(sampling, judge, run='evaluation', round=0)
    for prompt, group in zip(part, groups, strict=False):
      for name in {'all', prompt.family} - {''}:
        right[name] += sum(rollout.success for rollout in group)
        total[name] += len(group)
  return {name: right[name] / total[name] for name in sorted(total)}
