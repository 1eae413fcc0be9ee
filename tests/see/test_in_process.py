import threading
import time

from absl import logging
import pytest

from mrl_jax.see import exchange
from mrl_jax.see import in_process
from mrl_jax.sharing import xgrpo
from tests import examples

KINDS = {'rollout', 'group_stats'}


def limits(**changes):
  fields = {
    'records': 100,
    'bytes': 10_000,
    'max_staleness': 0,
    'block_s': 0.0,
    'wait_s': 0.0,
  }
  return exchange.Limits(**{**fields, **changes})


def pair(**changes):
  return in_process.connect({'a': ['b'], 'b': ['a']}, limits(**changes))


def balances(endpoint, waiting=0):
  """The ledger's sums, against what is really waiting."""
  rows = [
    row for kinds in endpoint.ledger.table().values() for row in kinds.values()
  ]
  total = sum(row.pop('published') for row in rows)
  assert sum(sum(row.values()) for row in rows) == total
  assert sum(row['waiting'] for row in rows) == waiting
  return total


def fates(endpoint, sender='a', kind='rollout'):
  row = endpoint.ledger.table()[sender][kind]
  return {fate: n for fate, n in row.items() if n}


def test_records_reach_those_who_listen_and_nobody_else():
  ends = in_process.connect({'a': [], 'b': ['a'], 'c': ['a', 'b']}, limits())
  ends['a'].publish(0, examples.group([1.0, 0.0]))
  assert len(ends['b'].collect(0, KINDS)) == 2
  assert len(ends['c'].collect(0, KINDS)) == 2
  assert ends['a'].collect(0, KINDS) == []
  assert fates(ends['b']) == {'published': 2, 'used': 2}


def test_order_does_not_depend_on_arrival():
  ends = in_process.connect({'a': [], 'b': [], 'c': ['a', 'b']}, limits())
  group = examples.group([1.0, 0.0, 0.5], prompt='p1')
  ends['b'].publish(0, examples.group([1.0], policy='b'))
  ends['a'].publish(0, [group[2], group[0], xgrpo.group_stats(group), group[1]])
  ends['a'].publish(0, examples.group([1.0], prompt='p0'))
  keys = [
    (r.header.policy, r.header.prompt, r.header.sample)
    for r in ends['c'].collect(0, KINDS)
  ]
  assert keys == sorted(keys)
  assert len(keys) == 6


def test_older_records_come_first():
  ends = pair(max_staleness=1)
  for round in (1, 0):
    ends['a'].publish(round, examples.group([1.0], round=round))
  assert [r.header.round for r in ends['b'].collect(1, KINDS)] == [0, 1]


def test_only_the_kinds_asked_for_are_taken():
  ends = pair()
  group = examples.group([1.0])
  ends['a'].publish(0, [*group, xgrpo.group_stats(group)])
  assert ends['b'].collect(0, {'group_stats'}) == [xgrpo.group_stats(group)]
  assert len(ends['b'].collect(0, {'rollout'})) == 1


def test_duplicates_are_dropped_and_counted():
  ends = pair()
  for _ in range(2):  # Once while the first waits, once after it was used.
    ends['a'].publish(0, examples.group([1.0, 0.0]) * 2)
    ends['b'].collect(0, KINDS)
  assert fates(ends['b']) == {'published': 8, 'used': 2, 'duplicate': 6}
  assert balances(ends['b']) == 8


def test_what_is_too_old_is_dropped_and_what_is_early_stays():
  ends = pair(max_staleness=1)
  for round in range(4):
    ends['a'].publish(round, examples.group([1.0], round=round))
  rounds = [r.header.round for r in ends['b'].collect(2, KINDS)]
  assert rounds == [1, 2]
  assert fates(ends['b']) == {
    'published': 4,
    'used': 2,
    'stale': 1,
    'waiting': 1,
  }
  assert [r.header.round for r in ends['b'].collect(3, KINDS)] == [3]


def test_unsound_records_are_refused_and_the_rest_goes_on():
  ends = pair(bytes=150)
  ends['a'].publish(
    0,
    [
      examples.rollout(reward=float('nan')),
      examples.rollout(policy='c'),
      examples.rollout(b'x' * 200, sample=1),
      examples.rollout(sample=2),
    ],
  )
  assert [r.header.sample for r in ends['b'].collect(0, KINDS)] == [2]
  assert fates(ends['b']) == {'published': 4, 'refused': 3, 'used': 1}


def test_a_full_queue_lets_its_oldest_go():
  ends = pair(records=2, max_staleness=2)
  for round in (1, 0, 2):
    ends['a'].publish(round, examples.group([1.0], round=round))
  taken = ends['b'].collect(2, KINDS)
  assert [r.header.round for r in taken] == [1, 2]
  assert fates(ends['b']) == {'published': 3, 'evicted': 1, 'used': 2}
  balances(ends['b'])


def test_capacity_in_bytes():
  size = 5 * 16 + 4  # Five tokens of four 4-byte arrays, and the payload.
  for room in (1, 2):
    ends = pair(bytes=room * size)
    ends['a'].publish(0, examples.group([1.0, 0.0, 1.0]))
    assert fates(ends['b'])['evicted'] == 3 - room
    assert balances(ends['b'], waiting=room) == 3


def test_a_publisher_waits_for_room():
  ends = pair(records=1, block_s=30.0)
  ends['a'].publish(0, examples.group([1.0]))
  second = threading.Thread(
    target=ends['a'].publish, args=(1, examples.group([1.0], round=1))
  )
  second.start()
  time.sleep(0.05)
  assert second.is_alive()
  assert len(ends['b'].collect(0, KINDS)) == 1
  second.join(timeout=10)
  assert not second.is_alive()
  assert len(ends['b'].collect(1, KINDS)) == 1
  assert 'evicted' not in fates(ends['b'])


def test_a_collector_waits_for_a_late_peer():
  ends = pair(wait_s=30.0)
  late = threading.Timer(0.05, ends['a'].publish, (0, examples.group([1.0])))
  late.start()
  began = time.monotonic()
  assert len(ends['b'].collect(0, KINDS)) == 1
  assert time.monotonic() - began < 10


def test_a_peer_with_nothing_to_say_is_not_waited_for():
  ends = pair(wait_s=30.0)
  for round in (1, 0):  # What it says late does not take back the rest.
    ends['a'].publish(round, [])
  began = time.monotonic()
  assert ends['b'].collect(1, KINDS) == []
  assert time.monotonic() - began < 10


def test_a_silent_peer_is_named_and_used_again_when_it_returns(caplog):
  logging.use_absl_handler()
  ends = pair(wait_s=0.01)
  with caplog.at_level('WARNING', logger='absl'):
    assert ends['b'].collect(0, KINDS) == []
  assert 'b heard nothing from a' in caplog.text
  ends['a'].publish(1, examples.group([1.0], round=1))
  assert len(ends['b'].collect(1, KINDS)) == 1


def test_state_brings_back_queue_duplicates_and_ledger():
  ends = pair()
  ends['a'].publish(0, examples.group([1.0, 0.0]))
  ends['b'].collect(0, KINDS)
  ends['a'].publish(1, examples.group([1.0, 0.0], round=1))
  again = pair()
  again['b'].restore(ends['b'].state())
  assert again['b'].ledger.table() == ends['b'].ledger.table()
  assert again['b'].state() == ends['b'].state()
  again['a'].publish(1, examples.group([1.0], round=1))
  assert len(again['b'].collect(1, KINDS)) == 2
  assert fates(again['b'])['duplicate'] == 1


def test_a_queue_that_comes_back_is_as_full_as_it_was():
  ends, again = (pair(bytes=84) for _ in range(2))  # Room for one.
  ends['a'].publish(0, examples.group([1.0]))
  again['b'].restore(ends['b'].state())
  again['a'].publish(1, examples.group([1.0], round=1))
  assert fates(again['b']) == {'published': 2, 'evicted': 1, 'waiting': 1}


def test_memory_of_what_is_gone_does_not_grow():
  ends = pair()
  sizes = set()
  for round in range(10, 60):
    ends['a'].publish(round, examples.group([1.0] * 4, round=round))
    ends['b'].collect(round, KINDS)
    sizes.add(len(ends['b'].state()))
  assert max(sizes) - min(sizes) < 8


def test_many_publishers_at_once_balance():
  names = [f'p{i}' for i in range(4)]
  ends = in_process.connect(
    {'z': names, **{n: [] for n in names}}, limits(records=20)
  )

  def publish(name):
    for round in range(20):
      ends[name].publish(
        round, examples.group([1.0] * 3, policy=name, round=round)
      )

  threads = [threading.Thread(target=publish, args=(n,)) for n in names]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  taken = ends['z'].collect(19, KINDS)
  assert balances(ends['z']) == 4 * 20 * 3
  assert 0 < len(taken) <= 20


@pytest.mark.parametrize('kinds', [set(), {'rollout'}])
def test_nothing_is_lost_between_kinds(kinds):
  ends = pair()
  ends['a'].publish(0, [xgrpo.group_stats(examples.group([1.0]))])
  assert ends['b'].collect(0, kinds) == []
  assert balances(ends['b'], waiting=1) == 1
