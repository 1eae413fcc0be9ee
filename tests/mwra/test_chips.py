import pytest

from mrl_jax import checks
from mrl_jax.mwra import chips


@pytest.mark.parametrize(
  ('kind', 'name'),
  [
    ('TPU v4', 'v4'),
    ('TPU v5 lite', 'v5e'),
    ('TPU v5', 'v5p'),
    ('TPU v6 lite', 'v6e'),
    ('TPU7x', 'tpu7x'),
    ('NVIDIA H100 80GB HBM3', 'h100'),
    ('NVIDIA H200', 'h200'),
    ('cpu', 'cpu'),
  ],
)
def test_chips_are_found_by_the_names_of_jax(kind, name):
  assert chips.by_kind(kind) is chips.CHIPS[name]


def test_an_unknown_kind_is_refused_with_the_known_ones():
  with pytest.raises(checks.InputError, match="Did you mean 'NVIDIA H200'"):
    chips.by_kind('NVIDIA H20')


@pytest.mark.parametrize('name', chips.CHIPS)
def test_figures_are_in_bytes_and_operations_a_second(name):
  """A factor of a thousand, or bits for bytes, would leave these ranges."""
  chip = chips.CHIPS[name]
  if name == 'cpu':
    return
  assert 15 * 2**30 < chip.hbm_bytes < 200 * 2**30
  assert 100 < chip.flops / chip.hbm_bandwidth < 700  # Operations a byte.
  assert 2 < chip.hbm_bandwidth / chip.link_bandwidth < 13
