import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.architecture import Layer
from mrl_jax.architecture import Lora
from mrl_jax.architecture import Rope
from mrl_jax.models import attention
from mrl_jax.models import cache as cache_lib
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import rope
from tests import decoders
from tests import examples

FAMILIES = pytest.mark.parametrize('family', sorted(families.FAMILIES))
TOKENS_BT = np.random.default_rng(1).integers(0, 48, (2, 8))

# The differences of the families, from their papers and reference code.
REFERENCE = {
  'llama': {'eps': 1e-5, 'base': 1e4, 'activation': 'silu', 'tied': False},
  'qwen': {'eps': 1e-6, 'base': 1e6, 'activation': 'silu', 'qk_norm': True},
  'gemma': {
    'eps': 1e-6,
    'base': 1e4,
    'activation': 'gelu',
    'offset': 1.0,
    'scale': 32**0.5,
  },
}


def reference_logits(
  decoder,
  tokens_T,
  *,
  eps,
  base,
  activation,
  qk_norm=False,
  offset=0.0,
  scale=1.0,
  tied=True,
):
  """Logits of one row, computed head by head in float64."""

  def array(param):
    return np.asarray(param[...], np.float64)

  def weight(projection):
    return array(projection.weight)

  def norm(x, module):
    root = np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return x / root * (array(module.scale) + offset)

  def rotate(x_TE):
    length, size = x_TE.shape
    frequency_I = base ** (-2 * np.arange(size // 2) / size)
    rotated_TI = (x_TE[:, : size // 2] + 1j * x_TE[:, size // 2 :]) * np.exp(
      1j * np.arange(length)[:, None] * frequency_I
    )
    return np.concatenate([rotated_TI.real, rotated_TI.imag], 1)

  def activate(x):
    if activation == 'silu':
      return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

  def attend(x_TD, attention):
    q_DHE, k_DKE, v_DKE, o_HED = map(
      weight, (attention.q, attention.k, attention.v, attention.o)
    )
    out_TD = np.zeros_like(x_TD)
    for head in range(q_DHE.shape[1]):
      shared = head * k_DKE.shape[1] // q_DHE.shape[1]
      q_TE, k_TE = x_TD @ q_DHE[:, head], x_TD @ k_DKE[:, shared]
      if qk_norm:
        q_TE, k_TE = norm(q_TE, attention.q_norm), norm(k_TE, attention.k_norm)
      scores_TT = rotate(q_TE) @ rotate(k_TE).T / q_TE.shape[1] ** 0.5
      weights_TT = np.tril(np.exp(scores_TT))
      weights_TT /= weights_TT.sum(1, keepdims=True)
      out_TD += weights_TT @ (x_TD @ v_DKE[:, shared]) @ o_HED[head]
    return out_TD

  embed_VD = array(decoder.embed_VD)
  x_TD = embed_VD[tokens_T] * scale
  for block in decoder.blocks:
    x_TD = x_TD + attend(norm(x_TD, block.attention_norm), block.attention)
    h_TD, mlp = norm(x_TD, block.mlp_norm), block.mlp
    gated_TF = activate(h_TD @ weight(mlp.gate)) * (h_TD @ weight(mlp.up))
    x_TD = x_TD + gated_TF @ weight(mlp.down)
  unembed_DV = embed_VD.T if tied else array(decoder.unembed_DV)
  return norm(x_TD, decoder.final_norm) @ unembed_DV


@FAMILIES
def test_logits_are_those_of_a_float64_reference(family):
  decoder = decoders.decoder(family)
  logits_BTV = decoders.logits(decoder, TOKENS_BT)
  for tokens_T, logits_TV in zip(TOKENS_BT, logits_BTV, strict=True):
    expected_TV = reference_logits(decoder, tokens_T, **REFERENCE[family])
    np.testing.assert_allclose(logits_TV, expected_TV, rtol=1e-4, atol=1e-4)


@FAMILIES
def test_logits_depend_on_their_token_and_those_before_it(family):
  decoder, changed_BT = decoders.decoder(family), TOKENS_BT.copy()
  changed_BT[:, 4] += 1
  differs_BTV = decoders.logits(decoder, TOKENS_BT) != decoders.logits(
    decoder, changed_BT
  )
  np.testing.assert_array_equal(differs_BTV.any(2), [[0] * 4 + [1] * 4] * 2)


@FAMILIES
def test_left_padding_changes_no_logit(family):
  # Row 0 has five tokens after padding; row 1 has the same ones, then others.
  tokens_BT = np.stack([TOKENS_BT[0], np.roll(TOKENS_BT[0], -3)])
  valid_BT = np.ones((2, 8), bool)
  valid_BT[0, :3] = False
  padded_TV, plain_TV = decoders.logits(
    decoders.decoder(family), tokens_BT, valid_BT
  )
  np.testing.assert_allclose(padded_TV[3:], plain_TV[:5], atol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def decode(graphdef, params, token_B1, now, cache):
  """Logits after a token of every row, from the cached keys and values."""
  decoder = nnx.merge(graphdef, params)
  hidden_B1D, cache = decoder.step(token_B1, now, cache)
  return decoder.logits(hidden_B1D)[:, 0], cache


@functools.partial(jax.jit, static_argnums=(0, 4))
def read(graphdef, params, tokens_BC, valid_BC, ring):
  """Logits after the prompts, and a cache with room for `ring` more tokens."""
  decoder = nnx.merge(graphdef, params)
  hidden_B1D, kept = decoder.prefill(tokens_BC, valid_BC)
  empty = cache_lib.empty(decoder.config, *tokens_BC.shape, ring)
  cache = [
    layer._replace(
      **{
        name: cache_lib.of_prompts(x, layer.k_BKCE.shape[2])
        for name, x in (('k_BKCE', k), ('v_BKCE', v))
      }
    )
    for layer, (k, v) in zip(empty, kept, strict=True)
  ]
  return decoder.logits(hidden_B1D)[:, 0], cache


def assert_decoded(decoder, context, valid_BT):
  """Prompts and single tokens have the logits of the whole forward pass."""
  expected_BTV = decoders.logits(decoder, TOKENS_BT, valid_BT)
  split, length = nnx.split(decoder), TOKENS_BT.shape[1]
  logits_BV, cache = read(
    *split, TOKENS_BT[:, :context], valid_BT[:, :context], length - context
  )
  np.testing.assert_allclose(logits_BV, expected_BTV[:, context - 1], atol=1e-5)
  for age in range(length - context):
    now = cache_lib.Now(
      jnp.int32(age), jnp.full(2, age), valid_BT[:, :context].sum(1)
    )
    token_B1 = TOKENS_BT[:, context + age][:, None]
    logits_BV, cache = decode(*split, token_B1, now, cache)
    np.testing.assert_allclose(
      logits_BV, expected_BTV[:, context + age], atol=1e-5
    )
  return cache


@FAMILIES
def test_decoding_with_a_cache_gives_the_logits_of_the_full_forward(family):
  assert_decoded(decoders.decoder(family), 3, np.ones_like(TOKENS_BT, bool))


def test_windows_keep_the_last_tokens_while_decoding():
  valid_BT = np.arange(8)[None, :] >= np.array([[0], [2]])
  for context in (3, 5):
    cache = assert_decoded(
      decoders.decoder(layers=(Layer(window=3), Layer(rope=None))),
      context,
      valid_BT,
    )
    sizes = [(x.k_BKCE.shape[2], x.k_BKRE.shape[2]) for x in cache]
    assert sizes == [(3, 3), (context, 8 - context)]


def test_positions_are_counted_from_the_first_token_of_each_row():
  row_BT = jnp.array([[0, 0, 1, 1, 2, 2, 2], [1, 1, 1, 2, 3, 3, 0]])
  np.testing.assert_array_equal(
    decoder_lib.positions(row_BT),
    [[0, 0, 0, 1, 0, 1, 2], [0, 1, 2, 0, 0, 1, 0]],
  )


@FAMILIES
def test_packed_rows_have_the_logits_that_they_have_alone(family):
  decoder = decoders.decoder(family)
  tokens_BT = TOKENS_BT.reshape(1, 16)
  row_BT = np.repeat([[1, 2, 3, 0]], [3, 8, 4, 1], axis=1).reshape(1, 16)
  packed_TV = decoders.logits(decoder, tokens_BT, row_BT)[0]
  for row in (1, 2, 3):
    alone_BTV = decoders.logits(decoder, tokens_BT[row_BT == row][None])
    np.testing.assert_allclose(packed_TV[row_BT[0] == row], alone_BTV[0],
                               atol=1e-5)  # fmt: skip


def test_grouped_queries_share_their_key_and_value():
  rng = np.random.default_rng(0)
  q_BHTE = rng.normal(size=(1, 4, 3, 8)).astype(np.float32)
  k_BKSE, v_BKSE = rng.normal(size=(2, 1, 2, 3, 8)).astype(np.float32)
  mask_TS = np.tril(np.ones((3, 3), bool))
  out_BHTE = jax.jit(attention.attend)(
    q_BHTE, [(k_BKSE, v_BKSE)], mask_TS[None], 8**-0.5
  )
  for head in range(4):
    k_SE, v_SE = k_BKSE[0, head // 2], v_BKSE[0, head // 2]
    weights_TS = mask_TS * np.exp(q_BHTE[0, head] @ k_SE.T / 8**0.5)
    weights_TS /= weights_TS.sum(1, keepdims=True)
    np.testing.assert_allclose(out_BHTE[0, head], weights_TS @ v_SE, atol=1e-5)


def test_rotated_scores_depend_on_relative_positions_only():
  x_BHTE = np.arange(16, dtype=np.float32).reshape(2, 1, 1, 8)

  @jax.jit
  def score(positions_BT):
    sin_cos = rope.rotary(positions_BT, 8, Rope(base=100.0))
    q, k = rope.rotate(x_BHTE, *sin_cos)
    return (q * k).sum()

  at_5_and_2, at_13_and_10, at_5_and_3 = (
    float(score(np.array(positions)[:, None]))
    for positions in ([5, 2], [13, 10], [5, 3])
  )
  assert at_5_and_2 == pytest.approx(at_13_and_10, rel=1e-4)
  assert at_5_and_2 != pytest.approx(at_5_and_3, rel=1e-2)


@functools.cache
def gradient(remat):
  """Value and gradients of a sum of hidden states; products with weights."""
  graphdef, params = nnx.split(decoders.decoder(num_layers=1, remat=remat))

  @jax.jit
  @jax.value_and_grad
  def total(params, tokens_BT):
    hidden_BTD = nnx.merge(graphdef, params)(tokens_BT, tokens_BT >= 0)
    return (hidden_BTD * jnp.arange(32.0)[None, None, :]).sum()

  traced = total.trace(params, TOKENS_BT)
  value, gradients = traced.lower().compile()(params, TOKENS_BT)
  products = str(traced.jaxpr).count('dot_general')
  return value, jax.tree.leaves(gradients), products


# The feed-forward layer has two products with an activation after them.
@pytest.mark.parametrize(('remat', 'recomputed'), [('dots', 2), ('block', 8)])
def test_remat_changes_neither_value_nor_gradient(remat, recomputed):
  value, gradients, products = gradient('none')
  same_value, same_gradients, more_products = gradient(remat)
  assert float(value) == pytest.approx(float(same_value), rel=1e-6)
  for x, y in zip(gradients, same_gradients, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
  assert more_products - products == recomputed


def differentiated(network):
  """Value and gradients of a sum of hidden states, and whether it scans."""
  graphdef, params = nnx.split(network)

  @jax.jit
  @jax.value_and_grad
  def total(params):
    valid_BT = np.arange(8)[None, :] >= np.array([[0], [2]])
    hidden_BTD = nnx.merge(graphdef, params)(TOKENS_BT, valid_BT)
    return (hidden_BTD * jnp.arange(32.0)[None, None, :]).sum()

  traced = total.trace(params)
  return *traced.lower().compile()(params), 'scan[' in str(traced.jaxpr)


# With five layers, two groups of two, and the first layer of a third.
LAYERS = (Layer(window=3), Layer(rope=None))
LORA = Lora(rank=2, alpha=4, target_modules=('q_proj', 'down_proj'))


@pytest.mark.parametrize('changes', [{'remat': 'block'}, {'lora': LORA}])
def test_a_scan_over_groups_of_layers_changes_nothing(changes, monkeypatch):
  network = decoders.decoder('qwen', num_layers=5, layers=LAYERS, **changes)
  monkeypatch.setattr(decoder_lib, '_MANY', 5)
  value, gradients, scans = differentiated(network)
  monkeypatch.setattr(decoder_lib, '_MANY', 6)
  expected, expected_gradients, unrolled = differentiated(network)
  assert (scans, unrolled) == (True, False)
  assert float(value) == pytest.approx(float(expected), rel=1e-5)
  for x, y in zip(
    *map(jax.tree.leaves, (gradients, expected_gradients)), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


def test_a_pattern_is_the_shortest_that_repeats():
  full, window = Layer(), Layer(window=4)

  def pattern(layers, count):
    return examples.model(layers=layers, num_layers=count).pattern

  assert pattern((full,), 3) == (full,)
  assert pattern((full,) * 4, 4) == (full,)
  assert pattern((window, full) * 2, 4) == (window, full)
  # Gemma 3: the last group may be cut short.
  assert pattern((window, window, full), 5) == (window, window, full)


def test_casting_parameters_beforehand_changes_no_bit_of_the_logits():
  decoder = decoders.decoder('qwen', dtype='bfloat16')
  graphdef, params, _ = decoder_lib.split(decoder)
  cast = decoder_lib.cast(params, 'bfloat16')
  dtypes = {
    (path[-1] == 'scale', str(param.get_value().dtype))
    for path, param in cast.flat_state()
  }
  assert dtypes == {(True, 'float32'), (False, 'bfloat16')}
  np.testing.assert_array_equal(
    decoders.logits(decoder, TOKENS_BT),
    decoders.logits(nnx.merge(graphdef, cast), TOKENS_BT),
  )


def test_stacked_parameters_have_the_dtype_of_use():
  config = examples.model(dtype='bfloat16', num_layers=8)
  graphdef, params, frozen = decoder_lib.abstract(config)
  tokens_BT = jax.ShapeDtypeStruct((2, 4), jnp.int32)
  jaxpr = jax.make_jaxpr(
    lambda params, tokens_BT: nnx.merge(graphdef, params, frozen)(
      tokens_BT, tokens_BT > 0
    )
  )(params, tokens_BT)
  (scan,) = (e for e in jaxpr.eqns if e.primitive.name == 'scan')
  stacked = {
    str(x.aval.dtype)
    for x in scan.invars
    if x.aval.shape[:1] == (8,) and x.aval.ndim > 2
  }
  assert stacked == {'bfloat16'}
