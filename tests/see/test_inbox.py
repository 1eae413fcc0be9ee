import contextlib
import threading
import time
import types

import msgspec
import pytest

from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import wire
from tests import examples
from tests import exchanges

KINDS = exchanges.KINDS
SIZE = records.size(examples.rollout())
pytestmark = pytest.mark.filterwarnings(
  'error::pytest.PytestUnhandledThreadExceptionWarning'
)
rounds, fates = exchanges.rounds, exchanges.fates


def queue(peers='a', **limits):
  return exchanges.inbox('z', peers, **limits)


def deliver(inbox, round, count=1, policy='a', **options):
  group = exchanges.rollouts(round, count, policy=policy)
  inbox.deliver(policy, round, group, **options)


def start(function, *arguments, **named):
  thread = threading.Thread(
    target=function, args=arguments, kwargs=named, daemon=True
  )
  thread.start()
  return thread


def require_end(*threads):
  for thread in threads:
    thread.join(exchanges.DEADLINE_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def soon():
  """What runs here does not wait for what never comes."""
  began = time.monotonic()
  yield
  assert time.monotonic() - began < exchanges.DEADLINE_S


# Waiting for peers.


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still; `clock.now` is set by hand."""
  hands = types.SimpleNamespace(now=0.0)
  stub = types.SimpleNamespace(monotonic=lambda: hands.now)
  monkeypatch.setattr(inbox_lib, 'time', stub)
  monkeypatch.setattr(inbox_lib, '_POLL_S', 0.002)
  return hands


class Collector:
  """Collects a round in another thread; a source counts how often it looks."""

  def __init__(self, inbox, round):
    self.received, self._looks = [], 0
    inbox.sources.append(self._count_look)
    self.thread = start(
      lambda: self.received.extend(inbox.collect(round, KINDS))
    )
    self.look()

  def _count_look(self, round):
    self._looks += 1

  def look(self):
    """Lets it see the clock and what was delivered."""
    looks = self._looks + 2  # One look may be under way.
    exchanges.wait_until(
      lambda: self._looks >= looks or not self.thread.is_alive()
    )


@contextlib.contextmanager
def collecting(inbox, round):
  collector = Collector(inbox, round)
  yield collector
  require_end(collector.thread)


@pytest.mark.parametrize('earlier', [0, 3])
def test_a_peer_that_catches_up_is_waited_for_as_it_goes_on(clock, earlier):
  inbox = queue(wait_s=100)
  for round in range(earlier):  # The peer repeats them after a restart.
    deliver(inbox, round)
    inbox.collect(round, KINDS)
  with collecting(inbox, 4) as collector:
    for round in range(5):
      clock.now += 80
      deliver(inbox, round)
      collector.look()
  assert rounds(collector.received) == [4]
  assert inbox.ledger.waited == {'a': 400}


@pytest.mark.parametrize('sent', [[0, 0, 0], [1, 0, 1], [0, 1, 0]])
def test_a_peer_that_repeats_itself_is_not_waited_for(clock, sent):
  inbox = queue(wait_s=100)
  with collecting(inbox, 4) as collector:
    for step, round in enumerate(sent):
      clock.now = 40 * step
      deliver(inbox, round)
      collector.look()
    clock.now = 141  # It last reached a higher round at 40, or before.
  assert collector.received == []
  assert inbox.ledger.waited == {'a': 141}


def test_a_peer_has_finished_the_rounds_before_the_one_it_sends():
  inbox = queue(wait_s=exchanges.AGES_S)
  deliver(inbox, 2, last=False)
  with soon():
    assert inbox.collect(1, KINDS) == []
  assert inbox.finished['a'] == 1


def test_a_round_ends_with_its_last_message(clock):
  inbox = queue(wait_s=100)
  with collecting(inbox, 0) as collector:
    deliver(inbox, 0, count=2, last=False)
    clock.now = 50
    inbox.deliver('a', 0, [examples.outcome()])
  assert len(collector.received) == 3
  assert inbox.ledger.waited == {'a': 50}


def test_each_peer_is_given_up_in_its_own_time(clock):
  inbox = queue('ac', wait_s=100)
  with collecting(inbox, 1) as collector:
    clock.now = 80
    deliver(inbox, 0, policy='c')
    clock.now = 120
    collector.look()
    clock.now = 150
    deliver(inbox, 1, policy='c')
  assert rounds(collector.received) == [1]
  assert inbox.ledger.waited == {'a': 120, 'c': 150}


def test_a_peer_that_was_given_up_is_waited_for_once_it_sends(clock):
  inbox = queue(wait_s=100)
  with collecting(inbox, 0):
    clock.now = 100
  deliver(inbox, 1)
  with collecting(inbox, 2) as collector:
    clock.now = 150
    deliver(inbox, 2)
  assert rounds(collector.received) == [2]
  assert inbox.ledger.waited == {'a': 150}


@pytest.mark.parametrize(('peers', 'kinds'), [('a', ()), ('', KINDS)])
def test_without_kinds_or_peers_nobody_is_waited_for(peers, kinds):
  inbox = queue(peers, wait_s=exchanges.AGES_S)
  with soon():
    assert inbox.collect(0, kinds) == []
  assert not inbox.ledger.waited


def test_records_are_sorted_by_policy_round_prompt_sample_and_kind():
  inbox = queue('abc', max_staleness=1)
  group = examples.group([1.0, 0.0], policy='b', round=1)
  deliver(inbox, 1, policy='c')
  inbox.deliver(
    'b', 1, [group[1], examples.outcome(policy='b', round=1), group[0]]
  )
  deliver(inbox, 1, policy='a')
  deliver(inbox, 0, policy='b')
  keys = [
    (r.header.policy, r.header.round, r.header.sample, records.kind(r))
    for r in inbox.collect(1, KINDS)
  ]
  assert keys == sorted(keys)
  assert len(keys) == 6


# Room.


def test_a_peer_that_fills_the_queue_pays_for_it_alone():
  inbox = queue('ab', records=4)
  deliver(inbox, 0, count=2, policy='b')  # Older than all of a's, and stays.
  for round in range(1000, 1010):
    deliver(inbox, round)
  assert fates(inbox.ledger, 'b') == {'published': 2, 'waiting': 2}
  assert fates(inbox.ledger) == {'published': 10, 'evicted': 6, 'waiting': 4}
  assert len(inbox.collect(0, KINDS)) == 2


def test_who_fills_the_queue_is_known_after_a_restore():
  inbox, again = (queue('ab', records=4) for _ in range(2))
  deliver(inbox, 0, count=3, policy='b')
  again.restore(inbox.state())
  deliver(again, 0, count=2)
  deliver(again, 1, count=2, policy='b')
  assert fates(again.ledger) == {'published': 2, 'waiting': 2}
  assert fates(again.ledger, 'b') == {
    'published': 5,
    'evicted': 1,
    'waiting': 4,
  }


def test_a_large_record_evicts_as_many_as_it_must():
  inbox = queue(bytes=3 * SIZE)
  deliver(inbox, 0, count=3)
  large = examples.rollout(bytes(30), round=1)
  assert records.size(large) > 2 * SIZE
  inbox.deliver('a', 1, [large])
  assert fates(inbox.ledger) == {'published': 4, 'evicted': 3, 'waiting': 1}


def test_a_publisher_waits_once_and_not_for_every_record():
  inbox = queue(records=1, block_s=0.05)
  deliver(inbox, 0)
  began = time.monotonic()
  deliver(inbox, 1, count=600)
  assert 0.05 <= time.monotonic() - began < 15
  assert fates(inbox.ledger) == {
    'published': 601,
    'evicted': 600,
    'waiting': 1,
  }


def test_a_publisher_goes_on_when_there_is_room():
  inbox = queue('ac', records=1, block_s=exchanges.AGES_S, wait_s=0.05)
  deliver(inbox, 0)
  publisher = start(deliver, inbox, 1)
  assert rounds(inbox.collect(0, KINDS)) == [0]  # After a wait for c.
  require_end(publisher)
  assert fates(inbox.ledger) == {'published': 2, 'used': 1, 'waiting': 1}


def test_stale_records_make_room_for_those_that_are_waited_for():
  inbox = queue(records=1, block_s=exchanges.AGES_S, wait_s=exchanges.AGES_S)
  deliver(inbox, 0)
  publisher = start(deliver, inbox, 1)
  with soon():
    assert rounds(inbox.collect(1, KINDS)) == [1]
  require_end(publisher)
  assert fates(inbox.ledger) == {'published': 2, 'stale': 1, 'used': 1}


def test_duplicates_and_stale_records_do_not_wait_for_room():
  inbox = queue(records=1, block_s=exchanges.AGES_S)
  inbox.collect(1, KINDS)
  deliver(inbox, 1)
  with soon():
    deliver(inbox, 1)
    deliver(inbox, 0)
  assert fates(inbox.ledger) == {
    'published': 3,
    'waiting': 1,
    'duplicate': 1,
    'stale': 1,
  }


def test_a_copy_that_comes_while_the_first_waits_for_room_is_a_duplicate():
  inbox = queue(bytes=SIZE, block_s=exchanges.AGES_S)
  deliver(inbox, 0)
  publishers = [start(deliver, inbox, 1) for _ in range(2)]
  time.sleep(0.05)
  inbox.collect(0, KINDS)
  exchanges.wait_until(lambda: exchanges.waiting(inbox.ledger))
  assert rounds(inbox.collect(1, KINDS)) == [1]
  require_end(*publishers)
  assert fates(inbox.ledger) == {'published': 3, 'used': 2, 'duplicate': 1}
  deliver(inbox, 2)
  assert rounds(inbox.collect(2, KINDS)) == [2]


def test_a_record_whose_round_passes_while_it_waits_for_room_is_stale():
  inbox = queue(records=1, block_s=exchanges.AGES_S)
  deliver(inbox, 5)
  publisher = start(deliver, inbox, 1)
  time.sleep(0.05)
  inbox.collect(3, KINDS)
  require_end(publisher)
  assert fates(inbox.ledger) == {'published': 2, 'waiting': 1, 'stale': 1}


def test_a_round_larger_than_the_queue_is_taken_in_while_it_is_waited_for():
  inbox = queue(records=2, bytes=2 * SIZE, wait_s=exchanges.AGES_S)
  received = []
  collector = start(lambda: received.extend(inbox.collect(0, KINDS)))
  exchanges.wait_until(lambda: inbox._collecting == 0)
  for sample in range(50):
    inbox.deliver('a', 0, [examples.rollout(sample=sample)], last=sample == 49)
  require_end(collector)
  assert len(received) == 50
  assert fates(inbox.ledger) == {'published': 50, 'used': 50}


def test_an_interrupted_wait_loses_nothing():
  inbox = queue()

  def interrupt(round):
    deliver(inbox, 0, count=3)
    raise KeyboardInterrupt

  inbox.sources.append(interrupt)
  with pytest.raises(KeyboardInterrupt):
    inbox.collect(0, KINDS)
  inbox.sources.clear()
  assert fates(inbox.ledger) == {'published': 3, 'waiting': 3}
  assert len(inbox.collect(0, KINDS)) == 3


def test_evictions_do_not_search_the_queue():
  """Each of them in the time of a few comparisons, not of the whole queue."""
  inbox = queue(records=10_000, bytes=2**30)
  deliver(inbox, 0, count=10_000)
  began = time.process_time()
  deliver(inbox, 1, count=2000)
  assert time.process_time() - began < 0.6  # It is 0.06, and was 1.7.
  assert fates(inbox.ledger)['evicted'] == 2000


# Claims of peers.

KNOWN = exchanges.PEER._replace(samples=4, rewards=(0.0, 1.0))
STATS = examples.stats([0.0, 1.0, 0.5, 1.0])


def changed(record, **fields):
  return msgspec.structs.replace(record, **fields)


@pytest.mark.parametrize(
  ('record', 'reason'),
  [
    (STATS, None),
    (examples.stats([1.0] * 4), None),
    (examples.outcome(), None),
    (examples.rollout(sample=3, reward=0.0), None),
    (examples.stats([1.0] * 5), 'samples'),
    (examples.stats([1.0]), 'samples'),
    (changed(examples.outcome(), count=5), 'samples'),
    (examples.rollout(sample=4), 'samples'),
    (examples.rollout(reward=1.5), 'reward'),
    (examples.rollout(reward=-1.0), 'reward'),
    (examples.stats([1.0, 1.0, 1.0, 1.5]), 'reward'),
    (examples.stats([0.0, 0.0, 0.0, -0.1]), 'reward'),
    (examples.stats([-1.0, 2.0, 1.0, 1.0]), 'moments'),
    (changed(STATS, reward_square_sum=100.0), 'moments'),
  ],
)
def test_records_are_held_to_what_is_known_of_the_peer(record, reason):
  inbox = inbox_lib.Inbox('z', {'a': KNOWN}, exchanges.limits())
  inbox.deliver('a', 0, [record])
  assert len(inbox.collect(0, KINDS)) == (reason is None)
  assert inbox.ledger.refusals() == ({'a': {reason: 1}} if reason else {})


def test_a_peer_has_one_group_of_its_size_for_each_prompt():
  inbox = inbox_lib.Inbox('z', {'a': KNOWN}, exchanges.limits(records=9))
  for _ in range(3):
    inbox.deliver('a', 0, exchanges.rollouts(count=9))
    inbox.deliver('a', 0, [STATS, changed(STATS, successes=0)])
  kinds = [records.kind(r) for r in inbox.collect(0, KINDS)]
  assert sorted(kinds) == ['group_stats', *['rollout'] * 4]


def test_without_records_only_the_next_round_ends(caplog):
  inbox = queue(wait_s=exchanges.AGES_S)
  for round, finished in ((10**9, -1), (1, -1), (0, 0), (2, 0), (1, 1)):
    inbox.deliver('a', round, [])
    assert inbox.finished['a'] == finished
  inbox.deliver('a', 7, [b'x', examples.rollout(round=8)])  # Unsound.
  assert inbox.finished['a'] == 1
  deliver(inbox, 7)
  assert inbox.finished['a'] == 7
  assert 'z has nothing of a for rounds 2 to 6' in caplog.text


def test_who_repeats_itself_is_not_waited_for_again(clock):
  inbox = queue(wait_s=100)
  deliver(inbox, 0)
  with collecting(inbox, 1):
    clock.now = 100
  for round in range(2, 5):
    deliver(inbox, 0)
    with soon():
      assert inbox.collect(round, KINDS) == []
  assert inbox.ledger.waited == {'a': 100}


# State.


def test_a_state_balances_while_a_publisher_waits_for_room():
  inbox = queue(records=1, block_s=exchanges.AGES_S)
  publisher = start(deliver, inbox, 0, count=2)
  exchanges.wait_until(lambda: exchanges.waiting(inbox.ledger))
  time.sleep(0.05)
  again = queue()
  again.restore(inbox.state())
  assert fates(again.ledger) == {'published': 1, 'waiting': 1}
  while publisher.is_alive():
    inbox.collect(0, KINDS)
  assert len(inbox.collect(0, KINDS)) + fates(inbox.ledger)['used'] >= 2


def test_many_publishers_at_once_balance_at_all_times():
  inbox = queue('abcd', records=20, max_staleness=20, block_s=0.001)

  def publish(policy):
    for round in range(20):
      for _ in range(2):
        deliver(inbox, round, count=3, policy=policy)

  publishers = [start(publish, policy) for policy in 'abcd']
  used = 0
  for round in range(20):
    again = queue('abcd', max_staleness=20)
    again.restore(inbox.state())
    waiting = exchanges.waiting(again.ledger)
    assert len(again.collect(20, KINDS)) == waiting <= 80  # 20 a peer.
    used += len(inbox.collect(round, KINDS))
  require_end(*publishers)
  used += len(inbox.collect(20, KINDS))
  rows = [fates(inbox.ledger, policy) for policy in 'abcd']
  assert [row['published'] for row in rows] == [120] * 4
  assert not any('waiting' in row for row in rows)
  assert sum(row.get('used', 0) for row in rows) == used


def test_remembered_identities_are_bounded():
  """By what a peer may publish in a round, even if the queue holds less."""
  peer = exchanges.PEER._replace(round_records=20, round_bytes=20 * SIZE)
  inbox = inbox_lib.Inbox('z', {'a': peer}, exchanges.limits(records=5))
  for n in range(10):
    inbox.deliver('a', 0, exchanges.rollouts(count=5, prompt=f'p{n}'))
  ((_, _, _, seen),) = msgspec.msgpack.decode(inbox.state())[0]
  assert len(seen) == 20
  deliver(inbox, 0)  # It was here.
  assert fates(inbox.ledger) == {
    'published': 51,
    'refused': 30,
    'evicted': 15,
    'duplicate': 1,
    'waiting': 5,
  }
  assert inbox.ledger.refusals() == {'a': {'quota': 30}}
  inbox.collect(1, KINDS)
  assert msgspec.msgpack.decode(inbox.state())[0] == []


def test_messages_are_known_until_they_are_forgotten():
  inbox, again = queue(), queue()
  for round in range(3):
    inbox.deliver('a', round, [], message=f'm{round}')
  again.restore(inbox.state())
  assert 'm0' in again.messages
  again.forget_messages(1)
  known = [f'm{n}' in again.messages for n in range(4)]
  assert known == [False, True, True, False]


def test_a_stale_round_is_stale_after_a_restore():
  inbox, again = queue(), queue()
  inbox.collect(3, KINDS)
  again.restore(inbox.state())
  deliver(again, 2)
  assert fates(again.ledger) == {'published': 1, 'stale': 1}


def test_peers_may_come_and_go_between_states():
  inbox = queue('ac')
  for policy in 'ac':
    deliver(inbox, 3, policy=policy)
  again = queue('ad', wait_s=exchanges.AGES_S)
  again.restore(inbox.state())
  assert (again.finished['a'], again.finished['d']) == (3, -1)
  deliver(again, 3, policy='d')
  received = again.collect(3, KINDS)
  assert [r.header.policy for r in received] == ['a', 'c', 'd']


# Refusals.


def test_bytes_that_are_no_record_are_refused_and_the_rest_goes_on():
  inbox = queue()
  inbox.deliver('a', 0, [b'\xc1'], last=False)
  assert inbox.finished['a'] == -1
  inbox.deliver('a', 0, [wire.encode(examples.rollout())])
  assert len(inbox.collect(0, KINDS)) == 1
  assert inbox.ledger.refusals() == {'a': {'undecodable': 1}}
  assert fates(inbox.ledger, kind='unknown') == {'published': 1, 'refused': 1}


def test_each_reason_of_a_refusal_is_logged_a_few_times(caplog):
  inbox = queue('ab')
  for _ in range(20):
    inbox.deliver('a', 1, [examples.rollout()])
  inbox.deliver('b', 1, [examples.rollout(policy='b')])
  inbox.deliver('a', 0, [examples.rollout(policy='b')])
  refusals = [r.getMessage().partition(' Header(')[0] for r in caplog.records]
  assert refusals == [
    *['z refused a rollout of a: round'] * 3,
    'z refused a rollout of b: round',
    'z refused a rollout of a: sender',
  ]
  assert inbox.ledger.refusals()['a'] == {'round': 20, 'sender': 1}
