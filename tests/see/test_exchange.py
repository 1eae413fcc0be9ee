"""The contract of the exchange, on every transport."""

import collections
import contextlib
import threading
import time

import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.sharing import publish
from tests import examples
from tests import exchanges

KINDS = exchanges.KINDS
WAYS = {
  'in_process': exchanges.InProcess,
  'grpc': exchanges.Grpc,
  'journal': exchanges.Journal,
}
# A journal stays on disk until it is read: no publisher waits for room, nothing
# is evicted, and nothing is read twice.
pushed = pytest.mark.parametrize(
  'connect', ['in_process', 'grpc'], indirect=True
)
pytestmark = pytest.mark.filterwarnings(
  'error::pytest.PytestUnhandledThreadExceptionWarning'
)
rollouts, rounds = exchanges.rollouts, exchanges.rounds


@pytest.fixture(params=WAYS)
def connect(request, tmp_path):
  """Connects a and b, with the limits that it is given."""
  with contextlib.ExitStack() as pairs:

    def connect(**changes):
      pair = WAYS[request.param](tmp_path, **changes)
      return pairs.enter_context(contextlib.closing(pair))

    yield connect


@contextlib.contextmanager
def running(function, *arguments):
  """Runs a function in another thread, and sees it end."""
  thread = threading.Thread(target=function, args=arguments, daemon=True)
  thread.start()
  try:
    yield thread
  finally:
    thread.join(exchanges.DEADLINE_S)
    assert not thread.is_alive()


def require_balance(pair, offered, waiting=0):
  """The sums of both ledgers agree with each other and with these numbers."""
  table = pair.b.ledger.table()
  rows = [row for kinds in table.values() for row in kinds.values()]
  assert all(n >= 0 for row in rows for n in row.values())
  assert sum(row['waiting'] for row in rows) == waiting
  assert sum(row['published'] for row in rows) == offered
  if sent := pair.sent():
    arrived = [row['acknowledged'] for row in sent.table()['b'].values()]
    assert sum(arrived) == offered
    assert exchanges.waiting(sent) == 0


def fates(pair):
  return exchanges.fates(pair.b.ledger)


def refusals(pair):
  """Reasons, at both ends."""
  total = collections.Counter(pair.b.ledger.refusals().get('a', {}))
  if sent := pair.sent():
    total.update(sent.refusals().get('b', {}))
  return total


def test_records_arrive_unchanged(connect):
  pair = connect()
  group = examples.group([1.0, 0.0])
  sent = [*group, publish.group_stats(group), examples.outcome()]
  pair.publish(0, sent)
  received = pair.b.collect(0, KINDS)
  assert {records.kind(r) for r in received} == KINDS
  by_identity = {records.identity(r): r for r in received}
  for before in sent:
    after = by_identity[records.identity(before)]
    for name in before.__struct_fields__:
      np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
  require_balance(pair, offered=4)


def test_order_does_not_depend_on_arrival(connect):
  pair = connect(records=200)
  group = examples.group([1.0, 0.0, 0.5], prompt='p1')
  sent = [*group, publish.group_stats(group), *rollouts(count=2)]
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


def test_records_of_earlier_rounds_come_first(connect):
  pair = connect(max_staleness=1)
  for round in (1, 0):
    pair.publish(round, rollouts(round))
  assert rounds(pair.b.collect(1, KINDS)) == [0, 1]


def test_only_the_requested_kinds_are_collected(connect):
  pair = connect()
  group = rollouts()
  pair.publish(0, [*group, publish.group_stats(group)])
  assert pair.b.collect(0, {'outcome'}) == []
  require_balance(pair, offered=2, waiting=2)
  assert pair.b.collect(0, {'group_stats'}) == [publish.group_stats(group)]
  assert pair.b.collect(0, set()) == []
  assert len(pair.b.collect(0, {'rollout'})) == 1
  require_balance(pair, offered=2)


def test_duplicates_are_dropped_and_counted(connect):
  pair = connect()
  pair.publish(0, rollouts(count=2) * 2)
  assert len(pair.b.collect(0, KINDS)) == 2
  assert fates(pair) == {'published': 4, 'used': 2, 'duplicate': 2}
  require_balance(pair, offered=4)


@pushed
def test_a_record_that_comes_again_after_its_use_is_a_duplicate(connect):
  pair = connect()
  for _ in range(2):
    pair.publish(0, rollouts())
    pair.b.collect(0, KINDS)
  assert fates(pair) == {'published': 2, 'used': 1, 'duplicate': 1}


def test_old_records_are_dropped_and_early_ones_stay(connect):
  pair = connect(max_staleness=1)
  for round in range(4):
    pair.publish(round, rollouts(round))
  assert rounds(pair.b.collect(2, KINDS)) == [1, 2]
  assert rounds(pair.b.collect(3, KINDS)) == [3]
  assert fates(pair) == {'published': 4, 'used': 3, 'stale': 1}
  require_balance(pair, offered=4)


def test_a_record_that_comes_too_late_is_stale(connect):
  pair = connect()
  pair.b.collect(1, KINDS)
  pair.publish(0, rollouts())
  assert pair.b.collect(1, KINDS) == []
  assert fates(pair) == {'published': 1, 'stale': 1}


def test_unsound_records_are_refused_and_the_rest_goes_on(connect, caplog):
  pair = connect(bytes=400)
  largest = exchanges.PEER.vocab_size - 1
  sound = [examples.rollout(sample=sample) for sample in range(2)]
  pair.publish(
    0,
    [
      examples.rollout(reward=float('nan')),
      examples.rollout(policy='c'),
      examples.rollout(round=1),
      examples.rollout(run='other'),
      examples.rollout(tokenizer='other'),
      examples.rollout(b'x' * 200),
      examples.rollout(b'', logp=np.ones(1, np.float32)),
      *(
        msgspec.structs.replace(
          r, ids=np.full_like(r.ids, largest + r.header.sample)
        )
        for r in sound
      ),
    ],
  )
  received = pair.b.collect(0, KINDS)
  assert [r.header.sample for r in received] == [0]
  assert received[0].ids.max() == largest
  assert refusals(pair) == dict.fromkeys(
    [
      'reward',
      'sender',
      'round',
      'run',
      'tokenizer',
      'size',
      'logp',
      'vocabulary',
    ],
    1,
  )
  assert "refused a rollout of a: tokenizer Header(run='run'" in caplog.text
  assert "tokenizer='other'" in caplog.text
  assert f'expected round 0 and {exchanges.PEER}' in caplog.text
  assert fates(pair)['used'] == 1


@pushed
@pytest.mark.parametrize('order', [(1, 0, 2), (1, 2, 0)])
def test_a_full_queue_evicts_the_oldest_round_whenever_it_came(connect, order):
  pair = connect(records=2, max_staleness=2)
  for round in order:
    pair.publish(round, rollouts(round))
  assert rounds(pair.b.collect(2, KINDS)) == [1, 2]
  assert fates(pair) == {'published': 3, 'evicted': 1, 'used': 2}
  require_balance(pair, offered=3)


@pushed
@pytest.mark.parametrize('room', [1, 2])
def test_capacity_in_bytes(connect, room):
  pair = connect(bytes=room * records.size(examples.rollout()))
  pair.publish(0, rollouts(count=3))
  assert len(pair.b.collect(0, KINDS)) == room
  assert fates(pair) == {'published': 3, 'evicted': 3 - room, 'used': room}


@pushed
def test_a_publisher_waits_for_room_and_nothing_is_lost(connect):
  pair = connect(records=1, block_s=exchanges.AGES_S)
  pair.publish(0, rollouts())

  def publish():
    for round in (1, 2):
      pair.publish(round, rollouts(round))

  with running(publish) as publisher:
    time.sleep(0.05)
    assert publisher.is_alive()
    for round in range(3):
      exchanges.wait_until(lambda: exchanges.waiting(pair.b.ledger))
      assert rounds(pair.b.collect(round, KINDS)) == [round]
  assert fates(pair) == {'published': 3, 'used': 3}


def test_a_collector_waits_for_a_peer_that_is_late_or_catches_up(connect):
  pair = connect(wait_s=exchanges.AGES_S)

  def publish():
    time.sleep(0.02)
    for round in range(4):
      pair.publish(round, rollouts(round))

  with running(publish):
    assert rounds(pair.b.collect(3, KINDS)) == [3]
  assert 0 < pair.b.ledger.waited['a'] <= pair.b.ledger.seconds


def test_a_peer_that_published_nothing_is_not_waited_for(connect):
  pair = connect(wait_s=exchanges.AGES_S)
  for round in (0, 1, 0):  # The earlier round does not undo the later one.
    pair.publish(round, [])
  assert pair.b.collect(1, KINDS) == []
  assert pair.b.ledger.seconds < exchanges.DEADLINE_S


def test_a_silent_peer_is_named_waited_for_once_and_used_again(connect, caplog):
  pair = connect(wait_s=0.05)
  waited = []
  for round in range(3):
    assert pair.b.collect(round, KINDS) == []
    waited.append(pair.b.ledger.waited['a'])
  assert waited == [waited[0]] * 3
  assert waited[0] >= 0.05
  assert caplog.text.count('heard nothing from a') == 1
  assert 'round 0: b heard nothing from a' in caplog.text
  pair.publish(3, rollouts(3))
  assert len(pair.b.collect(3, KINDS)) == 1


@pushed
def test_state_restores_queue_duplicates_and_ledger(connect):
  pair = connect()
  pair.publish(0, rollouts(count=2))
  pair.b.collect(0, KINDS)
  pair.publish(1, rollouts(1, count=2))
  state, table = pair.b.state(), pair.b.ledger.table()
  pair.restart(state)
  assert pair.b.state() == state
  assert pair.b.ledger.table() == table
  for round in (1, 0):  # Both are there, or were.
    pair.publish(round, rollouts(round))
  assert len(pair.b.collect(1, KINDS)) == 2
  assert fates(pair) == {'published': 6, 'used': 4, 'duplicate': 2}


def test_a_restart_repeats_what_followed_the_state(connect):
  pair = connect(max_staleness=1)
  for round in range(2):
    pair.publish(round, rollouts(round, count=2))
  pair.b.collect(0, KINDS)
  state = pair.b.state()
  first = pair.b.collect(1, KINDS)
  pair.restart(state)
  again = pair.b.collect(1, KINDS)
  assert [*map(records.identity, again)] == [*map(records.identity, first)]
  assert fates(pair) == {'published': 4, 'used': 4}


@pushed
def test_a_restored_queue_is_as_full_as_before(connect):
  pair = connect(bytes=records.size(examples.rollout()), max_staleness=1)
  pair.publish(0, rollouts())
  assert pair.b.collect(0, {'outcome'}) == []
  pair.restart(pair.b.state())
  pair.publish(1, rollouts(1))
  assert pair.b.collect(1, {'outcome'}) == []
  assert fates(pair) == {'published': 2, 'evicted': 1, 'waiting': 1}


def test_the_state_does_not_grow_with_the_past(connect):
  pair = connect()
  sizes = set()
  for round in range(10, 40):
    pair.publish(round, rollouts(round, count=4))
    pair.b.collect(round, KINDS)
    pair.saved(round + 1)
    sizes.add(len(pair.b.state()))
  assert max(sizes) - min(sizes) < 64


# Processes that are killed.


def test_a_killed_sender_is_used_again_when_it_returns(tmp_path, caplog):
  places = exchanges.addresses('ab')
  with contextlib.closing(
    exchanges.remote_node('b', places, tmp_path, wait_s=0.05)
  ) as node:
    b = node.endpoints['b']
    for round in (0, 2):
      a = exchanges.Child('a', places, tmp_path)
      a.ask('publish', round, rollouts(round))
      assert rounds(b.collect(round, KINDS)) == [round]
      a.kill()
      assert b.collect(round + 1, KINDS) == []
      assert f'round {round + 1}: b heard nothing from a' in caplog.text


class KilledReceiver:
  """a is here; b is a process that is killed and started again."""

  def __init__(self, folder, **changes):
    self._options = {'folder': folder, **changes}
    self._places = exchanges.addresses('ab')
    self._node = exchanges.remote_node('a', self._places, **self._options)
    self.a = self._node.endpoints['a']
    self.start()

  def start(self, state=b''):
    self.b = exchanges.Child('b', self._places, state=state, **self._options)

  def restart(self, state=b''):
    self.b.kill()
    self.start(state)

  def publish(self, round):
    exchanges.publish_and_wait(self.a, round, rollouts(round, count=2))

  def collect(self, round):
    return rounds(self.b.ask('collect', round))

  def sent(self):
    return exchanges.fates(self.a.sent['b'], 'b')

  def close(self):
    self._node.close()
    self.b.kill()


@pytest.fixture
def killed(tmp_path):
  with contextlib.closing(KilledReceiver(tmp_path, max_staleness=1)) as pair:
    yield pair


def test_acknowledged_records_outlive_their_receiver(killed):
  killed.publish(0)
  assert killed.collect(0) == [0, 0]
  state = killed.b.ask('state')
  for round in (1, 2):
    killed.publish(round)
  for _ in range(2):  # Used, and forgotten with the process that used it.
    assert killed.collect(1) == [1, 1]
    killed.restart(state)
  assert killed.collect(1) == [1, 1]
  killed.restart(killed.b.ask('state'))
  assert killed.collect(2) == [2, 2]
  assert killed.sent() == {'published': 6, 'acknowledged': 6}
  assert killed.b.ask('fates') == {'published': 6, 'used': 6}


def test_acknowledged_records_come_back_round_by_round(tmp_path):
  """All at once, they would be more than the queue holds."""
  with contextlib.closing(KilledReceiver(tmp_path, records=2)) as killed:
    for round in range(4):
      killed.publish(round)
      assert killed.collect(round) == [round] * 2
    killed.restart()
    for round in range(4):
      assert killed.collect(round) == [round] * 2
    assert killed.b.ask('fates') == {'published': 8, 'used': 8}


def test_records_that_were_not_acknowledged_are_sent_again(killed):
  killed.publish(0)
  state = killed.b.ask('state')
  killed.b.kill()
  killed.a.publish(1, rollouts(1, count=2))
  assert exchanges.waiting(killed.a.sent['b']) == 2
  killed.start(state)
  exchanges.wait_until(lambda: not exchanges.waiting(killed.a.sent['b']))
  assert killed.collect(1) == [0, 0, 1, 1]
  assert killed.sent() == {'published': 4, 'acknowledged': 4}


def test_messages_that_a_checkpoint_holds_are_deleted(killed, tmp_path):
  for round in range(3):
    killed.publish(round)
    killed.collect(round)
  state = killed.b.ask('state')
  assert len([*tmp_path.glob('b/*')]) == 3
  killed.b.ask('saved', 3)
  (kept,) = tmp_path.glob('b/*')
  assert kept.name.startswith(f'{2:020d}')
  killed.restart(state)
  assert killed.collect(2) == []
  assert killed.b.ask('fates') == {'published': 6, 'used': 6}
