import contextlib
import os
import time

import pytest

from configs import base
from mrl_jax import checks
from mrl_jax.data import prompts
from mrl_jax.rewards import functions
from mrl_jax.rewards import mathematics
from mrl_jax.rewards import verify

FOREVER = r'\boxed{99999999!}'  # sympy calculates it; nothing stops it.


@pytest.fixture(scope='module')
def shared():
  with contextlib.closing(mathematics.Mathematics('####', 30.0)) as verifier:
    yield verifier


@pytest.fixture
def verifier(shared):
  shared.since_last()
  return shared


@pytest.mark.parametrize(
  ('text', 'found'),
  [
    (r'\boxed{42}', '42'),
    (r'first \boxed{41}, no: \boxed{42}.', '42'),
    (r'\boxed{\frac{1}{2}}', r'\frac{1}{2}'),
    (r'\boxed{\{1, \{2\}\}}', r'\{1, \{2\}\}'),
    (r'\boxed{\left\{1\right.} }', r'\left\{1\right.'),
    (r'\boxed{\}}', r'\}'),
    (r'\boxed{1\\{2}}', r'1\\{2}'),
    (r'\fbox{42}', '42'),
    (r'\boxed{1} \fbox{2}', '2'),
    (r'\boxed{\boxed{42}}', '42'),
    ('\\boxed \n {42}', '42'),
    ('\\boxed{ 4\n\t2 }', '4 2'),
    (r'\boxed{}', ''),
    (r'\boxed{42', None),
    (r'\boxed{41} so \boxed{42', None),  # It did not finish what it meant.
    (r'\boxed{42\}', None),
    ('\\boxed{42\\', None),
    (r'\boxed 42', None),
    (r'\boxedx{42}', None),
    ('boxed{42}', None),
    ('', None),
  ],
)
def test_the_last_box(text, found):
  assert mathematics.boxed(text) == found


def test_boxes_are_found_in_a_long_text_at_once():
  began = time.monotonic()
  assert mathematics.boxed(r'\boxed{' * 20_000) is None
  assert mathematics.boxed(r'\boxed{' + '{' * 10**5 + '}' * 10**5) is None
  assert time.monotonic() - began < 2


@pytest.mark.parametrize(
  ('text', 'found'),
  [
    (r'\boxed{1} #### 2', '1'),
    ('#### 1 #### 2', '2'),
    (r'\boxed{1 #### 2', '2'),
    (r'\boxed{} #### 2', ''),
    ('2', None),
  ],
)
def test_a_box_goes_before_a_marker(text, found):
  assert mathematics.answer(text, '####') == found


@pytest.mark.parametrize('name', functions.VERIFIERS)
def test_verifiers_agree_where_it_takes_no_mathematics(name, verifier):
  verifier = {'exact': verify.Exact('####'), 'math': verifier}[name]
  answers = {
    ('so it is #### 13', '13'): 'correct',
    ('so it is #### $1,300.00', '1300'): 'correct',
    ('#### 1/2', '0.5'): 'correct',
    ('#### 0.333333', '1/3'): 'wrong',
    ('#### 12', '13'): 'wrong',
    ('#### 13', 'She has <<16-3=13>>13 left.\n#### 13'): 'correct',
    ('#### 16', 'She has <<16-3=13>>13 left.\n#### 13'): 'wrong',
    ('13', '13'): 'unparsable',
    ('#### ', '13'): 'unparsable',
    ('', '13'): 'unparsable',
  }
  assert verifier.verify_all(list(answers)) == list(answers.values())
  assert verifier.verify_all([]) == []


def test_answers_are_verified_by_what_they_mean(verifier):
  answers = {
    (r'so it is \boxed{\frac{1}{2}}', r'thus \boxed{0.5}'): 'correct',
    (r'so it is \boxed{x+1}', '1 + x'): 'correct',
    ('so it is #### 1+x', '#### x+1'): 'correct',
    (r'so it is \boxed{42}', 'as <<40+2=42>>42.\n#### 42'): 'correct',
    (r'so it is \boxed{x+2}', '1 + x'): 'wrong',
    (r'so it is \boxed{\frac{}', '1 + x'): 'unparsable',
    (r'so it is \boxed{\frac{}}', '1 + x'): 'unparsable',
    ('so it is x+1', '1 + x'): 'unparsable',
  }
  assert verifier.verify_all(list(answers)) == list(answers.values())
  assert verifier.since_last() == {'correct': 4, 'unparsable': 3, 'wrong': 1}
  assert verifier.since_last() == {}


class Pool:
  """Says what it is told to, and notes what it is asked."""

  def __init__(self, *replies):
    self._replies, self.asked = list(replies), []

  def map(self, pairs):
    self.asked += pairs
    return [self._replies.pop(0) for _ in pairs]


def test_only_what_is_new_and_hard_is_asked_of_a_process(verifier, monkeypatch):
  pool = Pool('wrong', 'timeout', 'crash', 'correct')
  monkeypatch.setattr(verifier, '_pool', pool)
  a, b, c = [(rf'\boxed{{{x}+x}}', '1') for x in 'abc']
  easy = (r'\boxed{7}', '7')
  assert verifier.verify_all([a, easy, a, b, c]) == [
    *('wrong', 'correct', 'wrong', 'unparsable', 'unparsable')
  ]
  assert pool.asked == [('a+x', '1'), ('b+x', '1'), ('c+x', '1')]
  assert verifier.since_last() == {
    **{'correct': 1, 'crash': 1, 'timeout': 1, 'wrong': 2}
  }
  # A crash may have been another's fault.
  assert verifier.verify_all([b, c, a]) == ['unparsable', 'correct', 'wrong']
  assert pool.asked[3:] == [('c+x', '1')]
  assert verifier.since_last() == {'correct': 1, 'timeout': 1, 'wrong': 1}


def test_the_memory_has_a_bound_and_keeps_what_is_used(verifier, monkeypatch):
  pool = Pool(*['wrong'] * 5)
  monkeypatch.setattr(verifier, '_pool', pool)
  monkeypatch.setattr(verifier, '_known', type(verifier._known)())
  monkeypatch.setattr(mathematics, '_MAX_KNOWN', 2)
  for x in 'xyxzx':
    verifier.verify_all([(rf'\boxed{{{x}}}', '1')])
  assert pool.asked == [('x', '1'), ('y', '1'), ('z', '1')]
  # `y` is forgotten; and these are more at once than are remembered.
  answers = [(rf'\boxed{{{x}}}', '1') for x in 'yzx']
  assert verifier.verify_all(answers) == ['wrong'] * 3
  assert pool.asked[3:] == [('y', '1')]


def test_what_takes_forever_is_counted_and_the_rest_verified():
  with contextlib.closing(mathematics.Mathematics('####', 1.0)) as verifier:
    verifier.verify_all([(r'\boxed{x}', 'y')])  # A process has started.
    began = time.monotonic()
    answers = [(FOREVER, '1'), (r'\boxed{1+x}', 'x+1'), (FOREVER, '1')]
    expected = ['unparsable', 'correct', 'unparsable']
    assert verifier.verify_all(answers) == expected
    assert 1.0 <= time.monotonic() - began < 10
    assert verifier.since_last() == {'correct': 1, 'timeout': 2, 'wrong': 1}
    # It is not tried again.
    began = time.monotonic()
    assert verifier.verify_all(answers) == expected
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize(
  ('given', 'gold', 'verdict'),
  [
    ('a\0b', '1', 'unparsable'),
    ('\ud800', '1', 'unparsable'),
    ('1+\n\nx', 'x\r\n+ 1', 'correct'),
    ('x' * 10**6, 'x' * 10**6, 'correct'),
    ('x' * 10**6, '1', 'unparsable'),
    ('9' * 10**6, '1', 'unparsable'),
    ('x', 'x' * 10**6, 'unparsable'),
    ('(' * 10**6, '1', 'unparsable'),
    (r'\frac{1}{2}' + ' ' * 10**6, '0.5', 'correct'),
  ],
)
def test_any_text_is_legal(verifier, given, gold, verdict):
  assert verifier.verify_all([(rf'\boxed{{{given}}}', gold)]) == [verdict]


@pytest.mark.parametrize(
  ('file', 'field'), [('gsm8k_test', 'question'), ('amc23', 'problem')]
)
def test_gold_answers_of_real_files(file, field, verifier):
  folder = os.environ.get('MRL_TEST_DATA')
  if folder is None:
    pytest.skip('MRL_TEST_DATA does not name a folder of real data')
  config = base.get_config().data
  config.source, config.jsonl.prompt = 'jsonl', field
  config.jsonl.train = os.path.join(folder, 'math', f'{file}.jsonl')
  golds = [p.answer for p in prompts.load(config, 'train', cache_dir='')]
  numbers = [
    float(gold.rpartition('####')[-1].replace(',', '')) for gold in golds
  ]
  for more, verdict in ((0, 'correct'), (1, 'wrong')):
    answers = [
      (rf'So it is $\boxed{{{number + more:,.2f}}}$.', gold)
      for number, gold in zip(numbers, golds, strict=True)
    ]
    assert verifier.verify_all(answers) == [verdict] * len(golds)


def test_what_is_not_installed_is_named(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(checks.InputError, match=r"pip install -e '.\[math\]'"):
    mathematics.Mathematics('####', 5.0)


def test_closing_closes_the_processes():
  verifier = mathematics.Mathematics('####', 5.0)
  verifier.close()
  with pytest.raises(RuntimeError, match='closed'):
    verifier.verify_all([(r'\boxed{x}', 'y')])
