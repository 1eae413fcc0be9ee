from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mrl_jax.architecture import Lora
from mrl_jax.models import modules
from tests import examples


def projection(name='q_proj', spec='BTD,DHE->BHTE', **changes):
  lora = Lora(rank=2, alpha=3, target_modules=('q_proj', 'o_proj'))
  model = examples.model(lora=lora, **changes)
  return modules.Projection(name, spec, model, nnx.Rngs(0), bias=True)


def test_rms_norm_worked_by_hand():
  norm = modules.RMSNorm(examples.model(d_model=2), 'D')
  norm.scale[...] = jnp.array([1.0, 2.0])
  # sqrt((9 + 16) / 2) = 3.5355.
  np.testing.assert_allclose(
    jax.jit(norm)(jnp.array([[3.0, 4.0]])), [[0.8485281, 2.2627417]], rtol=1e-5
  )


def test_a_norm_over_all_heads_worked_by_hand():
  model = examples.model(num_heads=2, num_kv_heads=1, head_dim=2)
  norm = modules.RMSNorm(model, 'HE')
  norm.scale[...] = jnp.array([[1.0, 1.0], [1.0, 2.0]])
  x_BHTE = jnp.array([[[[1.0, 2.0]], [[3.0, 4.0]]]])
  # sqrt((1 + 4 + 9 + 16) / 4) = 2.7386.
  np.testing.assert_allclose(
    jax.jit(norm)(x_BHTE)[0, :, 0],
    [[0.3651484, 0.7302967], [1.0954451, 2.9211869]],
    rtol=1e-5,
  )


@pytest.mark.parametrize(('offset', 'weight'), [(False, 1.0), (True, 0.0)])
def test_norms_initially_scale_by_one(offset, weight):
  # Gemma's norms scale by 1 + w.
  norm = modules.RMSNorm(examples.model(norm_offset=offset), 'D')
  assert norm.offset == 1 - weight
  np.testing.assert_array_equal(norm.scale[...], weight)


def test_axes_follow_from_the_letters():
  o_proj = nnx.eval_shape(lambda: projection('o_proj', 'BHTE,HED->BTD'))
  assert o_proj.weight.axes == ('heads', 'head', 'embed')
  assert o_proj.weight.shape == (4, 8, 32)
  assert o_proj.bias.axes == ('embed',)
  assert o_proj.adapter.a.axes == ('heads', 'head', 'rank')
  assert o_proj.adapter.b.axes == ('rank', 'embed')
  k_proj = nnx.eval_shape(lambda: projection('k_proj', 'BTD,DKE->BKTE'))
  assert k_proj.adapter is None


def test_adapters_add_a_low_rank_product_which_is_initially_zero():
  graphdef, params = nnx.split(nnx.jit(projection)())

  @jax.jit
  def apply(params, x_BTD):
    return nnx.merge(graphdef, params)(x_BTD)

  rng = np.random.default_rng(0)
  x_BTD = rng.normal(size=(1, 3, 32)).astype(np.float32)
  weight_DHE = np.asarray(params['weight'][...], np.float64)
  assert weight_DHE.std() == pytest.approx(32**-0.5, rel=0.1)
  np.testing.assert_allclose(
    apply(params, x_BTD),
    np.einsum('BTD,DHE->BHTE', x_BTD, weight_DHE),
    atol=1e-5,
  )
  a_DR, b_RHE, bias_HE = (
    rng.normal(size=shape) for shape in ((32, 2), (2, 4, 8), (4, 8))
  )
  params['adapter']['a'][...] = jnp.asarray(a_DR, jnp.float32)
  params['adapter']['b'][...] = jnp.asarray(b_RHE, jnp.float32)
  params['bias'][...] = jnp.asarray(bias_HE, jnp.float32)
  # alpha / rank is 1.5.
  adapted_DHE = weight_DHE + 1.5 * np.einsum('DR,RHE->DHE', a_DR, b_RHE)
  np.testing.assert_allclose(
    apply(params, x_BTD),
    np.einsum('BTD,DHE->BHTE', x_BTD, adapted_DHE) + bias_HE[None, :, None],
    atol=1e-4,
  )


def test_adapters_are_float32_beside_parameters_in_bfloat16():
  q_proj = nnx.eval_shape(lambda: projection(param_dtype='bfloat16'))
  assert q_proj.weight.dtype == q_proj.bias.dtype == jnp.bfloat16
  assert q_proj.adapter.a.dtype == q_proj.adapter.b.dtype == jnp.float32
