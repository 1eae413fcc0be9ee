import errno
import fcntl
import json
import os
import socket
import subprocess
import sys

from absl import logging
import msgspec
import pytest

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import workdir
from tests import examples


def start(folder, config=None, **changes):
  """Starts or resumes a run, as far as its work dir is concerned."""
  config = config or examples.run_config()
  fields = {'inputs': 'digest', 'tokenizers': {}, 'weights': {'llama': '1f'}}
  workdir.prepare(os.fspath(folder), config)
  workdir.claim(os.fspath(folder), config, **{**fields, **changes})


def resume(folder, **changes):
  workdir.prepare(os.fspath(folder), examples.run_config(**changes))


@pytest.mark.parametrize(
  ('devices', 'text'),
  [
    ([0, 1, 2, 3], '0-3'),
    ([5, 4], '4-5'),
    ([4], '4'),
    ([0, 2], '0, 2'),
    ([0, 1, 2, 3, 8, 9, 10, 11], '0-3, 8-11'),
    ([], ''),
  ],
)
def test_devices_of_a_policy_are_spans(devices, text):
  assert workdir.PolicyPlan(devices=devices).span == text


def test_the_setup_is_what_a_run_was_started_with(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  os.makedirs('run/cache/tokenizer')
  os.makedirs('elsewhere')
  tokenizers = {
    'llama': 'run/cache/tokenizer',
    'gemma': 'elsewhere',
    'qwen': 'hub/qwen',
  }
  start('run', tokenizers=tokenizers)
  assert workdir.setup('run') == workdir.Setup(
    format=workdir.FORMAT,
    config=config_lib.flat(examples.run_config()),
    inputs='digest',
    tokenizers={
      'llama': 'cache/tokenizer',  # It moves with the work dir.
      'gemma': os.path.abspath('elsewhere'),
      'qwen': 'hub/qwen',
    },
    weights={'llama': '1f'},
  )


def test_a_run_resumes_with_the_same_config_in_other_places(tmp_path):
  start(tmp_path / 'run', examples.run_config(cache_dir='here'))
  before = workdir.setup(tmp_path / 'run')
  start(tmp_path / 'run', examples.run_config(cache_dir='there'))
  assert workdir.setup(tmp_path / 'run') == before


def test_a_work_dir_of_another_config_is_left_alone(tmp_path):
  start(tmp_path)
  before = workdir.setup(tmp_path)
  with pytest.raises(checks.InputError, match='another config') as error:
    resume(tmp_path, **{'train.rounds': 9})
  assert 'train.rounds: 3 there, 9 now' in str(error.value)
  fewer = examples.run_config()
  with fewer.unlocked():
    del fewer.policies['gemma']
  with pytest.raises(checks.InputError, match=r'policies\.gemma\.template'):
    workdir.prepare(os.fspath(tmp_path), fewer)
  assert workdir.setup(tmp_path) == before


@pytest.mark.parametrize(
  'changes', [{'inputs': 'other'}, {'weights': {'llama': '2e'}}]
)
def test_a_run_resumes_with_the_same_prompts_and_weights_only(
  tmp_path, changes
):
  start(tmp_path)
  with pytest.raises(checks.InputError, match='other prompts, tokenizers or'):
    start(tmp_path, **changes)


HOLDER = """
import sys
from mrl_jax import workdir
from tests import examples
workdir.prepare(sys.argv[1], examples.run_config())
print('locked', flush=True)
sys.stdin.read()
"""


def test_a_work_dir_belongs_to_one_process_until_it_ends(tmp_path):
  folder = tmp_path / 'run'
  with subprocess.Popen(
    [sys.executable, '-c', HOLDER, str(folder)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as holder:
    try:
      assert holder.stdout.readline() == 'locked\n'
      who = f'in use by process {holder.pid} on {socket.gethostname()}'
      with pytest.raises(checks.InputError, match=f'{who}.* stop that one'):
        start(folder)
    finally:
      holder.kill()
  start(folder)  # The lock of a process that was killed is gone.
  start(folder)  # The same process may write to it again.
  assert (folder / 'lock').read_text().startswith(f'process {os.getpid()} ')


def test_without_locks_a_run_starts_with_a_warning(
  tmp_path, monkeypatch, caplog
):
  def unsupported(*_):
    raise OSError(errno.EOPNOTSUPP, 'not supported')

  monkeypatch.setattr(fcntl, 'flock', unsupported)
  logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'):
    start(tmp_path)
  assert 'cannot be locked' in caplog.text


def test_a_kill_before_the_setup_was_written_leaves_a_work_dir(tmp_path):
  (tmp_path / 'cache').mkdir()
  (tmp_path / 'config.json.new').write_text('{"half')
  start(tmp_path)
  assert workdir.setup(tmp_path) is not None


def test_a_folder_of_something_else_is_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(checks.InputError, match=r'not a work dir.*thesis\.tex'):
    resume(tmp_path)
  assert os.listdir(tmp_path) == ['thesis.tex']
  with pytest.raises(checks.InputError, match='tex is a file, not a folder'):
    resume(tmp_path / 'thesis.tex')


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('{"half', r'config\.json is damaged'),
    ('[]', r'config\.json is damaged'),
    ('{"format": 2, "inputs": 3}', r'config\.json is damaged.*`\$\.inputs`'),
    ('{"format": 99}', 'written by another version of mrl_jax'),
    # The former format: the flat config itself.
    (
      json.dumps(config_lib.flat(examples.run_config())),
      'written by another version .* give a fresh --workdir',
    ),
  ],
)
def test_a_setup_that_cannot_be_read_is_refused(tmp_path, text, message):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(checks.InputError, match=message):
    resume(tmp_path)


def test_what_is_unknown_is_not_written(tmp_path):
  row = workdir.RoundMetrics(
    round=0, policy='a', reward=0.0, refused={'empty': 1}
  )
  workdir.write(os.fspath(tmp_path), 'row.json', row)
  values = json.loads((tmp_path / 'row.json').read_text())
  assert values == {
    'round': 0, 'policy': 'a', 'reward': 0.0, 'refused': {'empty': 1},
  }  # fmt: skip
  assert msgspec.convert(values, workdir.RoundMetrics) == row


def test_a_histogram_has_the_bins_of_the_config():
  assert workdir.Ratios(log_ratio_counts=[0] * 41).log_ratio_counts == [0] * 41
  with pytest.raises(ValueError, match='40 bins in place of 41'):
    workdir.Ratios(log_ratio_counts=[0] * 40)


def test_the_cache_is_in_the_work_dir_unless_the_config_names_one():
  config = examples.run_config()
  assert workdir.cache_dir(config, 'runs/1') == os.path.join('runs/1', 'cache')
  assert workdir.cache_dir(examples.run_config(cache_dir='x'), 'runs/1') == 'x'
