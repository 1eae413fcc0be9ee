"""Dynamic sampling: other prompts in place of those that teach nothing."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import msgspec

from mrl_jax import records
from mrl_jax.training import job as job_lib
from mrl_jax.training import worker as worker_lib


class Sampled(NamedTuple):
  """What a policy sampled in a round.

  Attributes:
    prompts: those that all policies share, then its own refills.
    groups: of each prompt.
    kept: places of those whose own groups are trained on; None is all.
  """

  prompts: Sequence[records.Prompt]
  groups: Sequence[Sequence[records.Rollout]]
  kept: Sequence[int] | None = None

  @property
  def rollouts(self) -> int:
    return sum(map(len, self.groups))


def refill(
  job: job_lib.Job,
  worker: worker_lib.Worker,
  prompts: Sequence[records.Prompt],
  groups: Sequence[Sequence[records.Rollout]],
  round: int,
  key: jax.Array,
) -> Sampled:
  """Samples on until as many groups as there were prompts have both verdicts.

  DAPO, https://arxiv.org/abs/2503.14476, sec. 3.2, with a bound on how often:
  `sample.refills`. Peers share only the first prompts, so that what they may
  give for those stays of use, and is not affected.
  """
  if not job.config.sample.refills:
    return Sampled(prompts, groups)
  wanted, prompts, groups = len(prompts), [*prompts], [*groups]
  kept = [p for p, group in enumerate(groups) if mixed(group)]
  for i in range(job.config.sample.refills):
    if len(kept) == wanted:
      break
    more = [
      msgspec.structs.replace(prompt, id=f'{prompt.id}~{i}')
      for prompt in next(job.refills[worker.name])
    ]
    sampling = worker.start_sampling(
      more,
      job.config.train.samples,
      jax.random.fold_in(key, i),
      job.config.sample.temperature,
    )
    found = worker.finish_sampling(sampling, job.judge, job.run, round)
    kept += [len(groups) + p for p, group in enumerate(found) if mixed(group)]
    prompts += more
    groups += found
    kept = kept[:wanted]
  return Sampled(prompts, groups, kept)


def mixed(group: Sequence[records.Rollout]) -> bool:
  """Whether some samples are right and some wrong."""
  return 0 < sum(rollout.success for rollout in group) < len(group)
