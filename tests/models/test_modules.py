from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

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
    norm(jnp.array([[3.0, 4.0]])), [[0.8485281, 2.2627417]], rtol=1e-5
  )


def test_a_norm_over_all_heads_worked_by_hand():
  model = examples.model(num_heads=2, num_kv_heads=1, head_dim=2)
  norm = modules.RMSNorm(model, 'HE', over=(1, 3))
  norm.scale[...] = jnp.array([[1.0, 1.0], [1.0, 2.0]])
  x_BHTE = jnp.array([[[[1.0, 2.0]], [[3.0, 4.0]]]])
  # sqrt((1 + 4 + 9 + 16) / 4) = 2.7386.
  np.testing.assert_allclose(
    norm(x_BHTE)[0, :, 0],
    [[0.3651484, 0.7302967], [1.0954451, 2.9211869]],
    rtol=1e-5,
  )


def test_axes_follow_from_the_letters():
  found = projection('o_proj', 'BHTE,HED->BTD')
  assert found.weight.axes == ('heads', 'head', 'embed')
  assert found.weight.shape == (4, 8, 32)
  assert found.bias.axes == ('embed',)
  assert found.adapter.a.axes == ('heads', 'head', 'rank')
  assert found.adapter.b.axes == ('rank', 'embed')
  assert projection('k_proj', 'BTD,DKE->BKTE').adapter is None


def test_adapters_add_a_product_of_low_rank():
  found = projection()
  rng = np.random.default_rng(0)
  for param in (found.bias, found.adapter.b):
    param[...] = jnp.asarray(rng.normal(size=param.shape), jnp.float32)
  x_BTD = jax.random.normal(jax.random.key(0), (1, 3, 32))
  q, a, b, bias = (
    np.asarray(x[...], np.float64)
    for x in (found.weight, found.adapter.a, found.adapter.b, found.bias)
  )
  # alpha / rank is 1.5.
  expected = np.einsum(
    'BTD,DHE->BHTE', x_BTD, q + 1.5 * np.einsum('DR,RHE->DHE', a, b)
  )
  np.testing.assert_allclose(
    found(x_BTD), expected + bias[None, :, None, :], atol=1e-5
  )


def test_adapters_are_float32_over_parameters_that_are_not():
  found = projection(param_dtype='bfloat16')
  assert found.weight.dtype == found.bias.dtype == jnp.bfloat16
  assert found.adapter.a.dtype == found.adapter.b.dtype == jnp.float32
