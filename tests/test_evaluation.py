import jax
import pytest

from mrl_jax import evaluation
from mrl_jax import records
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
      examples.group([float(g < int(p.answer)) for g in range(per_prompt)])
      for p in prompts
    ]


PROMPTS = [
  records.Prompt(id=f'p{i}', text='', answer=str(i), family='ab'[i % 2])
  for i in range(5)
]


def evaluate(*names):
  config = examples.run_config(
    **{'eval.samples': 4, 'eval.batch': 2, 'eval.temperature': 0.5}
  ).eval
  log = []
  workers = {name: Fake(log) for name in names}
  keys = {name: jax.random.key(i) for i, name in enumerate(names)}
  return evaluation.accuracy(workers, PROMPTS, None, config, keys), log


def test_accuracy_is_the_mean_over_prompts_and_samples():
  found, log = evaluate('x')
  assert found['x'] == {
    'all': pytest.approx((0 + 1 + 2 + 3 + 4) / 20),
    'a': pytest.approx((0 + 2 + 4) / 12),
    'b': pytest.approx((1 + 3) / 8),
  }
  started = [entry for entry in log if entry != 'finish']
  # One shape, the last batch filled up.
  assert [(n, g, t) for n, g, _, t in started] == [(2, 4, 0.5)] * 3
  keys = {tuple(jax.random.key_data(key).tolist()) for _, _, key, _ in started}
  assert len(keys) == 3


def test_policies_sample_at_the_same_time():
  found, log = evaluate('x', 'y')
  assert found['x'] == found['y']
  for start in range(0, len(log), 4):
    assert 'finish' not in log[start : start + 2]
    assert log[start + 2 : start + 4] == ['finish', 'finish']
