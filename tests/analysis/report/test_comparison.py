"""Several runs on a page: what they share is compared, gaps are named."""

import os
import pathlib

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.report import charts
from mrl_jax.analysis.report import comparison
from tests.analysis import workdirs
from tests.analysis.report import pages

REWARD = charts.LEARNING[:1]


def read(folder, **changes):
  return run_lib.read(workdirs.write(folder, **changes))


def test_the_page_has_all_runs_and_their_differences(tmp_path):
  folders = [
    workdirs.write(tmp_path / 'prp' / 'seed-3'),
    workdirs.write(
      tmp_path / 'grpo' / 'seed-3', rounds=2, rescued_by={}, exchange={},
      residuals={}, config={'method.name': 'grpo', 'cache_dir': '/elsewhere'},
    ),
    workdirs.write(tmp_path / '<b>\u202e', policies=('qwen',)),
  ]  # fmt: skip
  (tmp_path / 'grpo' / 'seed-3' / 'plan.json').unlink()
  path = comparison.write(folders, os.path.join(tmp_path, 'page.html'))
  text = pathlib.Path(path).read_text()
  assert '\u202e' not in text
  shown = pages.check(text).text
  for part in (
    '3 runs, side by side',
    'grpo/seed-3: plan.json is missing',
    'prp/seed-3 25.0 → 75.0 ±2.0 25.0 → 75.0 ±2.0 25.0 → 75.0 ±2.0 – prp 3 '
    'finished, 4 rounds',
    'grpo/seed-3 25.0 → 50.0 ±2.0 25.0 → 50.0 ±2.0 25.0 → 50.0 ±2.0 – grpo 3 '
    'after 2 of 4 rounds',
    '/<b>\\u202e 25.0 → 75.0 ±2.0 – – 25.0 → 75.0 ±2.0 prp',
    'prp/seed-3 26 s, median round 4 s',
    'prp/seed-3 80 16 KiB 56 0 64 16 160 → 320 25.0',
    'grpo/seed-3 none none',
    'method.name "prp" "grpo" "prp"',
  ):
    assert part in shown
  assert 'cache_dir' not in shown
  assert 'method.kl_weight "' not in shown
  assert (
    'Held-out accuracy of prp/seed-3, grpo/seed-3 : not drawn, because nothing '
    'was evaluated' in shown
  )


def test_labels_are_as_short_as_they_can_be(tmp_path):
  def labels(*names):
    return comparison.labels([os.fspath(tmp_path / name) for name in names])

  assert labels('a/x', 'a/y') == ['x', 'y']
  assert labels('a/x', 'b/x', 'b/y') == ['a/x', 'b/x', 'b/y']
  assert comparison.labels(['/x', '/y/x']) == ['/x', 'y/x']
  with pytest.raises(checks.InputError, match='give each run once'):
    labels('a/x', 'b', 'b/../a/x')


def test_the_mean_is_of_rounds_that_all_policies_have(tmp_path):
  rows = [
    *(workdirs.row(r, 'gemma', reward=r) for r in (0, 1, 2)),
    *(workdirs.row(r, 'llama', reward=4.0) for r in (0, 2)),
  ]
  runs = {
    'a': read(tmp_path / 'a', rounds=3, rows=rows),
    'b': read(tmp_path / 'b', rounds=3),
  }
  (chart,) = comparison.over_rounds(runs, REWARD)
  (a, b) = chart.series
  assert (a.x.tolist(), a.y.tolist()) == ([0, 2], [2, 3])
  assert b.y.tolist() == [0.5] * 3
  assert a.style != b.style
  (chart,) = comparison.over_rounds(runs, REWARD, 'gemma')
  assert chart.series[0].y.tolist() == [0, 1, 2]


def test_the_error_of_a_mean_is_its_upper_bound(tmp_path):
  workdirs.write(tmp_path)
  evaluations = [
    workdirs.evaluation(0, 'gemma', 0.2, error={'all': 0.01}),
    workdirs.evaluation(0, 'llama', 0.4, error={'all': 0.03}),
    workdirs.evaluation(4, 'gemma', 0.2, error={'all': 0.01}),
    workdirs.evaluation(4, 'llama', 0.4, error={'all': None}),
  ]
  (tmp_path / 'evaluations.jsonl').write_text(workdirs.lines(evaluations))
  runs = {'a': run_lib.read(tmp_path)}
  (chart,) = comparison.over_rounds(runs, [charts.HELDOUT])
  (one,) = chart.series
  np.testing.assert_allclose(one.y, [30, 30])
  np.testing.assert_allclose(one.error, [2, np.nan])


def test_a_run_that_lacks_a_curve_is_named_with_the_reason(tmp_path):
  runs = {
    'a': read(tmp_path / 'a', own=workdir.Ratios(kl=0.5)),
    'b': read(tmp_path / 'b'),
    'c': read(tmp_path / 'c'),
  }
  kl = [curve for curve in charts.LEARNING if curve.field == 'own.kl']
  chart, absent = comparison.over_rounds(runs, kl)
  assert [series.name for series in chart.series] == ['a']
  assert absent == (
    'KL to the initial policy of b, c', 'method.kl_weight is 0',
  )  # fmt: skip


def test_differences_are_of_known_configs(tmp_path):
  runs = {
    'a': read(tmp_path / 'a', config={'only': [1]}),
    'b': read(tmp_path / 'b', config={'seed': 4}),
  }
  workdirs.write(tmp_path / 'c')
  (tmp_path / 'c' / 'config.json').unlink()
  runs['c'] = run_lib.read(tmp_path / 'c')
  assert comparison.differences(runs) == {
    'only': ['[1]', None, None],
    'seed': ['3', '4', None],
  }


def test_totals_are_of_all_pairs(tmp_path):
  run = read(tmp_path, policies=('gemma', 'llama', 'qwen'))
  assert run.records()['used'] == 6 * 4 * 7
  assert run_lib.total(run.totals.residuals.values()).rollouts == 6 * 4 * 8
