import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import logps
from tests import decoders
from tests import examples
from tests.losses import references

DECODER = decoders.decoder()
TOKENS_BS = jax.random.randint(jax.random.key(1), (3, 9), 0, 48)
VALID_BS = jnp.array([[1] * 9, [0, 0] + [1] * 7, [0] + [1] * 6 + [0, 0]], bool)


def test_layout_of_left_padded_rows():
  positions_BS, mask_BSS = logps.prompt_layout(VALID_BS[1:2, :4])
  np.testing.assert_array_equal(positions_BS, [[0, 0, 0, 1]])
  expected = np.zeros((4, 4), bool)
  expected[2, 2] = expected[3, 2] = expected[3, 3] = True
  np.testing.assert_array_equal(mask_BSS[0], expected)


def test_they_are_those_of_the_token_after():
  all_BSV = jax.nn.log_softmax(decoders.logits(DECODER, TOKENS_BS, VALID_BS))
  logp_BT = logps.response_logps(DECODER, TOKENS_BS, VALID_BS, 4, 1000)
  for b in range(3):
    for t in range(4):
      at = 5 + t
      expected = (
        all_BSV[b, at - 1, TOKENS_BS[b, at]] if VALID_BS[b, at] else 0.0
      )
      assert float(logp_BT[b, t]) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize('chunk', [1, 6, 7, 9])
def test_chunks_change_neither_value_nor_gradient(chunk):
  graphdef, params = nnx.split(DECODER)

  def total(params, chunk):
    decoder = nnx.merge(graphdef, params)
    logp_BT = logps.response_logps(decoder, TOKENS_BS, VALID_BS, 5, chunk)
    return (logp_BT * jnp.arange(1.0, 6)[None, :]).sum()

  expected, gradient = jax.jit(jax.value_and_grad(total), static_argnums=1)(
    params, 1000
  )
  value, chunked = jax.jit(jax.value_and_grad(total), static_argnums=1)(
    params, chunk
  )
  assert value == pytest.approx(float(expected), rel=1e-5)
  for a, b in zip(
    jax.tree.leaves(gradient), jax.tree.leaves(chunked), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_logits_of_all_tokens_are_never_held():
  length, vocabulary = 64, 16384
  decoder = decoder_lib.Decoder(
    examples.model(vocab_size=vocabulary), nnx.Rngs(0)
  )
  graphdef, params = nnx.split(decoder)
  tokens_BS = jnp.ones((4, length + 1), jnp.int32)

  def peak(chunk):
    def total(params):
      return logps.response_logps(
        nnx.merge(graphdef, params), tokens_BS, tokens_BS > 0, length, chunk
      ).sum()

    compiled = jax.jit(jax.grad(total)).lower(params).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  whole = 4 * length * vocabulary * 4
  assert peak(1 << 20) > whole
  assert peak(16) < whole / 2


def test_no_rounding_makes_a_token_more_than_certain(monkeypatch):
  # As where an accelerator's exp(0) is a little less than 1.
  monkeypatch.setattr(jax.nn, 'logsumexp', lambda x, axis: x.max(axis) - 1e-6)
  logits_BV = jnp.array([[0.0, -50.0], [3.0, 1.0]])
  np.testing.assert_array_equal(
    logps.log_prob(logits_BV, jnp.zeros(2, jnp.int32)), 0.0
  )


# Its hidden states are its logits.
BARE = types.SimpleNamespace(logits=lambda x_BTV: x_BTV)


def test_entropies_worked_by_hand():
  # Uniform: log 4. (1/2, 1/4, 1/4, 0): 1/2 log 2 + 1/2 log 4. Certain: 0.
  low = -1e3
  logits_BV = jnp.array(
    [[7.0, 7.0, 7.0, 7.0], [np.log(2), 0.0, 0.0, low], [90.0, 0.0, 0.0, 0.0]]
  )
  np.testing.assert_allclose(
    logps.softmax_entropy(logits_BV),
    [np.log(4), 1.5 * np.log(2), 0.0],
    rtol=1e-6,
    atol=1e-30,
  )


@pytest.mark.parametrize('chunk', [1, 6, 100])
def test_entropy_and_its_gradient_are_those_of_the_reference(chunk):
  rng = np.random.default_rng(0)
  logits_BTV = (3 * rng.standard_normal((2, 5, 7))).astype(np.float32)
  weight_BT = np.arange(1.0, 11.0, dtype=np.float32).reshape(2, 5)

  def total(logits_BTV):
    scores = logps.token_logps(
      BARE, logits_BTV, jnp.ones((2, 5), jnp.int32), chunk, entropy=True
    )
    return (weight_BT * scores[1]).sum(), scores

  gradient_BTV, (logp_BT, entropy_BT) = jax.jit(jax.grad(total, has_aux=True))(
    logits_BTV
  )
  np.testing.assert_allclose(
    logp_BT, jax.nn.log_softmax(logits_BTV)[..., 1], rtol=1e-5
  )
  for b, t in np.ndindex(2, 5):
    logits_V = logits_BTV[b, t].astype(float)
    expected = references.entropy(logits_V)
    assert float(entropy_BT[b, t]) == pytest.approx(expected, rel=1e-4)
    expected_V = weight_BT[b, t] * references.gradient(
      references.entropy, logits_V
    )
    np.testing.assert_allclose(gradient_BTV[b, t], expected_V, atol=1e-5)


def test_distributions_of_all_tokens_are_never_held_for_their_entropy():
  unembed_DV = jnp.ones((8, 16384))
  decoder = types.SimpleNamespace(logits=lambda x_BTD: x_BTD @ unembed_DV)

  def peak(chunk):
    def total(hidden_BTD):
      targets_BT = jnp.zeros((4, 64), jnp.int32)
      scores = logps.token_logps(decoder, hidden_BTD, targets_BT, chunk, True)
      return scores[0].sum() + scores[1].sum()

    compiled = jax.jit(jax.grad(total)).lower(jnp.ones((4, 64, 8))).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  whole = 4 * 64 * 16384 * 4
  assert peak(1 << 20) > whole
  assert peak(16) < whole / 2


def test_entropy_is_of_the_distribution_that_its_token_is_drawn_from():
  all_BSV = decoders.logits(DECODER, TOKENS_BS, VALID_BS)
  graphdef, params = nnx.split(DECODER)

  @jax.jit
  def scores(params):
    decoder = nnx.merge(graphdef, params)
    args = decoder, TOKENS_BS, VALID_BS, 4, 6
    return logps.response_logps(*args, True), logps.response_logps(*args)

  (logp_BT, entropy_BT), alone_BT = scores(params)
  np.testing.assert_array_equal(logp_BT, alone_BT)
  for b, t in np.ndindex(3, 4):
    at = 5 + t
    logits_V = np.asarray(all_BSV[b, at - 1], float)
    expected = references.entropy(logits_V) if VALID_BS[b, at] else 0.0
    assert float(entropy_BT[b, t]) == pytest.approx(expected, abs=1e-4)
