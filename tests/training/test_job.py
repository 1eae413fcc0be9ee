"""What a user may get wrong is told before a device does any work."""

import json
import os

import jax
import pytest

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax.mwra import planner
from mrl_jax.training import job
from tests import examples


@pytest.fixture(autouse=True)
def no_device_work(monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError('a device was put to work')

  monkeypatch.setattr(jax, 'jit', refuse)
  monkeypatch.setattr(jax, 'device_put', refuse)


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  return os.fspath(tmp_path_factory.mktemp('cache'))


def build(workdir, cache='', **changes):
  config = examples.run_config(cache_dir=cache, **changes)
  return job.build(config, os.fspath(workdir))


def jsonl(path, *rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return {
    'data.source': 'jsonl',
    'data.jsonl.train': os.fspath(path),
    'data.jsonl.heldout': os.fspath(path),
    'warm_start.steps': 0,
  }


QUESTIONS = [{'question': f'What is {i}?', 'answer': i} for i in range(12)]


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train.rounds': 0}, 'train.rounds = 0'),
    ({'method.name': 'xgpro'}, "Did you mean 'xgrpo'"),
    ({'train.aggregation': 'tokenmean'}, "Did you mean 'token_mean'"),
    (
      {'warm_start.optimizer.name': 'moun'},
      "unknown warm_start.optimizer.name 'moun'. Did you mean 'muon'",
    ),
    (
      {'train.optimizer.state_dtype': 'float16'},
      "unknown train.optimizer.state_dtype 'float16'. Did you mean 'bfloat16'",
    ),
    ({'policies.llama.model.num_kv_heads': 2}, 'does not divide num_heads = 3'),
    ({'policies.llama.model.head_dim': 31}, 'head_dim = 31 must be even'),
    ({'policies.llama.model.dtype': 'float8'}, 'unknown dtype'),
    ({'data.source': 'jsonl'}, "data.jsonl.train='' is not a file"),
    ({'data.families': ('words/ad',)}, "Did you mean 'words/add'"),
    ({'data.seed': 100}, r'data.seed = 100; it must be in \[0, 100\)'),
    ({'train.prompts': 8000}, 'takes 8000 prompts'),
    ({'policies.llama.model.family': 'lama'}, "Did you mean 'llama'"),
    ({'policies.llama.tokenizer.kind': 'bite'}, 'unknown tokenizer'),
    ({'policies.llama.tokenizer.path': '/nowhere'}, 'no tokenizer could be'),
    ({'sample.max_tokens': 4}, 'raise sample.max_tokens = 4'),
    ({'data.families': (0,)}, 'unknown family 0'),
    ({'train.samples': 1}, 'train.samples = 1 gives no advantage'),
    (
      {'see.peers.gemma.address': '127.0.0.1:1'},
      r'see\.listen is empty',
    ),
    (
      {
        'see.peers.gemma.address': '10.0.0.1:1',
        'see.listen': '127.0.0.1:2',
      },
      r'10\.0\.0\.1:1 is not a loopback address',
    ),
    (
      {'see.peers.gemma.journal': '/nowhere'},
      r'/nowhere/gemma is not the journal of gemma',
    ),
    ({'mwra.tensor': 2}, 'policy gemma: mwra.tensor = 2 does not'),
    (
      {'reward.weights.exact': 1.0, 'sample.max_prompt_tokens': 2},
      'every prompt to train on, formula/add and formula/sort',
    ),
  ],
)
def test_mistakes_are_told(tmp_path, cache, changes, message):
  if 'train.prompts' in changes:
    changes = {**changes, 'see.capacity_records': 10**6}
  with pytest.raises(checks.InputError, match=message):
    build(tmp_path / 'run', cache, **changes)


def test_a_malformed_line_is_named(tmp_path):
  changes = jsonl(tmp_path / 'bad.jsonl', *QUESTIONS, {'question': 'x'})
  with pytest.raises(
    checks.InputError, match=r'bad\.jsonl:13: no text or number'
  ):
    build(tmp_path / 'run', **changes)


def test_policies_that_do_not_fit_the_devices(tmp_path, cache, monkeypatch):
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda: one)
  with pytest.raises(checks.InputError, match='2 policies do not fit on 1'):
    build(tmp_path / 'run', cache)


def test_the_plan_counts_the_state_as_it_is_stored(
  tmp_path, cache, monkeypatch
):
  def plan(models, shapes, *_, **__):
    raise InterruptedError({n: s.moment_bytes for n, s in shapes.items()})

  monkeypatch.setattr(planner, 'plan', plan)
  for dtype, size in (('float32', 8), ('bfloat16', 4)):
    with pytest.raises(InterruptedError) as told:
      build(tmp_path / 'run', cache, **{'train.optimizer.state_dtype': dtype})
    assert told.value.args[0] == pytest.approx(
      {'llama': size, 'gemma': size}, rel=0.02
    )


def test_data_without_solutions_cannot_warm_start(tmp_path):
  changes = jsonl(tmp_path / 'a.jsonl', *QUESTIONS)
  with pytest.raises(checks.InputError, match=r'--config.warm_start.steps=0'):
    build(tmp_path / 'run', **{**changes, 'warm_start.steps': 5})


def test_a_prompt_that_is_too_long_may_be_an_error(tmp_path):
  long = {'question': examples.noise(500), 'answer': 1}
  changes = jsonl(tmp_path / 'a.jsonl', *QUESTIONS, long)
  with pytest.raises(checks.InputError, match=r'a\.jsonl:13 has \d+ tokens'):
    build(tmp_path / 'run', **{**changes, 'sample.long_prompts': 'error'})


def claimed(folder, **changes):
  """A folder as a run with this config leaves it."""
  folder.mkdir()
  flat = config_lib.flat(examples.run_config(**changes))
  (folder / 'config.json').write_text(json.dumps(flat))
  return os.fspath(folder)


def test_a_work_dir_of_another_config_is_left_alone(tmp_path):
  folder = claimed(tmp_path / 'run')
  job.check_workdir(folder, examples.run_config())
  before = (tmp_path / 'run' / 'config.json').read_text()
  with pytest.raises(checks.InputError, match='another config') as error:
    job.check_workdir(folder, examples.run_config(**{'train.rounds': 9}))
  assert 'train.rounds: 3 there, 9 now' in str(error.value)
  assert (tmp_path / 'run' / 'config.json').read_text() == before


def test_a_policy_fewer_is_another_config(tmp_path):
  folder = claimed(tmp_path / 'run')
  fewer = examples.run_config()
  with fewer.unlocked():
    del fewer.policies['gemma']
    del fewer.see.peers['gemma']
  with pytest.raises(checks.InputError, match=r'policies\.gemma\.template'):
    job.check_workdir(folder, fewer)


def test_a_kill_before_the_config_was_written_leaves_a_work_dir(tmp_path):
  (tmp_path / 'cache').mkdir()
  (tmp_path / 'config.json.new').write_text('{"half')
  job.check_workdir(os.fspath(tmp_path), examples.run_config())


def test_a_work_dir_that_is_no_folder_or_has_no_config(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(checks.InputError, match='file is a file, not a folder'):
    job.check_workdir(os.fspath(tmp_path / 'file'), examples.run_config())
  folder = claimed(tmp_path / 'run')
  (tmp_path / 'run' / 'config.json').write_text('{"half')
  with pytest.raises(checks.InputError, match=r'config\.json is not JSON'):
    job.check_workdir(folder, examples.run_config())


def test_a_cache_may_move(tmp_path):
  folder = claimed(tmp_path / 'run', cache_dir='here')
  job.check_workdir(folder, examples.run_config(cache_dir='there'))


def test_a_folder_of_something_else_is_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(checks.InputError, match=r'not a work dir.*thesis\.tex'):
    job.check_workdir(os.fspath(tmp_path), examples.run_config())
  assert os.listdir(tmp_path) == ['thesis.tex']


def test_a_mistake_does_not_take_the_work_dir(tmp_path):
  workdir = tmp_path / 'run'
  with pytest.raises(checks.InputError, match='unknown tokenizer'):
    build(workdir, **{'policies.llama.tokenizer.kind': 'bite'})
  with pytest.raises(AssertionError, match='put to work'):
    build(workdir)  # All is well as far as the host can tell.
