"""The benchmark of verification; see `launch/bench.py`."""

import contextlib
import time

from absl import flags
import bench_tools

from mrl_jax.rewards import mathematics

_ANSWERS = flags.DEFINE_integer('answers', 10_000, 'verify: clean answers.', 1)
_HOSTILE = flags.DEFINE_float(
  'hostile', 0.01, 'verify: share of hostile answers.', 0, 1
)
_PROCESSES = flags.DEFINE_integer('processes', 0, 'verify: reward.processes.')
_TIMEOUT_S = 1.0
# Answers, and gold answers that they are equal to; i makes them different. Half
# are numbers, which need no sympy.
_CLEAN = [
  ('{i}', '{i}.0'),
  ('**{i}** apples', '{i} (apples)'),
  (r'{i}.5 \times 10^{{7}}', '{i}.5e7'),
  (r'\frac{{{i}}}{{7}}', '{i}/7'),
  (r'{i}\sqrt{{12}}', r'2\cdot {i}\sqrt{{3}}'),
  (r'\left({i}, \frac{{1}}{{2}}\right)', '({i},0.5)'),
  ('x^2 + {i}x + 3x', 'x(x+3+{i})'),
  (r'[{i}, \infty)', r'[{i},\infty)'),
]
_NEVER_END = [
  '10^{{10^{{{i}}}}}+x',
  r'\binom{{1000000}}{{5000{i}}}',
  '(x+{i})^{{3000}}',
  r'\int_0^{i} \sin(x^2)e^{{x^3}}\cos(\ln x) dx',
  'x^{{' * 12 + '{i}' + '}}' * 12,
  '9^{{9^{{9^{{{i}}}}}}}',
  '{i}99999!',
]


def run() -> bench_tools.Result:
  """Times a batch of answers, clean and with hostile ones among them.

  The processes are warm, and all answers are different: nothing is cached. The
  goal is that one hostile answer in a hundred makes a batch no more than twice
  as long.
  """
  clean = [
    (rf'\boxed{{{answer.format(i=i)}}}', gold.format(i=i + i % 2))
    for i in range(100, 100 + _ANSWERS.value)
    for answer, gold in [_CLEAN[i % len(_CLEAN)]]
  ]
  step = int(1 / _HOSTILE.value) if _HOSTILE.value else len(clean) + 1
  mixed = list(clean)
  for i in range(0, len(clean), step):
    form = _NEVER_END[i // step % len(_NEVER_END)]
    mixed[i] = (rf'\boxed{{{form.format(i=100 + i)}}}', 'x+1')
  rows = {}
  for name, answers in (('clean', clean), ('with hostile', mixed)):
    verifier = mathematics.Mathematics('####', _TIMEOUT_S, _PROCESSES.value)
    with contextlib.closing(verifier):
      warm = [(rf'\boxed{{{c}+x}}', '1') for c in 'abcdefgh']
      verifier.verify_all(warm)
      warmed_s, began = verifier.cpu_s, time.perf_counter()
      verdicts = verifier.verify_all(answers)
      rows[name] = {
        'seconds': time.perf_counter() - began,
        'CPU seconds': verifier.cpu_s - warmed_s,
      }
  rows['ratio'] = {
    column: hostile / rows['clean'][column]
    for column, hostile in rows['with hostile'].items()
  }
  about = {
    'answers': len(clean),
    'hostile answers': len(mixed[::step]),
    'timeouts': verdicts.count('timeout'),
  }
  return bench_tools.Result(about, rows)
