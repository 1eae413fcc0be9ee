"""Sampling with a key-value cache, the whole loop in one jitted call."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import logps
from mrl_jax.models import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
  """Completions: row p * G + g is sample g of prompt p.

  `sampling_logp_BT` is the log-probability under the density that was sampled
  from (with its temperature), `policy_logp_BT` under the policy itself, at
  temperature 1. Both are 0 beyond `length_B`, which counts the stop token of
  the rows where `stopped_B`.
  """

  tokens_BT: jax.Array
  sampling_logp_BT: jax.Array
  policy_logp_BT: jax.Array
  length_B: jax.Array
  stopped_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
  """What the loop carries from token to token.

  Attributes:
    step: tokens sampled so far.
    key_B: the stream of each row.
    valid_BS: False at the prompt's padding.
    position_B: of the next token to be fed.
    cache: keys and values of all that was fed.
    token_B: the last one sampled, not yet fed.
    tokens_TB, sampling_logp_TB, policy_logp_TB, length_B, stopped_B: as in
      `Samples`, so far.
  """

  step: jax.Array
  key_B: jax.Array
  valid_BS: jax.Array
  position_B: jax.Array
  cache: decoder_lib.Cache
  token_B: jax.Array
  tokens_TB: jax.Array
  sampling_logp_TB: jax.Array
  policy_logp_TB: jax.Array
  length_B: jax.Array
  stopped_B: jax.Array


def sample(
  decoder: decoder_lib.Decoder,
  prompt_PC: jax.Array,
  valid_PC: jax.Array,
  key: jax.Array,
  temperature: jax.Array,
  first: jax.Array,
  *,
  samples: int,
  length: int,
  stop_ids: tuple[int, ...],
  greedy: bool = False,
) -> Samples:
  """Samples `samples` completions of every prompt.

  Prompts are run once and their keys and values shared by their samples. Every
  row draws from its own stream, derived from `key`, its prompt's place and its
  sample number, so that it does not depend on the rest of the batch.

  Args:
    decoder: the policy.
    prompt_PC: left-padded prompts.
    valid_PC: False at padding.
    key: one random key; the same key gives the same completions.
    temperature: above 0; ignored when `greedy`.
    first: the place of the first prompt, where these are a part of a batch.
    samples: G, completions a prompt.
    length: T, the most tokens in a completion.
    stop_ids: tokens that end a completion; it keeps them.
    greedy: take the likeliest token; its sampling log-probability is then 0.
  """
  draw = functools.partial(
    _draw,
    temperature=temperature,
    stop_ids=jnp.array(stop_ids),
    greedy=greedy,
  )
  state, logits_BV = _prefill(
    decoder, prompt_PC, valid_PC, key, first, samples, length
  )
  state = jax.lax.while_loop(
    lambda state: (state.step < length) & ~state.stopped_B.all(),
    lambda state: draw(*_feed(decoder, state)),
    draw(state, logits_BV),
  )
  return Samples(
    tokens_BT=state.tokens_TB.T,
    sampling_logp_BT=state.sampling_logp_TB.T,
    policy_logp_BT=state.policy_logp_TB.T,
    length_B=state.length_B,
    stopped_B=state.stopped_B,
  )


def _prefill(decoder, prompt_PC, valid_PC, key, first, samples, length):
  """Runs the prompts; returns the state and the logits of the first tokens."""
  prompts, context = prompt_PC.shape
  rows = prompts * samples
  positions_PC, mask_PCC = logps.prompt_layout(valid_PC)
  hidden_PCD, cache = decoder(
    prompt_PC,
    positions_PC,
    jnp.pad(mask_PCC, ((0, 0), (0, 0), (0, length))),
    decoder_lib.empty_cache(decoder.config, prompts, context + length),
  )

  def by_row(x):
    return jnp.repeat(x, samples, axis=0)

  fold = jax.vmap(jax.random.fold_in)
  place_B, sample_B = jnp.divmod(jnp.arange(rows), samples)
  valid_PS = jnp.pad(valid_PC, ((0, 0), (0, length)), constant_values=True)
  state = SamplingState(
    step=jnp.int32(0),
    key_B=fold(fold(jnp.broadcast_to(key, rows), first + place_B), sample_B),
    valid_BS=by_row(valid_PS),
    position_B=by_row(valid_PC.sum(1)),
    cache=jax.tree.map(by_row, cache),
    token_B=jnp.zeros(rows, jnp.int32),
    tokens_TB=jnp.zeros((length, rows), jnp.int32),
    sampling_logp_TB=jnp.zeros((length, rows)),
    policy_logp_TB=jnp.zeros((length, rows)),
    length_B=jnp.zeros(rows, jnp.int32),
    stopped_B=jnp.zeros(rows, bool),
  )
  return state, by_row(decoder.logits(hidden_PCD[:, -1:])[:, 0])


def _draw(state, logits_BV, *, temperature, stop_ids, greedy) -> SamplingState:
  """Takes the next token of every row that goes on."""
  if greedy:
    token_B = jnp.argmax(logits_BV, -1)
    sampling_logp_B = jnp.zeros_like(state.policy_logp_TB[0])
  else:
    key_B = jax.vmap(jax.random.fold_in, (0, None))(state.key_B, state.step)
    scaled_BV = logits_BV / temperature
    token_B = jax.vmap(jax.random.categorical)(key_B, scaled_BV)
    sampling_logp_B = logps.log_prob(scaled_BV, token_B)
  policy_logp_B = logps.log_prob(logits_BV, token_B)
  live_B = ~state.stopped_B

  def put(x_TB, x_B):
    x_B = jnp.where(live_B, x_B, 0).astype(x_TB.dtype)
    return x_TB.at[state.step].set(x_B)

  return dataclasses.replace(
    state,
    step=state.step + 1,
    token_B=token_B.astype(jnp.int32),
    tokens_TB=put(state.tokens_TB, token_B),
    sampling_logp_TB=put(state.sampling_logp_TB, sampling_logp_B),
    policy_logp_TB=put(state.policy_logp_TB, policy_logp_B),
    length_B=state.length_B + live_B,
    stopped_B=state.stopped_B | jnp.isin(token_B, stop_ids),
  )


def _feed(decoder, state) -> tuple[SamplingState, jax.Array]:
  """Runs the last token of every row; returns the logits of the next."""
  slots = state.valid_BS.shape[1]
  slot = slots - state.tokens_TB.shape[0] + state.step - 1
  written_1S = (jnp.arange(slots) <= slot)[None, :]
  hidden_B1D, cache = decoder(
    state.token_B[:, None],
    state.position_B[:, None],
    (state.valid_BS & written_1S)[:, None, :],
    state.cache,
    slot,
  )
  state = dataclasses.replace(
    state, cache=cache, position_B=state.position_B + 1
  )
  return state, decoder.logits(hidden_B1D)[:, 0]


def build(model: ModelConfig, mesh: Mesh, **settings):
  """Jits `sample(params, frozen, prompt_PC, valid_PC, key, temperature, first)`.

  Args:
    model: the policy's architecture.
    mesh: of both parts of the parameters (those that are trained and those that
      adapters leave), placed by `sharding.DECODE`; the prompts are spread
      over it, which has to divide their number.
    **settings: the keyword arguments of `sample`.
  """
  graphdef, *parts = decoder_lib.abstract(model)
  rows, one = sharding.rows(mesh), sharding.replicated(mesh)
  places = [sharding.params(part, mesh, sharding.DECODE) for part in parts]
  return jax.jit(
    lambda params, frozen, *args: sample(
      nnx.merge(graphdef, params, frozen), *args, **settings
    ),
    in_shardings=(*places, rows, rows, one, one, one),
    out_shardings=rows,
  )
