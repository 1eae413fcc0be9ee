import dataclasses
import re
from unittest import mock

import jax
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import records
from mrl_jax.data import prompts as prompts_lib
from mrl_jax.rewards import judge as judge_lib
from mrl_jax.sampling import drawing
from mrl_jax.sampling import sampler
from mrl_jax.see import wire
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.thl import byte_tokenizer
from tests import examples
from tests import vocabularies
from tests import workers

PROMPTS = [
  records.Prompt(id=f'p{i}', text=text, answer=f'gold {i}')
  for i, text in enumerate(('sort', 'max 1', 'a'))
]
SAMPLES = 3


def sample(prompts=PROMPTS, key=0, **density):
  return workers.worker().sample(
    prompts,
    SAMPLES,
    jax.random.key(key),
    drawing.Density(**density),
    run='run',
    round=7,
  )


def completion(*ids, prompt=0, sample=0, finish='length'):
  zeros = np.zeros(len(ids), np.float32)
  return sampler.Completion(
    prompt, sample, np.array(ids, np.int32), zeros, zeros, finish
  )


@pytest.fixture
def give(monkeypatch):
  """Lets the sampler give these completions of the first prompt."""
  worker = workers.worker()

  def give(*completions):
    built = []

    def build(model, mesh, settings, *, prompts, context):
      built.append((settings, prompts, context))
      given = mock.Mock(return_value=iter([completions[:1], completions[1:]]))
      given.used, given.real = 8, 2
      return given

    monkeypatch.setattr(sampler, 'Sampler', build)
    monkeypatch.setattr(worker, '_sampler', worker._build_sampler)
    return sample(PROMPTS[:1])[0], built

  return give


@pytest.fixture
def change(monkeypatch):
  """Changes attributes of the worker, its inputs or config, during a test."""
  worker = workers.worker()

  def change(**changes):
    for name, value in changes.items():
      if name in worker.policy._fields:
        name, value = 'policy', worker.policy._replace(**{name: value})
      if name == 'settings':
        name, value = 'config', examples.run_config(**value)
      monkeypatch.setattr(worker, name, value)

  return change


def test_rollouts_are_sound_and_name_their_source():
  groups, tokenizer = sample(), workers.worker().policy.tokenizer
  assert [len(group) for group in groups] == [SAMPLES] * len(PROMPTS)
  for prompt, group in zip(PROMPTS, groups, strict=True):
    for g, rollout in enumerate(group):
      header = rollout.header
      assert records.fault(rollout) is None
      assert (header.prompt, header.sample, header.round) == (prompt.id, g, 7)
      assert (header.policy, header.run) == ('a', 'run')
      assert header.tokenizer == tokenizer.fingerprint
      assert tokenizer.decode(rollout.ids) == rollout.payload
      text = rollout.payload.decode(errors='replace')
      assert rollout.reward == len(text) % 2
      assert rollout.mask.all()
      stopped = rollout.ids[-1] == tokenizer.eos_id
      assert (rollout.finish == 'stop') == stopped


def test_rollouts_carry_the_advantage_in_their_own_group():
  signs = set()
  for group in sample():
    rewards = np.array([rollout.reward for rollout in group])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for rollout, advantage in zip(group, expected, strict=True):
      assert rollout.advantage == pytest.approx(advantage, abs=1e-6)
      signs.add(np.sign(rollout.advantage))
  assert {-1, 1} <= signs


def test_every_stop_token_ends_a_rollout(change, give):
  worker, other = workers.worker(), 0
  eos = worker.policy.tokenizer.eos_id
  tokenizer = byte_tokenizer.ByteTokenizer(
    vocabularies.copy(worker.policy.tokenizer), eos_id=eos, stop_ids=(other,)
  )
  change(tokenizer=tokenizer)
  (rollout,), built = give(completion(40, 41, other, finish='stop'))
  assert built[0][0].stop_ids == (eos, other)
  assert records.fault(rollout) is None
  assert (rollout.finish, rollout.ids[-1]) == ('stop', other)
  assert rollout.payload == tokenizer.decode([40, 41])


def test_rollouts_name_the_density_that_they_are_drawn_from():
  (rollout, *_), *_ = sample(temperature=0.5, top_p=0.9)
  assert records.fault(rollout) is None
  assert (rollout.temperature, rollout.top_p) == (0.5, 0.9)


def test_rollouts_are_in_order_however_they_were_finished(give):
  group, _ = give(
    completion(42, sample=2), completion(40), completion(41, sample=1)
  )
  assert [r.ids.tolist() for r in group] == [[40], [41], [42]]


def test_an_empty_completion_is_a_sound_rollout(give):
  eos = workers.worker().policy.tokenizer.eos_id
  (rollout,), _ = give(completion(eos, finish='stop'))
  assert (rollout.payload, rollout.finish) == (b'', 'stop')
  assert records.fault(rollout) is None


@pytest.mark.parametrize('mask_truncated', [True, False])
def test_a_response_that_was_cut_off_may_be_masked(
  change, give, mask_truncated
):
  change(settings={'train.mask_truncated': mask_truncated})
  *whole, cut = give(
    completion(40, 1, finish='stop'),
    completion(40, 41, sample=1, finish='stop_string'),
    completion(40, 41, 42, sample=2),
  )[0]
  for rollout in whole:
    np.testing.assert_array_equal(rollout.mask, [True] * 2)
  np.testing.assert_array_equal(cut.mask, [not mask_truncated] * 3)


def test_all_completions_are_judged_in_one_call(change):
  calls = []

  def judge(completions):
    calls.append(completions)
    return [judge_lib.Judgement(float(i), 'wrong') for i in range(9)]

  change(judge=judge)
  groups = sample()
  (completions,) = calls
  rollouts = [rollout for group in groups for rollout in group]
  for i, (rollout, completion) in enumerate(
    zip(rollouts, completions, strict=True)
  ):
    prompt = PROMPTS[i // SAMPLES]
    assert completion.text == rollout.payload.decode(errors='replace')
    assert completion[1:] == (
      rollout.finish, len(rollout.ids), prompt.text, prompt.answer, 'unparsable'
    )  # fmt: skip
    assert (rollout.reward, rollout.verdict) == (i, 'wrong')


def test_a_learner_judges_peers_responses_by_itself(change):
  completions = []
  change(judge=lambda c: completions.extend(c) or workers.judge_by_length(c))
  judgements = workers.worker().judge_responses(
    PROMPTS, [(2, b'= 1', 'stop', 3), (0, b'a\xff', 'length', 4)]
  )
  assert judgements == [(1.0, 'correct'), (0.0, 'wrong')]
  assert completions == [
    ('= 1', 'stop', 3, 'a', 'gold 2', 'unparsable'),
    ('a\ufffd', 'length', 4, 'sort', 'gold 0', 'unparsable'),
  ]


def ids(groups):
  return [rollout.ids.tolist() for group in groups for rollout in group]


@pytest.mark.parametrize(('size', 'most'), [(0, 3), (2, 2), (9, 3)])
def test_as_many_prompts_are_sampled_at_a_time_as_the_config_says(
  change, give, size, most
):
  change(settings={'sample.batch': size})
  worker = workers.worker()
  _, built = give(completion(40))
  worker.sample(PROMPTS, 1, jax.random.key(0), drawing.Density(), 'run', 7)
  worker.sample(PROMPTS, 1, jax.random.key(0), drawing.Density(), 'run', 7, 1)
  assert [prompts for _, prompts, _ in built] == [1, most, 1]


def string_in(payloads):
  """Two letters of one of these, not the first."""
  found = [re.search(rb'(?<=.)[ -~]{2}', payload) for payload in payloads]
  return next(filter(None, found))[0]


def test_rollouts_end_with_the_token_that_completes_a_stop_string(change):
  whole = [rollout for group in sample() for rollout in group]
  string = string_in(rollout.payload for rollout in whole)
  finishes = []
  change(
    settings={'sample.stop': ('no', string.decode())},
    judge=lambda completions: (
      finishes.extend(c.finish for c in completions)
      or workers.judge_by_length(completions)
    ),
  )
  tokenizer = workers.worker().policy.tokenizer
  found = [rollout for group in sample() for rollout in group]
  for rollout, before in zip(found, whole, strict=True):
    counts = range(1, len(before.ids) + 1)
    count = next(
      (n for n in counts if string in tokenizer.decode(before.ids[:n])), None
    )
    assert rollout.ids.tolist() == before.ids[:count].tolist()
    assert rollout.finish == ('stop_string' if count else before.finish)
    assert rollout.payload == tokenizer.decode(rollout.ids)
    assert records.fault(wire.decode(wire.encode(rollout))) is None
  assert finishes == [rollout.finish for rollout in found]
  assert 'stop_string' in finishes


def test_rollouts_that_stop_strings_ended_are_trained_on(give, monkeypatch):
  worker = workers.worker()
  ids = worker.policy.tokenizer.encode(b'= 1\n')
  group, _ = give(
    completion(*ids, finish='stop_string'),
    completion(*ids[:1], sample=1, finish='stop_string'),
  )
  batch = algorithms.build(examples.settings()).batch(
    examples.context(worker.policy.tokenizer, [group])
  )
  updates = []
  monkeypatch.setattr(
    worker,
    'updater',
    lambda state, parts, frozen: updates.append(parts) or (state, {}),
  )
  worker.update(worker.pack(PROMPTS[:1], batch))
  ((packed,),) = (parts['own'] for parts in updates)
  # Its tokens and nothing after them, such as a stop token.
  assert packed.mask_BS.sum() == len(ids) + 1


def test_scores_are_the_log_probabilities_of_the_sampler():
  worker = workers.worker()
  rows = [
    rows_lib.own_row(p, rollout, 1.0)
    for p, group in enumerate(sample())
    for rollout in group
  ]
  scores = worker.score(PROMPTS, rows)
  for row, logp in zip(rows, scores, strict=True):
    np.testing.assert_allclose(logp, row.old_logp, atol=1e-5)
  assert worker.score(PROMPTS, []) == []


def test_an_update_changes_the_policy_and_its_version():
  worker, groups = workers.worker(), sample()
  batch = algorithms.build(examples.settings()).batch(
    examples.context(worker.policy.tokenizer, groups)
  )
  before = jax.device_get(worker.state.params)
  (statistics,) = worker.update(worker.pack(PROMPTS, batch))
  assert np.isfinite(sum(statistics['own/loss']))
  assert sample()[0][0].header.version == groups[0][0].header.version + 1
  after = jax.device_get(worker.state.params)
  pairs = zip(*map(jax.tree.leaves, (before, after)), strict=True)
  assert any((x != y).any() for x, y in pairs)


def test_later_mini_batches_are_scored_before_the_first_update(
  change, monkeypatch
):
  worker, updates = workers.worker(), []
  packer = dataclasses.replace(
    worker.packer,
    train=examples.train(mini_batches=3, micro_rows=8, packed_tokens=16),
  )
  change(rescores=True, packer=packer)
  monkeypatch.setattr(
    worker,
    'updater',
    lambda state, parts, frozen: updates.append(parts) or (state, {}),
  )
  rows = [
    rows_lib.own_row(p, examples.replace(r, sampling_logp=0 * r.policy_logp), 1)
    for p, group in enumerate(sample())
    for r in group
  ]
  scores = worker.score(PROMPTS, rows)
  mini_batches = worker.pack(PROMPTS, rows_lib.Batch(own=rows, order=[0, 1, 2]))
  worker.rescore(mini_batches)
  worker.update(mini_batches)
  assert not any(part.old_logp_BS.any() for part in updates[0]['own'])
  prompt_ids = [worker.policy.prompt_ids(prompt) for prompt in PROMPTS]
  for p in (1, 2):
    own = slice(p * SAMPLES, (p + 1) * SAMPLES)
    logps = packer.unpack(
      prompt_ids,
      rows[own],
      'own',
      [np.asarray(part.old_logp_BS) for part in updates[p]['own']],
    )
    for logp, expected in zip(logps, scores[own], strict=True):
      np.testing.assert_allclose(logp, expected, atol=1e-6)


def test_a_peers_response_follows_the_prompt_in_the_learners_template(
  change, monkeypatch
):
  worker, updates = workers.worker(), []
  tokenizer = worker.policy.tokenizer
  change(template=prompts_lib.plain('Q {prompt}\n'))
  monkeypatch.setattr(
    worker,
    'updater',
    lambda state, parts, frozen: updates.append(parts) or (state, {}),
  )
  row = rows_lib.demonstration(1, np.append(tokenizer.encode(b'= 9'), 1))
  batch = rows_lib.Batch(peer=[row], order=[0, 1])
  worker.update(worker.pack(PROMPTS[:2], batch))
  (packed,) = updates[0]['peer']
  ids = packed.tokens_BS[packed.row_BS == 1]
  assert tokenizer.decode(ids) == b'Q max 1\n= 9'
