"""Who exchanges with whom, over all transports of one or more processes."""

from concurrent import futures
import contextlib
import time

import pytest

from mrl_jax import records
from mrl_jax.see import exchange
from mrl_jax.see import inbox
from mrl_jax.see import journal
from mrl_jax.see import transport
from mrl_jax.see import wire
from mrl_jax.sharing import publish
from tests import examples
from tests import exchanges

KINDS = exchanges.KINDS
ALL = {'a': 'bc', 'b': 'ac', 'c': 'ab'}
STAR = {'a': '', 'b': 'a', 'c': 'a'}
RING = {'a': 'c', 'b': 'a', 'c': 'b'}


def local(listens_to=ALL, **options):
  return exchanges.local_node(listens_to, **options).endpoints


def senders(endpoint, round=0):
  received = endpoint.collect(round, KINDS)
  return ''.join(record.header.policy for record in received)


def publish_all(endpoints, round=0):
  for name, endpoint in endpoints.items():
    endpoint.publish(round, exchanges.rollouts(round, policy=name))


@pytest.fixture
def remote(stack, tmp_path):
  """Opens a node of the policies `here`; it closes when the test ends."""

  def connect(here, places, **options):
    node = exchanges.remote_node(here, places, tmp_path, **options)
    stack.callback(node.close)
    return node

  return connect


@contextlib.contextmanager
def soon():
  began = time.monotonic()
  yield
  assert time.monotonic() - began < exchanges.DEADLINE_S


@pytest.mark.parametrize('listens_to', [ALL, STAR, RING])
def test_a_policy_hears_and_waits_for_those_it_listens_to(listens_to):
  endpoints = local(listens_to, wait_s=exchanges.AGES_S)
  publish_all(endpoints)
  with soon():
    assert {n: senders(e) for n, e in endpoints.items()} == listens_to
  for name, endpoint in endpoints.items():
    # Nobody else is in the ledger, not even with records that were dropped.
    assert {*endpoint.ledger.table()} == {*listens_to[name]}


def test_a_policy_does_not_wait_for_those_it_does_not_listen_to():
  endpoints = local(STAR, wait_s=exchanges.AGES_S)
  with soon():
    assert senders(endpoints['a']) == ''
    publish_all({'a': endpoints['a']})
    assert senders(endpoints['b']) == 'a'  # c is silent.


def test_a_journal_has_all_kinds_even_if_nobody_listens(tmp_path):
  journals = {'b': exchanges.write_journal(tmp_path, policy='b')}
  endpoints = local(STAR, kinds={'group_stats'}, journals=journals)
  group = exchanges.rollouts(policy='b')
  endpoints['b'].publish(0, [*group, publish.group_stats(group)])
  assert senders(endpoints['a']) == senders(endpoints['c']) == ''
  reader = exchanges.read_journal(tmp_path, 'b')
  assert len(reader.read(0)) == 2
  assert not reader.finished()
  endpoints['b'].finish()
  assert reader.finished()


def test_only_shared_kinds_reach_a_peer():
  endpoints = local(kinds={'group_stats'})
  group = exchanges.rollouts()
  endpoints['a'].publish(0, [*group, publish.group_stats(group)])
  received = endpoints['b'].collect(0, KINDS)
  assert [*map(records.kind, received)] == ['group_stats']


def test_a_journal_is_read_only_by_those_who_listen_to_it(tmp_path):
  exchanges.write_journal(tmp_path).write(0, exchanges.rollouts())
  stored = {'a': exchanges.read_journal(tmp_path)}
  endpoints = local({'b': 'a', 'c': ''}, stored=stored)
  assert senders(endpoints['b']) == 'a'
  assert senders(endpoints['c']) == ''
  assert endpoints['c'].ledger.table() == {}


def test_records_reach_only_those_of_other_processes_who_listen(remote):
  places = exchanges.addresses('abc')
  nodes = [
    remote(n, places, listens_to=STAR, wait_s=exchanges.AGES_S) for n in 'abc'
  ]
  endpoints = {n: e for node in nodes for n, e in node.endpoints.items()}
  assert {n: {*e.sent} for n, e in endpoints.items()} == {
    'a': {'b', 'c'},
    'b': set(),
    'c': set(),
  }
  publish_all(endpoints)
  assert {n: senders(e) for n, e in endpoints.items()} == STAR
  assert [node.refused for node in nodes] == [{}] * 3


@pytest.mark.parametrize('listens_to', [{'a': '', 'b': 'a'}, STAR])
def test_records_of_a_policy_that_nobody_listens_to_are_refused_and_counted(
  remote, listens_to
):
  places = exchanges.addresses(listens_to)
  here = ''.join(name for name in places if name != 'b')
  places |= dict.fromkeys(here, places['a'])
  node = remote(here, places, listens_to=listens_to)
  wrong = {**listens_to, 'a': 'b'}  # b takes it that a listens to it.
  other = remote('b', places, listens_to=wrong).endpoints['b']
  exchanges.publish_and_wait(other, 0, exchanges.rollouts(policy='b'))
  assert node.refused == {'peer': 1}
  assert exchanges.fates(other.sent['a']) == {'published': 1, 'refused': 1}
  assert node.endpoints['a'].ledger.table() == {}


def test_undelivered_messages_are_part_of_the_state(remote):
  places = exchanges.addresses('ab')
  before = remote('a', places)
  publish_all(before.endpoints)
  state = before.endpoints['a'].state()
  before.close()
  sent = remote('a', places, state=state).endpoints['a'].sent['b']
  b = remote('b', places)
  exchanges.wait_until(lambda: not exchanges.waiting(sent))
  assert exchanges.fates(sent, 'b') == {'published': 1, 'acknowledged': 1}
  assert senders(b.endpoints['b']) == 'a'


def test_policies_may_move_between_states(remote):
  endpoints = local(exchanges.BOTH)
  publish_all({'a': endpoints['a']})
  moved = remote('b', exchanges.addresses('ab'), state=endpoints['b'].state())
  endpoints = local(ALL)
  endpoints['b'].restore(moved.endpoints['b'].state())
  publish_all({'c': endpoints['c']})
  assert senders(endpoints['b']) == 'ac'


def test_many_policies_of_other_processes_may_send_at_once(remote):
  places = dict.fromkeys('pqrs', exchanges.free_address())
  places['z'] = exchanges.free_address()
  listens_to = {**dict.fromkeys('pqrs', ''), 'z': 'pqrs'}
  limits = {'listens_to': listens_to, 'records': 1000, 'block_s': 30.0}
  z = remote('z', places, **limits).endpoints['z']
  others = remote('pqrs', places, **limits)

  def publish(name):
    for round in range(5):
      published = exchanges.rollouts(round, count=3, policy=name)
      others.endpoints[name].publish(round, published)

  with futures.ThreadPoolExecutor(4) as threads:
    list(threads.map(publish, 'pqrs'))
  others.close()  # Waits until all have arrived.
  table = z.ledger.table()
  assert [table[name]['rollout']['published'] for name in 'pqrs'] == [15] * 4
  assert len(z.collect(4, KINDS)) == 12


@pytest.mark.parametrize('order', ['ab', 'ba'])
def test_nodes_close_in_every_order_and_more_than_once(remote, order):
  places = exchanges.addresses('ab')
  nodes = {name: remote(name, places, block_s=1.0) for name in 'ab'}
  for node in nodes.values():
    publish_all(node.endpoints)
  began = time.monotonic()
  for name in order * 2:
    nodes[name].close()
  assert time.monotonic() - began < 20


def test_a_record_is_encoded_once_for_the_journal_and_all_peers(
  monkeypatch, tmp_path
):
  asked, sent, encode = [], [], wire.encode
  monkeypatch.setattr(wire, 'encode', lambda r: (asked.append(r), encode(r))[1])

  class Outlet(transport.Outlet):
    def send(self, round, published, encode=None):
      sent.append([*map(encode, published)])

  about = journal.About(
    policy='a', run='run', tokenizer='fingerprint', vocab_size=256, kinds=KINDS
  )
  endpoint = exchange.Endpoint(
    inbox.Inbox('a', {}, exchanges.limits()),
    {'b': Outlet(), 'c': Outlet()},
    journal.Writer(tmp_path, about, '{}'),
    KINDS,
  )
  published = [
    *exchanges.rollouts(),
    examples.outcome(),
    examples.stats([1.0]),
  ]
  endpoint.publish(0, published)
  assert [*map(id, asked)] == [*map(id, published)]
  expected = [*map(encode, published)]
  assert sent == [expected, expected]
  assert journal.Reader(tmp_path, 'a').read(0) == expected
  endpoint.publish(1, published[:1])  # Nothing is kept of a round that is sent.
  assert len(asked) == len(published) + 1
