import jax
import msgspec
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import records
from mrl_jax.data import prompts as prompts_lib
from mrl_jax.rewards import functions
from mrl_jax.sharing import carry
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer
from mrl_jax.training import worker as worker_lib
from tests import examples
from tests import vocabularies
from tests import workers

PROMPTS = [
  records.Prompt(id=f'p{i}', text='sort 7 0 2'[: 4 + i], answer='0')
  for i in range(5)
]


class Judge(functions.Judge):
  """Odd lengths are right."""

  def judge_all(self, completions):
    return [
      (1.0, 'correct') if len(payload) % 2 else (0.0, 'wrong')
      for payload, _, _ in completions
    ]


judge = Judge(verifier=None, weights={})


def sample(prompts=PROMPTS, key=0):
  sampling = workers.worker().start_sampling(
    prompts, 3, jax.random.key(key), 1.0
  )
  return workers.worker().finish_sampling(sampling, judge, run='run', round=7)


def learner(prompts=PROMPTS):
  return workers.worker().learner(
    prompts,
    judge,
    transfer.Limits(max_tokens=6),
    rng=np.random.default_rng(0),
    ratios={},
  )


def test_rollouts_are_sound_and_say_where_they_come_from():
  groups = sample()
  assert [len(group) for group in groups] == [3] * 5
  for prompt, group in zip(PROMPTS, groups, strict=True):
    for g, rollout in enumerate(group):
      header = rollout.header
      assert records.fault(rollout) is None
      assert (header.prompt, header.sample, header.round) == (prompt.id, g, 7)
      assert (header.policy, header.run) == ('a', 'run')
      assert header.tokenizer == workers.worker().tokenizer.fingerprint
      assert workers.worker().tokenizer.decode(rollout.ids) == rollout.payload
      assert rollout.reward == len(rollout.payload) % 2
      stopped = rollout.ids[-1] == workers.worker().tokenizer.eos_id
      assert (rollout.finish == 'stop') == stopped


def test_any_stop_token_ends_a_rollout(monkeypatch):
  worker, over, built = workers.worker(), 0, []
  sample(PROMPTS[:1])
  compiled = worker._samplers[3, False]
  eos = worker.tokenizer.eos_id
  backend = vocabularies.copy(worker.tokenizer)
  tokenizer = byte_tokenizer.ByteTokenizer(
    backend, eos_id=eos, stop_ids=(over,)
  )
  monkeypatch.setattr(worker, 'tokenizer', tokenizer)
  monkeypatch.setattr(worker, '_samplers', {})
  monkeypatch.setattr(
    worker_lib.sampler,
    'build',
    lambda *_, stop_ids, **__: built.append(stop_ids) or compiled,
  )
  sampling = worker.start_sampling(PROMPTS[:1], 3, jax.random.key(0), 1.0)
  assert built == [(eos, over)]
  samples = jax.tree.map(np.array, jax.device_get(sampling.parts[0]))
  samples.tokens_BT[0, :3] = 40, 41, over
  samples.length_B[0], samples.stopped_B[0] = 3, True
  (group,) = worker.finish_sampling(
    sampling._replace(parts=[samples]), judge, run='run', round=0
  )
  assert records.fault(group[0]) is None
  assert (group[0].finish, group[0].ids[-1]) == ('stop', over)
  assert group[0].payload == tokenizer.decode([40, 41])


def test_rollouts_carry_the_advantage_in_their_own_group():
  seen = set()
  for group in sample():
    rewards = np.array([rollout.reward for rollout in group])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for rollout, advantage in zip(group, expected, strict=True):
      assert rollout.advantage == pytest.approx(advantage, abs=1e-6)
      seen.add(np.sign(rollout.advantage))
  assert {-1, 1} <= seen


def test_all_completions_are_judged_at_once(monkeypatch):
  seen = []

  def judge_all(completions):
    seen.append(completions)
    return [(float(i), 'wrong') for i, _ in enumerate(completions)]

  monkeypatch.setattr(judge, 'judge_all', judge_all)
  groups = sample(
    [msgspec.structs.replace(p, answer=p.id) for p in PROMPTS[:2]]
  )
  (completions,) = seen
  assert [(r.payload, r.finish) for g in groups for r in g] == [
    (payload, finish) for payload, finish, _ in completions
  ]
  assert [gold for _, _, gold in completions] == ['p0'] * 3 + ['p1'] * 3
  assert [[r.reward for r in g] for g in groups] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize('mask_truncated', [True, False])
def test_what_was_cut_off_may_be_masked(monkeypatch, mask_truncated):
  monkeypatch.setattr(workers.worker(), '_mask_truncated', mask_truncated)
  sampling = workers.worker().start_sampling(
    PROMPTS[:1], 3, jax.random.key(0), 1.0
  )
  samples = jax.tree.map(np.array, jax.device_get(sampling.parts[0]))
  samples.tokens_BT[0, 3] = workers.worker().tokenizer.eos_id
  samples.length_B[:2], samples.stopped_B[:2] = (4, 6), (True, False)
  (group,) = workers.worker().finish_sampling(
    sampling._replace(parts=[samples]), judge, run='run', round=0
  )
  stopped, cut = group[:2]
  np.testing.assert_array_equal(stopped.mask, [True] * 4)
  np.testing.assert_array_equal(cut.mask, [not mask_truncated] * 6)


def test_a_number_of_prompts_that_the_mesh_does_not_divide_is_filled_up():
  for group, alone in zip(sample(PROMPTS[:3]), sample(PROMPTS), strict=False):
    for rollout, expected in zip(group, alone, strict=True):
      np.testing.assert_array_equal(rollout.ids, expected.ids)


def test_learning_changes_the_policy_and_its_version():
  groups = sample()
  method = algorithms.build(examples.run_config().method)
  lesson = method.lesson(groups, [], learner())
  version = groups[0][0].header.version
  before = jax.device_get(workers.worker().state.params)
  (statistics,) = workers.worker().update(PROMPTS, lesson)
  assert np.isfinite(statistics['own/loss'])
  assert sample()[0][0].header.version == version + 1
  moved = [
    np.abs(x - y).max()
    for x, y in zip(
      jax.tree.leaves(before),
      jax.tree.leaves(jax.device_get(workers.worker().state.params)),
      strict=True,
    )
  ]
  assert max(moved) > 0


def test_a_peers_response_follows_the_prompt_as_the_learner_renders_it(
  monkeypatch,
):
  seen = []
  worker = workers.worker()
  template = prompts_lib.plain('Q {prompt}\n')
  monkeypatch.setattr(worker, 'template', template)
  monkeypatch.setattr(
    worker,
    '_update',
    lambda state, parts, frozen: seen.append(parts) or (state, {}),
  )
  peer = examples.rollout(
    b'= 9', encoder=examples.tokenizer('sentencepiece'), policy='b', prompt='p1'
  )
  _, carried = carry.rows([carry.Selected(1, peer, 1.0)], learner())
  worker.update(
    PROMPTS[:2],
    lesson_lib.Lesson(
      own=[], peer=carried.rows, order=[0, 1], residuals={}, metrics={},
      peer_records=1, peer_records_unused=0,
    ),
  )  # fmt: skip
  part = seen[0]['peer']
  ids = part.tokens_BS[0, 0][part.valid_BS[0, 0]]
  assert worker.tokenizer.decode(ids) == b'Q sort \n= 9'
  assert ids[-1] == worker.tokenizer.eos_id


def test_an_empty_completion_is_a_legal_rollout():
  eos = workers.worker().tokenizer.eos_id
  sampling = workers.worker().start_sampling(
    PROMPTS[:1], 3, jax.random.key(0), 1.0
  )
  empty = jax.tree.map(np.array, jax.device_get(sampling.parts[0]))
  empty.tokens_BT[0], empty.length_B[0], empty.stopped_B[0] = 0, 1, True
  empty.tokens_BT[0, 0] = eos
  (group,) = workers.worker().finish_sampling(
    sampling._replace(parts=[empty]), judge, run='run', round=0
  )
  assert (group[0].payload, group[0].reward) == (b'', 0.0)
  assert records.fault(group[0]) is None


def test_scores_are_what_the_sampler_gave_at_temperature_one():
  rows = [
    lesson_lib.own_row(p, rollout, 1.0)
    for p, group in enumerate(sample())
    for rollout in group
  ]
  for row, logp in zip(rows, learner().score(rows), strict=True):
    np.testing.assert_allclose(logp, row.old_logp, atol=1e-5)
  assert learner().score([]) == []


def test_a_learner_verifies_with_its_own_judge():
  assert learner().verify(0, b'odd')
  assert not learner().verify(0, b'even')
  lied = examples.rollout(b'even', reward=1.0)
  assert learner().judge(0, lied) == (0.0, 'wrong')


def test_long_completions_are_punished_where_asked(monkeypatch):
  monkeypatch.setattr(workers.worker(), '_overlong_tokens', 2)
  for group in sample():
    for rollout in group:
      expected = len(rollout.payload) % 2 - max(len(rollout.ids) - 4, 0) / 2
      assert rollout.reward == expected
      assert learner().judge(0, rollout) == (expected, rollout.verdict)


@pytest.mark.parametrize('batch', [1, 2, 4])
def test_parts_do_not_change_the_completions(monkeypatch, batch):
  worker = workers.worker()
  prompts = [
    records.Prompt(id=f'p{i}', text=text, answer='')
    for i, text in enumerate(('a', 'sort', 'max 1'))
  ]

  def sampled():
    sampling = worker.start_sampling(prompts, 3, jax.random.key(5), 1.0)
    groups = worker.finish_sampling(sampling, judge, run='run', round=0)
    return len(sampling.parts), [
      (r.header.prompt, r.ids.tolist()) for group in groups for r in group
    ]

  parts, whole = sampled()
  assert parts == 1
  monkeypatch.setattr(worker, '_sample_batch', batch)
  parts, cut = sampled()
  assert parts == {1: 3, 2: 2, 4: 1}[batch]
  assert cut == whole
