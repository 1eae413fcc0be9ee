"""The methods, as one table: every method is a row of four parts.

  which     selects the groups of peers that the learner trains on
  how       makes training rows of them, with the objective of those rows
  baseline  what rewards are compared with
  ratio     whether importance ratios of own rows are per token or per sequence

What a policy publishes follows from the kinds of records that its parts read.
Parts are functions on the host, in `sharing/`; objectives are built from the
formulas in `losses/` by `update/objectives.py`. A flag replaces a part:
`--config.method.which=rescue --config.method.how=graft`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
from typing import NamedTuple

import ml_collections
import msgspec
import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import correction
from mrl_jax.sharing import graft
from mrl_jax.sharing import grpo
from mrl_jax.sharing import hacpo
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import peer_rows
from mrl_jax.sharing import prp
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.sharing import select
from mrl_jax.sharing import sgt
from mrl_jax.sharing import xgrpo
from mrl_jax.update import objectives


class Parts(NamedTuple):
  """A row of the table of methods: names of rows of the tables below."""

  which: str = 'none'
  how: str = 'none'
  baseline: str = 'own'
  ratio: str = 'token'


class Which(NamedTuple):
  """Which groups of peers the learner trains on.

  Verification takes most of the time that a peer's group costs. So first come
  the `candidates`, which are known without it; only these are verified, and
  `select` selects among them.
  """

  select: Callable[
    [Sequence[peer_groups.PeerGroup], context_lib.Context],
    Sequence[peer_groups.PeerGroup],
  ]
  candidates: Callable[
    [Sequence[context_lib.Place], context_lib.Context],
    Sequence[context_lib.Place],
  ]


class How(NamedTuple):
  """How selected groups of peers enter the update."""

  # Makes training rows of the groups.
  rows: Callable[
    [Sequence[peer_groups.PeerGroup], context_lib.Context],
    Sequence[rows_lib.Row],
  ]
  # What is maximised on these rows: maps (`config.method`, scores, rows), as
  # `objectives.Objective.function` does.
  objective: Callable
  reads: str = 'rollout'  # The kind of records that the groups come from.
  needs: tuple[str, ...] = ()  # Other kinds of records that it reads.
  # What the advantage of a peer's rollout is relative to: the learner's
  # 'baseline', or the group of its 'source', the peer.
  advantage: str = 'baseline'
  # A name in `packing.PEER_AVERAGES`, made of `config.method`.
  average: Callable = lambda settings: 'joint'
  replaces: bool = False  # Whether rows replace own rows of the same prompt.


METHODS = {
  # Group-relative policy optimisation, 2402.03300: no exchange.
  'grpo': Parts(),
  # Group sequence policy optimisation, 2507.18071: ratios of whole responses.
  'gspo': Parts(ratio='sequence'),
  # Mutual RL, 2605.07244: peers' rewards move the baseline.
  'xgrpo': Parts(baseline='pooled'),
  # Mutual RL, 2605.07244: peers' rollouts join the group.
  'prp': Parts(which='all', how='prp', baseline='pooled'),
  # Mutual RL, 2605.07244: a peer's success where a whole group fails.
  'sgt': Parts(which='rescue', how='sgt'),
  # 2603.02604: peers' rollouts, weighed by capability.
  'hacpo': Parts(
    which='all', how='hacpo', baseline='capability', ratio='sequence'
  ),
  # 2609.37868: a peer's compatible responses in place of a failed own group.
  'graft': Parts(which='balanced', how='graft'),
}
WHICH = {
  'none': None,
  'all': Which(select.everything, select.drawn),
  'rescue': Which(select.rescue, select.where_all_fail),
  'complementary': Which(select.complementary, select.where_all_fail),
  'balanced': Which(select.balanced, select.where_any_fails),
  'random': Which(select.random, select.everything),
}
BASELINES = {
  'own': grpo.own,
  # The others read peers' `GroupStats`.
  'pooled': xgrpo.pooled,
  'interpolated': xgrpo.interpolated,
  'capability': hacpo.baseline,
}
HOW = {
  'none': None,
  'prp': How(rows=prp.rows, objective=objectives.peer_ratio),
  'sgt': How(
    rows=sgt.rows,
    objective=objectives.log_likelihood,
    reads='outcome',
    average=sgt.average,
  ),
  'hacpo': How(
    rows=hacpo.rows,
    objective=objectives.stepwise,
    needs=('group_stats',),  # Capability, whatever the baseline is.
  ),
  'graft': How(
    rows=graft.rows,
    objective=objectives.grafted,
    advantage='source',
    replaces=True,
  ),
  'luffy': How(
    rows=peer_rows.rows, objective=objectives.shaped, advantage='source'
  ),
}
RATIOS = ('token', 'sequence')


@dataclasses.dataclass(frozen=True)
class Method:
  """A row of the table with its settings."""

  parts: Parts
  settings: ml_collections.ConfigDict  # `config.method`

  @property
  def how(self) -> How | None:
    how, advantage = HOW[self.parts.how], self.settings.peer_advantage
    return how._replace(advantage=advantage) if how and advantage else how

  @property
  def kinds(self) -> frozenset[str]:
    """The kinds of records that policies publish and collect."""
    kinds = {'group_stats'} if self.parts.baseline != 'own' else set()
    if self.how:
      kinds |= {self.how.reads, *self.how.needs}
    return frozenset(kinds)

  def objectives(
    self, by_trainer: bool = False
  ) -> dict[str, objectives.Objective]:
    """What is maximised on own and on peer rows; see `objectives.own`."""
    own = objectives.own(self.settings, self.parts.ratio, by_trainer)
    functions = {'own': own}
    if self.how:
      peer = functools.partial(self.how.objective, self.settings)
      functions['peer'] = objectives.Objective(peer)
    return functions

  @property
  def peer_average(self) -> str:
    """How tokens of peer rows are averaged, a name in `PEER_AVERAGES`."""
    return self.how.average(self.settings) if self.how else 'joint'

  @property
  def reference(self) -> bool:
    """Whether a KL penalty needs the policy as it was before reinforcement."""
    return self.settings.kl_weight > 0

  def choose(
    self, context: context_lib.Context, offered: Sequence[context_lib.Place]
  ) -> Sequence[context_lib.Place]:
    """The groups that the learner has to verify; see `Context.choose`.

    The rows of `batch` are those of a learner that verifies all groups, as long
    as peers' statistics of the others are true.
    """
    if self.how is None:
      return offered
    return WHICH[self.parts.which].candidates(offered, context)

  def addressed(
    self,
    listens_to: Mapping[str, Collection[str]],
    published: Sequence[records.Record],
    receiver: str,
  ) -> list[records.Record]:
    """The records of a round that `receiver` may use, of those of one policy.

    `listens_to` are the peers of every policy. If the receiver draws the groups
    that it learns from, responses of others are not sent to it.
    """
    most, peers = self.settings.max_peer_groups, listens_to[receiver]
    if self.parts.which != 'all' or not 0 < most < len(peers):
      return list(published)
    is_drawn = {
      h.prompt: h.policy in select.draw(peers, most, h, receiver)
      for h in {r.header.prompt: r.header for r in published}.values()
    }
    return [
      r
      for r in published
      if isinstance(r, records.GroupStats) or is_drawn[r.header.prompt]
    ]

  def batch(self, context: context_lib.Context) -> rows_lib.Batch:
    """Turns own groups and what peers gave into the rows of a round."""
    baseline = BASELINES[self.parts.baseline](context)
    peer = self._peer_rows(context, baseline)
    prompts = {row.prompt for row in peer}
    replaced = prompts if self.how and self.how.replaces else ()
    kept = range(len(context.groups)) if context.kept is None else context.kept
    kept = [p for p in kept if p not in replaced]
    return rows_lib.Batch(
      own=self._own_rows(context, baseline, kept),
      peer=peer,
      order=graft.order({*kept, *prompts}, replaced, self.settings.graft.order),
    )

  def _own_rows(self, context, baseline, kept) -> list[rows_lib.Row]:
    """Rows of own groups, with correction weights and the reference's scores."""
    advantage_PG = self._advantages(context, context.rewards_PG, baseline)
    rows = [
      rows_lib.own_row(p, rollout, advantage_PG[p, g])
      for p in kept
      for g, rollout in enumerate(context.groups[p])
    ]
    if rows and self.settings.correction.level != 'none':
      rows = context.rescore(rows)
      sampled = [r.sampling_logp for p in kept for r in context.groups[p]]
      trained = [row.old_logp for row in rows]
      weigh = functools.partial(
        correction.weights, settings=self.settings.correction
      )
      rows = rows_lib.replaced(rows, weight=map(weigh, trained, sampled))
      context.log.mismatch = correction.mismatch(trained, sampled)
    if rows and self.reference:
      scores = context.score(rows, reference=True)
      rows = rows_lib.replaced(rows, reference_logp=scores)
    return rows

  def _peer_rows(self, context, baseline) -> Sequence[rows_lib.Row]:
    if self.how is None:
      return []
    groups = peer_groups.gather(context, self.how.reads)
    groups = WHICH[self.parts.which].select(groups, context)
    groups = select.drawn(groups, context)
    if not groups:
      return []
    if self.how.advantage == 'baseline':
      groups = [self._against(context, baseline, group) for group in groups]
    return self.how.rows(groups, context)

  def _against(self, context, baseline, group) -> peer_groups.PeerGroup:
    """The group, with advantages against the learner's baseline."""
    rewards_1G = np.array([[r.reward for r in group.rollouts]])
    advantage_1G = self._advantages(
      context, rewards_1G, baseline, [group.prompt]
    )
    return group._replace(
      rollouts=[
        msgspec.structs.replace(rollout, advantage=float(advantage))
        for rollout, advantage in zip(
          group.rollouts, advantage_1G[0], strict=True
        )
      ]
    )

  def _advantages(self, context, rewards_PG, baseline, prompts=slice(None)):
    """Advantages against a baseline, bounded in how far peers may move them.

    They stay within a bound of the advantages against the own group's mean, so
    that no claim of peers moves one by more than twice that. The bound is
    `config.method.max_shift`, but at least sqrt(n): one of n pooled rewards is
    never further than sqrt(n - 1) standard deviations from their mean.
    """
    advantages = functools.partial(
      grpo.advantages,
      rewards_PG,
      scale=self.settings.scale,
      leave_one_out=self.settings.leave_one_out,
      prompts=prompts,
    )
    advantage_PG, bound = advantages(baseline), self.settings.max_shift
    if self.parts.baseline == 'own' or not bound:
      return advantage_PG
    pooled = context.group_size * (1 + len(context.peer_moments))
    bound = max(bound, pooled**0.5)
    own_PG = advantages(grpo.own(context))
    bounded_PG = np.clip(advantage_PG, own_PG - bound, own_PG + bound)
    context.log.refused['advantage'] += int((bounded_PG != advantage_PG).sum())
    return bounded_PG


def rescues(context: context_lib.Context) -> Mapping:
  """How many of the prompts that the learner fails are solved by peers.

  Returns 'rescue_rate', of the prompts that a whole own group fails and that
  peers share, the share that any peer solved, and 'rescued_by', the share that
  each peer solved; nothing if there is no such prompt. Of groups that the learner
  did not verify, what the peers claim counts.
  """
  failed = {p for p, n in enumerate(context.successes_P) if not n}
  shared, solved = set(), {}
  for r in context.peer_records:
    prompt = context.index[r.header.prompt]
    shared.add(prompt)
    by_peer = solved.setdefault(r.header.policy, set())
    if r.success if isinstance(r, records.Rollout) else r.successes:
      by_peer.add(prompt)
  failed &= shared  # Prompts of dynamic sampling are the learner's alone.
  if not failed:
    return {}

  def share(prompts):
    return len(failed & prompts) / len(failed)

  return {
    'rescue_rate': share(set().union(*solved.values())),
    'rescued_by': {peer: share(solved[peer]) for peer in sorted(solved)},
  }


def build(settings: ml_collections.ConfigDict) -> Method:
  """The method that `config.method` describes.

  Raises InputError if its parts cannot go together.
  """
  parts = METHODS[settings.name]
  given = {part: settings[part] for part in Parts._fields if settings[part]}
  parts = parts._replace(**given)
  checks.require(
    (parts.which == 'none') == (parts.how == 'none'),
    f'method.which={parts.which} and method.how={parts.how}: give both, or '
    'neither',
  )
  method = Method(parts, settings)
  how, fits = method.how, ('own', 'pooled')
  if how and how.advantage == 'baseline' and how.reads == 'rollout':
    fits = ('pooled',)
  checks.require(
    not settings.leave_one_out or parts.baseline in fits,
    f'method.leave_one_out with method.baseline={parts.baseline} and '
    f'method.how={parts.how}: a reward can be left out only of a mean that '
    f'includes it; use method.baseline={fits[-1]}',
  )
  return method
