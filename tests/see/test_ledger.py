from mrl_jax.see import ledger


def test_what_is_not_settled_is_waiting():
  book = ledger.Ledger()
  for fate in ('published',) * 3 + ('used', 'stale'):
    book.add('a', 'rollout', fate)
  row = book.table()['a']['rollout']
  assert row['published'] == 3
  assert row['waiting'] == 1
  assert (row['used'], row['stale'], row['evicted']) == (1, 1, 0)


def test_state_comes_back():
  book, again = ledger.Ledger(), ledger.Ledger()
  book.add('a', 'rollout', 'published')
  again.restore(book.state())
  again.add('a', 'rollout', 'used')
  assert again.table()['a']['rollout']['waiting'] == 0
