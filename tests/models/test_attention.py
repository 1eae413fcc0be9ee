import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import architecture
from mrl_jax.models import attention
from tests import decoders

# Rows, query heads, heads of keys and values, tokens, head size, window, cap.
CASES = {
  'one head': (1, 1, 1, 20, 8, 0, 0.0),
  'grouped': (3, 4, 2, 37, 8, 0, 0.0),
  'multi-query': (2, 3, 1, 24, 16, 0, 0.0),
  'window': (2, 2, 2, 40, 8, 11, 0.0),
  'window of one': (2, 2, 1, 19, 8, 1, 0.0),
  'soft cap': (2, 2, 1, 33, 8, 0, 1.5),
  'window and cap': (2, 4, 2, 150, 8, 20, 1.5),
}


def arrays(rows, heads, shared, length, size):
  """q, k, v, validity with padding on both sides, and weights of a loss."""
  rng = np.random.default_rng(0)
  q_BHTE = rng.normal(size=(rows, heads, length, size)).astype(np.float32)
  k_BKTE, v_BKTE = rng.normal(size=(2, rows, shared, length, size)).astype(
    np.float32
  )
  valid_BT = np.ones((rows, length), bool)
  valid_BT[0, : length // 3] = False
  valid_BT[-1, length - length // 4 :] = False
  weight_BHTE = rng.normal(size=q_BHTE.shape) * valid_BT[:, None, :, None]
  return q_BHTE, k_BKTE, v_BKTE, valid_BT, weight_BHTE.astype(np.float32)


def reference(q_BHTE, k_BKTE, v_BKTE, valid_BT, window, scale, cap):
  """Computed token by token, in float64."""
  out_BHTE = np.zeros(q_BHTE.shape)
  share = q_BHTE.shape[1] // k_BKTE.shape[1]
  for b, h, t in np.ndindex(q_BHTE.shape[:3]):
    k_TE, v_TE = k_BKTE[b, h // share], v_BKTE[b, h // share]
    seen = [
      s
      for s in range(t + 1)
      if valid_BT[b, s] and (not window or t - s < window)
    ]
    if not valid_BT[b, t]:
      continue
    score_S = k_TE[seen].astype(float) @ q_BHTE[b, h, t] * scale
    score_S = cap * np.tanh(score_S / cap) if cap else score_S
    weight_S = np.exp(score_S)
    out_BHTE[b, h, t] = weight_S / weight_S.sum() @ v_TE[seen]
  return out_BHTE


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def computed(q_BHTE, k_BKTE, v_BKTE, valid_BT, weight_BHTE, kind, window, cap):
  """The result at valid tokens, and the gradients of a weighted sum."""

  def total(q_BHTE, k_BKTE, v_BKTE):
    settings = {'window': window, 'scale': 0.3, 'cap': cap}
    args = q_BHTE, k_BKTE, v_BKTE, valid_BT
    if kind == 'cudnn':  # Its kernel needs a GPU; XLA has the same interface.
      out_BHTE = attention._cudnn(*args, *settings.values(), 'xla')
    else:
      out_BHTE = attention.causal(*args, kind=kind, **settings)
    return (out_BHTE * weight_BHTE).sum(), out_BHTE

  gradients, out_BHTE = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(
    q_BHTE, k_BKTE, v_BKTE
  )
  return out_BHTE * valid_BT[:, None, :, None], gradients


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  """Blocks that divide no length of `CASES`; the kernel's are of 128."""
  monkeypatch.setattr(attention, '_CPU_BLOCK', 16)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('kind', ['plain', 'blocks', 'splash', 'cudnn'])
def test_every_kind_computes_the_same(kind, name):
  *shape, window, cap = CASES[name]
  if kind == 'cudnn' and cap:
    pytest.skip('cuDNN has no soft cap')
  made = arrays(*shape)
  out_BHTE, gradients = computed(*made, kind, window, cap)
  expected_BHTE = reference(*made[:4], window, 0.3, cap)
  np.testing.assert_allclose(out_BHTE, expected_BHTE, atol=1e-5)
  if kind != 'plain':
    _, expected = computed(*made, 'plain', window, cap)
    for x, y in zip(gradients, expected, strict=True):
      np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize('kind', ['blocks', 'splash'])
def test_a_mesh_computes_the_same(kind):
  made = arrays(4, 4, 2, 40, 8)
  expected_BHTE, expected = computed(*made, 'plain', 0, 0.0)
  with jax.set_mesh(decoders.mesh(1, 2, 2)):
    out_BHTE, gradients = computed(*made, kind, 0, 0.0)
  np.testing.assert_allclose(out_BHTE, expected_BHTE, atol=1e-5)
  for x, y in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize('kind', ['plain', 'blocks', 'splash'])
def test_results_at_padding_are_finite(kind):
  q_BHTE, k_BKTE, v_BKTE, valid_BT, _ = arrays(2, 2, 2, 40, 8)
  valid_BT = np.zeros_like(valid_BT)  # As in a row that fills up a batch.
  args = q_BHTE, k_BKTE, v_BKTE, valid_BT, np.ones_like(q_BHTE)
  _, gradients = computed(*args, kind, 0, 0.0)
  out_BHTE = attention.causal(*args[:4], kind=kind, scale=1.0)
  assert all(np.isfinite(x).all() for x in (out_BHTE, *gradients))


def test_long_rows_hold_no_scores_of_all_pairs():
  """Temporaries of a layer's attention, forward and backward, are linear."""

  def temporary_bytes(length):
    def total(q_BHTE):
      valid_BT = jnp.ones((1, length), bool)
      k_BKTE = q_BHTE[:, :1]
      return attention.causal(q_BHTE, k_BKTE, k_BKTE, valid_BT, scale=1.0).sum()

    x = jax.ShapeDtypeStruct((1, 4, length, 16), jnp.float32)
    compiled = jax.jit(jax.grad(total)).lower(x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  sizes = [temporary_bytes(length) for length in (1024, 2048, 4096, 8192)]
  for shorter, longer in itertools.pairwise(sizes):
    assert longer < 2.2 * shorter
  assert sizes[-1] < 8192**2  # A quarter of one head's scores in float32.


def test_the_kind_is_chosen_by_length_and_platform(monkeypatch):
  def chosen(length, platform, cap=0, size=128, dtype='bfloat16'):
    monkeypatch.setattr(attention.sharding, 'platform', lambda: platform)
    return attention.choose('auto', (1, 1, length, size), dtype, cap)

  assert chosen(attention.LONG - 1, 'tpu') == 'plain'
  assert chosen(attention.LONG, 'tpu', cap=1.0) == 'splash'
  assert chosen(attention.LONG, 'cuda') == 'cudnn'
  assert chosen(attention.LONG, 'cuda', cap=1.0) == 'blocks'
  assert chosen(attention.LONG, 'cuda', size=256) == 'blocks'
  assert chosen(attention.LONG, 'cuda', dtype='float32') == 'blocks'
  assert chosen(attention.LONG, 'cpu') == 'blocks'
  assert attention.choose('blocks', (1, 1, 1, 8), 'float32', 0) == 'blocks'


def test_the_kinds_are_those_that_a_config_may_name():
  assert {*architecture.ATTENTION} == {'auto', *attention.KINDS}


def test_a_soft_cap_worked_by_hand():
  # 2 tanh(1 / 2) = 0.92423.
  x = jnp.array([1.0, 100.0])
  np.testing.assert_allclose(attention.soft_cap(x, 2.0), [0.924234, 2.0], 1e-6)
  assert attention.soft_cap(x, 0) is x


def test_a_mask_worked_by_hand():
  valid_BT = np.array([[0, 1, 1, 1]], bool)
  np.testing.assert_array_equal(
    attention.causal_mask(valid_BT, 2)[0],
    [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]],
  )
