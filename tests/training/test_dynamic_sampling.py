import itertools
import types

import jax
import ml_collections
import msgspec
import pytest

from mrl_jax import records
from mrl_jax.training import dynamic_sampling as refill
from tests import examples

MIXED, FAILED, SOLVED = (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)


class Worker:
  """Samples what it is told to, two of each of two prompts."""

  name = 'a'

  def __init__(self, *rounds):
    self._rounds = iter(rounds)
    self.keys = []

  def start_sampling(self, prompts, per_prompt, key, temperature):
    assert (per_prompt, temperature) == (2, 0.7)
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    return prompts

  def finish_sampling(self, prompts, judge, run, round):
    assert (judge, run, round) == ('judge', 'run', 5)
    return groups(*next(self._rounds), ids=[p.id for p in prompts])


def prompts(*ids):
  return [records.Prompt(id=i, text=i, answer='1') for i in ids]


def groups(*rewards, ids=('p0', 'p1')):
  return [
    examples.group(r, prompt=i) for r, i in zip(rewards, ids, strict=True)
  ]


def refilled(first, *rounds, refills=2):
  worker = Worker(*rounds)
  job = types.SimpleNamespace(
    config=ml_collections.ConfigDict(
      {
        'sample': {'refills': refills, 'temperature': 0.7},
        'train': {'samples': 2},
      }
    ),
    refills={'a': itertools.repeat(prompts('p0', 'p7'))},
    judge='judge',
    run='run',
  )
  found = refill.refill(
    job, worker, prompts('p0', 'p1'), groups(*first), 5, jax.random.key(0)
  )
  return found, worker


def test_groups_that_teach_nothing_are_replaced():
  found, worker = refilled((MIXED, FAILED), (SOLVED, MIXED))
  assert list(found.kept) == [0, 3]
  assert [prompt.id for prompt in found.prompts] == ['p0', 'p1', 'p0~0', 'p7~0']
  assert found.rollouts == 8
  assert len(worker.keys) == 1


def test_it_stops_at_the_bound_and_says_what_it_has():
  found, worker = refilled((FAILED, FAILED), (SOLVED, FAILED), (SOLVED, MIXED))
  assert list(found.kept) == [5]
  assert found.rollouts == 12
  assert len(set(worker.keys)) == 2  # Other samples each time.
  assert found.prompts[-1].id == 'p7~1'


def test_no_more_are_kept_than_a_round_has():
  found, _ = refilled((MIXED, FAILED), (MIXED, MIXED))
  assert list(found.kept) == [0, 2]


@pytest.mark.parametrize('refills', [0, 2])
def test_nothing_is_sampled_without_need(refills):
  found, worker = refilled((MIXED, MIXED), refills=refills)
  assert worker.keys == []
  assert found.rollouts == 4
  assert found.kept == ([0, 1] if refills else None)


def test_what_counts_is_the_verdict_whatever_the_reward():
  # Both wrong, and one of them punished for its length.
  group = examples.group([0.0, 0.0])
  group[1] = msgspec.structs.replace(group[1], reward=-0.5)
  assert not refill.mixed(group)
