import pytest

from mrl_jax import checks
from mrl_jax.models import families
from tests import examples


def test_an_unknown_family_is_told():
  with pytest.raises(checks.InputError, match="Did you mean 'llama'"):
    families.build('lama')


@pytest.mark.parametrize('family', sorted(families.FAMILIES))
def test_sizes_are_the_users(family):
  config = families.build(family, **examples.SIZES)
  for name, size in examples.SIZES.items():
    assert getattr(config, name) == size
