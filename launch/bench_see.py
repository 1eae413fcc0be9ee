"""The benchmark of the Shared Experience Exchange; see `launch/bench.py`."""

import multiprocessing
import os
import socket
import tempfile
import time

from absl import flags
import msgspec
import numpy as np
from rich import console as console_lib
from rich import table as table_lib

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import inbox
from mrl_jax.see import journal
from mrl_jax.see import node as node_lib
from mrl_jax.see import wire

_ROUNDS = flags.DEFINE_integer('rounds', 20, 'see: rounds.', 1)
_ROLLOUTS = flags.DEFINE_integer('rollouts', 256, 'see: a round.', 1)
_RESPONSE = flags.DEFINE_integer(
  'response', 512, 'see: tokens of a rollout.', 1
)
_BEST_OF = 3


def run(console: console_lib.Console) -> dict:
  """The Shared Experience Exchange, on each of its transports.

  Policy a publishes --rounds rounds of --rollouts rollouts with --response
  tokens each, and policy b collects them, round by round. Timed is the whole
  way: checks, encoding, queues, disk or network, decoding, sorting.

  - 'in process': both take turns in one thread.
  - 'journal': a writes all rounds, and b then reads them.
  - 'gRPC': b is another process on this machine. It receives while a sends, and
    keeps what it acknowledges on disk.

  Bytes are those of the encoded records.
  """
  group = [_rollout_of_noise(g) for g in range(_ROLLOUTS.value)]
  published = [
    [_of_round(rollout, round) for rollout in group]
    for round in range(_ROUNDS.value)
  ]
  count = _ROUNDS.value * _ROLLOUTS.value
  size = _ROUNDS.value * sum(len(wire.encode(r)) for r in group)
  table = table_lib.Table('', 'records/s', 'MB/s', 'ms a round')
  rates = {}
  for name, exchange in (
    ('in process', _in_process),
    ('journal', _journal),
    ('gRPC', _grpc),
  ):
    seconds = min(exchange(published) for _ in range(_BEST_OF))
    rates[name] = {
      'records_per_s': count / seconds,
      'mb_per_s': size / seconds / 1e6,
      'ms_a_round': 1e3 * seconds / _ROUNDS.value,
    }
    table.add_row(
      name,
      f'{rates[name]["records_per_s"]:,.0f}',
      f'{rates[name]["mb_per_s"]:,.0f}',
      f'{rates[name]["ms_a_round"]:.2f}',
    )
  console.out(f'{count:,} records, {size / 1e6:,.1f} MB, best of {_BEST_OF}')
  console.print(table)
  return {'records': count, 'bytes': size, 'rates': rates}


def _rollout_of_noise(sample) -> records.Rollout:
  count = _RESPONSE.value
  rng = np.random.default_rng(sample)
  ids = rng.integers(0, 256, count, np.int32)
  logp = -rng.random(count, np.float32)
  return records.Rollout(
    header=records.Header(
      run='bench', round=0, policy='a', prompt=f'p{sample // 8}',
      sample=sample % 8, version=0, created=0.0, tokenizer='bytes',
    ),
    payload=bytes(ids.astype(np.uint8)),
    finish='length',
    ids=ids,
    byte_lengths=np.ones(count, np.int32),
    sampling_logp=logp,
    policy_logp=logp,
    mask=np.ones(count, bool),
    temperature=1.0,
    reward=0.0,
    verdict='wrong',
  )  # fmt: skip


def _of_round(rollout, round) -> records.Rollout:
  header = msgspec.structs.replace(rollout.header, round=round)
  return msgspec.structs.replace(rollout, header=header)


def _node(**given) -> node_lib.Node:
  limits = inbox.Limits(
    records=2**20, bytes=2**32, max_staleness=0, block_s=60.0, wait_s=60.0
  )
  peer = inbox.Peer('bytes', 256, 'bench')
  return node_lib.Node(
    {'a': peer, 'b': peer}, limits, ('rollout',), run='bench', **given
  )


def _in_process(published) -> float:
  node = _node()
  start = time.perf_counter()
  for round, group in enumerate(published):
    node.endpoints['a'].publish(round, group)
    received = node.endpoints['b'].collect(round, ('rollout',))
    assert len(received) == len(group)
  return time.perf_counter() - start


def _journal(published) -> float:
  about = journal.About(
    policy='a', run='bench', tokenizer='bytes', vocab_size=256,
    kinds=('rollout',),
  )  # fmt: skip
  with tempfile.TemporaryDirectory() as folder:
    start = time.perf_counter()
    writer = journal.Writer(folder, about, '{}')
    for round, group in enumerate(published):
      writer.write(round, group)
    node = _node(stored={'a': journal.Reader(folder, 'a')})
    for round, group in enumerate(published):
      received = node.endpoints['b'].collect(round, ('rollout',))
      assert len(received) == len(group)
    return time.perf_counter() - start


def _grpc(published) -> float:
  spawn = multiprocessing.get_context('spawn')
  ready, done = spawn.Event(), spawn.Event()
  addresses = [_free_address(), _free_address()]
  counts = [len(group) for group in published]
  with tempfile.TemporaryDirectory() as folder:
    receiver = spawn.Process(
      target=_receive, args=(addresses, folder, counts, ready, done)
    )
    receiver.start()
    node = _remote_node('b', addresses, folder)
    checks.require(ready.wait(60), 'the other process did not start')
    start = time.perf_counter()
    for round, group in enumerate(published):
      node.endpoints['a'].publish(round, group)
    checks.require(done.wait(300), 'the other process did not receive it all')
    seconds = time.perf_counter() - start
    node.close()
    receiver.join()
  return seconds


def _receive(addresses, folder, counts, ready, done) -> None:
  """Policy b, in a process of its own."""
  node = _remote_node('a', addresses[::-1], folder)
  node.open()
  ready.set()
  for round, count in enumerate(counts):
    assert len(node.endpoints['b'].collect(round, ('rollout',))) == count
  done.set()
  node.close()


def _remote_node(peer, addresses, folder) -> node_lib.Node:
  """A node that listens on the first address; its peer has the second."""
  network = node_lib.Network(
    listen=addresses[0], addresses={peer: addresses[1]}
  )
  return _node(network=network, folder=os.path.join(folder, f'to_{peer}'))


def _free_address() -> str:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{probe.getsockname()[1]}'
