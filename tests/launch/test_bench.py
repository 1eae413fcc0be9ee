"""The benchmarks run and give figures; how fast they are is not tested."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from mrl_jax.bandit import methods

ROOT = pathlib.Path(__file__).parents[2]
THL = ('thl', '--tokens=200', '--repeats=2')
TINY = ('--width=64', '--depth=1', '--context=8', '--new=8', '--repeat=1')


def run(*arguments, **environment):
  return subprocess.run(
    [sys.executable, 'launch/bench.py', *arguments],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


@pytest.fixture
def figures(tmp_path):
  """Runs a benchmark; its figures are all finite, positive and printed."""

  def figures(name, *arguments, printed='', **environment):
    path = tmp_path / 'figures.json'
    done = run(name, *arguments, f'--json={path}', **environment)
    assert done.returncode == 0, done.stderr
    about, rows = json.loads(path.read_text())[name].values()
    for title, number in about.items():
      assert number > 0
      shown = f'{number:,.0f}' if number >= 100 else f'{number:.3g}'
      assert f'{shown} {title}' in done.stdout
    for row, columns in rows.items():
      assert row in done.stdout
      assert all(math.isfinite(n) and n > 0 for n in columns.values())
    assert printed in done.stdout
    return about, rows

  return figures


@pytest.fixture
def without_peers(tmp_path):
  """The environment in which neither TRL nor tunix can be imported."""
  # These modules are found before installed ones.
  for name in ('trl', 'tunix'):
    (tmp_path / f'{name}.py').write_text(
      f'raise ModuleNotFoundError("No module named {name!r}")'
    )
  return {'PYTHONPATH': f'{tmp_path}:{ROOT}'}


@pytest.mark.slow
@pytest.mark.skipif(
  not importlib.util.find_spec('math_verify'),
  reason="pip install -e '.[math]'",
)
def test_hostile_answers_at_most_double_the_time_of_a_batch(figures):
  about, rows = figures('verify', '--answers=1000')
  assert (about['answers'], about['hostile answers']) == (1000, 10)
  assert rows['ratio']['CPU seconds'] < 2


def test_thl_without_trl(figures, without_peers):
  about, rows = figures(
    *THL,
    printed="to compare with GOLD: pip install -e '.[bench]'",
    **without_peers,
  )
  assert about['sender tokens'] == 200
  assert about['chunks'] <= 200 < about['bytes']
  assert [*rows] == ['THL align', 'THL align + project', 'THL transfer']
  for row in rows.values():
    assert row['best ms'] <= row['median ms']
    assert 'GOLD takes, x' not in row


@pytest.mark.skipif(
  not importlib.util.find_spec('trl'), reason="pip install -e '.[bench]'"
)
def test_thl_beside_gold(figures):
  _, rows = figures(*THL)
  assert rows['GOLD align']['GOLD takes, x'] == 1
  assert all('GOLD takes, x' in row for row in rows.values())


def test_a_round_takes_of_many_peers_what_it_takes_of_one(figures):
  about, rows = figures(
    'scale',
    *('--peers=1,3', '--prompts=2', '--per_prompt=2', '--response_tokens=128'),
    '--verifier=exact',
  )
  assert about['rollouts a peer'] == 4
  assert (
    rows['sent']
    == rows['judged']
    == rows['taken']
    == {'1 peers': 4, '3 peers': 4}
  )


def test_see_over_every_transport(figures):
  about, rows = figures('see', '--rounds=2', '--rollouts=8', '--response=4')
  assert about['records'] == 16
  assert [*rows] == ['in process', 'journal', 'gRPC']


@pytest.mark.slow
def test_the_sampler_at_even_and_at_uneven_lengths(figures, without_peers):
  _, rows = figures(
    'sampler',
    *(*TINY, '--batch=4', '--requests=9', '--mean=3', '--shared=16'),
    printed='to compare with tunix',
    **without_peers,
  )
  assert [*rows] == ['4 rows, even', '4 rows, uneven', '4 x 8 rows']
  even, uneven, shared = rows.values()
  assert even['tokens'] == 4 * 8
  assert even['real slots, %'] == 100
  assert 9 <= uneven['tokens'] < 9 * 8
  assert 0 < uneven['real slots, %'] <= 100
  assert shared['tokens'] == 4 * 8 * 4
  assert 'x tunix' not in even


@pytest.mark.slow
def test_the_update_at_even_and_at_uneven_lengths(figures, without_peers):
  _, rows = figures('update', *TINY, '--mean=3', **without_peers)
  even, uneven = rows['32 rows, even'], rows['32 rows, uneven']
  assert even['tokens'] == 32 * (8 + 8)
  assert 32 * (8 + 1) <= uneven['tokens'] < even['tokens']
  assert [*even] == ['tokens', 'tokens/s', 's']


@pytest.mark.slow
def test_the_round_with_and_without_a_reference(figures, without_peers):
  _, rows = figures(
    'round', *TINY, printed='to compare with TRL', **without_peers
  )
  assert rows['without KL penalty']['s'] < rows['with']['s']


@pytest.mark.slow
@pytest.mark.skipif(
  not importlib.util.find_spec('tunix'), reason="pip install -e '.[bench]'"
)
@pytest.mark.parametrize('name', ['sampler', 'update', 'round'])
def test_beside_tunix(name, figures):
  sampler = ('--batch=4', '--requests=9', '--shared=16')
  # Tunix broadcasts.
  environment = {'JAX_NUMPY_RANK_PROMOTION': 'allow'}
  _, rows = figures(name, *TINY, '--mean=3', *sampler, **environment)
  for row in rows.values():
    if name == 'sampler':
      ratio = row['tokens/s'] / row['tunix, tokens/s']
      assert row['x tunix'] == pytest.approx(ratio)
    else:
      assert row['tunix takes, x'] == pytest.approx(row['tunix, s'] / row['s'])


def test_memory_is_bounded_by_the_chunk(figures):
  about, rows = figures(
    'memory',
    *('--vocab=8192', '--rows=4', '--length=128', '--layers=1'),
    *('--d_model=64', '--chunk=32'),
  )
  logits = about['MiB of logits']
  assert logits == 4 * 128 * 8192 * 4 / 2**20
  chunk, whole = (rows[f'{n} tokens a chunk'] for n in (32, 512))
  assert logits <= whole['scoring, MiB'] < whole['gradient, MiB']
  assert chunk['scoring, MiB'] < logits / 4
  # The gradients of the parameters are as large as the logits of a chunk.
  assert chunk['gradient, MiB'] < min(logits, whole['gradient, MiB'] / 2)


def test_the_bandit_with_every_method(figures):
  about, rows = figures('bandit', '--groups=40', '--actions=3', '--samples=2')
  assert about['groups of each method'] == 40
  assert rows.keys() == methods.METHODS.keys()


@pytest.mark.slow
def test_policies_beside_one_alone(figures):
  _, rows = figures('policies', '--up_to=2', '--played=1', '--best_of=1')
  alone, both = rows['N = 1'], rows['N = 2']
  for method in ('grpo', 'prp', 'prp, one peer'):
    one, two = (row[f'{method}, s a round'] for row in (alone, both))
    assert alone[f'{method}, x alone'] == 1
    assert both[f'{method}, x alone'] == pytest.approx(two / (2 * one))
  # With exchange, each policy trains on the rollouts of both.
  assert both['prp, x alone'] > both['grpo, x alone']


# Gives the command each list of arguments; prints what it ends with.
_END_ALL = """
import json, sys
from absl import flags
from absl.testing import flagsaver
import bench

endings = []
for arguments in json.loads(sys.argv[1]):
  with flagsaver.flagsaver():
    try:
      bench.main(flags.FLAGS(['bench.py', *arguments]))
    except (SystemExit, flags.Error) as error:
      endings.append(str(error))
print(json.dumps(endings))
"""
MISTAKES = {
  (): 'name a benchmark; known: thl, see, policies, sampler, update, round, ',
  ('bandit', '--groups=6'): '6 groups; they must be a multiple of the batch',
  ('policies', '--up_to=0'): 'flag --up_to=0',
  ('memory', '--chunk=0'): 'flag --chunk=0',
  (*THL, '--text=nowhere.txt'): "No such file or directory: 'nowhere.txt'",
  ('thl', '--tokens=10000000'): '--tokens=10000000, but the text has',
  ('thl', '--repeats=0'): 'flag --repeats=0',
}


def test_a_mistake_ends_the_command_with_a_message():
  done = subprocess.run(
    [sys.executable, '-c', _END_ALL, json.dumps([*MISTAKES])],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT / "launch"}'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  endings = json.loads(done.stdout.splitlines()[-1])
  for message, ending in zip(MISTAKES.values(), endings, strict=True):
    assert message in ending


def test_a_mistake_is_reported_without_a_traceback():
  done = run('thk')
  assert done.returncode != 0
  message = "unknown benchmark 'thk'. Did you mean 'thl'? Known: bandit, "
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
