import collections
import itertools
import types

import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.data import prompts as prompts_lib
from mrl_jax.training import warm_start
from tests import examples
from tests import workers

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


def test_a_step_shows_prompts_with_their_own_solutions_and_an_end(monkeypatch):
  worker, shown = workers.worker(), []

  def build(*args):
    del args
    return lambda state, parts, frozen: (
      state,
      {'own/loss': shown.append(parts)},
    )

  monkeypatch.setattr(warm_start.update, 'build', build)
  prompts = [
    records.Prompt(
      id=f'p{i}', text=f'max {i}', answer='', family='max', solution=f'= {i}'
    )
    for i in range(3)
  ]
  config = examples.run_config(
    **{'warm_start.batch': 8, 'warm_start.rejected_share': 0.0}
  )
  with config.unlocked():
    config.policies.a = {'warm_start_families': ('max',)}
  warm_start.Student(worker, prompts, config).step()
  rows = shown[0]['own']
  assert rows.tokens_BS.shape[:2] == (1, 8)
  texts = set()
  for ids_S, valid_S in zip(rows.tokens_BS[0], rows.valid_BS[0], strict=True):
    ids = ids_S[valid_S]
    assert ids[-1] == worker.tokenizer.eos_id
    texts.add(worker.tokenizer.decode(ids))
  assert texts == {f'max {i}\n= {i}'.encode() for i in range(3)}
  np.testing.assert_allclose(rows.weight_BT.sum(), 1.0, rtol=1e-6)
  np.testing.assert_array_equal(rows.advantage_B1, 1.0)


@pytest.mark.parametrize(
  'changes',
  [
    {'seed': 1},
    {'reward.marker': '#'},
    {'warm_start.steps': 21},
    {'policies.llama.template': '{prompt} '},
  ],
)
def test_a_cached_warm_start_is_of_the_same_config(changes):
  worker = types.SimpleNamespace(
    name='llama',
    tokenizer=workers.worker().tokenizer,
    template=workers.worker().template,
    packer=workers.worker().packer,
    mesh=workers.worker().mesh,
  )
  same, other = (
    warm_start.cache_name(worker, PROMPTS, examples.run_config(**c))
    for c in ({}, changes)
  )
  fewer = warm_start.cache_name(worker, PROMPTS[1:], examples.run_config())
  again = warm_start.cache_name(worker, PROMPTS, examples.run_config())
  worker.template = prompts_lib.plain('Q {prompt}')
  around = warm_start.cache_name(worker, PROMPTS, examples.run_config())
  assert same == again
  assert len({same, other, fewer, around}) == 4
