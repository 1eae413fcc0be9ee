"""The methods, as one table: every method is a row of parts.

A method says which peer rows are selected, how they enter the update, and what
the baseline of the policy's own rows is. What it publishes follows: the kinds
of records that its parts read. Each part is one function on the host, in
`sharing/`, and what is minimised is one function on arrays, in `losses/`.

  method   which   how     baseline   paper
  grpo     none    none    own        2402.03300
  xgrpo    none    none    pooled     2605.07244
  prp      all     ratio   pooled     2605.07244
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.losses import grpo as grpo_loss
from mrl_jax.losses import prp as prp_loss
from mrl_jax.sharing import grpo
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.sharing import prp
from mrl_jax.sharing import select
from mrl_jax.sharing import xgrpo
from mrl_jax.thl import byte_tokenizer
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
  """How peer rows enter: made on the host, minimised on the device."""

  carry: Callable
  objective: Callable


METHODS = {
  'grpo': Parts(which='none', how='none', baseline='own'),
  'xgrpo': Parts(which='none', how='none', baseline='pooled'),
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


def _own_objective(settings):
  """GRPO on the policy's own rows, whose ratios are by token."""

  def objective(logp_BT, rows: update.Rows):
    ratio_BT = jnp.exp(logp_BT - rows.old_logp_BT)
    return _clipped(ratio_BT, rows, settings)

  return objective


def _ratio_objective(settings):
  """PRP on peer rows, whose ratios are by chunk."""

  def objective(logp_BT, rows: update.Rows):
    ratio_BT = prp_loss.chunk_ratio(
      logp_BT, rows.old_logp_BT, rows.chunk_BT, settings.max_ratio
    )
    return _clipped(ratio_BT, rows, settings)

  return objective


def _clipped(ratio_BT, rows, settings):
  clip = (settings.clip_low, settings.clip_high)
  objective_BT = grpo_loss.clipped_surrogate(
    ratio_BT, rows.advantage_B1, *clip, settings.dual_clip
  )
  mask_BT = rows.weight_BT > 0

  def total(x_BT):
    return jnp.sum(jnp.where(mask_BT, x_BT, 0.0))

  return objective_BT, {
    'tokens': total(1.0),
    'ratio': total(ratio_BT),
    'ratio_square': total(ratio_BT**2),
    'clipped': total(
      grpo_loss.is_clipped(ratio_BT, rows.advantage_B1, *clip) * 1.0
    ),
  }


HOW = {'none': None, 'ratio': How(prp.carry, _ratio_objective)}


@dataclasses.dataclass(frozen=True)
class Method:
  """A row of the table, with its settings."""

  parts: Parts
  settings: object  # `config.method`

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
    return {'own': _own_objective(self.settings), **peer}

  def publish(
    self, groups: Sequence[Sequence[records.Rollout]]
  ) -> list[records.Record]:
    """The records of a policy's groups that its peers will read."""
    published = []
    if 'rollout' in self.kinds:
      published += [rollout for group in groups for rollout in group]
    if 'group_stats' in self.kinds:
      published += [xgrpo.group_stats(group) for group in groups]
    return published

  def learn(
    self,
    groups: Sequence[Sequence[records.Rollout]],
    received: Sequence[records.Record],
    receiver: byte_tokenizer.ByteTokenizer,
    max_tokens: int,
  ) -> lesson_lib.Lesson:
    """Turns own groups and what peers gave into rows to train on.

    Args:
      groups: the policy's own rollouts of each prompt of the round.
      received: records of its peers; those about other prompts are left out.
      receiver: its tokenizer.
      max_tokens: the longest response it trains on.
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
      groups, used, place, baseline_P3, receiver, max_tokens
    )
    return lesson_lib.Lesson(
      own=own, peer=peer, residuals=residuals, peer_records=len(used)
    )

  def _peer_rows(self, groups, used, place, baseline_P3, receiver, max_tokens):
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
      max_tokens,
    )


def build(settings) -> Method:
  """The method that `config.method` describes.

  `settings.name` is a row of the table; `which`, `how` and `baseline`, where
  they are not empty, replace a part of it.
  """
  parts = checks.choose(settings.name, METHODS, 'method')
  for field, table in (('which', WHICH), ('how', HOW), ('baseline', BASELINES)):
    if settings[field]:
      checks.choose(settings[field], table, field)
      parts = parts._replace(**{field: settings[field]})
  checks.require(
    (parts.which == 'none') == (parts.how == 'none'),
    f'method.which={parts.which} and method.how={parts.how}: give both, or '
    'neither; rows that are selected must enter somehow',
  )
  return Method(parts, settings)
