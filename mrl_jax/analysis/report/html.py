"""Renders the templates of this folder; all text in them is escaped."""

import itertools
import json
import math
import os

import jinja2
import markupsafe

from mrl_jax import texts
from mrl_jax.analysis.figures import style
from mrl_jax.analysis.report import drawing

_UNKNOWN = '–'


def render(template: str, **values) -> str:
  """A page; in its template, `svg` draws a chart with ids of its own."""
  names = (f'chart{i}' for i in itertools.count())

  def svg(chart):
    return markupsafe.Markup(drawing.svg(chart, next(names)))

  page = ENVIRONMENT.get_template(template)
  return page.render(**values, svg=svg, colors=style.COLORS)


def _printable(value):
  """Makes text printable; applied to every expression before it is escaped."""
  if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
    return texts.printable(value)
  return value


def _if_known(function):
  """A filter of numbers; None and what is not finite become a dash."""
  return lambda value, *form: (
    function(value, *form)
    if value is not None and math.isfinite(value)
    else _UNKNOWN
  )


def _seconds(value: float) -> str:
  if value < 60:
    return f'{value:.3g} s'
  hours, minutes = divmod(round(value) // 60, 60)
  if hours:
    return f'{hours:,} h {minutes} min'
  return f'{minutes} min {round(value) % 60} s'


def _bytes(value: float) -> str:
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if value < 1000:
      return f'{value:.3g} {unit}'
    value /= 1024
  return f'{value:,.3g} TiB'


def _width(share: float) -> str:
  """The width of a part of a bar, in percent."""
  return f'{100 * min(max(share, 0), 1) if math.isfinite(share) else 0:.2f}%'


ENVIRONMENT = jinja2.Environment(
  loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
  autoescape=True,
  undefined=jinja2.StrictUndefined,
  finalize=_printable,
  trim_blocks=True,
  lstrip_blocks=True,
)
ENVIRONMENT.filters |= {
  'number': _if_known(lambda value, form=',': format(value, form)),
  'percent': _if_known(lambda share, form='.1f': f'{100 * share:{form}}'),
  'seconds': _if_known(_seconds),
  'bytes': _if_known(_bytes),
  'width': _width,
  'json': lambda value: json.dumps(value, ensure_ascii=False),
  'css': lambda color: drawing.VARIABLES[color],
}
