from concurrent import futures

import msgspec

from mrl_jax.see import ledger


def test_what_is_not_settled_is_waiting():
  book = ledger.Ledger()
  for fate in ('published',) * 3 + ('used', 'stale'):
    book.add('a', 'rollout', fate)
  row = book.table()['a']['rollout']
  assert row['published'] == 3
  assert row['waiting'] == 1
  assert (row['used'], row['stale'], row['evicted']) == (1, 1, 0)


def test_what_was_sent_has_fates_of_its_own():
  book = ledger.Ledger(ledger.SENT)
  book.add('b', 'rollout', 'published', 5, bytes=70)
  book.add('b', 'rollout', 'acknowledged', 3)
  book.add('b', 'rollout', 'refused', reason='size')
  assert book.table() == {
    'b': {
      'rollout': {
        'published': 5,
        'bytes': 70,
        'acknowledged': 3,
        'refused': 1,
        'evicted': 0,
        'waiting': 1,
      }
    }
  }


def test_refusals_are_counted_by_peer_and_reason():
  book = ledger.Ledger()
  book.add('b', 'rollout', 'refused', 2, reason='size')
  book.add('b', 'outcome', 'refused', reason='size')
  book.add('a', 'rollout', 'refused', reason='logp')
  book.add('a', 'rollout', 'used')
  assert book.refusals() == {'a': {'logp': 1}, 'b': {'size': 3}}


def test_what_was_added_is_told_once():
  book = ledger.Ledger()
  assert book.since_last() == {}
  book.add('a', 'rollout', 'published', 2, bytes=10)
  assert book.since_last() == {'a': {'rollout': {'published': 2, 'bytes': 10}}}
  book.add('a', 'rollout', 'published')
  book.add('b', 'outcome', 'published')
  assert book.since_last() == {
    'a': {'rollout': {'published': 1}},
    'b': {'outcome': {'published': 1}},
  }
  assert book.since_last() == {}


def test_seconds_are_told_by_peer():
  book = ledger.Ledger()
  book.seconds = 3.0
  book.waited['a'] += 2.0
  before = book.timing()
  assert before == {'exchange': 3.0, 'waited/a': 2.0}
  book.seconds += 1.0
  assert book.timing() - before == {'exchange': 1.0}


def test_state_comes_back():
  book, again = ledger.Ledger(), ledger.Ledger()
  book.add('a', 'rollout', 'published', 2)
  book.since_last()
  book.add('a', 'rollout', 'refused', reason='size')
  book.seconds = 2.0
  book.waited['a'] += 1.5
  again.restore(msgspec.json.decode(msgspec.json.encode(book.state())))
  assert again.table() == book.table()
  assert again.refusals() == {'a': {'size': 1}}
  assert again.timing() == book.timing()
  assert again.since_last() == {'a': {'rollout': {'refused': 1}}}
  again.add('a', 'rollout', 'used')
  assert again.table()['a']['rollout']['waiting'] == 0


def test_many_threads_may_count():
  book = ledger.Ledger()

  def count(_):
    for _ in range(500):
      book.add('a', 'rollout', 'published', reason='x', bytes=1)
      book.table()

  with futures.ThreadPoolExecutor(4) as threads:
    list(threads.map(count, range(4)))
  row = book.table()['a']['rollout']
  assert (row['published'], row['bytes']) == (2000, 2000)
  assert book.refusals() == {'a': {'x': 2000}}
