"""The contract of the exchange, on every transport."""

import collections
import contextlib
import threading
import time

from absl import logging
import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.sharing import xgrpo
from tests import examples
from tests import exchanges

KINDS = set(exchanges.KINDS)
WAYS = {
  'in_process': exchanges.InProcess,
  'grpc': exchanges.Grpc,
  'journal': exchanges.Journal,
  'processes': exchanges.Processes,
}
# A journal stays on disk until it is read: no publisher waits for room, and
# nothing is read twice.
pushed = pytest.mark.parametrize(
  'connect', ['in_process', 'grpc', 'processes'], indirect=True
)
pytestmark = pytest.mark.filterwarnings(
  'error::pytest.PytestUnhandledThreadExceptionWarning'
)


@pytest.fixture(params=WAYS)
def connect(request, tmp_path):
  """Connects a and b; called with limits that differ from the usual ones."""
  logging.use_absl_handler()
  with contextlib.ExitStack() as pairs:

    def connect(**changes):
      pair = WAYS[request.param](tmp_path, **changes)
      return pairs.enter_context(contextlib.closing(pair))

    yield connect


@contextlib.contextmanager
def running(function, *arguments):
  """Runs it in another thread, and sees it end."""
  thread = threading.Thread(target=function, args=arguments, daemon=True)
  thread.start()
  try:
    yield thread
  finally:
    thread.join(exchanges.DEADLINE_S)
    assert not thread.is_alive()


def balances(pair, waiting=0):
  """The sums of all ledgers; returns how many records b was offered."""
  table = pair.b.ledger.table()
  rows = [row for kinds in table.values() for row in kinds.values()]
  assert all(n >= 0 for row in rows for n in row.values())
  assert sum(row['waiting'] for row in rows) == waiting
  offered = sum(row['published'] for row in rows)
  if sent := pair.sent():
    arrived = [row['acknowledged'] for row in sent.table()['b'].values()]
    assert sum(arrived) == offered
    assert exchanges.waiting(sent) == 0
  return offered


def fates(pair, kind='rollout'):
  row = pair.b.ledger.table()['a'][kind]
  return {fate: n for fate, n in row.items() if n and fate != 'bytes'}


def refusals(pair):
  """Reasons, at both ends."""
  total = collections.Counter(pair.b.ledger.refusals().get('a', {}))
  if sent := pair.sent():
    total.update(sent.refusals().get('b', {}))
  return total


def rounds(received):
  return [record.header.round for record in received]


def test_records_arrive_as_they_were(connect):
  pair = connect()
  group = examples.group([1.0, 0.0])
  sent = [*group, xgrpo.group_stats(group), examples.outcome()]
  pair.publish(0, sent)
  received = pair.b.collect(0, KINDS)
  assert {records.kind(r) for r in received} == KINDS
  by_identity = {records.identity(r): r for r in received}
  for before in sent:
    after = by_identity[records.identity(before)]
    for name in before.__struct_fields__:
      np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
  assert balances(pair) == 4


def test_order_does_not_depend_on_arrival(connect):
  pair = connect(records=200)
  group = examples.group([1.0, 0.0, 0.5], prompt='p1')
  sent = [*group, xgrpo.group_stats(group), *examples.group([1.0] * 2)]
  orders = []
  for round, shift in enumerate([0, 1, 4]):
    moved = sent[shift:] + sent[:shift]
    pair.publish(round, [of_round(r, round) for r in reversed(moved)])
    received = pair.b.collect(round, KINDS)
    orders.append([(r.header.prompt, r.header.sample) for r in received])
  assert orders == [sorted(orders[0])] * 3
  assert len(orders[0]) == 6


def of_round(record, round):
  header = msgspec.structs.replace(record.header, round=round)
  return msgspec.structs.replace(record, header=header)


def test_older_records_come_first(connect):
  pair = connect(max_staleness=1)
  for round in (1, 0):
    pair.publish(round, examples.group([1.0], round=round))
  assert rounds(pair.b.collect(1, KINDS)) == [0, 1]


def test_only_the_kinds_asked_for_are_taken(connect):
  pair = connect()
  group = examples.group([1.0])
  pair.publish(0, [*group, xgrpo.group_stats(group)])
  assert pair.b.collect(0, {'group_stats'}) == [xgrpo.group_stats(group)]
  assert len(pair.b.collect(0, {'rollout'})) == 1


def test_duplicates_are_dropped_and_counted(connect):
  pair = connect()
  pair.publish(0, examples.group([1.0, 0.0]) * 2)
  assert len(pair.b.collect(0, KINDS)) == 2
  assert fates(pair) == {'published': 4, 'used': 2, 'duplicate': 2}
  assert balances(pair) == 4


@pushed
def test_what_was_used_is_a_duplicate_when_it_comes_again(connect):
  pair = connect()
  for _ in range(2):
    pair.publish(0, examples.group([1.0, 0.0]))
    pair.b.collect(0, KINDS)
  assert fates(pair) == {'published': 4, 'used': 2, 'duplicate': 2}
  assert balances(pair) == 4


def test_what_is_too_old_is_dropped_and_what_is_early_stays(connect):
  pair = connect(max_staleness=1)
  for round in range(4):
    pair.publish(round, examples.group([1.0], round=round))
  assert rounds(pair.b.collect(2, KINDS)) == [1, 2]
  assert rounds(pair.b.collect(3, KINDS)) == [3]
  assert fates(pair) == {'published': 4, 'used': 3, 'stale': 1}
  assert balances(pair) == 4


def test_what_comes_too_late_is_stale(connect):
  pair = connect()
  pair.b.collect(1, KINDS)
  pair.publish(0, examples.group([1.0]))
  assert pair.b.collect(1, KINDS) == []
  assert fates(pair) == {'published': 1, 'stale': 1}


def test_unsound_records_are_refused_and_the_rest_goes_on(connect):
  pair = connect(bytes=400)
  pair.publish(
    0,
    [
      examples.rollout(reward=float('nan')),
      examples.rollout(policy='c'),
      examples.rollout(round=1),
      examples.rollout(b'x' * 200),
      examples.rollout(b'', logp=np.ones(1, np.float32)),
      examples.rollout(sample=2),
    ],
  )
  received = pair.b.collect(0, KINDS)
  assert [r.header.sample for r in received] == [2]
  expected = ['reward', 'sender', 'round', 'size', 'logp']
  assert refusals(pair) == collections.Counter(expected)
  assert fates(pair)['used'] == 1
  balances(pair)


def test_another_tokenizer_is_refused_and_both_are_named(connect, caplog):
  pair = connect()
  pair.publish(0, [examples.rollout(tokenizer='other')])
  assert pair.b.collect(0, KINDS) == []
  assert refusals(pair) == {'tokenizer': 1}
  assert "'other', where its tokenizer is 'fingerprint'" in caplog.text


def test_tokens_beyond_the_vocabulary_are_refused(connect):
  pair = connect()
  largest = exchanges.PEER.vocab_size - 1
  for sample, token in enumerate((largest, largest + 1)):
    sound = examples.rollout(sample=sample)
    ids = np.full_like(sound.ids, token)
    pair.publish(
      sample, [of_round(msgspec.structs.replace(sound, ids=ids), sample)]
    )
  assert len(pair.b.collect(0, KINDS)) == 1
  assert pair.b.collect(1, KINDS) == []
  assert refusals(pair) == {'vocabulary': 1}


def test_a_full_queue_lets_its_oldest_go(connect):
  pair = connect(records=2, max_staleness=2)
  for round in (1, 0, 2):
    pair.publish(round, examples.group([1.0], round=round))
  assert rounds(pair.b.collect(2, KINDS)) == [1, 2]
  assert fates(pair) == {'published': 3, 'evicted': 1, 'used': 2}
  assert balances(pair) == 3


@pytest.mark.parametrize('room', [1, 2])
def test_capacity_in_bytes(connect, room):
  record = examples.rollout()
  pair = connect(bytes=room * records.size(record))
  pair.publish(0, examples.group([1.0, 0.0, 1.0]))
  assert len(pair.b.collect(0, KINDS)) == room
  assert fates(pair) == {'published': 3, 'evicted': 3 - room, 'used': room}


@pushed
def test_a_publisher_waits_for_room_and_nothing_is_lost(connect):
  pair = connect(records=1, block_s=exchanges.AGES_S)
  pair.publish(0, examples.group([1.0]))

  def publish():
    for round in (1, 2):
      pair.publish(round, examples.group([1.0], round=round))

  with running(publish) as publisher:
    time.sleep(0.05)
    assert publisher.is_alive()
    for round in range(3):
      exchanges.wait_until(lambda: exchanges.waiting(pair.b.ledger))
      assert rounds(pair.b.collect(round, KINDS)) == [round]
  assert fates(pair) == {'published': 3, 'used': 3}


def test_a_collector_waits_for_a_late_peer(connect):
  pair = connect(wait_s=exchanges.AGES_S)
  with running(late, pair):
    assert len(pair.b.collect(0, KINDS)) == 1
  assert 0 < pair.b.ledger.waited['a'] <= pair.b.ledger.seconds


def late(pair):
  time.sleep(0.05)
  pair.publish(0, examples.group([1.0]))


def test_a_collector_waits_while_a_peer_catches_up(connect):
  pair = connect(wait_s=exchanges.AGES_S)

  def catch_up():
    for round in range(4):
      pair.publish(round, examples.group([1.0], round=round))

  with running(catch_up):
    assert rounds(pair.b.collect(3, KINDS)) == [3]


def test_a_peer_with_nothing_to_say_is_not_waited_for(connect):
  pair = connect(wait_s=exchanges.AGES_S)
  for round in (1, 0):  # What it says late does not take back the rest.
    pair.publish(round, [])
  assert pair.b.collect(1, KINDS) == []
  assert pair.b.ledger.seconds < exchanges.DEADLINE_S


def test_a_silent_peer_is_named_and_used_again_when_it_returns(connect, caplog):
  pair = connect(wait_s=0.01)
  assert pair.b.collect(0, KINDS) == []
  assert 'round 0: b heard nothing from a' in caplog.text
  pair.publish(1, examples.group([1.0], round=1))
  assert len(pair.b.collect(1, KINDS)) == 1


def test_a_peer_that_went_away_is_waited_for_once(connect, caplog):
  pair = connect(wait_s=0.1)
  waited = []
  for round in range(5):
    pair.b.collect(round, KINDS)
    waited.append(pair.b.ledger.waited['a'])
  assert waited == [waited[0]] * 5
  assert waited[0] >= 0.1
  assert caplog.text.count('heard nothing from a') == 1


@pytest.mark.parametrize('connect', ['processes'], indirect=True)
def test_a_peer_that_was_killed_is_used_again_when_it_returns(connect, caplog):
  pair = connect(wait_s=0.5)
  pair.publish(0, examples.group([1.0]))
  assert len(pair.b.collect(0, KINDS)) == 1
  pair.kill()
  assert pair.b.collect(1, KINDS) == []
  assert 'round 1: b heard nothing from a' in caplog.text
  pair.start()
  pair.publish(2, examples.group([1.0], round=2))
  assert rounds(pair.b.collect(2, KINDS)) == [2]


@pushed
def test_state_brings_back_queue_duplicates_and_ledger(connect):
  pair = connect()
  pair.publish(0, examples.group([1.0, 0.0]))
  pair.b.collect(0, KINDS)
  pair.publish(1, examples.group([1.0, 0.0], round=1))
  state, table = pair.b.state(), pair.b.ledger.table()
  pair.restart(state)
  assert pair.b.state() == state
  assert pair.b.ledger.table() == table
  pair.publish(1, examples.group([1.0], round=1))
  pair.publish(0, examples.group([1.0]))
  assert len(pair.b.collect(1, KINDS)) == 2
  assert fates(pair) == {'published': 6, 'used': 4, 'duplicate': 2}


def test_a_restart_repeats_what_followed_the_state(connect):
  pair = connect(max_staleness=1)
  for round in range(2):
    pair.publish(round, examples.group([1.0, 0.0], round=round))
  pair.b.collect(0, KINDS)
  state = pair.b.state()
  first = pair.b.collect(1, KINDS)
  pair.restart(state)
  again = pair.b.collect(1, KINDS)
  assert [*map(records.identity, again)] == [*map(records.identity, first)]
  assert fates(pair) == {'published': 4, 'used': 4}


def test_a_queue_that_comes_back_is_as_full_as_it_was(connect):
  pair = connect(bytes=records.size(examples.rollout()), max_staleness=1)
  pair.publish(0, examples.group([1.0]))
  assert pair.b.collect(0, {'outcome'}) == []
  pair.restart(pair.b.state())
  pair.publish(1, examples.group([1.0], round=1))
  assert pair.b.collect(1, {'outcome'}) == []
  assert fates(pair) == {'published': 2, 'evicted': 1, 'waiting': 1}


def test_memory_of_what_is_gone_does_not_grow(connect):
  pair = connect()
  sizes = set()
  for round in range(10, 40):
    pair.publish(round, examples.group([1.0] * 4, round=round))
    pair.b.collect(round, KINDS)
    pair.saved(round + 1)
    sizes.add(len(pair.b.state()))
  assert max(sizes) - min(sizes) < 64


def test_nothing_is_lost_between_kinds(connect):
  pair = connect()
  pair.publish(0, [xgrpo.group_stats(examples.group([1.0]))])
  assert pair.b.collect(0, {'rollout'}) == []
  assert balances(pair, waiting=1) == 1
  assert pair.b.collect(0, set()) == []
  assert balances(pair, waiting=1) == 1


@pytest.fixture
def receiving(tmp_path):
  pair = exchanges.Receiving(tmp_path, max_staleness=1)
  with contextlib.closing(pair):
    yield pair


def rollouts(round):
  return examples.group([1.0, 0.0], round=round)


def test_what_was_acknowledged_outlives_its_receiver(receiving):
  receiving.publish(0, rollouts(0))
  assert rounds(receiving.b.collect(0)) == [0, 0]
  state = receiving.b.state()
  for round in (1, 2):
    receiving.publish(round, rollouts(round))
  for _ in range(2):  # Used, and forgotten with the process that used it.
    assert rounds(receiving.b.collect(1)) == [1, 1]
    receiving.b.kill()
    receiving.restart(state)
  assert rounds(receiving.b.collect(1)) == [1, 1]
  later = receiving.b.state()
  receiving.b.kill()
  receiving.restart(later)
  assert rounds(receiving.b.collect(2)) == [2, 2]
  sent = receiving.a.sent['b'].table()['b']['rollout']
  received = receiving.b.received().table()['a']['rollout']
  assert sent['acknowledged'] == received['published'] == received['used'] == 6
  assert not received['duplicate']


def test_what_was_acknowledged_comes_back_round_by_round(tmp_path):
  """All at once, it would be more than the queue holds."""
  pair = exchanges.Receiving(tmp_path, records=2)
  with contextlib.closing(pair):
    for round in range(4):
      pair.publish(round, rollouts(round))
      assert rounds(pair.b.collect(round)) == [round] * 2
    pair.b.kill()
    pair.restart(b'')
    for round in range(4):
      assert rounds(pair.b.collect(round)) == [round] * 2
    row = pair.b.received().table()['a']['rollout']
    assert (row['used'], row['evicted']) == (8, 0)


def test_what_was_not_acknowledged_is_sent_again(receiving):
  receiving.publish(0, rollouts(0))
  state = receiving.b.state()
  receiving.b.kill()
  receiving.a.publish(1, rollouts(1))
  assert exchanges.waiting(receiving.a.sent['b']) == 2
  receiving.restart(state)
  exchanges.wait_until(lambda: not exchanges.waiting(receiving.a.sent['b']))
  assert rounds(receiving.b.collect(1)) == [0, 0, 1, 1]
  assert receiving.a.sent['b'].table()['b']['rollout']['acknowledged'] == 4


def test_what_a_checkpoint_holds_is_kept_no_longer(receiving, tmp_path):
  for round in range(3):
    receiving.publish(round, rollouts(round))
    receiving.b.collect(round)
  state = receiving.b.state()
  kept = [*tmp_path.glob('b/*/*')]
  assert len(kept) == 3
  receiving.b.ask('saved', rounds=3)
  kept = [*tmp_path.glob('b/*/*')]
  assert [path.name[:20] for path in kept] == [f'{2:020d}']
  receiving.b.kill()
  receiving.restart(state)
  assert receiving.b.collect(2) == []
  assert not receiving.b.received().table()['a']['rollout']['duplicate']
