import types

import jax
import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.sampling import drawing
from mrl_jax.training import evaluation
from tests import examples


class Worker:
  """Solves a prompt with as many of its samples as the prompt's answer says."""

  def __init__(self, name, device, log):
    self.name, self.log = name, log
    self.spec = types.SimpleNamespace(
      mesh=types.SimpleNamespace(devices=np.array([device]))
    )

  def sample(self, prompts, per_prompt, key, density, run, round, batch):
    assert (run, round) == ('evaluation', 0)
    self.log.append((len(prompts), per_prompt, key, density, batch))
    return [
      [
        examples.rollout(
          reward=float(g < int(p.answer)),
          logp=np.full(5, mean_logp(p, g), np.float32),
          prompt=p.id,
        )
        for g in range(per_prompt)
      ]
      for p in prompts
    ]


def mean_logp(prompt, sample):
  """Nats a token; higher for later prompts and for earlier samples."""
  return -1.0 / (1 + int(prompt.answer)) - sample / 16


PROMPTS = [
  records.Prompt(id=f'p{i}', text='', answer=str(i), family='ab'[i % 2])
  for i in range(5)
]
CONFIG = examples.run_config(
  **{
    'eval.samples': 4,
    'eval.batch': 2,
    'eval.temperature': 0.5,
    'eval.completions': 3,
  }
).eval


def evaluate(*names, prompts=PROMPTS):
  """The evaluations of these policies, and the calls of their workers."""
  log = []
  evaluations = evaluation.evaluate(
    {name: Worker(name, name, log) for name in names},
    prompts,
    CONFIG,
    {name: jax.random.key(i) for i, name in enumerate(names)},
    rounds=7,
  )
  return evaluations, log


@pytest.fixture(scope='module')
def of_x():
  evaluations, _ = evaluate('x')
  return evaluations['x']


def test_accuracy_is_the_mean_over_prompts_and_samples(of_x):
  assert (of_x.policy, of_x.rounds) == ('x', 7)
  assert of_x.accuracy == {
    'all': pytest.approx((0 + 1 + 2 + 3 + 4) / 20),
    'a': pytest.approx((0 + 2 + 4) / 12),
    'b': pytest.approx((1 + 3) / 8),
  }


def test_the_error_is_that_of_a_mean_over_prompts(of_x):
  # The shares 0, 1/4, ... 1 of five prompts have the variance (10 / 16) / 4.
  assert of_x.error == {
    'all': pytest.approx((10 / 16 / 4 / 5) ** 0.5),
    'a': pytest.approx(0.5 / 3**0.5),
    'b': pytest.approx(0.125**0.5 / 2**0.5),
  }
  alone, _ = evaluate('x', prompts=PROMPTS[:1])
  assert alone['x'].error == {'all': None, 'a': None}


def test_every_policy_samples_all_prompts_with_a_key_of_its_own():
  evaluations, log = evaluate('x', 'y')
  assert [*evaluations] == ['x', 'y']
  assert evaluations['x'].accuracy == evaluations['y'].accuracy
  density = drawing.Density(temperature=0.5)
  assert [(n, g, d, b) for n, g, _, d, b in log] == [(5, 4, density, 2)] * 2
  keys = {tuple(jax.random.key_data(key).tolist()) for _, _, key, *_ in log}
  assert len(keys) == 2


def test_the_best_completions_solve_the_hardest_prompts(of_x):
  best = [(c.answer, c.reward, c.verdict) for c in of_x.best]
  assert best == [(answer, 1.0, 'correct') for answer in '123']


def test_every_family_comes_before_any_comes_twice():
  prompts = [
    msgspec.structs.replace(p, family='sums' if p.id < 'p3' else 'sorting')
    for p in PROMPTS
  ]
  evaluations, _ = evaluate('x', prompts=prompts)
  # The prompts 1 and 2 are sums, and harder than 3.
  assert [c.answer for c in evaluations['x'].best] == ['1', '3', '2']


def test_the_worst_completions_are_the_likeliest_of_the_wrong_ones(of_x):
  # All samples of prompt 4 are right. The first wrong one is the likeliest.
  assert [(c.answer, c.reward, c.logp) for c in of_x.worst] == [
    ('3', 0.0, pytest.approx(2 * (-1 / 4 - 3 / 16))),
    ('2', 0.0, pytest.approx(2 * (-1 / 3 - 2 / 16))),
    ('1', 0.0, pytest.approx(2 * (-1 / 2 - 1 / 16))),
  ]
