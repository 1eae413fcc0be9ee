import collections
import contextlib
import os
import pathlib
import time

import pytest

from configs import base
from mrl_jax import checks
from mrl_jax.data import prompts
from mrl_jax.rewards import judge
from mrl_jax.rewards import mathematics
from mrl_jax.rewards import verify

FOREVER = r'\boxed{10^{10^{10}}}'  # sympy computes it, and cannot be stopped.


@pytest.fixture(scope='module')
def verifier():
  with contextlib.closing(mathematics.Mathematics('####', 30.0)) as verifier:
    yield verifier


@pytest.mark.parametrize(
  ('text', 'expected'),
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
    (r'\boxed{41} so \boxed{42', None),  # The last box is incomplete.
    (r'\boxed{42\}', None),
    ('\\boxed{42\\', None),
    (r'\boxed 42', None),
    (r'\boxedx{42}', None),
    ('boxed{42}', None),
    ('', None),
  ],
)
def test_the_content_of_the_last_box(text, expected):
  assert mathematics.boxed(text) == expected


def test_boxes_in_a_long_text_take_linear_time():
  began = time.monotonic()
  assert mathematics.boxed(r'\boxed{' * 20_000) is None
  assert mathematics.boxed(r'\boxed{' + '{' * 10**5 + '}' * 10**5) is None
  assert time.monotonic() - began < 2


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    (r'\boxed{1} #### 2', '1'),
    ('#### 1 #### 2', '2'),
    (r'\boxed{1 #### 2', '2'),
    (r'\boxed{} #### 2', ''),
    ('2', None),
  ],
)
def test_a_box_has_precedence_over_a_marker(text, expected):
  assert mathematics.answer(text, '####') == expected


@pytest.mark.parametrize('name', judge.VERIFIERS)
def test_verifiers_agree_on_answers_that_need_no_mathematics(name, verifier):
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


def test_answers_are_verified_by_their_meaning(verifier):
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


class Pool:
  """A pool that gives fixed replies, and records the requests."""

  size, cpu_s = 2, 0.0

  def __init__(self, *replies):
    self._replies, self.requests = list(replies), []

  def map(self, pairs, timeout_s):
    self.requests += pairs
    return [self._replies.pop(0) for _ in pairs]


class CostlyPool:
  """A pool in which answers such as `slow1+x` take seconds of CPU time."""

  size, cpu_s = 2, 0.0

  def __init__(self, **costs):
    self._costs = costs

  def map(self, pairs, timeout_s):
    costs = [self._costs[given.partition('+')[0]] for given, _ in pairs]
    self.cpu_s += sum(min(cost, timeout_s) for cost in costs)
    return ['wrong' if cost <= timeout_s else 'timeout' for cost in costs]


def test_a_process_compares_only_new_pairs_that_need_mathematics(
  verifier, monkeypatch
):
  pool = Pool('wrong', 'timeout', 'crash', 'correct')
  monkeypatch.setattr(verifier, '_pool', pool)
  monkeypatch.setattr(mathematics, '_STEPS_S', ())
  a, b, c = [(rf'\boxed{{{x}+x}}', '1') for x in 'abc']
  easy = (r'\boxed{7}', '7')
  assert verifier.verify_all([a, easy, a, b, c]) == [
    *('wrong', 'correct', 'wrong', 'timeout', 'crash')
  ]
  assert pool.requests == [('a+x', '1'), ('b+x', '1'), ('c+x', '1')]
  # A crash is not cached: another process may have caused it.
  assert verifier.verify_all([b, c, a]) == ['timeout', 'correct', 'wrong']
  assert pool.requests[3:] == [('c+x', '1')]


@pytest.fixture
def verify_costs():
  """Verifies as many answers as there are of each cost (s); limit of 1 s."""

  def run(**counts_and_costs):
    verifier = mathematics.Mathematics('####', 1.0)
    costs = {k: cost for k, (_, cost) in counts_and_costs.items()}
    verifier._pool = pool = CostlyPool(**costs)
    answers = [
      (rf'\boxed{{{kind}+{i}}}', '1')
      for kind, (n, _) in counts_and_costs.items()
      for i in range(n)
    ]
    results = verifier.verify_all(answers)
    return collections.Counter(results), pool.cpu_s, verifier

  return run


def test_slow_comparisons_get_all_of_their_time(verify_costs):
  results, cpu_s, _ = verify_costs(fast=(10, 0.01), slow=(3, 0.9))
  assert results == {'wrong': 13}
  assert cpu_s == pytest.approx(10 * 0.01 + 3 * (0.2 + 0.5 + 0.9))


def test_answers_that_never_end_add_little_to_a_batch(verify_costs):
  clean = dict(fast=(9800, 0.01), slow=(100, 0.3))
  _, before, _ = verify_costs(**clean)
  results, after, verifier = verify_costs(**clean, hostile=(100, 9.0))
  assert results == {'wrong': 9900, 'timeout': 100}
  assert after < 1.75 * before
  # A timeout after less than all of its time is not remembered.
  assert 'timeout' not in verifier._known.values()
  _, _, verifier = verify_costs(hostile=(2, 9.0))
  assert [*verifier._known.values()] == ['timeout'] * 2


def test_the_cache_is_bounded(verifier, monkeypatch):
  pool = Pool(*['wrong'] * 5)
  monkeypatch.setattr(verifier, '_pool', pool)
  monkeypatch.setattr(verifier, '_known', {})
  monkeypatch.setattr(mathematics, '_MAX_KNOWN', 2)
  monkeypatch.setattr(mathematics, '_STEPS_S', ())
  for x in 'xyyz':
    verifier.verify_all([(rf'\boxed{{{x}}}', '1')])
  assert pool.requests == [('x', '1'), ('y', '1'), ('z', '1')]
  # `x` was evicted; a batch may be larger than the cache.
  answers = [(rf'\boxed{{{x}}}', '1') for x in 'yzx']
  assert verifier.verify_all(answers) == ['wrong'] * 3
  assert pool.requests[3:] == [('x', '1')]


def test_a_comparison_that_never_ends_is_a_timeout_for_that_answer_only():
  with contextlib.closing(mathematics.Mathematics('####', 1.0)) as verifier:
    verifier.verify_all([(r'\boxed{x}', 'y')])  # Starts a process.
    began = time.monotonic()
    answers = [(FOREVER, '1'), (r'\boxed{1+x}', 'x+1'), (FOREVER, '1')]
    expected = ['timeout', 'correct', 'timeout']
    assert verifier.verify_all(answers) == expected
    assert 1.0 <= time.monotonic() - began < 20
    # A timeout is cached.
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
    # Refused before sympy would compute it.
    ('99999999!', '1', 'unparsable'),
    ('9!!!', '1', 'unparsable'),
    ('9^{9^{9^9}}', '1', 'unparsable'),
    ('2^{-100000}', '1', 'unparsable'),
    ('9' * 100 + '+1', '1', 'unparsable'),
    ('{' * 30 + 'x' + '}' * 30, '1', 'unparsable'),
    ('9' * 100, '9' * 99, 'wrong'),
    ('2^{2017}', '2^{2016}', 'wrong'),
    ('e^{-x^2}', 'e^{-x^{2}}', 'correct'),
    (r'\frac{1}{2}' + ' ' * 10**6, '0.5', 'correct'),
  ],
)
def test_any_text_has_a_verdict(verifier, given, gold, verdict):
  assert verifier.verify_all([(rf'\boxed{{{given}}}', gold)]) == [verdict]


@pytest.mark.parametrize(
  ('file', 'field'), [('gsm8k_test', 'question'), ('amc23', 'problem')]
)
def test_gold_answers_of_real_data_sets_are_correct(file, field, verifier):
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
  for offset, verdict in ((0, 'correct'), (1, 'wrong')):
    answers = [
      (rf'So it is $\boxed{{{number + offset:,.2f}}}$.', gold)
      for number, gold in zip(numbers, golds, strict=True)
    ]
    assert verifier.verify_all(answers) == [verdict] * len(golds)


# Answers in the spellings of data sets and models: (source, answer, gold answer,
# verdict). Answers that are not readable count as wrong.
TABLE = [
  line.split('\t')
  for line in pathlib.Path(__file__)
  .with_name('answers.tsv')
  .read_text(encoding='utf-8')
  .splitlines()
]
# A subscript with a macro is not read as a name, so the right side is not the
# answer.
KNOWN_FAILURES = [
  (
    r'\frac{ q_{0} }{ \sqrt{2 C L}  }',
    r'$I_{\max }=\frac{q_{0}}{\sqrt{2 L C}}$',
  )
]


def test_verdicts_of_a_table_of_answers(verifier):
  results = verifier.verify_all(
    [(rf'\boxed{{{answer}}}', gold) for _, answer, gold, _ in TABLE]
  )
  failures = [
    (answer, gold)
    for (_, answer, gold, verdict), result in zip(TABLE, results, strict=True)
    if (result == 'correct') != (verdict == 'correct')
  ]
  assert failures == KNOWN_FAILURES
  assert len(TABLE) >= 250


def test_the_error_for_a_missing_package_says_how_to_install_it(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(checks.InputError, match=r"pip install -e '.\[math\]'"):
    mathematics.Mathematics('####', 5.0)


def test_closing_closes_the_processes():
  verifier = mathematics.Mathematics('####', 5.0)
  verifier.close()
  with pytest.raises(RuntimeError, match='closed'):
    verifier.verify_all([(r'\boxed{x}', 'y')])
