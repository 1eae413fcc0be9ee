import io
import json
import os
import shutil

import jax
import numpy as np
import pytest
from rich import console as console_lib

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax.training import export
from mrl_jax.training import job as job_lib
from mrl_jax.training import loop
from tests import examples
from tests import pretrained


def leaves(params):
  return {path: np.asarray(x.get_value()) for path, x in params.flat_state()}


def assert_same(a, b):
  a, b = leaves(a), leaves(b)
  assert a.keys() == b.keys()
  for path, x in a.items():
    np.testing.assert_array_equal(x, b[path], err_msg=str(path))


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """The folder of two models, and what they are."""
  folder = tmp_path_factory.mktemp('models')
  written = {
    name: pretrained.write(folder / name, name) for name in ('llama', 'gemma')
  }
  return folder, written


def config(folder, **changes):
  return examples.run_config(
    **{
      'warm_start.steps': 0,
      'train.rounds': 1,
      'eval.prompts': 2,
      'eval.batch': 4,
      'cache_dir': os.fspath(folder / 'cache'),
      'policies.llama.path': os.fspath(folder / 'llama'),
      'policies.gemma.path': os.fspath(folder / 'gemma'),
      'policies.llama.lora.rank': 2,
      'policies.llama.lora.alpha': 4.0,
      'policies.llama.lora.target_modules': ('q_proj', 'down_proj'),
      'method.entropy_weight': 1.0,  # A gradient in any case.
      **changes,
    }
  )


@pytest.fixture(scope='module')
def finished(models):
  """A run of an adapted policy beside one that is trained whole."""
  folder, _ = models
  workdir = os.fspath(folder / 'run')
  shown = console_lib.Console(file=io.StringIO(), width=100)
  job = job_lib.build(config(folder), workdir)
  loop.run(job.config, workdir, shown)
  return workdir, shown.file.getvalue()


def test_policies_start_as_the_models_at_their_paths(models):
  folder, written = models
  job = job_lib.build(config(folder), os.fspath(folder / 'start'))
  console = console_lib.Console(file=io.StringIO())
  loop.pretrained.freeze(job.workers, job.config, console)
  loop.pretrained.start(job.workers, job.config, console)
  assert_same(job.workers['gemma'].state.params, written['gemma'][1])
  llama = job.workers['llama']
  assert_same(llama.frozen, written['llama'][1])
  adapters = leaves(llama.state.params)
  assert len(adapters) == 2 * 2 * 2  # Layers, modules, A and B.
  assert all(
    (x == 0).all() == (path[-1] == 'b') for path, x in adapters.items()
  )
  # Rows of the embeddings that no token has are not sampled as text.
  assert llama.tokenizer.vocab_size == llama.model.vocab_size


def test_what_is_imported_is_shown(models, finished):
  _, shown = finished
  assert f'MB from {models[0] / "gemma"}' in shown.replace('\n', '')
  assert 'weights of llama' in shown
  assert 'MB/s' in shown


def test_only_adapters_are_in_checkpoints(finished):
  workdir, _ = finished
  saved = os.path.join(workdir, 'checkpoints', 'round_1')
  sizes = {
    name: sum(
      os.path.getsize(os.path.join(at, f))
      for at, _, files in os.walk(os.path.join(saved, name))
      for f in files
    )
    for name in ('llama', 'gemma')
  }
  assert sizes['llama'] < sizes['gemma'] / 4


def test_a_whole_policy_goes_back_and_can_be_continued(models, finished):
  folder, written = models
  out = os.fspath(folder / 'gemma-1')
  assert export.export(finished[0], 'gemma', out) == 1
  job = job_lib.build(
    config(folder, **{'policies.gemma.path': out}), os.fspath(folder / 'again')
  )
  console = console_lib.Console(file=io.StringIO())
  loop.pretrained.start({'gemma': job.workers['gemma']}, job.config, console)
  before, after = written['gemma'][1], job.workers['gemma'].state.params
  assert {*leaves(before)} == {*leaves(after)}
  assert any(
    (x != leaves(before)[path]).any() for path, x in leaves(after).items()
  )
  with open(os.path.join(out, 'config.json')) as f:
    assert json.load(f)['dtype'] == 'float32'


def test_an_adapted_policy_is_exported_merged_or_by_itself(models, finished):
  folder, written = models
  merged, alone = os.fspath(folder / 'merged'), os.fspath(folder / 'peft')
  export.export(finished[0], 'llama', merged)
  export.export(finished[0], 'llama', alone, adapters=True)
  model, base = written['llama']
  mesh = jax.make_mesh((1, 1, 1), config_lib.MESH_AXES)
  found = leaves(loop.pretrained.read(merged, model, mesh))
  for path, x in leaves(base).items():
    adapted = not {*path}.isdisjoint(('q', 'down'))
    assert (found[path] != x).any() == adapted, path
  with open(os.path.join(alone, 'adapter_config.json')) as f:
    about = json.load(f)
  assert about['base_model_name_or_path'] == os.fspath(folder / 'llama')
  assert (about['r'], about['lora_alpha']) == (2, 4.0)


def test_a_run_with_adapters_resumes(models, finished):
  folder, _ = models
  shown = console_lib.Console(file=io.StringIO(), width=100)
  summary = loop.run(config(folder), finished[0], shown)
  assert summary['rounds'] == 1
  assert 'weights of llama' in shown.file.getvalue()
  assert 'weights of gemma' not in shown.file.getvalue()


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'name': 'lama'}, "unknown policy 'lama'. Did you mean 'llama'"),
    ({'rounds': 9}, 'no checkpoint of 9 rounds, but of 0, 1'),
    ({'dtype': 'int8'}, "unknown dtype 'int8'"),
    ({'name': 'gemma', 'adapters': True}, 'gemma has no adapters'),
    ({'workdir': '/nowhere'}, '/nowhere is not the work dir of a run'),
    ({'out': ''}, 'is there already'),
    ({'adapters': True, 'dtype': 'bfloat16'}, 'adapters stay float32'),
    ({'out': '/tmp'}, '/tmp is there already'),
  ],
)
def test_what_cannot_be_exported_is_told(
  finished, tmp_path, arguments, message
):
  given = {'workdir': finished[0], 'name': 'llama', 'out': str(tmp_path / 'x')}
  with pytest.raises(checks.InputError, match=message):
    export.export(**{**given, **arguments})


def test_adapters_need_a_model_to_adapt():
  with pytest.raises(
    checks.InputError, match=r'give its policies\.gemma\.path'
  ):
    config_lib.check(examples.run_config(**{'policies.gemma.lora.rank': 2}))


def test_a_tokenizer_with_more_tokens_than_embeddings_is_told(models, tmp_path):
  folder, _ = models
  larger = tmp_path / 'gemma'
  pretrained.write(larger, 'gemma')
  changes = {'policies.llama.tokenizer.path': os.fspath(larger)}
  with pytest.raises(checks.InputError, match='has 325 tokens, the model'):
    job_lib.build(config(folder, **changes), str(tmp_path / 'run'))


def test_weights_are_checked_before_anything_is_written(models, tmp_path):
  folder, _ = models
  damaged = shutil.copytree(folder / 'gemma', tmp_path / 'gemma')
  with open(damaged / 'model.safetensors', 'r+b') as f:
    f.truncate(1000)
  workdir = tmp_path / 'run'
  changes = {'policies.gemma.path': os.fspath(damaged)}
  with pytest.raises(checks.InputError, match='1 damaged'):
    job_lib.build(config(folder, **changes), os.fspath(workdir))
  assert not os.path.exists(workdir / 'config.json')


def test_a_policy_that_was_not_trained_there_is_not_exported(
  finished, tmp_path
):
  workdir = shutil.copytree(finished[0], tmp_path / 'run')
  values = json.loads((workdir / 'config.json').read_text())
  values['see.peers.gemma.journal'] = 'runs/other'
  (workdir / 'config.json').write_text(json.dumps(values))
  with pytest.raises(checks.InputError, match='but is in runs/other'):
    export.export(os.fspath(workdir), 'gemma', os.fspath(tmp_path / 'out'))
  del values['weights']
  (workdir / 'config.json').write_text(json.dumps(values))
  with pytest.raises(checks.InputError, match='an earlier version'):
    export.export(os.fspath(workdir), 'llama', os.fspath(tmp_path / 'out'))


def test_adapters_are_of_the_weights_that_were_there(
  models, finished, tmp_path
):
  folder, _ = models
  path = folder / 'llama' / 'model.safetensors'
  content = path.read_bytes()
  try:
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(checks.InputError, match='other prompts, tokenizers or'):
      job_lib.build(config(folder), finished[0])
    with pytest.raises(checks.InputError, match='not those that llama adapted'):
      export.export(finished[0], 'llama', os.fspath(tmp_path / 'out'))
  finally:
    path.write_bytes(content)
