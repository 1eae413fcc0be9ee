import pytest

from mrl_jax import checks


def test_the_nearest_name_is_told():
  with pytest.raises(checks.InputError, match="Did you mean 'xgrpo'"):
    checks.choose('xgrp', {'grpo': 1, 'xgrpo': 2}, 'method')
  with pytest.raises(checks.InputError, match=r"unknown method 'zzz'\. Known"):
    checks.choose('zzz', {'grpo': 1}, 'method')
  assert checks.choose('grpo', {'grpo': 1}, 'method') == 1


def test_require():
  checks.require(True, 'fine')
  with pytest.raises(checks.InputError, match='not so'):
    checks.require(False, 'not so')
