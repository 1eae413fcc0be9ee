"""Figures show the numbers that they are given, all of them, and legibly."""

import numpy as np
import pytest

from mrl_jax.analysis.figures import bandit as figures
from mrl_jax.bandit import methods
from mrl_jax.bandit import sweeps

HARD = sweeps.prompt(0.005, 0.6, group=4, peers=4)
COMPARED = methods.compared(length=40)
NAMES = [*COMPARED]
P_X = np.geomspace(1e-6, 0.1, 5)


@pytest.fixture(scope='module')
def found():
  """The numbers of all figures."""
  return {
    'learner': sweeps.by_learner(HARD, P_X, COMPARED),
    'at': sweeps.by_learner(HARD, [0.005], COMPARED),
    'simulated': sweeps.simulated(
      HARD, COMPARED, np.random.default_rng(0), 1000
    ),
    'peer': sweeps.by_peer(HARD, [0.1, 0.5, 0.9], COMPARED),
    'divergence': sweeps.by_divergence(HARD, [0.5, 2.0], COMPARED),
    'length': sweeps.by_length([1, 2, 3], chi2=1.0, group=2, peers=2),
    'weights': sweeps.context_weights(HARD, [0.1, 0.9], [0.25, 0.75]),
    'truncation': sweeps.by_truncation(HARD, np.array([0.5, 1.0, 2.0])),
    'thl': sweeps.by_thl_error(
      HARD, np.array([0.0, 0.5]), np.random.default_rng(0)
    ),
    'group': sweeps.by_group(HARD, [1, 2, 3], COMPARED),
    'peers': sweeps.by_peers(HARD, [0, 1, 2], COMPARED),
    'learning': sweeps.learning(HARD, COMPARED, steps=3, rate=1.0, seeds=4),
  }


DRAWN = {
  'plane': lambda f: figures.plane(f['learner'], f['at'], f['simulated']),
  'support': lambda f: figures.support(f['learner'], 1e-4),
  'context_weights': lambda f: figures.context_weights(f['weights']),
  'peer': lambda f: figures.peer(f['peer']),
  'divergence': lambda f: figures.divergence(f['divergence']),
  'length': lambda f: figures.length(f['length'], 1.0),
  'errors': lambda f: figures.errors(f['truncation'], f['thl']),
  'groups': lambda f: figures.groups(f['group'], f['peers']),
  'learning': lambda f: figures.learning(f['learning']),
}


def lines(axes, style):
  """What is drawn in a style's colour, in the order of drawing."""
  return [
    line
    for line in axes.lines
    if line.get_color() == style.color and len(line.get_xdata())
  ]


def assert_drawn(axes, sweep, values):
  """One line of each method, with these values."""
  for name, style in figures.styles(sweep.lines).items():
    (line,) = lines(axes, style)
    np.testing.assert_array_equal(line.get_xdata(), sweep.x_X)
    np.testing.assert_array_equal(line.get_ydata(), values(sweep.lines[name]))


@pytest.mark.parametrize('name', DRAWN)
def test_nothing_runs_into_what_is_beside_it(name, found):
  figure = DRAWN[name](found)
  figure.set_dpi(50)
  figure.draw_without_rendering()
  page = figure.bbox.padded(0.5)
  title, header = (text.get_window_extent() for text in figure.texts)
  axes = [one.get_tightbbox() for one in figure.axes]
  legends = [one.get_window_extent() for one in figure.legends]
  assert not any(title.overlaps(legend) for legend in legends), name
  boxes = [header, *axes, *legends]
  for i, box in enumerate(boxes):
    assert page.contains(box.x0, box.y0), name
    assert page.contains(box.x1, box.y1), name
    assert not any(box.overlaps(other) for other in boxes[i + 1 :]), name


@pytest.mark.parametrize('name', DRAWN)
def test_axes_are_labelled_and_letters_are_legible(name, found):
  figure = DRAWN[name](found)
  width, _ = figure.get_size_inches()
  assert figure.get_suptitle().strip()
  below = figure.axes[-1].get_subplotspec().rowspan.start
  for axes in figure.axes:
    place = axes.get_subplotspec()
    assert axes.get_xlabel() or place.rowspan.start < below
    assert axes.get_ylabel() or place.colspan.start
    letters = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    letters += [axes.xaxis.label, axes.yaxis.label, *figure.texts]
    for legend in (*figure.legends, *filter(None, [axes.get_legend()])):
      letters += legend.get_texts()
    # At a width of 800 pixels, a letter's box is 11 pixels high or more.
    assert min(one.get_fontsize() for one in letters) / 72 * 800 / width > 11


@pytest.mark.parametrize(
  'name', ['plane', 'support', 'peer', 'length', 'groups', 'learning']
)
def test_the_legend_names_each_method_once(name, found):
  (legend,) = DRAWN[name](found).legends
  assert [text.get_text() for text in legend.get_texts()] == NAMES


def test_no_two_methods_are_drawn_alike():
  drawn = figures.styles(str(i) for i in range(36))
  assert len({(s.color, s.dashes) for s in drawn.values()}) == 36
  assert drawn['0'] == ('k', 'o', ':')
  few = figures.styles(NAMES)
  assert len({s.color for s in few.values()}) == len(NAMES)
  assert len({s.marker for s in few.values()}) == len(NAMES)


def test_the_plane_has_curves_markers_and_samples(found):
  (axes,) = DRAWN['plane'](found).axes
  rings = [line for line in axes.lines if line.get_markersize() == 14]
  for (name, style), ring in zip(
    figures.styles(NAMES).items(), rings, strict=True
  ):
    of_style = [line for line in lines(axes, style) if line not in rings]
    for line, sweep in (
      (of_style[0], found['learner']),
      (of_style[1], found['at']),
      (ring, found['simulated']),
    ):
      expected = sweep.lines[name]
      np.testing.assert_array_equal(line.get_ydata(), expected.noise_X)
      x_X = np.where(expected.support_X > 0, expected.support_X, np.nan)
      np.testing.assert_array_equal(line.get_xdata(), x_X)


def test_along_a_diagonal_support_squared_over_noise_is_the_same(found):
  (axes,) = DRAWN['plane'](found).axes
  grey = [line for line in axes.lines if line.get_color() == '0.8']
  x_2, y_2 = axes.get_xlim(), axes.get_ylim()
  crossing = [
    line
    for line in grey
    if line.get_ydata()[0] < y_2[1] and line.get_ydata()[1] > y_2[0]
  ]
  assert len(crossing) > 3
  for line in grey:
    np.testing.assert_array_equal(line.get_xdata(), x_2)
    rate = line.get_xdata() ** 2 / line.get_ydata()
    assert rate[0] == pytest.approx(rate[1])
    assert np.log10(rate[0]) == pytest.approx(round(np.log10(rate[0])))


def test_negative_support_is_thin(found):
  (axes,) = DRAWN['support'](found).axes
  for name, style in figures.styles(NAMES).items():
    raises, lowers = lines(axes, style)
    assert raises.get_linewidth() > 2 * lowers.get_linewidth()
    support_X = found['learner'].lines[name].support_X
    for line, values_X in ((raises, support_X), (lowers, -support_X)):
      expected_X = np.where(values_X > 0, values_X, np.nan)
      np.testing.assert_array_equal(line.get_ydata(), expected_X)
  assert any(
    (line.support_X < 0).any() for line in found['learner'].lines.values()
  )
  assert [1e-4, 1e-4] in [[*line.get_xdata()] for line in axes.lines]
  without = figures.support(found['learner'])
  assert not without.axes[0].texts


def test_sweeps_are_drawn_as_they_are(found):
  left, right = DRAWN['peer'](found).axes
  assert_drawn(left, found['peer'], lambda line: line.support_X)
  assert_drawn(right, found['peer'], lambda line: line.noise_X)
  (axes,) = DRAWN['length'](found).axes
  assert_drawn(axes, found['length'], lambda line: line.second_X)
  (axes,) = DRAWN['divergence'](found).axes
  assert_drawn(axes, found['divergence'], lambda line: line.second_X)
  np.testing.assert_array_equal(
    axes.lines[-1].get_ydata(), found['divergence'].bound_X
  )
  figure = DRAWN['groups'](found)
  for i, name in enumerate(('group', 'peers')):
    assert_drawn(figure.axes[i], found[name], lambda line: line.support_X)
    assert_drawn(
      figure.axes[2 + i],
      found[name],
      # GRPO has no gradient, and no noise, with a single sample.
      lambda line: np.where(line.noise_X > 0, line.noise_X, np.nan),
    )


def test_weights_and_errors_are_drawn_as_they_are(found):
  (axes,) = DRAWN['context_weights'](found).axes
  weights = found['weights']
  drawn_X = [line.get_ydata() for line in axes.lines]
  np.testing.assert_array_equal(drawn_X, [weights.grpo_X, *weights.xgrpo_YX])
  all_axes = DRAWN['errors'](found).axes
  for axes, name in zip(all_axes, ('truncation', 'thl'), strict=True):
    errors = found[name]
    drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
    expected = {
      **errors.off,
      'bound': errors.bound_X,
      'standard deviation': errors.deviation_X,
    }
    assert drawn.keys() == expected.keys()
    for label, drawn_X in drawn.items():
      np.testing.assert_array_equal(drawn_X, expected[label])


def test_learning_has_medians_and_quartiles(found):
  left, right = DRAWN['learning'](found).axes
  bands = right.collections
  for (name, style), band in zip(
    figures.styles(NAMES).items(), bands, strict=True
  ):
    curves = found['learning'][name]
    (line,), (median,) = lines(left, style), lines(right, style)
    np.testing.assert_array_equal(line.get_ydata(), curves.expected_T)
    middle_T = np.median(curves.sampled_ST, 0)
    np.testing.assert_allclose(median.get_ydata(), middle_T)
    low_T, high_T = np.quantile(curves.sampled_ST, (0.25, 0.75), axis=0)
    inside = band.get_paths()[0].get_extents()
    assert inside.y0 == pytest.approx(low_T.min())
    assert inside.y1 == pytest.approx(high_T.max())
