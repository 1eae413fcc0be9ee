import pytest

from mrl_jax import checks


def test_the_error_for_an_unknown_name_suggests_the_nearest():
  with pytest.raises(checks.InputError, match="Did you mean 'xgrpo'"):
    checks.choose('xgrp', {'grpo': 1, 'xgrpo': 2}, 'method')
  with pytest.raises(checks.InputError, match=r"unknown method 'zzz'\. Known"):
    checks.choose('zzz', {'grpo': 1}, 'method')
  assert checks.choose('grpo', {'grpo': 1}, 'method') == 1


def test_a_requirement_that_does_not_hold_is_an_error():
  checks.require(True, 'fine')
  with pytest.raises(checks.InputError, match='not so'):
    checks.require(False, 'not so')
