import functools
import json
import os
import pathlib

from flax import nnx
import jax
import numpy as np
import pytest

from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding
from mrl_jax.sampling import drawing
from mrl_jax.sampling import sampler as sampler_lib
from mrl_jax.sampling import slots
from mrl_jax.thl import byte_tokenizer
from tests import decoders
from tests import examples

SAMPLES, LENGTH, CONTEXT = 3, 10, 5
STOP_IDS = (3, 4, 5, 6)
RNG = np.random.default_rng(0)
PROMPTS = [
  RNG.integers(0, examples.SIZES['vocab_size'], n).astype(np.int32)
  for n in (5, 3, 1, 4, 2, 5, 1)
]
POLICY = drawing.Density()


@functools.cache
def sampler(prompts=7, mesh=(1, 1, 1), density=POLICY, stop_ids=STOP_IDS):
  return sampler_lib.Sampler(
    decoders.decoder().config,
    decoders.mesh(*mesh),
    slots.Settings(
      samples=SAMPLES, length=LENGTH, stop_ids=stop_ids, density=density
    ),
    prompts=prompts,
    context=CONTEXT,
  )


def sample(sampler, prompts=PROMPTS, seed=0, ends=None):
  """The completions of all prompts, by prompt and sample."""
  params = nnx.state(decoders.decoder())
  found = [
    completion
    for completions in sampler(
      jax.device_put(params, sharding.params(params, sampler.mesh)),
      decoder_lib.NO_PARAMS,
      prompts,
      jax.random.key(seed),
      ends,
    )
    for completion in completions
  ]
  completions = {(c.prompt, c.sample): c for c in found}
  rows = [(p, g) for p in range(len(prompts)) for g in range(SAMPLES)]
  assert len(found) == len(rows)
  return [completions[row] for row in rows]


@functools.cache
def sampled():
  return sample(sampler())


def assert_same(found, expected):
  for x, y in zip(found, expected, strict=True):
    assert x.ids.tolist() == y.ids.tolist()
    assert x.finish == y.finish
    for name in ('sampling_logp', 'policy_logp'):
      np.testing.assert_allclose(getattr(x, name), getattr(y, name), atol=1e-5)


def log_softmax(logits):
  logits = logits.astype(np.float64)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def scores(completion, prompt):
  """Log-probabilities [T, V] by one forward pass over the whole row."""
  ids = np.concatenate([prompt, completion.ids, np.zeros(20, int)])
  logits_1SV = decoders.logits(decoders.decoder(), ids[None, :15])
  first = len(prompt) - 1
  return logits_1SV[0, first : first + len(completion.ids)]


@pytest.mark.parametrize('few', [1, 2, 5])
def test_rows_in_refilled_slots_are_those_of_one_prompt_at_a_time(few):
  # Slots are refilled for every single prompt; with 5, prompts have to wait too.
  assert_same(sample(sampler(few)), sampled())


def test_a_row_does_not_depend_on_the_other_prompts():
  others = [PROMPTS[0], *(PROMPTS[:0:-1])]
  found = sample(sampler(2), others)
  assert_same(found[:SAMPLES], sampled()[:SAMPLES])


def test_a_mesh_gives_the_samples_of_one_device():
  assert_same(sample(sampler(3, mesh=(2, 1, 2))), sampled())


def test_rings_and_slots_of_other_sizes_change_no_sample(monkeypatch):
  monkeypatch.setattr(sampler_lib, '_LONG', 8)
  monkeypatch.setattr(sampler_lib, '_SHORT', 4)
  monkeypatch.setattr(sampler_lib, 'WIDTH', 3)
  assert sampler_lib.rings(LENGTH) == [2, 5, 10]
  build, resized = slots.build_resize, []

  def noted(*args):
    resize = build(*args)

    def note(state, kept_B, ring):
      before = state.cache[0].k_BKRE.shape
      state = resize(state, kept_B, ring)
      after = state.cache[0].k_BKRE.shape
      resized.append((before[0], before[2], after[0], after[2]))
      return state

    return note

  monkeypatch.setattr(slots, 'build_resize', noted)
  build_again = sampler.__wrapped__
  assert_same(
    sample(build_again(3, stop_ids=(3,))), sample(sampler(stop_ids=(3,)))
  )
  assert {(9, 2, 9, 5), (9, 5, 9, 10)} <= {*resized}  # Rings grow, ...
  assert any(rows > fewer for rows, _, fewer, _ in resized)  # ... and rows end.
  assert any(before > after for _, before, _, after in resized)


def test_rows_end_with_their_stop_token():
  lengths = {len(c.ids) for c in sampled()}
  assert len(lengths) > 3
  for c in sampled():
    assert (c.ids[-1] in STOP_IDS) == (c.finish == 'stop')
    assert not np.isin(c.ids[:-1], STOP_IDS).any()
    assert c.finish == 'stop' or len(c.ids) == LENGTH


def test_greedy_tokens_are_the_most_likely_of_the_full_forward():
  greedy = drawing.Density(temperature=0.0)
  for row, c in enumerate(sample(sampler(3, density=greedy))):
    logits_TV = scores(c, PROMPTS[row // SAMPLES])
    assert c.ids.tolist() == logits_TV.argmax(-1).tolist()
    expected = log_softmax(logits_TV).max(-1)
    np.testing.assert_allclose(c.policy_logp, expected, atol=1e-5)
    assert not c.sampling_logp.any()


def test_the_temperature_is_in_the_sampling_density_only():
  completions = sample(sampler(density=drawing.Density(temperature=0.5)))
  for row, c in enumerate(completions):
    logits_TV = scores(c, PROMPTS[row // SAMPLES])
    for density_TV, logp_T in (
      (logits_TV / 0.5, c.sampling_logp),
      (logits_TV, c.policy_logp),
    ):
      expected = log_softmax(density_TV)[np.arange(len(c.ids)), c.ids]
      np.testing.assert_allclose(logp_T, expected, atol=1e-5)


def test_every_call_prompt_and_sample_draws_other_tokens():
  same = [PROMPTS[0]] * 4
  draws = [sample(sampler(4, stop_ids=(-1,)), same, seed) for seed in (0, 1, 0)]
  assert len({tuple(c.ids) for each in draws[:2] for c in each}) == 24
  assert_same(draws[0], draws[2])


def test_rows_end_where_the_host_says_and_make_room_for_others(monkeypatch):
  monkeypatch.setattr(sampler_lib, 'WIDTH', 4)  # It looks after 1, 5 and 9.
  last = range(4, 20)  # Tokens that end a row here; 3 is the stop token.

  def ends(ids, new):
    found = np.flatnonzero(np.isin(ids[-new:], last))
    return len(ids) - new + int(found[0]) + 1 if len(found) else None

  few, finishes = sampler.__wrapped__(2, stop_ids=(3,)), set()
  wholes = sample(few)
  used = few.used
  for c, whole in zip(sample(few, ends=ends), wholes, strict=True):
    count = ends(whole.ids, len(whole.ids))
    assert c.ids.tolist() == whole.ids[:count].tolist()
    np.testing.assert_allclose(
      c.policy_logp, whole.policy_logp[:count], atol=1e-5
    )
    assert c.finish == ('stop_string' if count else whole.finish)
    finishes.add(c.finish)
  assert finishes >= {'stop', 'stop_string'}
  assert few.used < 0.7 * used


class Device:
  """In place of the programs of a sampler: rows of known lengths."""

  shape = sampler_lib.Sampler.shape

  def __init__(self, lengths_PG, prompts, longest):
    self._lengths_PG, samples = lengths_PG, lengths_PG.shape[1]
    self.mesh, self.prompts = decoders.mesh(1, 1, 1), prompts
    self.settings = slots.Settings(
      samples=samples, length=longest, stop_ids=(), density=POLICY
    )
    self.context, self.rings = 8, sampler_lib.rings(longest)
    self.used = self.real = 0

  def empty(self, rows, ring):
    self.left_B = np.zeros(rows, int)
    return lambda key: key

  def admit(self, state, prompt, valid, index_P, row_B, key):
    new_B = row_B >= 0
    p, g = np.divmod(row_B[new_B], self.settings.samples)
    self.left_B[new_B] = self._lengths_PG[index_P[p], g]
    return state, self._drawn(new_B[:, None].astype(int))

  def decode(self, state, until, most):
    steps = 1
    while steps < most and (self.left_B <= steps).sum() < until:
      steps += 1
    return state, self._drawn(np.arange(steps)[None, :] < self.left_B[:, None])

  def resize(self, state, kept_B, ring):
    if kept_B is not None:
      self.left_B = self.left_B[kept_B]
    return state

  def _drawn(self, there_BN):
    count_B = there_BN.sum(1)
    self.left_B = self.left_B - count_B
    zeros_BN = np.zeros(there_BN.shape)
    return slots.Drawn(
      token_BN=zeros_BN.astype(int),
      sampling_logp_BN=zeros_BN,
      policy_logp_BN=zeros_BN,
      count_B=count_B,
      live_B=self.left_B > 0,
    )


def share(lengths_PG, prompts, longest):
  """The share of real tokens, for completions of these lengths."""
  device = Device(lengths_PG, prompts, longest)
  tokens = [np.ones(1, np.int32)] * len(lengths_PG)
  batch = sampler_lib._Batch(device, (), tokens, jax.random.key(0), None)
  lengths = []
  while batch.waiting or batch.table.live_B.any():
    lengths += [len(c.ids) for c in batch.advance()]
  assert sorted(lengths) == sorted(lengths_PG.ravel())
  assert device.real == lengths_PG.sum()
  return device.real / device.used


def test_most_slots_have_a_token_at_uneven_lengths():
  rng = np.random.default_rng(0)
  lengths_PG = np.exp(np.log(400) + rng.standard_normal((1024, 8)))
  lengths_PG = np.clip(lengths_PG, 1, 4096).astype(int)
  assert share(lengths_PG, 64, 4096) > 0.85
  assert share(lengths_PG[:256], 32, 4096) > 0.75


def test_most_slots_have_a_token_at_the_lengths_of_real_answers():
  data = os.environ.get('MRL_TEST_DATA')
  if not data:
    pytest.skip('no real answers: MRL_TEST_DATA is not set')
  folder = pathlib.Path(data)
  tokenizer = byte_tokenizer.load(str(folder / 'tokenizers/llama3'))
  lines = (folder / 'math/gsm8k_train.jsonl').read_text().splitlines()[:2048]
  lengths = [
    len(tokenizer.encode(json.loads(line)['answer'].encode())) + 1
    for line in lines
  ]
  lengths_PG = np.reshape(lengths, (256, 8))
  assert share(lengths_PG, 32, 512) > 0.75
