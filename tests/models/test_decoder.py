from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.architecture import Lora
from mrl_jax.architecture import Rope
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import logps
from mrl_jax.models import rope
from tests import decoders
from tests import examples

FAMILIES = pytest.mark.parametrize('family', sorted(families.FAMILIES))


# What sets the families apart, from their papers and reference code.
REFERENCE = {
  'llama': {'eps': 1e-5, 'base': 1e4, 'activation': 'silu'},
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
):
  """One row through `decoder`, head by head in float64."""

  def array(param):
    return np.asarray(param[...], np.float64)

  def weight(projection):
    return array(projection.weight)

  def norm(x, module):
    root = np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return x / root * (array(module.scale) + offset)

  def turn(x_TE):
    length, size = x_TE.shape
    frequency_I = base ** (-2 * np.arange(size // 2) / size)
    turned_TI = (x_TE[:, : size // 2] + 1j * x_TE[:, size // 2 :]) * np.exp(
      1j * np.arange(length)[:, None] * frequency_I
    )
    return np.concatenate([turned_TI.real, turned_TI.imag], 1)

  def act(x):
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
      scores_TT = turn(q_TE) @ turn(k_TE).T / q_TE.shape[1] ** 0.5
      weights_TT = np.tril(np.exp(scores_TT))
      weights_TT /= weights_TT.sum(1, keepdims=True)
      out_TD += weights_TT @ (x_TD @ v_DKE[:, shared]) @ o_HED[head]
    return out_TD

  embed_VD = array(decoder.embed_VD)
  x_TD = embed_VD[tokens_T] * scale
  for block in decoder.blocks:
    x_TD = x_TD + attend(norm(x_TD, block.attention_norm), block.attention)
    h_TD, mlp = norm(x_TD, block.mlp_norm), block.mlp
    gated_TF = act(h_TD @ weight(mlp.gate)) * (h_TD @ weight(mlp.up))
    x_TD = x_TD + gated_TF @ weight(mlp.down)
  tied = decoder.unembed_DV is None
  return norm(x_TD, decoder.final_norm) @ (
    embed_VD.T if tied else array(decoder.unembed_DV)
  )


@FAMILIES
def test_logits_are_those_of_a_reference_in_float64(family):
  graphdef, params = nnx.split(decoders.decoder(family))
  rng = np.random.default_rng(0)
  # Norms start out alike, which would hide that one is taken for another.
  params = jax.tree.map(
    lambda x: x + rng.normal(size=x.shape, scale=0.2).astype(np.float32), params
  )
  decoder = nnx.merge(graphdef, params)
  tokens_T = rng.integers(0, 48, 12)
  np.testing.assert_allclose(
    decoders.logits(decoder, tokens_T[None])[0],
    reference_logits(decoder, tokens_T, **REFERENCE[family]),
    rtol=1e-4,
    atol=1e-4,
  )


@FAMILIES
def test_causality_by_a_gradient(family):
  graphdef, params = nnx.split(decoders.decoder(family))
  length, at = 6, 3
  positions_BT, mask_BTT = logps.prompt_layout(jnp.ones((1, length), bool))

  def hidden_at(params):
    # Token t stands at position t alone, so its embedding is that position's.
    tokens_BT = jnp.arange(length)[None, :]
    hidden_BTD, _ = nnx.merge(graphdef, params)(
      tokens_BT, positions_BT, mask_BTT
    )
    return (hidden_BTD[0, at] * jnp.arange(1.0, 33)).sum()

  gradient_VD = jax.jit(jax.grad(hidden_at))(params)['embed_VD'][...]
  moved_T = np.abs(gradient_VD[:length]).max(1)
  assert (moved_T[: at + 1] > 0).all()
  np.testing.assert_array_equal(moved_T[at + 1 :], 0.0)


@FAMILIES
def test_a_cache_gives_what_the_full_forward_gives(family):
  decoder = decoders.decoder(family)
  tokens_BT = jax.random.randint(jax.random.key(1), (2, 7), 0, 48)
  expected_BTV = decoders.logits(decoder, tokens_BT)
  graphdef, params = nnx.split(decoder)

  @jax.jit
  def step(token_B1, slot, cache):
    decoder = nnx.merge(graphdef, params)
    hidden_B1D, cache = decoder(
      token_B1,
      jnp.full((2, 1), slot),
      jnp.broadcast_to((jnp.arange(7) <= slot)[None, None, :], (2, 1, 7)),
      cache,
      slot,
    )
    return decoder.logits(hidden_B1D)[:, 0], cache

  cache = decoder_lib.empty_cache(decoder.config, 2, 7)
  for slot in range(7):
    logits_BV, cache = step(tokens_BT[:, slot : slot + 1], slot, cache)
    np.testing.assert_allclose(logits_BV, expected_BTV[:, slot], atol=1e-5)
    np.testing.assert_array_equal(
      logits_BV.argmax(-1), expected_BTV[:, slot].argmax(-1)
    )


@FAMILIES
def test_left_padding_changes_nothing(family):
  decoder = decoders.decoder(family)
  tokens_BT = jax.random.randint(jax.random.key(1), (1, 5), 0, 48)
  padded_BT = jnp.pad(tokens_BT, ((0, 0), (3, 0)), constant_values=7)
  valid_BT = np.arange(8)[None, :] >= 3
  np.testing.assert_allclose(
    decoders.logits(decoder, padded_BT, valid_BT)[:, 3:],
    decoders.logits(decoder, tokens_BT),
    atol=1e-5,
  )


def test_grouped_queries_share_their_key_and_value():
  q_BHTE = jax.random.normal(jax.random.key(0), (1, 4, 3, 8))
  k_BKSE = jax.random.normal(jax.random.key(1), (1, 2, 3, 8))
  v_BKSE = jax.random.normal(jax.random.key(2), (1, 2, 3, 8))
  mask_BTS = jnp.tril(jnp.ones((1, 3, 3), bool))
  out = decoder_lib.attend(q_BHTE, k_BKSE, v_BKSE, mask_BTS)
  for head in range(4):
    k_SE, v_SE = k_BKSE[0, head // 2], v_BKSE[0, head // 2]
    scores_TS = np.asarray(q_BHTE[0, head] @ k_SE.T, np.float64) / 8**0.5
    scores_TS[~np.asarray(mask_BTS[0])] = -np.inf
    weights_TS = np.exp(scores_TS)
    weights_TS /= weights_TS.sum(1, keepdims=True)
    np.testing.assert_allclose(out[0, head], weights_TS @ v_SE, atol=1e-5)


def test_rotation_depends_on_relative_positions_only():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

  def score(q_at, k_at):
    turned = (
      rope.rotate(x, *rope.rotary(jnp.full((1, 1), at), 8, Rope(base=100.0)))
      for x, at in ((q, q_at), (k, k_at))
    )
    return float((next(turned) * next(turned)).sum())

  assert score(5, 2) == pytest.approx(score(13, 10), rel=1e-4)
  assert score(5, 2) != pytest.approx(score(5, 3), rel=1e-2)


def test_families_differ_as_they_say():
  llama, qwen, gemma = map(decoders.decoder, ('llama', 'qwen', 'gemma'))
  assert llama.unembed_DV is not None
  assert gemma.unembed_DV is None
  assert qwen.blocks[0].attention.q_norm is not None
  assert llama.blocks[0].attention.q_norm is None
  # Gemma's norms scale by 1 + w and start from w = 0.
  np.testing.assert_array_equal(gemma.final_norm.scale[...], 0.0)
  np.testing.assert_array_equal(llama.final_norm.scale[...], 1.0)
  x_BTD = jnp.arange(1.0, 33)[None, None, :]
  np.testing.assert_allclose(
    gemma.final_norm(x_BTD), llama.final_norm(x_BTD), rtol=1e-5
  )


def test_adapters_that_begin_change_nothing():
  lora = Lora(rank=2, alpha=3, target_modules=('v_proj', 'down_proj'))
  with_them = decoder_lib.Decoder(examples.model(lora=lora), nnx.Rngs(0))
  _, _, frozen = decoder_lib.split(with_them)
  without = nnx.merge(
    decoder_lib.abstract(examples.model())[0], frozen, decoder_lib.NO_PARAMS
  )
  tokens_BT = jax.random.randint(jax.random.key(1), (2, 7), 0, 48)
  np.testing.assert_array_equal(
    decoders.logits(with_them, tokens_BT), decoders.logits(without, tokens_BT)
  )


@pytest.mark.parametrize('remat', ['dots', 'block'])
def test_remat_changes_neither_value_nor_gradient(remat):
  tokens_BT = jax.random.randint(jax.random.key(1), (2, 7), 0, 48)

  def gradient(**changes):
    graphdef, params, _ = decoder_lib.split(
      decoder_lib.Decoder(examples.model(**changes), nnx.Rngs(0))
    )

    def total(params):
      network = nnx.merge(graphdef, params)
      positions_BT, mask_BTT = logps.prompt_layout(jnp.ones((2, 7), bool))
      hidden_BTD, _ = network(tokens_BT, positions_BT, mask_BTT)
      return (hidden_BTD * jnp.arange(32.0)[None, None, :]).sum()

    jaxpr = jax.make_jaxpr(jax.grad(total))(params)
    return jax.jit(jax.value_and_grad(total))(params), str(jaxpr)

  (value, plain), program = gradient()
  (again, saved), less = gradient(remat=remat)
  assert float(value) == pytest.approx(float(again), rel=1e-6)
  for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
  # The feed-forward products of two layers are computed again, or not.
  assert less.count('dot_general') - program.count('dot_general') == {
    'dots': 2 * 2, 'block': 2 * 8,
  }[remat]  # fmt: skip


def test_a_window_is_the_last_positions():
  mask_BTS = jnp.tril(jnp.ones((1, 4, 4), bool))
  np.testing.assert_array_equal(
    decoder_lib.window_mask(mask_BTS, 0, 2)[0],
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]],
  )
  one_B1S = jnp.ones((1, 1, 6), bool)
  # A token at slot 4 sees slots 3 and 4; what is not written yet is masked
  # by the sampler.
  np.testing.assert_array_equal(
    decoder_lib.window_mask(one_B1S, 4, 2)[0, 0], [0, 0, 0, 1, 1, 1]
  )


def test_a_cap_worked_by_hand():
  # 2 tanh(1 / 2) = 0.92423.
  x = jnp.array([1.0, 100.0])
  np.testing.assert_allclose(
    decoder_lib.soft_cap(x, 2.0), [0.924234, 2.0], 1e-6
  )
  assert decoder_lib.soft_cap(x, 0) is x
