"""Two policies, a and b, that exchange records in each of the ways there are.

Every way is a class with the same methods: a publishes, and b is an endpoint
whose process can start again. Run as a process of its own, this module is one
of the policies, and does what it reads from its standard input.
"""

import base64
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

from mrl_jax import records
from mrl_jax.see import inbox
from mrl_jax.see import journal
from mrl_jax.see import ledger
from mrl_jax.see import node
from mrl_jax.see import wire

KINDS = records.KINDS
PEER = inbox.Peer(tokenizer='fingerprint', vocab_size=1000, run='run')
POLICIES = {'a': PEER, 'b': PEER}
DEADLINE_S = 60.0  # Of what takes a moment, on a machine that is busy.
AGES_S = 3 * DEADLINE_S  # What no test has the time to wait for.


def limits(**changes) -> inbox.Limits:
  fields = {
    'records': 100,
    'bytes': 100_000,
    'max_staleness': 0,
    'block_s': 0.0,
    'wait_s': 0.0,
  }
  return inbox.Limits(**{**fields, **changes})


def free_address() -> str:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{s.getsockname()[1]}'


def wait_until(condition) -> None:
  deadline = time.monotonic() + DEADLINE_S
  while not condition():
    assert time.monotonic() < deadline, 'waited in vain'
    time.sleep(0.005)


def remote_node(
  here, there, folder, run_limits, state=b'', **network
) -> node.Node:
  """A node of one policy; `here` and `there` are (name, address)."""
  made = node.Node(
    POLICIES,
    run_limits,
    KINDS,
    run='run',
    network=node.Network(
      listen=here[1], addresses={there[0]: there[1]}, **network
    ),
    folder=os.fspath(folder / here[0]),
  )
  if state:
    made.endpoints[here[0]].restore(state)
  made.open()
  return made


def publish_and_wait(end, peer, round, published) -> None:
  """Publishes, and waits until the peer has it all."""
  end.publish(round, published)
  wait_until(lambda: not waiting(end.sent[peer]))


def waiting(book: ledger.Ledger) -> int:
  table = book.table()
  return sum(
    row['waiting'] for kinds in table.values() for row in kinds.values()
  )


def journal_about(**changes) -> journal.About:
  fields = {
    'policy': 'a',
    'run': 'run',
    'tokenizer': PEER.tokenizer,
    'vocab_size': PEER.vocab_size,
    'kinds': KINDS,
  }
  return journal.About(**{**fields, **changes})


class InProcess:
  """Both policies in one node."""

  def __init__(self, folder, **changes):
    del folder
    self._limits = limits(**changes)
    self.restart(b'')

  def restart(self, state):
    self._node = node.Node(POLICIES, self._limits, KINDS)
    self.b = self._node.endpoints['b']
    if state:
      self.b.restore(state)

  def publish(self, round, published):
    self._node.endpoints['a'].publish(round, published)

  def saved(self, rounds):
    self._node.saved(rounds)

  def sent(self):
    return None

  def close(self):
    self._node.close()


class Journal(InProcess):
  """a writes a journal, and b reads it while it grows."""

  def __init__(self, folder, **changes):
    self._folder = os.fspath(folder)
    self.publish = journal.Writer(self._folder, journal_about(), '{}').write
    super().__init__(folder, **changes)

  def restart(self, state):
    self._node = node.Node(
      POLICIES,
      self._limits,
      KINDS,
      stored={'a': journal.Reader(self._folder, 'a')},
    )
    self.b = self._node.endpoints['b']
    if state:
      self.b.restore(state)


class Grpc:
  """Two nodes that talk over the loopback interface."""

  def __init__(self, folder, **changes):
    self._folder, self._changes = folder, changes
    self._places = ('a', free_address()), ('b', free_address())
    self._b = None
    self.restart(b'')
    self._start_a()

  def _start_a(self):
    self._a = remote_node(*self._places, self._folder, limits(**self._changes))

  def restart(self, state):
    if self._b:
      self._b.close()
    self._b = remote_node(
      *reversed(self._places), self._folder, limits(**self._changes), state
    )
    self.b = self._b.endpoints['b']

  def publish(self, round, published):
    publish_and_wait(self._a.endpoints['a'], 'b', round, published)

  def saved(self, rounds):
    self._b.saved(rounds)

  def sent(self):
    return self._a.endpoints['a'].sent['b']

  def close(self):
    self._a.close()
    self._b.close()


class Processes(Grpc):
  """a is a process of its own, which can be killed and started again."""

  def _start_a(self):
    self._a = Child(*self._places, self._folder, self._changes)

  def publish(self, round, published):
    self._a.publish(round, published)

  def sent(self):
    book = ledger.Ledger(ledger.SENT)
    book.restore(self._a.ask('sent'))
    return book

  def kill(self):
    self._a.kill()

  def start(self):
    self._start_a()


class Receiving:
  """a is here; b is a process that can be killed and started again."""

  def __init__(self, folder, **changes):
    self._folder, self._changes = folder, changes
    self._places = ('a', free_address()), ('b', free_address())
    self._a = remote_node(*self._places, folder, limits(**changes))
    self.a = self._a.endpoints['a']
    self.restart(b'')

  def restart(self, state):
    self.b = Child(*reversed(self._places), self._folder, self._changes, state)

  def publish(self, round, published):
    publish_and_wait(self.a, 'b', round, published)

  def close(self):
    self._a.close()
    self.b.close()


_IDLE = []  # Processes; it takes a while to start one.


class Child:
  """A process with one policy, which can be killed."""

  def __init__(self, here, there, folder, changes, state=b''):
    self._process = _IDLE.pop() if _IDLE else self._start()
    self.ask(
      'open',
      here=here,
      there=there,
      folder=os.fspath(folder),
      changes=changes,
      state=base64.b64encode(state).decode(),
    )

  @staticmethod
  def _start():
    return subprocess.Popen(
      [sys.executable, '-m', 'tests.exchanges'],
      cwd=pathlib.Path(__file__).parents[1],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def ask(self, what, **arguments):
    self._answered = False
    self._process.stdin.write(json.dumps([what, arguments]) + '\n')
    self._process.stdin.flush()
    answer = json.loads(self._process.stdout.readline())
    self._answered = True
    return answer

  def publish(self, round, published):
    self.ask('publish', round=round, published=_to_text(published))

  def collect(self, round):
    return _from_text(self.ask('collect', round=round))

  def state(self):
    return base64.b64decode(self.ask('state'))

  def received(self):
    book = ledger.Ledger()
    book.restore(self.ask('received'))
    return book

  def kill(self):
    self._answered = False
    with self._process:
      self._process.kill()

  def close(self):
    if self._answered:
      self.ask('close')
      _IDLE.append(self._process)
    else:
      self.kill()


class Policy:
  """In the process of a `Child`; its methods are what one can ask."""

  def open(self, here, there, folder, changes, state):
    self._node = remote_node(
      here,
      there,
      pathlib.Path(folder),
      limits(**changes),
      base64.b64decode(state),
    )
    self._end, self._peer = self._node.endpoints[here[0]], there[0]

  def publish(self, round, published):
    publish_and_wait(self._end, self._peer, round, _from_text(published))

  def collect(self, round):
    return _to_text(self._end.collect(round, KINDS))

  def sent(self):
    return self._end.sent[self._peer].state()

  def received(self):
    return self._end.ledger.state()

  def state(self):
    return base64.b64encode(self._end.state()).decode()

  def saved(self, rounds):
    self._node.saved(rounds)

  def close(self):
    self._node.close()


def _to_text(published):
  return [
    base64.b64encode(wire.encode(record)).decode() for record in published
  ]


def _from_text(texts):
  return [wire.decode(base64.b64decode(text)) for text in texts]


def main():
  policy = Policy()
  for line in sys.stdin:
    what, arguments = json.loads(line)
    print(json.dumps(getattr(policy, what)(**arguments)), flush=True)


if __name__ == '__main__':
  main()
