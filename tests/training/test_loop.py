"""Whole runs, small: what they write, and that they can be repeated."""

import base64
import contextlib
import itertools
import json
import math
import os
import types

from absl import logging
import jax
import msgspec
import numpy as np
import pytest

from mrl_jax import bucket
from mrl_jax import workdir as workdir_lib
from mrl_jax.rewards import verify
from mrl_jax.training import dynamic_sampling
from mrl_jax.training import job as job_lib
from mrl_jax.training import loop
from mrl_jax.training import progress
from mrl_jax.training import saving
from mrl_jax.training import statistics
from mrl_jax.training import stopping
from mrl_jax.training import worker as worker_lib
from mrl_jax.update import checkpoint
from mrl_jax.update import optimizer
from tests import examples
from tests import exchanges
from tests import runs

POLICIES = ('gemma', 'llama')


@pytest.fixture(scope='module')
def finished():
  return runs.finished()


@pytest.fixture
def devices_of_llama(finished, monkeypatch):
  """Leaves only the devices that llama had beside gemma.

  Programs that were compiled for them before are used again.
  """
  mesh = runs.finished_job().workers['llama'].spec.mesh
  monkeypatch.setattr(jax, 'devices', lambda: [*mesh.devices.flat])


def read(workdir, name):
  with open(os.path.join(workdir, name), encoding='utf-8') as f:
    return json.load(f)


def lines(workdir, name):
  return examples.lines(os.path.join(workdir, name))


def untimed(summary):
  return msgspec.structs.replace(summary, timing=workdir_lib.RunTiming())


def assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def assert_same_checkpoints(workdir, other, job=None):
  """Compares the newest checkpoints of two runs, all but times."""
  (states, host), (other_states, other_host) = (
    runs.newest_checkpoint(folder, job) for folder in (workdir, other)
  )
  assert_same(states, other_states)
  for part in (host, other_host):
    assert part['progress'].pop('seconds') > 0
    part['exchange'] = {
      n: untimed_state(s) for n, s in part['exchange'].items()
    }
  assert host == other_host


def untimed_state(exchange):
  """The state of an endpoint without the seconds that it took."""
  inbox, outlets = msgspec.msgpack.decode(base64.b64decode(exchange))
  *queue, ledger = msgspec.msgpack.decode(inbox)
  *counts, waited, seconds = ledger
  assert seconds > 0
  assert waited == {}
  return queue, counts, outlets


def test_a_run_writes_its_plan_metrics_checkpoints_and_summary(finished):
  summary, workdir, _ = finished
  written = read(workdir, 'summary.json')
  assert msgspec.convert(written, workdir_lib.Summary) == summary
  assert (summary.method, summary.seed, summary.rounds) == ('prp', 0, 2)
  assert 0 < summary.timing.exchange < summary.timing.seconds
  rows = lines(workdir, 'metrics.jsonl')
  assert [(row['round'], row['policy']) for row in rows] == [
    (round, policy) for round in range(2) for policy in POLICIES
  ]
  assert all(row['grad_norm'] > 0 for row in rows)
  for row in rows:
    assert all(0 < row['slots'][part] <= 1 for part in ('sampling', 'own'))
  assert [row['round'] for row in rows if 'heldout_accuracy' in row] == [1, 1]
  assert {*POLICIES, 'hyperparameters'} <= {
    *os.listdir(os.path.join(workdir, 'tensorboard'))
  }
  assert read(workdir, 'plan.json')['policies'].keys() == {*POLICIES}
  checkpoints = os.listdir(os.path.join(workdir, 'checkpoints'))
  assert sorted(checkpoints) == ['round_1', 'round_2']


def test_evaluations_are_written_with_their_errors_and_completions(finished):
  summary, workdir, _ = finished
  rows = lines(workdir, 'evaluations.jsonl')
  assert [(row['rounds'], row['policy']) for row in rows] == [
    (rounds, policy) for rounds in (0, 2) for policy in POLICIES
  ]
  for row, when in ((rows[1], 'before'), (rows[-1], 'after')):
    llama = summary.policies['llama']
    families = getattr(llama.heldout_accuracy_by_family, when)
    assert row['accuracy'] == families
    assert families['all'] == getattr(llama.heldout_accuracy, when)
    assert 0 <= families['all'] <= 1
    assert 0 <= row['error']['all'] < 0.5
    assert len(row['best']) == len(row['worst']) == 3
    assert row['best'][0]['reward'] >= row['worst'][0]['reward']


def test_the_time_of_a_round_is_written_by_phase(finished):
  rows = lines(finished.workdir, 'metrics.jsonl')
  for row in rows:
    phases = row['timing']['phases']
    assert {'sampling', 'verification', 'exchange', 'batches', 'updates',
            'other'} <= phases.keys()  # fmt: skip
    assert min(phases.values()) >= 0
    assert ('evaluation' in phases) == ('heldout_accuracy' in row)
    rest = phases.get('evaluation', 0) + phases.get('checkpoints', 0)
    assert sum(phases.values()) - rest == pytest.approx(
      row['timing']['seconds'], abs=0.1
    )
  elapsed = [row['timing']['elapsed'] for row in rows]
  assert elapsed == sorted(elapsed)


def test_a_run_shows_its_plan_progress_and_results(finished):
  for text in (
    f'Writing to {finished.workdir}\n',
    'Plan for 8 x cpu',
    'fsdp 4',
    'warm start llama 20/20',
    'round gemma 2/2 reward',
    'tok/s',
    '40 from peers',
    'Held-out accuracy',
    'mean',
    'gemma->llama',
    'THL residual',
  ):
    assert text in finished.shown


def test_every_record_is_accounted_for(finished):
  for pair in ('gemma->llama', 'llama->gemma'):
    kinds = finished.summary.exchange[pair]
    counts = {**kinds['rollout']}
    assert counts.pop('bytes') > 0
    assert counts.pop('published') == counts.pop('used') == 2 * 8 * 4
    assert {*counts.values()} == {0}
    assert kinds['group_stats']['used'] == 2 * 8
    assert finished.summary.residuals[pair].rollouts == 2 * 8 * 4


def test_policies_have_their_own_devices_and_shards(finished):
  devices = []
  for worker in runs.finished_job().workers.values():
    mine = [*worker.spec.mesh.devices.flat]
    embed = worker.state.params['embed_VD'].get_value()
    shard = embed.sharding.shard_shape(embed.shape)
    assert math.prod(shard) == embed.size // len(mine) < embed.size
    devices += mine
  assert len(devices) == len({*devices})


def test_no_random_key_is_used_twice(finished):
  # Two policies, with two rounds and two evaluations.
  assert len(runs.KEYS) == len({*runs.KEYS}) == 2 * (2 + 2)


def test_the_learning_rate_decays_over_all_updates(monkeypatch):
  calls, build = [], optimizer.build

  def build_and_note(config, steps):
    calls.append(steps)
    return build(config, steps)

  monkeypatch.setattr(optimizer, 'build', build_and_note)
  job_lib.build(runs.config(), bucket.WorkDir(runs.folder('rate')))
  # The planner asks for one step, the workers for rounds times mini-batches.
  assert calls == [1, 1, 2 * 2, 2 * 2]


def test_the_seed_decides_prompts_and_samples(finished):
  job, other = (
    job_lib.build(runs.config(seed=s), bucket.WorkDir(runs.folder(f'seed-{s}')))
    for s in (0, 1)
  )
  assert next(job.batches) != next(other.batches)
  for name, worker in job.workers.items():
    assert worker.key != other.workers[name].key
    assert worker._init_key != other.workers[name]._init_key


@pytest.mark.slow
def test_a_run_that_an_infinite_gradient_stopped_resumes_as_if_it_had_not_been(
  finished, monkeypatch
):
  update = worker_lib.Worker.update

  def overflow(worker, mini_batches):
    statistics = update(worker, mini_batches)
    if worker.name == 'llama' and worker.state.step > 2:
      statistics[0]['grad_norm'] = [np.float32(np.nan)]
    return statistics

  monkeypatch.setattr(worker_lib.Worker, 'update', overflow)
  shown = runs.console()
  with pytest.raises(FloatingPointError, match='gradient of llama is nan'):
    runs.run('stopped', runs.config(), shown)
  monkeypatch.undo()
  # The first run of this config has left its warm start in the cache.
  assert 'warm start of llama: taken from' in shown.file.getvalue()
  assert 'warm start llama' not in shown.file.getvalue()
  workdir = runs.folder('stopped')
  assert len(lines(workdir, 'metrics.jsonl')) == len(POLICIES)
  resume = progress.resume
  monkeypatch.setattr(
    progress,
    'resume',
    lambda *args: msgspec.structs.replace(resume(*args), seconds=1000.0),
  )
  resumed = runs.run('stopped', runs.config())
  assert 'Resuming after round 1.' in resumed.shown
  assert resumed.summary.timing.seconds > 1000  # Those before it stopped count.
  assert untimed(resumed.summary) == untimed(finished.summary)
  assert runs.rows(workdir) == runs.rows(finished.workdir)
  assert lines(workdir, 'evaluations.jsonl') == lines(
    finished.workdir, 'evaluations.jsonl'
  )
  assert_same_checkpoints(workdir, finished.workdir)


class LeftBehind(stopping.Stop):
  """Ends a run while it plays a round or evaluates, the n-th time.

  As if a signal had come and there was no time for the rest, except that what is
  left behind is complete: a checkpoint must not know of it.
  """

  def __init__(self, n):
    super().__init__()
    self.left = n

  @contextlib.contextmanager
  def leaving_behind(self, save, _):
    self.left -= 1
    is_now = self.left == 0
    assert not is_now or save()
    yield
    if is_now:
      raise KeyboardInterrupt


# Evaluations are after rounds 0 and 2.
@pytest.mark.parametrize(
  ('n', 'rounds'), [(3, 2), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_what_was_left_behind_is_done_again_bit_for_bit(finished, n, rounds):
  name = f'left-{n}'
  # With time alone to ask for checkpoints, there is one after each round.
  config = runs.config(**{'checkpoint.every': 999, 'checkpoint.minutes': 1e-9})
  job = job_lib.build(config, bucket.WorkDir(runs.folder(name)))
  with pytest.raises(KeyboardInterrupt):
    loop.run(job, runs.console(), LeftBehind(n))
  saved = os.path.join(runs.folder(name), 'checkpoints')
  assert checkpoint.newest(saved) == rounds
  assert f'round_{rounds - 1}' in os.listdir(saved)
  resumed = runs.run(name, config)
  assert f'Resuming after round {rounds}.' in resumed.shown
  assert untimed(resumed.summary) == untimed(finished.summary)
  assert runs.rows(resumed.workdir) == runs.rows(finished.workdir)
  assert lines(resumed.workdir, 'evaluations.jsonl') == lines(
    finished.workdir, 'evaluations.jsonl'
  )
  assert_same_checkpoints(resumed.workdir, finished.workdir)


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_its_round(finished):
  config = runs.config(**{'checkpoint.every': 999})
  job = job_lib.build(config, bucket.WorkDir(runs.folder('asked')))
  with pytest.raises(SystemExit, match='75'):
    loop.run(job, runs.console(), runs.Asked())
  assert checkpoint.newest(f'{runs.folder("asked")}/checkpoints') == 1
  # Nothing is left to do.
  resumed = runs.run('asked', config, stop=runs.Asked())
  assert untimed(resumed.summary) == untimed(finished.summary)
  assert_same_checkpoints(resumed.workdir, finished.workdir)


def test_a_state_that_an_update_replaces_is_not_saved():
  state = jax.numpy.zeros(3)
  taken = progress.Snapshot(4, {'a': {'w': state}}, {})
  assert not taken.is_gone
  state.delete()
  assert taken.is_gone
  saver = saving.Saver(None, None, None, None, None)
  assert not saver._left_behind(taken)


def test_a_finished_run_only_shows_its_results_again(finished):
  again = runs.run('a[/b]', runs.config())
  assert again.summary == finished.summary
  assert 'Held-out accuracy' in again.shown
  assert 'round gemma' not in again.shown
  assert len(lines(finished.workdir, 'metrics.jsonl')) == 2 * len(POLICIES)


@pytest.fixture
def half_are_right(monkeypatch):
  """Accepts every text of odd length, which untrained policies write too."""
  monkeypatch.setattr(
    verify, 'verify', lambda text, *_: 'correct' if len(text) % 2 else 'wrong'
  )


def test_a_run_with_the_verifier_of_mathematics(finished, monkeypatch):
  verifiers, publish = set(), loop.publish.publish

  def publish_and_note(*groups, verifier, **settings):
    verifiers.add(verifier)
    return publish(*groups, verifier=verifier, **settings)

  monkeypatch.setattr(loop.publish, 'publish', publish_and_note)
  job, _, rows = runs.play(
    'math', runs.config(**{'reward.verifier': 'math'}), rounds=1
  )
  rows = [row for (row,) in rows.values()]
  # Each policy verifies its own answers and those of its peer.
  stopped = sum(row.stopped * row.rollouts for row in rows)
  for row in rows:
    assert 0 < sum(row.verified.values()) == stopped
  with pytest.raises(RuntimeError, match='closed'):
    job.verifier.verify_all([(r'\boxed{x}', 'y')])
  assert verifiers == {'math'}


@pytest.mark.parametrize(
  ('method', 'changes'),
  [
    ('sgt', {}),
    ('graft', {'method.graft.admission': 'all', 'method.which': 'all'}),
  ],
)
def test_a_policy_trains_on_rows_of_peers(
  finished, half_are_right, method, changes
):
  _, progress, rows = runs.play(
    method,
    # Many gold answers have an even length.
    runs.config(method, **{'data.max_faulty': 1.0, **changes}),
    rounds=1,
  )
  assert any(row.peer_rows for (row,) in rows.values())
  for (row,) in rows.values():
    assert (row.peer.loss is not None) == (row.peer_rows > 0)
    # Grafted rows replace the policy's own rows.
    assert (row.own.loss is None) == (method == 'graft')
    if method == 'graft':
      assert row.peer.ratio == pytest.approx(1.0, abs=0.2)
  assert progress.residuals


def test_a_journal_teaches_what_its_policy_taught(finished, devices_of_llama):
  config = runs.config(**{'policies.gemma.journal': finished.workdir})
  job, _, rows = runs.play('stored', config)
  assert rows == {'llama': runs.rows(finished.workdir)['llama']}
  states, _ = runs.newest_checkpoint(finished.workdir)
  assert_same(job.workers['llama'].state, states['llama'])


def test_a_policy_without_peers_learns_by_grpo_whatever_the_method(
  finished, devices_of_llama, monkeypatch
):
  grpo, prp = (
    runs.play(f'alone-{method}', runs.alone(runs.config(method)))
    for method in ('grpo', 'prp')
  )
  assert any(row.grad_norm for row in grpo.rows['llama'])
  assert not os.path.exists(os.path.join(grpo.job.home.folder, 'see'))
  monkeypatch.undo()
  teacher = runs.play(
    'teacher', runs.config('xgrpo', **{'policies.llama.listens_to': ()})
  )
  assert [row.peer_records for row in teacher.rows['llama']] == [0, 0]
  assert [row.peer_records for row in teacher.rows['gemma']] == [8, 8]
  for other in (prp, teacher):
    assert other.rows['llama'] == grpo.rows['llama']
    assert_same(
      other.job.workers['llama'].state, grpo.job.workers['llama'].state
    )


def test_a_peer_that_never_comes_is_named_and_gone_without(
  finished, devices_of_llama, caplog
):
  config = runs.config(
    **{
      'see.listen': exchanges.free_address(),
      'policies.gemma.address': exchanges.free_address(),
      'see.wait_s': 0.1,
      'see.block_s': 0.1,
    }
  )
  logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'):
    job, progress, rows = runs.play('deserted', config, rounds=1)
  assert 'llama heard nothing from gemma' in caplog.text
  assert 'llama cannot reach gemma' in caplog.text
  assert [row.peer_records for row in rows['llama']] == [0]
  progress.accuracy = {n: {'llama': {'all': 0.5}} for n in (0, 1)}
  summary = loop.finish(job, progress, runs.console())
  sent = summary.sent['llama->gemma']['rollout']
  assert sent['waiting'] == sent['published'] == 8 * 4


@pytest.mark.parametrize('ess', [0.98, 0.995, None])
def test_a_mismatch_of_sampler_and_trainer_is_an_alarm(caplog, ess):
  kl = None if ess is None else 0.01
  mismatch = workdir_lib.Ratios(kl=kl, max_ratio=1.4, ess_fraction=ess)
  row = workdir_lib.RoundMetrics(round=3, policy='a', mismatch=mismatch)
  logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'):
    statistics.warn_of_mismatch(row)
  warned = 'round 3: sampler and trainer of a differ' in caplog.text
  assert warned == (ess == 0.98)


@pytest.mark.parametrize('prompts', [('p0', 'p7'), ('p7', 'p8')])
def test_a_policy_warns_if_all_records_are_about_other_prompts(caplog, prompts):
  received = [examples.stats([1.0], policy='b', prompt=p) for p in prompts]
  endpoint = types.SimpleNamespace(collect=lambda *_: received)
  job = types.SimpleNamespace(
    config=examples.run_config(),
    endpoints={'a': endpoint},
    method=types.SimpleNamespace(
      kinds={'group_stats'}, choose=lambda context, offered: offered
    ),
  )
  worker = types.SimpleNamespace(
    name='a',
    policy=types.SimpleNamespace(tokenizer=None),
    judge_responses=lambda prompts, responses: [],
    score=list,
  )
  sampled = dynamic_sampling.Sampled((), [examples.group([0.0])])
  logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'):
    loop.collect(job, progress.Progress(), worker, sampled)
  warned = 'a can use none of the 2 records it received' in caplog.text
  assert warned == ('p0' not in prompts)


EVERYTHING = {
  'method.kl_weight': 0.1,
  'method.entropy_weight': 0.01,
  'method.correction.level': 'token',
  'sample.refills': 1,
  'reward.functions': ('exact', 'overlong'),
  'reward.overlong_tokens': 3,
  'train.rounds': 3,
  'data.max_faulty': 1.0,  # `half_are_right` rejects many gold answers.
}


@pytest.mark.slow
def test_whatever_a_method_keeps_is_resumed_too(half_are_right, monkeypatch):
  config = runs.config('hacpo', **EVERYTHING)
  whole = runs.run('everything', config)
  rows = runs.rows(whole.workdir)
  first, *_, last = rows['llama']
  assert first.own.kl < last.own.kl  # The policy moves away.
  for row in itertools.chain(*rows.values()):
    assert row.peer_rows + row.peer_rows_refused == 8 * 4
    assert row.own.kl >= 0
    assert row.mismatch.max_ratio < 1.01
  assert any(row.rollouts > 8 * 4 for row in rows['llama'])  # It did refill.
  save = progress.save

  def save_and_stop(job, progress, checkpoints):
    save(job, progress, checkpoints)
    if progress.rounds == 2:
      raise KeyboardInterrupt

  monkeypatch.setattr(progress, 'save', save_and_stop)
  with pytest.raises(KeyboardInterrupt):
    runs.run('everything-cut', config)
  monkeypatch.setattr(progress, 'save', save)
  resumed = runs.run('everything-cut', config)
  assert untimed(resumed.summary) == untimed(whole.summary)
  assert runs.rows(resumed.workdir) == rows
  job = job_lib.build(config, bucket.WorkDir(whole.workdir))
  assert_same_checkpoints(resumed.workdir, whole.workdir, job)


@pytest.mark.slow
def test_policies_may_take_turns_on_one_device(monkeypatch):
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda: one)
  config = runs.config(**{'train.rounds': 1, 'mwra.time_share': True})
  turns = runs.run('turns', config)
  assert 'one device' in turns.shown
  assert turns.summary.rounds == 1
