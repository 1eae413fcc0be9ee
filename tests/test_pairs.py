"""The pairs of models of the papers; one of them runs with small models."""

import importlib
import json
import os

import msgspec
import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.sharing import publish
from mrl_jax.training import peers
from tests import examples
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


LARGEST = {
  'method.name': 'prp',
  'train.prompts': 1024,
  'train.samples': 8,
  'sample.max_tokens': 4096,
}


@pytest.mark.parametrize(
  ('name', 'pair', 'changes'),
  [
    ('mrl', (), {'method.name': 'prp'}),
    ('graft', (), {}),
    ('hacpo', (), {}),
    pytest.param('mrl', (), LARGEST, marks=pytest.mark.slow),
  ],
)
def test_the_exchange_loses_nothing_of_a_pair(tmp_path, name, pair, changes):
  """Rounds of rollouts as long as they can be; all share their arrays."""
  made = config(name, pair)
  made.update_from_flattened_dict(
    {**changes, 'see.journal': 'none', 'data.jsonl.train': 'x'}
  )
  config_lib.check(made)
  kinds = ('byte_level', 'sentencepiece')
  tokenizers = {
    policy: examples.tokenizer(kind)
    for policy, kind in zip(made.policies, kinds, strict=True)
  }
  places = peers.Peers(made, frozenset(records.KINDS), tokenizers)
  node = places.connect(
    'run', os.fspath(tmp_path), os.fspath(tmp_path / 'received')
  )
  sender, peer = made.policies
  tokens = made.sample.max_tokens
  lengths = np.full(tokens, 4, np.int32)  # A token of English has 4 bytes.
  long = msgspec.structs.replace(
    examples.rollout(
      b'',
      policy=sender,
      finish='length',
      tokenizer=tokenizers[sender].fingerprint,
    ),
    payload=bytes(4 * tokens),
    ids=np.zeros(tokens, np.int32),
    byte_lengths=lengths,
    sampling_logp=np.zeros(tokens, np.float32),
    policy_logp=np.zeros(tokens, np.float32),
    mask=np.ones(tokens, bool),
  )
  for round in range(2):
    groups = [
      [
        msgspec.structs.replace(
          long,
          header=msgspec.structs.replace(
            long.header, round=round, prompt=f'p{p}', sample=g
          ),
        )
        for g in range(made.train.samples)
      ]
      for p in range(made.train.prompts)
    ]
    published = publish.publish(
      groups, records.KINDS, texts=made.see.outcome_texts, verifier='math'
    )
    node.endpoints[sender].publish(round, published)
    received = node.endpoints[peer].collect(round, records.KINDS)
    assert len(received) == len(published)
  assert node.endpoints[peer].ledger.refusals() == {}


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
