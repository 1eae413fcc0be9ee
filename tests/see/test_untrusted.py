"""What comes in over a network may be anything: lies, damage and excess."""

import collections
from concurrent import futures
import contextlib
import itertools
import os
import pathlib
import random
import socket
import threading
import time
import tracemalloc

import grpc
import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import rpc
from mrl_jax.see import security as security_lib
from mrl_jax.see import spool as spool_lib
from mrl_jax.see import wire
from mrl_jax.sharing import xgrpo
from mrl_jax.thl import byte_tokenizer
from tests import examples
from tests import exchanges
from tests import vocabularies

SENDERS = ('a', 'c', 'd')
LAST_ROUND = 2**31 - 1
# Nothing is ever too old, so that every round can be collected at any time.
LIMITS = exchanges.limits(bytes=20_000, max_staleness=LAST_ROUND)
MAX_BYTES = 2**18  # Of a message.
GROWTH_MIB = 48  # Of this process, while it is lied to.
NAN, INF = float('nan'), float('inf')
DEEP = msgspec.Raw(b'\x91' * 50_000 + b'\xc0')
NOT_UTF8 = msgspec.Raw(b'\xa2\xff\xfe')
LONG, VERY_LONG = 'x' * (records.MAX_NAME + 1), 'x' * 200_000
CLASSES = {'rollout': records.Rollout, 'group_stats': records.GroupStats,
           'outcome': records.Outcome}  # fmt: skip


def encode(value) -> bytes:
  return msgspec.msgpack.encode(value)


def plain(record) -> dict:
  return msgspec.msgpack.decode(wire.encode(record))


LARGE = plain(examples.rollout(b'x' * 2000))


def sound(rng: random.Random, kind: str, sender: str = 'a') -> dict:
  """A sound message, as plain values; its first record is of this kind."""
  fields = {
    'policy': sender,
    'prompt': f'p{rng.getrandbits(60)}',
    'round': rng.randrange(4),
  }
  group = examples.group([1.0] * rng.randrange(2, 4), **fields)
  first = {
    'rollout': examples.rollout(sample=9, **fields),
    'group_stats': xgrpo.group_stats(group),
    'outcome': examples.outcome(**fields),
  }[kind]
  return {
    'run': 'run',
    'sender': sender,
    'receiver': 'b',
    'round': fields['round'],
    'last': rng.random() < 0.5,
    'records': [plain(first), *map(plain, group)],
  }


# Lies. Each is a function of a sound message or record, and the reason for
# which the result is refused.


def field(**changes):
  return lambda sound: {**sound, **changes}


def without(name):
  return lambda sound: {k: v for k, v in sound.items() if k != name}


def header(**changes):
  return lambda record: {**record, 'header': {**record['header'], **changes}}


def array(name, values, dtype):
  data = np.array(values, dtype)
  return field(**{name: [data.dtype.str, data.tobytes()]})


def instead(value):
  return lambda sound: value


def added(data: bytes, fields: int = 1):
  """More fields than there are, as bytes."""

  def add(message):
    size = len(message)
    return msgspec.Raw(
      bytes([0x80 + size + fields]) + encode(message)[1:] + data
    )

  return add


def mistyped(struct):
  """(name, value) of values that are of no type that a field could have."""
  wrong = (None, True, -1.5, 'text', b'data', [], ['<i4'], {}, {'a': [{}]})
  for info in msgspec.structs.fields(struct):
    for value in wrong:
      if info.type is not np.ndarray:
        with contextlib.suppress(msgspec.ValidationError):
          msgspec.convert(value, info.type)
          continue
      yield info.name, value


MESSAGE_LIES = [
  ('run', field(run='other')),
  ('run', field(run='')),
  ('run', field(run='run\x00')),
  ('peer', field(sender='z')),
  ('peer', field(sender='')),
  ('peer', field(sender='b')),
  ('peer', field(receiver='a')),
  ('peer', field(sender='b', receiver='a')),
  ('peer', field(receiver='z' * records.MAX_NAME)),
  *(
    ('undecodable', lie)
    for lie in (
      *(without(name) for name in rpc.Message.__struct_fields__),
      *(
        field(**{name: value})
        for name, value in mistyped(rpc.Message)
        if name != 'records' or not isinstance(value, list)
      ),
      *(field(round=n) for n in (-1, -(2**63), 2**31, 2**63, 2**64 - 1, 1.5)),
      *(field(**{n: LONG}) for n in ('run', 'sender', 'receiver')),
      *(field(**{n: VERY_LONG}) for n in ('run', 'sender', 'receiver')),
      *(field(**{n: NOT_UTF8}) for n in ('run', 'sender', 'receiver')),
      *(instead(value) for value in (None, 1, 'message', [], [1] * 6, {})),
      *(field(**{name: DEEP}) for name in ('run', 'round', 'records', 'more')),
      field(records=[DEEP]),
      field(records=[{'type': 'rollout', 'header': DEEP}]),
      field(records=[None] * 4097),
      field(records=[{}] * 200_000),
      field(more=1),
      field(**{VERY_LONG: 1}),
      field(**{'\x1b[2J\n': 1}),
      *(
        instead(msgspec.Raw(data)) for data in (b'', b'\xc1', b'\x86', b'\xdf')
      ),
      added(b'', fields=1),
      added(b'', fields=-1),
      added(b'\xa1'),
      added(b'\xa7records\xdd\xff\xff\xff\xff', fields=1),
      added(b'\xa7records\xdc\xff\xff', fields=1),
      added(b'\xa3run\xdb\xff\xff\xff\xff', fields=1),
      added(b'\xa3run\xdf\xff\xff\xff\xff', fields=1),
      added(b'\xa7records\x91\xc6\xff\xff\xff\xff', fields=1),
      added(b'\xa7records\x91\xc9\xff\xff\xff\xff\x01', fields=1),
      added(b'\xc0\xc0'),
      added(b'\x01\x01'),
    )
  ),
]


def record_lies(kind):
  """Those that may be told of every kind."""
  yield from (
    ('schema', header(schema=0)),
    ('schema', header(schema=2)),
    ('schema', header(schema=2**63)),
    ('header', header(created=NAN)),
    ('header', header(created=-INF)),
    ('header', header(run=LONG)),
    ('header', header(prompt=LONG)),
    ('header', header(prompt=VERY_LONG)),
    ('header', header(tokenizer=VERY_LONG)),
    ('sender', header(policy='z')),
    ('sender', header(policy='b')),
    ('sender', header(policy=VERY_LONG)),
    ('round', header(round=4)),
    ('round', header(round=LAST_ROUND)),
    ('tokenizer', header(tokenizer='other')),
    ('tokenizer', header(tokenizer='')),
  )
  undecodable = (
    *(header(round=n) for n in (-1, 2**31, 2**63, 2**64 - 1)),
    *(header(version=n) for n in (-1, 2**31, 1.5)),
    *(header(sample=n) for n in (-2, 2**31, 2**63)),
    *(header(**{name: NOT_UTF8}) for name in ('run', 'policy', 'prompt')),
    *(header(**{n: v}) for n, v in mistyped(records.Header)),
    *(field(**{n: v}) for n, v in mistyped(CLASSES[kind])),
    *(without(n) for n in ('type', 'header', *_required(CLASSES[kind]))),
    header(more=1),
    header(header={}),
    field(more=1),
    field(more=[{}] * 50_000),
    field(**{VERY_LONG: 1}),
    field(type='record'),
    field(type=VERY_LONG),
    field(type=1),
    field(type=NOT_UTF8),
    field(header=[*range(9)]),
    *(instead(value) for value in (None, 1, 'record', b'record', [], {})),
    added(b'\x01\x01'),
  )
  yield from (('undecodable', lie) for lie in undecodable)


def _required(struct):
  return [f.name for f in msgspec.structs.fields(struct) if f.required]


SOUND = examples.rollout()
NAMES = [*_required(records.Rollout)][3:8]  # Of the arrays.
RECORD_LIES = {
  'rollout': [
    *record_lies('rollout'),
    *(
      ('undecodable', field(**{name: value}))
      for name in NAMES
      for value in (
        ['|O8', b'\0' * 40],
        ['<i8', b'\0' * 40],
        ['>i4', b'\0' * 20],
        ['<f8', b'\0' * 40],
        ['<f2', b'\0' * 10],
        ['<U5', b'\0' * 20],
        ['<i4', b'\0' * 19],
        ['<f4', b'\0' * 21],
        ['|b1', b'\0\1\2\0\1'],
        ['<i4', 'text'],
        ['<i4', [0] * 5],
        ['<i4', b'', b''],
        [b'<i4', b'\0' * 20],
        [0] * 5,
        [['<i4', b'\0' * 4]] * 5,
        [['<i4', b'']] * 20_000,
        [{}] * 50_000,
        {'<i4': b'\0' * 20},
        msgspec.msgpack.Ext(1, b'\0' * 20),
        msgspec.msgpack.Ext(-1, b'\0' * 4),
      )
    ),
    *(
      (f'{name}_type', array(name, [0] * 5, dtype))
      for name, dtype in zip(NAMES, ('f4', 'f4', 'i4', 'i4', 'i4'), strict=True)
    ),
    *(
      (f'{name}_type', array(name, [0] * 6, getattr(SOUND, name).dtype))
      for name in NAMES[1:]
    ),
    ('byte_lengths_type', array('ids', [0] * 4, 'i4')),
    ('byte_lengths_type', array('ids', [0] * 4000, 'i4')),
    ('negative', array('ids', [61, 32, 49, 51, -1], 'i4')),
    ('negative', array('ids', [-(2**31)] * 5, 'i4')),
    ('negative', array('byte_lengths', [1, 1, 3, -1, 0], 'i4')),
    ('byte_lengths', array('byte_lengths', [1, 1, 1, 2, 0], 'i4')),
    ('byte_lengths', array('byte_lengths', [2**31 - 1] * 4 + [8], 'i4')),
    ('byte_lengths', field(payload=b'= 133')),
    ('byte_lengths', field(payload=b'')),
    ('vocabulary', array('ids', [61, 32, 49, 51, 1000], 'i4')),
    ('vocabulary', array('ids', [2**31 - 1] * 5, 'i4')),
    ('sample', header(sample=-1)),
    ('finish', array('byte_lengths', [1, 1, 1, 0, 1], 'i4')),
    *(
      ('logp', array(name, [value, -1, -1, -1, -1], 'f4'))
      for name in ('sampling_logp', 'policy_logp')
      for value in (NAN, INF, -INF, 0.5, -3e38)
    ),
    *(('density', field(temperature=value)) for value in (NAN, INF, -1.0)),
    *(('density', field(top_p=value)) for value in (NAN, INF, 0.0, 2)),
    *(('reward', field(reward=value)) for value in (NAN, INF, -INF, 2**63)),
    *(('advantage', field(advantage=value)) for value in (NAN, INF, -1e300)),
    ('undecodable', field(finish='tired')),
    ('undecodable', field(verdict='maybe')),
    ('size', lambda record: {**LARGE, 'header': record['header']}),
  ],
  'group_stats': [
    *record_lies('group_stats'),
    ('sample', header(sample=0)),
    ('counts', field(successes=9)),
    ('counts', field(count=0, successes=0)),
    *(('reward', field(reward_sum=value)) for value in (NAN, INF, 2**63)),
    *(('reward', field(reward_square_sum=value)) for value in (NAN, INF)),
    ('moments', field(reward_square_sum=-1.0)),
    ('moments', field(reward_sum=1000.0)),
    *(('undecodable', field(count=n)) for n in (-1, 2**31, 2**63)),
    *(('undecodable', field(successes=n)) for n in (-1, 2**31, 2**63)),
  ],
  'outcome': [
    *record_lies('outcome'),
    ('sample', header(sample=0)),
    ('counts', field(successes=5)),
    ('texts', field(texts=[b'= 13'] * 2)),
    ('verifier', field(verifier='')),
    ('verifier', field(verifier=VERY_LONG)),
    ('verdict', field(verdict='wrong')),
    ('undecodable', field(texts=['= 13'])),
    ('undecodable', field(texts=[[b'= 13']])),
    ('undecodable', field(count=99, successes=99, texts=[b''] * 65)),
    ('undecodable', field(texts=[b''] * 100_000)),
    ('size', field(texts=[b'x' * 20_001])),
  ],
}
ALL_LIES = [
  *(('', *lie) for lie in MESSAGE_LIES),
  *((kind, *lie) for kind, lies in RECORD_LIES.items() for lie in lies),
]


def damaged(rng: random.Random, one: bytes, other: bytes) -> bytes:
  """A message that was hurt on its way, or spliced with another."""
  data = bytearray(one)
  place = rng.randrange(len(data))
  match rng.randrange(7):
    case 0:
      del data[place:]
    case 1:
      del data[place : place + rng.randrange(1, 9)]
    case 2:
      for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    case 3:
      data[place] = rng.choice((0x00, 0x7F, 0x80, 0xC0, 0xC6, 0xCF, 0xDD, 0xFF))
    case 4:
      data[place:place] = rng.randbytes(rng.randrange(1, 9))
    case 5:
      data[place:] = other[rng.randrange(len(other)) :]
    case _:
      data[place : place + 8] = other[place : place + 8]
  return bytes(data)


class Receiver:
  """The server of policy b, and everything that gets past it."""

  def __init__(self, folder):
    self.inbox = inbox_lib.Inbox(
      'b', dict.fromkeys(SENDERS, exchanges.PEER), LIMITS
    )
    for peer in SENDERS:
      self.inbox.deliver(peer, LAST_ROUND, [])  # It is not waited for.
    self.address = exchanges.free_address()
    self.folder = pathlib.Path(folder)
    self._spool = spool_lib.Spool(os.fspath(folder))
    self.server = rpc.Server(
      self.address,
      {'b': self.inbox},
      senders=SENDERS,
      run='run',
      security=security_lib.Security(),
      max_bytes=MAX_BYTES,
      spool=self._spool,
    )

  def tell(self, data: bytes) -> str:
    """The reason why a message is refused; '' if it is taken."""
    try:
      self.server.take(data)
    except rpc.Refused as refused:
      reason, _, why = str(refused).partition(': ')
      assert why
      assert len(why) < 1000
      assert why.isprintable()
      return reason
    return ''

  def collect(self) -> list[records.Record]:
    """What got in, which is sound."""
    received = self.inbox.collect(LAST_ROUND, records.KINDS)
    assert len(received) <= LIMITS.records
    assert sum(map(records.size, received)) <= LIMITS.bytes
    for record in received:
      assert records.fault(record) is None
      assert record.header.policy in SENDERS
      assert record.header.tokenizer == exchanges.PEER.tokenizer
      if isinstance(record, records.Rollout):
        assert record.ids.max(initial=0) < exchanges.PEER.vocab_size
    return received

  def refusals(self) -> collections.Counter:
    reasons = collections.Counter()
    for of_peer in self.inbox.ledger.refusals().values():
      reasons.update(of_peer)
    return reasons

  def forget(self):
    """Does what follows a checkpoint."""
    self._spool.forget(2**31)
    self.inbox.forget(2**31)

  def kept(self):
    return set(os.listdir(self.folder))


@pytest.fixture
def receiver(tmp_path):
  made = Receiver(tmp_path / 'received')
  yield made
  made.server.close()


@pytest.fixture
def no_thread_dies(monkeypatch):
  died = []
  monkeypatch.setattr(threading, 'excepthook', died.append)
  yield
  assert not died


@pytest.mark.parametrize('kind', CLASSES)
def test_what_is_sound_gets_in(receiver, kind):
  message = sound(random.Random(0), kind)
  assert receiver.tell(encode(message)) == ''
  assert len(receiver.collect()) == len(message['records'])
  assert not receiver.refusals()


@pytest.mark.parametrize(('reason', 'lie'), MESSAGE_LIES)
def test_a_lying_message_is_refused_and_leaves_no_trace(receiver, reason, lie):
  message = lie(sound(random.Random(0), 'rollout'))
  assert receiver.tell(encode(message)) == reason
  assert receiver.server.refused == {reason: 1}
  assert receiver.collect() == []
  assert not receiver.kept()
  assert not receiver.inbox.ledger.table()


@pytest.mark.parametrize('kind', CLASSES)
def test_a_lying_record_is_refused_and_those_beside_it_are_not(receiver, kind):
  rng = random.Random(0)
  for i, (reason, lie) in enumerate(RECORD_LIES[kind]):
    message = sound(rng, kind)
    first, *rest = message['records']
    before = receiver.refusals()
    assert (
      receiver.tell(encode({**message, 'records': [lie(first), *rest]})) == ''
    )
    assert receiver.refusals() - before == {reason: 1}, f'lie {i}'
    assert len(receiver.collect()) == len(rest)


def test_a_field_that_is_given_twice_counts_once(receiver):
  message = sound(random.Random(0), 'rollout')
  again = added(b'\xa6sender\xa1a\xa7records\x90', fields=2)(message)
  assert receiver.tell(encode(again)) == ''
  assert receiver.collect() == []
  assert not receiver.inbox.ledger.table()


# Floods.


def books_balance(inbox) -> collections.Counter:
  """Nothing is unaccounted for; returns the sums."""
  totals = collections.Counter()
  for kinds in inbox.ledger.table().values():
    for row in kinds.values():
      totals.update(row)
  settled = ('used', 'stale', 'refused', 'duplicate', 'evicted')
  assert totals['waiting'] == 0
  assert totals['published'] == sum(totals[fate] for fate in settled)
  reasons = inbox.ledger.refusals().values()
  assert totals['refused'] == sum(sum(row.values()) for row in reasons)
  return totals


def resident_mib() -> float:
  """Of this process; 0 where the system does not say."""
  with contextlib.suppress(FileNotFoundError):
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE') / 2**20
  return 0.0


class Liar:
  """One who sends lies, damage, and now and then the truth.

  Its lies come in turns, so that none is left out.
  """

  def __init__(self, seed, sender):
    self._rng, self._sender = random.Random(seed), sender
    lies = self._rng.sample(ALL_LIES, len(ALL_LIES))
    self._lies = itertools.cycle(lies)
    self._before = encode(self._sound())

  def _sound(self, kind=''):
    kind = kind or self._rng.choice([*CLASSES])
    return sound(self._rng, kind, self._sender)

  def truth(self) -> bytes:
    return encode(self._sound())

  def damage(self) -> bytes:
    one, other = self.truth(), self._before
    self._before = one
    return damaged(self._rng, one, other)

  def lie(self) -> tuple[bytes, str, str, int]:
    """A message, why it is refused or a record of it, and the sound ones."""
    kind, reason, lie = next(self._lies)
    message = self._sound(kind)
    if not kind:
      return encode(lie(message)), reason, '', 0
    first, *rest = message['records']
    lying = encode({**message, 'records': [lie(first), *rest]})
    return lying, '', reason, len(rest)


@pytest.fixture
def quick_disk(monkeypatch):
  monkeypatch.setattr(os, 'fsync', lambda file: None)


@pytest.mark.parametrize(
  'count', [2000, pytest.param(30_000, marks=pytest.mark.slow)]
)
def test_a_flood_is_refused_message_by_message(
  receiver, count, quick_disk, no_thread_dies
):
  liars = [Liar(seed, sender) for seed, sender in enumerate(SENDERS)]
  told = collections.Counter()
  warm_up, resident = count // 10, 0.0
  for i in range(count):
    liar = liars[i // 2 % len(liars)]
    if i % 2:
      data, refused, refused_record, rest = liar.lie()
      before = receiver.refusals()
      assert receiver.tell(data) == refused
      expected = [refused_record] if refused_record else []
      assert [*(receiver.refusals() - before).elements()] == expected
      assert len(receiver.collect()) == rest
    else:
      refused = receiver.tell(liar.damage())
      receiver.collect()
    told[refused or 'taken'] += 1
    if i % 500 == 0:
      receiver.forget()
      if i <= warm_up:
        resident = resident_mib()
      assert resident_mib() - resident < GROWTH_MIB
  taken = told.pop('taken')
  assert told == receiver.server.refused
  assert set(told) == {'undecodable', 'run', 'peer'}
  assert min(taken, told['undecodable']) > count // 5
  assert books_balance(receiver.inbox)['used'] > count // 5
  assert receiver.tell(liars[0].truth()) == ''


def over_the_network(address, sender, count) -> collections.Counter:
  """Sends lies, and checks the answers; counts them."""
  liar, answers = Liar(f'{sender} sends', sender), collections.Counter()
  with grpc.insecure_channel(address) as channel:
    call = channel.unary_unary('/mrl_jax.see.Exchange/Publish')

    def tell(data):
      while True:
        sending = call.future(data, timeout=exchanges.DEADLINE_S)
        code, details = sending.code().name, sending.details()
        if not details.startswith('another message of'):
          break  # Damage may speak for another sender.
      reason = details.partition(':')[0] if code == 'INVALID_ARGUMENT' else code
      answers[reason] += 1
      return reason

    for i in range(count):
      if i % 50 == 0:
        assert tell(b'x' * (MAX_BYTES + 5000)) == 'RESOURCE_EXHAUSTED'
      elif i % 2:
        data, refused, _, _ = liar.lie()
        assert tell(data) == (refused or 'OK')
      else:
        assert tell(liar.damage()) in ('OK', 'undecodable', 'run', 'peer')
    assert tell(liar.truth()) == 'OK'
  return answers


def no_http(address, count):
  """Speaks no HTTP to the server, or stops speaking it."""
  rng = random.Random(0)
  host, port = address.split(':')
  preface = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\4\0\0\0\0\0'
  for _ in range(count):
    with socket.create_connection((host, port)) as connection:
      start = rng.choice((b'', preface, preface[: rng.randrange(33)]))
      with contextlib.suppress(OSError):  # It may hang up at any time.
        connection.sendall(start + rng.randbytes(rng.randrange(1, 2000)))


@pytest.mark.parametrize(
  'count', [150, pytest.param(3000, marks=pytest.mark.slow)]
)
def test_a_flood_over_the_network_is_refused(
  receiver, count, quick_disk, no_thread_dies
):
  receiver.server.start()
  got_in, resident = 0, resident_mib()
  with futures.ThreadPoolExecutor(len(SENDERS) + 1) as pool:
    noise = pool.submit(no_http, receiver.address, count // 10)
    clients = [
      pool.submit(over_the_network, receiver.address, sender, count)
      for sender in SENDERS
    ]
    while not all(client.done() for client in (noise, *clients)):
      got_in += len(receiver.collect())
      receiver.forget()
      time.sleep(0.01)
    noise.result()
    answers = sum(
      (client.result() for client in clients), collections.Counter()
    )
  got_in += len(receiver.collect())
  for reason in ('undecodable', 'run', 'peer'):
    assert answers[reason] == receiver.server.refused[reason]
  totals = books_balance(receiver.inbox)
  assert totals['used'] == got_in > count // 5
  assert resident_mib() - resident < GROWTH_MIB


def test_what_nobody_collects_is_bounded(receiver, quick_disk):
  liar = Liar(0, 'a')
  for _ in range(300):
    receiver.tell(liar.truth())
    receiver.tell(liar.damage())
  again = inbox_lib.Inbox('b', receiver.inbox.peers, LIMITS)
  again.restore(receiver.inbox.state())
  received = receiver.collect()
  assert len(received) > LIMITS.records // 2
  assert len(again.collect(LAST_ROUND, records.KINDS)) == len(received)
  assert books_balance(receiver.inbox)['evicted'] > 100


@pytest.mark.parametrize(
  'lie',
  [
    field(records=[None] * 500_000),
    field(records=[{}] * 500_000),
    field(records=[{'type': 'rollout', 'ids': [{}] * 500_000}]),
    field(records=[{'type': 'rollout', 'ids': [[]] * 500_000}]),
    field(records=[{'type': 'outcome', 'texts': [b''] * 500_000}]),
    field(records=[{'type': 'outcome', 'header': [[]] * 500_000}]),
    field(records=[{'type': 'x' * 500_000}]),
    field(run=['x'] * 500_000),
    field(**{'x' * 500_000: 1}),
  ],
)
def test_a_message_takes_little_more_memory_than_its_bytes(receiver, lie):
  data = encode(lie(sound(random.Random(0), 'rollout')))
  tracemalloc.start()
  try:
    receiver.tell(data)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert receiver.collect() == []
  assert peak < 5 * len(data)


# Text.


@pytest.mark.parametrize('kind', ['byte_level', 'sentencepiece'])
def test_control_tokens_in_a_text_stay_text(receiver, kind):
  control = ['<eos>', '<pad>', '</s>', '<|im_end|>']
  backend = vocabularies.copy(examples.tokenizer(kind))
  backend.add_special_tokens(control)
  tokenizer = byte_tokenizer.ByteTokenizer(backend, eos_id=1)
  text = '= 13'.join(['', *control, '']).encode()
  fields = {'policy': 'a', 'prompt': 'p', 'round': 0}
  message = {**sound(random.Random(0), 'rollout'), 'round': 0}
  message['records'] = [
    plain(examples.rollout(text, **fields)),
    plain(examples.outcome((text,), **fields)),
  ]
  assert receiver.tell(encode(message)) == ''
  outcome, rollout = sorted(receiver.collect(), key=records.kind)
  assert (outcome.texts, rollout.payload) == ((text,), text)
  ids = tokenizer.encode(rollout.payload)
  assert tokenizer.decode(ids) == text
  assert not {backend.token_to_id(token) for token in control} & {*ids}
