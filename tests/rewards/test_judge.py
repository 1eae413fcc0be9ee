import contextlib
import dataclasses

import pytest

from configs import base
from mrl_jax import records
from mrl_jax.rewards import functions
from mrl_jax.rewards import judge as judge_lib

GOLD = records.Prompt(id='p0', text='6 + 7', answer='13')
HALF = records.Prompt(id='p1', text='1 / 2', answer='0.5')


def config(verifier='exact', **rewards):
  made = base.get_config()
  made.reward.verifier = verifier
  made.reward.functions = tuple(rewards)
  made.reward.weights = tuple(rewards.values())
  return made


def completion(payload, finish='stop', prompt=GOLD):
  return functions.completion(payload, finish, 3, prompt)


@contextlib.contextmanager
def judging(verifier='exact', **rewards):
  made = config(verifier, **rewards)
  with contextlib.closing(judge_lib.VERIFIERS[verifier](made.reward)) as shared:
    yield judge_lib.build(made, shared)


@pytest.mark.parametrize(
  ('payload', 'finish', 'expected'),
  [
    (b'= 13', 'stop', (1.25, 'correct')),
    (b'= 12', 'stop', (0.25, 'wrong')),
    (b': 13', 'stop', (0.0, 'unparsable')),
    (b'= 13\n\n', 'stop_string', (1.25, 'correct')),
    (b'= 12\n\n', 'stop_string', (0.25, 'wrong')),
    (b'= 13', 'length', (0.0, 'unparsable')),  # Cut off.
    (b'', 'stop', (0.0, 'unparsable')),
    (b'\xff= 13', 'stop', (1.25, 'correct')),
  ],
)
def test_rewards_are_weighted_and_added(payload, finish, expected):
  with judging(exact=1.0, format=0.25) as judge:
    assert judge([completion(payload, finish)]) == [expected]
    assert judge([]) == []


@pytest.mark.parametrize('verifier', judge_lib.VERIFIERS)
def test_a_batch_is_judged_as_its_completions_one_by_one(verifier):
  batch = [
    completion(b'= 13'),
    completion(b'= 13', 'length'),
    completion(b'= 12'),
    completion(b'= 0.50', prompt=HALF),
    completion(b''),
    completion(rb'\boxed{\frac12}', prompt=HALF),
  ]
  math = verifier == 'math'
  with judging(verifier, exact=1.0, format=0.25) as judge:
    judgements = judge(batch)
    assert [judge([c])[0] for c in batch] == judgements
    assert judgements == [
      (1.25, 'correct'),
      (0.0, 'unparsable'),
      (0.25, 'wrong'),
      (1.25, 'correct'),
      (0.0, 'unparsable'),
      (1.25, 'correct') if math else (0.0, 'unparsable'),
    ]
    counts = {'correct': 6, 'unparsable': 2, 'wrong': 2}
    assert judge.since_last() == (counts if math else {})
    assert judge.since_last() == {}
    assert judge.seconds > 0
  if math:
    with pytest.raises(RuntimeError, match='closed'):
      judge([completion(rb'\boxed{x}')])


@dataclasses.dataclass
class Counting:
  """A verifier with one result for every answer, which is counted."""

  result: str = 'wrong'
  counted = True

  def verify_all(self, answers):
    return [self.result] * len(answers)


def test_judges_that_share_a_verifier_count_their_own_answers():
  verifier = Counting()
  first, second = (judge_lib.Judge(verifier, []) for _ in range(2))
  first([completion(b'= 1')])
  second([completion(b'= 1')] * 2)
  first([completion(b'= 1')])
  assert first.since_last() == second.since_last() == {'wrong': 2}


@pytest.mark.parametrize('result', records.UNDECIDED)
def test_an_answer_whose_verification_failed_earns_nothing(result):
  rewards = [(functions.exact, 1.0), (functions.format, 0.5)]
  judge = judge_lib.Judge(Counting(result), rewards)
  assert judge([completion(b'= 1')]) == [(0.0, result)]
  assert judge.since_last() == {result: 1}


def test_reward_functions_see_the_verdict():
  def seen(completions):
    assert [c.verdict for c in completions] == ['wrong', 'unparsable']
    return [3.0, 4.0]

  judge = judge_lib.Judge(Counting(), [(seen, 0.5)])
  batch = [completion(b'= 1'), completion(b'= 1', 'length')]
  assert judge(batch) == [(1.5, 'wrong'), (2.0, 'unparsable')]
