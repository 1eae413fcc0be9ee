"""The methods, as one table: every method is a row of parts.

A method says which groups of peers are selected, how they enter the update,
what the baseline of the policy's own rows is, and what the ratio of those is
of. What it publishes follows: the kinds of records that its parts read. Each
part is one function on the host, in `sharing/`, and what is maximised is one
function on arrays, in `losses/`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import NamedTuple

import ml_collections
import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.losses import kl
from mrl_jax.sharing import capability
from mrl_jax.sharing import carry as carry_lib
from mrl_jax.sharing import correction
from mrl_jax.sharing import graft
from mrl_jax.sharing import grpo
from mrl_jax.sharing import hacpo
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.sharing import luffy
from mrl_jax.sharing import offers as offers_lib
from mrl_jax.sharing import prp
from mrl_jax.sharing import select
from mrl_jax.sharing import sgt
from mrl_jax.sharing import xgrpo
from mrl_jax.update import objectives
from mrl_jax.update import update


class Parts(NamedTuple):
  """A row of the table of methods."""

  which: str = 'none'
  how: str = 'none'
  baseline: str = 'own'
  ratio: str = 'token'


class Baseline(NamedTuple):
  """What rewards are compared with, and the kinds of records that it reads."""

  function: Callable
  reads: tuple[str, ...] = ()


class How(NamedTuple):
  """How groups of peers enter.

  Attributes:
    carry: makes rows of them, on the host: from single rollouts, or from whole
      offers where `reads` is 'outcome'.
    objective: what is maximised on these rows.
    reads: the kind of records that it takes them from.
    needs: other kinds that it reads.
    advantage: of a rollout: the learner's, against its 'baseline', or the
      'source's own.
    average: how tokens are averaged, a name in `batch.PEER_AVERAGES`, by the
      method's settings.
    replaces: whether rows take the place of the policy's own of that prompt.
  """

  carry: Callable
  objective: Callable
  reads: str = 'rollout'
  needs: tuple[str, ...] = ()
  advantage: str = 'baseline'
  average: Callable = lambda settings: 'joint'
  replaces: bool = False


METHODS = {
  # Group-relative policy optimisation, 2402.03300: no exchange.
  'grpo': Parts(),
  # Group sequence policy optimisation, 2507.18071: ratios of whole responses.
  'gspo': Parts(ratio='sequence'),
  # Mutual RL, 2605.07244: peers' rewards move the baseline.
  'xgrpo': Parts(baseline='pooled'),
  # Mutual RL, 2605.07244: peers' rollouts join the group.
  'prp': Parts('all', 'ratio', 'pooled'),
  # Mutual RL, 2605.07244: a peer's success where a whole group fails.
  'sgt': Parts('rescue', 'nll'),
  # 2603.02604: peers' rollouts, weighed by capability.
  'hacpo': Parts('all', 'hacpo', 'capability', 'sequence'),
  # 2609.37868: a peer's compatible group in place of one that failed.
  'graft': Parts('balanced', 'graft'),
}
WHICH = {
  'none': select.nothing,
  'all': select.everything,
  'rescue': select.rescue,
  'complementary': select.complementary,
  'balanced': select.balanced,
  'random': select.random,
}
BASELINES = {
  'own': Baseline(grpo.own),
  'pooled': Baseline(xgrpo.pooled, reads=('group_stats',)),
  'interpolated': Baseline(xgrpo.interpolated, reads=('group_stats',)),
  'capability': Baseline(capability.capability, reads=('group_stats',)),
}
HOW = {
  'none': None,
  'ratio': How(prp.carry, objectives.peer_ratio),
  'nll': How(sgt.carry, objectives.nll, reads='outcome', average=sgt.average),
  # Weights by capability need everybody's accuracy, whatever the baseline.
  'hacpo': How(hacpo.carry, objectives.stepwise, needs=('group_stats',)),
  'graft': How(
    graft.carry, objectives.grafted, advantage='source', replaces=True
  ),
  'luffy': How(luffy.carry, objectives.shaped, advantage='source'),
}
RATIOS = ('token', 'sequence')


@dataclasses.dataclass(frozen=True)
class Method:
  """A row of the table, with its settings."""

  parts: Parts
  settings: ml_collections.ConfigDict  # `config.method`

  @property
  def how(self) -> How | None:
    return HOW[self.parts.how]

  @property
  def kinds(self) -> frozenset[str]:
    """The kinds of records that policies publish and collect."""
    kinds = BASELINES[self.parts.baseline].reads
    if self.how:
      kinds += (self.how.reads, *self.how.needs)
    return frozenset(kinds)

  @property
  def objectives(self) -> dict[str, update.Objective]:
    """What is maximised on own and on peer rows."""
    peer = {'peer': self.how.objective(self.settings)} if self.how else {}
    return {'own': objectives.own(self.settings, self.parts.ratio), **peer}

  @property
  def peer_average(self) -> str:
    """How tokens of peer rows are averaged; see `batch.PEER_AVERAGES`."""
    return self.how.average(self.settings) if self.how else 'joint'

  @property
  def reference(self) -> bool:
    """Whether the policy that a run began with is kept, for its KL."""
    return self.settings.kl_weight > 0

  def lesson(
    self,
    groups: Sequence[Sequence[records.Rollout]],
    received: Sequence[records.Record],
    learner: lesson_lib.Learner,
    kept: Sequence[int] | None = None,
  ) -> lesson_lib.Lesson:
    """Turns own groups and what peers gave into rows to train on.

    Args:
      groups: the policy's own rollouts of each prompt of the round.
      received: records of its peers; those about other prompts are left out.
      learner: the policy.
      kept: prompts whose own groups are trained on; all by default.
    """
    place = {group[0].header.prompt: p for p, group in enumerate(groups)}
    used = offers_lib.newest([r for r in received if r.header.prompt in place])
    rewards_PG = np.array([[r.reward for r in group] for group in groups])
    baseline = BASELINES[self.parts.baseline].function(
      grpo.moments(rewards_PG),
      xgrpo.peer_moments(used, place),
      self.settings,
      learner.ratios,
    )
    carried = self._peers(groups, used, place, baseline, learner)
    taken = {row.prompt for row in carried.rows}
    replaced = taken if self.how and self.how.replaces else ()
    kept = [
      p
      for p in (range(len(groups)) if kept is None else kept)
      if p not in replaced
    ]
    own, metrics = self._own(
      groups, kept, self._advantages(rewards_PG, baseline), learner
    )
    return lesson_lib.Lesson(
      own=own,
      peer=carried.rows,
      order=graft.order(
        sorted({*kept, *taken}), replaced, self.settings.graft.order
      ),
      residuals=carried.residuals,
      metrics={
        **metrics,
        **carried.metrics,
        **_reach(groups, used, place),
        **({'refused': {**learner.refused}} if learner.refused else {}),
      },
      peer_records=len(used),
      peer_records_unused=len(received) - len(used),
    )

  def _advantages(self, rewards_PG, baseline, prompts=slice(None)):
    return grpo.advantages(
      rewards_PG,
      baseline,
      scale=self.settings.scale,
      leave_one_out=self.settings.leave_one_out,
      prompts=prompts,
    )

  def _own(self, groups, kept, advantage_PG, learner):
    """Rows of the policy's own groups, corrected and with their reference."""
    rollouts = [rollout for p in kept for rollout in groups[p]]
    rows = [
      lesson_lib.own_row(p, rollout, advantage_PG[p, g])
      for p in kept
      for g, rollout in enumerate(groups[p])
    ]
    metrics, settings = {}, self.settings.correction
    if rows and settings.level != 'none':
      trainer = learner.score(rows)
      sampler = [rollout.sampling_logp for rollout in rollouts]
      rows = [
        row._replace(
          old_logp=logp, weight=correction.weights(logp, sampled, settings)
        )
        for row, logp, sampled in zip(rows, trainer, sampler, strict=True)
      ]
      metrics = {'mismatch': correction.mismatch(trainer, sampler)}
    if rows and self.reference:
      rows = [
        row._replace(reference_logp=logp)
        for row, logp in zip(
          rows, learner.score(rows, reference=True), strict=True
        )
      ]
    return rows, metrics

  def _peers(self, groups, used, place, baseline, learner):
    """Rows of what is selected of peers' groups."""
    if self.how is None:
      return lesson_lib.Carried()
    successes_P = np.array([sum(r.success for r in group) for group in groups])
    chosen = WHICH[self.parts.which](
      offers_lib.gather(used, place, self.how.reads, learner),
      select.Own(successes_P, len(groups[0])),
      learner,
    )
    chosen = select.at_most(chosen, self.settings.max_peer_groups, learner.rng)
    if not chosen:
      return lesson_lib.Carried()
    if self.how.reads == 'rollout':
      chosen = self._with_advantages(chosen, baseline)
    return self.how.carry(chosen, learner, self.settings)

  def _with_advantages(self, chosen, baseline):
    """Rollouts of offers, each with the learner's or the source's advantage."""
    pairs = [(offer.prompt, r) for offer in chosen for r in offer.rollouts]
    whose = self.settings.peer_advantage or self.how.advantage
    if whose == 'source':
      return [carry_lib.Selected(p, r, r.advantage) for p, r in pairs]
    prompts = [p for p, _ in pairs]
    advantage_B1 = self._advantages(
      np.array([[r.reward] for _, r in pairs]), baseline, prompts
    )
    return [
      carry_lib.Selected(p, r, float(advantage))
      for (p, r), advantage in zip(pairs, advantage_B1[:, 0], strict=True)
    ]


def _reach(groups, used, place) -> Mapping:
  """How many prompts that the whole group fails peers say they solved.

  As shares of those that it fails: by any peer, and by each.
  """
  failed = {
    p for p, group in enumerate(groups) if not any(r.success for r in group)
  }
  # Peers see only the prompts that all share.
  failed &= {place[r.header.prompt] for r in used}
  if not failed:
    return {}
  solved = {r.header.policy: set() for r in used}
  for r in used:
    if r.success if isinstance(r, records.Rollout) else r.successes:
      solved[r.header.policy].add(place[r.header.prompt])

  def share(prompts):
    return len(failed & prompts) / len(failed)

  return {
    'rescue_rate': share(set().union(*solved.values())),
    'rescued_by': {peer: share(solved[peer]) for peer in sorted(solved)},
  }


def build(settings: ml_collections.ConfigDict) -> Method:
  """The method that `config.method` describes.

  `settings.name` is a row of the table; `which`, `how`, `baseline` and
  `ratio`, where they are not empty, replace a part of it.
  """
  parts = checks.choose(settings.name, METHODS, 'method')
  for field, table in (
    ('which', WHICH),
    ('how', HOW),
    ('baseline', BASELINES),
    ('ratio', dict.fromkeys(RATIOS)),
  ):
    if settings[field]:
      checks.choose(settings[field], table, f'method.{field}')
      parts = parts._replace(**{field: settings[field]})
  checks.require(
    (parts.which == 'none') == (parts.how == 'none'),
    f'method.which={parts.which} and method.how={parts.how}: give both, or '
    'neither; rows that are selected must enter somehow',
  )
  how = HOW[parts.how]
  outsiders = how and (settings.peer_advantage or how.advantage) == 'baseline'
  fits = (
    ('pooled',) if outsiders and how.reads == 'rollout' else ('own', 'pooled')
  )
  checks.require(
    not settings.leave_one_out or parts.baseline in fits,
    f'method.leave_one_out with method.baseline={parts.baseline} and '
    f'method.how={parts.how}: a reward can be left out only of a mean that it '
    f'is in; use method.baseline={fits[-1]}',
  )
  for key, value, choices in (
    ('scale', settings.scale, grpo.SCALES),
    ('kl_form', settings.kl_form, kl.FORMS),
    ('peer_advantage', settings.peer_advantage, ('', 'baseline', 'source')),
    ('correction.level', settings.correction.level, correction.LEVELS),
    ('correction.kind', settings.correction.kind, correction.KINDS),
    ('prp.level', settings.prp.level, prp.LEVELS),
    ('prp.denominators', settings.prp.denominators, prp.DENOMINATORS),
    ('sgt.normaliser', settings.sgt.normaliser, sgt.NORMALISERS),
    ('graft.admission', settings.graft.admission, graft.ADMISSIONS),
    ('graft.order', settings.graft.order, graft.ORDERS),
  ):
    checks.choose(value, dict.fromkeys(choices), f'method.{key}')
  return Method(parts, settings)
