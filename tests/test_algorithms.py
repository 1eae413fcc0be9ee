import dataclasses
import inspect

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax.sharing import publish
from mrl_jax.sharing import xgrpo
from mrl_jax.thl import transfer
from mrl_jax.training import packing as batch
from tests import examples

OWN = examples.tokenizer('byte_level')
OTHER = examples.tokenizer('sentencepiece')
PROMPTS = ('p0', 'p1')
OWN_REWARDS = ((1, 0, 0, 0), (0, 0, 0, 0))


def method(name, **changes):
  settings = examples.run_config().method
  settings.update_from_flattened_dict({'name': name, **changes})
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


def learn(name, received=(), rewards=OWN_REWARDS, **changes):
  return method(name, **changes).lesson(
    groups(rewards), received, examples.learner(OWN)
  )


def same_rows(a, b):
  for x, y in zip(a, b, strict=True):
    for field, other in zip(x, y, strict=True):
      np.testing.assert_array_equal(field, other)


@pytest.mark.parametrize(
  ('name', 'kinds'),
  [
    ('grpo', set()),
    ('xgrpo', {'group_stats'}),
    ('gspo', set()),
    ('prp', {'group_stats', 'rollout'}),
    ('sgt', {'outcome'}),
    ('hacpo', {'group_stats', 'rollout'}),
    ('graft', {'rollout'}),
  ],
)
def test_a_method_publishes_what_its_parts_read(name, kinds):
  assert method(name).kinds == kinds
  published = publishes(name, groups(((1, 0), (0, 0))))
  per_kind = {'group_stats': 2, 'rollout': 4, 'outcome': 2}
  assert len(published) == sum(per_kind[kind] for kind in kinds)


def packed(name, lesson):
  """The arrays of a round's only mini-batch."""
  (parts,) = batch.Packer(
    context=4,
    lengths={'own': 20, 'peer': 20},
    multiple=4,
    micro_rows=8,
    mini_batches=1,
    aggregation='token_mean',
    peer_average=method(name).peer_average,
  ).mini_batch_parts([np.ones(2, np.int32)] * 2, lesson)
  return parts


@pytest.mark.parametrize(
  ('name', 'base'),
  [
    ('xgrpo', 'grpo'),
    ('prp', 'grpo'),
    ('sgt', 'grpo'),
    ('graft', 'grpo'),
    ('hacpo', 'gspo'),
  ],
)
def test_without_peer_records_a_method_is_its_base_bit_for_bit(name, base):
  alone, expected = learn(name), learn(base)
  same_rows(alone.own, expected.own)
  assert list(alone.peer) == []
  assert alone.order == expected.order == [0, 1]
  assert alone.peer_records == 0
  ours, theirs = packed(name, alone), packed(base, expected)
  assert set(ours) == {'own'}
  for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_array_equal(x, y)
  same_objective(name, base)


def same_objective(name, base, part='own'):
  logp_BT, rows = jnp.log(jnp.array([[0.5, 0.4]])), fake_rows()
  found, expected = (
    method(n).objectives[p](logp_BT, rows)
    for n, p in ((name, part), (base, 'own'))
  )
  for x, y in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(x, y)


def test_gspo_on_responses_of_one_token_is_grpo():
  rows = dataclasses.replace(
    fake_rows(),
    mask_BT=jnp.array([[True, False]]),
    old_logp_BT=jnp.zeros((1, 2)),
  )
  logp_BT = jnp.log(jnp.array([[0.9, 1.0]]))
  found, expected = (
    method(name).objectives['own'](logp_BT, rows)[0][0, 0]
    for name in ('gspo', 'grpo')
  )
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def fake_rows(advantage=1.0):
  return batch.update.Rows(
    tokens_BS=None,
    valid_BS=None,
    old_logp_BT=jnp.log(jnp.array([[0.25, 0.5]])),
    advantage_B1=jnp.array([[advantage]]),
    weight_BT=jnp.array([[0.5, 0.5]]),
    chunk_BT=jnp.array([[0, 1]]),
    mask_BT=jnp.array([[True, True]]),
    mini_batch_B1=jnp.zeros((1, 1)),
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
    examples.learner(OWN),
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
    own,
    publishes('prp', groups(((1, 0), (1, 1)), 'b')),
    examples.learner(OTHER, limits=strict),
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
  assert changed.parts == ('all', 'ratio', 'own', 'token')
  assert changed.kinds == {'rollout'}


def test_parts_that_do_not_go_together_are_refused():
  with pytest.raises(checks.InputError, match='give both, or neither'):
    method('grpo', which='all')
  with pytest.raises(checks.InputError, match="Did you mean 'pooled'"):
    method('grpo', baseline='poled')
  with pytest.raises(checks.InputError, match="Did you mean 'xgrpo'"):
    method('xgrp')


PEER_REWARDS = ((1, 1, 0, 0), (0, 1, 1, 0))


def test_sgt_demonstrates_where_the_whole_group_fails():
  lesson = learn('sgt', publishes('sgt', groups(PEER_REWARDS, 'b', OTHER)))
  same_rows(lesson.own, learn('grpo').own)
  (row,) = lesson.peer
  assert row.prompt == 1
  assert OWN.decode(row.ids) in (b'= 4', b'= 5')
  assert lesson.metrics['rescue_rate'] == 1.0
  # Lambda times the mean over its tokens, over both prompts of the batch.
  weight_BT = packed('sgt', lesson)['peer'].weight_BT
  assert weight_BT.sum() == pytest.approx(0.1 / 2)
  lesson = learn('sgt', publishes('sgt', groups(((1, 1), (0, 0)), 'b')))
  assert (list(lesson.peer), lesson.metrics['rescue_rate']) == ([], 0.0)


def test_it_is_told_which_peer_solved_what_the_whole_group_fails():
  received = [
    *publishes('xgrpo', groups(((0, 1), (0, 0)), 'b')),
    *publishes('prp', groups(((0, 1), (1, 0)), 'c')),
    *publishes('sgt', groups(((0, 0), (0, 0)), 'd')),
  ]

  def told(own):
    learner = examples.learner(OWN)
    return method('xgrpo').lesson(groups(own), received, learner).metrics

  assert told(((0, 0), (0, 0)))['rescued_by'] == {'b': 0.5, 'c': 1.0, 'd': 0.0}
  assert told(((1, 0), (0, 0)))['rescued_by'] == {'b': 0.0, 'c': 1.0, 'd': 0.0}
  assert 'rescued_by' not in told(((1, 0), (0, 1)))


def test_sgt_without_weight_is_grpo_bit_for_bit():
  received = publishes('sgt', groups(PEER_REWARDS, 'b'))
  lesson = learn('sgt', received, **{'sgt.weight': 0.0})
  ours, theirs = packed('sgt', lesson), packed('grpo', learn('grpo'))
  for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_array_equal(x, y)


def test_sgt_may_be_as_strong_however_few_prompts_are_rescued():
  changed = method('sgt', **{'sgt.normaliser': 'rescue'})
  assert (method('sgt').peer_average, changed.peer_average) == (
    'prompts',
    'rows',
  )


def test_graft_replaces_a_group_that_failed_by_the_peers_whole_group():
  peers = groups(PEER_REWARDS, 'b')
  # The peer fails where this policy has both kinds of samples.
  peers[0] = groups(((0,) * 4, (0,) * 4), 'b')[0]
  received = publishes('graft', peers)
  everything = {'graft.admission': 'all', 'graft.weighted': False}
  lesson = learn('graft', received, **everything)
  assert [row.prompt for row in lesson.own] == [0] * 4
  assert [row.prompt for row in lesson.peer] == [1] * 4
  # In the peer's own group: 0 1 1 0.
  np.testing.assert_allclose(
    [row.advantage for row in lesson.peer], [-1, 1, 1, -1], rtol=1e-5
  )
  assert lesson.order == [0, 1]
  first = learn('graft', received, **everything, **{'graft.order': 'first'})
  assert first.order == [1, 0]
  # Against 0 0 0 0 of the policy itself, and against all eight together.
  for baseline, expected in (
    ('own', [0, 1, 1, 0]),
    ('pooled', [-0.57735, 1.7320, 1.7320, -0.57735]),
  ):
    changed = learn(
      'graft',
      [*received, *(xgrpo.group_stats(group) for group in peers)],
      **everything,
      peer_advantage='baseline',
      baseline=baseline,
    )
    np.testing.assert_allclose(
      [row.advantage for row in changed.peer], expected, rtol=1e-4
    )
  same_objective('graft', 'grpo', 'peer')


def test_graft_keeps_a_group_of_which_no_substitute_is_compatible():
  # The learner finds every token as likely as 1/e, the peer as likely as 1.
  peers = [
    [msgspec.structs.replace(r, policy_logp=0 * r.policy_logp) for r in group]
    for group in groups(((0,) * 4, (0, 1, 1, 0)), 'b')
  ]
  lesson = learn('graft', publishes('graft', peers))
  same_rows(lesson.own, learn('grpo').own)
  assert list(lesson.peer) == []
  assert lesson.metrics['refused'] == {'incompatible': 4}
  assert lesson.metrics['admitted'] == 0.0


def test_hacpo_takes_everything_against_the_learners_own_baseline():
  received = publishes('hacpo', groups(PEER_REWARDS, 'b'))
  learner = examples.learner(OWN, ratios={'a': 1.0, 'b': 0.5})
  lesson = method('hacpo', scale='none').lesson(
    groups(OWN_REWARDS), received, learner
  )
  # p0: (1 + .5 * 2) / 8 = .25; p1: (0 + .5 * 2) / 8 = .125; w(j, k) = 2.
  np.testing.assert_allclose(
    [r.advantage for r in lesson.own[:2]], [0.75, -0.25]
  )
  np.testing.assert_allclose(
    [r.advantage for r in lesson.peer], [1.5, 1.5, -0.5, -0.5,
                                         -0.25, 1.75, 1.75, -0.25]
  )  # fmt: skip
  assert lesson.metrics['capability'] == {'b': 2.0}


def test_any_which_goes_with_any_how():
  for which in ('all', 'rescue', 'complementary', 'balanced', 'random'):
    for how in ('ratio', 'nll', 'hacpo', 'graft', 'luffy'):
      changes = {'which': which, 'how': how, 'graft.admission': 'all'}
      kinds = method('grpo', **changes).kinds
      peers = groups(((0,) * 4, (0, 1, 1, 0)), 'b', OTHER)
      received = publish.publish(peers, kinds, texts=4, verifier='exact')
      lesson = learn('grpo', received, **changes)
      prompts = {row.prompt for row in lesson.peer}
      expected = {'all': {0, 1}, 'random': prompts}.get(which, {1})
      # No advantage of a 0 or a 1 is large, whatever it is compared with.
      assert all(abs(row.advantage) < 4 for row in lesson.peer)
      # All that p0 offers are failures, which are no demonstrations.
      assert prompts == (expected - {0} if how == 'nll' else expected)
      assert (len(prompts) == 1) or which == 'all' or how == 'nll'


def test_a_policy_may_take_one_peers_group_a_prompt():
  received = [
    r
    for peer in ('b', 'c', 'd')
    for r in publishes('prp', groups(PEER_REWARDS, peer))
  ]
  assert len(learn('prp', received).peer) == 3 * 8
  bounded = learn('prp', received, max_peer_groups=1)
  assert [row.prompt for row in bounded.peer] == [0] * 4 + [1] * 4
  same_rows(bounded.own, learn('prp', received).own)  # The baseline is all's.


def test_refills_do_not_thin_out_the_rescues():
  received = publishes('sgt', groups(PEER_REWARDS, 'b'))
  own = groups(((1, 0), (0, 0)))
  refill = examples.group([0.0, 0.0], prompt='p0~0', encoder=OWN)
  lesson = method('sgt').lesson(
    [*own, refill], received, examples.learner(OWN), kept=[0]
  )
  assert lesson.metrics['rescue_rate'] == 1.0
  assert lesson.order == [0, 1]  # What a peer demonstrates is kept, too.
  assert [row.prompt for row in lesson.peer] == [1]


def test_a_round_may_have_nothing_to_train_on():
  lesson = method('hacpo', kl_weight=0.1).lesson(
    groups(OWN_REWARDS), [], examples.learner(OWN), kept=[]
  )
  assert list(lesson.own) == list(lesson.order) == []
  parts = packed('hacpo', lesson)
  assert not parts['own'].weight_BT.any()


def test_a_reward_is_left_out_only_of_a_mean_that_it_is_in():
  assert method('prp', leave_one_out=True)
  assert method('graft', leave_one_out=True)
  for name, changes in (
    ('prp', {'baseline': 'own'}),
    ('hacpo', {}),
    ('grpo', {'baseline': 'interpolated'}),
  ):
    with pytest.raises(checks.InputError, match='leave_one_out with method'):
      method(name, leave_one_out=True, **changes)


def test_some_prompts_may_be_kept_out_of_the_own_rows():
  lesson = method('grpo').lesson(
    groups(OWN_REWARDS), [], examples.learner(OWN), kept=[1]
  )
  assert [row.prompt for row in lesson.own] == [1] * 4
  assert lesson.order == [1]


def test_own_rows_are_corrected_for_what_the_sampler_did_otherwise():
  plain = learn('grpo')
  lesson = learn('grpo', **{'correction.level': 'token'})
  sampled = groups(OWN_REWARDS)[0][0].sampling_logp
  np.testing.assert_array_equal(lesson.own[0].old_logp, -1.0)  # The trainer's.
  np.testing.assert_allclose(
    lesson.own[0].weight, np.minimum(np.exp(-1.0 - sampled), 2.0), rtol=1e-6
  )
  assert lesson.metrics['mismatch'].keys() == {
    'kl', 'max_ratio', 'ess_fraction',
  }  # fmt: skip
  assert plain.own[0].weight == 1.0


def test_a_penalty_needs_a_reference_and_nothing_else_does():
  asked = []

  def score(rows, reference=False):
    asked.append(reference)
    return [np.full(len(row.ids), -2.0, np.float32) for row in rows]

  for weight in (0.0, 0.1):
    changed = method('grpo', kl_weight=weight)
    lesson = changed.lesson(
      groups(OWN_REWARDS), [], examples.learner(OWN, score=score)
    )
    assert changed.reference == (weight > 0)
  np.testing.assert_array_equal(lesson.own[0].reference_logp, -2.0)
  assert asked == [True]


@pytest.mark.parametrize(
  ('key', 'near'),
  [
    ('scale', 'batch_std'),
    ('kl_form', 'k3'),
    ('ratio', 'sequence'),
    ('peer_advantage', 'source'),
    ('correction.level', 'token'),
    ('correction.kind', 'mask'),
    ('prp.level', 'chunk'),
    ('prp.denominators', 'behaviour'),
    ('sgt.normaliser', 'rescue'),
    ('graft.admission', 'random'),
    ('graft.order', 'first'),
  ],
)
def test_a_misspelt_setting_is_answered_with_the_nearest(key, near):
  assert method('grpo', **{key: near})
  with pytest.raises(checks.InputError, match=f"{key}.*Did you mean '{near}'"):
    method('grpo', **{key: near + 'x'})


def test_functions_of_the_tables_can_be_found_from_their_names():
  functions = [
    *algorithms.WHICH.values(),
    *(baseline.function for baseline in algorithms.BASELINES.values()),
    *(how.carry for how in algorithms.HOW.values() if how),
  ]
  for function in functions:
    assert inspect.getmodule(function).__name__.startswith('mrl_jax.sharing')
