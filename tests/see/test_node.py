from concurrent import futures
import os
import time

import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import journal
from mrl_jax.see import node
from mrl_jax.sharing import xgrpo
from tests import examples
from tests import exchanges

KINDS = set(exchanges.KINDS)
THREE = dict.fromkeys('abc', exchanges.PEER)


STAR = {'a': (), 'b': ('a',), 'c': ('a',)}
RING = {'a': ('c',), 'b': ('a',), 'c': ('b',)}


def local(policies, kinds=KINDS, *, listens_to=None, journals=None, **limits):
  return node.Node(
    policies,
    exchanges.limits(**limits),
    kinds,
    listens_to=listens_to,
    journals=journals,
  ).endpoints


def senders(end, round=0):
  return [r.header.policy for r in end.collect(round, KINDS)]


def remote(here, addresses, folder, listens_to=None, **limits):
  """A node with those policies of `addresses` that are `here`."""
  there = {name: at for name, at in addresses.items() if name not in here}
  made = node.Node(
    dict.fromkeys(addresses, exchanges.PEER),
    exchanges.limits(**limits),
    KINDS,
    listens_to=listens_to,
    run='run',
    network=node.Network(listen=addresses[here[0]], addresses=there),
    folder=os.fspath(folder / here),
  )
  made.open()
  return made


def test_everybody_listens_to_everybody_else():
  ends = local(THREE)
  ends['a'].publish(0, examples.group([1.0, 0.0]))
  ends['b'].publish(0, examples.group([1.0], policy='b'))
  heard = {name: senders(end) for name, end in ends.items()}
  assert heard == {'a': ['b'], 'b': ['a', 'a'], 'c': ['a', 'a', 'b']}


@pytest.mark.parametrize('listens_to', [STAR, RING])
def test_a_policy_hears_and_waits_for_those_it_listens_to(listens_to):
  ends = local(THREE, listens_to=listens_to, wait_s=exchanges.AGES_S)
  for name in 'abc':
    ends[name].publish(0, examples.group([1.0], policy=name))
  began = time.monotonic()
  for name, end in ends.items():
    assert senders(end) == [*listens_to[name]]
    # Of nobody else there is anything in the books, not even what was dropped.
    assert {*end.ledger.table()} == {*listens_to[name]}
  assert time.monotonic() - began < exchanges.DEADLINE_S


def test_a_policy_that_listens_to_nobody_waits_for_nobody():
  ends = local(THREE, listens_to=STAR, wait_s=exchanges.AGES_S)
  began = time.monotonic()
  assert senders(ends['a']) == []
  ends['a'].publish(0, examples.group([1.0]))
  assert senders(ends['b']) == ['a']  # Not even c, which is silent.
  assert time.monotonic() - began < exchanges.DEADLINE_S


def test_one_whom_nobody_listens_to_writes_its_journal(tmp_path):
  folder = os.fspath(tmp_path)
  about = exchanges.journal_about(policy='b')
  writer = journal.Writer(folder, about, '{}')
  ends = local(THREE, listens_to=STAR, journals={'b': writer})
  ends['b'].publish(0, examples.group([1.0], policy='b'))
  assert senders(ends['a']) == senders(ends['c']) == []
  assert len(journal.Reader(folder, 'b').read(0)) == 1


def test_a_journal_is_read_only_by_those_who_listen_to_it(tmp_path):
  way = exchanges.Journal(tmp_path)
  way.publish(0, examples.group([1.0]))
  made = node.Node(
    THREE,
    exchanges.limits(),
    KINDS,
    listens_to={'b': ('a',), 'c': ()},
    stored={'a': journal.Reader(os.fspath(tmp_path), 'a')},
  )
  assert senders(made.endpoints['b']) == ['a']
  assert senders(made.endpoints['c']) == []
  assert made.endpoints['c'].ledger.table() == {}
  way.close()


def test_records_reach_only_those_of_other_processes_who_listen(tmp_path):
  addresses = {name: exchanges.free_address() for name in 'abc'}
  nodes = [
    remote(n, addresses, tmp_path, STAR, wait_s=exchanges.AGES_S) for n in 'abc'
  ]
  ends = {n: made.endpoints[n] for n, made in zip('abc', nodes, strict=True)}
  assert {n: {*end.sent} for n, end in ends.items()} == {
    'a': {'b', 'c'},
    'b': set(),
    'c': set(),
  }
  for name, end in ends.items():
    end.publish(0, examples.group([1.0], policy=name))
  assert {n: senders(end) for n, end in ends.items()} == {
    n: [*some] for n, some in STAR.items()
  }
  for made in nodes:
    made.close()
    assert not any(made.refused.values())


@pytest.mark.parametrize('listens_to', [{'a': (), 'b': ('a',)}, STAR])
def test_what_one_does_not_listen_to_is_refused_and_counted(
  tmp_path, listens_to
):
  addresses = {name: exchanges.free_address() for name in listens_to}
  here = ''.join(name for name in addresses if name != 'b')
  addresses |= dict.fromkeys(here, addresses['a'])
  made = remote(here, addresses, tmp_path, listens_to)
  # It thinks that a listens to it.
  wrong = {**listens_to, 'a': ('b',)}
  other = remote('b', addresses, tmp_path, wrong, block_s=30.0)
  other.endpoints['b'].publish(0, examples.group([1.0], policy='b'))
  other.close()  # Waits until there is an answer.
  assert made.refused == {'peer': 1}
  row = other.endpoints['b'].sent['a'].table()['a']['rollout']
  assert row['refused'] == row['published'] == 1
  assert made.endpoints['a'].ledger.table() == {}
  made.close()


@pytest.mark.parametrize('addresses', [{}, {'c': '127.0.0.1:1'}])
def test_without_kinds_nobody_is_connected(addresses):
  network = node.Network(addresses=addresses)
  limits = exchanges.limits(wait_s=exchanges.AGES_S)
  made = node.Node(THREE, limits, (), network=network)
  made.open()
  made.endpoints['a'].publish(0, examples.group([1.0]))
  assert made.endpoints['b'].collect(0, set()) == []
  assert made.endpoints['b'].ledger.table() == {}
  assert made.endpoints['a'].sent == {}
  made.close()


def test_only_kinds_that_are_shared_cross_but_a_journal_has_them_all(tmp_path):
  folder = os.fspath(tmp_path)
  writer = journal.Writer(folder, exchanges.journal_about(), '{}')
  ends = local(THREE, {'group_stats'}, journals={'a': writer})
  group = examples.group([1.0])
  ends['a'].publish(0, [*group, xgrpo.group_stats(group)])
  assert [*map(records.kind, ends['b'].collect(0, KINDS))] == ['group_stats']
  assert len(journal.Reader(folder, 'a').read(0)) == 2


def test_a_policy_that_finishes_says_so_in_its_journal(tmp_path):
  folder = os.fspath(tmp_path)
  writer = journal.Writer(folder, exchanges.journal_about(), '{}')
  end = local(THREE, journals={'a': writer})['a']
  reader = journal.Reader(folder, 'a')
  assert not reader.finished()
  end.finish()
  assert reader.finished()


def test_only_policies_of_this_process_have_endpoints(tmp_path):
  exchanges.Journal(tmp_path).close()
  limits = exchanges.limits()
  made = node.Node(
    dict.fromkeys('abcd', exchanges.PEER),
    limits,
    KINDS,
    network=node.Network(
      listen=exchanges.free_address(),
      addresses={'d': exchanges.free_address()},
    ),
    stored={'a': journal.Reader(os.fspath(tmp_path), 'a')},
    folder=os.fspath(tmp_path),
  )
  assert {*made.endpoints} == {'b', 'c'}
  assert {*made.endpoints['b'].sent} == {'d'}
  made.close()


def test_policies_elsewhere_need_an_address_to_find_those_here():
  network = node.Network(addresses={'b': '127.0.0.1:1'})
  with pytest.raises(checks.InputError, match=r'see\.listen is empty'):
    node.Node(exchanges.POLICIES, exchanges.limits(), KINDS, network=network)


def test_a_peer_that_cannot_be_reached_holds_nobody_up(tmp_path):
  places = ('a', exchanges.free_address()), ('b', exchanges.free_address())
  limits = exchanges.limits(records=2, block_s=exchanges.AGES_S)
  a = exchanges.remote_node(*places, tmp_path, limits)
  end = a.endpoints['a']
  end.publish(0, examples.group([1.0]))
  began = time.monotonic()
  # The first attempt takes what it takes; after it, nobody waits.
  for round in range(1, 5):
    end.publish(round, examples.group([1.0], round=round))
  assert time.monotonic() - began < exchanges.DEADLINE_S
  row = end.sent['b'].table()['b']['rollout']
  assert (row['evicted'], row['waiting']) == (3, 2)
  b = exchanges.remote_node(*reversed(places), tmp_path, limits)
  a.close()  # Waits until all is there.
  assert exchanges.waiting(b.endpoints['b'].ledger) == 2
  b.close()


def test_what_is_on_its_way_comes_back_with_the_state(tmp_path):
  places = ('a', exchanges.free_address()), ('b', exchanges.free_address())
  before = exchanges.remote_node(*places, tmp_path, exchanges.limits())
  before.endpoints['a'].publish(0, examples.group([1.0, 0.0]))
  state = before.endpoints['a'].state()
  before.close()
  a = exchanges.remote_node(*places, tmp_path, exchanges.limits(), state)
  b = exchanges.remote_node(*reversed(places), tmp_path, exchanges.limits())
  sent = a.endpoints['a'].sent['b']
  assert sent.table()['b']['rollout']['published'] == 2
  exchanges.wait_until(lambda: not exchanges.waiting(sent))
  assert len(b.endpoints['b'].collect(0, KINDS)) == 2
  a.close()
  b.close()


def test_policies_may_move_between_states(tmp_path):
  ends = local(exchanges.POLICIES)
  ends['a'].publish(0, examples.group([1.0]))
  state = ends['b'].state()
  moved = exchanges.remote_node(
    ('b', exchanges.free_address()),
    ('a', exchanges.free_address()),
    tmp_path,
    exchanges.limits(),
    state,
  )
  state = moved.endpoints['b'].state()
  moved.close()
  ends = local(THREE)
  ends['b'].restore(state)
  ends['c'].publish(0, examples.group([1.0], policy='c'))
  received = ends['b'].collect(0, KINDS)
  assert [r.header.policy for r in received] == ['a', 'c']


def test_many_policies_of_other_processes_may_send_at_once(tmp_path):
  addresses = {'p': exchanges.free_address()}
  addresses |= dict.fromkeys('qrs', addresses['p'])
  addresses['z'] = exchanges.free_address()
  z = remote('z', addresses, tmp_path, records=1000)
  others = remote('pqrs', addresses, tmp_path, records=1000, block_s=30.0)

  def publish(name):
    for round in range(5):
      others.endpoints[name].publish(
        round, examples.group([1.0] * 3, policy=name, round=round)
      )

  with futures.ThreadPoolExecutor(4) as threads:
    list(threads.map(publish, 'pqrs'))
  others.close()  # Waits until all is there.
  box = z.endpoints['z']
  table = box.ledger.table()
  assert [table[name]['rollout']['published'] for name in 'pqrs'] == [15] * 4
  assert len(box.collect(4, KINDS)) == 12
  z.close()


@pytest.mark.parametrize('order', ['ab', 'ba'])
def test_nodes_close_in_every_order_and_more_than_once(tmp_path, order):
  places = ('a', exchanges.free_address()), ('b', exchanges.free_address())
  limits = exchanges.limits(block_s=1.0)
  nodes = {
    'a': exchanges.remote_node(*places, tmp_path, limits),
    'b': exchanges.remote_node(*reversed(places), tmp_path, limits),
  }
  for name in 'ab':
    nodes[name].endpoints[name].publish(0, examples.group([1.0], policy=name))
  began = time.monotonic()
  for name in order * 2:
    nodes[name].close()
  assert time.monotonic() - began < 20


def test_a_node_that_never_opened_closes(tmp_path):
  made = node.Node(
    exchanges.POLICIES,
    exchanges.limits(),
    KINDS,
    network=node.Network(
      listen=exchanges.free_address(),
      addresses={'b': exchanges.free_address()},
    ),
    folder=os.fspath(tmp_path),
  )
  assert made.refused == {}
  made.close()
