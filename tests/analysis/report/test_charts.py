"""Charts have the numbers of a run; of a missing chart the reason is given."""

import dataclasses

import numpy as np
import pytest

from mrl_jax import workdir
from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.figures import style
from mrl_jax.analysis.report import charts
from mrl_jax.analysis.report import drawing
from tests.analysis import workdirs

THREE = ('gemma', 'llama', 'qwen')


def read(folder, **changes):
  return run_lib.read(workdirs.write(folder, **changes))


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  return read(tmp_path_factory.mktemp('run'))


@pytest.fixture(scope='module')
def of_three(tmp_path_factory):
  return read(tmp_path_factory.mktemp('run'), policies=THREE)


def by_title(found):
  return {chart.title: chart for chart in found}


def drawn(chart):
  return {series.name: series.y.tolist() for series in chart.series}


def test_curves_are_in_their_units(run):
  found = by_title(charts.over_rounds(run, charts.LEARNING))
  title = 'Prompts that no sample solves'
  assert drawn(found[title]) == {'gemma': [50.0] * 4, 'llama': [50.0] * 4}
  assert found[title].unit == '%'
  assert drawn(found['Entropy'])['gemma'] == [0.1] * 4
  assert found['Response length'].unit == 'tokens'
  found = by_title(charts.over_rounds(run, charts.UPDATES))
  assert drawn(found['Own tokens clipped'])['gemma'] == [10.0] * 4
  (rescued,) = charts.rescues(run)
  assert drawn(rescued)['gemma → llama'] == [50.0] * 4


def test_a_policy_has_the_same_style_everywhere(of_three):
  found = [
    *charts.over_rounds(of_three, [charts.HELDOUT, *charts.UPDATES]),
    *charts.rescues(of_three),
    *charts.residuals(of_three),
    charts.histogram(of_three, 'peer'),
  ]
  series = [s for chart in found for s in getattr(chart, 'series', ())]
  assert {s.name for s in series} == {*THREE}
  for one in series:
    assert one.style == style.line_style(THREE.index(one.name))


def test_heldout_accuracy_has_errors(run):
  (chart,) = charts.over_rounds(run, [charts.HELDOUT])
  one = chart.series[0]
  assert (one.x.tolist(), one.y.tolist()) == ([0, 4], [25, 75])
  assert one.error.tolist() == [2, 2]
  assert (chart.kind, chart.label) == ('points', 'rounds done')


@pytest.mark.parametrize(
  ('changes', 'title', 'why'),
  [
    ({}, 'KL to the initial policy', 'method.kl_weight is 0'),
    (
      {'config': {'method.kl_weight': 0.1}},
      'KL to the initial policy',
      'metrics.jsonl has no own.kl',
    ),
    (
      {'peer': workdir.Ratios(), 'peer_rows': 0},
      "Peers' tokens clipped",
      'no rows of peers were trained on',
    ),
    (
      {'peer': workdir.Ratios(logp=-1.0), 'config': {'method.name': 'sgt'}},
      "Largest ratio, peers' tokens",
      "sgt has no importance ratios for peers' rows",
    ),
    (
      {},
      "Log-probability of peers' tokens",
      "prp weighs peers' rows by importance ratios",
    ),
    ({'entropy': None}, 'Entropy', 'metrics.jsonl has no entropy'),
  ],
)
def test_a_chart_that_cannot_be_drawn_has_a_reason(
  tmp_path, changes, title, why
):
  curves = [*charts.LEARNING, *charts.UPDATES]
  found = by_title(charts.over_rounds(read(tmp_path, **changes), curves))
  assert found[title] == (title, why)


def test_two_directions_share_a_chart(run):
  found = charts.residuals(run)
  assert [chart.title for chart in found] == [
    'Segmentation error', 'Tokens of the receiver', 'Rollouts refused',
  ]  # fmt: skip
  assert [drawn(chart) for chart in found] == [
    dict.fromkeys(('llama → gemma', 'gemma → llama'), [value] * 4)
    for value in (25.0, 200.0, 25.0)
  ]


def test_of_many_policies_each_receiver_has_a_chart(of_three):
  found = charts.rescues(of_three)
  assert {chart.title: [*drawn(chart)] for chart in found} == {
    'Failed prompts that a peer solved, gemma': ['llama', 'qwen'],
    'Failed prompts that a peer solved, llama': ['gemma', 'qwen'],
    'Failed prompts that a peer solved, qwen': ['gemma', 'llama'],
  }


@pytest.mark.parametrize(
  ('method', 'expected'),
  [
    ({}, {}),
    (
      {'compatibility': 0.25, 'admitted': 0.5},
      {
        "Compatibility of peers' responses": {'a': [0.25] * 2, 'b': [0.25] * 2},
        "Peers' responses admitted": {'a': [50.0] * 2, 'b': [50.0] * 2},
      },
    ),
    (
      {'capability': {'a': 1.5}},
      {
        'Capability of the peer, a': {'a': [1.5] * 2},
        'Capability of the peer, b': {'a': [1.5] * 2},
      },
    ),
    ({'capability': 1.0, 'admitted': {'a': 1.0}}, {}),  # Damaged.
  ],
)
def test_metrics_of_one_method_are_drawn_if_there_are_any(
  tmp_path, method, expected
):
  found = charts.of_method(
    read(tmp_path, policies='ab', rounds=2, method=method)
  )
  assert {chart.title: drawn(chart) for chart in found} == expected


def test_without_refusals_by_thl_there_is_no_chart_of_them(tmp_path):
  def residuals(residual):
    changes = {'policies': ('llama',), 'rounds': 2}
    run = read(tmp_path, residuals={'gemma': residual}, **changes)
    return charts.residuals(run)

  *_, refused = residuals(dataclasses.replace(workdirs.RESIDUAL, refused={}))
  assert refused == ('Rollouts refused', 'all were carried')
  texts = type(workdirs.RESIDUAL)(rollouts=3)
  assert residuals(texts) == [refused]


def test_the_histogram_is_of_all_tokens_of_the_run(run):
  chart = charts.histogram(run, 'own')
  one = chart.series[0]
  assert one.y[[0, 20, 40]].tolist() == [1, 97, 2]
  assert one.y.sum() == 100
  np.testing.assert_allclose(one.x[[0, 20, 40]], [-2, 0, 2], atol=1e-9)
  np.testing.assert_allclose(np.exp(chart.marks), [0.8, 1.28])
  (axes,) = drawing.draw_bare(chart).axes
  ticks = [label.get_text() for label in axes.get_xticklabels()]
  assert ticks == ['<0.14', '0.25', '0.5', '1', '2', '4', '>7']


def test_without_ratios_or_phases_there_is_no_such_chart(tmp_path):
  none = {'own': workdir.Ratios(), 'peer': workdir.Ratios(), 'peer_rows': 0}
  run = read(tmp_path, **none, timing=workdir.Timing(seconds=4.0))
  assert [charts.histogram(run, part).why for part in ('own', 'peer')] == [
    'metrics.jsonl has no own.log_ratio_counts',
    'no rows of peers were trained on',
  ]
  assert charts.phases(run).why == 'metrics.jsonl has no timing.phases'


def test_phases_have_the_order_and_the_colours_of_their_places(run):
  chart = charts.phases(run)
  assert drawn(chart) == {
    name: [seconds] * 4 for name, seconds in workdirs.PHASES.items()
  }
  assert [series.style.color for series in chart.series] == [
    style.AREAS[i] for i in (1, 6, 9)
  ]
