import math
import re
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

TOKENS_BS = np.random.default_rng(1).integers(0, 48, (3, 9))
ROW_BS = np.array(
  [[1] * 9, [0, 0, 1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 3, 3, 3, 0, 0]]
)


def test_scores_are_of_the_distribution_that_each_token_is_drawn_from():
  decoder = decoders.decoder()
  graphdef, params = nnx.split(decoder)

  @jax.jit
  def score(params, tokens_BS, row_BS):
    args = nnx.merge(graphdef, params), tokens_BS, row_BS, 6
    return logps.response_scores(*args, True), logps.response_scores(*args)

  scores, without_entropy = score(params, TOKENS_BS, ROW_BS)
  np.testing.assert_array_equal(scores.logp_BS, without_entropy.logp_BS)
  assert without_entropy.entropy_BS is None
  all_BSV = decoders.logits(decoder, TOKENS_BS, ROW_BS).astype(float)
  for b, s in np.ndindex(3, 9):
    logits_V = all_BSV[b, s - 1]
    logp = logits_V[TOKENS_BS[b, s]] - np.log(np.exp(logits_V).sum())
    expected = logp, references.entropy(logits_V)
    if s == 0 or ROW_BS[b, s] == 0 or ROW_BS[b, s - 1] != ROW_BS[b, s]:
      expected = 0.0, 0.0
    found = float(scores.logp_BS[b, s]), float(scores.entropy_BS[b, s])
    assert found == pytest.approx(expected, abs=1e-4)


# With a batch of 2, chunks of 1, 2 and 5 positions of 5.
@pytest.mark.parametrize('chunk', [1, 4, 100])
def test_chunks_change_neither_scores_nor_gradients(chunk):
  rng = np.random.default_rng(0)
  # With the identity as unembedding, hidden states are logits.
  hidden_BTD = (3 * rng.standard_normal((2, 5, 7))).astype(np.float32)
  unembed_DV = np.eye(7, dtype=np.float32)
  targets_BT = rng.integers(0, 7, (2, 5))
  weight_BT = np.arange(1.0, 11.0, dtype=np.float32).reshape(2, 5)

  def total(hidden_BTD, unembed_DV):
    decoder = types.SimpleNamespace(
      unembed=lambda: unembed_DV, logits=lambda x_BTD, by_DV: x_BTD @ by_DV
    )
    scores = logps.token_scores(
      decoder, hidden_BTD, targets_BT, chunk, entropy=True
    )
    return (weight_BT * (scores.logp_BS + scores.entropy_BS)).sum(), scores

  gradients, scores = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(
    hidden_BTD, unembed_DV
  )
  expected_BTD = np.zeros((2, 5, 7))
  for b, t in np.ndindex(2, 5):

    def logp(logits_V, target=targets_BT[b, t]):
      return logits_V[target] - np.log(np.exp(logits_V).sum())

    logits_V = hidden_BTD[b, t].astype(float)
    found = float(scores.logp_BS[b, t]), float(scores.entropy_BS[b, t])
    expected = logp(logits_V), references.entropy(logits_V)
    assert found == pytest.approx(expected, rel=1e-4)
    expected_BTD[b, t] = weight_BT[b, t] * references.gradient(
      lambda x_V, logp=logp: logp(x_V) + references.entropy(x_V), logits_V
    )
  expected_DV = np.einsum('BTD,BTV->DV', hidden_BTD, expected_BTD)
  np.testing.assert_allclose(gradients[0], expected_BTD, atol=1e-4)
  np.testing.assert_allclose(gradients[1], expected_DV, atol=1e-3)


def test_no_array_has_the_logits_of_more_than_one_chunk():
  length, vocabulary = 64, 16384
  graphdef, params, _ = decoder_lib.abstract(
    examples.model(vocab_size=vocabulary, num_layers=1)
  )
  tokens_BS = np.ones((4, length), np.int32)

  def largest_array(chunk):
    """Elements of the largest array in the program of the gradient."""

    def total(params, tokens_BS):
      scores = logps.response_scores(
        nnx.merge(graphdef, params, decoder_lib.NO_PARAMS),
        *(tokens_BS, tokens_BS, chunk),
        entropy=True,
      )
      return scores.logp_BS.sum() + scores.entropy_BS.sum()

    program = str(jax.make_jaxpr(jax.grad(total))(params, tokens_BS))
    shapes = re.findall(r'f32\[([\d,]+)\]', program)
    return max(math.prod(map(int, shape.split(','))) for shape in shapes)

  assert largest_array(1 << 20) == 4 * length * vocabulary
  assert largest_array(16) < 4 * length * vocabulary / 2


def test_no_log_probability_is_rounded_to_above_zero(monkeypatch):
  # On an accelerator, exp(0) may be a little less than 1.
  monkeypatch.setattr(jax.nn, 'logsumexp', lambda x, axis: x.max(axis) - 1e-6)
  logits_BV = jnp.array([[0.0, -50.0], [3.0, 1.0]])
  np.testing.assert_array_equal(
    logps.log_prob(logits_BV, jnp.zeros(2, jnp.int32)), 0.0
  )


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


def test_gradients_of_many_chunks_add_up_in_bfloat16():
  # 1 + 1 + ... stops at 256 in bfloat16.
  count = 1024
  hidden_BTD = np.ones((1, count, 1), jnp.bfloat16)
  targets_BT = np.zeros((1, count), np.int32)

  def total(unembed_DV):
    decoder = types.SimpleNamespace(
      unembed=lambda: unembed_DV,
      logits=lambda x_BTD, by_DV: (x_BTD @ by_DV).astype(jnp.float32),
    )
    return logps.token_scores(decoder, hidden_BTD, targets_BT, 1).logp_BS.sum()

  gradient_DV = jax.grad(total)(jnp.zeros((1, 2), jnp.bfloat16))
  np.testing.assert_array_equal(gradient_DV, [[count / 2, -count / 2]])
