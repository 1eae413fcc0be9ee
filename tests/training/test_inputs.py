import json
import os

import pytest

from mrl_jax.training import inputs
from tests import examples


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  return os.fspath(tmp_path_factory.mktemp('cache'))


def test_long_prompts_are_left_out_for_everyone_and_counted(tmp_path):
  path = tmp_path / 'a.jsonl'
  texts = ['short', 'ééééééééé', examples.noise(500)]
  rows = [{'question': text, 'answer': 1} for text in texts]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config = examples.run_config(
    **{
      'data.source': 'jsonl',
      'data.jsonl.train': os.fspath(path),
      'data.jsonl.heldout': os.fspath(path),
      'warm_start.steps': 0,
    }
  )
  loaded = inputs.load(config, os.fspath(tmp_path))
  assert [prompt.text for prompt in loaded.train] == texts[:2]
  assert sorted(prompt.text for prompt in loaded.heldout) == sorted(texts[:2])
  assert loaded.skipped == 1
  for context in loaded.context.values():
    assert context % 8 == 0
    assert 8 <= context <= 64


def test_the_default_data_fits_and_every_policy_has_its_own_examples(cache):
  loaded = inputs.load(examples.run_config(), cache)
  assert loaded.skipped == 0
  families = {
    name: {prompt.family for prompt in prompts}
    for name, prompts in loaded.examples.items()
  }
  assert len(families['llama'] & families['gemma']) == 6  # The formulas.
  assert len(families['llama'] - families['gemma']) == 3
  assert len(families['gemma'] - families['llama']) == 3
  train = {prompt.id for prompt in loaded.train}
  assert not train & {prompt.id for prompt in loaded.heldout}


def test_tokenizers_are_made_once_and_differ(cache):
  first, again = (inputs.load(examples.run_config(), cache) for _ in range(2))
  assert len(os.listdir(os.path.join(cache, 'tokenizers'))) == 2
  prints = {name: t.fingerprint for name, t in first.tokenizers.items()}
  assert len(set(prints.values())) == 2
  assert prints == {n: t.fingerprint for n, t in again.tokenizers.items()}
