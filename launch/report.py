"""Writes the report of a run, or a page on which several are compared.

python launch/report.py runs/mine
python launch/report.py runs/grpo runs/sgt --out=comparison.html

Of one work dir it writes the report.html that the run writes when it ends; it
can still be running, or have been killed.
"""

import sys

from absl import app
from absl import flags

from mrl_jax import checks
from mrl_jax import texts
from mrl_jax.analysis.report import comparison
from mrl_jax.analysis.report import page

_OUT = flags.DEFINE_string(
  'out', 'comparison.html', 'Where to write the page of several runs.'
)


def write(folders: list[str]) -> str:
  """Writes the page; returns its path."""
  checks.require(bool(folders), 'name the work dir of a run, or of several')
  if len(folders) > 1:
    return comparison.write(folders, _OUT.value)
  checks.require(
    not _OUT.present,
    f'--out is where the page of several runs goes; that of one is {page.FILE} '
    'in its work dir',
  )
  return page.write(folders[0])


def main(argv):
  try:
    print(f'Report: {write(argv[1:])}')
  except (checks.InputError, OSError) as error:
    sys.exit(texts.printable(f'{error}'))


if __name__ == '__main__':
  app.run(main)
