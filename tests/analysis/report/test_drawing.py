"""Figures are legible, and as SVG they fit any page."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from mrl_jax.analysis.report import drawing
from mrl_jax.training import metrics

LONG = 'a_policy_whose_name_is_much_longer_than_there_is_room_for_in_a_figure'
MIDDLES = np.append(metrics.LOG_RATIO_EDGES, 2.05) - 0.05


def chart(kind, series=2, points=200, factor=1.0):
  rng = np.random.default_rng(0)
  x = MIDDLES if kind == 'histogram' else range(points)
  lines = [
    drawing.line(
      f'{LONG}{i}',
      drawing.line_style(i),
      [(at, rng.random(), 0.1) for at in x],
      factor,
    )
    for i in range(series)
  ]
  return drawing.Chart(
    title='Title', unit='percent of tokens', kind=kind,
    series=[one for line in lines for one in line],
  )  # fmt: skip


CASES = {
  f'{kind} {factor:g} {points}': chart(kind, 4, points, factor)
  for kind, factor, points in [
    ('curves', 1, 200),
    ('curves', -1e-7, 1),
    ('curves', 3e5, 5000),
    ('curves', 0, 3),
    ('points', 100, 4),
    ('bars', 100, 200),
    ('bars', 0, 1),
    ('histogram', 1, 41),
  ]
}


def boxes(figure):
  """The texts that are drawn, and where."""
  figure.draw_without_rendering()
  (axes,) = figure.axes
  texts = [*figure.texts, axes.xaxis.label]
  texts += [text for one in figure.legends for text in one.get_texts()]
  for axis in (axes.xaxis, axes.yaxis):
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    texts += [text for at, text in ticks if low <= at <= high]
  return [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]


@pytest.mark.parametrize('legend', [True, False])
@pytest.mark.parametrize('one', CASES.values(), ids=CASES)
def test_texts_are_in_the_figure_and_not_on_each_other(one, legend):
  figure = drawing.draw(one, legend)
  found = boxes(figure)
  for (text, box), (other, beside) in itertools.combinations(found, 2):
    assert not box.padded(-1).overlaps(beside.padded(-1)), f'{text} on {other}'
  for text, box in found:
    inside = figure.bbox.padded(1)
    assert inside.contains(box.x0, box.y0), text
    assert inside.contains(box.x1, box.y1), text
  names = [text for text, _ in found if text.startswith('a_policy')]
  assert len(names) == (len(one.series) if legend else 0)


def heights(one):
  (axes,) = drawing.draw(one).axes
  return [line.get_ydata() for line in axes.lines]


def test_few_rounds_are_drawn_as_they_are_and_many_also_smoothly():
  few, many = chart('curves', 1, 20), chart('curves', 1, 45)
  (drawn,) = heights(few)
  np.testing.assert_array_equal(drawn, few.series[0].y)
  faint, smooth = heights(many)
  y = many.series[0].y
  np.testing.assert_array_equal(faint, y)
  # A window of three rounds, and of two at the ends.
  assert smooth[20] == pytest.approx(y[19:22].mean())
  assert smooth[0] == pytest.approx(y[:2].mean())


def test_a_long_curve_is_of_means():
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
def test_a_wide_scale_is_logarithmic_where_numbers_differ_much(
  lowest, wide, scale
):
  series = drawing.line(
    'a', drawing.line_style(0), [(0, lowest, None), (1, 200.0, None)]
  )
  one = drawing.Chart(title='a', unit='b', series=series, wide=wide)
  (axes,) = drawing.draw(one).axes
  assert axes.get_yscale() == scale


def test_what_cannot_be_drawn_is_not_in_a_line():
  bad = [None, float('nan'), float('inf'), 1e300]
  points = [(i, y, None) for i, y in enumerate(bad)]
  assert drawing.line('a', drawing.line_style(0), points) == []
  errors = [(i, 1.0, error) for i, error in enumerate([*bad, -1.0, 0.5])]
  (one,) = drawing.line('a', drawing.line_style(0), [*points, *errors], 100)
  np.testing.assert_array_equal(one.y, [100] * 6)
  np.testing.assert_array_equal(one.error, [np.nan] * 5 + [50])


def test_bars_are_stacked_means_of_rounds():
  one = chart('bars', 2, 60)
  (axes,) = drawing.draw(one).axes
  lower, upper = (patch.get_data() for patch in axes.patches)
  np.testing.assert_array_equal(lower.edges, [*range(0, 60, 2), 60])
  np.testing.assert_array_equal(upper.baseline, lower.values)
  total = one.series[0].y[:2].mean() + one.series[1].y[:2].mean()
  assert upper.values[0] == pytest.approx(total)


def test_lines_differ_in_more_than_their_colour():
  styles = [drawing.line_style(i) for i in range(8)]
  assert len({style.color for style in styles}) == 8
  assert len({style.marker for style in styles}) == 8
  for i in range(4):
    assert len({style.dashes for style in styles[i : i + 4]}) == 4
  lights, darks = zip(*drawing.COLORS.values(), strict=True)
  assert len({*lights}) == len({*darks}) == len(drawing.COLORS)


@pytest.mark.parametrize('kind', drawing.KINDS)
def test_svg_has_the_colours_letters_and_names_of_its_page(kind):
  text = drawing.svg(chart(kind), 'mine')
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
  assert all(name.startswith('mine-') for name in names)
  assert 'percent of tokens' in [e.text for e in root.iter('text')]


def test_svg_is_the_same_every_time():
  one = chart('points')
  assert drawing.svg(one, 'a') == drawing.svg(one, 'a')


def test_names_in_figures_are_inert():
  (series,) = drawing.line(
    '$x^2$\u202e<b>', drawing.line_style(0), [(0, 1, None)]
  )
  one = drawing.Chart(title='<b>\x00\u202e', unit='%', series=[series])
  texts = [text for text, _ in boxes(drawing.draw(one))]
  assert '$x^2$\\u202e<b>' in texts
  root = ElementTree.fromstring(drawing.svg(one, 'a'))
  assert root.get('aria-label') == '<b>\\x00\\u202e, %'
