from mrl_jax.sharing import select
from tests import examples


def test_nothing_and_everything():
  offered = examples.group([1.0, 0.0], policy='b')
  assert list(select.nothing([], offered)) == []
  assert list(select.everything([], offered)) == offered
