import collections

import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.data import pipeline

PROMPTS = [
  records.Prompt(id=f'{family}{i}', text='', answer='', family=family)
  for family, n in (('a', 30), ('b', 5))
  for i in range(n)
]


def ids(batch):
  return [prompt.id for prompt in batch]


def test_every_family_has_an_equal_share_of_a_batch():
  batches = pipeline.batches(PROMPTS, 8, seed=0)
  count = collections.Counter(
    p.family for _ in range(10) for p in next(batches)
  )
  assert count == {'a': 40, 'b': 40}


def test_a_restored_state_continues_with_the_same_batches():
  batches = pipeline.batches(PROMPTS, 8, seed=0)
  next(batches)
  state = batches.get_state()
  expected = [ids(next(batches)) for _ in range(3)]
  again = pipeline.batches(PROMPTS, 8, seed=0)
  again.set_state(state)
  assert [ids(next(again)) for _ in range(3)] == expected


def test_the_seed_decides_the_order():
  first = [ids(next(pipeline.batches(PROMPTS, 8, seed=s))) for s in (0, 0, 1)]
  assert first[0] == first[1] != first[2]


def test_a_prompt_that_is_twice_in_a_batch_gets_another_id():
  batches = pipeline.batches(PROMPTS, 16, seed=0)
  batch = next(batches)  # Eight of the five prompts of family b.
  assert len(set(ids(batch))) == 16
  assert any(id.endswith('#2') for id in ids(batch))


def test_fewer_prompts_than_a_batch_are_an_error():
  with pytest.raises(checks.InputError, match='takes 36 prompts'):
    pipeline.batches(PROMPTS, 36, seed=0)


def test_families_are_shuffled_independently():
  prompts = [
    records.Prompt(id=f'{family}{i}', text='', answer='', family=family)
    for family in 'ab'
    for i in range(8)
  ]
  batch = next(pipeline.batches(prompts, 16, seed=0))
  a, b = ([p.id[1:] for p in batch if p.family == f] for f in 'ab')
  assert sorted(a) == sorted(b)
  assert a != b
