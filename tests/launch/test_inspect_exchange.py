"""What a person sees of an exchange, in the terminal and in the figure."""

import io
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from rich import console as console_lib

from launch import inspect_exchange
from mrl_jax import records
from mrl_jax.analysis import exchange as inspection
from mrl_jax.see import journal
from mrl_jax.thl import transfer
from tests import examples

ROOT = pathlib.Path(__file__).parents[2]
TOKENIZERS = {
  'llama': examples.tokenizer('byte_level'),
  'gemma': examples.tokenizer('sentencepiece'),
}
HOSTILE = '\x1b[2J[bold]:smile:\r\u202e'
LIMITS = transfer.Limits(max_tokens=64)


def run(*arguments, options=()):
  return subprocess.run(
    [sys.executable, *options, 'launch/inspect_exchange.py', *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    encoding='utf-8',
    timeout=300,
    check=False,
  )


def write(folder, policy, *rounds, kinds=records.KINDS):
  tokenizer = TOKENIZERS[policy]
  about = journal.About(
    policy=policy, run='run', tokenizer=tokenizer.fingerprint,
    vocab_size=tokenizer.vocab_size, kinds=kinds,
  )  # fmt: skip
  writer = journal.Writer(os.fspath(folder), about, tokenizer.to_json())
  for round, published in enumerate(rounds):
    writer.write(round, published)


def rollout(policy, payload, reward=1.0, **fields):
  return examples.rollout(
    payload, reward, encoder=TOKENIZERS[policy], policy=policy, **fields
  )


@pytest.fixture
def workdir(tmp_path):
  """Of a run of two policies that give each other everything."""
  for policy in TOKENIZERS:
    write(
      tmp_path / 'see',
      policy,
      [rollout(policy, b'= 10 = 13', prompt=f'[red]{HOSTILE}')],
      [
        rollout(policy, HOSTILE.encode(), round=1, prompt='p1'),
        rollout(policy, b'top score', round=1, prompt='p2'),
      ],
    )
  (tmp_path / 'config.json').write_text('{"thl.max_tokens": 9}')
  counts = {'published': 3, 'bytes': 9, 'used': 1, 'stale': 0, 'refused': 2}
  pairs = {f'{a}->{b}': {'rollout': counts}
           for a, b in itertools.permutations(TOKENIZERS, 2)}  # fmt: skip
  summary = {
    'exchange': pairs,
    'refusals': {'llama->gemma': {f'logp{HOSTILE}': 2}},
  }
  (tmp_path / 'summary.json').write_text(json.dumps(summary))
  return tmp_path


def test_the_command_shows_everything_without_jax(workdir):
  figure, values = workdir / 'here.png', workdir / 'values.json'
  done = run(
    os.fspath(workdir), f'--figure={figure}', f'--json={values}',
    '--rounds=1', options=['-X', 'importtime'],
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  modules = {line.split('|')[-1].strip() for line in done.stderr.splitlines()}
  assert 'rich.console' in modules
  assert not modules & {'jax', 'flax', 'transformers'}
  for part in (
    'llama: 2 rounds, 0 to 1, not finished',
    '1 used, 2 refused',
    '2 logp',
    'in round 1, of 2',
    'max_tokens 9, max_residual 1 (config.json)',
    '1 too_long',
    'gemma->llama, round 1, p2, sample 0: correct, reward 1',
    'all, as carried',
    f'Figure: {figure}',
  ):
    assert part in done.stdout
  assert figure.read_bytes().startswith(b'\x89PNG')
  residuals = json.loads(values.read_text())['residuals']
  assert residuals['llama->gemma']['refused'] == {'too_long': 1}


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    (['nowhere'], 'nothing of an exchange in nowhere: looked for POLICY/'),
    ([], 'name one folder'),
    (['{}', '--policy=lama'], 'there is --policy=gemma'),
    (['{}', '--figure={}/a.pgn'], "Did you mean 'png'"),
    (['{}', '--figure={}/none/a.png'], 'No such file or directory'),
  ],
)
def test_a_mistake_is_told_without_a_traceback(workdir, arguments, told):
  done = run(*(argument.format(workdir) for argument in arguments))
  assert done.returncode != 0
  assert told in done.stderr
  assert 'Traceback' not in done.stderr


def test_untrusted_text_is_shown_and_not_obeyed(workdir):
  (workdir / 'config.json').unlink()
  done = run(
    os.fspath(workdir), '--show=9', '--figure', os.fspath(workdir / 'a.svg')
  )
  assert done.returncode == 0, done.stderr
  assert not {'\x1b', '\r', '\u202e'} & {*done.stdout}
  assert '[red]\\x1b[2J[bold]:smile:\\r\\u202e, sample 0' in done.stdout
  assert '\\x1b [ 2 J [ b o l d ] : s m i l e : \\r' in done.stdout
  assert 'max_tokens 16, max_residual 1 (by default)' in done.stdout


def shown(function, *arguments):
  console = console_lib.Console(
    file=io.StringIO(), width=100, markup=False, emoji=False, highlight=False
  )
  function(*arguments, console)
  return console.file.getvalue()


def read(folder):
  return inspection.read(os.fspath(folder), newest=9)


def test_published_means_are_of_what_a_kind_tells(tmp_path):
  rollouts = [
    rollout('llama', b'= 13', float(g == 0), sample=g, finish=finish)
    for g, finish in enumerate(['stop', 'stop', 'length', 'length'])
  ]
  outcome = examples.outcome(policy='llama')
  write(tmp_path, 'llama', [*rollouts, outcome], [])
  text = shown(inspect_exchange.show_published, read(tmp_path).journals)
  assert 'llama: 2 rounds, 0 to 1, 1 of them without records' in text
  (line,) = [n for n in text.splitlines() if '│ rollout' in n]
  tokens = sum(len(r.ids) for r in rollouts) / 4
  assert [c.strip() for c in line.split('│')[5:9]] == [
    '0.250', '25.0%', '50.0%', f'{tokens:.1f}',
  ]  # fmt: skip
  (line,) = [n for n in text.splitlines() if '│ outcome' in n]
  assert [c.strip() for c in line.split('│')[5:9]] == ['', '25.0%', '', '']


def test_without_a_work_dir_only_what_was_published_is_known(workdir):
  text = shown(inspect_exchange.show_fates, read(workdir / 'see'))
  assert 'not known: there is\nneither a summary.json nor a metrics' in text
  assert 'used' not in text


def test_a_run_that_gives_nothing_says_so(workdir):
  (workdir / 'summary.json').write_text('{"exchange": {}}')
  found = read(workdir)
  assert 'none was given' in shown(inspect_exchange.show_fates, found)
  title = inspect_exchange.draw(found, 'run').axes[0].get_title(loc='left')
  assert title == 'Records published; none was given to a peer'


def test_journals_without_records_have_a_figure(tmp_path):
  write(tmp_path, 'llama', [])
  check_legible(inspect_exchange.draw(read(tmp_path), 'run'))


def test_without_rollouts_it_is_said_how_to_get_them(tmp_path):
  for policy in TOKENIZERS:
    write(tmp_path, policy, [examples.outcome(policy=policy)])
  found = read(tmp_path)
  text = shown(inspect_exchange.show_residuals, found, {}, LIMITS)
  assert '--config.see.journal=all' in text


def test_a_rollout_of_many_chunks_is_cut_short_but_not_its_sum(tmp_path):
  long = rollout('llama', b'= 9 ' * 100)
  for policy in TOKENIZERS:
    write(tmp_path, policy, [long] if policy == 'llama' else [])
  found = read(tmp_path)
  limits = transfer.Limits(max_tokens=10_000)
  _, (one,) = inspection.carry(found.journals, limits)
  text = shown(inspect_exchange.show_rollout, one, found.journals, limits)
  chunks = inspection.chunks(long, TOKENIZERS['gemma'], limits)
  assert f'{len(chunks) - 40} more' in text
  assert text.count(' -') == 40 + 2  # Log-probabilities, and sums of them.
  assert text.count(f'{long.policy_logp.sum():.4f}') == 2


def exchange(policies, fates, kinds=('rollout',), rows=()):
  """What is known of a run of so many policies, without journals."""
  names = ['llama', 'gemma', 'a_name_that_is_rather_long', '$x^2$'][:policies]
  pairs = {
    f'{a}->{b}': dict.fromkeys(kinds, fates)
    for a, b in itertools.permutations(names, 2)
  }
  return inspection.Exchange(
    journals={},
    rows=[
      inspection.Row(round=r, policy=p, peer_rows=n, exchange=e)
      for r, (p, n, e) in enumerate(rows)
    ],
    summary=inspection.Summary(exchange=pairs),
    limits=None,
    problems=[],
  )


ALL = {'published': 99_000, 'bytes': 7, 'used': 60_000, 'stale': 20_000,
       'refused': 9_000, 'duplicate': 0, 'evicted': 9_000,
       'waiting': 1_000}  # fmt: skip
ROWS = [(p, 3, {'b': {'rollout': {'used': 4}}}) for p in ('llama', 'gemma')]
CASES = {
  'one kind': exchange(2, {'published': 9, 'used': 9}),
  'rounds': exchange(2, ALL, records.KINDS, ROWS),
  'many': exchange(4, ALL, records.KINDS, ROWS),
}


def boxes(figure):
  """The texts that are drawn, and where."""
  figure.draw_without_rendering()
  texts = figure.texts[:]
  for axes in figure.axes:
    texts += [*axes.texts, axes.title, axes._left_title]
    texts += axes.get_legend().get_texts()
    for axis in (axes.xaxis, axes.yaxis):
      low, high = sorted(axis.get_view_interval())
      ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
      texts += [axis.label, *(t for at, t in ticks if low <= at <= high)]
  return [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]


def check_legible(figure):
  for (text, box), (other, beside) in itertools.combinations(boxes(figure), 2):
    assert not box.padded(-1).overlaps(beside.padded(-1)), f'{text} on {other}'
  for text, box in boxes(figure):
    inside = figure.bbox.padded(1)
    assert inside.contains(box.x0, box.y0), text
    assert inside.contains(box.x1, box.y1), text


@pytest.mark.parametrize('found', CASES.values(), ids=CASES)
def test_the_figure_is_legible_and_its_bars_are_the_fates(found):
  figure = inspect_exchange.draw(found, 'no $mathematics^$')
  check_legible(figure)
  bars = figure.axes[0].patches
  widths = {}
  for bar in bars:
    widths.setdefault(bar.get_y(), []).append((bar.get_x(), bar.get_width()))
  kinds = [c for kinds in found.fates().values() for c in kinds.values()]
  assert len(widths) == len(kinds)
  for counts, (_, parts) in zip(kinds, sorted(widths.items()), strict=True):
    ends = list(itertools.accumulate(width for _, width in parts))
    assert [x for x, _ in parts] == [0, *ends[:-1]]
    assert ends[-1] == counts['published']
  texts = [text for text, _ in boxes(figure)]
  assert any(text.startswith('llama → gemma, rollout: ') for text in texts)


def test_the_figure_of_a_run_and_of_journals_alone(workdir):
  for folder, title in (
    (workdir, 'Records, by what became of them'),
    (workdir / 'see', 'Records published; what became of them is not known'),
  ):
    figure = inspect_exchange.draw(read(folder), folder.name)
    check_legible(figure)
    bars, rewards = figure.axes
    assert bars.get_title(loc='left') == title
    assert [line.get_label() for line in rewards.lines] == ['gemma', 'llama']
    assert [*rewards.lines[0].get_xdata()] == [0, 1]


def test_what_was_not_learned_from_is_a_share_of_all():
  figure = inspect_exchange.draw(CASES['rounds'], 'run')
  _, shares = figure.axes
  assert [[*line.get_ydata()] for line in shares.lines] == [[0.25], [0.25]]
  low, high = shares.get_ylim()
  assert low < 0
  assert high > 1
