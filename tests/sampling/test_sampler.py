from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from mrl_jax import config as config_lib
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import logps
from mrl_jax.models import sharding
from mrl_jax.sampling import sampler
from tests import decoders
from tests import examples

LENGTH, CONTEXT, STOP = 10, 5, (3, 4, 5, 6)
rng = np.random.default_rng(0)
VALID_PC = np.arange(CONTEXT)[None, :] >= np.array([0, 2, 4, 1])[:, None]
PROMPT_PC = np.where(VALID_PC, rng.integers(0, 48, (4, CONTEXT)), 0).astype(
  np.int32
)


def sample(
  prompt_PC=PROMPT_PC,
  valid_PC=VALID_PC,
  key=0,
  temperature=1.0,
  first=0,
  family='llama',
  **settings,
):
  settings = {'samples': 3, 'length': LENGTH, 'stop_ids': STOP, **settings}
  graphdef, params = nnx.split(decoders.decoder(family))
  return jax.jit(
    lambda params: sampler.sample(
      nnx.merge(graphdef, params),
      prompt_PC,
      valid_PC,
      jax.random.key(key),
      temperature,
      first,
      **settings,
    )
  )(params)


def sequences(samples, per_prompt=3):
  """Prompts and completions, as they are trained on."""
  valid_BT = np.arange(LENGTH)[None, :] < np.asarray(samples.length_B)[:, None]
  return (
    np.concatenate([PROMPT_PC.repeat(per_prompt, 0), samples.tokens_BT], 1),
    np.concatenate([VALID_PC.repeat(per_prompt, 0), valid_BT], 1),
  )


@pytest.mark.parametrize('family', sorted(families.FAMILIES))
def test_log_probs_are_those_of_the_scorer(family):
  samples = sample(family=family)
  tokens_BS, valid_BS = sequences(samples)
  logp_BT = logps.response_logps(
    decoders.decoder(family), tokens_BS, valid_BS, LENGTH, 1000
  )
  np.testing.assert_allclose(samples.policy_logp_BT, logp_BT, atol=1e-5)
  np.testing.assert_array_equal(
    samples.policy_logp_BT, samples.sampling_logp_BT
  )


@pytest.mark.parametrize('family', sorted(families.FAMILIES))
def test_greedy_tokens_are_those_of_the_full_forward(family):
  samples = sample(family=family, greedy=True, samples=1, stop_ids=(-1,))
  tokens_BS, valid_BS = sequences(samples, per_prompt=1)
  logits_BTV = decoders.logits(decoders.decoder(family), tokens_BS, valid_BS)[
    :, CONTEXT - 1 : -1
  ]
  np.testing.assert_array_equal(samples.tokens_BT, logits_BTV.argmax(-1))
  np.testing.assert_allclose(
    samples.policy_logp_BT, jax.nn.log_softmax(logits_BTV).max(-1), atol=1e-5
  )
  assert not np.asarray(samples.sampling_logp_BT).any()


def test_rows_end_with_their_stop_token_and_are_empty_beyond():
  samples = sample(samples=16)
  stopped_B = np.asarray(samples.stopped_B)
  assert 0 < stopped_B.sum() < len(stopped_B)
  for b, n in enumerate(samples.length_B):
    tokens_T = np.asarray(samples.tokens_BT[b])
    assert (tokens_T[n - 1] in STOP) == stopped_B[b]
    assert not np.isin(tokens_T[: n - 1], STOP).any()
    assert stopped_B[b] or n == LENGTH
    for beyond in (
      samples.tokens_BT, samples.policy_logp_BT, samples.sampling_logp_BT
    ):  # fmt: skip
      assert not np.asarray(beyond[b, n:]).any()


def test_temperature_is_in_the_sampling_density_alone():
  samples = sample(temperature=0.5)
  tokens_BS, valid_BS = sequences(samples)
  logits_BTV = decoders.logits(decoders.decoder(), tokens_BS, valid_BS)[
    :, CONTEXT - 1 : -1
  ]
  for density, logp_BT in (
    (logits_BTV / 0.5, samples.sampling_logp_BT),
    (logits_BTV, samples.policy_logp_BT),
  ):
    expected_BT = np.take_along_axis(
      np.asarray(jax.nn.log_softmax(density)),
      np.asarray(samples.tokens_BT)[..., None],
      -1,
    )[..., 0]
    expected_BT = np.where(valid_BS[:, CONTEXT:], expected_BT, 0.0)
    np.testing.assert_allclose(logp_BT, expected_BT, atol=1e-5)


def test_tokens_are_drawn_from_the_policy():
  n, v = 2000, examples.SIZES['vocab_size']
  one = sample(samples=n, length=1, stop_ids=(-1,))
  p_PV = jax.nn.softmax(
    decoders.logits(decoders.decoder(), PROMPT_PC, VALID_PC)[:, -1]
  )
  for p_V, drawn_B in zip(p_PV, one.tokens_BT.reshape(4, n), strict=True):
    share_V = np.bincount(drawn_B, minlength=v) / n
    error_V = (share_V - p_V) / np.sqrt(p_V * (1 - p_V) / n)
    assert np.abs(error_V).max() < 4.5


def test_every_token_has_noise_of_its_own():
  # How often the second token is the first once more.
  n, v = 2000, examples.SIZES['vocab_size']
  two = sample(samples=n, length=2, stop_ids=(-1,))
  p_V = jax.nn.softmax(
    decoders.logits(decoders.decoder(), PROMPT_PC[:1], VALID_PC[:1])[0, -1]
  )
  longer_VS = np.concatenate(
    [np.repeat(PROMPT_PC[:1], v, 0), np.arange(v, dtype=np.int32)[:, None]], 1
  )
  next_VV = jax.nn.softmax(
    decoders.logits(decoders.decoder(), longer_VS)[:, -1]
  )
  expected = float((p_V * np.diag(next_VV)).sum())
  share = np.mean(two.tokens_BT[:n, 0] == two.tokens_BT[:n, 1])
  assert abs(share - expected) < 4.5 * np.sqrt(expected * (1 - expected) / n)


def test_no_two_calls_prompts_or_samples_draw_alike():
  same = np.repeat(PROMPT_PC[:1], 4, 0), np.repeat(VALID_PC[:1], 4, 0)
  first, second = (sample(*same, key=key, stop_ids=(-1,)) for key in (0, 1))
  rows = np.concatenate([first.tokens_BT, second.tokens_BT])
  assert len({tuple(row) for row in rows}) == 24
  again = sample(*same, key=0, stop_ids=(-1,))
  np.testing.assert_array_equal(first.tokens_BT, again.tokens_BT)


def test_a_row_does_not_depend_on_its_neighbours():
  neighbours = PROMPT_PC.copy()
  neighbours[1:] = (neighbours[1:] + 7) % 48
  first, second = sample(), sample(neighbours, np.ones_like(VALID_PC))
  np.testing.assert_array_equal(first.tokens_BT[:3], second.tokens_BT[:3])
  np.testing.assert_array_equal(
    first.policy_logp_BT[:3], second.policy_logp_BT[:3]
  )
  fewer = sample(PROMPT_PC[:2], VALID_PC[:2])
  np.testing.assert_array_equal(first.tokens_BT[:6], fewer.tokens_BT)


@pytest.mark.parametrize('shape', [(1, 4, 1), (2, 1, 2), (1, 2, 2)])
def test_a_mesh_gives_what_one_device_gives(shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  mesh = Mesh(devices, config_lib.MESH_AXES)
  model = examples.model()
  jitted = sampler.build(model, mesh, samples=3, length=LENGTH, stop_ids=STOP)
  params = nnx.state(decoders.decoder())
  places = sharding.params(params, mesh, sharding.DECODE)
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
  expected = sample()
  np.testing.assert_array_equal(samples.tokens_BT, expected.tokens_BT)
  np.testing.assert_allclose(
    samples.policy_logp_BT, expected.policy_logp_BT, atol=1e-5
  )


def test_parameters_that_were_cast_before_sample_the_same():
  model = families.build('qwen', **examples.SIZES, dtype='bfloat16')
  graphdef, params, none = decoder_lib.split(
    decoder_lib.Decoder(model, nnx.Rngs(0))
  )
  cast = decoder_lib.cast(params, 'bfloat16')
  kinds = {
    (path[-1] == 'scale', str(param.get_value().dtype))
    for path, param in cast.flat_state()
  }
  assert kinds == {(True, 'float32'), (False, 'bfloat16')}
  one, other = (
    jax.jit(
      lambda params: sampler.sample(
        nnx.merge(graphdef, params, none),
        PROMPT_PC,
        VALID_PC,
        jax.random.key(0),
        np.float32(1.0),
        0,
        samples=2,
        length=LENGTH,
        stop_ids=STOP,
      )
    )(params)
    for params in (params, cast)
  )
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_part_of_the_prompts_draws_as_all_of_them_do():
  whole = sample()
  part = sample(PROMPT_PC[2:], VALID_PC[2:], first=2)
  for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
    np.testing.assert_allclose(x[2 * 3 :], y, atol=1e-5)
