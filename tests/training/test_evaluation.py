import json

import jax
import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.training import evaluation
from tests import examples


class Fake:
  """A policy that is right on as many samples as the prompt's answer says."""

  def __init__(self, log):
    self.log = log

  def start_sampling(self, prompts, per_prompt, key, temperature):
    self.log.append((len(prompts), per_prompt, key, temperature))
    return prompts, per_prompt

  def finish_sampling(self, sampling, judge, run, round):
    self.log.append('finish')
    prompts, per_prompt = sampling
    return [
      [
        examples.rollout(
          reward=float(g < int(p.answer)),
          logp=np.full(5, sureness(p, g), np.float32),
          prompt=p.id,
        )
        for g in range(per_prompt)
      ]
      for p in prompts
    ]


def sureness(prompt, sample):
  """Nats a token; more of later prompts and of earlier samples."""
  return -1.0 / (1 + int(prompt.answer)) - sample / 16


PROMPTS = [
  records.Prompt(id=f'p{i}', text='', answer=str(i), family='ab'[i % 2])
  for i in range(5)
]


def evaluate(*names, prompts=PROMPTS):
  config = examples.run_config(
    **{
      'eval.samples': 4,
      'eval.batch': 2,
      'eval.temperature': 0.5,
      'eval.completions': 3,
    }
  ).eval
  log = []
  workers = {name: Fake(log) for name in names}
  keys = {name: jax.random.key(i) for i, name in enumerate(names)}
  return evaluation.evaluate(workers, prompts, None, config, keys), log


def test_accuracy_is_the_mean_over_prompts_and_samples():
  found, log = evaluate('x')
  assert found['x'].accuracy == {
    'all': pytest.approx((0 + 1 + 2 + 3 + 4) / 20),
    'a': pytest.approx((0 + 2 + 4) / 12),
    'b': pytest.approx((1 + 3) / 8),
  }
  started = [entry for entry in log if entry != 'finish']
  # One shape, the last batch filled up.
  assert [(n, g, t) for n, g, _, t in started] == [(2, 4, 0.5)] * 3
  keys = {tuple(jax.random.key_data(key).tolist()) for _, _, key, _ in started}
  assert len(keys) == 3


def test_the_error_is_that_of_a_mean_over_prompts():
  found, _ = evaluate('x')
  # Shares 0, 1/4, ... 1 of five prompts: their variance is 10/16 over 4.
  assert found['x'].error == {
    'all': pytest.approx((10 / 16 / 4 / 5) ** 0.5),
    'a': pytest.approx(0.5 / 3**0.5),
    'b': pytest.approx(0.125**0.5 / 2**0.5),
  }
  found, _ = evaluate('x', prompts=PROMPTS[:1])
  assert found['x'].error == {'all': None, 'a': None}


def test_the_best_are_of_the_hardest_prompts_that_are_solved():
  best = evaluate('x')[0]['x'].best
  assert [(c['answer'], c['reward']) for c in best] == [
    ('1', 1.0),
    ('2', 1.0),
    ('3', 1.0),
  ]
  assert best[0]['verdict'] == 'correct'


def test_those_of_other_families_come_first():
  prompts = [
    msgspec.structs.replace(p, family='sums' if p.id < 'p3' else 'sorting')
    for p in PROMPTS
  ]
  found, _ = evaluate('x', prompts=prompts)
  # p1 and p2 are sums, and solved less often.
  assert [c['answer'] for c in found['x'].best] == ['1', '3', '2']


def test_the_worst_are_those_of_which_the_policy_is_surest():
  worst = evaluate('x')[0]['x'].worst
  # Of p4 all are right. Of a prompt, the first wrong sample is the surest.
  assert [(c['answer'], c['reward'], c['logp']) for c in worst] == [
    ('3', 0.0, pytest.approx(-1 / 4 - 3 / 16)),
    ('2', 0.0, pytest.approx(-1 / 3 - 2 / 16)),
    ('1', 0.0, pytest.approx(-1 / 2 - 1 / 16)),
  ]


def test_completions_are_plain_values():
  (first, *_) = evaluate('x')[0]['x'].best
  assert first.keys() == {'prompt', 'answer', 'completion', 'reward', 'verdict',
                          'finish', 'tokens', 'logp'}  # fmt: skip
  assert json.loads(json.dumps(first)) == first


def test_policies_sample_at_the_same_time():
  found, log = evaluate('x', 'y')
  assert found['x'] == found['y']
  for start in range(0, len(log), 4):
    assert 'finish' not in log[start : start + 2]
    assert log[start + 2 : start + 4] == ['finish', 'finish']
