from mrl_jax.see import in_process
from tests import exchanges


def test_policies_are_connected_with_those_that_listen_to_them():
  inboxes = {n: exchanges.inbox(n, peers) for n, peers in
             {'a': 'bz', 'b': '', 'c': 'ab'}.items()}  # fmt: skip
  transport = in_process.Transport(inboxes)
  assert {*transport.outlets} == {('a', 'c'), ('b', 'a'), ('b', 'c')}


def test_records_are_delivered_at_once_and_not_copied():
  inbox = exchanges.inbox()
  outlet = in_process.Outlet('a', inbox)
  (sent,) = exchanges.rollouts(3)
  outlet.send(3, [sent])
  assert inbox.finished['a'] == 3
  (received,) = inbox.collect(3, exchanges.KINDS)
  assert received is sent
  assert (outlet.ledger, outlet.state()) == (None, b'')
