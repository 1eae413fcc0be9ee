import inspect
import pathlib
from typing import get_args

import pytest

from configs import base
from mrl_jax import records
from mrl_jax.rewards import functions

PROMPT = records.Prompt(id='p0', text='6 + 7', answer='13')


def completion(payload=b'= 13', finish='stop', tokens=3, **changes):
  unverified = functions.completion(payload, finish, tokens, PROMPT)
  return unverified._replace(**changes)


def test_a_completion_has_its_prompt_and_text_in_utf8():
  assert completion(b'\xff= 13') == functions.Completion(
    text='\ufffd= 13',
    finish='stop',
    tokens=3,
    prompt='6 + 7',
    gold='13',
    verdict='unparsable',
  )


def test_exact_rewards_correct_and_format_all_parsable_answers():
  verdicts = get_args(records.Verdict)
  assert verdicts[:3] == ('correct', 'wrong', 'unparsable')
  batch = [completion(verdict=verdict) for verdict in verdicts]
  assert functions.exact(batch) == [1.0, 0.0, 0.0, 0.0, 0.0]
  assert functions.format(batch) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_overlong_penalty_worked_by_hand():
  # Of at most 10 tokens, the penalty grows over the last 2.
  batch = [completion(tokens=n) for n in (1, 8, 9, 10, 12)]
  assert functions.overlong(batch, longest=10, ramp=2) == [0, 0, -0.5, -1, -1]
  assert functions.overlong(batch, longest=10, ramp=0) == [0.0] * 5


def test_the_overlong_penalty_has_the_limits_of_the_config():
  config = base.get_config()
  config.sample.max_tokens, config.reward.overlong_tokens = 10, 2
  penalty = functions.REWARDS['overlong'](config)
  assert penalty([completion(tokens=9)]) == [-0.5]


@pytest.mark.parametrize('name', functions.REWARDS)
def test_every_reward_gives_a_number_for_each_completion(name):
  reward = functions.REWARDS[name](base.get_config())
  values = reward([completion(tokens=n) for n in range(4)])
  assert [type(value) for value in values] == [float] * 4
  assert reward([]) == []


@pytest.mark.parametrize('name', functions.RANGES)
def test_a_reward_stays_in_its_range_and_reaches_both_ends(name):
  config = base.get_config()
  config.sample.max_tokens, config.reward.overlong_tokens = 10, 4
  batch = [
    completion(verdict=verdict, tokens=n)
    for verdict in get_args(records.Verdict)
    for n in range(12)
  ]
  values = functions.REWARDS[name](config)(batch)
  assert (min(values), max(values)) == functions.RANGES[name]


@pytest.mark.parametrize(
  ('names', 'weights', 'expected'),
  [
    (('exact',), (1.0,), (0.0, 1.0)),
    (('exact', 'overlong'), (2.0, 0.5), (-0.5, 2.0)),
    (('exact', 'format'), (1.0, -0.5), (-0.5, 1.0)),
    (('exact', 'mine'), (1.0, 0.1), (-records.LARGEST, records.LARGEST)),
  ],
)
def test_the_range_of_a_weighted_sum(names, weights, expected):
  config = base.get_config().reward
  config.functions, config.weights = names, weights
  assert functions.reward_range(config) == expected


def test_the_example_of_the_docstring_is_a_reward_function():
  path = pathlib.Path(inspect.getfile(functions))
  _, _, example = path.read_text().partition('  def short')
  example = 'def short' + example.partition('\n\n')[0].replace('\n  ', '\n')
  names = {}
  exec(example, names)
  batch = [completion(b'x' * n) for n in (99, 100)]
  assert names['short'](batch) == [1.0, 0.0]
