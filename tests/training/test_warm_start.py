import collections
import itertools

from mrl_jax import records
from mrl_jax.training import warm_start
from tests import examples

PROMPTS = [
  records.Prompt(
    id=f'{family}{i}', text='', answer='', family=family, solution='= 1 = 2'
  )
  for family in ('formula/add', 'formula/max', 'words/add')
  for i in range(3)
]


def shown(families, count=4000, seed=0, **changes):
  config = examples.run_config(
    **{f'warm_start.{key}': value for key, value in changes.items()}
  ).warm_start
  stream = warm_start.demonstrations(PROMPTS, families, config, '=', seed)
  return list(itertools.islice(stream, count))


def test_surfaces_are_even_and_families_as_often_as_listed():
  some = shown(('formula/add', 'formula/add', 'formula/max', 'words/add'))
  count = collections.Counter(prompt.family for prompt, _ in some)
  assert abs(count['words/add'] / 4000 - 1 / 2) < 0.05
  assert abs(count['formula/add'] / 4000 - 1 / 3) < 0.05
  assert abs(count['formula/max'] / 4000 - 1 / 6) < 0.05


def test_a_family_that_is_not_listed_is_not_shown():
  some = shown(('formula/max',), 200)
  assert {prompt.family for prompt, _ in some} == {'formula/max'}


def test_a_share_of_solutions_has_the_rejected_marker():
  solutions = collections.Counter(
    solution for _, solution in shown(('formula/max',), rejected_share=0.25)
  )
  assert set(solutions) == {'= 1 = 2', ': 1 : 2'}
  assert abs(solutions[': 1 : 2'] / 4000 - 0.25) < 0.05


def test_the_seed_sets_what_is_shown():
  families = ('formula/add', 'words/add')
  assert (
    shown(families, 50) == shown(families, 50) != shown(families, 50, seed=1)
  )
