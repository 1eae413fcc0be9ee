"""Charts are legible as figures, and as SVG they fit any page."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from mrl_jax import config as config_lib
from mrl_jax.analysis.figures import style
from mrl_jax.analysis.report import drawing
from tests.analysis.figures import legible

LONG = 'a_policy_whose_name_is_much_longer_than_there_is_room_for_in_a_figure'
MIDDLES = np.append(config_lib.LOG_RATIO_EDGES, 2.05) - 0.05
SOLID = style.line_style(0)


def chart(kind, series=2, points=200, factor=1.0):
  rng = np.random.default_rng(0)
  x = MIDDLES if kind == 'histogram' else range(points)
  lines = [
    drawing.line(
      f'{LONG[: 16 if kind == "points" else 99]}{i}',
      style.line_style(i),
      [(at, rng.random(), 0.1) for at in x],
      factor,
    )
    for i in range(series)
  ]
  return drawing.Chart(
    title='Title', unit='percent of tokens', kind=kind,
    series=[series for line in lines for series in line],
  )  # fmt: skip


@pytest.mark.parametrize(
  ('kind', 'factor', 'points'),
  [
    ('curves', 1, 200),
    ('curves', -1e-7, 1),
    ('curves', 2.6e-8, 3),
    ('curves', 3e5, 5000),
    ('curves', 0, 3),
    ('points', 100, 4),
    ('bars', 100, 200),
    ('bars', 0, 1),
    ('histogram', 1, 41),
  ],
)
def test_a_chart_on_a_page_is_legible(kind, factor, points):
  legible.check(drawing.draw_bare(chart(kind, 4, points, factor)))


def test_a_figure_names_its_series_beside_the_axes():
  figure = drawing.draw(chart('points', 4, 4))
  texts = legible.check(figure, least=6)
  assert sum(text.startswith('a_policy') for text in texts) == 4
  assert figure.get_suptitle().startswith('Title')


def heights(one):
  (axes,) = drawing.draw_bare(one).axes
  return [line.get_ydata() for line in axes.lines]


def test_few_rounds_are_drawn_as_they_are_and_many_also_smoothly():
  few, many = chart('curves', 1, 20), chart('curves', 1, 45)
  (drawn,) = heights(few)
  np.testing.assert_array_equal(drawn, few.series[0].y)
  faint, smooth = heights(many)
  y = many.series[0].y
  np.testing.assert_array_equal(faint, y)
  # The window has three rounds, and two at the ends.
  assert smooth[20] == pytest.approx(y[19:22].mean())
  assert smooth[0] == pytest.approx(y[:2].mean())


def test_a_long_curve_consists_of_means():
  one = chart('curves', 1, 601)
  faint, _ = heights(one)
  assert len(faint) == 201
  assert faint[0] == pytest.approx(one.series[0].y[:3].mean())
  assert faint[-1] == one.series[0].y[600]


@pytest.mark.parametrize(
  ('lowest', 'wide', 'scale'),
  [
    (1.0, True, 'log'),
    (50.0, True, 'linear'),
    (0.0, True, 'linear'),
    (1.0, False, 'linear'),
  ],
)
def test_a_wide_scale_is_logarithmic_if_values_differ_much(lowest, wide, scale):
  series = drawing.line('a', SOLID, [(0, lowest, None), (1, 200.0, None)])
  one = drawing.Chart(title='a', unit='b', series=series, wide=wide)
  (axes,) = drawing.draw_bare(one).axes
  assert axes.get_yscale() == scale


def test_values_that_cannot_be_drawn_are_not_in_a_line():
  bad = [None, float('nan'), float('inf'), 1e300, {'a': 1.0}]
  points = [(i, y, None) for i, y in enumerate(bad)]
  assert drawing.line('a', SOLID, points) == []
  errors = [(i, 1.0, error) for i, error in enumerate([*bad, -1.0, 0.5])]
  (one,) = drawing.line('a', SOLID, [*points, *errors], 100)
  np.testing.assert_array_equal(one.y, [100] * 7)
  np.testing.assert_array_equal(one.error, [np.nan] * 6 + [50])


def test_bars_are_stacked_means_of_rounds():
  one = chart('bars', 2, 60)
  (axes,) = drawing.draw_bare(one).axes
  lower, upper = (patch.get_data() for patch in axes.patches)
  np.testing.assert_array_equal(lower.edges, [*range(0, 60, 2), 60])
  np.testing.assert_array_equal(upper.baseline, lower.values)
  total = one.series[0].y[:2].mean() + one.series[1].y[:2].mean()
  assert upper.values[0] == pytest.approx(total)


@pytest.mark.parametrize('kind', drawing.KINDS)
def test_svg_has_the_colours_fonts_and_ids_of_its_page(kind):
  text = drawing.svg(chart(kind), 'mine')
  assert text == drawing.svg(chart(kind), 'mine')
  root = ElementTree.fromstring(text)
  assert root.get('viewBox') == '0 0 360 216'
  assert root.get('aria-label') == 'Title, percent of tokens'
  assert not re.search(
    r'#[0-9a-f]{6}\b|font-family|<style|<metadata|xmlns', text
  )
  assert 'var(--line1)' in text
  names = {e.get('id') for e in root.iter() if e.get('id')}
  used = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
  assert names == {*used}
  assert not any(name in drawing.svg(chart(kind), 'other') for name in names)
  assert 'percent of tokens' in [e.text for e in root.iter('text')]


def test_names_in_figures_are_inert():
  series = drawing.line('$x^2$\u202e<b>', SOLID, [(0, 1, None)])
  one = drawing.Chart(title='<b>$\\x$\x00\u202e', unit='%', series=series)
  texts = [text for text, _ in legible.boxes(drawing.draw(one))]
  assert '$x^2$\\u202e<b>' in texts
  root = ElementTree.fromstring(drawing.svg(one, 'a'))
  assert root.get('aria-label') == '<b>$\\x$\\x00\\u202e, %'
