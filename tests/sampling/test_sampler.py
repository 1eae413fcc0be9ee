import functools

from flax import nnx
import jax
import numpy as np

from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding
from mrl_jax.sampling import sampler
from tests import decoders
from tests import examples

SAMPLES, LENGTH, CONTEXT = 3, 10, 5
VOCABULARY = examples.SIZES['vocab_size']
STOP_IDS, NO_STOP_IDS = np.array([3, 4, 5, 6]), np.full(4, -1)
VALID_PC = np.arange(CONTEXT)[None, :] >= np.array([0, 2, 4, 1])[:, None]
PROMPT_PC = np.where(
  VALID_PC, np.random.default_rng(0).integers(0, 48, (4, CONTEXT)), 0
)


@functools.partial(
  jax.jit, static_argnums=0, static_argnames=('samples', 'length', 'greedy')
)
def _sample(graphdef, params, prompt_PC, valid_PC, seed, *args, **settings):
  return sampler.sample(
    nnx.merge(graphdef, params),
    prompt_PC,
    valid_PC,
    jax.random.key(seed),
    *args,
    **settings,
  )


def sample(
  prompt_PC=PROMPT_PC,
  valid_PC=VALID_PC,
  seed=0,
  temperature=1.0,
  first=0,
  *,
  stop_ids=STOP_IDS,
  samples=SAMPLES,
  length=LENGTH,
  greedy=False,
):
  """Samples from a small decoder; calls with the same shapes share a program."""
  completions = _sample(
    *nnx.split(decoders.decoder()),
    *(prompt_PC, valid_PC, seed, temperature, first),
    stop_ids=stop_ids,
    samples=samples,
    length=length,
    greedy=greedy,
  )
  return jax.tree.map(np.asarray, completions)


def assert_equal(samples, expected, atol=0.0):
  for x, y in zip(
    jax.tree.leaves(samples), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def logits(samples):
  """Logits of all tokens by one full forward pass, and which tokens there are.

  Returns:
    logits_BTV, valid_BT.
  """
  valid_BT = np.arange(LENGTH)[None, :] < samples.length_B[:, None]
  logits_BSV = decoders.logits(
    decoders.decoder(),
    np.concatenate([PROMPT_PC.repeat(SAMPLES, 0), samples.tokens_BT], 1),
    np.concatenate([VALID_PC.repeat(SAMPLES, 0), valid_BT], 1),
  )
  return logits_BSV[:, CONTEXT - 1 : -1], valid_BT


def log_softmax(logits):
  logits = logits.astype(np.float64)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_greedy_tokens_are_the_most_likely_of_the_full_forward():
  samples = sample(greedy=True, stop_ids=NO_STOP_IDS)
  logits_BTV, _ = logits(samples)
  np.testing.assert_array_equal(samples.tokens_BT, logits_BTV.argmax(-1))
  np.testing.assert_allclose(
    samples.policy_logp_BT, log_softmax(logits_BTV).max(-1), atol=1e-5
  )
  assert not samples.sampling_logp_BT.any()


def test_rows_end_with_their_stop_token_and_are_empty_after_it():
  samples = sample()
  assert 0 < samples.stopped_B.sum() < len(samples.stopped_B)
  for b, n in enumerate(samples.length_B):
    tokens_T = samples.tokens_BT[b]
    assert (tokens_T[n - 1] in STOP_IDS) == samples.stopped_B[b]
    assert not np.isin(tokens_T[: n - 1], STOP_IDS).any()
    assert samples.stopped_B[b] or n == LENGTH
    for x_BT in (
      samples.tokens_BT, samples.policy_logp_BT, samples.sampling_logp_BT
    ):  # fmt: skip
      assert not x_BT[b, n:].any()


def test_the_temperature_is_in_the_sampling_density_only():
  samples = sample(temperature=0.5)
  logits_BTV, valid_BT = logits(samples)
  for density_BTV, logp_BT in (
    (logits_BTV / 0.5, samples.sampling_logp_BT),
    (logits_BTV, samples.policy_logp_BT),
  ):
    expected_BT1 = np.take_along_axis(
      log_softmax(density_BTV), samples.tokens_BT[..., None], -1
    )
    expected_BT = np.where(valid_BT, expected_BT1[..., 0], 0.0)
    np.testing.assert_allclose(logp_BT, expected_BT, atol=1e-5)
  plain = sample()
  np.testing.assert_array_equal(plain.policy_logp_BT, plain.sampling_logp_BT)


TEMPERATURE = 0.7


@functools.cache
def many_pairs():
  """The first two tokens of 2000 completions of every prompt, [P, G, 2]."""
  samples = sample(
    temperature=TEMPERATURE, samples=2000, length=2, stop_ids=NO_STOP_IDS
  )
  return samples.tokens_BT.reshape(4, 2000, 2)


def density(logits):
  return np.exp(log_softmax(logits / TEMPERATURE))


def test_tokens_are_drawn_from_the_sampling_density():
  logits_BTV, _ = logits(sample())
  p_PV = density(logits_BTV[::SAMPLES, 0])
  for p_V, tokens_G in zip(p_PV, many_pairs()[..., 0], strict=True):
    share_V = np.bincount(tokens_G, minlength=VOCABULARY) / len(tokens_G)
    error_V = (share_V - p_V) / np.sqrt(p_V * (1 - p_V) / len(tokens_G))
    assert np.abs(error_V).max() < 4.5


def test_every_token_has_random_numbers_of_its_own():
  # The share of completions whose second token repeats the first.
  tokens_GT = many_pairs()[0]
  share = np.mean(tokens_GT[:, 0] == tokens_GT[:, 1])
  every_token_V1 = np.arange(VOCABULARY)[:, None]
  logits_VSV = decoders.logits(
    decoders.decoder(),
    np.concatenate([PROMPT_PC[:1].repeat(VOCABULARY, 0), every_token_V1], 1),
  )
  first_VV, second_VV = density(logits_VSV[:, -2:]).swapaxes(0, 1)
  expected = (first_VV[0] * np.diag(second_VV)).sum()
  deviation = np.sqrt(expected * (1 - expected) / len(tokens_GT))
  assert abs(share - expected) < 4.5 * deviation


def test_every_call_prompt_and_sample_draws_other_tokens():
  prompt_PC, valid_PC = PROMPT_PC[:1].repeat(4, 0), VALID_PC[:1].repeat(4, 0)
  first, second, first_again = (
    sample(prompt_PC, valid_PC, seed, stop_ids=NO_STOP_IDS)
    for seed in (0, 1, 0)
  )
  rows = np.concatenate([first.tokens_BT, second.tokens_BT])
  assert len({tuple(row) for row in rows}) == 24
  assert_equal(first, first_again)


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
  others_PC = PROMPT_PC.copy()
  others_PC[1:] = (others_PC[1:] + 7) % VOCABULARY
  all_rows = sample()
  with_others = sample(others_PC, np.ones_like(VALID_PC))
  assert_equal(
    *(jax.tree.map(lambda x: x[:3], s) for s in (all_rows, with_others))
  )
  # `first` is the index of the first prompt in the whole batch.
  for first in (0, 2):
    part = slice(first, first + 2)
    assert_equal(
      sample(PROMPT_PC[part], VALID_PC[part], first=first),
      jax.tree.map(lambda x, f=first: x[3 * f : 3 * f + 6], all_rows),
      atol=1e-5,
    )


def test_a_mesh_gives_the_samples_of_one_device():
  mesh = decoders.mesh(2, 2, 2)
  jitted = sampler.build(
    decoders.decoder().config,
    mesh,
    samples=SAMPLES,
    length=LENGTH,
    stop_ids=tuple(STOP_IDS),
  )
  params = nnx.state(decoders.decoder())
  places = sharding.params(params, mesh)
  with jax.set_mesh(mesh):
    samples = jitted(
      jax.device_put(params, places),
      decoder_lib.NO_PARAMS,
      PROMPT_PC,
      VALID_PC,
      jax.random.key(0),
      np.float32(1.0),
      np.int32(0),
    )
  assert_equal(samples, sample(), atol=1e-5)


def test_stages_of_the_cache_change_no_sample(monkeypatch):
  assert sampler.stages(4096) == [512, 1024, 2048, 4096]
  assert sampler.stages(1023) == [1023]
  assert sampler.stages(1500) == [750, 1500]
  expected = sample(seed=5, stop_ids=NO_STOP_IDS)
  monkeypatch.setattr(sampler, '_FIRST_STAGE', 2)
  assert sampler.stages(LENGTH) == [3, 5, 10]
  _sample.clear_cache()
  found = sample(seed=5, stop_ids=NO_STOP_IDS)
  assert_equal(found, expected, atol=1e-5)
  _sample.clear_cache()


def test_moved_weights_have_the_dtype_of_use_and_their_places_while_sampling():
  train, decode = decoders.mesh(1, 2, 1), decoders.mesh(2, 1, 1)
  for dtype in ('bfloat16', 'float32'):
    decoder = decoders.decoder(dtype=dtype)
    _, params, _ = decoder_lib.split(decoder)
    placed = jax.device_put(params, sharding.params(params, train))
    moved = sampler.build_move(decoder.config, train, decode)(placed)
    expected = decoder_lib.cast(params, dtype)
    places = sharding.params(params, decode)
    for x, y, place in zip(
      *map(jax.tree.leaves, (moved, expected, places)), strict=True
    ):
      assert x.dtype == y.dtype
      assert x.sharding.is_equivalent_to(place, x.ndim)
      np.testing.assert_array_equal(x, y)


def test_weights_that_are_as_sampling_needs_them_are_not_copied():
  mesh, decoder = decoders.mesh(2, 1, 1), decoders.decoder(dtype='bfloat16')
  _, params, _ = decoder_lib.split(decoder)
  placed = jax.device_put(params, sharding.params(params, mesh))
  moved = sampler.build_move(decoder.config, mesh, mesh)(placed)
  for (path, x), (_, y) in zip(
    moved.flat_state(), placed.flat_state(), strict=True
  ):
    # The scales of norms stay in float32.
    assert (x.get_value() is y.get_value()) == (path[-1] == 'scale')
