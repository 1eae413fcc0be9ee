"""The star and the four policies: who hears whom, and small runs of them."""

import contextlib
import functools
import itertools
import os
import random

import jax
import pytest

from configs import four
from configs import star
from mrl_jax import algorithms
from mrl_jax import config as config_lib
from mrl_jax import parameters
from mrl_jax import records
from mrl_jax.data import arithmetic
from mrl_jax.data import vocabulary
from mrl_jax.models import families
from mrl_jax.sharing import publish
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer
from mrl_jax.training import peers
from mrl_jax.training import planning
from tests import examples
from tests import runs

ROUNDS = 2
STAR = {'qwen->gemma', 'qwen->llama'}
FOUR = {
  f'{sender}->{receiver}'
  for sender in four.get_config().policies
  for receiver in four.get_config().policies
  if sender != receiver
}


@functools.cache
def tokenizers(module):
  """Each policy's tokenizer, trained on some of the default prompts."""
  rng = random.Random(0)
  texts = [
    f'{arithmetic.question(surface, operation, numbers, rng)}\n'
    f'{arithmetic.solution(operation, numbers)}'
    for surface in arithmetic.SURFACES
    for operation in arithmetic.OPERATIONS
    for numbers in itertools.islice(arithmetic.operands(operation, 3), 100)
  ]
  return {
    name: byte_tokenizer.ByteTokenizer(
      vocabulary.KINDS[policy.tokenizer.kind](
        texts, policy.tokenizer.vocab_size
      ),
      eos_id=1,
    )
    for name, policy in module.get_config().policies.items()
  }


@pytest.mark.parametrize(('module', 'pairs'), [(star, STAR), (four, FOUR)])
def test_records_reach_all_listeners_in_their_own_tokens(
  tmp_path, module, pairs
):
  config = module.get_config()
  config.train.samples = 2
  config_lib.check(config)
  encoders = tokenizers(module)
  kinds = frozenset(records.KINDS)
  places = peers.Peers(config, kinds, encoders)
  limits, residuals = transfer.Limits(**config.thl), {}
  with contextlib.closing(
    places.connect('run', os.fspath(tmp_path), os.fspath(tmp_path / 'received'))
  ) as node:
    for round in range(ROUNDS):
      for name, end in node.endpoints.items():
        group = examples.group(
          [1.0, 0.0], policy=name, encoder=encoders[name], round=round
        )
        end.publish(
          round, publish.publish([group], kinds, texts=4, verifier='exact')
        )
      for name, end in node.endpoints.items():
        for rollout in end.collect(round, {'rollout'}):
          pair = f'{rollout.header.policy}->{name}'
          residual = residuals.setdefault(pair, transfer.Residual())
          transfer.transfer(rollout, encoders[name], limits, residual)
        end.collect(round, {'group_stats', 'outcome'})
    counts = {
      f'{sender}->{name}': {kind: row['used'] for kind, row in rows.items()}
      for name, end in node.endpoints.items()
      for sender, rows in end.ledger.table().items()
    }
  expected = {'rollout': 2 * ROUNDS, 'group_stats': ROUNDS, 'outcome': ROUNDS}
  assert counts == dict.fromkeys(pairs, expected)
  assert residuals.keys() == pairs
  for residual in residuals.values():
    assert residual.rollouts == 2 * ROUNDS
    assert not residual.refused


@pytest.mark.parametrize('module', [star, four])
def test_every_policy_has_devices_of_its_own(module):
  config = module.get_config()
  method = algorithms.build(config.method)
  sizes = planning.without_data(config)
  plan = planning.plan(config, method, sizes, jax.devices())
  used = [device for part in plan.values() for device in part.devices]
  assert all(part.devices for part in plan.values())
  assert len(used) == len(set(used)) <= len(jax.devices())


@pytest.mark.parametrize('operation', arithmetic.OPERATIONS)
def test_some_policies_know_an_operation_in_words_and_others_do_not(operation):
  def knowing(module):
    policies = module.get_config().policies.items()
    family = f'words/{operation}'
    return {n for n, p in policies if family in p.warm_start_families}

  assert 'qwen' in knowing(star)  # The teacher.
  assert len(knowing(star)) < 3
  assert 0 < len(knowing(four)) < 4


def test_no_two_of_four_policies_are_alike():
  policies = four.get_config().policies
  vocabularies = {t.fingerprint for t in tokenizers(four).values()}
  models = [families.build(vocab_size=1, **p.model) for p in policies.values()]
  sizes = {parameters.num_params(parameters.tensors(m)) for m in models}
  skills = {frozenset(p.warm_start_families) for p in policies.values()}
  assert len(vocabularies) == len(sizes) == len(skills) == len(policies) == 4
  assert {p.model.family for p in policies.values()} == {*families.FAMILIES}


def play(name, module, **changes):
  """Plays two rounds of a config of `configs` that is as small as a test's.

  Returns the records of each kind that were used by pair, and each policy's
  rows of the metrics. No record may be lost.
  """
  config, small = module.get_config(), runs.config()
  for part in ('train', 'warm_start', 'eval', 'checkpoint', 'reward'):
    config[part] = small[part]
  for policy in config.policies.values():
    policy.model.num_layers = 1
  config.cache_dir = small.cache_dir
  config.update_from_flattened_dict(changes)
  job, _, rows = runs.play(name, config, ROUNDS)
  used = {}
  for receiver, endpoint in job.endpoints.items():
    for sender, kinds in endpoint.ledger.table().items():
      assert all(row['used'] == row['published'] for row in kinds.values())
      used[f'{sender}->{receiver}'] = {
        kind: row['used'] for kind, row in kinds.items()
      }
  return used, rows


def peer_records(rows):
  """How many records a policy used in each round."""
  return {name: [r.peer_records for r in of] for name, of in rows.items()}


@pytest.mark.slow
def test_policies_hear_the_teacher_who_hears_nobody():
  used, rows = play('star', star)  # Its warm start earns some rewards.
  outcomes = {'outcome': ROUNDS * 8}  # One for each prompt.
  assert used == dict.fromkeys(STAR, outcomes)
  of_teacher = [8] * ROUNDS
  assert peer_records(rows) == {
    'qwen': [0] * ROUNDS,
    'gemma': of_teacher,
    'llama': of_teacher,
  }
  assert any(row.grad_norm for row in rows['qwen'])


@pytest.mark.slow
def test_four_policies_all_hear_one_another():
  used, rows = play('four', four, **{'warm_start.steps': 0})
  stats = {'group_stats': ROUNDS * 8}
  assert used == dict.fromkeys(FOUR, stats)
  assert peer_records(rows) == dict.fromkeys(rows, [3 * 8] * ROUNDS)
  assert len(rows) == 4
