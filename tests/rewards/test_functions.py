import contextlib

import ml_collections
import pytest

from mrl_jax import checks
from mrl_jax.rewards import functions


def build(verifier='exact', **weights):
  return functions.build(
    ml_collections.ConfigDict(
      {
        'verifier': verifier,
        'timeout_s': 30.0,
        'marker': '=',
        'weights': weights,
      }
    )
  )


def judge(payload, finish='stop', **weights):
  return build(**weights)(payload, finish, '13')


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


@pytest.mark.parametrize('verifier', functions.VERIFIERS)
def test_completions_are_judged_together_as_they_are_alone(verifier):
  completions = [
    (b'= 13', 'stop', '13'),
    (b'= 13', 'length', '13'),
    (b'= 12', 'stop', '13'),
    (b'= 12', 'stop', '12'),
    (b'', 'stop', '13'),
    (rb'\boxed{\frac12}', 'stop', '0.5'),
  ]
  with contextlib.closing(build(verifier, exact=1.0, format=0.25)) as judge:
    judged = judge.judge_all(completions)
    assert [judge(*completion) for completion in completions] == judged
    math = verifier == 'math'
    assert judged == [
      (1.25, 'correct'),
      (0.0, 'unparsable'),
      (0.25, 'wrong'),
      (1.25, 'correct'),
      (0.0, 'unparsable'),
      (1.25, 'correct') if math else (0.0, 'unparsable'),
    ]
    counts = {'correct': 6, 'unparsable': 2, 'wrong': 2}
    assert judge.since_last() == (counts if math else {})
  if math:
    with pytest.raises(RuntimeError, match='closed'):
      judge(rb'\boxed{x}', 'stop', 'y')


def test_an_unknown_verifier_is_named():
  with pytest.raises(
    checks.InputError, match=r"reward.verifier 'maths'. Did you mean 'math'"
  ):
    build('maths')


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
