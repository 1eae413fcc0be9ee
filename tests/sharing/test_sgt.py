import numpy as np

from mrl_jax.sharing import offers
from mrl_jax.sharing import sgt
from mrl_jax.thl import transfer
from tests import examples

RECEIVER = examples.tokenizer('sentencepiece')
SETTINGS = examples.run_config().method


def offer(prompt, *texts, peer='b'):
  return offers.Offer(peer, prompt, 4, len(texts), texts=texts)


def rows(*chosen, **changes):
  learner = examples.learner(RECEIVER, **changes)
  return sgt.carry(chosen, learner, SETTINGS)


def test_one_success_is_a_demonstration_that_ends():
  carried = rows(offer(3, b'= 13'))
  (row,) = carried.rows
  assert RECEIVER.decode(row.ids) == b'= 13'
  assert row.ids[-1] == RECEIVER.eos_id
  assert (row.prompt, row.advantage, row.weight) == (3, 1.0, 0.1)
  assert row.mask.all()
  assert carried.residuals['b'].rollouts == 1


def test_every_success_may_be_drawn_and_one_is_for_each_prompt():
  seen = set()
  for seed in range(40):
    rng = np.random.default_rng(seed)
    carried = rows(
      offer(0, b'= 1', b'= 2'), offer(0, b'= 3', peer='c'), offer(1, b'= 4'),
      rng=rng,
    )  # fmt: skip
    assert [row.prompt for row in carried.rows] == [0, 1]
    seen.add(RECEIVER.decode(carried.rows[0].ids))
  assert seen == {b'= 1', b'= 2', b'= 3'}


def test_the_same_success_twice_is_no_more_likely():
  seen = []
  for seed in range(60):
    rng = np.random.default_rng(seed)
    peers = [offer(0, b'= 1', peer=peer) for peer in 'cdefghijkl']
    carried = rows(*peers, offer(0, *[b'= 1'] * 50, b'= 2'), rng=rng)
    seen.append(RECEIVER.decode(carried.rows[0].ids))
  assert 15 < seen.count(b'= 2') < 45


def test_whole_rollouts_will_do_as_well():
  group = [
    examples.rollout(b'= 1', 0.0, policy='b'),
    examples.rollout(b'= 2', 1.0, policy='b', sample=1),
  ]
  carried = rows(offers.Offer('b', 0, 2, 1, rollouts=group))
  assert RECEIVER.decode(carried.rows[0].ids) == b'= 2'


def test_what_the_receiver_cannot_write_is_refused_and_counted():
  limits = transfer.Limits(max_tokens=5)
  carried = rows(offer(0, b'= 1 2 3 4 5 6'), offer(1, b'= 1'), limits=limits)
  assert [row.prompt for row in carried.rows] == [1]
  assert carried.residuals['b'].refused == {'too_long': 1}
  assert carried.residuals['b'].refused_bytes == {'too_long': 13}
