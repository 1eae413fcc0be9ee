import contextlib
import os
import pathlib
import subprocess
import sys

import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import journal
from mrl_jax.sharing import publish
from mrl_jax.training import peers
from tests import examples
from tests import exchanges

TOKENIZERS = {
  'llama': examples.tokenizer('byte_level'),
  'gemma': examples.tokenizer('sentencepiece'),
}
KINDS = frozenset({'group_stats'})


def check(**changes):
  return peers.Peers(examples.run_config(**changes), KINDS, TOKENIZERS)


@pytest.fixture
def connect(stack, tmp_path):
  """Connects the policies of a config; closes when the test ends."""

  def connect(kinds=KINDS, **changes):
    config = examples.run_config(**changes)
    places = peers.Peers(config, kinds, TOKENIZERS)
    node = places.connect(
      'mine', os.fspath(tmp_path / 'mine'), os.fspath(tmp_path / 'received')
    )
    stack.callback(node.close)
    return node

  return connect


@pytest.fixture
def stack():
  with contextlib.ExitStack() as opened:
    yield opened


def elsewhere():
  return {
    'policies.gemma.address': exchanges.free_address(),
    'see.listen': exchanges.free_address(),
  }


def write_journal(folder, **changes):
  """A journal that can replace gemma, but for the changes."""
  gemma = TOKENIZERS['gemma']
  about = exchanges.journal_about(
    **{
      'policy': 'gemma',
      'run': 'theirs',
      'tokenizer': gemma.fingerprint,
      'vocab_size': gemma.vocab_size,
      **changes,
    }
  )
  return journal.Writer(os.fspath(folder), about, '{}')


def stats(policy, rewards=(1.0,) * 4, **fields):
  group = examples.group(
    rewards, policy=policy, encoder=TOKENIZERS[policy], **fields
  )
  return publish.group_stats(group)


@pytest.mark.parametrize(
  'module', ['training.peers', 'see.exchange', 'see.security']
)
def test_grpc_is_not_imported_unless_a_policy_is_elsewhere(module):
  code = f'import mrl_jax.{module}, sys; sys.exit("grpc" in sys.modules)'
  root = pathlib.Path(__file__).parents[2]
  subprocess.run([sys.executable, '-c', code], cwd=root, check=True)


def test_all_policies_are_here_unless_the_config_says_otherwise(tmp_path):
  assert {*check().here} == {'llama', 'gemma'}
  write_journal(tmp_path)
  stored = {'policies.gemma.journal': os.fspath(tmp_path)}
  assert list(check(**stored).here) == ['llama']
  away = {'policies.llama.address': '127.0.0.1:1', 'see.listen': '[::1]:2'}
  assert list(check(**away).here) == ['gemma']
  assert check(**away).network.addresses == {'llama': '127.0.0.1:1'}


def test_an_address_that_cannot_be_used_is_reported():
  with pytest.raises(checks.InputError, match=r'see\.listen is empty'):
    check(**{'policies.gemma.address': '127.0.0.1:1'})


@pytest.mark.parametrize(
  ('which', 'kinds'),
  [('published', KINDS), ('all', {*records.KINDS}), ('none', set())],
)
def test_a_journal_has_the_requested_kinds(which, kinds):
  assert check(**{'see.journal': which}).journaled == kinds


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'kinds': ('rollout',)}, 'has no group_stats, which this method needs'),
    ({'tokenizer': 'theirs'}, r'fingerprint theirs there, \w+ here'),
  ],
)
def test_a_journal_that_cannot_replace_a_policy(tmp_path, changes, message):
  write_journal(tmp_path, **changes)
  with pytest.raises(checks.InputError, match=message):
    check(**{'policies.gemma.journal': os.fspath(tmp_path)})


def test_a_journal_replaces_a_policy_and_another_is_written(connect, tmp_path):
  theirs = stats('gemma', run='theirs')
  write_journal(tmp_path / 'theirs').write(0, [theirs])
  node = connect(
    **{
      'policies.gemma.journal': os.fspath(tmp_path / 'theirs'),
      'see.journal': 'all',
    }
  )
  assert list(node.endpoints) == ['llama']
  llama, tokenizer = node.endpoints['llama'], TOKENIZERS['llama']
  own = examples.group([1.0, 0.0], policy='llama', encoder=tokenizer)
  llama.publish(0, own)
  assert llama.collect(0, KINDS) == [theirs]
  llama.finish()
  mine = exchanges.read_journal(tmp_path / 'mine', 'llama')
  assert mine.finished()
  assert len(mine.read(0)) == len(own)
  assert mine.about.run == 'mine'
  assert mine.tokenizer() == tokenizer.to_json()


@pytest.mark.parametrize(('listed', 'received'), [((), 0), (('gemma',), 1)])
def test_the_config_says_who_listens(connect, listed, received):
  node = connect(**{'policies.llama.listens_to': listed})
  node.endpoints['gemma'].publish(0, [stats('gemma', run='mine')])
  assert len(node.endpoints['llama'].collect(0, KINDS)) == received


def test_of_many_peers_one_sends_the_group_of_a_prompt(stack, tmp_path):
  config = examples.run_config(
    **{'method.name': 'prp', 'method.max_peer_groups': 1, 'train.samples': 1}
  )
  config.policies.qwen = config.policies.gemma.copy_and_resolve_references()
  tokenizers = {**TOKENIZERS, 'qwen': TOKENIZERS['gemma']}
  kinds = frozenset({'rollout', 'group_stats'})
  places = peers.Peers(config, kinds, tokenizers)
  node = places.connect('run', os.fspath(tmp_path), os.fspath(tmp_path))
  stack.callback(node.close)
  for name, endpoint in node.endpoints.items():
    groups = [
      examples.group(
        [1.0], policy=name, prompt=f'p{p}', encoder=tokenizers[name]
      )
      for p in range(config.train.prompts)
    ]
    endpoint.publish(0, publish.publish(groups, kinds, texts=0, verifier=''))
  for endpoint in node.endpoints.values():
    received = endpoint.collect(0, kinds)
    prompts = sorted(
      r.header.prompt for r in received if isinstance(r, records.Rollout)
    )
    assert prompts == sorted(f'p{p}' for p in range(config.train.prompts))
    assert len(received) == 3 * len(prompts)


@pytest.mark.parametrize(
  ('rewards', 'weights', 'reason'),
  [
    ([0.0, 1.0, 1.1, 0.1], (1.0, 0.1), None),
    ([0.0, 1.0, 1.1, 0.1], (1.0, 0.0), 'moments'),
    ([1.5] * 4, (1.0, 0.1), 'reward'),
    ([-0.5] * 4, (1.0, -0.5), None),
    ([1.0] * 3, (1.0, 0.1), 'samples'),
  ],
)
def test_peers_are_held_to_the_samples_and_rewards_of_the_config(
  connect, rewards, weights, reason
):
  node = connect(
    **{'reward.functions': ('exact', 'format'), 'reward.weights': weights}
  )
  node.endpoints['gemma'].publish(0, [stats('gemma', rewards, run='mine')])
  llama = node.endpoints['llama']
  assert len(llama.collect(0, KINDS)) == (reason is None)
  assert [*llama.ledger.refusals().get('gemma', {})] == [reason][: bool(reason)]


@pytest.mark.parametrize(('samples', 'received'), [(0, 2), (2, 1)])
def test_a_journal_is_held_to_the_samples_of_its_own_run(
  connect, tmp_path, samples, received
):
  theirs = [
    stats('gemma', [1.0] * n, run='theirs', prompt=f'p{n}') for n in (2, 3)
  ]
  write_journal(tmp_path, samples=samples).write(0, theirs)
  node = connect(**{'policies.gemma.journal': os.fspath(tmp_path)})
  assert len(node.endpoints['llama'].collect(0, KINDS)) == received


def test_a_peer_publishes_no_more_than_a_round(connect):
  node = connect()
  flood = [stats('gemma', run='mine', prompt=f'p{n}') for n in range(100)]
  node.endpoints['gemma'].publish(0, flood)
  llama = node.endpoints['llama']
  assert len(llama.collect(0, KINDS)) == 8 * (4 + 2)
  assert llama.ledger.refusals() == {'gemma': {'quota': 52}}


@pytest.mark.parametrize(('kinds', 'sent'), [(KINDS, {'gemma'}), ((), set())])
def test_without_kinds_nobody_elsewhere_is_connected(connect, kinds, sent):
  node = connect(kinds, **elsewhere(), **{'see.block_s': 0.0})
  node.open()
  llama = node.endpoints['llama']
  llama.publish(0, [stats('llama', run='mine')])
  assert {*llama.sent} == sent
  assert llama.collect(0, ()) == []
  assert node.refused == {}


def test_a_port_of_another_process_is_reported(connect):
  changes = elsewhere()
  connect(**changes)
  with pytest.raises(checks.InputError, match='cannot be listened on'):
    connect(**changes)
