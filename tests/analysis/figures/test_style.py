"""All figures share a palette, line styles and a layout."""

import numpy as np
import pytest

from mrl_jax.analysis.figures import style
from tests.analysis.figures import legible


def test_no_two_lines_are_drawn_alike():
  styles = style.line_styles(map(str, range(41)), baseline='7')
  assert next(iter(styles)) == '7'
  assert styles['7'] == style.BASELINE
  assert len({(s.color, s.dashes) for s in styles.values()}) == 41
  few = [style.line_style(i) for i in range(len(style.LINES))]
  assert len({s.color for s in few}) == len({s.marker for s in few}) == 8
  for i in range(4):
    assert len({s.dashes for s in few[i : i + 5]}) == 5


def test_no_colour_has_two_names():
  whites, blacks = zip(*style.COLORS.values(), strict=True)
  assert len({*whites}) == len({*blacks}) == len(style.COLORS)


def test_axes_go_from_left_to_right_and_lines_are_named_beside_them():
  figure, axes = style.figure(
    'Title', 'Two\nlines', columns=2, height=4, sharey='row'
  )
  assert figure.get_suptitle().split('\n')[0] == 'Title'
  assert axes[0].get_subplotspec().rowspan == axes[1].get_subplotspec().rowspan
  axes[1].plot([0, 1], [0, 1], label='a', **style.line_style(1).line)
  (line,) = axes[1].lines
  assert line.get_color() == style.LINES[1]
  style.legend(figure, axes[1])
  legible.check(figure)
  (legend,) = figure.legends
  assert [text.get_text() for text in legend.get_texts()] == ['a']
  assert legend.get_window_extent().x0 >= axes[1].get_tightbbox().x1
  _, header = figure.texts
  assert header.get_window_extent().y0 >= axes[0].get_tightbbox().y1


def test_a_figure_needs_no_text():
  figure, (axes,) = style.figure('Title', height=2)
  assert figure.get_size_inches() == pytest.approx([8, 2])
  figure.draw_without_rendering()
  assert axes.get_tightbbox().y1 <= figure.texts[0].get_window_extent().y0


def test_the_window_of_a_moving_mean_is_cut_off_at_the_ends():
  values_R = np.array([0.0, 3.0, 6.0, 0.0])
  assert [*style.smooth(values_R, 3)] == [1.5, 3.0, 3.0, 3.0]
  assert [*style.smooth(values_R, 1)] == [0.0, 3.0, 6.0, 0.0]
  assert len(style.smooth(values_R, 9)) == 4
  assert [style.window(n) for n in (1, 44, 45, 60, 150)] == [1, 3, 3, 5, 11]


def test_points_have_error_bars_where_errors_are_known():
  figure, (axes,) = style.figure('Title')
  style.points(axes, style.line_style(2), 1, 2, yerr=0.5, xerr=None)
  style.points(axes, style.line_style(2), 3, 4, yerr=None, ms=9)
  known, unknown = axes.containers
  assert (known.has_xerr, known.has_yerr) == (False, True)
  assert (unknown.has_xerr, unknown.has_yerr) == (False, False)
  assert unknown[0].get_markersize() == 9
  figure.draw_without_rendering()


def test_labels_are_printable_and_cut():
  assert style.label('a\u202e', 9) == 'a\\u202e'
  assert style.label('abcdef', 5) == 'abcd…'
