import json
import os

import pytest

from mrl_jax import checks
from mrl_jax.rewards import verify
from mrl_jax.training import inputs
from tests import examples
from tests import runs
from tests import vocabularies


def load(**changes):
  config = runs.config(**changes)
  return inputs.load(config, config.cache_dir)


def jsonl(path, *texts):
  rows = [{'question': text, 'answer': 1} for text in texts]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return os.fspath(path)


@pytest.fixture
def questions(tmp_path):
  """Writes prompts; returns the keys of a job that reads them."""

  def write(*train, heldout=None):
    return {
      'cache_dir': os.fspath(tmp_path),
      'data.source': 'jsonl',
      'data.jsonl.train': jsonl(tmp_path / 'train.jsonl', *train),
      'data.jsonl.heldout': jsonl(tmp_path / 'new.jsonl', *(heldout or train)),
      'warm_start.steps': 0,
    }

  return write


def test_long_prompts_are_left_out_for_all_policies_and_counted(questions):
  long = examples.noise(500)
  texts = ['short', 'ééééééééé']
  loaded = load(**questions(*texts, long, heldout=['short', long]))
  assert [prompt.text for prompt in loaded.train] == texts
  assert [prompt.text for prompt in loaded.heldout] == ['short']
  assert loaded.skipped == 2
  for policy in loaded.policies.values():
    assert policy.context % 8 == 0
    assert 8 <= policy.context <= 64
  with pytest.raises(checks.InputError, match='every prompt held out'):
    load(**questions('short', heldout=[long]))


def test_a_prompt_without_tokens_is_refused(questions, monkeypatch):
  monkeypatch.setattr(inputs.prompts_lib.Template, 'encode', lambda *_: [])
  with pytest.raises(checks.InputError, match='has no token for policy gemma'):
    load(**questions('short'))


def test_the_digest_depends_on_the_prompts(questions):
  first, same, other = (
    load(**questions(text)).digest for text in ('one', 'one', 'two')
  )
  assert first == same != other


@pytest.fixture(scope='module')
def loaded():
  return load()


def test_lengths_up_to_the_limits_are_accepted(loaded):
  prompts, solutions = 0, 0
  for tokenizer, *_, own, _ in loaded.policies.values():
    for prompt in (*loaded.train, *loaded.heldout, *own):
      prompts = max(prompts, len(tokenizer.encode_prompt(f'{prompt.text}\n')))
    for prompt in own:
      for solution in (prompt.solution, prompt.solution.replace('=', ':')):
        ids = tokenizer.encode(solution.encode())
        solutions = max(solutions, len(ids) + 1)  # With end-of-sequence.
  longest = {
    'sample.long_prompts': 'error',
    'sample.max_prompt_tokens': prompts,
    'sample.max_tokens': solutions,
  }
  load(**longest)
  for key in ('sample.max_prompt_tokens', 'sample.max_tokens'):
    with pytest.raises(checks.InputError, match=key):
      load(**{**longest, key: longest[key] - 1})


def test_every_policy_has_its_own_examples(loaded):
  assert loaded.skipped == 0
  families = {
    name: {prompt.family for prompt in policy.examples}
    for name, policy in loaded.policies.items()
  }
  assert len(families['llama'] & families['gemma']) == 6  # The formulas.
  assert len(families['llama'] - families['gemma']) == 3
  assert len(families['gemma'] - families['llama']) == 3
  train = {prompt.id for prompt in loaded.train}
  assert not train & {prompt.id for prompt in loaded.heldout}


def test_tokenizers_differ_and_are_trained_once(loaded, monkeypatch):
  monkeypatch.setattr(inputs.vocabulary, 'KINDS', {})  # Nothing to train with.
  first, again = (
    {name: p.tokenizer.fingerprint for name, p in x.policies.items()}
    for x in (loaded, load())
  )
  assert first == again
  assert len({*first.values()}) == 2


@pytest.mark.slow
def test_the_whole_default_data_fits(tmp_path):
  assert load(cache_dir=os.fspath(tmp_path)).skipped == 0


def test_a_policy_may_read_prompts_in_its_own_chat_template(
  questions, tmp_path
):
  changes = {
    **questions('hi <|end|>'),
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
    loads.append(load(**{**changes, 'policies.llama.path': os.fspath(folder)}))
  loaded, other = loads
  (prompt,) = loaded.train
  llama, gemma = loaded.policies['llama'], loaded.policies['gemma']
  tokenizer, ids = llama.tokenizer, llama.prompt_ids(prompt)
  assert tokenizer.vocab_size == 400  # With rows that no token has.
  assert tokenizer.decode(ids) == (
    b'system\nBe brief.\nuser\nhi <|end|>\nassistant\n<think>\n\n</think>\n\n'
  )
  # Those of the template are control tokens, and that of the prompt is text.
  assert ids.tolist().count(tokenizer.eos_id) == 2
  assert 0 <= llama.context - len(ids) < 8
  assert gemma.tokenizer.decode(gemma.prompt_ids(prompt)) == b'hi <|end|>! '
  # The same prompts and tokenizers in another template are other inputs.
  assert tokenizer.fingerprint == other.policies['llama'].tokenizer.fingerprint
  assert loaded.digest != other.digest


def answers(path, *answers):
  rows = [{'question': 'What?', 'answer': answer} for answer in answers]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return os.fspath(path)


def test_sets_whose_gold_answers_could_never_be_rewarded_are_refused(
  questions, tmp_path
):
  prose = (
    'She has sixteen eggs, eats three and sells the others for two dollars'
  )
  changes = questions('short')
  verifier = verify.Exact('####')

  def check(most, train, heldout):
    for name, golds in (('train', train), ('new', heldout)):
      answers(tmp_path / f'{name}.jsonl', *golds)
    return inputs.check_answers(load(**changes), verifier, most).faulty

  assert check(0.01, ['#### 1'] * 99 + [prose], ['1']) == 1
  assert check(1.0, [prose], [prose]) == 2
  with pytest.raises(checks.InputError) as refusal:
    check(0.01, ['1'] * 98 + [prose] * 2, ['1'])
  assert '2 of 100 gold answers of the train set' in str(refusal.value)
  assert "train.jsonl:99: the answer in it has 13 words: 'She" in str(
    refusal.value
  )
  assert 'data.max_faulty' in str(refusal.value)
