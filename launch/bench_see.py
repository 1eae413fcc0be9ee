"""The benchmark of the Shared Experience Exchange; see `launch/bench.py`."""

import itertools
import multiprocessing
import socket
import tempfile
import time

from absl import flags
import bench_tools
import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import in_process
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import journal
from mrl_jax.see import rpc
from mrl_jax.see import security
from mrl_jax.see import wire

_ROUNDS = flags.DEFINE_integer('rounds', 20, 'see: number of rounds.', 1)
_ROLLOUTS = flags.DEFINE_integer('rollouts', 256, 'see: rollouts a round.', 1)
_RESPONSE = flags.DEFINE_integer('response', 512, 'see: tokens a rollout.', 1)
_BEST_OF = 3
_KINDS = ('rollout',)
_LIMITS = inbox_lib.Limits(
  records=2**20, bytes=2**32, max_staleness=0, block_s=60.0, wait_s=60.0
)


def run() -> bench_tools.Result:
  """Times the Shared Experience Exchange on each of its transports.

  Policy a publishes --rounds rounds of --rollouts rollouts with --response
  tokens each, and policy b collects them, round by round. The time includes
  checks, encoding, queues, disk or network, decoding and sorting; it is the
  best of 3.

  - 'in process': both policies take turns in one thread.
  - 'journal': a writes all rounds, and b then reads them.
  - 'gRPC': b is another process on this machine. It receives while a sends, and
    writes to disk what it acknowledges.

  Bytes are those of the encoded records.
  """
  rounds = [
    [_rollout(round, i) for i in range(_ROLLOUTS.value)]
    for round in range(_ROUNDS.value)
  ]
  count = _ROUNDS.value * _ROLLOUTS.value
  size = sum(len(wire.encode(r)) for r in itertools.chain(*rounds))
  ways = {'in process': _in_process, 'journal': _journal, 'gRPC': _grpc}
  rows = {}
  for name, exchange in ways.items():
    seconds = min(exchange(rounds) for _ in range(_BEST_OF))
    rows[name] = {
      'records/s': count / seconds,
      'MB/s': size / seconds / 1e6,
      'ms a round': 1e3 * seconds / len(rounds),
    }
  return bench_tools.Result({'records': count, 'bytes': size}, rows)


def _rollout(round, i) -> records.Rollout:
  payload = np.random.default_rng(i).bytes(_RESPONSE.value)
  ids = np.frombuffer(payload, np.uint8).astype(np.int32)
  header = {'round': round, 'prompt': f'p{i // 8}', 'sample': i % 8}
  return bench_tools.rollout(ids, np.ones_like(ids), payload, **header)


def _inbox() -> inbox_lib.Inbox:
  """The queue of policy b."""
  peer = inbox_lib.Peer(tokenizer='bytes', vocab_size=256, run='bench')
  return inbox_lib.Inbox('b', {'a': peer}, _LIMITS)


def _collect(inbox, counts) -> None:
  for round, count in enumerate(counts):
    assert len(inbox.collect(round, _KINDS)) == count


def _in_process(rounds) -> float:
  inbox = _inbox()
  outlet = in_process.Outlet('a', inbox)
  start = time.perf_counter()
  for round, group in enumerate(rounds):
    outlet.send(round, group)
    assert len(inbox.collect(round, _KINDS)) == len(group)
  return time.perf_counter() - start


def _journal(rounds) -> float:
  about = journal.About(
    policy='a', run='bench', tokenizer='bytes', vocab_size=256, kinds=_KINDS
  )
  with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    writer = journal.Writer(folder, about, '{}')
    for round, group in enumerate(rounds):
      writer.write(round, group)
    inbox, reader = _inbox(), journal.Reader(folder, 'a')
    journal.Transport({'b': inbox}, {'a': reader}, _KINDS)
    _collect(inbox, map(len, rounds))
    return time.perf_counter() - start


def _grpc(rounds) -> float:
  spawn = multiprocessing.get_context('spawn')
  ready, done = spawn.Event(), spawn.Event()
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = '{}:{}'.format(*probe.getsockname())
  receiver = spawn.Process(
    target=_receive,
    args=(address, [len(group) for group in rounds], ready, done),
  )
  receiver.start()
  network = security.Network(addresses={'b': address})
  outlet = rpc.Outlet('a', 'b', network, _LIMITS, 'bench')
  checks.require(ready.wait(60), 'the receiving process did not start')
  start = time.perf_counter()
  for round, group in enumerate(rounds):
    outlet.send(round, group)
  checks.require(done.wait(300), 'the receiving process did not get it all')
  seconds = time.perf_counter() - start
  outlet.close()
  receiver.join()
  return seconds


def _receive(address, counts, ready, done) -> None:
  """Collects as policy b; runs in a process of its own."""
  inbox = _inbox()
  network = security.Network(listen=address, addresses={'a': '127.0.0.1:1'})
  with tempfile.TemporaryDirectory() as folder:
    transport = rpc.Transport(
      {'b': inbox}, network, {'a': ()}, _LIMITS, 'bench', folder
    )
    transport.open()
    ready.set()
    _collect(inbox, counts)
    done.set()
    transport.close()
