import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax.sharing import publish
from mrl_jax.sharing import xgrpo
from mrl_jax.thl import transfer
from mrl_jax.training import batch
from tests import examples

OWN = examples.tokenizer('byte_level')
OTHER = examples.tokenizer('sentencepiece')
PROMPTS = ('p0', 'p1')
LIMITS = transfer.Limits(max_tokens=20)


def method(name, **changes):
  settings = examples.run_config().method
  settings.update(name=name, **changes)
  return algorithms.build(settings)


def groups(rewards, policy='a', encoder=OWN):
  return [
    [
      examples.rollout(
        b'= %d' % (3 + g),
        reward,
        policy=policy,
        prompt=prompt,
        sample=g,
        encoder=encoder,
      )
      for g, reward in enumerate(group)
    ]
    for prompt, group in zip(PROMPTS, rewards, strict=True)
  ]


def publishes(name, groups):
  """What peers of a policy with this method hear of its groups."""
  return publish.publish(groups, method(name).kinds, texts=1, verifier='exact')


def learn(name, received=(), rewards=((1, 0, 0, 0), (0, 0, 0, 0)), **changes):
  own = groups(rewards)
  return method(name, **changes).lesson(own, received, OWN, LIMITS)


def same_rows(a, b):
  for x, y in zip(a, b, strict=True):
    for field, other in zip(x, y, strict=True):
      np.testing.assert_array_equal(field, other)


@pytest.mark.parametrize(
  ('name', 'kinds'),
  [
    ('grpo', set()),
    ('xgrpo', {'group_stats'}),
    ('prp', {'group_stats', 'rollout'}),
  ],
)
def test_a_method_publishes_what_its_parts_read(name, kinds):
  assert method(name).kinds == kinds
  published = publishes(name, groups(((1, 0), (0, 0))))
  per_kind = {'group_stats': 2, 'rollout': 4}
  assert len(published) == sum(per_kind[kind] for kind in kinds)


@pytest.mark.parametrize('name', ['xgrpo', 'prp'])
def test_without_peer_records_a_method_is_grpo_bit_for_bit(name):
  alone, expected = learn(name), learn('grpo')
  same_rows(alone.own, expected.own)
  assert list(alone.peer) == []
  assert alone.peer_records == 0
  ours, theirs = (
    batch.Packer(
      context=4,
      lengths={'own': 20, 'peer': 20},
      multiple=4,
      micro_rows=8,
      mini_batches=1,
      aggregation='token_mean',
    ).mini_batch_parts(
      [np.ones(2, np.int32)] * 2, {'own': lesson.own, 'peer': lesson.peer}
    )
    for lesson in (alone, expected)
  )
  assert [set(parts) for parts in ours] == [{'own'}]
  for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_array_equal(x, y)


def test_own_rows_have_the_same_objective_in_every_method():
  logp_BT = jnp.log(jnp.array([[0.5, 0.4]]))
  rows = fake_rows()
  values = {
    name: method(name).objectives['own'](logp_BT, rows)
    for name in algorithms.METHODS
  }
  for value in values.values():
    for x, y in zip(
      jax.tree.leaves(value), jax.tree.leaves(values['grpo']), strict=True
    ):
      np.testing.assert_array_equal(x, y)


def fake_rows(advantage=1.0):
  return batch.update.Rows(
    tokens_BS=None,
    valid_BS=None,
    old_logp_BT=jnp.log(jnp.array([[0.25, 0.5]])),
    advantage_B1=jnp.array([[advantage]]),
    weight_BT=jnp.array([[0.5, 0.5]]),
    chunk_BT=jnp.array([[0, 1]]),
  )


def test_xgrpo_moves_the_baseline_by_what_peers_got():
  stats = [
    xgrpo.group_stats(group)
    for group in groups(((1, 1, 1, 1), (1, 1, 0, 0)), 'b')
  ]
  lesson = learn('xgrpo', stats)
  # p0: mean 5/8; p1: own all fail, 2 of 8 succeed, -sqrt(2 / 6).
  advantages = [row.advantage for row in lesson.own]
  deviation = np.sqrt(5 / 8 - 25 / 64)
  np.testing.assert_allclose(advantages[0], (1 - 5 / 8) / deviation, rtol=1e-4)
  np.testing.assert_allclose(advantages[4:], -np.sqrt(2 / 6), rtol=1e-4)
  assert lesson.peer_records == 2


def test_prp_with_a_peer_like_oneself_is_grpo_with_a_group_twice_as_large():
  peers = groups(((1, 1, 0, 0), (0, 0, 0, 1)), 'b')
  received = publishes('prp', peers)
  lesson = learn('prp', received)
  doubled = method('grpo').lesson(
    [
      a + b
      for a, b in zip(groups(((1, 0, 0, 0), (0,) * 4)), peers, strict=True)
    ],
    [],
    OWN,
    LIMITS,
  )
  joint = sorted((*lesson.own, *lesson.peer), key=lambda row: row.prompt)
  assert len(joint) == len(doubled.own) == 16
  for row, expected in zip(joint, doubled.own, strict=True):
    np.testing.assert_array_equal(row.ids, expected.ids)
    np.testing.assert_array_equal(row.old_logp, expected.old_logp)
    np.testing.assert_array_equal(row.chunk, expected.chunk)
    assert row.advantage == pytest.approx(expected.advantage, rel=1e-6)
  logp_BT = jnp.log(jnp.array([[0.27, 0.55]]))  # Inside clip and truncation.
  objectives = method('prp').objectives
  np.testing.assert_allclose(
    objectives['peer'](logp_BT, fake_rows())[0],
    objectives['own'](logp_BT, fake_rows())[0],
    rtol=1e-6,
  )


def test_prp_carries_peers_into_the_learners_vocabulary():
  received = publishes('prp', groups(((1, 0), (1, 1)), 'b', OTHER))
  lesson = learn('prp', received)
  assert [OWN.decode(row.ids) for row in lesson.peer] == [b'= 3', b'= 4'] * 2
  assert lesson.residuals['b'].rollouts == 4
  own = groups(((1, 0), (0, 0)))
  strict = transfer.Limits(max_tokens=20, max_residual=0.0)
  refused = method('prp').lesson(
    own, publishes('prp', groups(((1, 0), (1, 1)), 'b')), OTHER, strict
  )
  assert list(refused.peer) == []
  assert refused.residuals['b'].refused == {'residual': 4}


def test_records_about_other_prompts_are_left_out():
  stats = xgrpo.group_stats(examples.group([1.0], policy='b', prompt='p9'))
  lesson = learn('xgrpo', [stats])
  same_rows(lesson.own, learn('grpo').own)
  assert (lesson.peer_records, lesson.peer_records_unused) == (0, 1)


def test_a_flag_replaces_one_part():
  changed = method('prp', baseline='own')
  assert changed.parts == ('all', 'ratio', 'own')
  assert changed.kinds == {'rollout'}


def test_parts_that_do_not_go_together_are_refused():
  with pytest.raises(checks.InputError, match='give both, or neither'):
    method('grpo', which='all')
  with pytest.raises(checks.InputError, match="Did you mean 'pooled'"):
    method('grpo', baseline='poled')
  with pytest.raises(checks.InputError, match="Did you mean 'xgrpo'"):
    method('xgrp')


def test_functions_of_the_tables_can_be_found_from_their_names():
  for table in (algorithms.WHICH, algorithms.BASELINES):
    for part in table.values():
      assert inspect.getmodule(part.function).__name__.startswith(
        'mrl_jax.sharing'
      )
