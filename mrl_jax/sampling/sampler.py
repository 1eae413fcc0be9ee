"""Sampling with a key-value cache; the whole loop is one jitted call.

The cache grows by stages: attention to slots that no row has reached yet would
cost as much as attention to tokens.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import cache as cache_lib
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import logps
from mrl_jax.models import sharding

_FIRST_STAGE = 512  # Tokens of the first stage of the cache, at least.


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
  first_B: jax.Array  # The slot of each row's first token, after padding.
  cache: cache_lib.Cache  # Keys and values of all tokens that were read.
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
  context, ends = prompt_PC.shape[1], stages(length)
  state, logits_BV = _prefill(
    decoder, prompt_PC, valid_PC, key, first, samples, length, ends[0]
  )
  state = draw(state, logits_BV)
  for end in ends:
    cache = cache_lib.grow(state.cache, decoder.config, context + end)
    state = jax.lax.while_loop(
      lambda s, end=end: (s.step < end) & ~s.samples.stopped_B.all(),
      lambda s: draw(*_feed(decoder, s, context)),
      dataclasses.replace(state, cache=cache),
    )
  return state.samples


def stages(length: int) -> list[int]:
  """The numbers of tokens for which the cache has room, one stage after another.

  4,096 tokens are sampled in stages that end at 512, 1,024, 2,048 and 4,096.
  """
  ends = [length]
  while ends[0] >= 2 * _FIRST_STAGE:
    ends.insert(0, -(-ends[0] // 2))
  return ends


def _prefill(decoder, prompt_PC, valid_PC, key, first, samples, length, room):
  """Reads the prompts; returns the state and the logits of the first tokens.

  The cache has room for `room` more tokens.
  """
  prompts, context = prompt_PC.shape
  rows = prompts * samples
  hidden_P1D, cache = decoder.prefill(prompt_PC, valid_PC, context + room)

  def by_row(x):
    return jnp.repeat(x, samples, axis=0)

  fold = jax.vmap(jax.random.fold_in)
  place_B, sample_B = jnp.divmod(jnp.arange(rows), samples)
  state = SamplingState(
    step=jnp.int32(0),
    key_B=fold(fold(jnp.broadcast_to(key, rows), first + place_B), sample_B),
    first_B=by_row(context - valid_PC.sum(1)),
    cache=jax.tree.map(by_row, cache),
    samples=Samples(
      tokens_BT=jnp.zeros((rows, length), jnp.int32),
      sampling_logp_BT=jnp.zeros((rows, length)),
      policy_logp_BT=jnp.zeros((rows, length)),
      length_B=jnp.zeros(rows, jnp.int32),
      stopped_B=jnp.zeros(rows, bool),
    ),
  )
  return state, by_row(decoder.logits(hidden_P1D)[:, 0])


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


def _feed(decoder, state, context) -> tuple[SamplingState, jax.Array]:
  """Reads the last token of every row; returns the logits of the next token.

  Sampled token t is in slot C + t, after the C slots of the prompt:

    C = 3, prompt [5, 6], just sampled token 1 (step = 2)
    slot   0 1 2 3 4
    token  - 5 6 t0 t1     first = 1; t1 has position 4 - 1 = 3
  """
  token_B1 = jax.lax.dynamic_slice_in_dim(
    state.samples.tokens_BT, state.step - 1, 1, axis=1
  )
  hidden_B1D, cache = decoder.step(
    token_B1, state.first_B, context + state.step - 1, state.cache
  )
  state = dataclasses.replace(state, cache=cache)
  return state, decoder.logits(hidden_B1D)[:, 0]


def build_move(model: ModelConfig, train: Mesh, decode: Mesh, part: int = 0):
  """Builds `move(params)` from the training mesh to the sampling mesh.

  It casts the parameters to the dtype in which they are used. `part` is 0 for
  trained and 1 for frozen parameters, as `decoder.split` has them. The meshes
  have the same devices in the same order. What does not change is not copied.
  """
  params = decoder_lib.abstract(model)[1 + part]
  cast = functools.partial(decoder_lib.cast, dtype=model.dtype)
  return functools.partial(
    jax.tree.map,
    _convert,
    jax.eval_shape(cast, params),
    sharding.params(params, train),
    sharding.params(params, decode),
  )


def _convert(like, source, target, x):
  """One array at a time: all at once, XLA would hold the result twice."""
  if x.dtype == like.dtype and source.is_equivalent_to(target, x.ndim):
    return x
  return _converter(like.dtype, target)(x)


@functools.cache
def _converter(dtype, target):
  return jax.jit(lambda x: x.astype(dtype), out_shardings=target)


def build(model: ModelConfig, mesh: Mesh, **settings):
  """Jits `sample` with the keyword arguments `settings`.

  The jitted function takes (params, frozen, prompt_PC, valid_PC, key,
  temperature, first). The fsdp axis of the mesh is of size 1. Prompts are
  sharded over the mesh, which must divide their number.
  """
  graphdef, *parts = decoder_lib.abstract(model)
  rows, one = sharding.rows(mesh), sharding.replicated(mesh)
  places = [sharding.params(part, mesh) for part in parts]
  return jax.jit(
    lambda params, frozen, *args: sample(
      nnx.merge(graphdef, params, frozen), *args, **settings
    ),
    in_shardings=(*places, rows, rows, one, one, one),
    out_shardings=rows,
  )
