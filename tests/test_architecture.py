import pytest

from mrl_jax import checks
from mrl_jax.architecture import Lora
from tests import examples


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_kv_heads': 3}, 'num_kv_heads = 3 does not divide num_heads = 4'),
    ({'head_dim': 7}, 'head_dim = 7 must be even'),
    ({'dtype': 'float16'}, "unknown dtype 'float16'"),
    ({'param_dtype': 'bf16'}, "unknown param_dtype 'bf16'"),
    ({'remat': 'blocks'}, "unknown remat 'blocks'. Did you mean 'block'"),
  ],
)
def test_an_impossible_architecture_is_an_error(changes, message):
  with pytest.raises(checks.InputError, match=message):
    examples.model(**changes)


def test_impossible_adapters_are_an_error():
  with pytest.raises(checks.InputError, match="Did you mean 'q_proj'"):
    Lora(rank=2, alpha=1, target_modules=('q_porj',))
  with pytest.raises(checks.InputError, match='target_modules is empty'):
    Lora(rank=2, alpha=1, target_modules=())
  with pytest.raises(checks.InputError, match='alpha = 0; it must be above 0'):
    Lora(rank=2, alpha=0, target_modules=('q_proj',))
