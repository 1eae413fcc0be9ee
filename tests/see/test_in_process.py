from concurrent import futures

from mrl_jax.see import in_process
from mrl_jax.see import inbox
from tests import examples
from tests import exchanges

KINDS = set(exchanges.KINDS)


def test_records_reach_a_policy_at_once_and_nothing_is_on_its_way():
  box = inbox.Inbox('b', {'a': exchanges.PEER}, exchanges.limits())
  outlet = in_process.Outlet('a', box)
  outlet.send(0, examples.group([1.0, 0.0]))
  assert outlet.state() == b''
  assert outlet.ledger is None
  assert len(box.collect(0, KINDS)) == 2


def test_the_last_message_of_a_round_ends_it():
  box = inbox.Inbox('b', {'a': exchanges.PEER}, exchanges.limits())
  in_process.Outlet('a', box).send(3, [])
  assert box.heard('a') == 3


def test_records_are_not_copied():
  box = inbox.Inbox('b', {'a': exchanges.PEER}, exchanges.limits())
  sent = examples.group([1.0])
  in_process.Outlet('a', box).send(0, sent)
  assert box.collect(0, KINDS)[0] is sent[0]


def test_many_policies_may_send_at_once():
  names = [f'p{n}' for n in range(4)]
  box = inbox.Inbox(
    'z',
    dict.fromkeys(names, exchanges.PEER),
    exchanges.limits(records=20, max_staleness=20),
  )

  def send(name):
    outlet = in_process.Outlet(name, box)
    for round in range(20):
      outlet.send(round, examples.group([1.0] * 3, policy=name, round=round))

  with futures.ThreadPoolExecutor(4) as threads:
    list(threads.map(send, names))
  assert len(box.collect(19, KINDS)) == 20
  rows = [kinds['rollout'] for kinds in box.ledger.table().values()]
  assert sum(row['published'] for row in rows) == 4 * 20 * 3
  assert sum(row['used'] for row in rows) == 20
  assert exchanges.waiting(box.ledger) == 0
