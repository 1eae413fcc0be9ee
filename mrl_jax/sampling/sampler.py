"""Sampling with a key-value cache, the whole loop in one jitted call."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mrl_jax.config import ModelConfig
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import logps
from mrl_jax.models import sharding


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['tokens_BT', 'sampling_logp_BT', 'policy_logp_BT', 'length_B',
               'stopped_B'],
  meta_fields=[],
)  # fmt: skip
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


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['step', 'token_B', 'cache', 'tokens_TB', 'sampling_logp_TB',
               'policy_logp_TB', 'length_B', 'stopped_B'],
  meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
  """What the loop carries from token to token."""

  step: jax.Array  # tokens sampled so far
  token_B: jax.Array  # the last one of each row
  cache: decoder_lib.Cache  # keys and values, S slots
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
    samples: G, completions a prompt.
    length: T, the most tokens in a completion.
    stop_ids: tokens that end a completion; it keeps them.
    greedy: take the likeliest token; its sampling log-probability is then 0.
  """
  prompts, context = prompt_PC.shape
  positions_PC, mask_PCC = logps.prompt_layout(valid_PC)
  cache = decoder_lib.empty_cache(decoder.config, prompts, context + length)
  mask_PCS = jnp.pad(mask_PCC, ((0, 0), (0, 0), (0, length)))
  hidden_PCD, cache = decoder(prompt_PC, positions_PC, mask_PCS, cache)
  by_row = lambda x: jnp.repeat(x, samples, axis=0)
  logits_BV = by_row(decoder.logits(hidden_PCD[:, -1:])[:, 0])
  each = jax.vmap(jax.random.fold_in, (0, 0))
  place_B, sample_B = jnp.divmod(jnp.arange(prompts * samples), samples)
  key_B = each(each(by_row(jnp.broadcast_to(key, prompts)), place_B), sample_B)
  prompt_length_B = by_row(valid_PC.sum(1))
  # Slots of the response are valid once written; the loop hides later ones.
  valid_BS = jnp.pad(
    by_row(valid_PC), ((0, 0), (0, length)), constant_values=True
  )

  def draw(state: SamplingState, logits_BV) -> SamplingState:
    step_key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B, state.step)
    if greedy:
      token_B = jnp.argmax(logits_BV, -1)
      sampling_logp_B = jnp.zeros_like(logits_BV[:, 0])
    else:
      scaled_BV = logits_BV / temperature
      token_B = jax.vmap(jax.random.categorical)(step_key_B, scaled_BV)
      sampling_logp_B = _log_prob(scaled_BV, token_B)
    live_B = ~state.stopped_B
    put = lambda x_TB, x_B: x_TB.at[state.step].set(
      jnp.where(live_B, x_B, 0).astype(x_TB.dtype)
    )
    stops_B = (token_B[:, None] == jnp.array(stop_ids)[None, :]).any(1)
    return SamplingState(
      step=state.step + 1,
      token_B=token_B,
      cache=state.cache,
      tokens_TB=put(state.tokens_TB, token_B),
      sampling_logp_TB=put(state.sampling_logp_TB, sampling_logp_B),
      policy_logp_TB=put(
        state.policy_logp_TB, _log_prob(logits_BV, token_B)
      ),
      length_B=state.length_B + live_B,
      stopped_B=state.stopped_B | stops_B,
    )

  def advance(state: SamplingState) -> SamplingState:
    slot = context + state.step - 1
    hidden_B1D, cache = decoder(
      state.token_B[:, None],
      (prompt_length_B + state.step - 1)[:, None],
      (valid_BS & (jnp.arange(context + length) <= slot)[None, :])[:, None, :],
      state.cache,
      slot,
    )
    state = dataclasses.replace(state, cache=cache)
    return draw(state, decoder.logits(hidden_B1D)[:, 0])

  rows = prompts * samples
  state = SamplingState(
    step=jnp.int32(0),
    token_B=jnp.zeros(rows, jnp.int32),
    cache=jax.tree.map(by_row, cache),
    tokens_TB=jnp.zeros((length, rows), jnp.int32),
    sampling_logp_TB=jnp.zeros((length, rows)),
    policy_logp_TB=jnp.zeros((length, rows)),
    length_B=jnp.zeros(rows, jnp.int32),
    stopped_B=jnp.zeros(rows, bool),
  )
  state = jax.lax.while_loop(
    lambda state: (state.step < length) & ~state.stopped_B.all(),
    advance,
    draw(state, logits_BV),
  )
  return Samples(
    tokens_BT=state.tokens_TB.T,
    sampling_logp_BT=state.sampling_logp_TB.T,
    policy_logp_BT=state.policy_logp_TB.T,
    length_B=state.length_B,
    stopped_B=state.stopped_B,
  )


def _log_prob(logits_BV, token_B):
  chosen_B1 = jnp.take_along_axis(logits_BV, token_B[:, None], -1)
  return jnp.minimum(chosen_B1[:, 0] - jax.nn.logsumexp(logits_BV, -1), 0.0)


def build(model: ModelConfig, mesh: Mesh, **settings):
  """Jits `sample(params, prompt_PC, valid_PC, key, temperature) -> Samples`.

  Args:
    model: the policy's architecture.
    mesh: of the parameters, placed by `sharding.DECODE`; the prompts are spread
      over it, which has to divide their number.
    **settings: the keyword arguments of `sample`.
  """
  graphdef, params = nnx.split(
    nnx.eval_shape(lambda: decoder_lib.Decoder(model, nnx.Rngs(0)))
  )
  rows, one = sharding.rows(mesh), sharding.replicated(mesh)
  places = sharding.params(params, mesh, sharding.DECODE)
  return jax.jit(
    lambda params, *args: sample(nnx.merge(graphdef, params), *args, **settings),
    in_shardings=(places, rows, rows, one, one),
    out_shardings=rows,
  )
