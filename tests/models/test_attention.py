import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax import architecture
from mrl_jax.models import attention
from mrl_jax.models import blockwise
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
  """q, k, v, ids of several rows with padding, and weights of a loss.

  The first row of the batch is padded on the left, the last on the right; the
  others have no padding.
  """
  rng = np.random.default_rng(0)
  q_BHTE = rng.normal(size=(rows, heads, length, size)).astype(np.float32)
  k_BKTE, v_BKTE = rng.normal(size=(2, rows, shared, length, size)).astype(
    np.float32
  )
  starts_BT = rng.random((rows, length)) < 3 / length
  row_BT = 1 + np.cumsum(starts_BT, 1, dtype=np.int32)
  row_BT[0, : length // 3] = 0
  row_BT[-1, length - length // 4 :] = 0
  weight_BHTE = rng.normal(size=q_BHTE.shape) * (row_BT > 0)[:, None, :, None]
  return q_BHTE, k_BKTE, v_BKTE, row_BT, weight_BHTE.astype(np.float32)


def reference(q_BHTE, k_BKTE, v_BKTE, row_BT, window, scale, cap):
  """Computed token by token, in float64."""
  out_BHTE = np.zeros(q_BHTE.shape)
  share = q_BHTE.shape[1] // k_BKTE.shape[1]
  for b, h, t in np.ndindex(q_BHTE.shape[:3]):
    k_TE, v_TE = k_BKTE[b, h // share], v_BKTE[b, h // share]
    seen = [
      s
      for s in range(t + 1)
      if row_BT[b, s] == row_BT[b, t] and (not window or t - s < window)
    ]
    if not row_BT[b, t]:
      continue
    score_S = k_TE[seen].astype(float) @ q_BHTE[b, h, t] * scale
    score_S = cap * np.tanh(score_S / cap) if cap else score_S
    weight_S = np.exp(score_S)
    out_BHTE[b, h, t] = weight_S / weight_S.sum() @ v_TE[seen]
  return out_BHTE


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def computed(q_BHTE, k_BKTE, v_BKTE, row_BT, weight_BHTE, kind, window, cap):
  """The result at valid tokens, and the gradients of a weighted sum."""

  def total(q_BHTE, k_BKTE, v_BKTE):
    settings = {'window': window, 'scale': 0.3, 'cap': cap}
    args = q_BHTE, k_BKTE, v_BKTE, row_BT
    if kind == 'cudnn':  # Its kernel needs a GPU; XLA has the same interface.
      out_BHTE = attention._cudnn(*args, *settings.values(), 'xla')
    else:
      out_BHTE = attention.causal(*args, kind=kind, **settings)
    return (out_BHTE * weight_BHTE).sum(), out_BHTE

  gradients, out_BHTE = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(
    q_BHTE, k_BKTE, v_BKTE
  )
  return out_BHTE * (row_BT > 0)[:, None, :, None], gradients


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
  q_BHTE, k_BKTE, v_BKTE, row_BT, _ = arrays(2, 2, 2, 40, 8)
  row_BT = np.zeros_like(row_BT)  # As in a row that fills up a batch.
  args = q_BHTE, k_BKTE, v_BKTE, row_BT, np.ones_like(q_BHTE)
  _, gradients = computed(*args, kind, 0, 0.0)
  out_BHTE = attention.causal(*args[:4], kind=kind, scale=1.0)
  assert all(np.isfinite(x).all() for x in (out_BHTE, *gradients))


def test_long_rows_hold_no_scores_of_all_pairs():
  """Temporaries of a layer's attention, forward and backward, are linear."""

  def temporary_bytes(length):
    def total(q_BHTE):
      row_BT = jnp.ones((1, length), jnp.int32)
      k_BKTE = q_BHTE[:, :1]
      return attention.causal(q_BHTE, k_BKTE, k_BKTE, row_BT, scale=1.0).sum()

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
  row_BT = np.array([[1, 1, 1, 2, 2]])
  np.testing.assert_array_equal(
    attention.causal_mask(row_BT, 2)[0],
    [
      [1, 0, 0, 0, 0],
      [1, 1, 0, 0, 0],
      [0, 1, 1, 0, 0],
      [0, 0, 0, 1, 0],
      [0, 0, 0, 1, 1],
    ],
  )


@pytest.mark.parametrize('kind', ['plain', 'blocks', 'splash', 'cudnn'])
def test_a_token_never_sees_another_row(kind):
  q_BHTE, k_BKTE, v_BKTE, row_BT, weight_BHTE = arrays(2, 2, 1, 70, 8)
  row_BT[0] = np.repeat([1, 2, 3, 0], [17, 30, 20, 3])
  changed_BT = (row_BT == 2)[:, None, :, None]
  others = [
    np.where(changed_BT, 3 * x + 1, x) for x in (q_BHTE, k_BKTE, v_BKTE)
  ]
  weight_BHTE = weight_BHTE * ~changed_BT
  found = [
    computed(*args, row_BT, weight_BHTE, kind, 0, 0.0)
    for args in ((q_BHTE, k_BKTE, v_BKTE), others)
  ]
  for x, y in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_array_equal(x * ~changed_BT, y * ~changed_BT)


def test_blocks_without_a_row_of_the_queries_are_not_computed():
  # Blocks of four slots; rows begin at slots 0, 5 and 6, and in the other row
  # of the batch at 0, 8 and, after padding, 14.
  row_BT = jnp.array(
    [
      [1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 0, 0, 0, 0],
      [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 3, 3],
    ]
  )
  first_BT, last_BT = blockwise.runs(row_BT)
  np.testing.assert_array_equal(
    first_BT[0], [0] * 5 + [5] + [6] * 6 + [12, 13, 14, 15]
  )
  np.testing.assert_array_equal(
    last_BT[1], [7] * 8 + [11] * 4 + [12, 13, 15, 15]
  )
  first_N = blockwise._first_blocks(row_BT, 4)
  np.testing.assert_array_equal(first_N, [0, 0, 1, 3])
  last_N = blockwise._last_blocks(row_BT, 4)
  np.testing.assert_array_equal(last_N, [1, 2, 2, 3])
