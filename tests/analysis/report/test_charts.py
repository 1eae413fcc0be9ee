"""What is drawn of a run are its numbers; of the rest it is said why not."""

import numpy as np
import pytest

from mrl_jax.analysis import run as run_lib
from mrl_jax.analysis.report import charts
from mrl_jax.analysis.report import drawing
from tests.analysis.report import workdirs

THREE = ('gemma', 'llama', 'qwen')


def read(folder, **fields):
  return run_lib.read(workdirs.write(folder, **fields))


def named(found):
  return {one.title: one for one in found}


def drawn(chart):
  return {one.name: one.y.tolist() for one in chart.series}


def test_curves_are_in_their_units(tmp_path):
  found = named(charts.of_rounds(read(tmp_path), charts.LEARNING))
  title = 'Prompts that no sample solves'
  assert drawn(found[title]) == {'gemma': [50.0] * 4, 'llama': [50.0] * 4}
  assert found[title].unit == '%'
  assert drawn(found['Entropy'])['gemma'] == [0.1] * 4
  assert found['Response length'].unit == 'tokens'


def test_a_policy_looks_the_same_everywhere(tmp_path):
  run = read(tmp_path, policies=THREE)
  found = [
    charts.heldout(run),
    *charts.of_rounds(run, charts.UPDATES),
    *charts.rescues(run),
    *charts.residuals(run),
    charts.histogram(run, 'peer'),
  ]
  for chart in found:
    for one in getattr(chart, 'series', ()):
      assert one.style == drawing.line_style(THREE.index(one.name))


def test_heldout_accuracy_has_its_errors(tmp_path):
  chart = charts.heldout(read(tmp_path))
  one = chart.series[0]
  assert (one.x.tolist(), one.y.tolist()) == ([0, 4], [25, 75])
  assert one.error.tolist() == [2, 2]


@pytest.mark.parametrize(
  ('fields', 'title', 'why'),
  [
    ({}, 'KL to the policy at the start', 'method.kl_weight is 0'),
    (
      {'config': {'method.kl_weight': 0.1}},
      'KL to the policy at the start',
      'metrics.jsonl has no own.kl',
    ),
    (
      {'peer': {}, 'peer_rows': 0},
      "Peers' tokens clipped",
      "no row of a peer's was trained on",
    ),
    (
      {'peer': {'logp': -1.0}, 'config': {'method.name': 'sgt'}},
      "Largest ratio, peers' tokens",
      "sgt has no ratios of peers' rows",
    ),
    ({}, "Log-probability of peers' tokens", "prp takes peers' rows by ratios"),
    ({'entropy': None}, 'Entropy', 'metrics.jsonl has no entropy'),
  ],
)
def test_what_is_not_there_is_not_drawn_and_it_is_said_why(
  tmp_path, fields, title, why
):
  run = read(tmp_path, **fields)
  curves = [*charts.LEARNING, *charts.UPDATES]
  assert named(charts.of_rounds(run, curves))[title] == (title, why)


def test_two_directions_share_a_chart(tmp_path):
  found = charts.residuals(read(tmp_path))
  assert [one.title for one in found] == [
    'Segmentation error', 'Tokens of the receiver', 'Rollouts refused',
  ]  # fmt: skip
  assert [drawn(one) for one in found] == [
    dict.fromkeys(('llama → gemma', 'gemma → llama'), [value] * 4)
    for value in (25.0, 200.0, 25.0)
  ]


def test_of_many_policies_each_receiver_has_a_chart(tmp_path):
  found = charts.rescues(read(tmp_path, policies=THREE))
  assert {one.title: [*drawn(one)] for one in found} == {
    'Failed prompts that a peer solved, gemma': ['llama', 'qwen'],
    'Failed prompts that a peer solved, llama': ['gemma', 'qwen'],
    'Failed prompts that a peer solved, qwen': ['gemma', 'llama'],
  }


def test_older_rows_tell_of_all_peers_together(tmp_path):
  (found,) = charts.rescues(read(tmp_path, rescued_by={}))
  assert drawn(found) == {'gemma': [100.0] * 4, 'llama': [100.0] * 4}


def test_what_one_method_tells_is_drawn_where_it_is_told(tmp_path):
  assert charts.of_method(read(tmp_path / 'none')) == []
  graft = read(tmp_path / 'graft', compatibility=0.25, admitted=0.5)
  compatibility, admitted = charts.of_method(graft)
  assert drawn(compatibility)['llama'] == [0.25] * 4
  assert drawn(admitted)['llama'] == [50.0] * 4
  hacpo = read(tmp_path / 'hacpo', capability={'gemma': 1.5})
  found = named(charts.of_method(hacpo))
  assert drawn(found['Capability of the learner, llama'])['gemma'] == [1.5] * 4


def test_where_thl_refused_nothing_there_is_no_chart_of_it(tmp_path):
  residual = {'gemma': {**workdirs.RESIDUAL, 'refused': {}}}
  run = read(tmp_path, policies=('llama',), rounds=2, residuals=residual)
  *_, refused = charts.residuals(run)
  assert refused == ('Rollouts refused', 'all could be carried')
  texts = {'gemma': {'rollouts': 3}}
  run = read(tmp_path, policies=('llama',), rounds=2, residuals=texts)
  assert charts.residuals(run) == [refused]


def test_the_histogram_is_of_all_tokens_of_the_run(tmp_path):
  chart = charts.histogram(read(tmp_path), 'own')
  one = chart.series[0]
  assert one.y[[0, 20, 40]].tolist() == [1, 97, 2]
  assert one.y.sum() == 100
  np.testing.assert_allclose(one.x[[0, 20, 40]], [-2, 0, 2], atol=1e-9)
  np.testing.assert_allclose(np.exp(chart.marks), [0.8, 1.28])
  (axes,) = drawing.draw(chart).axes
  ticks = [label.get_text() for label in axes.get_xticklabels()]
  assert ticks == ['<0.14', '0.25', '0.5', '1', '2', '4', '>7']


def test_without_ratios_there_is_no_histogram(tmp_path):
  run = read(tmp_path, own={}, peer={}, peer_rows=0)
  assert [charts.histogram(run, part).why for part in ('own', 'peer')] == [
    'metrics.jsonl has no own.log_ratio_counts',
    "no row of a peer's was trained on",
  ]


def test_phases_are_in_order_and_have_their_colours(tmp_path):
  chart = charts.phases(read(tmp_path))
  assert drawn(chart) == {
    name: [seconds] * 4 for name, seconds in workdirs.PHASES.items()
  }
  assert [one.style.color for one in chart.series] == [
    'area1',
    'area5',
    'area8',
  ]


def test_without_phases_the_time_of_rounds_is_drawn(tmp_path):
  chart = charts.phases(read(tmp_path, timing={'seconds': 4.0}))
  assert drawn(chart) == {'all phases': [4.0] * 4}
  run = read(tmp_path, timing={})
  assert charts.phases(run).why == 'metrics.jsonl has no timing.seconds'
