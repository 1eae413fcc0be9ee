"""Figures of a study show its numbers, and are legible."""

import itertools

from matplotlib import colors as colors_lib
import numpy as np
import pytest

from mrl_jax.analysis import study
from mrl_jax.analysis.figures import study as figures
from mrl_jax.analysis.figures import style
from tests.analysis import workdirs
from tests.analysis.figures import legible


def write(out, arms, seeds, policies=('a', 'b'), **of_row):
  """Runs of arms that gain an eighth each, and a sixteenth for each seed."""
  for (i, arm), seed in itertools.product(enumerate(arms), seeds):
    after = 0.25 + i / 8 + seed / 16
    rows = [
      workdirs.row(
        r, policy, accuracy=after * r / 3, grad_norm=1.0 + r * i,
        heldout_accuracy={'all': after} if r == 3 else {}, rescue_rate=None,
        **of_row,
      )
      for r in range(4)
      for policy in policies
    ]  # fmt: skip
    workdirs.write(
      out / arm / f'seed-{seed}', after=dict.fromkeys(policies, after),
      rows=rows, config={'method.name': arm, 'seed': seed},
    )  # fmt: skip


def draw(out, arms, seeds):
  """All figures, and what is compared."""
  found = study.read(str(out), arms, seeds)
  assert not found.missing
  compared = study.compare(found.runs, 'grpo')
  curves = figures.learning_curves(found.runs, compared, 'grpo')
  support = figures.stability_support(compared, 'grpo')
  return curves, support, figures.gains(compared, 'grpo'), compared


@pytest.fixture(scope='module')
def three(tmp_path_factory):
  """Figures of three arms with two seeds each."""
  out = tmp_path_factory.mktemp('study')
  write(out, ['grpo', 'a', 'b'], [0, 1])
  return draw(out, ['grpo', 'a', 'b'], [0, 1])


def names(figure):
  (legend,) = figure.legends
  return [text.get_text().split('\n')[0] for text in legend.get_texts()]


@pytest.mark.parametrize('seeds', [[0], [0, 1]])
@pytest.mark.parametrize('count', [1, 9])
def test_figures_are_legible(tmp_path, count, seeds):
  arms = ['grpo', *(f'{"long_name_" * (i % 5)}{i}' for i in range(1, count))]
  write(tmp_path, arms, seeds)
  write(tmp_path, arms[1:2], seeds, rollouts=20)
  *drawn, _ = draw(tmp_path, arms, seeds)
  for figure in drawn:
    legible.check(figure, least=6)
    assert figure.axes[0].bbox.width > 0.55 * figure.bbox.width
  labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
  assert any('+25.0% rollouts' in label for label in labels) == (count > 1)


def test_an_arm_has_the_same_style_in_all_figures(three):
  styles = style.line_styles(['grpo', 'a', 'b'], 'grpo')
  curves, support, gains, _ = three
  for figure in (curves, support):
    assert names(figure) == ['b', 'a', 'grpo']  # The best arm is first.
    (legend,) = figure.legends
    for name, line in zip(names(figure), legend.get_lines(), strict=True):
      assert line.get_color() == styles[name].color
      assert line.get_marker() == styles[name].marker
  assert names(gains) == ['before', 'b', 'a', 'grpo']
  colors = [patch.get_facecolor() for patch in gains.legends[0].get_patches()]
  expected = ['0.75', *(styles[name].color for name in names(gains)[1:])]
  assert colors == [*map(colors_lib.to_rgba, expected)]


def test_points_and_lines_are_at_the_numbers(three):
  curves, support, _, _ = three
  points = [c[0].get_xydata()[0] for c in support.axes[0].containers]
  # Norms 1, 3, 5, 7 have mean 4 and s^2 = 20 / 3; nothing came into reach.
  assert [*points[0]] == pytest.approx([0, (20 / 3) ** 0.5 / 4])
  assert [*points[2]] == [0, 0]  # All norms are 1.
  *_, line = [n for n in curves.axes[0].lines if len(n.get_xdata()) == 4]
  # The seeds of grpo end at 1 / 4 and 5 / 16.
  assert [*line.get_xdata()] == [1, 2, 3, 4]
  assert [*line.get_ydata()] == pytest.approx(
    [100 * 0.28125 * r / 3 for r in range(4)]
  )


def test_a_band_is_the_error_of_smoothed_curves(tmp_path):
  for seed, height in enumerate((0.25, 0.75)):
    rows = [workdirs.row(r, 'a', accuracy=height) for r in range(4)]
    folder = tmp_path / 'a' / f'seed-{seed}'
    workdirs.write(folder, after={'a': 0.5}, rows=rows, config={'seed': seed})
  runs = study.read(str(tmp_path), 'a', [0, 1]).runs['a']
  mean_R, error_R = figures.curve(runs.values(), 3)
  np.testing.assert_allclose(mean_R, 50)
  np.testing.assert_allclose(error_R, 25)  # s = 50 / sqrt(2), n = 2.
  assert figures.curve([runs[0]], 3)[1] is None


def test_support_is_the_rescue_rate_if_all_arms_have_one(tmp_path):
  for arm, rate in (('grpo', 0.25), ('a', 0.5), ('b', None)):
    rows = [
      workdirs.row(r, 'a', rescue_rate=rate, grad_norm=1.0 + r)
      for r in range(4)
    ]
    workdirs.write(tmp_path / arm / 'seed-3', after={'a': 0.5}, rows=rows)
  axes, others = (
    draw(tmp_path, arms, [3])[1].axes[0]
    for arms in (['grpo', 'a'], ['grpo', 'a', 'b'])
  )
  assert 'rescue rate' in axes.get_xlabel()
  assert [c[0].get_xdata()[0] for c in axes.containers] == [25, 50]
  assert 'no sample solves' in others.get_xlabel()


def test_bars_are_at_the_numbers(three):
  *_, gains, compared = three
  (axes,) = gains.axes
  ticks = [tick.get_text() for tick in axes.get_xticklabels()]
  assert ticks == ['formulas', 'own words', "peer's words"]
  ranked = sorted(compared, key=lambda arm: -arm.after.mean)
  expected = [compared[0].kinds_before, *(arm.kinds_after for arm in ranked)]
  bars = [bar for bar in axes.patches if bar.get_height()]
  assert len(bars) == 12
  for x, kind in enumerate(ticks):
    of_kind = sorted(
      (bar for bar in bars if abs(bar.get_center()[0] - x) < 0.5),
      key=lambda bar: bar.get_x(),
    )
    heights = [bar.get_height() for bar in of_kind]
    assert heights == pytest.approx([100 * e[kind].mean for e in expected])
    for bar, beside in itertools.pairwise(of_kind):
      assert bar.get_x() + bar.get_width() <= beside.get_x() + 1e-9
