"""gRPC between processes: what is resent, split, kept and refused."""

from concurrent import futures
import contextlib
import os
import threading
import time

import grpc
import msgspec
import pytest

from mrl_jax.see import rpc
from mrl_jax.see import spool as spool_lib
from mrl_jax.sharing import publish
from tests import examples
from tests import exchanges
from tests import rpcs

Code = grpc.StatusCode
rollouts, rounds, fates = exchanges.rollouts, exchanges.rounds, rpcs.fates


def send(outlet, *published_rounds):
  for round in published_rounds:
    outlet.send(round, rollouts(round))


# What is resent.


def test_a_receiver_may_come_up_late(stack, tmp_path, caplog):
  address = exchanges.free_address()
  outlet = rpcs.sender(stack, address, records=2, block_s=exchanges.AGES_S)
  send(outlet, 0, 1, 2)  # Nobody waits before the first attempt is over.
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert fates(outlet) == {'published': 3, 'evicted': 1, 'waiting': 2}
  receiver = rpcs.Receiver(stack, tmp_path, address=address, max_staleness=2)
  rpcs.wait_until_settled(outlet)
  assert rounds(receiver.collect(2)) == [0, 2]
  assert caplog.text.count('a cannot reach b at') == 1


@pytest.mark.parametrize(
  'code',
  [
    *(Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED),
    *(Code.UNKNOWN, Code.INTERNAL, Code.CANCELLED),
  ],
)
def test_a_message_is_resent_after_a_failure_that_may_pass(stack, caplog, code):
  def answer(fake, context):
    if len(fake.messages) < 4:
      context.abort(code, 'not now')

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(stack, fake.address)
  send(outlet, 0, 1)
  rpcs.wait_until_settled(outlet)
  assert fake.rounds() == [0, 0, 0, 0, 1]
  # A peer that has no room is within reach.
  tries = int(code != Code.RESOURCE_EXHAUSTED)
  assert caplog.text.count(f'b at {fake.address} and will keep trying') == tries
  assert fates(outlet) == {'published': 2, 'acknowledged': 2}


@pytest.mark.parametrize(
  ('code', 'details', 'reason'),
  [
    (Code.INVALID_ARGUMENT, 'run: of another', 'run'),
    (Code.INVALID_ARGUMENT, 'undecodable: no', 'undecodable'),
    (Code.INVALID_ARGUMENT, '', 'invalid_argument'),
    (Code.INVALID_ARGUMENT, 'x' * 1000 + ': y', 'invalid_argument'),
    (Code.FAILED_PRECONDITION, 'later', 'failed_precondition'),
    (Code.UNIMPLEMENTED, 'what?', 'unimplemented'),
    (Code.RESOURCE_EXHAUSTED, 'message larger than max', 'size'),
  ],
)
def test_a_message_is_not_resent_after_a_final_answer(
  stack, caplog, code, details, reason
):
  def answer(fake, context):
    if len(fake.messages) < 4:
      context.abort(code, details)

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(stack, fake.address)
  for round in range(4):
    outlet.send(round, [*rollouts(round), examples.outcome(round=round)])
  rpcs.wait_until_settled(outlet)
  assert fake.rounds() == [0, 1, 2, 3]
  assert fates(outlet) == {'published': 4, 'refused': 3, 'acknowledged': 1}
  assert fates(outlet) == fates(outlet, 'outcome')
  assert outlet.ledger.refusals() == {'b': {reason: 6}}
  assert caplog.text.count(f'refused: {reason}, by b at {fake.address}') == 3
  assert 'cannot reach' not in caplog.text
  assert max(len(r.getMessage()) for r in caplog.records) < 500


def test_a_message_of_another_run_is_refused_and_the_peer_is_named(
  stack, tmp_path, caplog
):
  receiver = rpcs.Receiver(stack, tmp_path, run='this')
  outlet = rpcs.sender(stack, receiver.address, run='other')
  send(outlet, 0)
  rpcs.wait_until_settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'run': 1}}
  assert f'b at {receiver.address}' in caplog.text
  assert "of run 'other', this is 'this'" in caplog.text
  assert receiver.transport.refused == {'run': 1}
  assert not os.listdir(receiver.folder)


def test_another_service_at_the_address_refuses(stack):
  fake = rpcs.Fake(stack, method='/another/Service')
  outlet = rpcs.sender(stack, fake.address)
  send(outlet, 0)
  rpcs.wait_until_settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'unimplemented': 1}}


def test_a_message_is_resent_if_no_answer_comes(stack, monkeypatch):
  monkeypatch.setattr(rpc, '_ANSWER_S', 0.1)

  def answer(fake, context):
    if len(fake.messages) == 1:
      fake.released.wait()

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(stack, fake.address)
  send(outlet, 0)
  rpcs.wait_until_settled(outlet)
  assert fake.rounds()[:2] == [0, 0]
  assert fates(outlet) == {'published': 1, 'acknowledged': 1}


# What a message may hold.


def test_a_large_round_is_split_and_ends_with_its_last_message(stack):
  published = [
    *rollouts(count=50),
    *[examples.outcome(prompt=f'p{i}') for i in range(20)],
  ]
  fake = rpcs.Fake(stack)
  outlet = rpcs.sender(stack, fake.address, max_bytes=2000, bytes=10**6)
  outlet.send(0, published)
  rpcs.wait_until_settled(outlet)
  messages = fake.messages
  assert len(messages) > 10
  assert [m['last'] for m in messages] == [*[False] * (len(messages) - 1), True]
  for message in messages:
    assert len(msgspec.msgpack.encode(message['records'])) <= 2000 + 100
  sent = [tuple(r['header'].values()) for m in messages for r in m['records']]
  assert sent == [
    tuple(msgspec.structs.asdict(r.header).values()) for r in published
  ]


def test_a_round_of_many_records_is_split_too(stack):
  stats = publish.group_stats(rollouts())
  fake = rpcs.Fake(stack)
  outlet = rpcs.sender(
    stack, fake.address, max_bytes=2**24, bytes=2**24, records=9999
  )
  outlet.send(0, [stats] * 9000)
  rpcs.wait_until_settled(outlet)
  assert [len(m['records']) for m in fake.messages] == [4096, 4096, 808]


def test_a_split_round_arrives_whole_and_an_empty_one_too(stack, tmp_path):
  options = {'max_bytes': 2000, 'bytes': 10**6}
  receiver = rpcs.Receiver(stack, tmp_path, **options)
  outlet = rpcs.sender(stack, receiver.address, block_s=10.0, **options)
  outlet.send(0, rollouts(count=50))
  receiver.wait_for_round(0)
  assert [r.header.sample for r in receiver.collect()] == [*range(50)]
  outlet.send(1, [])
  receiver.wait_for_round(1)


def test_a_record_larger_than_a_message_is_refused(stack, caplog):
  fake = rpcs.Fake(stack)
  outlet = rpcs.sender(stack, fake.address, max_bytes=1000)
  large = examples.rollout(payload=b'x' * 1000)
  outlet.send(0, [large, examples.rollout(sample=1)])
  rpcs.wait_until_settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'size': 1}}
  assert [len(m['records']) for m in fake.messages] == [1]
  assert 'a rollout of a is refused: size, not sent to b at' in caplog.text


def test_an_unsound_record_is_not_sent(stack, caplog):
  fake = rpcs.Fake(stack)
  outlet = rpcs.sender(stack, fake.address)
  wrong = msgspec.structs.replace(
    examples.rollout(), ids=examples.rollout().ids.astype('i8')
  )
  nan = examples.rollout(reward=float('nan'))
  outlet.send(0, [wrong, wrong, nan, *rollouts()])
  rpcs.wait_until_settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'ids_type': 2, 'reward': 1}}
  assert fates(outlet) == {'published': 4, 'refused': 3, 'acknowledged': 1}
  assert caplog.text.count('refused: ids_type, not sent to b') == 2


def test_a_receiver_with_a_lower_limit_refuses(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path, max_bytes=2000, bytes=10**6)
  outlet = rpcs.sender(stack, receiver.address, max_bytes=10**6)
  outlet.send(0, rollouts(count=50))
  send(outlet, 1)
  rpcs.wait_until_settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'size': 50}}
  assert fates(outlet)['acknowledged'] == 1
  assert len(os.listdir(receiver.folder)) == 1


def test_a_compressed_message_is_refused(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  code, details = rpcs.call(
    receiver.address,
    rpcs.message(rollouts()),
    compression=grpc.Compression.Gzip,
  )
  assert code is Code.UNIMPLEMENTED
  assert 'disabled' in details
  assert receiver.is_untouched()


# What a sender keeps, and for how long.


def queued(outlet):
  """(round, bytes) of the messages in the outlet's state."""
  parcels, _ = msgspec.msgpack.decode(outlet.state())
  return [
    (msgspec.msgpack.decode(p['data'])['round'], len(p['data']))
    for p in parcels
  ]


def test_a_peer_that_is_down_costs_no_time_and_little_memory(stack, caplog):
  outlet = rpcs.sender(stack, exchanges.free_address(), records=3, block_s=0.3)
  send(outlet, 0)
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  began = time.monotonic()
  send(outlet, *range(1, 100))
  assert time.monotonic() - began < 50 * 0.3
  assert fates(outlet) == {'published': 100, 'evicted': 97, 'waiting': 3}
  # The first is being sent.
  assert [round for round, _ in queued(outlet)] == [0, 98, 99]


def test_the_bytes_of_queued_messages_are_bounded_too(stack):
  outlet = rpcs.sender(stack, exchanges.free_address(), bytes=2000)
  send(outlet, *range(10))
  assert 1000 < sum(size for _, size in queued(outlet)) <= 2000
  outlet.send(10, rollouts(10, count=20))  # A round that never fits is queued.
  assert [round for round, _ in queued(outlet)] == [0, 10]


def test_a_publisher_waits_for_a_peer_that_is_slow(stack):
  def answer(fake, context):
    if len(fake.messages) > 1:
      fake.released.wait()

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(
    stack, fake.address, records=2, block_s=exchanges.DEADLINE_S
  )
  send(outlet, 0)
  rpcs.wait_until_settled(outlet)  # The peer is there.
  with futures.ThreadPoolExecutor(1) as pool:
    publishing = pool.submit(send, outlet, 1, 2, 3, 4)
    exchanges.wait_until(lambda: len(fake.messages) == 2)
    with pytest.raises(futures.TimeoutError):
      publishing.result(timeout=0.1)
    fake.released.set()
    publishing.result(timeout=exchanges.DEADLINE_S)
  rpcs.wait_until_settled(outlet)
  assert fates(outlet) == {'published': 5, 'acknowledged': 5}


def test_unacknowledged_messages_are_part_of_the_state(stack, tmp_path):
  address = exchanges.free_address()
  outlet, again = (rpcs.sender(stack, address) for _ in range(2))
  for round in range(3):
    outlet.send(round, [*rollouts(round), examples.outcome(round=round)])
  again.restore(outlet.state())
  assert again.ledger.table() == outlet.ledger.table()
  assert again.state() == outlet.state()
  outlet.close()
  receiver = rpcs.Receiver(stack, tmp_path, address=address, max_staleness=2)
  rpcs.wait_until_settled(again)
  assert len(receiver.collect(2)) == 6
  assert fates(again) == {'published': 3, 'acknowledged': 3}
  send(again, 3)
  receiver.wait_for_round(3)


def test_a_restore_while_a_message_is_being_sent_loses_nothing(stack):
  fake = rpcs.Fake(stack, rpcs.hang)
  before = rpcs.sender(stack, exchanges.free_address())
  send(before, 7)
  outlet = rpcs.sender(stack, fake.address)
  send(outlet, 0)
  exchanges.wait_until(lambda: fake.messages)
  outlet.restore(before.state())
  fake.released.set()
  rpcs.wait_until_settled(outlet)
  assert fake.rounds() == [0, 7]
  assert fates(outlet) == {'published': 1, 'acknowledged': 1}


@pytest.mark.parametrize('state', ['idle', 'done', 'down', 'hung'])
def test_closing_takes_a_bounded_time_and_leaves_no_thread(
  stack, state, caplog
):
  before = set(threading.enumerate())
  with contextlib.ExitStack() as until_closed:
    fake = rpcs.Fake(until_closed, *([rpcs.hang] if state == 'hung' else []))
    address = exchanges.free_address() if state == 'down' else fake.address
    outlet = rpcs.sender(stack, address, block_s=0.1)
    if state != 'idle':
      send(outlet, 0)
    if state == 'done':
      rpcs.wait_until_settled(outlet)
    if state == 'down':
      exchanges.wait_until(lambda: 'cannot reach' in caplog.text)
    if state == 'hung':
      exchanges.wait_until(lambda: fake.messages)
    began = time.monotonic()
    outlet.close()
    assert time.monotonic() - began < exchanges.DEADLINE_S / 6
    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert 'see-a-b' not in left
    outlet.close()
  lost = 'did not take the last 1 messages of a'
  assert caplog.text.count(lost) == (state in ('down', 'hung'))
  assert 'will keep trying' not in caplog.text or state == 'down'
  exchanges.wait_until(lambda: set(threading.enumerate()) <= before)


def test_closing_waits_for_a_peer_that_is_slow(stack):
  fake = rpcs.Fake(stack, lambda *_: time.sleep(0.03))
  outlet = rpcs.sender(stack, fake.address, block_s=exchanges.DEADLINE_S)
  send(outlet, 0, 1, 2)
  outlet.close()
  assert fates(outlet) == {'published': 3, 'acknowledged': 3}


def test_a_peer_without_room_is_waited_for_and_loses_nothing(stack, caplog):
  def answer(fake, context):
    if len(fake.messages) < 5:
      context.abort(Code.RESOURCE_EXHAUSTED, 'ahead: not now')

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(
    stack, fake.address, records=2, block_s=0.05, wait_s=exchanges.DEADLINE_S
  )
  send(outlet, 0)
  exchanges.wait_until(lambda: fake.messages)  # The peer is within reach.
  send(outlet, 1)
  outlet.close()  # It takes longer than `block_s` until there is room.
  assert fake.rounds() == [0, 0, 0, 0, 0, 1]
  assert fates(outlet) == {'published': 2, 'acknowledged': 2}
  assert 'cannot reach' not in caplog.text


# What a receiver does with a message.


def test_a_message_is_on_disk_before_it_is_delivered(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  receiver.folder.rmdir()
  data = rpcs.message(rollouts())
  code, details = rpcs.call(receiver.address, data)
  assert code is Code.INTERNAL  # To be sent again.
  assert details == 'the message cannot be stored'  # Without its path.
  assert receiver.collect() == []
  receiver.folder.mkdir()
  assert rpcs.call(receiver.address, data) == (Code.OK, '')
  (name,) = os.listdir(receiver.folder)
  assert (receiver.folder / name).read_bytes() == data
  assert name in receiver.inbox.messages


def test_a_receiver_fetches_what_it_had_acknowledged(stack, tmp_path, caplog):
  with contextlib.ExitStack() as until_killed:
    receiver = rpcs.Receiver(until_killed, tmp_path)
    receiver.transport.receive(rpcs.message(rollouts(count=3)))
  spool = spool_lib.Spool(os.fspath(receiver.folder), 2**30)
  spool.add('a', 0, rpcs.message(rollouts(), receiver='c'))
  spool.add('a', 0, b'damaged')
  again = rpcs.Receiver(stack, tmp_path, records=2, block_s=exchanges.AGES_S)
  began = time.monotonic()
  assert len(again.collect()) == 3  # What is collected needs no room.
  assert time.monotonic() - began < exchanges.DEADLINE_S
  assert again.inbox.finished['a'] == 0
  assert caplog.text.count('is left on disk') == 2


def test_a_receiver_may_be_closed_before_it_opens_and_twice(tmp_path):
  with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
    patched.setattr(rpc.Transport, 'open', lambda transport: None)
    receiver = rpcs.Receiver(stack, tmp_path)
    assert receiver.is_untouched()
    receiver.transport.close()


def test_a_policy_that_is_slow_does_not_delay_others(stack, tmp_path):
  receiver = rpcs.Receiver(
    stack, tmp_path, names='bc', records=1, block_s=exchanges.DEADLINE_S
  )
  slow = rpcs.sender(stack, receiver.address, block_s=exchanges.DEADLINE_S)
  send(slow, 0, 1)
  receiver.wait_for_round(0)
  receiver.wait_for_files(2)
  # Somebody insists, and must come again.
  for _ in range(8):
    code, details = rpcs.call(
      receiver.address, rpcs.message(rollouts(1), round=1)
    )
    assert code is Code.RESOURCE_EXHAUSTED
    assert details.startswith('another message of a')
  quick = rpcs.sender(stack, receiver.address, peer='c')
  send(quick, 0)
  rpcs.wait_until_settled(quick)
  assert fates(quick) == {'published': 1, 'acknowledged': 1}
  for round in range(2):
    receiver.wait_for_round(round)
    assert rounds(receiver.collect(round)) == [round]


def test_a_receiver_acknowledges_current_deliveries_before_it_closes(
  stack, tmp_path, monkeypatch
):
  monkeypatch.setattr(rpc, '_GRACE_S', exchanges.DEADLINE_S)
  receiver = rpcs.Receiver(
    stack, tmp_path, records=1, block_s=exchanges.DEADLINE_S
  )
  outlet = rpcs.sender(stack, receiver.address)
  send(outlet, 0, 1)
  receiver.wait_for_files(2)
  with futures.ThreadPoolExecutor(1) as pool:
    closing = pool.submit(receiver.transport.close)
    with pytest.raises(futures.TimeoutError):
      closing.result(timeout=0.1)
    receiver.collect()
  rpcs.wait_until_settled(outlet)
  assert fates(outlet) == {'published': 2, 'acknowledged': 2}


def test_a_receiver_closes_while_a_delivery_waits_for_room(
  stack, tmp_path, monkeypatch
):
  monkeypatch.setattr(rpc, '_GRACE_S', 0.1)
  before = set(threading.enumerate())
  receiver = rpcs.Receiver(
    stack, tmp_path, records=1, block_s=exchanges.DEADLINE_S
  )
  with contextlib.ExitStack() as until_closed:
    outlet = rpcs.sender(until_closed, receiver.address, block_s=0.1)
    send(outlet, 0, 1)
    receiver.wait_for_files(2)
    began = time.monotonic()
    receiver.transport.close()
    assert time.monotonic() - began < exchanges.DEADLINE_S / 6
  receiver.collect(1)  # Makes room.
  exchanges.wait_until(lambda: set(threading.enumerate()) <= before)


# What a receiver keeps, and of whom.


def test_rounds_after_the_last_are_refused_and_early_ones_come_later(
  stack, tmp_path
):
  receiver = rpcs.Receiver(stack, tmp_path, rounds=8, max_ahead=2)
  outlet = rpcs.sender(stack, receiver.address)
  send(outlet, 8, 0, 3)
  receiver.wait_for_round(0)
  exchanges.wait_until(lambda: 'ahead' in receiver.transport.refused)
  assert receiver.transport.refused['round'] == 1
  assert outlet.ledger.refusals() == {'b': {'round': 1}}
  assert len(os.listdir(receiver.folder)) == 1
  assert rounds(receiver.collect(0)) == [0]
  assert receiver.inbox.finished['a'] == 0
  receiver.collect(1)  # Round 3 is near now.
  rpcs.wait_until_settled(outlet)
  assert rounds(receiver.collect(3)) == [3]
  assert fates(outlet) == {'published': 3, 'refused': 1, 'acknowledged': 2}


def test_one_message_of_a_distant_round_does_not_end_the_exchange(
  stack, tmp_path
):
  receiver = rpcs.Receiver(stack, tmp_path, max_ahead=16)
  for round in (10**9, 16):
    rpcs.call(receiver.address, rpcs.message(round=round))
  assert receiver.inbox.finished['a'] == -1
  assert not os.listdir(receiver.folder)


def test_only_messages_with_news_are_kept_on_disk(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  nothing_new = [
    rpcs.message([examples.rollout(reward=float('nan'))], last=False),
    rpcs.message([examples.rollout(run='other')], last=False),
    rpcs.message(records=[b'noise'], last=False),
    rpcs.message(rollouts(count=2), last=False),
    rpcs.message(rollouts(count=1), last=False),
    rpcs.message(round=7),
  ]
  receiver.transport.receive(rpcs.message(rollouts(count=2), last=False))
  for message in nothing_new:
    receiver.transport.receive(message)
    assert len(os.listdir(receiver.folder)) == 1
  receiver.transport.receive(rpcs.message())  # Ends the round.
  assert len(os.listdir(receiver.folder)) == 2
  assert receiver.inbox.ledger.refusals()['a'].keys() == {
    'reward',
    'run',
    'undecodable',
  }


def test_what_is_stale_now_is_kept_for_a_restart_from_the_checkpoint(
  stack, tmp_path
):
  receiver = rpcs.Receiver(stack, tmp_path)
  receiver.collect(1)
  state = receiver.inbox.state()
  receiver.transport.saved(2)
  receiver.collect(4)
  for round in (4, 0, 1, 2, 3):  # The peer plays its rounds again.
    receiver.transport.receive(rpcs.message(rollouts(round), round=round))
  # Rounds 0 and 1 are in the past after a restart, too.
  assert len(os.listdir(receiver.folder)) == 3
  receiver.transport.close()
  again = rpcs.Receiver(stack, tmp_path, state=state)
  assert [rounds(again.collect(n)) for n in (2, 3, 4)] == [[2], [3], [4]]


def test_a_sender_that_fills_its_part_of_the_disk_waits_for_a_checkpoint(
  stack, tmp_path, caplog
):
  receiver = rpcs.Receiver(stack, tmp_path, spool_bytes=3 * 5000)
  outlet = rpcs.sender(stack, receiver.address)
  send(outlet, *range(5))
  exchanges.wait_until(lambda: 'quota' in receiver.transport.refused)
  assert len(os.listdir(receiver.folder)) == 3
  assert 'see see.spool_mib' in caplog.text
  receiver.collect(2)
  receiver.transport.saved(2)
  rpcs.wait_until_settled(outlet)
  assert rounds(receiver.collect(4)) == [4]
  assert fates(outlet) == {'published': 5, 'acknowledged': 5}
