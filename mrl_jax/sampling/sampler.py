"""Sampling with a key-value cache; the whole loop is one jitted call."""

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
  """Completions: row p * G + g is sample g of prompt p; 0 after its end."""

  tokens_BT: jax.Array
  # Log-probabilities under the density that was sampled from, with its
  # temperature.
  sampling_logp_BT: jax.Array
  policy_logp_BT: jax.Array  # Log-probabilities at temperature 1.
  length_B: jax.Array  # Number of tokens, the stop token included.
  stopped_B: jax.Array  # Whether the last token is a stop token.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
  """The state of the loop over tokens."""

  step: jax.Array  # Tokens sampled so far; the decoder has not read the last.
  key_B: jax.Array  # The random key of each row.
  valid_BS: jax.Array  # False at the prompt's padding.
  cache: decoder_lib.Cache  # Keys and values of all tokens that were read.
  samples: Samples


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

  The decoder reads every prompt once, and all samples of a prompt share these
  keys and values. Every row has its own random key, derived from `key`, the
  index of its prompt and its sample number: a row does not depend on the rest
  of the batch.

  Args:
    decoder: the policy.
    prompt_PC: left-padded prompts.
    valid_PC: False at padding.
    key: the random key; the same key gives the same completions.
    temperature: above 0; ignored when `greedy`.
    first: the index of the first prompt, if the prompts are a part of a batch.
    samples: G, completions of a prompt.
    length: T, the most tokens in a completion.
    stop_ids: tokens that end a completion, as its last token.
    greedy: whether to choose the most likely token; its sampling
      log-probability is then 0.
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
    lambda state: (state.step < length) & ~state.samples.stopped_B.all(),
    lambda state: draw(*_feed(decoder, state)),
    draw(state, logits_BV),
  )
  return state.samples


def _prefill(decoder, prompt_PC, valid_PC, key, first, samples, length):
  """Reads the prompts; returns the state and the logits of the first tokens."""
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
    cache=jax.tree.map(by_row, cache),
    samples=Samples(
      tokens_BT=jnp.zeros((rows, length), jnp.int32),
      sampling_logp_BT=jnp.zeros((rows, length)),
      policy_logp_BT=jnp.zeros((rows, length)),
      length_B=jnp.zeros(rows, jnp.int32),
      stopped_B=jnp.zeros(rows, bool),
    ),
  )
  return state, by_row(decoder.logits(hidden_PCD[:, -1:])[:, 0])


def _draw(state, logits_BV, *, temperature, stop_ids, greedy) -> SamplingState:
  """Samples the next token of every row that has not stopped."""
  samples = state.samples
  if greedy:
    token_B, sampling_logp_B = jnp.argmax(logits_BV, -1), 0.0
  else:
    key_B = jax.vmap(jax.random.fold_in, (0, None))(state.key_B, state.step)
    scaled_BV = logits_BV / temperature
    token_B = jax.vmap(jax.random.categorical)(key_B, scaled_BV)
    sampling_logp_B = logps.log_prob(scaled_BV, token_B)
  live_B = ~samples.stopped_B

  def put(x_BT, x_B):
    x_B = jnp.where(live_B, x_B, 0).astype(x_BT.dtype)
    return x_BT.at[:, state.step].set(x_B)

  policy_logp_B = logps.log_prob(logits_BV, token_B)
  samples = Samples(
    tokens_BT=put(samples.tokens_BT, token_B),
    sampling_logp_BT=put(samples.sampling_logp_BT, sampling_logp_B),
    policy_logp_BT=put(samples.policy_logp_BT, policy_logp_B),
    length_B=samples.length_B + live_B,
    stopped_B=samples.stopped_B | jnp.isin(token_B, stop_ids),
  )
  return dataclasses.replace(state, step=state.step + 1, samples=samples)


def _feed(decoder, state) -> tuple[SamplingState, jax.Array]:
  """Reads the last token of every row; returns the logits of the next token.

  The slots of a row are C prompt positions and T response positions. Sampled
  token t is written to slot C + t, and attends to the slots up to its own. Its
  position is their number less one:

    C = 3, T = 4, prompt [5, 6], just sampled token 1 (step = 2), slot = 4
    valid    0 1 1 1 1 1 1
    written  1 1 1 1 1 0 0
    mask     0 1 1 1 1 0 0
  """
  tokens_BT, slots = state.samples.tokens_BT, state.valid_BS.shape[1]
  token_B1 = jax.lax.dynamic_slice_in_dim(tokens_BT, state.step - 1, 1, axis=1)
  slot = slots - tokens_BT.shape[1] + state.step - 1
  mask_BS = state.valid_BS & (jnp.arange(slots) <= slot)[None, :]
  position_B1 = mask_BS.sum(1, keepdims=True) - 1
  hidden_B1D, cache = decoder(
    token_B1, position_B1, mask_BS[:, None, :], state.cache, slot
  )
  state = dataclasses.replace(state, cache=cache)
  return state, decoder.logits(hidden_B1D)[:, 0]


def build(model: ModelConfig, mesh: Mesh, **settings):
  """Jits `sample` with the keyword arguments `settings`.

  The jitted function takes (params, frozen, prompt_PC, valid_PC, key,
  temperature, first). Trained and frozen parameters are placed on the mesh by
  `sharding.DECODE`. Prompts are sharded over the mesh, which must divide their
  number.
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
