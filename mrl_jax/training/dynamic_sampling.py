"""Dynamic sampling: other prompts in place of those that teach nothing."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import msgspec

from mrl_jax import records
from mrl_jax.training import job as job_lib
from mrl_jax.training import planning
from mrl_jax.training import worker as worker_lib

Groups = Sequence[Sequence[records.Rollout]]


class Sampled(NamedTuple):
  """What a policy sampled in a round."""

  # The prompts that all policies share, then the policy's own refills.
  prompts: Sequence[records.Prompt]
  groups: Groups  # The rollouts of each prompt.
  # Indices of the prompts whose own groups are trained on; None is all.
  kept: Sequence[int] | None = None


def refill(
  job: job_lib.Job,
  worker: worker_lib.Worker,
  prompts: Sequence[records.Prompt],
  groups: Groups,
  round: int,
  key: jax.Array,
) -> Sampled:
  """Samples more prompts until as many groups as there were prompts are mixed.

  DAPO, https://arxiv.org/abs/2503.14476, sec. 3.2, with a bound on how often:
  `sample.refills`. Peers share only the first prompts: what they give for those
  is used, whether the policy's own group is kept or not.
  """
  if not job.config.sample.refills:
    return Sampled(prompts, groups)
  wanted, prompts, groups = len(prompts), [*prompts], [*groups]
  kept = [p for p, group in enumerate(groups) if is_mixed(group)]
  for i in range(job.config.sample.refills):
    if len(kept) == wanted:
      break
    more = [
      msgspec.structs.replace(prompt, id=f'{prompt.id}~{i}')
      for prompt in next(job.refills[worker.name])
    ]
    added = worker.sample(
      more,
      job.config.train.samples,
      jax.random.fold_in(key, i),
      planning.density(job.config.sample),
      job.run,
      round,
    )
    kept += [len(groups) + p for p, g in enumerate(added) if is_mixed(g)]
    prompts += more
    groups += added
    kept = kept[:wanted]
  return Sampled(prompts, groups, kept)


def is_mixed(group: Sequence[records.Rollout]) -> bool:
  """Whether a group has both successes and failures."""
  return 0 < sum(rollout.success for rollout in group) < len(group)
