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
from mrl_jax.update import objectives
from mrl_jax.update import state as state_lib
from mrl_jax.update import update
from tests import examples

MODEL = examples.model(num_layers=1)
# With Adam's own epsilon, the sign of a gradient of 1e-9 would be a full step.
OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3)
)
SLOTS = 16
ONE = (1, 1, 1)


def mesh(*shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), config.MESH_AXES)


def spec(shape=ONE, model=MODEL, **changes):
  return state_lib.StateSpec(
    model=model, mesh=mesh(*shape), optimizer=OPTIMIZER, **changes
  )


def surrogate(scores, rows):
  ratio_BS = jnp.exp(scores.logp_BS - rows.old_logp_BS)
  objective_BS = grpo.clipped_surrogate(ratio_BS, rows.advantage_BS, 0.2, 0.28)
  return objective_BS, {
    'tokens': (rows.weight_BS > 0).sum(),
    'logp': scores.logp_BS.sum(),
    'advantage': rows.advantage_BS.sum(),
    'max_advantage': rows.advantage_BS.max(),
  }


SURROGATE = objectives.Objective(surrogate)


@functools.cache
def built(shape, reference=False):
  made = spec(shape, reference=reference)
  state = made.fresh(made.random_params(jax.random.key(0)))
  step = update.Update(made, {'own': SURROGATE, 'peer': SURROGATE}, 64)
  return jax.device_get(state), made.shardings(), step


def run(shape, *batches):
  """The parameters and statistics after updates on a mesh of this shape."""
  state, places, step = built(shape)
  state = jax.device_put(state, places)
  for parts in batches:
    state, statistics = step(state, parts)
  params, statistics = jax.device_get((state.params, statistics))
  return params, update.joined(statistics)


@functools.cache
def gradient():
  return gradient_of(MODEL)


def gradient_of(model):
  """Maps (params, micro-batches) to (gradients, statistics of the last)."""
  zeros = update.build_zeros(model, mesh(*ONE))
  add = update.build_gradient(model, mesh(*ONE), SURROGATE, 64)

  def gradient(params, micro_batches):
    grads = zeros()
    for rows in micro_batches:
      grads, statistics = add(grads, params, decoder.NO_PARAMS, rows)
    return grads, statistics

  return gradient


def rows(micro=1, size=8, seed=0) -> list[objectives.PackedRows]:
  """Micro-batches of packed rows, each with two rows and some padding."""
  rng = np.random.default_rng(seed)
  names = ['tokens', 'row', 'old_logp', 'advantage', 'weight', 'mask', 'chunk']
  x = {f'{name}_BS': np.zeros((size, SLOTS), np.float32) for name in names}
  for b in range(size):
    first = 0
    for row in (1, 2):
      start = first + rng.integers(1, 4)
      end = start + rng.integers(2, 6)
      x['row_BS'][b, first:end] = row
      x['tokens_BS'][b, first:end] = rng.integers(0, 48, end - first)
      x['old_logp_BS'][b, start:end] = -rng.random(end - start) - 3
      x['advantage_BS'][b, start:end] = rng.normal()
      x['mask_BS'][b, start:end] = True
      x['chunk_BS'][b, start:end] = np.arange(start, end)
      first = end
  x['weight_BS'] = x['mask_BS'] / x['mask_BS'].sum()
  x['mini_batch_B1'] = np.zeros((size, 1), np.float32)
  for name in ('tokens_BS', 'row_BS', 'chunk_BS'):
    x[name] = x[name].astype(np.int32)
  x['mask_BS'] = x['mask_BS'] > 0
  cut = {name: np.split(value, micro) for name, value in x.items()}
  return [
    objectives.PackedRows(**{name: cut[name][m] for name in x})
    for m in range(micro)
  ]


def assert_close(a, b, atol=2e-5):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=atol)


def assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('shape', [(1, 8, 1), (2, 2, 2), (1, 4, 2)])
def test_eight_devices_compute_what_one_computes(shape):
  batches = [{'own': rows(seed=s)} for s in range(3)]
  params, statistics = run(ONE, *batches)
  sharded, sharded_statistics = run(shape, *batches)
  assert_close(params, sharded)
  assert_close(statistics, sharded_statistics, atol=1e-4)


def test_micro_batches_change_nothing():
  params, statistics = run(ONE, {'own': rows()})
  for micro in (2, 4):
    cut, cut_statistics = run(ONE, {'own': rows(micro)})
    assert_close(params, cut)
    assert_close(statistics, cut_statistics)


def test_gradients_of_parts_are_added():
  first, second = rows(2, size=16)
  params, _ = run(ONE, {'own': [first, second]})
  apart, statistics = run(ONE, {'own': [first], 'peer': [second]})
  assert_close(params, apart)
  assert {'own/loss', 'peer/loss', 'grad_norm'} <= set(statistics)


def test_padding_and_rows_of_no_weight_change_nothing():
  params, _ = run(ONE, {'own': rows()})
  (packed,) = rows()
  padded = jax.tree.map(lambda x: np.concatenate([x, 0 * x]), packed)
  again, _ = run(ONE, {'own': [padded]})
  assert_close(params, again)


@pytest.mark.parametrize('shape', [ONE, (1, 8, 1)])
def test_the_same_update_twice_is_the_same_bit_for_bit(shape):
  batches = [{'own': rows(seed=s), 'peer': rows(seed=9)} for s in range(2)]
  assert_same(run(shape, *batches), run(shape, *batches))


def test_the_objective_rises_with_updates_and_the_loss_is_its_negative():
  _, first = run(ONE, {'own': rows()})
  _, last = run(ONE, *[{'own': rows()}] * 5)
  assert last['own/loss'] < first['own/loss']
  # All ratios times advantages, clipped, by hand.
  (packed,) = rows()
  state, _, _ = built(ONE)
  network = nnx.merge(decoder.abstract(MODEL)[0], state.params)
  scores = update._scores(network, packed, 64, 1.0)
  objective_BS, _ = surrogate(scores, packed)
  expected = -(packed.weight_BS * objective_BS).sum()
  np.testing.assert_allclose(first['own/loss'], expected, rtol=1e-5)


def test_the_gradient_is_that_of_finite_differences():
  # A step along the gradient moves the loss by -rate |gradient|^2.
  rate = 1e-3
  state, _, _ = built(ONE)
  with jax.set_mesh(mesh(*ONE)):
    grads, before = gradient()(state.params, rows())
    moved = jax.tree.map(lambda p, g: p - rate * g, state.params, grads)
    _, after = gradient()(moved, rows())
  fall = float(before['loss'] - after['loss'])
  square = float(optax.global_norm(grads)) ** 2
  assert fall == pytest.approx(rate * square, rel=0.05)


def test_an_objective_may_read_entropies():
  entropy = objectives.Objective(
    lambda scores, rows: (0.5 * scores.entropy_BS, {}), reads_entropy=True
  )
  made = spec()
  step = update.Update(made, {'own': entropy}, 64)
  state = made.fresh(made.random_params(jax.random.key(0)))
  entropies = []
  for _ in range(3):
    state, statistics = step(state, {'own': rows()})
    # The weights sum to 1, so that this is a mean over tokens.
    entropies.append(-float(statistics['own/loss'][0]) / 0.5)
  assert 0 < entropies[0] < entropies[1] < entropies[2]
  assert entropies[2] < np.log(MODEL.vocab_size)


def test_statistics_are_sums_or_maxima_over_micro_batches():
  _, statistics = run(ONE, {'own': rows(4)})
  advantages = np.concatenate([part.advantage_BS for part in rows(4)])
  np.testing.assert_allclose(
    statistics['own/max_advantage'], advantages.max(), rtol=1e-6
  )
  np.testing.assert_allclose(
    statistics['own/advantage'], advantages.sum(), rtol=1e-5
  )
  assert statistics['own/tokens'] == (rows()[0].weight_BS > 0).sum()


def test_an_update_without_signal_is_a_step_without_a_gradient():
  before = jax.device_get(built(ONE)[0])
  state, places, step = built(ONE)
  state, statistics = step(jax.device_put(state, places), {'own': []})
  assert jax.device_get(statistics) == {'grad_norm': [0]}
  assert int(state.step) == int(before.step) + 1
  assert_same(before.params, jax.device_get(state.params))


def test_the_reference_stays_as_the_policy_was():
  before, places, step = built((1, 4, 2), reference=True)
  state, _ = step(jax.device_put(before, places), {'own': rows()})
  assert_same(before.params, state.reference)
  reference, params = map(jax.tree.leaves, (state.reference, state.params))
  for x, y in zip(reference, params, strict=True):
    assert x.sharding == y.sharding
  assert any((x != y).any() for x, y in zip(reference, params, strict=True))


def test_the_scorer_gives_the_log_probabilities_that_the_update_sees():
  place = mesh(1, 4, 2)
  score = update.build_scorer(MODEL, place, 64)
  state, places, step = built((1, 4, 2), reference=True)
  state, packed = jax.device_put(state, places), rows(2)
  with jax.set_mesh(place):
    found = [score(state.params, decoder.NO_PARAMS, part) for part in packed]
  logp_BS = np.concatenate(jax.device_get(found))
  assert logp_BS.shape == (8, SLOTS)
  mask_BS = np.concatenate([part.mask_BS for part in packed])
  np.testing.assert_array_equal(logp_BS < 0, mask_BS)  # Not at prompts.
  _, statistics = step(state, {'own': packed})
  logp = sum(jax.device_get(statistics['own/logp']))
  np.testing.assert_allclose(logp, logp_BS.sum(), rtol=1e-5)


def test_only_adapters_learn():
  lora = Lora(rank=2, alpha=4, target_modules=('q_proj', 'down_proj'))
  made = spec(
    (1, 2, 2), examples.model(num_layers=1, lora=lora, param_dtype='bfloat16')
  )
  _, params, frozen = decoder.split(decoder.Decoder(made.model, nnx.Rngs(0)))
  places = sharding.params(frozen, made.mesh)
  frozen = jax.device_put(frozen, places)
  before = jax.device_get((params, frozen))
  state = made.fresh(params)
  step = update.Update(made, {'own': SURROGATE}, 64)
  for _ in range(2):  # B begins as zeros, and A then has no gradient.
    state, _ = step(state, {'own': rows()}, frozen)
  after = jax.device_get((state.params, frozen))
  for x, y in zip(*map(jax.tree.leaves, (before[0], after[0])), strict=True):
    assert y.dtype == np.float32
    assert (x != y).any()
  for x in jax.tree.leaves(before[1]):
    assert x.dtype == 'bfloat16'
  assert_same(before[1], after[1])


def test_micro_batches_of_bfloat16_parameters_are_summed_in_float32():
  model = examples.model(num_layers=1, param_dtype='bfloat16')
  params = spec(model=model).random_params(jax.random.key(0))
  summed = gradient_of(model)
  whole, parts = (summed(params, rows(micro))[0] for micro in (1, 8))
  assert {str(x.dtype) for x in jax.tree.leaves(parts)} == {'float32'}
  for x, y in zip(*map(jax.tree.leaves, (whole, parts)), strict=True):
    np.testing.assert_allclose(x, y, atol=0.02 * np.abs(x).max())
