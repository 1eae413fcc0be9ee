from concurrent import futures

import msgspec
import pytest

from mrl_jax.see import ledger as ledger_lib


@pytest.mark.parametrize(
  ('fates', 'settled'),
  [
    (ledger_lib.RECEIVED, ('used', 'stale', 'refused', 'duplicate', 'evicted')),
    (ledger_lib.SENT, ('acknowledged', 'refused', 'evicted')),
  ],
)
def test_records_without_a_fate_are_waiting(fates, settled):
  ledger = ledger_lib.Ledger(fates)
  ledger.add('b', 'rollout', 'published', 5, bytes=70)
  ledger.add('b', 'rollout', settled[0], 3)
  ledger.add('b', 'rollout', 'refused', reason='size')
  row = {'published': 5, 'bytes': 70, **dict.fromkeys(settled, 0)}
  row |= {settled[0]: 3, 'refused': 1, 'waiting': 1}
  assert ledger.table() == {'b': {'rollout': row}}


def test_refusals_are_counted_by_peer_and_reason():
  ledger = ledger_lib.Ledger()
  ledger.add('b', 'rollout', 'refused', 2, reason='size')
  ledger.add('b', 'outcome', 'refused', reason='size')
  ledger.add('a', 'rollout', 'refused', reason='logp')
  ledger.add('a', 'rollout', 'used')
  assert ledger.refusals() == {'a': {'logp': 1}, 'b': {'size': 3}}


def test_an_increase_is_reported_once():
  ledger = ledger_lib.Ledger()
  assert ledger.since_last() == {}
  ledger.add('a', 'rollout', 'published', 2, bytes=10)
  added = {'a': {'rollout': {'published': 2, 'bytes': 10}}}
  assert ledger.since_last() == added
  ledger.add('a', 'rollout', 'published')
  ledger.add('b', 'outcome', 'published')
  assert ledger.since_last() == {
    'a': {'rollout': {'published': 1}},
    'b': {'outcome': {'published': 1}},
  }
  assert ledger.since_last() == {}


def test_state_is_restored_from_json():
  ledger, again = ledger_lib.Ledger(), ledger_lib.Ledger()
  ledger.add('a', 'rollout', 'published', 2)
  ledger.since_last()
  ledger.add('a', 'rollout', 'refused', reason='size')
  ledger.seconds = 2.0
  ledger.waited['a'] += 1.5
  again.restore(msgspec.json.decode(msgspec.json.encode(ledger.state())))
  assert again.table() == ledger.table()
  assert again.refusals() == {'a': {'size': 1}}
  assert (again.seconds, again.waited) == (2.0, {'a': 1.5})
  assert again.since_last() == {'a': {'rollout': {'refused': 1}}}
  again.add('a', 'rollout', 'used')
  assert again.table()['a']['rollout']['waiting'] == 0


def test_many_threads_may_count():
  ledger = ledger_lib.Ledger()

  def count(_):
    for _ in range(500):
      ledger.add('a', 'rollout', 'published', reason='x', bytes=1)
      ledger.table()

  with futures.ThreadPoolExecutor(4) as threads:
    list(threads.map(count, range(4)))
  row = ledger.table()['a']['rollout']
  assert (row['published'], row['bytes']) == (2000, 2000)
  assert ledger.refusals() == {'a': {'x': 2000}}


def test_increases_are_summed_by_pair():
  first = {'a': {'rollout': {'published': 3, 'bytes': 9, 'used': 2}}}
  second = {'a': {'rollout': {'used': 1}, 'outcome': {'published': 1}}}
  pairs = ledger_lib.totals_by_pair([('b', first), ('c', first), ('b', second)])
  row = {'published': 3, 'bytes': 9, 'used': 2, 'waiting': 1}
  assert pairs == {
    'a->b': {
      'rollout': {**row, 'used': 3, 'waiting': 0},
      'outcome': {'published': 1, 'waiting': 1},
    },
    'a->c': {'rollout': row},
  }
  assert ledger_lib.fates(pairs['a->b']['rollout']) == {'used': 3}
  assert ledger_lib.fates(row) == {'used': 2, 'waiting': 1}
