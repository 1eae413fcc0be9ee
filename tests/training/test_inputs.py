import json
import os

import pytest

from mrl_jax import checks
from mrl_jax.training import inputs
from tests import examples
from tests import vocabularies


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  return os.fspath(tmp_path_factory.mktemp('cache'))


def jsonl(path, *texts):
  rows = [{'question': text, 'answer': 1} for text in texts]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return os.fspath(path)


def test_long_prompts_are_left_out_for_everyone_and_counted(tmp_path):
  texts = ['short', 'ééééééééé', examples.noise(500)]
  path = jsonl(tmp_path / 'a.jsonl', *texts)
  config = examples.run_config(
    **{
      'data.source': 'jsonl',
      'data.jsonl.train': path,
      'data.jsonl.heldout': path,
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


def test_a_long_prompt_that_is_held_out_is_left_out_too(tmp_path):
  config = examples.run_config(
    **{
      'data.source': 'jsonl',
      'data.jsonl.train': jsonl(tmp_path / 'train.jsonl', 'short'),
      'data.jsonl.heldout': jsonl(
        tmp_path / 'heldout.jsonl', 'short', examples.noise(500)
      ),
      'warm_start.steps': 0,
    }
  )
  loaded = inputs.load(config, os.fspath(tmp_path))
  assert [prompt.text for prompt in loaded.heldout] == ['short']
  assert loaded.skipped == 1
  jsonl(tmp_path / 'heldout.jsonl', examples.noise(500))
  with pytest.raises(checks.InputError, match='every prompt held out'):
    inputs.load(config, os.fspath(tmp_path))


def test_a_prompt_without_tokens_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(inputs.prompts_lib.Template, 'encode', lambda *args: [])
  with pytest.raises(checks.InputError, match='has no token for policy gemma'):
    inputs.load(examples.run_config(), os.fspath(tmp_path))


def test_other_prompts_are_other_inputs(tmp_path):
  path = tmp_path / 'a.jsonl'
  config = examples.run_config(
    **{
      'data.source': 'jsonl',
      'data.jsonl.train': jsonl(path, 'one'),
      'data.jsonl.heldout': os.fspath(path),
      'warm_start.steps': 0,
    }
  )
  digests = []
  for text in ('one', 'one', 'two'):
    jsonl(path, text)
    digests.append(inputs.load(config, os.fspath(tmp_path)).digest)
  assert digests[0] == digests[1] != digests[2]


def test_limits_are_what_is_allowed(cache):
  loaded = inputs.load(examples.run_config(), cache)
  prompts, solutions = 0, 0
  for name, tokenizer in loaded.tokenizers.items():
    for prompt in (*loaded.train, *loaded.heldout, *loaded.examples[name]):
      prompts = max(prompts, len(tokenizer.encode_prompt(f'{prompt.text}\n')))
    for prompt in loaded.examples[name]:
      for solution in (prompt.solution, prompt.solution.replace('=', ':')):
        ids = tokenizer.encode(solution.encode())
        solutions = max(solutions, len(ids) + 1)  # And the end.
  exact = {
    'sample.long_prompts': 'error',
    'sample.max_prompt_tokens': prompts,
    'sample.max_tokens': solutions,
  }
  inputs.load(examples.run_config(**exact), cache)
  for key in ('sample.max_prompt_tokens', 'sample.max_tokens'):
    with pytest.raises(checks.InputError, match=key):
      inputs.load(examples.run_config(**{**exact, key: exact[key] - 1}), cache)


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


def test_a_policy_may_read_its_prompts_in_its_own_chat_template(tmp_path):
  path = jsonl(tmp_path / 'a.jsonl', 'hi <|end|>')
  changes = {
    'data.source': 'jsonl',
    'data.jsonl.train': path,
    'data.jsonl.heldout': path,
    'warm_start.steps': 0,
    'sample.max_prompt_tokens': 128,
    'policies.llama.template': 'chat',
    'policies.llama.system': 'Be brief.',
    'policies.llama.thinking': 'off',
    'policies.gemma.template': '{prompt}! ',
  }
  loads = []
  for i, template in enumerate(
    (vocabularies.CHATML, vocabularies.CHATML + '!')
  ):
    folder = tmp_path / f'model{i}'
    vocabularies.chat_folder('byte_level', os.fspath(folder), template)
    about = {'model_type': 'llama', 'vocab_size': 400}
    (folder / 'config.json').write_text(json.dumps(about))
    config = examples.run_config(
      **changes, **{'policies.llama.path': os.fspath(folder)}
    )
    loads.append(inputs.load(config, os.fspath(tmp_path)))
  loaded, other = loads
  (prompt,) = loaded.train
  tokenizer, template = loaded.tokenizers['llama'], loaded.templates['llama']
  assert tokenizer.vocab_size == 400
  ids = template.encode(tokenizer, prompt)
  assert tokenizer.decode(ids) == (
    b'system\nBe brief.\nuser\nhi <|end|>\nassistant\n<think>\n\n</think>\n\n'
  )
  assert ids.tolist().count(tokenizer.eos_id) == 2
  assert 0 <= loaded.context['llama'] - len(ids) < 8
  gemma = loaded.tokenizers['gemma']
  ids = loaded.templates['gemma'].encode(gemma, prompt)
  assert gemma.decode(ids) == b'hi <|end|>! '
  # The same prompts and tokenizers in another template are other inputs.
  assert tokenizer.fingerprint == other.tokenizers['llama'].fingerprint
  assert loaded.digest != other.digest
