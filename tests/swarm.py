"""Many policies that exchange over gRPC while they are killed and return.

Every policy has a process of its own, which plays recorded rounds as a run
does: it publishes, collects, writes checkpoints, and resumes from the last one
after it was killed. To play 1,000 rounds:

  python -m tests.swarm --policies=64 --rounds=1000
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import socket
import sys
import tempfile
import time
from typing import NamedTuple

from absl import logging
import msgspec

from mrl_jax import records
from mrl_jax.see import ledger as ledger_lib
from tests import examples
from tests import exchanges

SAMPLES = 3
_TEMPLATE = [
  *exchanges.rollouts(count=SAMPLES, payload=b'x' * 2000),
  examples.stats([1.0] * SAMPLES),
]
_CHECKPOINT, _LOG = 'checkpoint', 'received'
_MOST_MIB = 40.0  # That a policy may grow; 1,000 rounds bring 100 MiB.
_TICK_S = 0.02  # Between two looks at the fleet.


class Plan(NamedTuple):
  """A fleet, and what happens to it."""

  folder: pathlib.Path
  policies: int = 64
  rounds: int = 30
  peers: int = 4  # That each policy listens to.
  checkpoint_every: int = 5
  life_s: float = 60.0  # Mean time until a policy is killed.
  awake_s: float = 60.0  # Mean time until its process stops for a moment.
  absence_s: float = 0.5  # Mean time until a dead policy returns.
  delay_s: float = 0.02  # Mean time between what a policy publishes.
  seed: int = 0
  deadline_s: float = 600.0
  # As in `inbox.Limits`. A policy that waits for its peers finds no record stale.
  wait_s: float = deadline_s
  max_staleness: int = 1

  @property
  def names(self) -> list[str]:
    return [f'p{i:03}' for i in range(self.policies)]

  @property
  def listens_to(self) -> dict[str, list[str]]:
    """A ring, so that all depend on all, and random peers."""
    rng, names, found = random.Random(self.seed), self.names, {}
    for i, name in enumerate(names):
      before = names[i - 1]
      others = [n for n in names if n not in (name, before)]
      found[name] = sorted([before, *rng.sample(others, self.peers - 1)])
    return found

  @property
  def limits(self) -> dict:
    return {
      'records': 4000,
      'bytes': 2**26,
      'max_staleness': self.max_staleness,
      'block_s': 1.0,
      'wait_s': self.wait_s,
      'rounds': self.rounds,
      'max_ahead': 16,
      'spool_bytes': 2**24,
    }


class Report(msgspec.Struct):
  """What a policy saw, once all have played all rounds."""

  received: collections.Counter  # (peer, round, sample) of all records.
  offered: dict  # `Ledger.table` of the inbox, by peer.
  sent: dict  # The same of what it sent, by receiver.
  mib: tuple[float, float]  # Memory when a life began, and at the end.
  files: int  # Files of received messages.


class Outcome(NamedTuple):
  deaths: int
  hangs: int
  seconds: float
  reports: dict[str, Report]


def play(plan: Plan) -> Outcome:
  """Plays all rounds; raises TimeoutError if policies do not finish."""
  rng, places = random.Random(plan.seed), _places(plan.names)
  began, deaths, hangs = time.monotonic(), 0, 0
  deadline = began + plan.deadline_s
  now, lives, returns, hanging, done = began, {}, {}, {}, set()
  for name in plan.names:
    lives[name] = exchanges.Process(_live, plan, name, places)
  try:
    while len(done) < plan.policies or returns or hanging:
      passed_s, now = time.monotonic() - now, time.monotonic()
      if now > deadline:
        late = sorted({*plan.names} - done)
        raise TimeoutError(f'after {plan.deadline_s} s not done: {late}')
      for name in [n for n, at in hanging.items() if at < now]:
        lives[name].resume()
        del hanging[name]
      for name in [n for n, at in returns.items() if at < now]:
        lives[name] = exchanges.Process(_live, plan, name, places)
        del returns[name]
      there = [n for n in lives if n not in returns and n not in hanging]
      for name in [n for n in there if lives[n].pipe.poll()]:
        assert lives[name].pipe.recv() == 'done'
        done.add(name)
      awake = [n for n in there if n not in done]
      if awake and rng.random() < len(awake) * passed_s / plan.life_s:
        name, deaths = rng.choice(awake), deaths + 1
        lives[name].kill()
        returns[name] = now + rng.expovariate(1 / plan.absence_s)
      elif awake and rng.random() < len(awake) * passed_s / plan.awake_s:
        name, hangs = rng.choice(awake), hangs + 1
        lives[name].hang()
        hanging[name] = now + rng.expovariate(1 / plan.absence_s)
      time.sleep(_TICK_S)
    reports = {}
    for order in ('drain', 'report'):
      for life in lives.values():
        life.pipe.send(order)
      reports = {name: life.pipe.recv() for name, life in lives.items()}
  finally:
    for life in lives.values():
      life.kill()
  return Outcome(deaths, hangs, time.monotonic() - began, reports)


def faults(plan: Plan, outcome: Outcome) -> list[str]:
  """What went wrong, in words: records lost or repeated, or what grew."""
  wrong = []
  for name, peers in plan.listens_to.items():
    report = outcome.reports[name]
    for peer in peers:
      sent = outcome.reports[peer].sent[name]
      counts = [n for key, n in report.received.items() if key[0] == peer]
      missing = plan.rounds * len(_TEMPLATE) - len(counts)
      if missing:
        wrong.append(f'{name} misses {missing} records of {peer}')
      if max(counts, default=1) > 1:
        wrong.append(f'{name} collected records of {peer} twice')
      for fate in ('waiting', 'evicted', 'refused'):
        if count := _total(sent, name, fate) + _total(
          report.offered, peer, fate
        ):
          wrong.append(f'{name}: of {peer}, {count} records are {fate}')
    first, last = report.mib
    most = plan.peers * (2 * plan.checkpoint_every + plan.max_staleness + 16)
    if last - first > _MOST_MIB or report.files > most:
      wrong.append(
        f'{name} grew from {first:.0f} to {last:.0f} MiB, and has '
        f'{report.files} files'
      )
  return wrong


def _places(names) -> dict[str, str]:
  """Free addresses, which no outgoing connection takes while a policy is dead."""
  ports = iter(random.sample(range(10_000, 32_000), 2000))
  places = {}
  for name in names:
    while name not in places:
      with contextlib.suppress(OSError), socket.socket() as s:
        address = '127.0.0.1', next(ports)
        s.bind(address)
        places[name] = '{}:{}'.format(*address)
  return places


def _total(table, peer, fate) -> int:
  return sum(row[fate] for row in table.get(peer, {}).values())


def _recorded(name, round) -> list[records.Record]:
  header = {'policy': name, 'round': round}
  return [
    msgspec.structs.replace(
      r, header=msgspec.structs.replace(r.header, **header)
    )
    for r in _TEMPLATE
  ]


def _live(pipe, plan, name, places):
  """A life of a policy, from its last checkpoint on."""
  logging.set_verbosity(logging.ERROR)  # Peers come and go.
  folder, rng = plan.folder / name, random.Random(f'{name} {os.getpid()}')
  folder.mkdir(exist_ok=True)
  start, length, state = 0, 0, b''
  if (folder / _CHECKPOINT).exists():
    start, length, state = msgspec.msgpack.decode(
      (folder / _CHECKPOINT).read_bytes()
    )
  with open(folder / _LOG, 'ab') as log:
    log.truncate(length)
    node = exchanges.remote_node(
      [name], places, folder, plan.listens_to, state=state, **plan.limits
    )
    endpoint, mib = node.endpoints[name], _mib()

    def collect(round):
      for r in endpoint.collect(round, exchanges.KINDS):
        h = r.header
        log.write(b'%s %d %d\n' % (h.policy.encode(), h.round, h.sample))

    for round in range(start, plan.rounds):
      time.sleep(rng.expovariate(1 / plan.delay_s))
      endpoint.publish(round, _recorded(name, round))
      collect(round)
      if (round + 1) % plan.checkpoint_every == 0:
        log.flush()
        saved = [round + 1, log.tell(), endpoint.state()]
        aside = folder / 'aside'
        aside.write_bytes(msgspec.msgpack.encode(saved))
        os.replace(aside, folder / _CHECKPOINT)
        node.saved(round + 1)
    pipe.send('done')
    assert pipe.recv() == 'drain'
    for ledger in endpoint.sent.values():
      exchanges.wait_until(lambda ledger=ledger: not exchanges.waiting(ledger))
    pipe.send('drained')
    assert pipe.recv() == 'report'
    collect(plan.rounds - 1)
  pipe.send(_report(folder, endpoint, mib))
  pipe.recv()


def _report(folder, endpoint, mib) -> Report:
  lines = (folder / _LOG).read_text(encoding='utf-8').splitlines()
  return Report(
    received=collections.Counter(tuple(line.split()) for line in lines),
    offered=endpoint.ledger.table(),
    sent={
      peer: ledger_lib.Ledger.table(ledger)
      for peer, ledger in endpoint.sent.items()
    },
    mib=(mib, _mib()),
    files=len(list(folder.glob('*/_received/*'))),
  )


def _mib() -> float:
  status = pathlib.Path('/proc/self/status').read_text(encoding='utf-8')
  return int(status.partition('VmRSS:')[2].split()[0]) / 2**10


def main(arguments):
  parser = argparse.ArgumentParser()
  for field, default in Plan._field_defaults.items():
    parser.add_argument(f'--{field}', type=type(default), default=default)
  options = vars(parser.parse_args(arguments))
  with tempfile.TemporaryDirectory() as folder:
    plan = Plan(pathlib.Path(folder), **options)
    outcome = play(plan)
    wrong = faults(plan, outcome)
  reports = outcome.reports.values()
  print(
    f'{plan.policies} policies, {plan.rounds} rounds, {outcome.seconds:.0f} s'
  )
  print(f'{outcome.deaths} deaths, {outcome.hangs} hangs')
  fates = collections.Counter()
  for report in reports:
    for kinds in report.offered.values():
      for row in kinds.values():
        fates.update(row)
  print(dict(fates))
  print(
    'MiB, first and last, of the largest:', max(r.mib[::-1] for r in reports)
  )
  print(
    'MiB that a policy grew, at most:',
    max(b - a for a, b in (r.mib for r in reports)),
  )
  print('files on disk, at most:', max(r.files for r in reports))
  print(*wrong, sep='\n')
  return bool(wrong)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
