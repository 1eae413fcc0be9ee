import itertools
import types

import jax
import msgspec
import pytest

from mrl_jax import records
from mrl_jax.training import dynamic_sampling
from tests import examples

MIXED, FAILED, SOLVED = (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)


class Worker:
  """Samples groups of these rewards, two prompts with two samples at a time."""

  name = 'a'

  def __init__(self, *rewards):
    self._rewards = iter(rewards)
    self.keys = []

  def sample(self, prompts, per_prompt, key, density, run, round):
    assert (per_prompt, density.temperature) == (2, 0.7)
    assert (run, round) == ('run', 5)
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    return groups(*next(self._rewards), ids=[p.id for p in prompts])


def prompts(*ids):
  return [records.Prompt(id=i, text=i, answer='1') for i in ids]


def groups(*rewards, ids=('p0', 'p1')):
  return [
    examples.group(r, prompt=i) for r, i in zip(rewards, ids, strict=True)
  ]


def refill(first, *more, refills=2):
  """Refills a round whose first groups have the rewards `first`."""
  worker = Worker(*more)
  job = types.SimpleNamespace(
    config=examples.run_config(
      **{
        'sample.refills': refills,
        'sample.temperature': 0.7,
        'train.samples': 2,
      }
    ),
    refills={'a': itertools.repeat(prompts('p0', 'p7'))},
    run='run',
  )
  sampled = dynamic_sampling.refill(
    job, worker, prompts('p0', 'p1'), groups(*first), 5, jax.random.key(0)
  )
  return sampled, worker


def test_groups_without_signal_are_replaced():
  sampled, worker = refill((MIXED, FAILED), (SOLVED, MIXED))
  assert sampled.kept == [0, 3]
  assert [p.id for p in sampled.prompts] == ['p0', 'p1', 'p0~0', 'p7~0']
  assert sum(map(len, sampled.groups)) == 8
  assert len(worker.keys) == 1


def test_sampling_ends_at_the_bound_with_what_there_is():
  sampled, worker = refill((FAILED, FAILED), (SOLVED, FAILED), (SOLVED, MIXED))
  assert sampled.kept == [5]
  assert sum(map(len, sampled.groups)) == 12
  assert len(set(worker.keys)) == 2  # Other samples each time.
  assert sampled.prompts[-1].id == 'p7~1'


def test_no_more_groups_are_kept_than_a_round_has_prompts():
  sampled, _ = refill((MIXED, FAILED), (MIXED, MIXED))
  assert sampled.kept == [0, 2]


@pytest.mark.parametrize(('refills', 'kept'), [(0, None), (2, [0, 1])])
def test_nothing_is_sampled_without_need(refills, kept):
  sampled, worker = refill((MIXED, MIXED), refills=refills)
  assert worker.keys == []
  assert sum(map(len, sampled.groups)) == 4
  assert sampled.kept == kept


def test_a_group_is_mixed_by_its_verdicts_whatever_its_rewards():
  # Both samples are wrong; one is also punished for its length.
  group = examples.group([0.0, 0.0])
  group[1] = msgspec.structs.replace(group[1], reward=-0.5)
  assert not dynamic_sampling.is_mixed(group)
