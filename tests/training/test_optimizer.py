import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mrl_jax.training import optimizer
from tests import examples


def config(**changes):
  built = examples.run_config().train.optimizer
  built.update(changes)
  return built


def rates(settings, steps):
  """The size of each step under a constant gradient."""
  built = optimizer.build(settings, steps)
  params = jnp.zeros(1)
  state, sizes = built.init(params), []
  for _ in range(steps):
    change, state = built.update(jnp.ones(1), state, params)
    sizes.append(-float(change[0]))
  return sizes


def test_the_rate_warms_up_and_falls_to_its_last_fraction():
  settings = config(learning_rate=1.0, warmup_steps=4, final_fraction=0.25)
  sizes = rates(settings, 101)
  np.testing.assert_allclose(sizes[:5], [0, 0.25, 0.5, 0.75, 1.0], atol=1e-4)
  assert sizes[-1] == pytest.approx(0.25, abs=0.01)
  assert sizes[4:] == sorted(sizes[4:], reverse=True)


def test_without_warm_up_it_begins_at_the_peak():
  settings = config(learning_rate=1.0, warmup_steps=0, final_fraction=0.5)
  assert rates(settings, 3)[0] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize('steps', [1, 2, 20])
def test_few_steps_are_enough(steps):
  assert len(rates(config(warmup_steps=20), steps)) == steps


def test_gradients_are_clipped_by_their_global_norm():
  settings = config(clip_norm=1.0, b1=0.0, b2=0.0)
  built = optimizer.build(settings, 10)
  clip = optax.clip_by_global_norm(1.0)
  gradient = jnp.array([3.0, 4.0])
  state = built.init(gradient)
  _, state = built.update(gradient, state, jnp.zeros(2))
  clipped, _ = clip.update(gradient, clip.init(gradient))
  np.testing.assert_allclose(state[1][0].mu, clipped, rtol=1e-6)
