"""Policies a and b that exchange records over every transport, for tests.

`InProcess`, `Journal` and `Grpc` connect them; all have the same methods. a
publishes, and b is an endpoint whose process can start again.
"""

import multiprocessing
import os
import signal
import socket
import time

from mrl_jax import records
from mrl_jax.see import exchange
from mrl_jax.see import in_process
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import journal
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.see import rpc
from mrl_jax.see import security
from tests import examples

KINDS = frozenset(records.KINDS)
PEER = inbox_lib.Peer(tokenizer='fingerprint', vocab_size=1000, run='run')
BOTH = {'a': 'b', 'b': 'a'}  # Whom each policy listens to.
DEADLINE_S = 60.0  # For what takes a moment, on a machine that is busy.
AGES_S = 3 * DEADLINE_S  # A wait that no test survives.


def limits(**changes) -> inbox_lib.Limits:
  fields = {
    'records': 100,
    'bytes': 100_000,
    'max_staleness': 0,
    'block_s': 0.0,
    'wait_s': 0.0,
  }
  return inbox_lib.Limits(**{**fields, **changes})


def inbox(policy='b', peers='a', **changes) -> inbox_lib.Inbox:
  return inbox_lib.Inbox(policy, dict.fromkeys(peers, PEER), limits(**changes))


def journal_about(**changes) -> journal.About:
  fields = {
    'policy': 'a',
    'kinds': records.KINDS,
    'run': PEER.run,
    'tokenizer': PEER.tokenizer,
    'vocab_size': PEER.vocab_size,
  }
  return journal.About(**{**fields, **changes})


def write_journal(folder, **about) -> journal.Writer:
  return journal.Writer(os.fspath(folder), journal_about(**about), '{}')


def read_journal(folder, policy='a') -> journal.Reader:
  return journal.Reader(os.fspath(folder), policy)


def free_address() -> str:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{s.getsockname()[1]}'


def addresses(policies) -> dict[str, str]:
  return {policy: free_address() for policy in policies}


def wait_until(condition) -> None:
  deadline = time.monotonic() + DEADLINE_S
  while not condition():
    assert time.monotonic() < deadline, 'waited in vain'
    time.sleep(0.002)


def local_node(
  listens_to, *, kinds=KINDS, journals=None, stored=None, **changes
) -> exchange.Node:
  """A node of policies that exchange in memory, and read journals."""
  inboxes = {n: inbox(n, peers, **changes) for n, peers in listens_to.items()}
  transports = [
    in_process.Transport(inboxes),
    journal.Transport(inboxes, stored or {}, kinds),
  ]
  return exchange.Node(inboxes, transports, kinds, journals)


def remote_node(
  here, places, folder, listens_to=BOTH, state=b'', **changes
) -> exchange.Node:
  """An open node of the policies `here`; all have an address in `places`."""
  inboxes = {n: inbox(n, listens_to[n], **changes) for n in here}
  network = security.Network(
    listen=places[here[0]],
    addresses={n: place for n, place in places.items() if n not in here},
  )
  transport = rpc.Transport(
    inboxes,
    network,
    listens_to,
    limits(**changes),
    'run',
    os.fspath(folder / here[0]),
  )
  node = exchange.Node(
    inboxes, [in_process.Transport(inboxes), transport], KINDS
  )
  if state:
    node.endpoints[here[0]].restore(state)
  node.open()
  return node


def publish_and_wait(endpoint, round, published) -> None:
  """Publishes, and waits until all has been acknowledged."""
  endpoint.publish(round, published)
  (ledger,) = endpoint.sent.values()
  wait_until(lambda: not waiting(ledger))


def waiting(ledger: ledger_lib.Ledger) -> int:
  return sum(
    row['waiting']
    for kinds in ledger.table().values()
    for row in kinds.values()
  )


def fates(ledger, peer='a', kind='rollout') -> dict[str, int]:
  """Counts that are not zero, but for the bytes."""
  row = ledger.table()[peer][kind]
  return {fate: n for fate, n in row.items() if n and fate != 'bytes'}


def rounds(received) -> list[int]:
  return [record.header.round for record in received]


def rollouts(round=0, count=1, **fields) -> list[records.Rollout]:
  return examples.group([1.0] * count, round=round, **fields)


class InProcess:
  """Both policies are in one node."""

  def __init__(self, folder, **changes):
    self._folder, self._changes = folder, changes
    self.restart()

  def restart(self, state=b''):
    self._open(local_node(BOTH, **self._changes), state)
    self.publish = self._node.endpoints['a'].publish

  def _open(self, node, state):
    self._node, self.b = node, node.endpoints['b']
    if state:
      self.b.restore(state)
    self.saved, self.close = node.saved, node.close

  def sent(self):
    return None


class Journal(InProcess):
  """a writes a journal, and b reads it while it grows."""

  def __init__(self, folder, **changes):
    self.publish = write_journal(folder).write
    super().__init__(folder, **changes)

  def restart(self, state=b''):
    stored = {'a': read_journal(self._folder)}
    self._open(local_node({'b': 'a'}, stored=stored, **self._changes), state)


class Grpc:
  """Each policy is in a node of its own, on the loopback interface."""

  def __init__(self, folder, **changes):
    self._options = {'folder': folder, **changes}
    self._places, self._b = addresses('ab'), None
    self.restart()
    self._a = remote_node('a', self._places, **self._options)

  def restart(self, state=b''):
    if self._b:
      self._b.close()
    self._b = remote_node('b', self._places, state=state, **self._options)
    self.b, self.saved = self._b.endpoints['b'], self._b.saved

  def publish(self, round, published):
    publish_and_wait(self._a.endpoints['a'], round, published)

  def sent(self):
    return self._a.endpoints['a'].sent['b']

  def close(self):
    self._a.close()
    self._b.close()


_FORK_SERVER = multiprocessing.get_context('forkserver')
_FORK_SERVER.set_forkserver_preload(['tests.exchanges'])


class Process:
  """A process that can be killed, and the end of a pipe to it."""

  def __init__(self, function, *arguments):
    """Calls the function with the other end of the pipe, and arguments."""
    self.pipe, pipe = _FORK_SERVER.Pipe()
    self._process = _FORK_SERVER.Process(
      target=function, args=(pipe, *arguments), daemon=True
    )
    self._process.start()
    pipe.close()

  def hang(self):
    os.kill(self._process.pid, signal.SIGSTOP)

  def resume(self):
    os.kill(self._process.pid, signal.SIGCONT)

  def kill(self):
    self._process.kill()
    self._process.join()
    self.pipe.close()


class Child:
  """A policy with a process of its own, which can be killed."""

  def __init__(self, *arguments, **options):
    """With the arguments of `remote_node`."""
    self._process = Process(_serve, arguments, options)
    self._pipe, self.kill = self._process.pipe, self._process.kill
    self._pipe.recv()

  def ask(self, method, *arguments):
    self._pipe.send((method, arguments))
    return self._pipe.recv()


def _serve(pipe, arguments, options):
  """Answers what `Child.ask` asks."""
  node = remote_node(*arguments, **options)
  (endpoint,) = node.endpoints.values()
  methods = {
    'publish': lambda *args: publish_and_wait(endpoint, *args),
    'collect': lambda round: endpoint.collect(round, KINDS),
    'fates': lambda: fates(endpoint.ledger),
    'state': endpoint.state,
    'saved': node.saved,
  }
  pipe.send('open')
  while True:
    method, args = pipe.recv()
    pipe.send(methods[method](*args))
