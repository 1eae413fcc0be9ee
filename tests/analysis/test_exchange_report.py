"""What a person sees of an exchange in the terminal."""

import dataclasses
import io
import itertools
import json

import pytest
from rich import console as console_lib

from mrl_jax import workdir
from mrl_jax.analysis import alignment
from mrl_jax.analysis import exchange as exchange_lib
from mrl_jax.analysis import exchange_report
from mrl_jax.thl import transfer
from tests import examples
from tests.analysis import journals
from tests.analysis import workdirs

HOSTILE = '\x1b[2J[bold]:smile:\r\u202e'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A run of two policies that exchange everything; its texts are hostile."""
  folder = tmp_path_factory.mktemp('run')
  workdirs.write(folder, config={'thl.max_tokens': 9})
  for policy in journals.TOKENIZERS:
    rounds = [
      [journals.rollout(policy, b'= 10 = 13', prompt=f'[red]{HOSTILE}')],
      [
        journals.rollout(policy, HOSTILE.encode(), round=1, prompt='p1'),
        journals.rollout(policy, b'top score', round=1, prompt='p2'),
      ],
    ]
    journals.write(folder / 'see', policy, rounds, finish=False)
  counts = {'published': 3, 'bytes': 9, 'used': 1, 'stale': 0, 'refused': 2}
  pairs = [f'{a}->{b}' for a, b in itertools.permutations(journals.TOKENIZERS)]
  summary = workdirs.summary(
    dict.fromkeys(journals.TOKENIZERS, 0.5),
    4,
    exchange={pair: {'rollout': counts} for pair in pairs},
    refusals={'llama->gemma': {f'logp{HOSTILE}': 2}},
  )
  workdir.write(folder, workdir.SUMMARY, summary)
  return folder


def printed(function, *arguments):
  console = console_lib.Console(
    file=io.StringIO(), width=100, markup=False, emoji=False, highlight=False
  )
  function(*arguments, console)
  return console.file.getvalue()


def test_everything_is_shown(folder):
  exchange = exchange_lib.read(str(folder), newest=1)
  residuals, offers = exchange_lib.transfer_all(exchange)
  text = printed(exchange_report.show, exchange, residuals, offers[:2])
  for part in (
    'llama: 2 rounds, 0 to 1, not finished',
    '1 used, 2 refused',
    '2 logp',
    'in round 1, of 2',
    'max_tokens 9, max_residual 1 (config.json)',
    '1 too_long',
    'gemma->llama, round 1, p2, sample 0: correct, reward 1',
    'all, as carried',
    '␣ is a space',
  ):
    assert part in text
  assert 'Missing or left out' not in text
  values = json.loads(json.dumps(exchange_report.values(exchange, residuals)))
  assert values['residuals']['llama->gemma']['refused'] == {'too_long': 1}
  assert values['fates']['llama->gemma']['rollout']['used'] == 1
  assert values['limits'] == {'max_tokens': 9, 'max_residual': 1.0}


def test_untrusted_text_is_shown_and_not_obeyed(folder):
  exchange = exchange_lib.read(str(folder), newest=9)
  exchange = dataclasses.replace(exchange, problems=[f'bad{HOSTILE}'] * 41)
  residuals, offers = exchange_lib.transfer_all(exchange)
  text = printed(exchange_report.show, exchange, residuals, offers)
  assert not {'\x1b', '\r', '\u202e'} & {*text}
  assert '[red]\\x1b[2J[bold]:smile:\\r\\u202e, sample 0' in text
  assert '\\x1b [ 2 J [ b o l d ] : s m i l e : \\r' in text
  assert text.count('  bad\\x1b') == 40
  assert 'and 1 more' in text


def test_means_are_of_the_numbers_that_a_kind_has(tmp_path):
  rollouts = [
    journals.rollout('llama', b'= 13', float(g == 0), sample=g, finish=finish)
    for g, finish in enumerate(['stop', 'stop_string', 'length', 'length'])
  ]
  outcome = examples.outcome(policy='llama')
  journals.write(tmp_path, 'llama', [[*rollouts, outcome], []])
  exchange = exchange_lib.read(str(tmp_path), newest=9)
  text = printed(exchange_report.show_published, exchange.journals)
  assert 'llama: 2 rounds, 0 to 1, 1 of them without records, finished' in text
  tokens = sum(len(r.ids) for r in rollouts) / 4
  for kind, means in (
    ('rollout', ['0.250', '25.0%', '50.0%', f'{tokens:.1f}']),
    ('outcome', ['', '25.0%', '', '']),
  ):
    (line,) = [n for n in text.splitlines() if f'│ {kind}' in n]
    assert [cell.strip() for cell in line.split('│')[5:9]] == means


def test_without_a_work_dir_the_fates_are_unknown(folder):
  exchange = exchange_lib.read(str(folder / 'see'), newest=9)
  text = printed(exchange_report.show_fates, exchange)
  assert 'unknown: the folder has neither a summary.json nor a\nmetrics' in text
  assert 'used' not in text
  assert exchange_report.values(exchange, {})['fates'] is None


def test_a_run_without_exchange_says_so(tmp_path):
  workdirs.write(tmp_path, policies=('llama',))
  exchange = exchange_lib.read(str(tmp_path), newest=9)
  text = printed(exchange_report.show_fates, exchange)
  assert text == 'No policy received records of a peer.\n'


def test_without_rollouts_it_is_said_how_to_write_them(tmp_path):
  for policy in journals.TOKENIZERS:
    journals.write(tmp_path, policy, [[examples.outcome(policy=policy)]])
  exchange = exchange_lib.read(str(tmp_path), newest=9)
  text = printed(exchange_report.show_residuals, exchange, {})
  assert '--config.see.journal=all' in text


def test_a_rollout_of_many_chunks_is_cut_but_not_its_sum(tmp_path):
  long = journals.rollout('llama', b'= 9 ' * 100)
  for policy in journals.TOKENIZERS:
    rollouts = [long] if policy == 'llama' else []
    journals.write(tmp_path, policy, [rollouts])
  limits = transfer.Limits(max_tokens=10_000)
  exchange = dataclasses.replace(
    exchange_lib.read(str(tmp_path), newest=9), limits=limits
  )
  _, (offer,) = exchange_lib.transfer_all(exchange)
  text = printed(exchange_report.show_rollout, offer, exchange)
  chunks = alignment.chunks(long, journals.TOKENIZERS['gemma'], limits)
  assert f'{len(chunks) - 40} more' in text
  assert text.count(' -') == 40 + 2  # Log-probabilities, and their sums.
  assert text.count(f'{long.sampling_logp.sum():.4f}') == 2
