"""A study as a user asks for one: what it runs, and what is seen of it."""

import fcntl
import io
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from absl.testing import flagsaver
from matplotlib import colors as colors_lib
import pytest
from rich import console as console_lib

from launch import study as command
from mrl_jax import checks
from mrl_jax.analysis import study
from mrl_jax.analysis import study_report
from tests import studies

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
  '--config.train.rounds=2',
  '--config.train.prompts=8',
  '--config.train.samples=4',
  '--config.train.row_multiple=16',
  '--config.warm_start.steps=10',
  '--config.eval.prompts=8',
  '--config.eval.samples=2',
  '--config.eval.batch=8',
)


def start(*flags, options=()):
  script = os.fspath(ROOT / 'launch' / 'study.py')
  return subprocess.Popen(
    [sys.executable, *options, script, *map(str, flags)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    encoding='utf-8',
  )


def ask(*flags, options=(), timeout=600):
  """Exit status, and what was said."""
  process = start(*flags, options=options)
  out, error = process.communicate(timeout=timeout)
  return process.returncode, out, error


def conduct(*flags, console):
  """The same without a process."""
  with flagsaver.flagsaver():
    _, *rest = command.parse(['study.py', *flags])
    return command.conduct(rest, console)


@pytest.fixture
def console():
  return console_lib.Console(file=io.StringIO(), markup=False, highlight=False)


@pytest.mark.parametrize(
  ('flags', 'told'),
  [
    (['--methods=grp'], "Did you mean 'grpo'"),
    (['--methods=grpo,grpo'], 'arm grpo is there twice'),
    (['--methods=grpo', '--baseline=prp'], "unknown arm for --baseline 'prp'"),
    (['--methods=grpo', '--seeds=0,x'], "'x' is not a whole number"),
    (['--methods=grpo', '--seeds=1,1'], 'seed 1 is there twice'),
    (['--methods=grpo', '--config.train.round=3'], 'Did you mean "rounds"'),
    (['--methods=grpo', '--config.train.rounds=x'], 'invalid literal for int'),
    (['--methods=grpo', '--config.train.rounds=0'], 'at least 1'),
    (['--methods=grpo', '--config.train.rounds', '3'], "not a flag: '3'"),
    (['--methods=grpo', '--config.train.rounds'], 'write it in one piece'),
    (['--methods=grpo', '--config.seed=3'], 'seed is what --seeds sets'),
    (['--methods=grpo', 'prp'], "not a flag: 'prp'"),
    (['--arm=grpo train.rounds=3'], 'is not LABEL=FILE KEY=VALUE'),
    (['--arm=../a=grpo'], "'../a' cannot be the label"),
    (['--arm=cache=grpo'], "'cache' cannot be the label"),
    (['--arm=short=grpo train.rouns=3'], 'Did you mean "rounds"'),
    ([], 'name what to compare'),
    (['--report'], 'looked for ARM/seed-N'),
  ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_runs(tmp_path, console, flags, told):
  out = tmp_path / 'out'
  with pytest.raises(checks.InputError, match=re.escape(told)):
    conduct(f'--out={out}', *flags, console=console)
  assert not out.exists()


def test_a_mistake_is_told_without_a_traceback():
  status, _, error = ask('--methods=grpo')
  assert status == 1
  assert error == 'name the folder of the study with --out\n'


def test_an_arm_is_a_file_and_what_is_set_in_it(tmp_path):
  grpo, mine = command.arms(
    ['grpo'],
    ["mine=prp train.rounds=9 policies.llama.template='{prompt} = '"],
    ['--config.train.rounds=7', '-config.thl.max_tokens=5'],
  )
  assert grpo.config(3, tmp_path)['train.rounds'] == 7
  config = mine.config(3, tmp_path)
  assert config['method.name'] == 'prp'
  assert config['train.rounds'] == 9
  assert config['thl.max_tokens'] == 5
  assert config['policies.llama.template'] == '{prompt} = '
  assert config['seed'] == 3
  assert config['cache_dir'] == os.fspath(tmp_path / 'cache')


def test_what_is_there_is_not_run_again(tmp_path):
  found = command.arms(['grpo', 'prp'], [], ['--config.train.rounds=2'])
  for arm, seed in itertools.product(found, (0, 1)):
    config = arm.config(seed, tmp_path)
    folder = tmp_path / arm.label / f'seed-{seed}'
    studies.write(folder, {'a': 0.5}, **config)
  (tmp_path / 'prp' / 'seed-0' / 'summary.json').unlink()

  def todo(found, seeds):
    jobs = command.jobs(found, seeds, tmp_path)
    return [(job.arm, job.seed) for job in jobs]

  assert todo(found, [0, 1]) == [('prp', 0)]
  # Seed by seed, so that what is there of a study compares all its arms.
  assert todo(found, [2, 3]) == [
    ('grpo', 2), ('prp', 2), ('grpo', 3), ('prp', 3)
  ]  # fmt: skip
  longer = command.arms(['grpo'], [], ['--config.train.rounds=3'])
  assert todo(longer, [0]) == [('grpo', 0)]
  other = command.arms(
    ['grpo'], [], ['--config.train.rounds=2', '--config.train.prompts=64']
  )
  assert todo(other, [0]) == [('grpo', 0)]


# Makes its warm starts, then trains; says when it did what. A seed over 9 dies.
FAKE = """
import pathlib, sys, time
from tests import studies
folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print('cold', time.time(), flush=True)
time.sleep(0.3)
if seed > 9:
  sys.exit('\\\\n'.join(f'line {n}' for n in range(99)))
folder.mkdir(parents=True)
(folder / 'metrics.jsonl').touch()
print('warm', time.time(), flush=True)
time.sleep(0.5)
studies.write(folder, {'a': 0.75}, seed=seed)
print('done', time.time(), flush=True)
"""


def fake_job(out, arm, seed, script=FAKE):
  folder = os.fspath(out / arm / f'seed-{seed}')
  words = sys.executable, '-c', script.replace('\\\\', '\\'), folder, str(seed)
  return command.Job(arm, seed, folder, words)


def times(job):
  lines = pathlib.Path(job.log).read_text().split()
  return dict(zip(lines[::2], map(float, lines[1::2]), strict=True))


def overlap(one, other):
  return one[0] < other[1] and other[0] < one[1]


def test_runs_share_the_warm_starts_of_their_seed(tmp_path, console):
  jobs = [fake_job(tmp_path, arm, seed) for seed in (0, 1) for arm in 'abc']
  assert command.run(jobs, 3, console) == {}
  said = console.file.getvalue()
  for job in jobs:
    assert f'{job.arm}, seed {job.seed}: 25.0% → 75.0%, 100 s' in said
  assert '5 to go, about 0 min' in said
  assert study.read(os.fspath(tmp_path), 'abc', [0, 1]).missing == {}
  spans = {job: times(job) for job in jobs}
  for one, other in itertools.combinations(jobs, 2):
    cold = [(spans[job]['cold'], spans[job]['warm']) for job in (one, other)]
    assert one.seed != other.seed or not overlap(*cold)
  starts = sorted(span['cold'] for span in spans.values())
  ends = sorted(span['done'] for span in spans.values())
  assert starts[1] < ends[0]  # Two at a time,
  assert all(starts[i + 3] > ends[i] for i in range(3))  # and never four.


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, console):
  jobs = [fake_job(tmp_path, 'a', seed) for seed in (10, 1)]
  log = jobs[0].log
  failed = command.run(jobs, 1, console)
  assert failed == {('a', 10): f'failed, exit status 1; see {log}'}
  said = console.file.getvalue()
  assert f'a, seed 10 failed, exit status 1; the end of {log}:' in said
  assert 'line 78\n' not in said
  assert 'line 79\n' in said
  assert 'line 98\n' in said
  assert 'a, seed 1: 25.0% → 75.0%' in said


def test_a_run_that_leaves_nothing_has_failed(tmp_path, console):
  job = fake_job(tmp_path, 'a', 0, script='print(1)')
  (why,) = command.run([job], 1, console).values()
  assert why == f'failed, not begun; see {job.log}'


def test_no_two_processes_make_the_same_run(tmp_path, console):
  job = fake_job(tmp_path, 'a', 0)
  os.makedirs(os.path.dirname(job.log))
  with open(job.log, 'a') as log:
    log.write('of another')
    log.flush()
    fcntl.flock(log, fcntl.LOCK_EX)
    failed = command.run([job, fake_job(tmp_path, 'b', 0)], 1, console)
    assert failed == {('a', 0): 'another process runs it'}
  assert pathlib.Path(job.log).read_text() == 'of another'


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_runs_and_says_how_to_go_on(tmp_path, number):
  process = start(f'--out={tmp_path}', '--methods=grpo', '--seeds=0', *SMALL)
  path = tmp_path / 'grpo' / 'seed-0.log'
  deadline = time.monotonic() + 60
  while not path.exists():
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < deadline
    time.sleep(0.05)
  time.sleep(0.2)
  process.send_signal(number)
  _, error = process.communicate(timeout=60)
  assert process.returncode != 0
  assert 'The same command goes on where it was stopped' in error
  assert 'Traceback' not in error
  with open(path) as log:  # Nobody writes to it any more.
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_a_run_says_of_its_failure_is_shown(tmp_path):
  (arm,) = command.arms(['grpo'], [], SMALL)
  config = {**arm.config(0, tmp_path), 'train.prompts': 64}
  studies.write(tmp_path / 'grpo' / 'seed-0', {'a': 0.5}, **config)
  status, out, error = ask(
    f'--out={tmp_path}', '--methods=grpo', '--seeds=0',
    '--arm=bad=grpo train.aggregation=sum', *SMALL,
  )  # fmt: skip
  assert status == 1
  assert 'Traceback' not in error
  assert '0 are there' in out
  assert 'was written by another config' in out
  assert 'train.prompts: 64 there, 8 now' in out
  assert "unknown train.aggregation 'sum'" in out
  for label in ('grpo', 'bad'):
    assert f'MISSING: {label}, seed 0: failed, exit status 1; see ' in out
  assert json.loads((tmp_path / 'study.json').read_text())['arms'] == {}


@pytest.mark.slow
def test_a_study_from_its_command_to_its_figures(tmp_path):
  flags = (
    f'--out={tmp_path}', '--methods=grpo', '--seeds=0', '--parallel=2',
    '--arm=mine=grpo method.clip_high=0.3', *SMALL,
  )  # fmt: skip
  status, out, error = ask(*flags)
  assert status == 0, out + error
  assert 'mine is grpo with method.clip_high=0.3.' in out
  arms = json.loads((tmp_path / 'study.json').read_text())['arms']
  assert arms['mine']['rollouts'] == 2 * 8 * 4 * 2
  assert arms['mine']['other_starts'] == []
  assert arms['mine']['difference']['error'] is None
  assert 'warm start of llama: taken from' in (
    (tmp_path / 'mine' / 'seed-0.log').read_text()
  )
  for name in ('curves.png', 'stability_support.png'):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')
  again, out, _ = ask(*flags)
  assert again == 0
  assert '2 runs, of which 2 are there' in out


def write_study(out, arms, seeds, **values):
  """Arms gain an eighth each, and seeds a sixteenth."""
  for (i, arm), seed in itertools.product(enumerate(arms), seeds):
    after = 0.25 + i / 8 + seed / 16
    rows = [
      studies.row(
        r, policy, accuracy=after * r / 3, grad_norm=1.0 + r * i,
        **({'heldout_accuracy': {'all': after}} if r == 3 else {}),
      )
      for r in range(4)
      for policy in ('a', 'b')
    ]  # fmt: skip
    studies.write(
      out / arm / f'seed-{seed}', {'a': after, 'b': after}, seed=seed,
      rows=rows, method__name=arm, **values,
    )  # fmt: skip


def test_a_report_runs_nothing_and_is_without_jax(tmp_path):
  write_study(tmp_path, ['grpo', 'prp', 'a.b'], [0, 1])
  (tmp_path / 'cache').mkdir()
  status, out, error = ask(
    f'--out={tmp_path}', '--report', options=['-X', 'importtime']
  )
  assert status == 0, error
  modules = {line.split('|')[-1].strip() for line in error.splitlines()}
  assert 'rich.console' in modules
  assert not modules & {'jax', 'flax', 'transformers'}
  (line,) = [
    n for n in out.splitlines() if n.startswith(' prp') and '25.0' in n
  ]
  assert line.split() == [
    'prp', '2', '25.0', '40.6', '±', '3.1', '+12.5', '±', '0.0', '-',
  ]  # fmt: skip


def test_a_report_names_what_is_missing(tmp_path):
  write_study(tmp_path, ['grpo', 'prp'], [0, 1])
  (tmp_path / 'prp' / 'seed-1' / 'summary.json').write_text('{')
  (tmp_path / 'sgt').mkdir()
  (tmp_path / 'sgt' / 'seed-0.log').touch()
  status, out, error = ask(f'--out={tmp_path}', '--report')
  assert status == 1
  assert not error
  assert 'MISSING: prp, seed 1: summary.json: Expecting' in out
  assert 'MISSING: sgt, seed 0: not begun' in out
  assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
    'study.md', 'study.json', 'curves.png', 'stability_support.png'
  }  # fmt: skip


def draw(out, arms, baseline='grpo'):
  """Both figures, and what is compared."""
  seeds = sorted({int(p.name[5:]) for p in out.glob('*/seed-*')})
  found = study.read(os.fspath(out), arms, seeds)
  compared = study.compare(found.runs, baseline)
  return (
    study_report.draw_curves(found, compared, baseline),
    study_report.draw_support(compared, baseline),
    compared,
  )


def texts(figure):
  """The texts that are drawn, by where they are."""
  figure.draw_without_rendering()
  (axes,) = figure.axes
  legend = axes.get_legend()
  found = [figure._suptitle, axes._left_title, axes.xaxis.label,
           axes.yaxis.label, *legend.get_texts()]  # fmt: skip
  for axis in (axes.xaxis, axes.yaxis):
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    found += [label for at, label in ticks if low <= at <= high]
  return [(t.get_text(), t.get_window_extent()) for t in found if t.get_text()]


@pytest.mark.parametrize('seeds', [[0], [0, 1, 2]])
@pytest.mark.parametrize('count', [1, 3, 9])
def test_figures_are_legible(tmp_path, count, seeds):
  arms = ['grpo', *(f'{"long_name_" * (i % 5)}{i}' for i in range(1, count))]
  write_study(tmp_path, arms, seeds)
  write_study(tmp_path, arms[1:2], seeds, train__samples=5)
  *figures, compared = draw(tmp_path, arms)
  families = study_report.draw_kinds(*kinds(tmp_path, arms), compared, 'grpo')
  for figure in (*figures, families):
    found = texts(figure)
    assert figure.axes[0].bbox.width > 0.55 * figure.bbox.width
    for (text, box), (other, beside) in itertools.combinations(found, 2):
      assert not box.padded(-1).overlaps(beside.padded(-1)), (text, other)
    for text, box in found:
      assert figure.bbox.padded(1).contains(box.x0, box.y0), text
      assert figure.bbox.padded(1).contains(box.x1, box.y1), text
      assert min(box.height, box.width) * 800 / figure.bbox.width >= 7, text


def test_an_arm_looks_the_same_in_both_figures(tmp_path):
  arms = ['grpo', 'a', 'b']
  write_study(tmp_path, arms, [0, 1])
  styles = study_report.styles(arms, 'grpo')
  assert len({style[:2] for style in styles.values()}) == 3
  *figures, _ = draw(tmp_path, arms)
  for figure in figures:
    legend = figure.axes[0].get_legend()
    names = [text.get_text().split('\n')[0] for text in legend.get_texts()]
    assert names == ['b', 'a', 'grpo']  # From the best on.
    for name, line in zip(names, legend.get_lines(), strict=True):
      assert line.get_color() == styles[name].color
      assert line.get_marker() == styles[name].marker


def test_points_are_where_the_numbers_are(tmp_path):
  write_study(tmp_path, ['grpo', 'a'], [0, 1])
  curves, support, _ = draw(tmp_path, ['grpo', 'a'])
  points = [c[0].get_xydata()[0] for c in support.axes[0].containers]
  # Norms 1, 2, 3, 4 have mean 2.5 and s^2 = 5 / 3; nothing came into reach.
  assert [*points[0]] == pytest.approx([0, (5 / 3) ** 0.5 / 2.5])
  assert [*points[1]] == [0, 0]  # All norms are 1.
  line = curves.axes[0].lines[0]
  # Seeds end at 3 / 8 and 7 / 16.
  assert [*line.get_xdata()] == [1, 2, 3, 4]
  assert [*line.get_ydata()] == pytest.approx(
    [100 * 0.40625 * r / 3 for r in range(4)]
  )


def test_support_is_the_rescue_rate_if_all_have_one(tmp_path):
  for arm, rate in (('grpo', 0.25), ('a', 0.5)):
    rows = [
      studies.row(r, 'a', rescue_rate=rate, grad_norm=1.0 + r) for r in range(4)
    ]
    studies.write(tmp_path / arm / 'seed-0', {'a': 0.5}, rows=rows)
  studies.write(tmp_path / 'b' / 'seed-0', {'a': 0.5})
  axes, others = (
    draw(tmp_path, arms)[1].axes[0]
    for arms in (['grpo', 'a'], ['grpo', 'a', 'b'])
  )
  assert 'rescue rate' in axes.get_xlabel()
  assert [c[0].get_xdata()[0] for c in axes.containers] == [25, 50]
  assert 'no sample solves' in others.get_xlabel()


def kinds(out, arms):
  """Accuracies of kinds of families, before and after."""
  seeds = sorted({int(p.name[5:]) for p in out.glob('*/seed-*')})
  before = study_report.by_kind(str(out), arms[0], seeds, 'before')
  return before, {
    arm: study_report.by_kind(str(out), arm, seeds, 'after') for arm in arms
  }


def write_families(out, arm, seed, after):
  """Policy a was shown words/add, and policy b was not."""
  folder = studies.write(
    out / arm / f'seed-{seed}', {'a': 0.5, 'b': 0.5}, seed=seed,
    policies__b__warm_start_families=['formula/add', 'words/sub'],
  )  # fmt: skip
  path = folder / 'summary.json'
  summary = json.loads(path.read_text())
  for policy, accuracies in after.items():
    families = summary['policies'][policy]['heldout_accuracy_by_family']
    families['after'] = {'all': 0.9, **accuracies}
  path.write_text(json.dumps(summary))


def test_accuracies_are_told_by_who_was_shown_what(tmp_path):
  for seed, more in ((0, 0.0), (1, 0.25)):
    write_families(
      tmp_path, 'grpo', seed,
      {
        'a': {'formula/add': 0.5 + more, 'words/add': 0.25, 'words/sub': 0.0},
        'b': {'formula/add': 0.75 + more, 'words/add': 0.5, 'words/sub': 0.75},
      },
    )  # fmt: skip
  before, after = kinds(tmp_path, ['grpo'])
  assert {kind: one.mean for kind, one in before.items()} == {
    'formulas': 0.25, 'own words': 0.25, "peer's words": 0.25
  }  # fmt: skip
  assert after['grpo'] == {
    'formulas': study.Estimate(0.75, 0.125, 2),  # Of 0.625 and 0.875.
    'own words': study.Estimate(0.5, 0.0, 2),
    "peer's words": study.Estimate(0.25, 0.0, 2),
  }


def test_kinds_that_the_data_do_not_have_are_left_out(tmp_path):
  write_families(
    tmp_path, 'grpo', 0,
    {'a': {'formula/add': 0.5, '': 0.1}, 'b': {'formula/add': 0.75, '': 0.1}},
  )  # fmt: skip
  _, after = kinds(tmp_path, ['grpo'])
  assert after['grpo'] == {'formulas': study.Estimate(0.625, None, 1)}
  compared = draw(tmp_path, ['grpo'])[-1]
  figure = study_report.draw_kinds(after['grpo'], after, compared, 'grpo')
  figure.draw_without_rendering()


def test_bars_are_where_the_numbers_are(tmp_path):
  arms = ['grpo', 'a', 'b']
  write_study(tmp_path, arms, [0, 1])
  *_, compared = draw(tmp_path, arms)
  before, after = kinds(tmp_path, arms)
  figure = study_report.draw_kinds(before, after, compared, 'grpo')
  (axes,) = figure.axes
  ticks = [tick.get_text() for tick in axes.get_xticklabels()]
  assert ticks == ['formulas', 'own words', "peer's words"]
  legend = axes.get_legend()
  labels = [text.get_text() for text in legend.get_texts()]
  assert labels == ['before', 'b', 'a', 'grpo']  # From the best on.
  styles = study_report.styles(arms, 'grpo')
  colors = ['0.75', *(styles[arm].color for arm in labels[1:])]
  expected = [before, *(after[arm] for arm in labels[1:])]
  bars = [bar for bar in axes.patches if bar.get_height()]
  assert len(bars) == 12
  for x, kind in enumerate(ticks):
    of_kind = sorted(
      (bar for bar in bars if abs(bar.get_center()[0] - x) < 0.5),
      key=lambda bar: bar.get_x(),
    )
    heights = [bar.get_height() for bar in of_kind]
    assert heights == pytest.approx([100 * e[kind].mean for e in expected])
    for bar, color in zip(of_kind, colors, strict=True):
      assert bar.get_facecolor() == colors_lib.to_rgba(color)
    for one, other in itertools.pairwise(of_kind):
      assert one.get_x() + one.get_width() <= other.get_x() + 1e-9


def test_one_seed_has_no_error_in_any_table(tmp_path):
  write_study(tmp_path, ['grpo', 'a'], [0])
  *_, compared = draw(tmp_path, ['grpo', 'a'])
  first, *_ = study_report.tables(compared, 'grpo')
  assert first.rows == [
    ('grpo', '1', '25.0', '25.0 ± -', 'baseline', '-'),
    ('a', '1', '25.0', '37.5 ± -', '+12.5 ± -', '-'),
  ]


def test_unequal_rollouts_are_marked_everywhere(tmp_path):
  write_study(tmp_path, ['grpo'], [0])
  write_study(tmp_path, ['a'], [0], train__samples=5)
  *figures, compared = draw(tmp_path, ['grpo', 'a'])
  shown = study_report.tables(compared, 'grpo')
  assert all([row[0] for row in t.rows] == ['grpo', 'a *'] for t in shown)
  assert shown[-1].rows[1][1:3] == ('320', '+25.0%')
  found = study.Study(runs={}, missing={})
  told = study_report.notes(found, compared, 'grpo')
  assert (
    '* NOT AT EQUAL ROLLOUTS: a samples 320 in a run, +25.0% against grpo.'
  ) in told
  for figure in figures:
    legend = figure.axes[0].get_legend().get_texts()
    assert any('a\n+25.0% rollouts' in text.get_text() for text in legend)


def test_markdown_has_every_cell_and_every_note():
  table = study_report.Table('Title', ('arm', 'n'), [('a *', '1')])
  assert study_report.markdown([table], ['* of a_b']).splitlines() == [
    '**Title**', '', '| arm | n |', '| --- | ---: |', '| a * | 1 |', '',
    r'- \* of a\_b',
  ]  # fmt: skip
