import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax
import pytest

from mrl_jax import config
from mrl_jax.architecture import Lora
from mrl_jax.losses import grpo
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from mrl_jax.update import state as state_lib
from mrl_jax.update import update
from tests import examples

MODEL = examples.model()
# With Adam's own epsilon, the sign of a gradient of 1e-9 would be a full step.
OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3)
)
LENGTH, SLOTS = 5, 9


def mesh(*shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), config.MESH_AXES)


def surrogate(logp_BT, rows):
  ratio_BT = jnp.exp(logp_BT - rows.old_logp_BT)
  objective_BT = grpo.clipped_surrogate(ratio_BT, rows.advantage_B1, 0.2, 0.28)
  return objective_BT, {'tokens': (rows.weight_BT > 0).sum()}


@functools.cache
def built(shape):
  place = mesh(*shape)
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  state = state_lib.fresh(params, MODEL, OPTIMIZER, place)
  step = update.build(
    MODEL, OPTIMIZER, place, {'own': surrogate, 'peer': surrogate}, 64
  )
  return (
    jax.device_get(state),
    state_lib.shardings(MODEL, OPTIMIZER, place),
    step,
  )


def run(shape, *batches):
  """The parameters and statistics after updates on a mesh of this shape."""
  state, places, step = built(shape)
  state = jax.device_put(state, places)
  for parts in batches:
    state, statistics = step(state, parts)
  return jax.device_get((state.params, statistics))


def rows(micro=1, size=8, seed=0) -> update.Rows:
  rng = np.random.default_rng(seed)
  valid_BS = np.ones((size, SLOTS), bool)
  valid_BS[:, :2] = rng.random((size, 2)) < 0.5
  valid_BS[:, -1] = rng.random(size) < 0.5
  weight_BT = valid_BS[:, -LENGTH:] / valid_BS[:, -LENGTH:].sum()
  old_logp_BT = -rng.random((size, LENGTH)) - 3
  flat = {
    'tokens_BS': rng.integers(0, 48, (size, SLOTS)).astype(np.int32),
    'valid_BS': valid_BS,
    'old_logp_BT': old_logp_BT.astype(np.float32),
    'advantage_B1': rng.normal(size=(size, 1)).astype(np.float32),
    'weight_BT': weight_BT.astype(np.float32),
    'mask_BT': valid_BS[:, -LENGTH:],
    'chunk_BT': np.tile(np.arange(LENGTH, dtype=np.int32), (size, 1)),
    'mini_batch_B1': np.zeros((size, 1), np.float32),
  }
  return update.Rows(
    **{k: x.reshape(micro, -1, *x.shape[1:]) for k, x in flat.items()}
  )


def assert_close(a, b, atol=2e-5):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=atol)


@pytest.mark.parametrize('shape', [(1, 8, 1), (2, 2, 2), (1, 4, 2)])
def test_eight_devices_give_what_one_gives(shape):
  batches = [{'own': rows(seed=s)} for s in range(3)]
  params, statistics = run((1, 1, 1), *batches)
  sharded, sharded_statistics = run(shape, *batches)
  assert_close(params, sharded)
  assert_close(statistics, sharded_statistics, atol=1e-4)


def test_micro_batches_change_nothing():
  params, statistics = run((1, 1, 1), {'own': rows()})
  for micro in (2, 4):
    cut, cut_statistics = run((1, 1, 1), {'own': rows(micro)})
    assert_close(params, cut)
    assert_close(statistics, cut_statistics)


def test_parts_are_added():
  both = rows(size=16)
  halves = [
    jax.tree.map(lambda x, part=part: x[:, part], both)
    for part in (slice(0, 8), slice(8, 16))
  ]
  params, _ = run((1, 1, 1), {'own': both})
  apart, statistics = run(
    (1, 1, 1), dict(zip(('own', 'peer'), halves, strict=True))
  )
  assert_close(params, apart)
  assert {'own/loss', 'peer/loss', 'grad_norm'} <= set(statistics)


def test_padding_and_rows_of_no_weight_change_nothing():
  params, _ = run((1, 1, 1), {'own': rows()})
  more = rows()
  padded = update.Rows(
    **{
      name: x if x is None else np.concatenate([x, 0 * x], 1)
      for name, x in vars(more).items()
    }
  )
  again, _ = run((1, 1, 1), {'own': padded})
  assert_close(params, again)


def test_the_same_update_twice_is_the_same_bit_for_bit():
  for shape in ((1, 1, 1), (1, 8, 1)):
    batches = [{'own': rows(seed=s), 'peer': rows(seed=9)} for s in range(2)]
    for x, y in zip(
      jax.tree.leaves(run(shape, *batches)),
      jax.tree.leaves(run(shape, *batches)),
      strict=True,
    ):
      np.testing.assert_array_equal(x, y)


def test_the_loss_falls_on_what_it_is_asked_for():
  _, first = run((1, 1, 1), {'own': rows()})
  _, last = run((1, 1, 1), *[{'own': rows()}] * 5)
  assert last['own/loss'] < first['own/loss']
  assert first['own/tokens'] == (rows().weight_BT > 0).sum()


def test_the_gradient_is_that_of_finite_differences():
  # One step of plain gradient descent moves the loss by -rate |gradient|^2.
  rate = 1e-3
  place = mesh(1, 1, 1)
  step = update.build(MODEL, optax.sgd(rate), place, {'own': surrogate}, 64)
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  state = state_lib.fresh(params, MODEL, optax.sgd(rate), place)
  state, before = step(state, {'own': rows()})
  _, after = step(state, {'own': rows()})
  fall = float(before['own/loss'] - after['own/loss'])
  assert fall == pytest.approx(rate * float(before['grad_norm']) ** 2, rel=0.05)


def test_what_is_to_be_maximised_rises_and_the_loss_is_its_negative():
  def log_likelihood(logp_BT, rows):
    return logp_BT, {'likelihood': (rows.weight_BT * logp_BT).sum()}

  place = mesh(1, 1, 1)
  step = update.build(MODEL, OPTIMIZER, place, {'own': log_likelihood}, 64)
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  state = state_lib.fresh(params, MODEL, OPTIMIZER, place)
  seen = []
  for _ in range(4):
    state, statistics = step(state, {'own': rows()})
    seen.append(float(statistics['own/likelihood']))
    assert statistics['own/loss'] == pytest.approx(-seen[-1])
  assert seen == sorted(seen)
  assert seen[-1] > seen[0] + 0.1


def test_entropy_is_a_bonus_where_it_has_a_weight():
  def nothing(logp_BT, rows):
    del rows
    return 0 * logp_BT, {}

  place = mesh(1, 1, 1)
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  entropies = {}
  for weight in (0.0, 0.5):
    step = update.build(
      MODEL, OPTIMIZER, place, {'own': nothing}, 64, entropy_weight=weight
    )
    state = state_lib.fresh(params, MODEL, OPTIMIZER, place)
    entropies[weight] = []
    for _ in range(3):
      state, statistics = step(state, {'own': rows()})
      # The weights sum to 1, so that this is a mean over tokens.
      entropies[weight].append(-float(statistics['own/loss']) / 0.5)
  assert entropies[0.0] == [0.0] * 3
  assert 0 < entropies[0.5][0] < np.log(MODEL.vocab_size)
  assert entropies[0.5] == sorted(set(entropies[0.5]))


def test_peers_rows_have_no_entropy_bonus():
  def nothing(logp_BT, rows):
    del rows
    return 0 * logp_BT, {}

  place = mesh(1, 1, 1)
  both = {'own': nothing, 'peer': nothing}
  step = update.build(MODEL, OPTIMIZER, place, both, 64, entropy_weight=0.5)
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  state = state_lib.fresh(params, MODEL, OPTIMIZER, place)
  _, statistics = step(state, {'own': rows(), 'peer': rows()})
  assert statistics['own/loss'] < 0
  assert statistics['peer/loss'] == 0


def test_some_statistics_are_maxima():
  def spread(logp_BT, rows):
    return logp_BT, {
      'max_advantage': rows.advantage_B1.max(),
      'advantage': rows.advantage_B1.sum(),
    }

  place = mesh(1, 1, 1)
  step = update.build(MODEL, OPTIMIZER, place, {'own': spread}, 64)
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  state = state_lib.fresh(params, MODEL, OPTIMIZER, place)
  _, statistics = step(state, {'own': rows(4)})
  advantages = rows(4).advantage_B1
  np.testing.assert_allclose(
    statistics['own/max_advantage'], advantages.max(), rtol=1e-6
  )
  np.testing.assert_allclose(
    statistics['own/advantage'], advantages.sum(), rtol=1e-5
  )


def test_the_reference_stays_as_the_policy_was():
  place = mesh(1, 4, 2)
  step = update.build(
    MODEL, OPTIMIZER, place, {'own': surrogate}, 64, reference=True
  )
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  before = jax.device_get(params)
  state = state_lib.fresh(params, MODEL, OPTIMIZER, place, reference=True)
  state, _ = step(state, {'own': rows()})
  for x, y, z in zip(
    *map(jax.tree.leaves, (before, state.reference, state.params)), strict=True
  ):
    np.testing.assert_array_equal(x, y)
    assert y.sharding == z.sharding
  assert any(
    (x != y).any()
    for x, y in zip(
      jax.tree.leaves(before),
      jax.tree.leaves(jax.device_get(state.params)),
      strict=True,
    )
  )


def test_scores_are_those_that_the_update_sees():
  place = mesh(1, 4, 2)
  seen = update.build_scorer(MODEL, place, 64)
  params = state_lib.init_params(MODEL, place, jax.random.key(0))
  packed = rows(2)
  with jax.set_mesh(place):
    logp_MBT = seen(params, decoder.NO_PARAMS, packed)
  assert logp_MBT.shape == packed.old_logp_BT.shape

  def total(logp_BT, rows):
    return logp_BT, {'logp': logp_BT.sum()}

  step = update.build(MODEL, OPTIMIZER, place, {'own': total}, 64)
  state = state_lib.fresh(params, MODEL, OPTIMIZER, place)
  _, statistics = step(state, {'own': packed})
  np.testing.assert_allclose(statistics['own/logp'], logp_MBT.sum(), rtol=1e-5)


def test_only_adapters_learn():
  lora = Lora(rank=2, alpha=4, target_modules=('q_proj', 'down_proj'))
  model = examples.model(lora=lora, param_dtype='bfloat16')
  place = mesh(1, 2, 2)
  _, params, frozen = decoder.split(decoder.Decoder(model, nnx.Rngs(0)))
  places = sharding.params(frozen, place, sharding.TRAIN)
  frozen = jax.device_put(frozen, places)
  before = jax.device_get((params, frozen))
  state = state_lib.fresh(params, model, OPTIMIZER, place)
  step = update.build(model, OPTIMIZER, place, {'own': surrogate}, 64)
  for _ in range(2):  # B begins as zeros, and A then has no gradient.
    state, _ = step(state, {'own': rows()}, frozen)
  after = jax.device_get((state.params, frozen))
  for x, y in zip(*map(jax.tree.leaves, (before[0], after[0])), strict=True):
    assert y.dtype == np.float32
    assert (x != y).any()
  for x, y in zip(*map(jax.tree.leaves, (before[1], after[1])), strict=True):
    assert x.dtype == 'bfloat16'
    np.testing.assert_array_equal(x, y)


def test_micro_batches_of_bfloat16_parameters_are_summed_in_float32():
  model = examples.model(param_dtype='bfloat16')
  place = mesh(1, 1, 1)
  params = state_lib.init_params(model, place, jax.random.key(0))
  gradient = update.build_gradient(model, place, surrogate, 64)
  whole, parts = (
    gradient(params, decoder.NO_PARAMS, rows(micro))[0] for micro in (1, 8)
  )
  assert {str(x.dtype) for x in jax.tree.leaves(parts)} == {'float32'}
  for x, y in zip(*map(jax.tree.leaves, (whole, parts)), strict=True):
    np.testing.assert_allclose(x, y, atol=0.02 * np.abs(x).max())
