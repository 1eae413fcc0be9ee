import jax
import pytest

from mrl_jax import evaluation
from mrl_jax import records
from tests import examples


class Fake:
  """A policy that is right on as many samples as the prompt's answer says."""

  def __init__(self):
    self.batches = []

  def start_sampling(self, prompts, per_prompt, key, temperature):
    self.batches.append((len(prompts), per_prompt, key, temperature))
    return prompts, per_prompt

  def finish_sampling(self, sampling, judge, run, round):
    prompts, per_prompt = sampling
    return [
      examples.group([float(g < int(p.answer)) for g in range(per_prompt)])
      for p in prompts
    ]


PROMPTS = [
  records.Prompt(id=f'p{i}', text='', answer=str(i), family='ab'[i % 2])
  for i in range(5)
]


def test_accuracy_is_the_mean_over_prompts_and_samples():
  fake = Fake()
  found = evaluation.accuracy(
    fake,
    PROMPTS,
    judge=None,
    samples=4,
    batch=2,
    temperature=0.5,
    key=jax.random.key(0),
  )
  assert found == {
    'all': pytest.approx((0 + 1 + 2 + 3 + 4) / 20),
    'a': pytest.approx((0 + 2 + 4) / 12),
    'b': pytest.approx((1 + 3) / 8),
  }
  sizes = [(n, samples, t) for n, samples, _, t in fake.batches]
  assert sizes == [(2, 4, 0.5)] * 3  # One shape, the last batch filled up.
  keys = {
    tuple(jax.random.key_data(key).tolist()) for _, _, key, _ in fake.batches
  }
  assert len(keys) == 3
