"""The pairs of models of the papers; one of them runs with small models."""

import importlib
import json
import os

import pytest

from mrl_jax import checks
from mrl_jax import config as config_lib
from tests import pretrained
from tests import runs

PAIRS = [
  ('mrl', ()),
  *(
    (name, (pair,))
    for name in ('hacpo', 'graft')
    for pair in importlib.import_module(f'configs.pairs.{name}').PAIRS
  ),
]
SMALL = {
  'train.rounds': 1,
  'train.prompts': 4,
  'train.samples': 4,
  'train.row_multiple': 8,
  'train.micro_rows': 8,
  'sample.max_prompt_tokens': 512,
  'sample.max_tokens': 8,
  'thl.max_tokens': 16,
  'eval.prompts': 2,
  'eval.batch': 4,
  'eval.samples': 4,
}


def config(name, pair):
  return importlib.import_module(f'configs.pairs.{name}').get_config(*pair)


@pytest.mark.parametrize(('name', 'pair'), PAIRS)
def test_the_config_of_every_pair_is_sound(name, pair):
  made = config(name, pair)
  config_lib.check(made)
  assert len(made.policies) == 2
  for policy in made.policies.values():
    assert r'\boxed{}' in policy.template + policy.system
  assert made.train.optimizer.learning_rate == 1e-6
  assert made.reward.verifier == 'math'


def test_an_unknown_pair_is_refused():
  with pytest.raises(checks.InputError, match="Did you mean 'smollm3_qwen3'"):
    config('graft', ('smollm_qwen3',))


@pytest.mark.slow
def test_a_pair_runs_with_models_at_other_paths(tmp_path):
  problems = tmp_path / 'problems.jsonl'
  problems.write_text(
    '\n'.join(
      json.dumps({'problem': f'What is ${i} + 1$?', 'answer': f'${i + 1}$'})
      for i in range(8)
    )
  )
  made = config('graft', ())
  made.update_from_flattened_dict(SMALL)
  made.data.jsonl.train = made.data.jsonl.heldout = os.fspath(problems)
  for policy, family in zip(
    made.policies.values(), ('llama', 'qwen'), strict=True
  ):
    policy.path = os.fspath(tmp_path / family)
    policy.template, policy.system = '{prompt} = ', ''
    pretrained.write(policy.path, family)
  finished = runs.run('pair', made)
  for kinds in finished.summary.exchange.values():
    assert kinds['rollout']['used'] == 4 * 4
