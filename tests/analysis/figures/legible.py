"""Checks that a person can read a figure."""

import itertools


def boxes(figure):
  """Every text that is drawn, and the extent of it in pixels."""
  figure.draw_without_rendering()
  texts = [*figure.texts]
  legends = [*figure.legends]
  for axes in figure.axes:
    texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
    for axis in (axes.xaxis, axes.yaxis):
      low, high = sorted(axis.get_view_interval())
      # Shared axes have no labels.
      ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
      texts += [label for at, label in ticks if low <= at <= high]
  for legend in legends:
    texts += [legend.get_title(), *legend.get_texts()]
  # The title ends with blank lines, which reserve space for the text below.
  found = [(t.get_text(), t.get_window_extent()) for t in texts]
  return [(text, box) for text, box in found if text.strip()]


def check(figure, least=0.0):
  """No text is on another, outside the figure or lower than `least` pixels.

  The title of `style.figure` is left out: it reserves space for the text below.
  """
  title = getattr(figure, '_suptitle', None)
  skipped = title.get_text() if title else None
  found = [(text, box) for text, box in boxes(figure) if text != skipped]
  for (text, box), (other, beside) in itertools.combinations(found, 2):
    assert not box.padded(-1).overlaps(beside.padded(-1)), f'{text} on {other}'
  for text, box in found:
    inside = figure.bbox.padded(1)
    assert inside.contains(box.x0, box.y0), text
    assert inside.contains(box.x1, box.y1), text
    assert min(box.height, box.width) * 800 / figure.bbox.width >= least, text
  return [text for text, _ in found]
