import collections
import dataclasses
import functools
import inspect

import hypothesis
import hypothesis.strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax import records
from mrl_jax.models import logps
from mrl_jax.sharing import publish
from mrl_jax.thl import transfer
from mrl_jax.training import packing
from mrl_jax.update import objectives
from tests import examples

OWN = examples.tokenizer('byte_level')
OTHER = examples.tokenizer('sentencepiece')
PROMPTS = ('p0', 'p1')
OWN_REWARDS = ((1, 0, 0, 0), (0, 0, 0, 0))
PEER_REWARDS = ((1, 1, 0, 0), (0, 1, 1, 0))


def method(name, **changes):
  return algorithms.build(examples.settings(name, **changes))


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


def publishes(name, groups, **changes):
  """What a policy with this method publishes about its groups."""
  kinds = method(name, **changes).kinds
  return publish.publish(groups, kinds, texts=4, verifier='exact')


def learn(name, received=(), rewards=OWN_REWARDS, context=None, **changes):
  """The batch of a round, and the context that it was made of."""
  made = method(name, **changes)
  context = examples.context(
    **{'tokenizer': OWN, 'groups': groups(rewards), **(context or {})},
    received=received,
    method=made.settings,
  )
  return made.batch(context), context


def same_rows(a, b):
  for x, y in zip(a, b, strict=True):
    for field, other in zip(x, y, strict=True):
      np.testing.assert_array_equal(field, other)


def same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


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


def packed(name, batch, **changes):
  """The arrays of a round's only mini-batch."""
  (parts,) = packing.Packer(
    context=4,
    lengths={'own': 20, 'peer': 20},
    train=examples.train(micro_rows=8),
    peer_average=method(name, **changes).peer_average,
  ).mini_batch_parts([np.ones(2, np.int32)] * 2, batch)
  return parts


def is_base(name, changes, base):
  """Asserts that without peers a method is its base, bit for bit."""
  alone, context = learn(name, **changes)
  expected, _ = learn(base)
  same_rows(alone.own, expected.own)
  assert list(alone.peer) == []
  assert alone.order == expected.order == [0, 1]
  assert context.peer_records == []
  ours, theirs = packed(name, alone, **changes), packed(base, expected)
  assert set(ours) == {'own'}
  same(ours, theirs)
  same(
    evaluate(method(name, **changes).objectives()['own']),
    evaluate(method(base).objectives()['own']),
  )


@pytest.mark.parametrize('name', algorithms.METHODS)
def test_without_peers_every_method_is_its_base(name):
  ratio = algorithms.METHODS[name].ratio
  is_base(name, {}, {'token': 'grpo', 'sequence': 'gspo'}[ratio])


@pytest.mark.parametrize('baseline', algorithms.BASELINES)
def test_without_peers_every_baseline_is_the_own_one(baseline):
  is_base('grpo', {'baseline': baseline}, 'grpo')


@pytest.mark.parametrize(
  'how', [how for how in algorithms.HOW if how != 'none']
)
@pytest.mark.parametrize(
  'which', [which for which in algorithms.WHICH if which != 'none']
)
def test_any_which_goes_with_any_how(which, how):
  changes = {'which': which, 'how': how, 'graft.admission': 'all'}
  is_base('grpo', changes, 'grpo')
  peers = groups(((0,) * 4, (0, 1, 1, 0)), 'b', OTHER)
  batch, _ = learn('grpo', publishes('grpo', peers, **changes), **changes)
  prompts = {row.prompt for row in batch.peer}
  expected = {'all': {0, 1}, 'random': prompts}.get(which, {1})
  # No advantage of a 0 or a 1 is large, whatever it is compared with.
  assert all(abs(row.advantage) < 4 for row in batch.peer)
  # All that the peer has on p0 are failures, which are no demonstrations.
  demonstrates = algorithms.HOW[how].reads == 'outcome'
  assert prompts == (expected - {0} if demonstrates else expected)
  assert len(prompts) == 1 or which == 'all' or demonstrates


def evaluate(objective, logp_BS=None, rows=None):
  """An objective, on one row of two tokens by default."""
  logp_BS = jnp.log(jnp.array([[0.5, 0.4]])) if logp_BS is None else logp_BS
  return objective.function(logps.Scores(logp_BS), rows or one_row())


def one_row():
  return objectives.PackedRows(
    tokens_BS=None,
    row_BS=jnp.array([[1, 1]]),
    old_logp_BS=jnp.log(jnp.array([[0.25, 0.5]])),
    advantage_BS=jnp.array([[1.0, 1.0]]),
    weight_BS=jnp.array([[0.5, 0.5]]),
    chunk_BS=jnp.array([[0, 1]]),
    mask_BS=jnp.array([[True, True]]),
    mini_batch_B1=jnp.zeros((1, 1)),
  )


def test_gspo_on_responses_of_one_token_is_grpo():
  rows = dataclasses.replace(
    one_row(),
    mask_BS=jnp.array([[True, False]]),
    old_logp_BS=jnp.zeros((1, 2)),
  )
  logp_BS = jnp.log(jnp.array([[0.9, 1.0]]))
  gspo, grpo = (
    evaluate(method(name).objectives()['own'], logp_BS, rows)[0][0, 0]
    for name in ('gspo', 'grpo')
  )
  np.testing.assert_allclose(gspo, grpo, rtol=1e-6)


def test_xgrpo_moves_the_baseline_by_what_peers_got():
  peers = groups(((1, 1, 1, 1), (1, 1, 0, 0)), 'b')
  batch, context = learn('xgrpo', publishes('xgrpo', peers))
  # p0: mean 5/8; p1: own all fail, 2 of 8 succeed, -sqrt(2 / 6).
  advantages = [row.advantage for row in batch.own]
  deviation = np.sqrt(5 / 8 - 25 / 64)
  np.testing.assert_allclose(advantages[0], (1 - 5 / 8) / deviation, rtol=1e-4)
  np.testing.assert_allclose(advantages[4:], -np.sqrt(2 / 6), rtol=1e-4)
  assert len(context.peer_records) == 2


def test_prp_with_an_identical_peer_is_grpo_with_groups_of_twice_the_size():
  peers = groups(((1, 1, 0, 0), (0, 0, 0, 1)), 'b')
  batch, _ = learn('prp', publishes('prp', peers))
  joined = [
    a + b for a, b in zip(groups(((1, 0, 0, 0), (0,) * 4)), peers, strict=True)
  ]
  doubled, _ = learn('grpo', context={'groups': joined})
  joint = sorted((*batch.own, *batch.peer), key=lambda row: row.prompt)
  assert len(joint) == len(doubled.own) == 16
  for row, expected in zip(joint, doubled.own, strict=True):
    np.testing.assert_array_equal(row.ids, expected.ids)
    np.testing.assert_array_equal(row.old_logp, expected.old_logp)
    np.testing.assert_array_equal(row.chunk, expected.chunk)
    assert row.advantage == pytest.approx(expected.advantage, rel=1e-6)
  logp_BS = jnp.log(jnp.array([[0.27, 0.55]]))  # Inside clip and truncation.
  peer, own = (
    evaluate(method('prp').objectives()[part], logp_BS)[0]
    for part in ('peer', 'own')
  )
  np.testing.assert_allclose(peer, own, rtol=1e-6)


def test_prp_carries_peers_into_the_learners_vocabulary():
  received = publishes('prp', groups(((1, 0), (1, 1)), 'b', OTHER))
  batch, context = learn('prp', received)
  assert [OWN.decode(row.ids) for row in batch.peer] == [b'= 3', b'= 4'] * 2
  assert context.log.residuals['b'].rollouts == 4
  received = publishes('prp', groups(((1, 0), (1, 1)), 'b'))
  strict = transfer.Limits(max_tokens=20, max_residual=0.0)
  batch, context = learn(
    'prp', received, context={'tokenizer': OTHER, 'limits': strict}
  )
  assert list(batch.peer) == []
  assert context.log.residuals['b'].refused == {'residual': 4}


def test_records_about_other_prompts_are_left_out():
  stats = examples.stats([1.0], policy='b', prompt='p9')
  batch, context = learn('xgrpo', [stats])
  same_rows(batch.own, learn('grpo')[0].own)
  assert context.peer_records == []


finite = functools.partial(
  hypothesis.strategies.floats, allow_nan=False, allow_infinity=False
)


@hypothesis.given(
  name=hypothesis.strategies.sampled_from(
    ['xgrpo', 'prp', 'hacpo', 'interpolated']
  ),
  own=hypothesis.strategies.lists(finite(0, 1), min_size=4, max_size=4),
  claims=hypothesis.strategies.lists(
    hypothesis.strategies.tuples(
      hypothesis.strategies.integers(1, 2**31),
      finite(-1e12, 1e12),
      finite(0, 1e12),
    ),
    min_size=1,
    max_size=3,
  ),
  ratio=finite(0.1, 10),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_no_statistics_move_an_advantage_further_than_the_bound(
  name, own, claims, ratio
):
  name, changes = (
    ('xgrpo', {'baseline': name}) if name == 'interpolated' else (name, {})
  )
  stats = [
    examples.replace(
      examples.stats([0.0], policy=peer, prompt='p0'),
      count=count,
      reward_sum=reward_sum,
      reward_square_sum=square_sum,
    )
    for peer, (count, reward_sum, square_sum) in zip(
      'bcd', claims, strict=False
    )
  ]
  ratios = {'capability_ratio': dict.fromkeys('abcd', ratio)}
  rewards = (own, own)
  with np.errstate(all='ignore'):
    batch, _ = learn(name, stats, rewards, context=ratios, **changes)
  alone, _ = learn('grpo', rewards=rewards, scale=method(name).settings.scale)
  bound = max(method(name).settings.max_shift, 16**0.5)
  for row, same in zip(batch.own, alone.own, strict=True):
    assert abs(row.advantage - same.advantage) <= bound * (1 + 1e-6)


def test_a_bounded_advantage_is_counted():
  # The peer claims rewards that differ from the own ones by a hair: with a
  # capability of ten, each own reward is far from the baseline in deviations.
  stats = examples.stats([0.999] * 4, policy='b', prompt='p0')
  changes = {
    'context': {'capability_ratio': {'b': 0.1}},
    'rewards': ((1,) * 4, (0,) * 4),
  }
  bounded, context = learn('hacpo', [stats], **changes)
  assert [row.advantage for row in bounded.own] == [5.0] * 4 + [0.0] * 4
  assert context.log.refused['advantage'] == 4
  free, context = learn('hacpo', [stats], max_shift=0.0, **changes)
  assert min(row.advantage for row in free.own[:4]) > 500
  assert not context.log.refused['advantage']


def test_a_rare_success_in_a_large_pool_is_not_bounded():
  # One success in 64 rewards is sqrt(63) deviations above their mean, and moves
  # the advantage by more than `max_shift`.
  fail = (0,) * 32
  peers = groups(((1, *fail[1:]), fail), 'b', OTHER)
  batch, context = learn('prp', publishes('prp', peers), rewards=(fail, fail))
  found = max(row.advantage for row in batch.peer)
  assert found == pytest.approx(63**0.5, rel=1e-3)
  assert not context.log.refused['advantage']


def test_a_flag_replaces_one_part():
  changed = method('prp', baseline='own')
  assert changed.parts == ('all', 'prp', 'own', 'token')
  assert changed.kinds == {'rollout'}


def test_parts_that_do_not_go_together_are_refused():
  with pytest.raises(checks.InputError, match='give both, or neither'):
    method('grpo', which='all')


def test_sgt_demonstrates_where_the_whole_group_fails():
  peers = groups(PEER_REWARDS, 'b', OTHER)
  batch, context = learn('sgt', publishes('sgt', peers))
  same_rows(batch.own, learn('grpo')[0].own)
  (row,) = batch.peer
  assert row.prompt == 1
  assert OWN.decode(row.ids) in (b'= 4', b'= 5')
  assert algorithms.rescues(context)['rescue_rate'] == 1.0
  # Lambda times the mean over its tokens, over both prompts of the batch.
  (rows,) = packed('sgt', batch)['peer']
  assert rows.weight_BS.sum() == pytest.approx(0.1 / 2)
  peers = groups(((1, 1), (0, 0)), 'b')
  batch, context = learn('sgt', publishes('sgt', peers))
  assert list(batch.peer) == []
  assert algorithms.rescues(context)['rescue_rate'] == 0.0


def test_it_is_counted_which_peer_solves_what_the_whole_group_fails():
  received = [
    *publishes('xgrpo', groups(((0, 1), (0, 0)), 'b')),
    *publishes('prp', groups(((0, 1), (1, 0)), 'c')),
    *publishes('sgt', groups(((0, 0), (0, 0)), 'd')),
  ]

  def rescues(own):
    return algorithms.rescues(
      examples.context(OWN, groups=groups(own), received=received)
    )

  assert rescues(((0, 0), (0, 0)))['rescued_by'] == {
    'b': 0.5, 'c': 1.0, 'd': 0.0,
  }  # fmt: skip
  assert rescues(((1, 0), (0, 0)))['rescued_by'] == {
    'b': 0.0, 'c': 1.0, 'd': 0.0,
  }  # fmt: skip
  assert rescues(((1, 0), (0, 1))) == {}


def test_sgt_without_weight_is_grpo_bit_for_bit():
  received = publishes('sgt', groups(PEER_REWARDS, 'b'))
  batch, _ = learn('sgt', received, **{'sgt.weight': 0.0})
  same(packed('sgt', batch), packed('grpo', learn('grpo')[0]))


def test_sgt_may_be_as_strong_however_few_prompts_are_rescued():
  changed = method('sgt', **{'sgt.normaliser': 'rescue'})
  averages = (method('sgt').peer_average, changed.peer_average)
  assert averages == ('prompts', 'rows')


def test_graft_replaces_a_failed_group_by_the_peers_whole_group():
  peers = groups(PEER_REWARDS, 'b')
  # The peer fails where this policy has both kinds of samples.
  peers[0] = groups(((0,) * 4, (0,) * 4), 'b')[0]
  received = publishes('graft', peers)
  everything = {'graft.admission': 'all', 'graft.weighted': False}
  batch, _ = learn('graft', received, **everything)
  assert [row.prompt for row in batch.own] == [0] * 4
  assert [row.prompt for row in batch.peer] == [1] * 4
  # In the peer's own group: 0 1 1 0.
  np.testing.assert_allclose(
    [row.advantage for row in batch.peer], [-1, 1, 1, -1], rtol=1e-5
  )
  assert batch.order == [0, 1]
  first, _ = learn('graft', received, **everything, **{'graft.order': 'first'})
  assert first.order == [1, 0]
  # Against 0 0 0 0 of the policy itself, and against all eight together.
  for baseline, expected in (
    ('own', [0, 1, 1, 0]),
    ('pooled', [-0.57735, 1.7320, 1.7320, -0.57735]),
  ):
    changed, _ = learn(
      'graft',
      [*received, *map(publish.group_stats, peers)],
      **everything,
      peer_advantage='baseline',
      baseline=baseline,
    )
    np.testing.assert_allclose(
      [row.advantage for row in changed.peer], expected, rtol=1e-4
    )
  same(
    evaluate(method('graft').objectives()['peer']),
    evaluate(method('grpo').objectives()['own']),
  )


def test_graft_keeps_a_group_of_which_no_substitute_is_compatible():
  # The learner finds every token as likely as 1/e, the peer as likely as 1.
  peers = [
    [examples.replace(r, policy_logp=0 * r.policy_logp) for r in group]
    for group in groups(((0,) * 4, (0, 1, 1, 0)), 'b')
  ]
  batch, context = learn('graft', publishes('graft', peers))
  same_rows(batch.own, learn('grpo')[0].own)
  assert list(batch.peer) == []
  assert +context.log.refused == {'incompatible': 4}
  assert context.log.metrics['admitted'] == 0.0


def test_hacpo_takes_everything_against_the_learners_own_baseline():
  received = publishes('hacpo', groups(PEER_REWARDS, 'b'))
  capability = {'capability_ratio': {'a': 1.0, 'b': 0.5}}
  batch, context = learn('hacpo', received, context=capability, scale='none')
  # p0: (1 + .5 * 2) / 8 = .25; p1: (0 + .5 * 2) / 8 = .125; w(j, k) = 2.
  np.testing.assert_allclose(
    [r.advantage for r in batch.own[:2]], [0.75, -0.25]
  )
  np.testing.assert_allclose(
    [r.advantage for r in batch.peer], [1.5, 1.5, -0.5, -0.5,
                                        -0.25, 1.75, 1.75, -0.25]
  )  # fmt: skip
  assert context.log.metrics['capability'] == {'b': 2.0}


def test_a_policy_may_take_one_peers_group_a_prompt():
  received = [
    r
    for peer in ('b', 'c', 'd')
    for r in publishes('prp', groups(PEER_REWARDS, peer))
  ]
  everything, _ = learn('prp', received)
  assert len(everything.peer) == 3 * 8
  bounded, _ = learn('prp', received, max_peer_groups=1)
  assert [row.prompt for row in bounded.peer] == [0] * 4 + [1] * 4
  same_rows(bounded.own, everything.own)  # The baseline is of all peers.


def test_peers_send_the_groups_that_are_drawn_and_all_statistics():
  listens_to = {'a': ['b', 'c', 'd'], 'b': ['a']}
  bounded, received, count = method('prp', max_peer_groups=1), [], 0
  for peer in listens_to['a']:
    published = publishes('prp', groups(PEER_REWARDS, peer))
    count += len(published)
    received += bounded.addressed(listens_to, published, 'a')
    # Whoever has no more peers than it draws, and methods without a bound.
    assert bounded.addressed(listens_to, published, 'b') == published
    for name, most in (('prp', 0), ('graft', 1), ('sgt', 1), ('xgrpo', 1)):
      other = method(name, max_peer_groups=most)
      assert other.addressed(listens_to, published, 'a') == published
  assert count == 3 * (8 + 2)
  kinds = collections.Counter(map(records.kind, received))
  assert kinds == {'rollout': 8, 'group_stats': 6}
  all_sent = [
    r
    for peer in listens_to['a']
    for r in publishes('prp', groups(PEER_REWARDS, peer))
  ]
  sent, _ = learn('prp', received, max_peer_groups=1)
  expected, _ = learn('prp', all_sent, max_peer_groups=1)
  same_rows(sent.peer, expected.peer)
  same_rows(sent.own, expected.own)


@pytest.mark.parametrize('most', [0, 1, 2])
@pytest.mark.parametrize(
  'how', [how for how in algorithms.HOW if how != 'none']
)
@pytest.mark.parametrize(
  'which', [which for which in algorithms.WHICH if which != 'none']
)
def test_the_same_is_learned_if_only_what_matters_is_verified(which, how, most):
  changes = {
    'which': which,
    'how': how,
    'baseline': 'pooled',
    'max_peer_groups': most,
    'graft.admission': 'all',
  }
  rng, prompts = np.random.default_rng(most), [f'p{p}' for p in range(12)]

  def some(policy, encoder):  # The judge knows a rollout by its text.
    return [
      examples.rollout(
        b'= %d%d' % ('abcd'.index(policy), g),
        reward,
        policy=policy,
        prompt=prompt,
        sample=g,
        encoder=encoder,
      )
      for prompt, n in zip(prompts, rng.integers(0, 4, 12), strict=True)
      for g, reward in enumerate([1.0] * n + [0.0] * (3 - n))
    ]

  def grouped(rollouts):
    return [rollouts[i : i + 3] for i in range(0, len(rollouts), 3)]

  own = grouped(some('a', OWN))
  received = [
    r
    for peer in 'bcd'
    for r in publishes('grpo', grouped(some(peer, OTHER)), **changes)
  ]
  found = []
  for choose in (None, method('grpo', **changes).choose):
    context = {'groups': own, 'choose': choose}
    context['capability_ratio'] = dict.fromkeys('abcd', 1.0)
    batch, context = learn('grpo', received, context=context, **changes)
    found.append((batch, context, algorithms.rescues(context)))
  (batch, everything, rescues), (chosen, context, same_rescues) = found
  same_rows(batch.own, chosen.own)
  same_rows(batch.peer, chosen.peer)
  assert batch.order == chosen.order
  assert rescues == same_rescues
  assert everything.log.residuals == context.log.residuals
  np.testing.assert_array_equal(
    everything.rng.integers(2**60, size=4), context.rng.integers(2**60, size=4)
  )
  failed = sum(not n for n in context.successes_P)
  solved = sum(n == 3 for n in context.successes_P)
  groups = {
    'all': 12 * (most or 3),
    'rescue': 3 * failed,
    'complementary': 3 * failed,
    'balanced': 3 * (12 - solved),
    'random': 3 * 12,
  }[which]
  assert 0 < failed < 12 - solved < 12
  assert len(context.chosen) == groups
  if algorithms.HOW[how].reads == 'rollout':
    assert context.log.judged == 3 * groups
  if most and which == 'all' and how == 'prp':
    assert len(chosen.peer) == context.log.judged


def test_refills_do_not_thin_out_the_rescues():
  received = publishes('sgt', groups(PEER_REWARDS, 'b'))
  own = groups(((1, 0), (0, 0)))
  refill = examples.group([0.0, 0.0], prompt='p0~0', encoder=OWN)
  batch, context = learn(
    'sgt', received, context={'groups': [*own, refill], 'kept': [0]}
  )
  assert algorithms.rescues(context)['rescue_rate'] == 1.0
  assert batch.order == [0, 1]  # What a peer demonstrates is kept, too.
  assert [row.prompt for row in batch.peer] == [1]


def test_a_round_may_have_nothing_to_train_on():
  batch, _ = learn('hacpo', context={'kept': []}, kl_weight=0.1)
  assert list(batch.own) == list(batch.order) == []
  assert packed('hacpo', batch) == {'own': []}


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
  batch, _ = learn('grpo', context={'kept': [1]})
  assert [row.prompt for row in batch.own] == [1] * 4
  assert batch.order == [1]


def test_own_rows_are_corrected_for_the_mismatch_with_the_sampler():
  plain, context = learn('grpo')
  assert context.log.mismatch is None
  assert plain.own[0].weight == 1.0
  batch, context = learn('grpo', **{'correction.level': 'token'})
  sampled = groups(OWN_REWARDS)[0][0].sampling_logp
  np.testing.assert_array_equal(batch.own[0].old_logp, -1.0)  # The trainer's.
  np.testing.assert_allclose(
    batch.own[0].weight, np.minimum(np.exp(-1.0 - sampled), 2.0), rtol=1e-6
  )
  assert context.log.mismatch.keys() == {'kl', 'max_ratio', 'ess_fraction'}


def test_only_a_kl_penalty_needs_a_reference():
  asked = []

  def score(rows, reference=False):
    asked.append(reference)
    return [np.full(len(row.ids), -2.0, np.float32) for row in rows]

  for weight in (0.0, 0.1):
    batch, _ = learn('grpo', context={'score': score}, kl_weight=weight)
    assert method('grpo', kl_weight=weight).reference == (weight > 0)
  np.testing.assert_array_equal(batch.own[0].reference_logp, -2.0)
  assert asked == [True]


def test_functions_of_the_tables_can_be_found_from_their_names():
  functions = [
    *(f for which in algorithms.WHICH.values() if which for f in which[:2]),
    *algorithms.BASELINES.values(),
    *(how.rows for how in algorithms.HOW.values() if how),
  ]
  for function in functions:
    assert inspect.getmodule(function).__name__.startswith('mrl_jax.sharing')
