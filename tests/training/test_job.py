"""What a user may get wrong is reported before a device does any work."""

import json
import os
import types

import jax
import pytest

from mrl_jax import algorithms
from mrl_jax import bucket
from mrl_jax import checks
from mrl_jax import cluster
from mrl_jax import workdir as workdir_lib
from mrl_jax.architecture import Lora
from mrl_jax.mwra import chips
from mrl_jax.mwra import layouts
from mrl_jax.mwra import planner
from mrl_jax.training import job as job_lib
from mrl_jax.training import planning
from tests import examples
from tests import fleets
from tests import runs


class DeviceWork(Exception):
  """The host has checked everything, and would now use a device."""


@pytest.fixture(autouse=True)
def _no_device_work(monkeypatch):
  def refuse(*_, **__):
    raise DeviceWork

  monkeypatch.setattr(jax, 'jit', refuse)
  monkeypatch.setattr(jax, 'device_put', refuse)


def build(workdir, **changes):
  return job_lib.build(
    runs.config(**changes), bucket.WorkDir(os.fspath(workdir))
  )


def jsonl(path, *rows):
  """Writes a file of prompts; returns the keys of a job that reads it."""
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
    ({'train.samples': 1, 'method': 'grpo'}, 'samples = 1 gives no advantage'),
    ({'policies.llama.model.num_kv_heads': 2}, 'does not divide num_heads = 3'),
    ({'policies.llama.model.head_dim': 31}, 'head_dim = 31 must be even'),
    ({'policies.llama.model.family': 'lama'}, "Did you mean 'llama'"),
    ({'policies.llama.tokenizer.path': '/nowhere'}, 'no tokenizer could be'),
    ({'data.source': 'jsonl'}, "data.jsonl.train='' is not a file"),
    ({'data.families': ('words/ad',)}, "Did you mean 'words/add'"),
    ({'data.families': (0,)}, 'unknown family 0'),
    ({'data.seed': 100}, r'data.seed = 100; it must be in \[0, 100\)'),
    (
      {'train.prompts': 8000, 'see.capacity_records': 10**6},
      'takes 8000 prompts',
    ),
    ({'sample.max_tokens': 4}, 'raise sample.max_tokens = 4'),
    (
      {'sample.max_prompt_tokens': 2},
      'every prompt to train on, formula/add and formula/sort',
    ),
    ({'policies.gemma.address': '127.0.0.1:1'}, r'see\.listen is empty'),
    (
      {'policies.gemma.address': '10.0.0.1:1', 'see.listen': '127.0.0.1:2'},
      r'10\.0\.0\.1:1 is not a loopback address',
    ),
    (
      {'policies.gemma.journal': '/nowhere'},
      r'/nowhere/gemma is not the journal of gemma',
    ),
    ({'mwra.tensor': 2}, 'policy gemma: mwra.tensor = 2 does not'),
  ],
)
def test_a_mistake_is_reported_and_leaves_no_work_dir(
  tmp_path, changes, message
):
  with pytest.raises(checks.InputError, match=message):
    build(tmp_path / 'run', **changes)
  assert not (tmp_path / 'run' / 'config.json').exists()


def test_without_a_mistake_devices_are_put_to_work(tmp_path):
  with pytest.raises(DeviceWork):
    build(tmp_path / 'run')
  assert workdir_lib.setup(os.fspath(tmp_path / 'run')) is not None


def test_a_run_does_not_resume_with_other_prompts(tmp_path):
  changes = jsonl(tmp_path / 'a.jsonl', *QUESTIONS)
  with pytest.raises(DeviceWork):
    build(tmp_path / 'run', **changes)
  jsonl(tmp_path / 'a.jsonl', *QUESTIONS[1:])
  with pytest.raises(checks.InputError, match='began with other prompts'):
    build(tmp_path / 'run', **changes)


def test_a_malformed_line_is_named(tmp_path):
  changes = jsonl(tmp_path / 'bad.jsonl', *QUESTIONS, {'question': 'x'})
  with pytest.raises(
    checks.InputError, match=r'bad\.jsonl:13: no text or number'
  ):
    build(tmp_path / 'run', **changes)


def test_a_prompt_that_is_too_long_may_be_an_error(tmp_path):
  long = {'question': examples.noise(500), 'answer': 1}
  changes = jsonl(tmp_path / 'a.jsonl', *QUESTIONS, long)
  with pytest.raises(checks.InputError, match=r'a\.jsonl:13 has \d+ tokens'):
    build(tmp_path / 'run', **{**changes, 'sample.long_prompts': 'error'})


def test_data_without_solutions_cannot_warm_start(tmp_path):
  changes = jsonl(tmp_path / 'a.jsonl', *QUESTIONS)
  with pytest.raises(checks.InputError, match=r'--config.warm_start.steps=0'):
    build(tmp_path / 'run', **{**changes, 'warm_start.steps': 5})


def test_policies_may_be_too_many_for_the_devices(tmp_path, monkeypatch):
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda: one)
  with pytest.raises(checks.InputError, match='2 policies do not fit on 1'):
    build(tmp_path / 'run')


LORA = examples.model(lora=Lora(rank=1, alpha=1, target_modules=('q_proj',)))


@pytest.mark.parametrize(
  ('choice', 'method', 'model', 'by_trainer'),
  [
    ('auto', 'grpo', examples.model(), False),
    ('auto', 'grpo', examples.model(dtype='bfloat16'), True),
    ('auto', 'grpo', LORA, True),
    ('auto', 'hacpo', examples.model(), True),
    ('trainer', 'grpo', examples.model(), True),
    ('sampler', 'hacpo', LORA, False),
  ],
)
def test_the_trainer_scores_own_rows_where_it_may_differ_from_the_sampler(
  choice, method, model, by_trainer
):
  config = examples.run_config(**{'train.old_logp': choice})
  method = algorithms.build(examples.settings(method))
  assert planning._by_trainer(config, method, model) == by_trainer


@pytest.mark.parametrize(
  'changes', [{'top_k': 5}, {'top_p': 0.9}, {'min_p': 0.1}]
)
def test_the_trainer_scores_rows_that_are_drawn_with_filters(changes):
  config = examples.run_config(**{f'sample.{k}': v for k, v in changes.items()})
  method = algorithms.build(examples.settings('grpo'))
  assert planning._by_trainer(config, method, examples.model())


@pytest.mark.parametrize(('dtype', 'size'), [('float32', 8), ('bfloat16', 4)])
def test_the_planner_counts_moments_as_they_are_stored(
  tmp_path, monkeypatch, dtype, size
):
  class Planned(Exception):
    pass

  def plan(models, shapes, *_, **__):
    raise Planned({n: s.moment_bytes for n, s in shapes.items()})

  monkeypatch.setattr(planner, 'plan', plan)
  with pytest.raises(Planned) as planned:
    build(tmp_path / 'run', **{'train.optimizer.state_dtype': dtype})
  assert planned.value.args[0] == pytest.approx(
    {'llama': size, 'gemma': size}, rel=0.02
  )


def test_the_description_names_models_devices_and_memory():
  config = examples.run_config()
  config.policies.gemma.path = 'hub/gemma'
  config.policies.gemma.address = 'host:1'
  models = {name: examples.model() for name in config.policies}
  shapes = dict.fromkeys(models, examples.round_shape())
  plan = planner.plan(
    models,
    shapes,
    fleets.named('cpu:8'),
    chips.CHIPS['cpu'],
    choices=layouts.Choices(tensor=2, data=1, decode_tensor=1),
  )
  described = job_lib.describe(
    types.SimpleNamespace(
      config=config,
      plan=plan,
      inputs=types.SimpleNamespace(skipped=3, faulty=2),
    )
  )
  assert described.devices == '8 x cpu'
  assert described.elsewhere == {'gemma': 'at host:1'}
  assert described.prompts_skipped == 3
  assert described.answers_faulty == 2
  gemma, llama = described.policies['gemma'], described.policies['llama']
  assert sorted(gemma.devices + llama.devices) == [*range(8)]
  assert (gemma.model, gemma.tokenizer) == ('hub/gemma', 'hub/gemma')
  assert (llama.model, llama.tokenizer) == ('llama', 'byte_level')
  assert llama.mesh == {'data': 1, 'fsdp': 2, 'tensor': 2}
  assert llama.decode_mesh == {'data': 4, 'fsdp': 1, 'tensor': 1}
  assert (llama.micro_rows, llama.sample_batch, llama.remat) == (6, 32, 'none')
  assert llama.parameters == plan['llama'].cost.params
  assert llama.memory_bytes == plan['llama'].cost.peak_bytes
  assert llama.seconds == plan['llama'].cost.seconds


def test_hosts_of_a_cluster_must_train_the_same_policies(tmp_path, monkeypatch):
  agreed = []

  def agree(_, values):
    agreed.append(values)
    raise checks.InputError

  monkeypatch.setattr(cluster, 'agree', agree)
  for changes in (
    {},
    {'policies.gemma.address': 'a:1'},
    {'policies.gemma.address': 'b:1', 'cluster.process': 1},
  ):
    with pytest.raises(checks.InputError):
      build(tmp_path, **changes)
  assert agreed[0] != agreed[1] == agreed[2]


def test_hosts_with_a_work_dir_each_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(
    cluster,
    'gather',
    lambda what, value: [value, ''] if what == 'the work dir' else [value],
  )
  with pytest.raises(
    checks.InputError, match=r'host \[1\].* has another .*run'
  ):
    build(tmp_path / 'run')
