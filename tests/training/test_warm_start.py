import collections
import itertools
import types

import jax
import numpy as np

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


def draw(families, count=4000, seed=0, **changes):
  config = examples.run_config(
    **{f'warm_start.{key}': value for key, value in changes.items()}
  ).warm_start
  stream = warm_start.demonstrations(PROMPTS, families, config, '=', seed)
  return list(itertools.islice(stream, count))


def test_surfaces_are_even_and_families_are_as_frequent_as_listed():
  families = ('formula/add', 'formula/add', 'formula/max', 'words/add')
  count = collections.Counter(prompt.family for prompt, _ in draw(families))
  assert abs(count['words/add'] / 4000 - 1 / 2) < 0.05
  assert abs(count['formula/add'] / 4000 - 1 / 3) < 0.05
  assert abs(count['formula/max'] / 4000 - 1 / 6) < 0.05


def test_families_that_are_not_listed_are_not_drawn():
  drawn = draw(('formula/max',), 200)
  assert {prompt.family for prompt, _ in drawn} == {'formula/max'}


def test_a_share_of_solutions_has_the_rejected_marker():
  solutions = collections.Counter(
    solution for _, solution in draw(('formula/max',), rejected_share=0.25)
  )
  assert set(solutions) == {'= 1 = 2', ': 1 : 2'}
  assert abs(solutions[': 1 : 2'] / 4000 - 0.25) < 0.05


def test_the_seed_decides_which_demonstrations_are_drawn():
  families = ('formula/add', 'words/add')
  assert draw(families, 50) == draw(families, 50) != draw(families, 50, seed=1)


def test_a_step_trains_on_prompts_solutions_and_their_ends(monkeypatch):
  worker, steps = workers.worker(), []
  monkeypatch.setattr(
    warm_start.update,
    'Update',
    lambda *_: (
      lambda state, parts, frozen: (
        state,
        {'own/loss': [steps.append(parts)]},
      )
    ),
  )
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
  policy = worker.policy._replace(examples=prompts)
  monkeypatch.setattr(worker, 'policy', policy)
  warm_start.Trainer(worker, config).step()
  rows = jax.tree.map(lambda *xs: np.concatenate(xs), *steps[0]['own'])
  tokenizer, texts = worker.policy.tokenizer, []
  for tokens_S, row_S in zip(rows.tokens_BS, rows.row_BS, strict=True):
    for n in range(1, row_S.max() + 1):
      ids = tokens_S[row_S == n]
      assert ids[-1] == tokenizer.eos_id
      texts.append(tokenizer.decode(ids))
  assert len(texts) == 8
  assert {*texts} == {f'max {i}\n= {i}'.encode() for i in range(3)}
  np.testing.assert_allclose(rows.weight_BS.sum(), 1.0, rtol=1e-6)
  np.testing.assert_array_equal(rows.advantage_BS, rows.mask_BS)


def test_a_cached_warm_start_is_reused_only_where_it_would_be_the_same():
  worker = workers.worker()

  def name(inputs=(), **changes):
    llama = types.SimpleNamespace(
      name='llama',
      policy=worker.policy._replace(**dict(inputs)),
      packer=worker.packer,
      spec=worker.spec,
    )
    return warm_start.cache_name(llama, examples.run_config(**changes))

  # Nothing is exchanged during a warm start.
  assert name() == name(**{'policies.llama.listens_to': ()})
  others = [
    name(**change)
    for change in (
      {'seed': 1},
      {'reward.marker': '#'},
      {'warm_start.steps': 21},
      {'policies.llama.template': '{prompt} '},
    )
  ]
  others.append(name({'examples': PROMPTS}))
  others.append(name({'template': prompts_lib.plain('Q {prompt}')}))
  assert len({name(), *others}) == 1 + len(others)
