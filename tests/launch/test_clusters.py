"""Two policies, each trained by a cluster of two processes, over TLS."""

import json
import os
import random
import signal
import socket
import subprocess

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
import trustme

from mrl_jax.training import stopping
from mrl_jax.update import checkpoint
from tests import exchanges
from tests import pretrained
from tests import runs
from tests.launch import test_tpu_pod

POLICIES = ('llama', 'gemma')
LOST_S = 8  # On a machine that is busy.
SIZES = {'d_model': 32, 'num_heads': 4, 'num_kv_heads': 4, 'head_dim': 8}
SMALL = {
  'train.prompts': 8,
  'train.samples': 4,
  'train.mini_batches': 1,
  'warm_start.steps': 60,
  'warm_start.batch': 16,
  'eval.prompts': 8,
  'eval.samples': 4,  # As in a round: one program samples for both.
  'eval.batch': 8,
  'checkpoint.every': 1,
  'reward.functions': ('exact', 'format'),
  'reward.weights': (1.0, 1.0),
  'method.entropy_weight': 0.1,  # It has a gradient in any case.
  **{
    f'policies.{name}.model.{key}': value
    for name in POLICIES
    for key, value in {'num_layers': 1, **SIZES}.items()
  },
}


class Fleet:
  """Two policies, and the clusters that train them."""

  def __init__(self, folder, method, **changes):
    self.folder = folder
    self._flags = {'train.rounds': 2, **SMALL, **changes, 'method.name': method}
    self._addresses = exchanges.addresses(POLICIES)
    self._coordinators = exchanges.addresses(POLICIES)
    self._started = []
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / 'ca.pem')
    for policy in POLICIES:  # A certificate names the policies it speaks for.
      issued = authority.issue_cert(policy)
      issued.private_key_pem.write_to_path(folder / f'{policy}.key')
      issued.cert_chain_pems[0].write_to_path(folder / f'{policy}.cert')

  def alone(self) -> runs.Run:
    """A run of both in this process."""
    return runs.run(self.folder / 'alone', runs.config(**self._flags))

  def start(self, policy, **changes) -> list[subprocess.Popen]:
    """Starts the processes of a policy's cluster."""
    (peer,) = {*POLICIES} - {policy}
    flags = {
      **self._flags,
      'cache_dir': runs.cache(),
      'mwra.emulated_devices': 2,
      'cluster.coordinator': self._coordinators[policy],
      'cluster.processes': 2,
      'cluster.lost_s': LOST_S,
      'see.listen': self._addresses[policy],
      'see.wait_s': 600,
      'see.block_s': 600,  # Also at the end, for a peer that is away.
      'see.tls.ca': self.folder / 'ca.pem',
      'see.tls.key': self.folder / f'{policy}.key',
      'see.tls.cert': self.folder / f'{policy}.cert',
      f'policies.{peer}.address': self._addresses[peer],
      **changes,
    }
    flags = [f'--config.{key}={value}' for key, value in flags.items()]
    with open(self.folder / f'{policy}.log', 'a') as log:
      started = [
        subprocess.Popen(
          test_tpu_pod.command(
            *flags,
            f'--config.cluster.process={i}',
            f'--workdir={self.folder / policy}',
          ),
          cwd=test_tpu_pod.ROOT,
          stdout=log,
          stderr=log,
        )
        for i in range(2)
      ]
    self._started += started
    return started

  def close(self) -> None:
    """Ends what a test that failed has left."""
    for process in self._started:
      process.kill()
      process.wait()

  def kill(self, policy, i, processes) -> None:
    """Kills a process; the other one ends, and names it."""
    processes[i].kill()
    assert processes[i].wait() == -signal.SIGKILL
    other = processes[1 - i].wait(timeout=3 * LOST_S)
    assert other == stopping.EXIT, self.log(policy)
    named = f'host {i} ({socket.gethostname()}) of the cluster is lost'
    assert named in self.log(policy)

  def stop(self, policy, i, processes) -> None:
    """Asks a process to stop; all save the same round, and can resume."""
    processes[i].send_signal(signal.SIGTERM)
    for process in processes:
      assert process.wait(timeout=30) == stopping.EXIT, self.log(policy)
    newest = checkpoint.newest(self.checkpoints(policy))
    assert f'The last checkpoint is of round {newest}' in self.log(policy)

  def log(self, policy) -> str:
    return (self.folder / f'{policy}.log').read_text()

  def summary(self, policy) -> dict:
    return json.loads((self.folder / policy / 'summary.json').read_text())

  def checkpoints(self, policy) -> str:
    return os.fspath(self.folder / policy / 'checkpoints')


def state(workdir, policy) -> list[np.ndarray]:
  """The state in a policy's last checkpoint, whatever its devices were."""
  newest = checkpoint.newest(f'{workdir}/checkpoints')
  path = f'{workdir}/checkpoints/round_{newest}/{policy}'
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    tree = checkpointer.metadata(path).item_metadata.tree
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    places = jax.tree.map(lambda _: as_numpy, tree)
    return jax.tree.leaves(checkpointer.restore(path, restore_args=places))


def leaves(tree, prefix=''):
  """Numbers, texts and lists of a nested dict, by path."""
  if not isinstance(tree, dict):
    return {prefix: tree}
  return {
    path: leaf
    for name, part in tree.items()
    for path, leaf in leaves(part, f'{prefix}/{name}').items()
  }


def assert_close(ours, theirs):
  ours, theirs = leaves(ours), leaves(theirs)
  assert ours.keys() == theirs.keys()
  for path, x in ours.items():
    if isinstance(x, float):
      assert theirs[path] == pytest.approx(x, rel=1e-3, abs=1e-4), path
    else:
      assert theirs[path] == x, path


@pytest.fixture
def imported(tmp_path):
  """A model in the format of Hugging Face, and flags that adapt it."""
  pretrained.write(tmp_path / 'model')
  return {'policies.llama.path': os.fspath(tmp_path / 'model')}


LORA = {
  'policies.llama.lora.rank': 2,
  'policies.llama.lora.target_modules': ('q_proj', 'down_proj'),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('method', 'changes', 'imports', 'event'),
  [
    ('xgrpo', {'mwra.tensor': 4, 'mwra.decode_tensor': 4}, False, 'kill'),
    ('prp', {'sample.refills': 1, **LORA}, True, 'stop'),
    ('sgt', {}, True, ''),
  ],
)
def test_clusters_train_as_one_process_does(
  request, tmp_path, imported, method, changes, imports, event
):
  if imports:
    changes = {**changes, **imported}
  if event:
    changes = {**changes, 'train.rounds': 6, 'eval.every': 6}
  fleet = Fleet(tmp_path, method, **changes)
  request.addfinalizer(fleet.close)
  started = {name: fleet.start(name) for name in POLICIES}
  alone = fleet.alone()
  if event:  # Its peer waits for it.
    saved = fleet.checkpoints('llama')
    test_tpu_pod.wait_until(lambda: checkpoint.newest(saved))
    getattr(fleet, event)('llama', random.randrange(2), started['llama'])
    assert 0 < checkpoint.newest(saved) < 6
    started['llama'] = fleet.start('llama')
  for name, processes in started.items():
    for process in processes:
      assert process.wait(timeout=300) == 0, fleet.log(name)
  for name in POLICIES:
    assert_same(fleet, name, alone, is_whole=not event)


def assert_same(fleet, name, alone, is_whole=True):
  workdir = fleet.folder / name
  one = json.loads(json.dumps(msgspec.to_builtins(alone.summary)))
  received = fleet.summary(name)['exchange']
  assert received
  for pair, kinds in received.items():
    for kind, counts in kinds.items():
      theirs = one['exchange'][pair][kind]
      assert counts['used'] == theirs['used'] > 0
      assert counts == theirs or not is_whole  # Some are sent again.
  mine, theirs = (runs.rows(w)[name] for w in (workdir, alone.workdir))
  for rows in zip(mine, theirs, strict=True):
    rows = [msgspec.to_builtins(row) for row in rows]
    if not is_whole:
      rows = [{**row, 'exchange': {}} for row in rows]
    assert_close(*rows)
  mine, theirs = (state(w, name) for w in (workdir, alone.workdir))
  for x, y in zip(mine, theirs, strict=True):
    np.testing.assert_allclose(x, y, atol=2e-4)
