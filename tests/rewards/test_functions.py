import ml_collections
import pytest

from mrl_jax import checks
from mrl_jax.rewards import functions


def judge(payload, finish='stop', **weights):
  config = ml_collections.ConfigDict({'marker': '=', 'weights': weights})
  return functions.build(config)(payload, finish, '13')


@pytest.mark.parametrize(
  ('payload', 'finish', 'expected'),
  [
    (b'= 13', 'stop', (1.25, 'correct')),
    (b'= 12', 'stop', (0.25, 'wrong')),
    (b': 13', 'stop', (0.0, 'unparsable')),
    (b'= 13', 'length', (0.0, 'unparsable')),  # It was cut off.
    (b'', 'stop', (0.0, 'unparsable')),
    (b'\xff= 13', 'stop', (1.25, 'correct')),
  ],
)
def test_rewards_are_weighted_and_added(payload, finish, expected):
  assert judge(payload, finish, exact=1.0, format=0.25) == expected


def test_an_unknown_reward_is_named():
  with pytest.raises(checks.InputError, match="Did you mean 'exact'"):
    judge(b'', exakt=1.0)


@pytest.mark.parametrize(
  ('length', 'penalty'), [(1, 0), (8, 0), (9, -0.5), (10, -1.0), (12, -1.0)]
)
def test_the_soft_punishment_of_length_by_hand(length, penalty):
  # Of at most ten tokens, the last two are a buffer.
  assert functions.overlong_penalty(length, 10, 2) == penalty
  assert functions.overlong_penalty(length, 10, 0) == 0
