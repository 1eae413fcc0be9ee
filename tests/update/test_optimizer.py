import warnings

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from mrl_jax import config as config_lib
from mrl_jax.models import decoder
from mrl_jax.models import sharding
from mrl_jax.update import objectives
from mrl_jax.update import optimizer
from mrl_jax.update import state as state_lib
from mrl_jax.update import update
from tests import examples

# With D = F, matrices of a layer cannot be told apart by their shapes.
MODEL = examples.model(num_layers=1, d_ff=32)
CONSTANT = {'learning_rate': 0.1, 'warmup_steps': 0, 'final_fraction': 1.0}


def config(**changes):
  built = examples.run_config().train.optimizer
  built.update(changes)
  return built


def rates(steps, **changes):
  """The size of each step under a constant gradient of one parameter."""
  built = optimizer.build(config(**changes), steps)

  def step(state, gradient):
    change, state = built.update(gradient, state, jnp.zeros(1))
    return state, -change[0]

  scan = jax.jit(
    lambda gradients: jax.lax.scan(step, built.init(jnp.zeros(1)), gradients)
  )
  return scan(jnp.ones((steps, 1)))[1].tolist()


def test_the_rate_warms_up_and_decays_to_its_final_fraction():
  sizes = rates(101, learning_rate=1.0, warmup_steps=4, final_fraction=0.25)
  np.testing.assert_allclose(sizes[:5], [0, 0.25, 0.5, 0.75, 1.0], atol=1e-4)
  assert sizes[-1] == pytest.approx(0.25, abs=0.01)
  assert sizes[4:] == sorted(sizes[4:], reverse=True)


@pytest.mark.parametrize('warmup_steps', [0, 20])
def test_one_step_without_warm_up_is_at_the_peak(warmup_steps):
  (size,) = rates(1, learning_rate=1.0, warmup_steps=warmup_steps)
  assert size == pytest.approx(1.0, rel=1e-4)


def test_a_warm_up_longer_than_the_run_ends_with_it():
  sizes = rates(2, learning_rate=1.0, warmup_steps=20)
  np.testing.assert_allclose(sizes, [0.0, 1.0], atol=1e-4)


def test_gradients_are_clipped_by_their_global_norm():
  built = optimizer.build(config(clip_norm=1.0, b1=0.0, b2=0.0), 10)
  gradient = jnp.array([3.0, 4.0])
  [(_, state)] = play(built, jnp.zeros(2), [gradient])
  np.testing.assert_allclose(state[1][0].mu, [0.6, 0.8], rtol=1e-6)


def random(*shape, seed=0):
  """A random matrix whose norm, 0.5, is below that of the clip."""
  x = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(0.5 * x / np.linalg.norm(x), jnp.float32)


def weights(**shapes):
  return {name: random(*shape, seed=7) for name, shape in shapes.items()}


def play(built, params, grads):
  """The parameters and the state after each gradient."""
  update = jax.jit(built.update)
  state, history = jax.jit(built.init)(params), []
  for grad in grads:
    change, state = update(grad, state, params)
    params = optax.apply_updates(params, change)
    history.append((params, state))
  return history


def assert_equal(one, other):
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('state_dtype', ['float32', 'bfloat16'])
def test_the_first_step_of_adamw_by_hand(state_dtype):
  settings = config(**CONSTANT, weight_decay=0.01, state_dtype=state_dtype)
  params, grad = jnp.array([[1.0, -2.0]]), jnp.array([[0.3, -0.4]])
  [(params, state)] = play(optimizer.build(settings, 10), params, [grad])
  # The moments are unbiased: g / sqrt(g^2) is its sign, plus 0.01 p of decay.
  np.testing.assert_allclose(
    params, [[1 - 0.1 * (1 + 0.01), -2 + 0.1 * (1 + 0.02)]], rtol=1e-6
  )
  moments, half = state[1][0], {'float32': 1e-6, 'bfloat16': 2**-8}[state_dtype]
  np.testing.assert_allclose(
    moments.mu.astype(float), [[0.1 * 0.3, -0.1 * 0.4]], rtol=half
  )
  np.testing.assert_allclose(
    moments.nu.astype(float), [[0.01 * 0.09, 0.01 * 0.16]], rtol=half
  )


def test_the_default_is_adamw_of_optax_bit_for_bit():
  settings = config()
  rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 0, 9, 6e-5)
  plain = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(rate, b1=0.9, b2=0.99, weight_decay=0.0),
  )
  params = weights(matrix=(8, 16), vector=(16,))
  grads = [
    {'matrix': random(8, 16, seed=i) * i, 'vector': random(16, seed=i) * i}
    for i in range(1, 6)
  ]
  assert_equal(
    play(optimizer.build(settings, 9), params, grads),
    play(plain, params, grads),
  )


def test_a_bfloat16_state_is_wrong_by_its_rounding_only():
  params = weights(matrix=(8, 16), vector=(16,))
  grads = [{'matrix': random(8, 16), 'vector': random(16)}] * 2
  exact, rounded = (
    play(optimizer.build(config(**CONSTANT, state_dtype=d), 10), params, grads)
    for d in ('float32', 'bfloat16')
  )
  for _, state in rounded:
    moments = state[1][0]
    for moment in (moments.mu, moments.nu):
      assert moment['matrix'].dtype == jnp.bfloat16
      assert moment['vector'].dtype == jnp.float32
  # Rounding changes the moments m and v of the first step by at most 2^-8 of
  # themselves. They are half of the second step's moments, so that its update
  # m / sqrt(v) changes by at most 2^-8 (1/2 + 1/4) of itself.
  assert_equal(exact[0][0], rounded[0][0])
  (before, _), (after, _) = exact
  wrong = np.abs(rounded[1][0]['matrix'] - after['matrix'])
  step = np.abs(after['matrix'] - before['matrix'])
  assert wrong.max() > 0
  assert (wrong <= 0.75 * 2**-8 * step + 1e-7).all()
  assert_equal(rounded[1][0]['vector'], after['vector'])


def test_moments_in_bfloat16_are_computed_in_float32():
  seen = []

  def update(*trees):
    seen.append({x.dtype.name for x in jax.tree.leaves(trees)})
    return trees[:2]

  inner = optax.GradientTransformation(lambda params: params, update)
  wrapped = optimizer.stored_as(jnp.bfloat16, inner)
  params = {'moment': jnp.ones((1, 1), 'bfloat16'), 'count': jnp.int32(1)}
  _, state = wrapped.update(params, wrapped.init(params), params)
  assert seen == [{'float32', 'int32'}]
  assert state['moment'].dtype == jnp.bfloat16


@pytest.mark.parametrize('name', optimizer.OPTIMIZERS)
def test_bfloat16_parameters_are_updated_in_float32_and_in_place(name):
  settings = config(**CONSTANT, name=name, state_dtype='bfloat16')
  built = optimizer.build(settings, 10)
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), matrices('q_flat'))
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
  states = [jax.jit(built.init)(params) for params in (narrow, wide)]
  assert_equal(*states)
  update = jax.jit(built.update, donate_argnums=1)
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # Raised if a donated buffer is not used.
    change, state = update(narrow, states[0], narrow)
  assert_equal((change, state), update(wide, states[1], wide))
  assert all(x.is_deleted() for x in jax.tree.leaves(states[0]) if x.ndim > 1)
  params = optax.apply_updates(narrow, change)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}


MATRICES = {
  'q': ((4, 2, 4), ('embed', 'heads', 'head')),
  'o': ((2, 4, 4), ('heads', 'head', 'embed')),
  'q_flat': ((4, 8), ('embed', 'mlp')),
  'o_flat': ((8, 4), ('mlp', 'embed')),
  'a': ((2, 4, 2), ('heads', 'head', 'rank')),
}
OTHERS = {
  'table': ((6, 4), ('vocab', 'embed')),
  'bias': ((4,), ('embed',)),
  'heads_bias': ((2, 4), ('heads', 'head')),
}


def matrices(*names):
  """Random parameters whose axes are named as in a decoder."""
  shapes = {**MATRICES, **OTHERS}
  return nnx.State(
    {n: nnx.Param(random(*shapes[n][0]), axes=shapes[n][1]) for n in names}
  )


def step(name, grads, **changes):
  """The first update, by name, of parameters that equal their gradients."""
  settings = config(**CONSTANT, name=name, clip_norm=1e3, **changes)
  built = optimizer.build(settings, 10)
  change, _ = jax.jit(lambda x: built.update(x, built.init(x), x))(grads)
  return {name: x.get_value() for name, x in change.items()}


def test_muon_treats_the_heads_of_a_projection_as_one_matrix():
  muon = step('muon', matrices(*MATRICES, *OTHERS), weight_decay=0.1)
  decay = {n: 0.1 * 0.1 * x[...] for n, x in matrices(*MATRICES).items()}
  # The same random numbers in both shapes.
  for name in ('q', 'o'):
    flat = muon[f'{name}_flat']
    np.testing.assert_allclose(
      muon[name].reshape(flat.shape), flat, rtol=1e-4, atol=1e-6
    )
  # Updates are orthogonal, and as large as AdamW's: 0.2 a value times the rate.
  for name in ('q_flat', 'o_flat', 'a'):
    matrix = (muon[name] + decay[name]).reshape(-1, muon[name].shape[-1])
    size = 0.1 * 0.2 * max(matrix.shape) ** 0.5
    values = np.linalg.svd(matrix, compute_uv=False) / size
    assert 0.5 < values.min() < values.max() < 1.5, name
  adamw = step('adamw', matrices(*OTHERS), weight_decay=0.1)
  for name, change in adamw.items():
    np.testing.assert_allclose(muon[name], change, rtol=1e-6)


def test_the_first_step_of_adafactor_by_hand():
  # The squares g^2 have rank one, so that the product of their row and column
  # means over their mean is exact, and the step is sign(g); then 0.1 p of decay.
  grad = np.outer(np.arange(1, 33), np.arange(33, 65)) / 1e5
  grad[::2] *= -1
  params = nnx.State({'gate': nnx.Param(jnp.asarray(grad, jnp.float32))})
  change = step('adafactor', params, weight_decay=0.1)['gate']
  np.testing.assert_allclose(
    change, -0.1 * (np.sign(grad) + 0.1 * grad), rtol=1e-4
  )


@pytest.mark.parametrize('name', optimizer.OPTIMIZERS)
def test_a_quadratic_loss_falls(name):
  settings = config(
    name=name, state_dtype='bfloat16', learning_rate=0.02, final_fraction=0.1
  )
  built = optimizer.build(settings, 60)
  params = nnx.State({'gate': nnx.Param(random(32, 48), axes=('embed', 'mlp'))})
  target = random(32, 48, seed=3)

  def loss(params):
    return jnp.sum((params['gate'][...] - target) ** 2)

  def descend(carry, _):
    params, state = carry
    value, grads = jax.value_and_grad(loss)(params)
    change, state = built.update(grads, state, params)
    return (optax.apply_updates(params, change), state), value

  @jax.jit
  def losses(params):
    return jax.lax.scan(descend, (params, built.init(params)), length=60)[1]

  first, *_, last = losses(params)
  assert last < first / 20


def shardings(name):
  """The shardings of an optimizer's state, and those of the parameters."""
  mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), config_lib.MESH_AXES)
  _, params, _ = decoder.abstract(MODEL)
  of_params = sharding.params(params, mesh)
  built = optimizer.build(config(name=name, state_dtype='bfloat16'), 10)
  found = optimizer.places(built, params, of_params, sharding.replicated(mesh))
  like = jax.eval_shape(built.init, params)
  assert jax.tree.structure(found) == jax.tree.structure(like)
  return found[1], of_params


def specs(tree):
  return {
    jax.tree_util.keystr(path): place.spec
    for path, place in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_the_moments_of_adamw_are_sharded_as_the_parameters():
  state, of_params = shardings('adamw')
  assert specs(state[0].mu) == specs(state[0].nu) == specs(of_params)
  assert state[0].count.spec == PartitionSpec()


def test_both_parts_of_the_state_of_muon_are_sharded_as_their_parameters():
  state, of_params = shardings('muon')
  muon = state.inner_states['muon'].inner_state
  muon = muon.inner_states['muon'].inner_state[0]
  adamw = state.inner_states['adamw'].inner_state[0]
  assert specs(muon.mu) | specs(adamw.mu) == specs(of_params)
  assert specs(adamw.mu) == specs(adamw.nu)
  assert len(specs(muon.mu)) == len(('q', 'k', 'v', 'o', 'gate', 'up', 'down'))
  assert muon.ns_coeffs.spec == PartitionSpec()


def test_adafactor_shards_the_moments_that_it_does_not_factor():
  state, of_params = shardings('adafactor')
  sums = specs(state[0].v_row) | specs(state[0].v_col)
  assert set(sums.values()) == {PartitionSpec()}
  whole, factored = specs(state[0].v), ('gate', 'up', 'down', '_VD', '_DV')
  for name, spec in specs(of_params).items():
    if any(matrix in name for matrix in factored):
      spec = PartitionSpec()
    assert whole[name] == spec, name


def test_the_bytes_of_the_state_by_hand():
  params = {'matrix': jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}
  for changes, size in (
    ({'name': 'adamw'}, 2 * 4 * 64 * 32),
    ({'name': 'adamw', 'state_dtype': 'bfloat16'}, 2 * 2 * 64 * 32),
    # A row, a column and, in place of the whole matrix, one value.
    ({'name': 'adafactor'}, 4 * (64 + 32 + 1)),
  ):
    # Each optimizer and its rate count their updates.
    found = optimizer.moment_bytes(config(**changes), params)
    assert found * 64 * 32 == size + 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize('name', optimizer.OPTIMIZERS)
def test_a_decoder_learns_the_same_on_eight_devices(name):
  settings = config(**CONSTANT, name=name, state_dtype='bfloat16')
  settings.learning_rate = 0.01
  built = optimizer.build(settings, 10)
  tokens_BS = np.random.default_rng(0).integers(0, 48, (8, 8)).astype(np.int32)
  mask_BS = np.arange(8)[None, :].repeat(8, 0) >= 4
  zeros_BS = np.zeros((8, 8), np.float32)
  rows = objectives.PackedRows(
    tokens_BS=tokens_BS,
    row_BS=np.ones((8, 8), np.int32),
    weight_BS=(mask_BS / 32).astype(np.float32),
    mask_BS=mask_BS,
    chunk_BS=mask_BS.astype(np.int32),
    old_logp_BS=zeros_BS,
    advantage_BS=zeros_BS,
    mini_batch_B1=np.zeros((8, 1), np.float32),
  )

  def losses(*shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, config_lib.MESH_AXES)
    spec = state_lib.StateSpec(model=MODEL, mesh=mesh, optimizer=built)
    state = spec.fresh(spec.random_params(jax.random.key(0)))
    learn = update.Update(spec, {'own': objectives.LOG_LIKELIHOOD}, 64)
    for _ in range(5):
      state, statistics = learn(state, {'own': [rows]})
      yield float(statistics['own/loss'][0])

  alone = [*losses(1, 1, 1)]
  assert alone[-1] < 0.8 * alone[0]
  np.testing.assert_allclose([*losses(2, 2, 2)], alone, rtol=1e-3)
