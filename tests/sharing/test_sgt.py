import numpy as np

from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import sgt
from mrl_jax.thl import transfer
from tests import examples

RECEIVER = examples.tokenizer('sentencepiece')


def group(prompt, *texts, peer='b'):
  return peer_groups.PeerGroup(peer, prompt, 4, len(texts), texts=texts)


def rows(*groups, **changes):
  context = examples.context(
    RECEIVER, method=examples.settings('sgt'), **changes
  )
  return sgt.rows(groups, context), context.log


def test_one_success_is_a_demonstration_that_ends():
  ((row,), log) = rows(group(3, b'= 13'))
  assert RECEIVER.decode(row.ids) == b'= 13'
  assert row.ids[-1] == RECEIVER.eos_id
  assert (row.prompt, row.advantage, row.weight) == (3, 1.0, 0.1)
  assert log.residuals['b'].rollouts == 1


def test_any_success_may_be_drawn_and_every_prompt_has_one():
  seen = set()
  for seed in range(40):
    found, _ = rows(
      group(0, b'= 1', b'= 2'), group(0, b'= 3', peer='c'), group(1, b'= 4'),
      rng=np.random.default_rng(seed),
    )  # fmt: skip
    assert [row.prompt for row in found] == [0, 1]
    seen.add(RECEIVER.decode(found[0].ids))
  assert seen == {b'= 1', b'= 2', b'= 3'}


def test_a_success_that_several_peers_quote_is_no_more_likely():
  seen = []
  for seed in range(60):
    peers = [group(0, b'= 1', peer=peer) for peer in 'cdefghijkl']
    found, _ = rows(
      *peers,
      group(0, *[b'= 1'] * 50, b'= 2'),
      rng=np.random.default_rng(seed),
    )
    seen.append(RECEIVER.decode(found[0].ids))
  assert 15 < seen.count(b'= 2') < 45


def test_successes_may_come_from_whole_rollouts():
  rollouts = [
    examples.rollout(b'= 1', 0.0, policy='b'),
    examples.rollout(b'= 2', 1.0, policy='b', sample=1),
  ]
  found, _ = rows(examples.peer_group(*rollouts))
  assert RECEIVER.decode(found[0].ids) == b'= 2'


def test_texts_that_the_receiver_cannot_write_are_refused_and_counted():
  limits = transfer.Limits(max_tokens=5)
  found, log = rows(group(0, b'= 1 2 3 4 5 6'), group(1, b'= 1'), limits=limits)
  assert [row.prompt for row in found] == [1]
  assert log.residuals['b'].refused == {'too_long': 1}
  assert log.residuals['b'].refused_bytes == {'too_long': 13}
