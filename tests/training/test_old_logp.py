"""Denominators of own ratios where sampler and trainer differ."""

import jax
import pytest

from mrl_jax.update import state
from tests import runs

BFLOAT16 = {'train.mini_batches': 1, 'sample.temperature': 0.7} | {
  f'policies.{name}.model.{key}': value
  for name in ('llama', 'gemma')
  for key, value in (('dtype', 'bfloat16'), ('num_layers', 3))
}
METHODS = ('gspo', 'prp', 'hacpo')  # By sequence, with peers' rows, and both.
CLIP = 4e-4  # GSPO's and HACPO's upper one.


@pytest.mark.slow
@pytest.mark.parametrize('method', METHODS)
def test_first_ratios_are_exactly_one_in_bfloat16(method):
  config = runs.config(method, **BFLOAT16)
  for (row,) in runs.play(f'bfloat16-{method}', config, 1).rows.values():
    assert (row.own.ratio, row.own.max_ratio) == (1.0, 1.0)
    assert (row.own.clip_fraction, row.own.ess_fraction) == (0.0, 1.0)
    # Both score the policy at the temperature of sampling.
    assert 1.0 < row.mismatch.max_ratio < 1.05


@pytest.mark.slow
def test_by_the_sampler_ratios_leave_the_clip_before_any_update(monkeypatch):
  # Weights that make logits as large as those of a trained model.
  random_params = state.StateSpec.random_params
  monkeypatch.setattr(
    state.StateSpec,
    'random_params',
    lambda *args: jax.tree.map(lambda x: 3 * x, random_params(*args)),
  )
  wide = {'method.kl_weight': 0.001, 'warm_start.steps': 0} | {
    f'policies.{name}.model.{key}': value
    for name in ('llama', 'gemma')
    for key, value in (('num_layers', 6), ('d_model', 128))
  }
  largest = {}
  for choice in ('trainer', 'sampler'):
    changes = {**BFLOAT16, **wide, 'train.old_logp': choice}
    rows = runs.play(f'wide-{choice}', runs.config('gspo', **changes), 1).rows
    largest[choice] = max(row.own.max_ratio for (row,) in rows.values())
    assert all(row.mismatch.max_ratio > 1.01 for (row,) in rows.values())
  assert largest['trainer'] == 1.0
  assert largest['sampler'] > 1 + CLIP
