"""gRPC between processes: what is tried again, split, kept and refused."""

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
from mrl_jax.sharing import xgrpo
from tests import examples
from tests import exchanges
from tests import rpcs

Code = grpc.StatusCode


def test_a_server_may_come_up_late(stack, tmp_path, caplog):
  address = exchanges.free_address()
  outlet = rpcs.sender(stack, address)
  for round in range(3):
    outlet.send(round, rpcs.one(round))
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  assert rpcs.fates(outlet) == {'published': 3, 'waiting': 3}
  receiver = rpcs.Receiver(stack, tmp_path, address=address, max_staleness=2)
  rpcs.settled(outlet)
  assert [r.header.round for r in receiver.collect(2)] == [0, 1, 2]
  assert caplog.text.count('a cannot reach b at') == 1


@pytest.mark.parametrize(
  'code',
  [
    Code.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,
    Code.UNKNOWN,
    Code.INTERNAL,
    Code.CANCELLED,
  ],
)
def test_an_answer_that_may_change_is_asked_for_again(stack, caplog, code):
  def answer(fake, context):
    if len(fake.messages) < 4:
      context.abort(code, 'not now')

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(stack, fake.address)
  outlet.send(0, rpcs.one())
  outlet.send(1, rpcs.one(1))
  rpcs.settled(outlet)
  assert fake.rounds() == [0, 0, 0, 0, 1]
  assert caplog.text.count(f'b at {fake.address} and will keep trying') == 1
  assert rpcs.fates(outlet) == {'published': 2, 'acknowledged': 2}


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
def test_an_answer_that_will_not_change_is_taken(
  stack, caplog, code, details, reason
):
  def answer(fake, context):
    if len(fake.messages) < 4:
      context.abort(code, details)

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(stack, fake.address)
  for round in range(4):
    outlet.send(round, [*rpcs.one(round), examples.outcome(round=round)])
  rpcs.settled(outlet)
  assert fake.rounds() == [0, 1, 2, 3]
  assert rpcs.fates(outlet) == {'published': 4, 'refused': 3, 'acknowledged': 1}
  assert rpcs.fates(outlet) == rpcs.fates(outlet, 'outcome')
  assert outlet.ledger.refusals() == {'b': {reason: 6}}
  assert caplog.text.count(f'refused: {reason}, by b at {fake.address}') == 1
  assert 'cannot reach' not in caplog.text


def test_a_message_of_another_run_is_refused_and_the_peer_is_named(
  stack, tmp_path, caplog
):
  receiver = rpcs.Receiver(stack, tmp_path, run='this')
  outlet = rpcs.sender(stack, receiver.address, run='other')
  outlet.send(0, rpcs.one())
  rpcs.settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'run': 1}}
  assert f'b at {receiver.address}' in caplog.text
  assert "of run 'other', this is 'this'" in caplog.text
  assert receiver.server.refused == {'run': 1}
  assert not os.listdir(receiver.folder)


def test_another_service_at_the_address_refuses(stack):
  fake = rpcs.Fake(stack, rpcs.take_all, method='/another/Service')
  outlet = rpcs.sender(stack, fake.address)
  outlet.send(0, rpcs.one())
  rpcs.settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'unimplemented': 1}}


def test_an_answer_that_does_not_come_is_not_waited_for(stack, monkeypatch):
  monkeypatch.setattr(rpc, '_ANSWER_S', 0.2)

  def answer(fake, context):
    if len(fake.messages) == 1:
      fake.released.wait()

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(stack, fake.address)
  outlet.send(0, rpcs.one())
  rpcs.settled(outlet)
  assert fake.rounds() == [0, 0]
  assert rpcs.fates(outlet) == {'published': 1, 'acknowledged': 1}


def test_a_message_that_came_twice_is_taken_once(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  for _ in range(2):
    assert rpcs.call(receiver.address, rpcs.message(rpcs.one())) == (
      Code.OK,
      '',
    )
  assert len(receiver.collect()) == 1
  row = receiver.inboxes['b'].ledger.table()['a']['rollout']
  assert (row['published'], row['duplicate']) == (2, 1)
  assert len(os.listdir(receiver.folder)) == 1


# What a message may hold.


def test_a_large_round_is_split_and_ends_with_its_last_message(stack):
  published = [
    *examples.group([1.0] * 50),
    *[examples.outcome(prompt=f'p{i}') for i in range(20)],
  ]
  fake = rpcs.Fake(stack, rpcs.take_all)
  outlet = rpcs.sender(stack, fake.address, max_bytes=2000, bytes=10**6)
  outlet.send(0, published)
  rpcs.settled(outlet)
  assert len(fake.messages) > 10
  assert [m['last'] for m in fake.messages[-2:]] == [False, True]
  assert sum(m['last'] for m in fake.messages) == 1
  for got in fake.messages:
    assert len(msgspec.msgpack.encode(got['records'])) <= 2000 + 100
  sent = [
    tuple(r['header'].values()) for m in fake.messages for r in m['records']
  ]
  assert sent == [
    tuple(msgspec.structs.asdict(r.header).values()) for r in published
  ]


def test_a_round_of_many_records_is_split_too(stack):
  stats = xgrpo.group_stats(examples.group([1.0]))
  fake = rpcs.Fake(stack, rpcs.take_all)
  outlet = rpcs.sender(
    stack, fake.address, max_bytes=2**24, bytes=2**24, records=9999
  )
  outlet.send(0, [stats] * 9000)
  rpcs.settled(outlet)
  assert [len(m['records']) for m in fake.messages] == [4096, 4096, 808]


def test_a_large_round_arrives_whole(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path, max_bytes=2000, bytes=10**6)
  outlet = rpcs.sender(
    stack, receiver.address, max_bytes=2000, bytes=10**6, block_s=10.0
  )
  outlet.send(0, examples.group([1.0] * 50))
  receiver.heard()
  assert [r.header.sample for r in receiver.collect()] == [*range(50)]


def test_an_empty_round_is_a_message(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  rpcs.sender(stack, receiver.address).send(3, [])
  receiver.heard(3)


def test_a_record_larger_than_a_message_is_refused(stack, caplog):
  fake = rpcs.Fake(stack, rpcs.take_all)
  outlet = rpcs.sender(stack, fake.address, max_bytes=1000)
  outlet.send(0, [*rpcs.one(payload=b'x' * 1000), *rpcs.one(sample=1)])
  exchanges.wait_until(lambda: fake.messages)
  rpcs.settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'size': 1}}
  assert [len(m['records']) for m in fake.messages] == [1]
  assert 'a rollout of a is refused: size, not sent to b at' in caplog.text


def test_an_unsound_record_is_not_sent(stack, caplog):
  fake = rpcs.Fake(stack, rpcs.take_all)
  outlet = rpcs.sender(stack, fake.address)
  wrong = msgspec.structs.replace(
    examples.rollout(), ids=examples.rollout().ids.astype('i8')
  )
  outlet.send(0, [wrong, wrong, *rpcs.one(reward=float('nan')), *rpcs.one()])
  rpcs.settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'ids_type': 2, 'reward': 1}}
  assert rpcs.fates(outlet) == {'published': 4, 'refused': 3, 'acknowledged': 1}
  assert caplog.text.count('refused: ids_type, not sent to b') == 1


def test_a_receiver_with_a_lower_limit_refuses(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path, max_bytes=2000, bytes=10**6)
  outlet = rpcs.sender(stack, receiver.address, max_bytes=10**6)
  outlet.send(0, examples.group([1.0] * 50))
  outlet.send(1, rpcs.one(1))
  rpcs.settled(outlet)
  assert outlet.ledger.refusals() == {'b': {'size': 50}}
  assert rpcs.fates(outlet)['acknowledged'] == 1
  assert len(os.listdir(receiver.folder)) == 1


def test_what_is_compressed_is_refused(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  code, details = rpcs.call(
    receiver.address,
    rpcs.message(rpcs.one()),
    compression=grpc.Compression.Gzip,
  )
  assert code is Code.UNIMPLEMENTED
  assert 'disabled' in details
  assert receiver.is_untouched()


# What is kept, and for how long.


def test_a_peer_that_is_down_costs_no_time_and_little_memory(stack, caplog):
  outlet = rpcs.sender(stack, exchanges.free_address(), records=3, block_s=2.0)
  outlet.send(0, rpcs.one())
  exchanges.wait_until(lambda: 'a cannot reach b at' in caplog.text)
  began = time.monotonic()
  for round in range(1, 20):
    outlet.send(round, rpcs.one(round))
  assert time.monotonic() - began < 10 * 2.0
  assert rpcs.fates(outlet) == {'published': 20, 'evicted': 17, 'waiting': 3}
  assert rounds_in(outlet.state()) == [0, 18, 19]  # The first is on its way.


def rounds_in(state):
  parcels, _ = msgspec.msgpack.decode(state)
  return [msgspec.msgpack.decode(p['data'])['round'] for p in parcels]


def test_the_bytes_that_wait_are_bounded_too(stack):
  outlet = rpcs.sender(stack, exchanges.free_address(), bytes=2000)
  for round in range(10):
    outlet.send(round, rpcs.one(round))
  parcels, _ = msgspec.msgpack.decode(outlet.state())
  assert 1000 < sum(len(p['data']) for p in parcels) <= 2000


def test_a_publisher_waits_for_a_peer_that_is_slow(stack):
  def answer(fake, context):
    if len(fake.messages) > 1:
      fake.released.wait()

  fake = rpcs.Fake(stack, answer)
  outlet = rpcs.sender(
    stack, fake.address, records=2, block_s=exchanges.DEADLINE_S
  )
  outlet.send(0, rpcs.one())
  rpcs.settled(outlet)  # The peer is there.

  def publish():
    for round in (1, 2, 3, 4):
      outlet.send(round, rpcs.one(round))

  with futures.ThreadPoolExecutor(1) as pool:
    publishing = pool.submit(publish)
    exchanges.wait_until(lambda: len(fake.messages) == 2)
    with pytest.raises(futures.TimeoutError):
      publishing.result(timeout=0.1)
    fake.released.set()
    publishing.result(timeout=exchanges.DEADLINE_S)
  rpcs.settled(outlet)
  assert rpcs.fates(outlet) == {'published': 5, 'acknowledged': 5}


def test_state_brings_back_what_was_not_acknowledged(stack, tmp_path):
  address = exchanges.free_address()
  outlet = rpcs.sender(stack, address)
  for round in range(3):
    outlet.send(round, [*rpcs.one(round), examples.outcome(round=round)])
  again = rpcs.sender(stack, address)
  again.restore(outlet.state())
  assert again.ledger.table() == outlet.ledger.table()
  assert again.state() == outlet.state()
  outlet.close()
  receiver = rpcs.Receiver(stack, tmp_path, address=address, max_staleness=2)
  rpcs.settled(again)
  assert len(receiver.collect(2)) == 6
  assert rpcs.fates(again) == {'published': 3, 'acknowledged': 3}
  again.send(3, rpcs.one(3))
  receiver.heard(3)


def test_what_is_restored_is_bounded_as_well(stack):
  address = exchanges.free_address()
  outlet, again = (rpcs.sender(stack, address, records=3) for _ in range(2))
  for round in range(3):
    outlet.send(round, rpcs.one(round))
  again.restore(outlet.state())
  again.send(3, rpcs.one(3))
  assert rounds_in(again.state()) == [0, 2, 3]


def test_restoring_while_a_message_is_on_its_way_loses_nothing(stack):
  fake = rpcs.Fake(stack, rpcs.hang)
  before = rpcs.sender(stack, exchanges.free_address())
  before.send(7, rpcs.one(7))
  outlet = rpcs.sender(stack, fake.address)
  outlet.send(0, rpcs.one())
  exchanges.wait_until(lambda: fake.messages)
  outlet.restore(before.state())
  fake.released.set()
  rpcs.settled(outlet)
  assert fake.rounds() == [0, 7]
  assert rpcs.fates(outlet) == {'published': 1, 'acknowledged': 1}


@pytest.mark.parametrize('state', ['idle', 'done', 'down', 'hung', 'never'])
def test_closing_takes_a_bounded_time_and_leaves_no_thread(
  stack, state, caplog
):
  before = set(threading.enumerate())
  with contextlib.ExitStack() as until_closed:
    fake = rpcs.Fake(
      until_closed, rpcs.hang if state == 'hung' else rpcs.take_all
    )
    address = exchanges.free_address() if state == 'down' else fake.address
    outlet = rpcs.sender(stack, address, block_s=0.2)
    if state in ('done', 'down', 'hung'):
      outlet.send(0, rpcs.one())
    if state == 'done':
      rpcs.settled(outlet)
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
  fake = rpcs.Fake(stack, lambda *_: time.sleep(0.1))
  outlet = rpcs.sender(stack, fake.address, block_s=exchanges.DEADLINE_S)
  for round in range(3):
    outlet.send(round, rpcs.one(round))
  outlet.close()
  assert rpcs.fates(outlet) == {'published': 3, 'acknowledged': 3}


# What a server does with a message.


def test_a_message_is_on_disk_before_it_is_acknowledged(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  data = rpcs.message(rpcs.one())
  receiver.server.take(data)
  (name,) = os.listdir(receiver.folder)
  assert (receiver.folder / name).read_bytes() == data
  assert receiver.inboxes['b'].has_taken(name)


def test_a_message_that_cannot_be_kept_is_not_taken(stack, tmp_path):
  receiver = rpcs.Receiver(stack, tmp_path)
  receiver.folder.rmdir()
  code, details = rpcs.call(receiver.address, rpcs.message(rpcs.one()))
  assert code is Code.UNKNOWN  # To be sent again.
  assert 'No such file' in details
  assert receiver.collect() == []
  receiver.folder.mkdir()
  assert rpcs.call(receiver.address, rpcs.message(rpcs.one())) == (Code.OK, '')


def test_a_server_takes_in_what_it_had_acknowledged(stack, tmp_path, caplog):
  with contextlib.ExitStack() as until_killed:
    receiver = rpcs.Receiver(until_killed, tmp_path)
    receiver.server.take(rpcs.message(rpcs.one()))
  spool = spool_lib.Spool(os.fspath(receiver.folder))
  spool.add(0, rpcs.message(rpcs.one(), receiver='c'))
  spool.add(0, b'damaged')
  again = rpcs.Receiver(stack, tmp_path)
  assert len(again.collect()) == 1
  assert again.inboxes['b'].heard('a') == 0
  assert caplog.text.count('is left on disk') == 2


def test_a_server_takes_nothing_in_that_a_checkpoint_has(stack, tmp_path):
  with contextlib.ExitStack() as until_killed:
    receiver = rpcs.Receiver(until_killed, tmp_path)
    receiver.server.take(rpcs.message(rpcs.one()))
    state = receiver.inboxes['b'].state()
    receiver.server.take(rpcs.message(rpcs.one(1), round=1))
  again = rpcs.Receiver(stack, tmp_path, state=state, max_staleness=1)
  assert [r.header.round for r in again.collect(1)] == [0, 1]
  row = again.inboxes['b'].ledger.table()['a']['rollout']
  assert (row['published'], row['duplicate']) == (2, 0)


def test_a_server_may_be_closed_before_it_starts_and_twice():
  server = rpc.Server(
    exchanges.free_address(),
    {'b': None},
    senders=('a',),
    run='run',
    security=rpcs.PLAIN,
    max_bytes=1,
    spool=None,
  )
  server.close()
  server.close()


def test_a_policy_that_is_slow_does_not_hold_up_others(stack, tmp_path):
  receiver = rpcs.Receiver(
    stack, tmp_path, names=('b', 'c'), records=1, block_s=exchanges.DEADLINE_S
  )
  slow = rpcs.sender(stack, receiver.address, block_s=exchanges.DEADLINE_S)
  for round in range(2):
    slow.send(round, rpcs.one(round))
  exchanges.wait_until(lambda: receiver.inboxes['b'].heard('a') == 0)
  exchanges.wait_until(lambda: len(os.listdir(receiver.folder)) == 2)
  # Somebody insists, and is told to come again.
  for _ in range(8):
    code, details = rpcs.call(
      receiver.address, rpcs.message(rpcs.one(1), round=1)
    )
    assert (code, details.partition(' ')[0]) == (
      Code.RESOURCE_EXHAUSTED,
      'another',
    )
  quick = rpcs.sender(stack, receiver.address, peer='c')
  quick.send(0, rpcs.one())
  rpcs.settled(quick)
  assert rpcs.fates(quick) == {'published': 1, 'acknowledged': 1}
  for round in range(2):
    receiver.heard(round)
    assert [r.header.round for r in receiver.collect(round)] == [round]


def test_a_server_acknowledges_what_it_is_taking_before_it_closes(
  stack, tmp_path, monkeypatch
):
  monkeypatch.setattr(rpc, '_GRACE_S', exchanges.DEADLINE_S)
  receiver = rpcs.Receiver(
    stack, tmp_path, records=1, block_s=exchanges.DEADLINE_S
  )
  outlet = rpcs.sender(stack, receiver.address)
  outlet.send(0, rpcs.one())
  outlet.send(1, rpcs.one(1))
  exchanges.wait_until(lambda: len(os.listdir(receiver.folder)) == 2)
  with futures.ThreadPoolExecutor(1) as pool:
    closing = pool.submit(receiver.server.close)
    with pytest.raises(futures.TimeoutError):
      closing.result(timeout=0.2)
    receiver.collect()
  rpcs.settled(outlet)
  assert rpcs.fates(outlet) == {'published': 2, 'acknowledged': 2}


def test_a_server_closes_while_a_delivery_waits_for_room(stack, tmp_path):
  before = set(threading.enumerate())
  receiver = rpcs.Receiver(
    stack, tmp_path, records=1, block_s=exchanges.DEADLINE_S
  )
  with contextlib.ExitStack() as until_closed:
    outlet = rpcs.sender(until_closed, receiver.address, block_s=0.1)
    for round in range(2):
      outlet.send(round, rpcs.one(round))
    exchanges.wait_until(lambda: len(os.listdir(receiver.folder)) == 2)
    began = time.monotonic()
    receiver.server.close()
    assert time.monotonic() - began < exchanges.DEADLINE_S / 6
  receiver.collect(1)  # Makes room.
  exchanges.wait_until(lambda: set(threading.enumerate()) <= before)
