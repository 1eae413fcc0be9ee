"""The methods, as one table: every method is a row of parts.

A method says which peer rows are selected, how they enter the update, and what
the baseline of the policy's own rows is. What it publishes follows: the kinds
of records that its parts read. Each part is one function on the host, in
`sharing/`, and what is maximised is one function on arrays, in `losses/`.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

import ml_collections
import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.sharing import grpo
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.sharing import prp
from mrl_jax.sharing import select
from mrl_jax.sharing import xgrpo
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer
from mrl_jax.training import objectives
from mrl_jax.training import update


class Parts(NamedTuple):
  """A row of the table of methods."""

  which: str
  how: str
  baseline: str


class Part(NamedTuple):
  """A function on the host, and the kinds of records that it reads."""

  function: Callable
  reads: tuple[str, ...] = ()


class How(NamedTuple):
  """How peer rows enter: made on the host, maximised on the device."""

  carry: Callable
  objective: Callable


METHODS = {
  # Group-relative policy optimisation, 2402.03300: no exchange.
  'grpo': Parts(which='none', how='none', baseline='own'),
  # Mutual RL, 2605.07244: peers' rewards move the baseline.
  'xgrpo': Parts(which='none', how='none', baseline='pooled'),
  # Mutual RL, 2605.07244: peers' rollouts join the group.
  'prp': Parts(which='all', how='ratio', baseline='pooled'),
}
WHICH = {
  'none': Part(select.nothing),
  'all': Part(select.everything, reads=('rollout',)),
}
BASELINES = {
  'own': Part(grpo.own),
  'pooled': Part(xgrpo.pooled, reads=('group_stats',)),
}
HOW = {'none': None, 'ratio': How(prp.carry, objectives.peer_ratio)}


@dataclasses.dataclass(frozen=True)
class Method:
  """A row of the table, with its settings."""

  parts: Parts
  settings: ml_collections.ConfigDict  # `config.method`

  @property
  def kinds(self) -> frozenset[str]:
    """The kinds of records that policies publish and collect."""
    which, baseline = WHICH[self.parts.which], BASELINES[self.parts.baseline]
    return frozenset(which.reads + baseline.reads)

  @property
  def objectives(self) -> dict[str, update.Objective]:
    """What is maximised on own and on peer rows."""
    how = HOW[self.parts.how]
    peer = {} if how is None else {'peer': how.objective(self.settings)}
    return {'own': objectives.own(self.settings), **peer}

  def lesson(
    self,
    groups: Sequence[Sequence[records.Rollout]],
    received: Sequence[records.Record],
    receiver: byte_tokenizer.ByteTokenizer,
    limits: transfer.Limits,
  ) -> lesson_lib.Lesson:
    """Turns own groups and what peers gave into rows to train on.

    Args:
      groups: the policy's own rollouts of each prompt of the round.
      received: records of its peers; those about other prompts are left out.
      receiver: its tokenizer.
      limits: what it takes of peers' rollouts.
    """
    place = {group[0].header.prompt: p for p, group in enumerate(groups)}
    used = [r for r in received if r.header.prompt in place]
    rewards_PG = np.array([[r.reward for r in group] for group in groups])
    baseline_P3 = BASELINES[self.parts.baseline].function(
      grpo.moments(rewards_PG), xgrpo.peer_moments(used, place)
    )
    advantage_PG = grpo.advantages(rewards_PG, baseline_P3)
    own = [
      lesson_lib.own_row(p, rollout, advantage_PG[p, g])
      for p, group in enumerate(groups)
      for g, rollout in enumerate(group)
    ]
    peer, residuals = self._peer_rows(
      groups, used, place, baseline_P3, receiver, limits
    )
    return lesson_lib.Lesson(
      own=own,
      peer=peer,
      residuals=residuals,
      peer_records=len(used),
      peer_records_unused=len(received) - len(used),
    )

  def _peer_rows(self, groups, used, place, baseline_P3, receiver, limits):
    rollouts = [r for r in used if isinstance(r, records.Rollout)]
    selected = WHICH[self.parts.which].function(groups, rollouts)
    if not selected:
      return [], {}
    prompts = [place[rollout.header.prompt] for rollout in selected]
    reward_B1 = np.array([[rollout.reward] for rollout in selected])
    advantage_B1 = grpo.advantages(reward_B1, baseline_P3[prompts])
    return HOW[self.parts.how].carry(
      zip(prompts, selected, advantage_B1[:, 0], strict=True),
      receiver,
      limits,
    )


def build(settings: ml_collections.ConfigDict) -> Method:
  """The method that `config.method` describes.

  `settings.name` is a row of the table; `which`, `how` and `baseline`, where
  they are not empty, replace a part of it.
  """
  parts = checks.choose(settings.name, METHODS, 'method')
  for field, table in (('which', WHICH), ('how', HOW), ('baseline', BASELINES)):
    if settings[field]:
      checks.choose(settings[field], table, f'method.{field}')
      parts = parts._replace(**{field: settings[field]})
  checks.require(
    (parts.which == 'none') == (parts.how == 'none'),
    f'method.which={parts.which} and method.how={parts.how}: give both, or '
    'neither; rows that are selected must enter somehow',
  )
  return Method(parts, settings)
