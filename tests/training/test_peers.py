import contextlib
import os

import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import journal
from mrl_jax.sharing import xgrpo
from mrl_jax.training import peers
from tests import examples
from tests import exchanges

TOKENIZERS = {
  'llama': examples.tokenizer('byte_level'),
  'gemma': examples.tokenizer('sentencepiece'),
}
KINDS = frozenset({'group_stats'})


def check(**changes):
  return peers.check(examples.run_config(**changes), KINDS, TOKENIZERS)


def stored(folder, **changes):
  """A journal that can stand for gemma, but for the changes."""
  fields = {
    'policy': 'gemma',
    'run': 'run',
    'tokenizer': TOKENIZERS['gemma'].fingerprint,
    'vocab_size': TOKENIZERS['gemma'].vocab_size,
    'kinds': records.KINDS,
    **changes,
  }
  journal.Writer(os.fspath(folder), journal.About(**fields), '{}')
  return {'see.peers.gemma.journal': os.fspath(folder)}


def test_all_policies_are_here_unless_the_config_says_otherwise(tmp_path):
  assert {*check().here} == {'llama', 'gemma'}
  assert list(check(**stored(tmp_path)).here) == ['llama']
  away = {'see.peers.llama.address': '127.0.0.1:1', 'see.listen': '[::1]:2'}
  assert list(check(**away).here) == ['gemma']
  assert check(**away).network.addresses == {'llama': '127.0.0.1:1'}


@pytest.mark.parametrize(
  ('which', 'kinds'),
  [('published', KINDS), ('all', {*records.KINDS}), ('none', set())],
)
def test_a_journal_has_the_kinds_asked_for(which, kinds):
  assert check(**{'see.journal': which}).journaled == kinds


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'kinds': ('rollout',)}, 'has no group_stats, which this method needs'),
    ({'tokenizer': 'theirs'}, r'fingerprint theirs there, \w+ here'),
  ],
)
def test_a_journal_that_cannot_stand_for_a_policy(tmp_path, changes, message):
  with pytest.raises(checks.InputError, match=message):
    check(**stored(tmp_path, **changes))


def test_what_a_journal_says_reaches_the_others_and_is_written_down(tmp_path):
  changes = {**stored(tmp_path / 'theirs'), 'see.journal': 'all'}
  gemma, llama = TOKENIZERS['gemma'], TOKENIZERS['llama']
  theirs = xgrpo.group_stats(
    examples.group([1.0], policy='gemma', run='theirs', encoder=gemma)
  )
  about = journal.About(
    policy='gemma', run='theirs', tokenizer=gemma.fingerprint,
    vocab_size=gemma.vocab_size, kinds=records.KINDS,
  )  # fmt: skip
  writer = journal.Writer(os.fspath(tmp_path / 'theirs'), about, '{}')
  writer.write(0, [theirs])
  own = examples.group([1.0, 0.0], policy='llama', encoder=llama)
  with contextlib.closing(
    peers.connect(
      examples.run_config(**changes),
      KINDS,
      TOKENIZERS,
      check(**changes),
      run='mine',
      folder=os.fspath(tmp_path / 'mine'),
    )
  ) as node:
    assert list(node.endpoints) == ['llama']
    node.endpoints['llama'].publish(0, own)
    assert node.endpoints['llama'].collect(0, KINDS) == [theirs]
    node.endpoints['llama'].finish()
  mine = journal.Reader(os.fspath(tmp_path / 'mine'), 'llama')
  assert mine.finished()
  assert len(mine.read(0)) == len(own)
  assert mine.about.run == 'mine'
  assert mine.tokenizer() == llama.to_json()


@pytest.mark.parametrize(('listed', 'heard'), [((), 0), (('gemma',), 1)])
def test_the_config_says_who_listens(tmp_path, listed, heard):
  config = examples.run_config(**{'policies.llama.listens_to': listed})
  found = peers.check(config, KINDS, TOKENIZERS)
  node = peers.connect(
    config, KINDS, TOKENIZERS, found, run='run', folder=os.fspath(tmp_path)
  )
  theirs = examples.group([1.0], policy='gemma', encoder=TOKENIZERS['gemma'])
  node.endpoints['gemma'].publish(0, [xgrpo.group_stats(theirs)])
  assert len(node.endpoints['llama'].collect(0, KINDS)) == heard
  node.close()


def test_a_port_that_is_taken_is_told(tmp_path):
  changes = {
    'see.peers.gemma.address': exchanges.free_address(),
    'see.listen': exchanges.free_address(),
  }
  config, found = examples.run_config(**changes), check(**changes)

  def connect():
    return peers.connect(
      config, KINDS, TOKENIZERS, found, run='run', folder=os.fspath(tmp_path)
    )

  with (
    contextlib.closing(connect()),
    pytest.raises(checks.InputError, match='cannot be listened on'),
  ):
    connect()
