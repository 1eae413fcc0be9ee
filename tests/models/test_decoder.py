from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import logps
from tests import decoders
from tests import examples

FAMILIES = pytest.mark.parametrize('family', sorted(families.FAMILIES))


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
      decoder_lib.rotate(x, *decoder_lib.rotary(jnp.full((1, 1), at), 8, 100.0))
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


def test_rms_norm_worked_by_hand():
  norm = decoder_lib.RMSNorm(2, examples.model())
  norm.scale[...] = jnp.array([1.0, 2.0])
  # sqrt((9 + 16) / 2) = 3.5355.
  np.testing.assert_allclose(
    norm(jnp.array([[3.0, 4.0]])), [[0.8485281, 2.2627417]], rtol=1e-5
  )
