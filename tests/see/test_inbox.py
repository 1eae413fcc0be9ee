import contextlib
import threading
import time
import types

from absl import logging
import msgspec
import pytest

from mrl_jax import records
from mrl_jax.see import inbox
from mrl_jax.see import wire
from tests import examples
from tests import exchanges

KINDS = set(records.KINDS)
SIZE = records.size(examples.rollout())
pytestmark = pytest.mark.filterwarnings(
  'error::pytest.PytestUnhandledThreadExceptionWarning'
)


def queue(peers='a', **limits):
  return inbox.Inbox(
    'z', dict.fromkeys(peers, exchanges.PEER), exchanges.limits(**limits)
  )


def deliver(box, round, samples=1, policy='a', **arguments):
  group = examples.group([1.0] * samples, round=round, policy=policy)
  box.deliver(policy, round, group, **arguments)


def rounds(received):
  return [record.header.round for record in received]


def fates(box, policy='a', kind='rollout'):
  row = box.ledger.table()[policy][kind]
  return {fate: n for fate, n in row.items() if n and fate != 'bytes'}


def start(function, *arguments, **named):
  thread = threading.Thread(
    target=function, args=arguments, kwargs=named, daemon=True
  )
  thread.start()
  return thread


def ends(*threads):
  for thread in threads:
    thread.join(exchanges.DEADLINE_S)
    assert not thread.is_alive()


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still; `clock.now` is set by hand."""
  hands = types.SimpleNamespace(now=0.0)
  stub = types.SimpleNamespace(monotonic=lambda: hands.now)
  monkeypatch.setattr(inbox, 'time', stub)
  return hands


@contextlib.contextmanager
def collecting(box, round):
  """What another thread collects, once it is there; it looks up often."""
  looked, received = threading.Event(), []
  box.sources.append(types.SimpleNamespace(fetch=lambda _: looked.set()))
  thread = start(lambda: received.extend(box.collect(round, KINDS)))
  looked.wait(exchanges.DEADLINE_S)
  yield received
  ends(thread)


@pytest.mark.parametrize('earlier', [0, 3])
def test_a_peer_that_catches_up_is_waited_for_as_it_goes_on(clock, earlier):
  box = queue(wait_s=100)
  for round in range(earlier):  # Which it comes back to.
    deliver(box, round)
    box.collect(round, KINDS)
  with collecting(box, 4) as received:
    for round in range(5):
      clock.now += 80
      deliver(box, round)
  assert rounds(received) == [4]
  assert box.ledger.waited == {'a': 400}


@pytest.mark.parametrize('said', [[0, 0, 0], [1, 0, 1], [0, 1, 0]])
def test_a_peer_that_repeats_itself_is_not_waited_for(clock, said):
  box = queue(wait_s=100)
  with collecting(box, 4) as received:
    for step, round in enumerate(said):
      clock.now = 40 * step
      deliver(box, round)
    clock.now = 141  # Two steps at most went on, the later one at 40.
  assert received == []
  assert box.ledger.waited == {'a': 141}


def test_a_peer_is_done_with_a_round_when_it_speaks_of_a_later_one():
  box = queue(wait_s=exchanges.AGES_S)
  deliver(box, 2, last=False)
  began = time.monotonic()
  assert box.collect(1, KINDS) == []
  assert time.monotonic() - began < exchanges.DEADLINE_S
  assert box.heard('a') == 1


def test_a_round_is_over_with_its_last_message(clock):
  box = queue(wait_s=100)
  with collecting(box, 0) as received:
    deliver(box, 0, samples=2, last=False)
    clock.now = 50
    box.deliver('a', 0, [examples.outcome()])
  assert len(received) == 3
  assert box.ledger.waited == {'a': 50}


def test_each_peer_is_given_up_in_its_own_time(clock):
  box = queue('ac', wait_s=100)
  with collecting(box, 1) as received:
    clock.now = 80
    deliver(box, 0, policy='c')
    clock.now = 120
    exchanges.wait_until(lambda: 'a' in box.ledger.waited)
    clock.now = 150
    deliver(box, 1, policy='c')
  assert rounds(received) == [1]
  assert box.ledger.waited == {'a': 120, 'c': 150}


def test_a_peer_that_was_given_up_is_waited_for_when_it_has_spoken(clock):
  box = queue(wait_s=100)
  with collecting(box, 0):
    clock.now = 100
  deliver(box, 1)
  with collecting(box, 2) as received:
    clock.now = 150
    deliver(box, 2)
  assert rounds(received) == [2]
  assert box.ledger.waited == {'a': 150}


def test_the_order_is_of_policy_round_prompt_sample_and_kind():
  box = queue('abc', max_staleness=1)
  group = examples.group([1.0, 0.0], policy='b', round=1)
  box.deliver('c', 1, examples.group([1.0], policy='c', round=1))
  box.deliver(
    'b', 1, [group[1], examples.outcome(policy='b', round=1), group[0]]
  )
  deliver(box, 1, policy='a')
  deliver(box, 0, policy='b')
  keys = [
    (r.header.policy, r.header.round, r.header.sample, records.kind(r))
    for r in box.collect(1, KINDS)
  ]
  assert keys == sorted(keys)
  assert len(keys) == 6


def test_records_of_another_run_are_refused():
  box = queue()
  box.deliver('a', 0, [examples.rollout(run='other'), examples.rollout()])
  assert fates(box) == {'published': 2, 'refused': 1, 'waiting': 1}
  assert box.ledger.refusals() == {'a': {'run': 1}}


def test_who_has_most_is_known_after_a_resume():
  before, box = (queue('ab', records=4) for _ in range(2))
  deliver(before, 0, samples=3, policy='b')
  box.restore(before.state())
  deliver(box, 0, samples=2)
  assert fates(box, 'a') == {'published': 2, 'waiting': 2}
  assert fates(box, 'b') == {'published': 3, 'evicted': 1, 'waiting': 2}


def test_a_peer_that_fills_the_queue_pays_for_it_alone():
  box = queue('ab', records=4)
  deliver(box, 0, samples=2, policy='b')
  for round in range(1000, 1010):  # The others' are older, and stay.
    deliver(box, round)
  assert fates(box, 'b') == {'published': 2, 'waiting': 2}
  assert fates(box, 'a') == {'published': 10, 'evicted': 8, 'waiting': 2}
  assert len(box.collect(0, KINDS)) == 2


def test_the_oldest_goes_even_if_it_comes_last():
  box = queue(records=2, max_staleness=2)
  for round in (1, 2, 0):
    deliver(box, round)
  assert fates(box) == {'published': 3, 'evicted': 1, 'waiting': 2}
  assert rounds(box.collect(2, KINDS)) == [1, 2]


def test_as_many_go_as_must():
  box = queue(bytes=3 * SIZE)
  deliver(box, 0, samples=3)
  box.deliver('a', 1, [examples.rollout(bytes(30), round=1)])
  assert records.size(examples.rollout(bytes(30))) > 2 * SIZE
  assert fates(box) == {'published': 4, 'evicted': 3, 'waiting': 1}


def test_a_publisher_waits_once_and_not_for_every_record():
  box = queue(records=1, block_s=0.5)
  deliver(box, 0)
  began = time.monotonic()
  deliver(box, 1, samples=60)
  assert 0.5 <= time.monotonic() - began < 15
  assert fates(box) == {'published': 61, 'evicted': 60, 'waiting': 1}


def test_a_publisher_goes_on_when_there_is_room():
  box = queue('ac', records=1, block_s=exchanges.AGES_S, wait_s=0.1)
  deliver(box, 0)
  publisher = start(deliver, box, 1)
  assert rounds(box.collect(0, KINDS)) == [0]  # After a wait for c.
  ends(publisher)
  assert fates(box) == {'published': 2, 'used': 1, 'waiting': 1}


def test_who_would_make_room_does_not_wait_for_it():
  box = queue(records=1, block_s=exchanges.AGES_S)
  data = [wire.encode(r) for r in examples.group([1.0] * 3)]
  began = time.monotonic()
  box.deliver_encoded('a', 0, data, waits=False)
  assert time.monotonic() - began < exchanges.DEADLINE_S
  assert fates(box)['evicted'] == 2


def test_what_is_stale_makes_room_for_what_is_waited_for():
  box = queue(records=1, block_s=exchanges.AGES_S, wait_s=exchanges.AGES_S)
  deliver(box, 0)
  publisher = start(deliver, box, 1)
  began = time.monotonic()
  assert rounds(box.collect(1, KINDS)) == [1]
  assert time.monotonic() - began < exchanges.DEADLINE_S
  ends(publisher)
  assert fates(box) == {'published': 2, 'stale': 1, 'used': 1}


def test_what_is_not_wanted_does_not_wait_for_room():
  box = queue(records=1, block_s=exchanges.AGES_S)
  box.collect(1, KINDS)
  deliver(box, 1)
  began = time.monotonic()
  deliver(box, 1)
  deliver(box, 0)
  assert time.monotonic() - began < exchanges.DEADLINE_S
  assert fates(box) == {
    'published': 3,
    'waiting': 1,
    'duplicate': 1,
    'stale': 1,
  }


def test_a_copy_that_comes_while_the_first_waits_for_room_is_a_duplicate():
  box = queue(bytes=SIZE, block_s=exchanges.AGES_S)
  deliver(box, 0)
  publishers = [start(deliver, box, 1) for _ in range(2)]
  time.sleep(0.05)
  box.collect(0, KINDS)
  exchanges.wait_until(lambda: exchanges.waiting(box.ledger))
  assert rounds(box.collect(1, KINDS)) == [1]
  ends(*publishers)
  assert fates(box) == {'published': 3, 'used': 2, 'duplicate': 1}
  deliver(box, 2)
  assert rounds(box.collect(2, KINDS)) == [2]


def test_a_record_whose_round_passes_while_it_waits_for_room_is_stale():
  box = queue(records=1, block_s=exchanges.AGES_S)
  deliver(box, 5)
  publisher = start(deliver, box, 1)
  time.sleep(0.05)
  box.collect(3, KINDS)
  ends(publisher)
  assert fates(box) == {'published': 2, 'waiting': 1, 'stale': 1}


def test_a_state_balances_while_a_publisher_waits_for_room():
  box = queue(records=1, block_s=exchanges.AGES_S)
  publisher = start(deliver, box, 0, samples=2)
  exchanges.wait_until(lambda: exchanges.waiting(box.ledger))
  time.sleep(0.05)
  again = queue()
  again.restore(box.state())
  assert fates(again) == {'published': 1, 'waiting': 1}
  for _ in range(2):
    exchanges.wait_until(lambda: exchanges.waiting(box.ledger))
    box.collect(0, KINDS)
  ends(publisher)


def test_many_publishers_at_once_balance_at_all_times():
  box = queue('abcd', records=20, max_staleness=20, block_s=0.001)

  def publish(policy):
    for round in range(20):
      deliver(box, round, samples=3, policy=policy)
      deliver(box, round, samples=3, policy=policy)

  publishers = [start(publish, policy) for policy in 'abcd']
  taken = 0
  for round in range(20):
    state = box.state()
    again = queue('abcd', max_staleness=20)
    again.restore(state)
    waiting = exchanges.waiting(again.ledger)
    assert len(again.collect(20, KINDS)) == waiting <= 20
    taken += len(box.collect(round, KINDS))
  ends(*publishers)
  taken += len(box.collect(20, KINDS))
  rows = [box.ledger.table()[policy]['rollout'] for policy in 'abcd']
  assert [row['published'] for row in rows] == [120] * 4
  assert [row['waiting'] for row in rows] == [0] * 4
  assert sum(row['used'] for row in rows) == taken


def test_identities_that_are_remembered_are_bounded():
  box = queue(records=5)
  for n in range(10):
    box.deliver('a', 0, examples.group([1.0] * 5, prompt=f'p{n}'))
  gone = msgspec.msgpack.decode(box.state())[1]
  assert len(gone) == 20
  deliver(box, 0)  # It was here, but so long ago that nobody knows.
  box.deliver('a', 0, [examples.rollout(prompt='p8')])
  assert fates(box)['duplicate'] == 1


def test_what_is_no_record_is_refused_and_the_rest_goes_on():
  box = queue()
  box.deliver_encoded('a', 0, [b'\xc1'], last=False)
  assert box.heard('a') == -1
  box.deliver_encoded('a', 0, [wire.encode(examples.rollout())])
  assert len(box.collect(0, KINDS)) == 1
  assert box.ledger.refusals() == {'a': {'undecodable': 1}}
  assert fates(box, kind='unknown') == {'published': 1, 'refused': 1}


def test_kinds_that_were_not_meant_for_the_policy_are_left_out():
  box = queue()
  data = [*map(wire.encode, [examples.rollout(), examples.outcome()])]
  box.deliver_encoded('a', 0, data, kinds={'outcome'})
  assert [*map(records.kind, box.collect(0, KINDS))] == ['outcome']
  assert 'rollout' not in box.ledger.table()['a']


def test_each_reason_for_a_refusal_is_told_a_few_times(caplog):
  logging.use_absl_handler()
  box = queue('ab')
  for _ in range(20):
    box.deliver('a', 1, [examples.rollout()])
  box.deliver('b', 1, [examples.rollout(policy='b')])
  box.deliver('a', 0, [examples.rollout(policy='b')])
  told = [r.getMessage() for r in caplog.records]
  assert told == [
    *['z refused a rollout of a: round of round 0 in round 1'] * 3,
    'z refused a rollout of b: round of round 0 in round 1',
    "z refused a rollout of a: sender that says it is of 'b'",
  ]
  assert box.ledger.refusals()['a'] == {'round': 20, 'sender': 1}


def test_messages_that_were_taken_are_known_until_they_are_forgotten():
  box, again = queue(), queue()
  for round in range(3):
    box.note_taken(f'm{round}', round)
  again.restore(box.state())
  assert again.has_taken('m0')
  again.forget(1)
  assert [again.has_taken(f'm{n}') for n in range(4)] == [
    False,
    True,
    True,
    False,
  ]


def test_what_was_stale_before_is_stale_after():
  box, again = queue(), queue()
  box.collect(3, KINDS)
  again.restore(box.state())
  deliver(again, 2)
  assert fates(again) == {'published': 1, 'stale': 1}


def test_peers_may_come_and_go_between_states():
  box = queue('ac')
  for policy in 'ac':
    deliver(box, 3, policy=policy)
  again = queue('ad', wait_s=exchanges.AGES_S)
  again.restore(box.state())
  assert (again.heard('a'), again.heard('d')) == (3, -1)
  deliver(again, 3, policy='d')
  received = again.collect(3, KINDS)
  assert [r.header.policy for r in received] == ['a', 'c', 'd']


def test_a_peer_that_ended_is_not_waited_for():
  box = queue(wait_s=exchanges.AGES_S)
  box.ended('a')
  assert box.collect(0, KINDS) == []
  assert not box.ledger.waited


def test_who_asks_for_nothing_waits_for_nobody():
  box = queue(wait_s=0.01)
  assert box.collect(0, ()) == []
  assert not box.ledger.waited


def test_a_policy_without_peers_waits_for_nobody():
  assert queue('', wait_s=exchanges.AGES_S).collect(0, KINDS) == []
