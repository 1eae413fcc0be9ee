"""Gradients at a sampling temperature, by enumeration of all responses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.models import logps
from mrl_jax.update import objectives
from tests import examples

VOCAB, LENGTH, ALPHA = 3, 2, 1.5
RESPONSES = np.stack(np.meshgrid(*[range(VOCAB)] * LENGTH), -1).reshape(-1, 2)
TOKENS = np.pad(RESPONSES, ((0, 0), (1, 0)))  # The prompt is token 0.
OPEN = {'clip_low': 1.0, 'clip_high': 1e9, 'dual_clip': 0.0}
SETTINGS = {
  **OPEN,
  'prp.max_ratio': 1e9,
  'hacpo.clip': False,
  'hacpo.alpha': ALPHA,
}


class Tabular:
  """A policy whose next token depends on the last one alone."""

  def __init__(self, logits_VV):
    self._logits_VV = logits_VV

  def __call__(self, tokens_BS, row_BS):
    del row_BS
    return jax.nn.one_hot(tokens_BS, VOCAB)

  def unembed(self):
    return self._logits_VV

  def logits(self, hidden_BTV, unembed_VV):
    return hidden_BTV @ unembed_VV


def log_probs(logits_VV, temperature):
  """Of every token of all responses, by the definition."""
  logp_VV = jax.nn.log_softmax(logits_VV / temperature)
  return logp_VV[TOKENS[:, :-1], TOKENS[:, 1:]]


def expected_advantage(logits_VV, advantage_B, temperature):
  logp_B = log_probs(logits_VV, temperature).sum(1)
  return (jnp.exp(logp_B) * advantage_B).sum()


def hacpo(logits_VV, advantage_B, temperature, source_BT):
  """The sum over the source's responses of s sg[s]^alpha A."""
  difference_BT = log_probs(logits_VV, temperature) - source_BT
  ratio_B = jnp.exp(difference_BT.mean(1))
  weight_B = jax.lax.stop_gradient(ratio_B) ** ALPHA
  return (jnp.exp(source_BT.sum(1)) * weight_B * ratio_B * advantage_B).sum()


def gradient(function, logits_VV, advantage_B, temperature, old_BT, weight_B):
  """Of an objective on all responses, each with its weight, as updates take it."""
  is_response_BS = jnp.ones(TOKENS.shape, bool).at[:, 0].set(False)
  rows = objectives.PackedRows(
    tokens_BS=jnp.asarray(TOKENS),
    row_BS=jnp.ones(TOKENS.shape, int),
    old_logp_BS=jnp.pad(old_BT, ((0, 0), (1, 0))),
    advantage_BS=jnp.broadcast_to(advantage_B[:, None], TOKENS.shape),
    weight_BS=jnp.where(is_response_BS, weight_B[:, None], 0),
    mask_BS=is_response_BS,
    chunk_BS=is_response_BS.astype(int),
    mini_batch_B1=jnp.ones((len(RESPONSES), 1)),
  )

  def objective(logits_VV):
    scores = logps.response_scores(
      Tabular(logits_VV),
      rows.tokens_BS,
      rows.row_BS,
      chunk=100,
      temperature=temperature,
    )
    return (rows.weight_BS * function(scores, rows)[0]).sum()

  return jax.grad(objective)(logits_VV)


@pytest.mark.parametrize('temperature', [0.6, 0.8, 1.3])
@pytest.mark.parametrize('method', ['grpo', 'prp', 'hacpo'])
def test_the_gradient_is_that_of_the_sampled_policy(method, temperature):
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    learner_VV, peer_VV = jnp.asarray(rng.normal(size=(2, VOCAB, VOCAB)))
    advantage_B = jnp.asarray(rng.normal(size=len(RESPONSES)))
    settings = examples.settings(method, **SETTINGS)
    place = learner_VV, advantage_B, temperature
    stated = jax.grad(expected_advantage)(*place)
    old_BT = log_probs(peer_VV, temperature)
    weight_B = jnp.exp(old_BT.sum(1))
    if method == 'grpo':
      old_BT = log_probs(learner_VV, temperature)
      weight_B = jnp.exp(old_BT.sum(1))
      function = objectives.own(settings, 'token').function
    elif method == 'prp':
      function = functools.partial(objectives.peer_ratio, settings)
    else:
      stated = jax.grad(hacpo)(*place, old_BT)
      mean_BT = jnp.broadcast_to(old_BT.mean(1, keepdims=True), old_BT.shape)
      old_BT, weight_B = mean_BT, weight_B / LENGTH
      function = functools.partial(objectives.stepwise, settings)
    found = gradient(function, *place, old_BT, weight_B)
    np.testing.assert_allclose(found, stated, rtol=1e-6, atol=1e-9)
    # Scores at temperature 1 do not have this gradient.
    wrong = gradient(function, learner_VV, advantage_B, 1.0, old_BT, weight_B)
    error = np.linalg.norm(wrong - stated) / np.linalg.norm(stated)
    assert error > 0.1
