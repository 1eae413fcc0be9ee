"""Figures show the numbers that they are given, all of them, and legibly."""

import functools

import numpy as np
import pytest

from mrl_jax.analysis.figures import bandit as figures
from mrl_jax.analysis.figures import style
from mrl_jax.bandit import methods
from mrl_jax.bandit import simulate
from mrl_jax.bandit import sweeps

HARD = sweeps.prompt(0.005, 0.6, own_samples=4, peer_samples=4)
COMPARED = methods.compared(length=40)
NAMES = [*COMPARED]
STYLES = style.line_styles(NAMES, 'GRPO')
RNG = np.random.default_rng(0)
BY_P = sweeps.vary(HARD, COMPARED, p=np.geomspace(1e-6, 0.1, 5))
AT, SIMULATED = (
  sweeps.vary(HARD, COMPARED, p=[0.005]),
  sweeps.simulated(HARD, COMPARED, RNG, 1000),
)
WEIGHTS = sweeps.context_weights(HARD, [0.1, 0.9], [0.25, 0.75])
BY_Q = sweeps.vary(HARD, COMPARED, q=[0.1, 0.5, 0.9])
BY_DIVERGENCE = sweeps.by_divergence(HARD, [0.5, 2.0], COMPARED)
BY_LENGTH = sweeps.by_length([1, 2, 3], chi2=1.0, own_samples=2, peer_samples=2)
ERRORS = (
  sweeps.by_truncation(HARD, [0.5, 1.0, 2.0]),
  sweeps.by_thl_error(HARD, np.array([0.0, 0.5]), RNG),
)
BY_G = sweeps.vary(HARD, COMPARED, own_samples=[1, 2, 3])
BY_H = sweeps.vary(HARD, COMPARED, peer_samples=[0, 1, 2])
CURVES = {
  name: simulate.learn(HARD, method, updates=3, rate=1.0, seeds=4)
  for name, method in COMPARED.items()
}

FIGURES = {
  'plane': lambda: figures.plane(BY_P, AT, SIMULATED),
  'support': lambda: figures.support(BY_P, 1e-4),
  'context_weights': lambda: figures.context_weights(WEIGHTS),
  'peer': lambda: figures.peer(BY_Q),
  'divergence': lambda: figures.divergence(BY_DIVERGENCE),
  'length': lambda: figures.length(BY_LENGTH, 1.0),
  'errors': lambda: figures.errors(*ERRORS),
  'groups': lambda: figures.groups(BY_G, BY_H),
  'learning': lambda: figures.learning(CURVES),
}


@functools.cache
def drawn(name):
  """A figure that all tests share."""
  return FIGURES[name]()


def positive(values):
  """What is not positive is not drawn."""
  return np.where(np.asarray(values) > 0, values, np.nan)


def lines(axes, name):
  """The lines of a method that are not only legend entries, in order."""
  color = STYLES[name].color
  return [
    line
    for line in axes.lines
    if line.get_color() == color
    and len(line.get_xdata())
    and line.get_markersize() != 14  # A ring of `plane`.
  ]


def assert_drawn(axes, x_X, curves):
  """One line per method shows these values."""
  for name, y_X in curves.items():
    (line,) = lines(axes, name)
    np.testing.assert_array_equal(line.get_xdata(), x_X)
    np.testing.assert_array_equal(line.get_ydata(), y_X)


@pytest.mark.parametrize('name', FIGURES)
def test_nothing_overlaps_and_everything_is_labelled_and_legible(name):
  figure = drawn(name)
  figure.set_dpi(50)
  figure.get_layout_engine().execute(figure)
  page = figure.bbox.padded(0.5)
  title, header = (text.get_window_extent() for text in figure.texts)
  legends = [legend.get_window_extent() for legend in figure.legends]
  assert not any(title.overlaps(legend) for legend in legends)
  boxes = [header, *legends, *(axes.get_tightbbox() for axes in figure.axes)]
  for i, box in enumerate(boxes):
    assert page.contains(box.x0, box.y0)
    assert page.contains(box.x1, box.y1)
    assert not any(box.overlaps(other) for other in boxes[i + 1 :])

  width, _ = figure.get_size_inches()
  assert figure.get_suptitle().strip()
  last_row = figure.axes[-1].get_subplotspec().rowspan.start
  for axes in figure.axes:
    place = axes.get_subplotspec()
    assert axes.get_xlabel() or place.rowspan.start < last_row
    assert axes.get_ylabel() or place.colspan.start
    letters = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    letters += [axes.xaxis.label, axes.yaxis.label, *figure.texts]
    for legend in (*figure.legends, *filter(None, [axes.get_legend()])):
      letters += legend.get_texts()
    # At a width of 800 pixels, a letter's box is 11 pixels high or more.
    least = min(letter.get_fontsize() for letter in letters)
    assert least / 72 * 800 / width > 11


@pytest.mark.parametrize(
  'name', ['plane', 'support', 'peer', 'length', 'groups', 'learning']
)
def test_the_legend_names_each_method_once(name):
  (legend,) = drawn(name).legends
  assert [text.get_text() for text in legend.get_texts()] == NAMES


def test_the_plane_has_curves_markers_and_rings():
  (axes,) = drawn('plane').axes
  rings = [line for line in axes.lines if line.get_markersize() == 14]
  for name, ring in zip(NAMES, rings, strict=True):
    shown = (*lines(axes, name), ring)
    for line, sweep in zip(shown, (BY_P, AT, SIMULATED), strict=True):
      expected_X = positive(sweep.curves('support')[name])
      np.testing.assert_array_equal(line.get_xdata(), expected_X)
      expected_X = sweep.curves('noise')[name]
      np.testing.assert_array_equal(line.get_ydata(), expected_X)


def test_along_a_diagonal_support_squared_over_noise_is_constant():
  (axes,) = drawn('plane').axes
  grey = [line for line in axes.lines if line.get_color() == '0.8']
  x_2, (low, high) = axes.get_xlim(), axes.get_ylim()
  crossing = 0
  for line in grey:
    y_2 = line.get_ydata()
    np.testing.assert_array_equal(line.get_xdata(), x_2)
    power_2 = np.log10(np.square(x_2) / y_2)
    np.testing.assert_allclose(power_2, np.round(power_2[0]), atol=1e-9)
    crossing += y_2[0] < high and y_2[1] > low
  assert crossing > 3


def test_negative_support_is_thin():
  (axes,) = drawn('support').axes
  for name, support_X in BY_P.curves('support').items():
    raises, lowers = lines(axes, name)
    assert raises.get_linewidth() > 2 * lowers.get_linewidth()
    np.testing.assert_array_equal(raises.get_ydata(), positive(support_X))
    np.testing.assert_array_equal(lowers.get_ydata(), positive(-support_X))
  assert (BY_P.curves('support')['PRP, truncated'] < 0).any()
  assert [1e-4, 1e-4] in [[*line.get_xdata()] for line in axes.lines]
  assert not figures.support(BY_P).axes[0].texts


def test_sweeps_are_drawn_as_they_are():
  left, right = drawn('peer').axes
  assert_drawn(left, BY_Q.x_X, BY_Q.curves('support'))
  assert_drawn(right, BY_Q.x_X, BY_Q.curves('noise'))
  (axes,) = drawn('length').axes
  assert_drawn(axes, BY_LENGTH.x_X, BY_LENGTH.curves('second'))
  (axes,) = drawn('divergence').axes
  assert_drawn(axes, BY_DIVERGENCE.x_X, BY_DIVERGENCE.curves('second'))
  bound_X = axes.lines[-1].get_ydata()
  np.testing.assert_array_equal(bound_X, BY_DIVERGENCE.bound_X)
  axes = drawn('groups').axes
  assert [bool(each.get_ylabel()) for each in axes] == [True, False] * 2
  for column, sweep in enumerate((BY_G, BY_H)):
    assert_drawn(axes[column], sweep.x_X, sweep.curves('support'))
    # GRPO has no gradient, and no noise, with a single sample.
    noise = {n: positive(y_X) for n, y_X in sweep.curves('noise').items()}
    assert_drawn(axes[2 + column], sweep.x_X, noise)


def test_weights_and_errors_are_drawn_as_they_are():
  (axes,) = drawn('context_weights').axes
  shown = {line.get_label(): line.get_ydata() for line in axes.lines}
  for name, weight_X in WEIGHTS.curves('context_weight').items():
    np.testing.assert_array_equal(shown.pop(name), weight_X)
  assert not shown
  firsts = ('truncated', 'all by E')
  for axes, sweep, first in zip(
    drawn('errors').axes, ERRORS, firsts, strict=True
  ):
    shown = {line.get_label(): line.get_ydata() for line in axes.lines}
    expected = {
      **sweep.distances(),
      'bound': sweep.bound_X,
      'standard deviation': np.sqrt(sweep.curves('noise')[first]),
    }
    assert shown.keys() == expected.keys()
    for label, shown_X in shown.items():
      np.testing.assert_array_equal(shown_X, expected[label])


def test_learning_has_medians_and_quartiles():
  left, right = drawn('learning').axes
  for (name, curves), band in zip(
    CURVES.items(), right.collections, strict=True
  ):
    (line,), (median,) = lines(left, name), lines(right, name)
    np.testing.assert_array_equal(line.get_ydata(), curves.expected_T)
    low_T, middle_T, high_T = np.quantile(
      curves.sampled_ST, (0.25, 0.5, 0.75), axis=0
    )
    np.testing.assert_allclose(median.get_ydata(), middle_T)
    inside = band.get_paths()[0].get_extents()
    assert inside.y0 == pytest.approx(low_T.min())
    assert inside.y1 == pytest.approx(high_T.max())
