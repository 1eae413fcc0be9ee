import json
import os
import shutil

import numpy as np
import pytest

from mrl_jax import bucket
from mrl_jax import checks
from mrl_jax.training import export
from mrl_jax.training import job as job_lib
from mrl_jax.training import pretrained as pretrained_lib
from tests import decoders
from tests import pretrained
from tests import runs


def leaves(params):
  return {path: np.asarray(x.get_value()) for path, x in params.flat_state()}


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """A folder with two models, and the config and parameters of each."""
  folder = tmp_path_factory.mktemp('models')
  written = {
    name: pretrained.write(folder / name, name) for name in ('llama', 'gemma')
  }
  return folder, written


def config(folder, **changes):
  return runs.config(
    'grpo',
    **{
      'warm_start.steps': 0,
      'train.rounds': 1,
      'eval.prompts': 2,
      'policies.llama.path': os.fspath(folder / 'llama'),
      'policies.gemma.path': os.fspath(folder / 'gemma'),
      'policies.llama.lora.rank': 2,
      'policies.llama.lora.alpha': 4.0,
      'policies.llama.lora.target_modules': ('q_proj', 'down_proj'),
      'method.entropy_weight': 1.0,  # It has a gradient in any case.
      **changes,
    },
  )


@pytest.fixture(scope='module')
def finished(models):
  """A run of an adapted policy beside one that is trained whole."""
  return runs.run('pretrained', config(models[0]))


@pytest.fixture
def exported(models, finished, tmp_path):
  """Exports a policy; returns the folder, and the parameters in it."""

  def export_and_read(name, rounds=None):
    folder = os.fspath(tmp_path / name)
    done = export.export(finished.workdir, name, folder, rounds=rounds)
    assert done == (1 if rounds is None else rounds)
    model, _ = models[1][name]
    mesh = decoders.mesh(1, 1, 1)
    return folder, leaves(pretrained_lib.read(folder, model, mesh))

  return export_and_read


def test_the_import_of_weights_is_shown(models, finished):
  shown = finished.shown.replace('\n', '')
  assert f'MB from {models[0] / "gemma"}' in shown
  assert 'weights of llama' in shown
  assert 'MB/s' in shown


@pytest.mark.parametrize('name', ['llama', 'gemma'])
def test_before_the_first_round_an_export_is_what_was_imported(
  models, exported, name
):
  # The adapters of llama begin without effect: B is all zeros.
  _, params = exported(name, rounds=0)
  imported = leaves(models[1][name][1])
  assert params.keys() == imported.keys()
  for path, x in params.items():
    np.testing.assert_array_equal(x, imported[path], err_msg=str(path))


def test_a_whole_policy_is_exported_and_can_be_trained_further(
  models, exported, tmp_path
):
  folder, after = exported('gemma')
  before = leaves(models[1]['gemma'][1])
  assert after.keys() == before.keys()
  assert any((x != before[path]).any() for path, x in after.items())
  with open(os.path.join(folder, 'config.json')) as f:
    assert json.load(f)['dtype'] == 'float32'
  again = config(models[0], **{'policies.gemma.path': folder})
  job = job_lib.build(again, bucket.WorkDir(os.fspath(tmp_path / 'again')))
  assert job.workers['gemma'].spec.model == models[1]['gemma'][0]


def test_adapters_are_exported_merged_or_alone(
  models, finished, exported, tmp_path
):
  _, merged = exported('llama')
  for path, x in leaves(models[1]['llama'][1]).items():
    adapted = not {*path}.isdisjoint(('q', 'down'))
    assert (merged[path] != x).any() == adapted, path
  alone = os.fspath(tmp_path / 'peft')
  export.export(finished.workdir, 'llama', alone, adapters=True)
  with open(os.path.join(alone, 'adapter_config.json')) as f:
    about = json.load(f)
  assert about['base_model_name_or_path'] == os.fspath(models[0] / 'llama')
  assert (about['r'], about['lora_alpha']) == (2, 4.0)


def test_checkpoints_have_adapters_without_the_weights_under_them(finished):
  saved = os.path.join(finished.workdir, 'checkpoints', 'round_1')
  sizes = {
    name: sum(
      os.path.getsize(os.path.join(at, f))
      for at, _, files in os.walk(os.path.join(saved, name))
      for f in files
    )
    for name in ('llama', 'gemma')
  }
  assert sizes['llama'] < sizes['gemma'] / 4


def test_a_resumed_run_imports_only_the_weights_under_adapters(
  models, finished
):
  resumed = runs.run('pretrained', config(models[0]))
  assert resumed.summary == finished.summary
  assert 'weights of llama' in resumed.shown
  assert 'weights of gemma' not in resumed.shown


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'name': 'lama'}, "unknown policy 'lama'. Did you mean 'llama'"),
    ({'rounds': 9}, 'no checkpoint of 9 rounds, but of 0, 1'),
    ({'dtype': 'int8'}, "unknown dtype 'int8'"),
    ({'name': 'gemma', 'adapters': True}, 'gemma has no adapters'),
    ({'workdir': '/nowhere'}, '/nowhere is not the work dir of a run'),
    ({'out': ''}, 'exists already'),
    ({'adapters': True, 'dtype': 'bfloat16'}, 'adapters stay float32'),
    ({'out': '/tmp'}, '/tmp exists already'),
  ],
)
def test_an_export_that_cannot_be_is_refused(
  finished, tmp_path, arguments, message
):
  given = {
    'workdir': finished.workdir, 'name': 'llama', 'out': str(tmp_path / 'x'),
  }  # fmt: skip
  with pytest.raises(checks.InputError, match=message):
    export.export(**{**given, **arguments})


def change_setup(finished, folder, change):
  """Copies the config of the run to another work dir, and changes it."""
  with open(os.path.join(finished.workdir, 'config.json')) as f:
    setup = json.load(f)
  (folder / 'config.json').write_text(json.dumps(change(setup)))
  return os.fspath(folder)


def test_a_policy_that_was_trained_elsewhere_is_not_exported(
  finished, tmp_path
):
  def read_a_journal(setup):
    setup['config']['policies.gemma.journal'] = 'runs/other'
    return setup

  workdir = change_setup(finished, tmp_path, read_a_journal)
  with pytest.raises(checks.InputError, match='but is in runs/other'):
    export.export(workdir, 'gemma', os.fspath(tmp_path / 'out'))


def test_a_run_of_the_former_format_is_not_exported(finished, tmp_path):
  # Its `config.json` was the flat config itself.
  workdir = change_setup(finished, tmp_path, lambda setup: setup['config'])
  with pytest.raises(checks.InputError, match='neither resume nor export'):
    export.export(workdir, 'llama', os.fspath(tmp_path / 'out'))


def test_adapters_are_of_the_weights_that_they_were_trained_on(
  models, finished, tmp_path
):
  path = models[0] / 'llama' / 'model.safetensors'
  content = path.read_bytes()
  try:
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(checks.InputError, match='other prompts, tokenizers or'):
      job_lib.build(config(models[0]), bucket.WorkDir(finished.workdir))
    with pytest.raises(checks.InputError, match='not those that the adapters'):
      export.export(finished.workdir, 'llama', os.fspath(tmp_path / 'out'))
  finally:
    path.write_bytes(content)


def test_weights_are_checked_before_anything_is_written(models, tmp_path):
  damaged = shutil.copytree(models[0] / 'gemma', tmp_path / 'gemma')
  with open(damaged / 'model.safetensors', 'r+b') as f:
    f.truncate(1000)
  changes = {'policies.gemma.path': os.fspath(damaged)}
  with pytest.raises(checks.InputError, match='1 damaged'):
    job_lib.build(
      config(models[0], **changes), bucket.WorkDir(os.fspath(tmp_path / 'run'))
    )
  assert not os.path.exists(tmp_path / 'run' / 'config.json')


def test_a_tokenizer_needs_an_embedding_for_every_token(models, tmp_path):
  changes = {
    'policies.llama.tokenizer.path': os.fspath(models[0] / 'gemma'),
  }
  with pytest.raises(checks.InputError, match=r'has \d+ tokens, the model'):
    job_lib.build(
      config(models[0], **changes), bucket.WorkDir(os.fspath(tmp_path / 'run'))
    )
