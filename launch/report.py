"""Writes the report of a run, or a page that compares several runs.

python launch/report.py runs/mine
python launch/report.py runs/grpo runs/sgt --out=comparison.html

The report of one run is report.html in its work dir or, if that is in a bucket,
in the current folder. Runs may still be training, or have been stopped.
"""

import sys

from absl import app
from absl import flags

from mrl_jax import bucket
from mrl_jax import checks
from mrl_jax import files
from mrl_jax import texts
from mrl_jax import workdir
from mrl_jax.analysis.report import comparison
from mrl_jax.analysis.report import page

_OUT = flags.DEFINE_string(
  'out', 'comparison.html', 'Where to write the page of several runs.'
)


def write(folders: list[str]) -> str:
  """Writes the page; returns its path.

  Raises InputError if a folder is not the work dir of a run, or given twice.
  """
  checks.require(bool(folders), 'name the work dirs of one run or several')
  runs = [bucket.WorkDir(folder) for folder in folders]
  if len(runs) > 1:
    return comparison.write([run.folder for run in runs], _OUT.value)
  checks.require(
    not _OUT.present,
    '--out is for the page of several runs; the report of one run is in its '
    'work dir',
  )
  in_bucket = files.in_bucket(folders[0])
  return page.write(runs[0].folder, workdir.REPORT if in_bucket else '')


def main(argv):
  try:
    print(f'Report: {write(argv[1:])}')
  except (checks.InputError, OSError) as error:
    sys.exit(texts.printable(f'{error}'))


if __name__ == '__main__':
  app.run(main)
