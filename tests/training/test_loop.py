"""Whole runs, small: what they write, and that they can be repeated."""

import base64
import dataclasses
import io
import json
import math
import os
import shutil

from absl import logging
import jax
import msgspec
import numpy as np
import pytest
from rich import console as console_lib

from mrl_jax import checks
from mrl_jax.analysis.report import page
from mrl_jax.rewards import functions
from mrl_jax.rewards import verify
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.training import job as job_lib
from mrl_jax.training import loop
from mrl_jax.training import progress
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import checkpoint
from mrl_jax.update import optimizer
from tests import examples
from tests import exchanges


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('runs')


def config(folder, method='prp', **changes):
  return examples.run_config(
    **{
      'method.name': method,
      'train.rounds': 4,
      'cache_dir': os.fspath(folder / 'cache'),
      **changes,
    }
  )


def run(folder, name, **changes):
  """Runs, and returns the summary, the work dir and what was shown."""
  workdir = os.fspath(folder / name)
  shown = console_lib.Console(file=io.StringIO(), width=100)
  summary = loop.run(config(folder, **changes), workdir, shown)
  return summary, workdir, shown.file.getvalue()


WRITE_REPORT = page.write


@pytest.fixture(autouse=True)
def without_report(monkeypatch):
  """It takes a second each time; that of `finished` is there all the same."""
  monkeypatch.setattr(page, 'write', lambda workdir: 'none')


@pytest.fixture(scope='module')
def finished(folder):
  return run(folder, 'finished')


def metrics(workdir):
  with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as lines:
    rows = [json.loads(line) for line in lines]
  for row in rows:
    del row['timing']
  return rows


def evaluations(workdir):
  path = os.path.join(workdir, 'evaluations.jsonl')
  with open(path, encoding='utf-8') as lines:
    return [json.loads(line) for line in lines]


def report(workdir):
  with open(os.path.join(workdir, 'report.html'), encoding='utf-8') as f:
    return f.read()


def untimed(summary):
  return {**summary, 'timing': 0}


def restored(folder, workdir, **changes):
  """All that the newest checkpoint holds, but for the time."""
  job = job_lib.build(config(folder, **changes), workdir)
  checkpoints = checkpoint.Checkpoints(os.path.join(workdir, 'checkpoints'), 2)
  states, host = checkpoints.restore(
    {name: worker.state for name, worker in job.workers.items()}
  )
  checkpoints.close()
  del host['progress']['seconds']
  host['exchange'] = {n: without_time(s) for n, s in host['exchange'].items()}
  return jax.device_get(states), host


def without_time(exchange):
  """What the exchange waits for and knows, but for the time it took."""
  inbox, outlets = msgspec.msgpack.decode(base64.b64decode(exchange))
  *queue, books = msgspec.msgpack.decode(inbox)
  *counts, waited, seconds = books
  assert seconds > 0
  assert waited == {}
  return queue, counts, outlets


def assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_what_a_run_writes(finished):
  summary, workdir, _ = finished
  with open(os.path.join(workdir, 'summary.json'), encoding='utf-8') as f:
    assert json.load(f) == summary
  assert summary['method'] == 'prp'
  assert summary['seed'] == 0
  assert summary['rounds'] == 4
  assert 0 < summary['timing']['exchange'] < summary['timing']['seconds']
  for policy in ('gemma', 'llama'):
    accuracy = summary['policies'][policy]['heldout_accuracy']
    assert 0 <= accuracy['before'] <= 1
    assert 0 <= accuracy['after'] <= 1
  rows = metrics(workdir)
  assert [(row['round'], row['policy']) for row in rows] == [
    (round, policy) for round in range(4) for policy in ('gemma', 'llama')
  ]
  assert all(np.isfinite(row['grad_norm']) for row in rows)
  assert [row['round'] for row in rows if 'heldout_accuracy' in row] == [
    1, 1, 3, 3,
  ]  # fmt: skip
  assert sorted(os.listdir(os.path.join(workdir, 'tensorboard')))[-3:] == [
    'gemma', 'hyperparameters', 'llama',
  ]  # fmt: skip
  with open(os.path.join(workdir, 'plan.json'), encoding='utf-8') as f:
    assert json.load(f)['policies'].keys() == {'gemma', 'llama'}
  assert sorted(os.listdir(os.path.join(workdir, 'checkpoints'))) == [
    'round_3',
    'round_4',
  ]


def test_evaluations_are_written_with_their_errors_and_completions(finished):
  summary, workdir, _ = finished
  rows = evaluations(workdir)
  assert [(row['rounds'], row['policy']) for row in rows] == [
    (rounds, policy) for rounds in (0, 2, 4) for policy in ('gemma', 'llama')
  ]
  for row, when in ((rows[1], 'before'), (rows[-1], 'after')):
    accuracy = summary['policies']['llama']['heldout_accuracy'][when]
    assert row['accuracy']['all'] == accuracy
    assert 0 <= row['error']['all'] < 0.5
    assert len(row['best']) == len(row['worst']) == 3
    assert row['best'][0]['reward'] >= row['worst'][0]['reward']


def test_the_time_of_a_round_is_told_by_phase(finished):
  path = os.path.join(finished[1], 'metrics.jsonl')
  with open(path, encoding='utf-8') as lines:
    rows = [json.loads(line) for line in lines]
  evaluated = [row for row in rows if 'heldout_accuracy' in row]
  for row in rows:
    phases = row['timing']['phases']
    assert {'sampling', 'verification', 'exchange', 'lessons', 'updates',
            'other'} <= phases.keys()  # fmt: skip
    assert min(phases.values()) >= 0
    assert ('evaluation' in phases) == (row in evaluated)
    playing = sum(phases.values()) - phases.get('evaluation', 0)
    assert playing - phases.get('checkpoints', 0) == pytest.approx(
      row['timing']['seconds'], abs=0.1
    )
  elapsed = [row['timing']['elapsed'] for row in rows]
  assert elapsed == sorted(elapsed)


def test_what_a_person_sees(finished):
  _, workdir, shown = finished
  for text in (
    'Plan for 8 x cpu',
    'fsdp 4',
    'warm start llama 20/20',
    'round gemma 4/4 reward',
    'tok/s',
    '40 from peers',
    'Held-out accuracy',
    'mean',
    'gemma->llama',
    'THL residual',
    workdir,
  ):
    assert text in shown
  assert f'Report: {workdir}/report.html' in shown
  assert 'finished, 4 rounds' in report(workdir)


def test_every_record_is_accounted_for(finished):
  summary, _, _ = finished
  expected = {
    'published': 4 * 8 * 4,
    'used': 4 * 8 * 4,
    **dict.fromkeys(('stale', 'refused', 'duplicate', 'evicted', 'waiting'), 0),
  }
  for pair in ('gemma->llama', 'llama->gemma'):
    row = {**summary['exchange'][pair]['rollout']}
    assert row.pop('bytes') > 0
    assert row == expected
    assert summary['exchange'][pair]['group_stats']['used'] == 4 * 8
    residual = summary['residuals'][pair]
    assert residual['rollouts'] == 4 * 8 * 4


def test_policies_have_their_own_devices_and_shards(folder, finished):
  job = job_lib.build(config(folder), finished[1])
  devices = {
    name: set().union(
      *(x.sharding.device_set for x in jax.tree.leaves(worker.state))
    )
    for name, worker in job.workers.items()
  }
  assert devices['gemma'].isdisjoint(devices['llama'])
  for worker in job.workers.values():
    embed = worker.state.params['embed_VD'].get_value()
    parts = worker.mesh.devices.size
    assert parts > 1
    shard = embed.sharding.shard_shape(embed.shape)
    assert math.prod(shard) == embed.size // parts


def test_the_same_command_gives_the_same_metrics(folder, finished):
  summary, workdir, _ = run(folder, 'again')
  assert metrics(workdir) == metrics(finished[1])
  assert untimed(summary) == untimed(finished[0])


def test_another_seed_gives_others(folder, finished):
  _, workdir, shown = run(folder, 'seed', seed=1, **{'train.rounds': 1})
  assert 'warm start llama 20/20' in shown
  assert (
    metrics(workdir)[0]['response_length']
    != (metrics(finished[1])[0]['response_length'])
  )


def test_no_random_key_is_used_twice(folder, monkeypatch):
  keys = []
  start_sampling = worker_lib.Worker.start_sampling

  def spy(worker, prompts, per_prompt, key, temperature):
    keys.append(tuple(jax.random.key_data(key).tolist()))
    return start_sampling(worker, prompts, per_prompt, key, temperature)

  monkeypatch.setattr(worker_lib.Worker, 'start_sampling', spy)
  run(folder, 'keys', **{'train.rounds': 2, 'eval.batch': 8})
  # Two policies; two rounds; two evaluations of two batches.
  assert len(keys) == len(set(keys)) == 2 * (2 + 2 * 2)


def test_the_learning_rate_decays_over_all_updates(folder, monkeypatch):
  seen, build = [], optimizer.build

  def spy(config, steps):
    seen.append(steps)
    return build(config, steps)

  monkeypatch.setattr(optimizer, 'build', spy)
  job_lib.build(config(folder), os.fspath(folder / 'rate'))
  # Rounds and mini-batches, of two policies; one step is enough for a plan.
  assert seen == [1, 1, 4 * 2, 4 * 2]


def test_an_interrupted_run_ends_as_if_it_had_not_been(
  folder, finished, monkeypatch
):
  name, play_round = 'interrupted', loop.play_round

  def stop(job, progress):
    if progress.rounds == 3:
      raise KeyboardInterrupt
    return play_round(job, progress)

  monkeypatch.setattr(loop, 'play_round', stop)
  monkeypatch.setattr(page, 'write', WRITE_REPORT)
  with pytest.raises(KeyboardInterrupt):
    run(folder, name)
  monkeypatch.setattr(loop, 'play_round', play_round)
  workdir = os.fspath(folder / name)
  assert 'after 3 of 4 rounds' in report(workdir)
  with open(os.path.join(workdir, 'metrics.jsonl'), 'a') as f:
    f.write('{"round": 99, "pol')  # As a kill may leave it.
  resume = progress.resume
  monkeypatch.setattr(
    progress,
    'resume',
    lambda *args: dataclasses.replace(resume(*args), seconds=1000.0),
  )
  summary, _, _ = run(folder, name)
  assert (
    summary['timing']['seconds'] > 1000
  )  # What it took before is not forgotten.
  assert metrics(workdir) == metrics(finished[1])
  assert evaluations(workdir) == evaluations(finished[1])
  assert_same(restored(folder, workdir)[0], restored(folder, finished[1])[0])
  assert restored(folder, workdir)[1] == restored(folder, finished[1])[1]
  assert untimed(summary) == untimed(finished[0])


@pytest.fixture
def half_are_right(monkeypatch):
  """So that policies that have learnt nothing have something to learn."""

  def verify_length(text, gold, marker):
    del gold, marker
    return 'correct' if len(text) % 2 else 'wrong'

  monkeypatch.setattr(verify, 'verify', verify_length)


def test_a_run_with_the_verifier_of_mathematics(folder, monkeypatch):
  judges, verifiers = [], set()
  build, publish = functions.build, loop.publish.publish

  def build_and_note(config):
    judges.append(build(config))
    return judges[-1]

  def publish_and_note(*groups, verifier, **settings):
    verifiers.add(verifier)
    return publish(*groups, verifier=verifier, **settings)

  monkeypatch.setattr(functions, 'build', build_and_note)
  monkeypatch.setattr(loop.publish, 'publish', publish_and_note)
  _, workdir, _ = run(folder, 'math', **{'reward.verifier': 'math'})
  rows = metrics(workdir)
  for pair in zip(rows[::2], rows[1::2], strict=True):
    # Each policy verifies its own answers and those of its peer; evaluations
    # are not of the round.
    stopped = sum(row['stopped'] * row['rollouts'] for row in pair)
    for row in pair:
      assert 0 < sum(row['verified'].values()) == stopped
  with pytest.raises(RuntimeError, match='closed'):
    judges[0](rb'\boxed{x}', 'stop', 'y')
  assert verifiers == {'math'}


EVERYTHING = {
  'method': 'hacpo',
  'method.kl_weight': 0.1,
  'method.entropy_weight': 0.01,
  'method.correction.level': 'token',
  'sample.refills': 1,
  'reward.overlong_tokens': 3,
  'train.rounds': 3,
}


@pytest.mark.slow
def test_whatever_a_method_keeps_is_resumed_too(
  folder, half_are_right, monkeypatch
):
  summary, workdir, _ = run(folder, 'everything', **EVERYTHING)
  rows = metrics(workdir)
  assert any(row['rollouts'] > 8 * 4 for row in rows)  # It did refill.
  for row in rows:
    assert row['peer_rows'] + row['peer_rows_refused'] == 8 * 4
    assert row['own']['kl'] >= 0
    assert row['mismatch']['max_ratio'] < 1.01
  assert rows[0]['own']['kl'] < rows[-1]['own']['kl']  # It moves away.
  save = progress.save

  def save_and_stop(job, progress, checkpoints):
    save(job, progress, checkpoints)
    if progress.rounds == 2:
      raise KeyboardInterrupt

  monkeypatch.setattr(progress, 'save', save_and_stop)
  with pytest.raises(KeyboardInterrupt):
    run(folder, 'everything-cut', **EVERYTHING)
  monkeypatch.setattr(progress, 'save', save)
  again, cut, _ = run(folder, 'everything-cut', **EVERYTHING)
  assert metrics(cut) == rows
  assert untimed(again) == untimed(summary)
  for mine, theirs in zip(
    restored(folder, cut, **EVERYTHING),
    restored(folder, workdir, **EVERYTHING),
    strict=True,
  ):
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.parametrize(
  ('method', 'changes'),
  [
    ('sgt', {}),
    ('graft', {'method.graft.admission': 'all', 'method.which': 'all'}),
  ],
)
def test_a_method_learns_from_what_peers_gave(
  folder, half_are_right, method, changes
):
  _, workdir, shown = run(
    folder, f'of-{method}', method=method, **{'train.rounds': 2, **changes}
  )
  rows = metrics(workdir)
  assert any(row['peer_rows'] for row in rows)
  for row in rows:
    assert ('peer' in row) == (row['peer_rows'] > 0)
    # What replaces own rows is trained on in their place.
    if method == 'graft':
      assert 'own' not in row
      assert row['peer']['ratio'] == pytest.approx(1.0, abs=0.2)
  assert 'THL residual' in shown


def test_what_is_in_the_cache_is_not_made_again(folder, finished):
  _, _, shown = run(folder, 'cached', **{'train.rounds': 1})
  assert 'warm start of llama: taken from' in shown
  assert 'warm start llama 20/20' not in shown


def test_a_gradient_that_is_not_finite_stops_the_run(folder, monkeypatch):
  play_round = loop.play_round

  def spoil(job, progress):
    rows = play_round(job, progress)
    rows['llama']['grad_norm'] = float('nan')
    return rows

  monkeypatch.setattr(loop, 'play_round', spoil)
  with pytest.raises(FloatingPointError, match='gradient of llama is nan'):
    run(folder, 'nan')


def test_a_finished_run_says_so_again(folder, finished):
  summary, workdir, shown = run(folder, 'finished')
  assert summary == finished[0]
  assert 'round gemma' not in shown
  assert len(metrics(workdir)) == 8


def test_other_prompts_than_it_began_with_do_not_resume(folder, finished):
  workdir = os.fspath(folder / 'changed')
  shutil.copytree(finished[1], workdir)
  path = os.path.join(workdir, 'config.json')
  with open(path, encoding='utf-8') as f:
    began = json.load(f)
  with open(path, 'w', encoding='utf-8') as f:
    json.dump({**began, 'inputs': 'of another file'}, f)
  with pytest.raises(checks.InputError, match='other prompts, tokenizers or'):
    run(folder, 'changed')


def test_a_folder_may_have_any_name(folder):
  name = 'a[/b]'
  _, workdir, shown = run(folder, name, method='grpo', **{'train.rounds': 1})
  assert f'Writing to {workdir}' in shown


def test_a_half_written_checkpoint_is_never_read(folder, finished):
  workdir = os.fspath(folder / 'half')
  shutil.copytree(finished[1], workdir)
  whole = os.path.join(workdir, 'checkpoints', 'round_4')
  half = os.path.join(workdir, 'checkpoints', 'round_5.orbax-checkpoint-tmp')
  shutil.copytree(whole, half)
  shutil.rmtree(os.path.join(half, 'llama'))
  assert_same(restored(folder, workdir), restored(folder, finished[1]))
  assert not os.path.exists(half)


@pytest.mark.parametrize('method', ['grpo', 'xgrpo'])
def test_the_other_methods_run(folder, method):
  summary, workdir, _ = run(
    folder, method, method=method, **{'train.rounds': 2}
  )
  assert summary['method'] == method
  assert (summary['exchange'] == {}) == (method == 'grpo')
  assert os.path.exists(os.path.join(workdir, 'see')) == (method != 'grpo')
  assert all('peer' not in row for row in metrics(workdir))


def test_a_journal_teaches_what_the_policy_itself_did(
  folder, finished, monkeypatch
):
  half = jax.devices()[:4]  # As many as llama had beside gemma.
  monkeypatch.setattr(jax, 'devices', lambda: half)
  changes = {'see.peers.gemma.journal': finished[1]}
  _, workdir, shown = run(folder, 'stored', **changes)
  assert metrics(workdir) == [
    row for row in metrics(finished[1]) if row['policy'] == 'llama'
  ]
  assert 'gemma is not trained here' in shown
  assert 'round gemma' not in shown
  stored, _ = restored(folder, workdir, **changes)
  monkeypatch.undo()
  live, _ = restored(folder, finished[1])
  assert list(stored) == ['llama']
  assert_same(stored['llama'], live['llama'])


@pytest.mark.parametrize('of_use', [0, 1])
def test_records_that_are_all_about_other_prompts_are_told(caplog, of_use):
  logging.use_absl_handler()
  lesson = lesson_lib.Lesson(
    own=[], peer=[], order=[], residuals={}, metrics={}, peer_records=of_use,
    peer_records_unused=40,
  )  # fmt: skip
  with caplog.at_level('WARNING', logger='absl'):
    loop.tell_of_strangers('llama', lesson, round=0)
  told = 'llama can use none of the 40 records' in caplog.text
  assert told == (of_use == 0)


def test_a_peer_that_never_comes_is_named_and_gone_without(
  folder, caplog, monkeypatch
):
  half = jax.devices()[:4]  # What is compiled for them already.
  monkeypatch.setattr(jax, 'devices', lambda: half)
  logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'):
    summary, workdir, _ = run(
      folder,
      'deserted',
      **{
        'see.listen': exchanges.free_address(),
        'see.peers.gemma.address': exchanges.free_address(),
        'see.wait_s': 0.1,
        'see.block_s': 0.1,
        'train.rounds': 2,
      },
    )
  assert 'llama heard nothing from gemma' in caplog.text
  assert 'llama cannot reach gemma' in caplog.text
  assert [row['peer_records'] for row in metrics(workdir)] == [0, 0]
  sent = summary['sent']['llama->gemma']['rollout']
  assert sent['waiting'] == sent['published'] == 2 * 8 * 4


def test_one_policy_alone_is_grpo_whatever_the_method(folder):
  alone = []
  for method in ('grpo', 'prp'):
    small = config(folder, method, **{'train.rounds': 2})
    with small.unlocked():
      del small.policies['gemma']
      del small.see.peers['gemma']
    workdir = os.fspath(folder / f'alone-{method}')
    loop.run(small, workdir, console_lib.Console(file=io.StringIO()))
    alone.append(metrics(workdir))
  assert alone[0] == alone[1]


def test_a_policy_that_listens_to_nobody_learns_as_alone_with_grpo(
  folder, monkeypatch
):
  # Some gradient, however little it has learnt.
  changes = {'policies.llama.listens_to': (), 'reward.weights.format': 1.0}
  changes |= {'train.rounds': 2}
  _, workdir, _ = run(folder, 'teacher', **changes)
  rows = {'gemma': [], 'llama': []}
  for row in metrics(workdir):
    rows[row['policy']].append(row)
  assert [row['peer_records'] for row in rows['llama']] == [0, 0]
  assert [row['peer_records'] for row in rows['gemma']] == [40, 40]
  assert any(row['grad_norm'] for row in rows['llama'])
  states, _ = restored(folder, workdir, **changes)

  half = jax.devices()[:4]  # As many as llama had beside gemma.
  monkeypatch.setattr(jax, 'devices', lambda: half)
  alone = config(folder, 'grpo', **changes)
  with alone.unlocked():
    del alone.policies['gemma']
    del alone.see.peers['gemma']
  workdir = os.fspath(folder / 'without-listeners')
  loop.run(alone, workdir, console_lib.Console(file=io.StringIO()))
  assert metrics(workdir) == rows['llama']
  job = job_lib.build(alone, workdir)
  checkpoints = checkpoint.Checkpoints(os.path.join(workdir, 'checkpoints'), 2)
  by_itself, _ = checkpoints.restore({'llama': job.workers['llama'].state})
  checkpoints.close()
  assert_same(by_itself['llama'], states['llama'])


@pytest.mark.slow
def test_policies_may_take_turns_on_one_device(folder, monkeypatch):
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda: one)
  summary, _, shown = run(
    folder, 'turns', **{'train.rounds': 1, 'mwra.time_share': True}
  )
  assert 'one device' in shown
  assert summary['rounds'] == 1
