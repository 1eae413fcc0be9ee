"""Rows that are sampled together, each in a slot, and the programs over them.

A slot has a row from `admit`, which reads its prompt, until the row has ended;
then another row takes its place, while the other slots go on.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from mrl_jax.architecture import ModelConfig
from mrl_jax.models import cache as cache_lib
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding
from mrl_jax.sampling import drawing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What is sampled."""

  samples: int  # G, completions of a prompt.
  length: int  # T, the most tokens of a completion.
  stop_ids: tuple[int, ...]  # Tokens that end one, as its last token.
  density: drawing.Density


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
  """The state of B slots."""

  step: jax.Array  # Tokens that were read so far, of every slot alike.
  key_B: jax.Array  # The random key of each row.
  token_B: jax.Array  # The last token of each row, which is not read yet.
  age_B: jax.Array  # Tokens sampled of each row.
  prompt_B: jax.Array  # Tokens of its prompt.
  live_B: jax.Array  # Whether the row has not ended.
  cache: cache_lib.Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
  """Tokens that were drawn: the first `count_B` of each row, at most N."""

  token_BN: jax.Array
  sampling_logp_BN: jax.Array  # In the density that was sampled from.
  policy_logp_BN: jax.Array  # At temperature 1, without filters.
  count_B: jax.Array
  live_B: jax.Array  # Whether the row has not ended with them.


def empty(
  model: ModelConfig, rows: int, context: int, ring: int, random: jax.Array
) -> Slots:
  """Slots without rows; `random` is any random key."""

  def zeros(dtype):
    return jnp.zeros(rows, dtype)

  return Slots(
    step=jnp.int32(0),
    key_B=jnp.broadcast_to(random, rows),
    token_B=zeros(jnp.int32),
    age_B=zeros(jnp.int32),
    prompt_B=zeros(jnp.int32),
    live_B=zeros(bool),
    cache=cache_lib.empty(model, rows, context, ring),
  )


def shardings(model: ModelConfig, mesh: Mesh) -> Slots:
  """Rows over the data axis, and heads of keys and values over the tensor axis."""
  rows, one = sharding.rows(mesh), sharding.replicated(mesh)
  heads = NamedSharding(mesh, PartitionSpec(sharding.ROWS, 'tensor'))
  layer = cache_lib.Layer(heads, heads, heads, heads)
  names = ('key_B', 'token_B', 'age_B', 'prompt_B', 'live_B')
  return Slots(
    step=one, cache=[layer] * model.num_layers, **dict.fromkeys(names, rows)
  )


def admit(
  decoder: decoder_lib.Decoder,
  slots: Slots,
  prompt_PC: jax.Array,
  valid_PC: jax.Array,
  index_P: jax.Array,
  row_B: jax.Array,
  key: jax.Array,
  *,
  settings: Settings,
) -> tuple[Slots, Drawn]:
  """Gives rows to free slots: reads their prompts, and draws their first tokens.

  Row r is sample r % G of prompt r // G of those given. All samples of a prompt
  share what is read. The random key of a row follows from `key`, the index of
  its prompt and its sample number: what it draws depends on nothing else.

  Args:
    decoder: the policy.
    slots: the state.
    prompt_PC: left-padded prompts.
    valid_PC: False at padding.
    index_P: the index of each prompt in the whole batch.
    row_B: the row that each slot gets, or -1.
    key: the random key of the batch.
    settings: what is sampled.
  """
  hidden_P1D, kept = decoder.prefill(prompt_PC, valid_PC)
  logits_PV = decoder.logits(hidden_P1D)[:, 0]
  is_new_B = row_B >= 0
  place_B, sample_B = jnp.divmod(jnp.maximum(row_B, 0), settings.samples)
  fold = jax.vmap(jax.random.fold_in)
  new_key_B = fold(
    fold(jnp.broadcast_to(key, row_B.shape), index_P[place_B]), sample_B
  )

  put = _scattered if _is_one_part() else _selected

  def new(x_B, value_B):
    return jnp.where(is_new_B, value_B, x_B)

  slots = dataclasses.replace(
    slots,
    key_B=new(slots.key_B, new_key_B),
    age_B=new(slots.age_B, 0),
    prompt_B=new(slots.prompt_B, valid_PC.sum(1, dtype=jnp.int32)[place_B]),
    live_B=slots.live_B | is_new_B,
    cache=[
      layer._replace(
        k_BKCE=put(layer.k_BKCE, k, row_B, settings.samples),
        v_BKCE=put(layer.v_BKCE, v, row_B, settings.samples),
      )
      for layer, (k, v) in zip(slots.cache, kept, strict=True)
    ],
  )
  slots, drawn_B = _draw(slots, logits_PV[place_B], is_new_B, settings)
  return slots, Drawn(
    **{name: x_B[:, None] for name, x_B in drawn_B.items()},
    count_B=is_new_B.astype(jnp.int32),
    live_B=slots.live_B,
  )


def _is_one_part() -> bool:
  """Whether slots are not sharded over the data axis."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.empty or mesh.shape['data'] == 1


def _scattered(x_BKCE, x_PKCE, row_B, samples):
  """Keys, or values, with those of new rows in their slots.

  In place; over several parts of the data axis, XLA would gather the slots.
  """
  rows, slots = len(x_PKCE) * samples, len(row_B)
  # The slot of each row; rows that have none are dropped.
  slot_R = jnp.full(rows, slots).at[jnp.where(row_B < 0, rows, row_B)]
  slot_R = slot_R.set(jnp.arange(slots), mode='drop')
  x_PKCE = cache_lib.of_prompts(x_PKCE, x_BKCE.shape[2])
  x_RKCE = jnp.repeat(x_PKCE, samples, axis=0)
  return x_BKCE.at[slot_R].set(x_RKCE, mode='drop', unique_indices=True)


def _selected(x_BKCE, x_PKCE, row_B, samples):
  """The same; on one part, XLA would copy the prompts to all slots at once."""
  x_PKCE = cache_lib.of_prompts(x_PKCE, x_BKCE.shape[2])
  new_BKCE = x_PKCE[jnp.maximum(row_B, 0) // samples]
  return jnp.where((row_B >= 0)[:, None, None, None], new_BKCE, x_BKCE)


def decode(
  decoder: decoder_lib.Decoder,
  slots: Slots,
  until: jax.Array,
  most: jax.Array,
  *,
  width: int,
  settings: Settings,
) -> tuple[Slots, Drawn]:
  """Samples tokens of all rows, until `until` slots are free.

  Args:
    decoder: the policy.
    slots: the state; no row has sampled more tokens than the ring holds.
    until: number of free slots that ends it; it ends without live rows, too.
    most: the most tokens of a row to sample, `width` at most.
    width: N of the result.
    settings: what is sampled.
  """
  rows = len(slots.live_B)
  drawn = Drawn(
    token_BN=jnp.zeros((rows, width), jnp.int32),
    sampling_logp_BN=jnp.zeros((rows, width)),
    policy_logp_BN=jnp.zeros((rows, width)),
    count_B=jnp.zeros(rows, jnp.int32),
    live_B=slots.live_B,
  )

  def goes_on(carry):
    i, slots, _ = carry
    free = jnp.sum(~slots.live_B)
    return (i < most) & (free < jnp.minimum(until, rows))

  def sample(carry):
    i, slots, drawn = carry
    live_B = slots.live_B
    slots, logits_BV = _read(decoder, slots)
    slots, drawn_B = _draw(slots, logits_BV, live_B, settings)
    return (
      i + 1,
      slots,
      dataclasses.replace(
        drawn,
        count_B=drawn.count_B + live_B,
        live_B=slots.live_B,
        **{
          name: getattr(drawn, name).at[:, i].set(x_B)
          for name, x_B in drawn_B.items()
        },
      ),
    )

  return jax.lax.while_loop(goes_on, sample, (jnp.int32(0), slots, drawn))[1:]


def _read(decoder, slots) -> tuple[Slots, jax.Array]:
  """Reads the last token of every row; returns the logits of the next one."""
  now = cache_lib.Now(slots.step, slots.age_B - 1, slots.prompt_B)
  hidden_B1D, cache = decoder.step(slots.token_B[:, None], now, slots.cache)
  slots = dataclasses.replace(slots, step=slots.step + 1, cache=cache)
  return slots, decoder.logits(hidden_B1D)[:, 0]


def _draw(slots, logits_BV, wanted_B, settings):
  """Draws the next token of the wanted rows; returns it by `Drawn`'s names."""
  uniform_B = jax.vmap(
    lambda key, age: jax.random.uniform(jax.random.fold_in(key, age))
  )(slots.key_B, slots.age_B)
  token_B, sampling_logp_B, policy_logp_B = drawing.draw(
    logits_BV, uniform_B, settings.density
  )
  age_B = slots.age_B + wanted_B
  stops_B = jnp.isin(token_B, np.array(settings.stop_ids, np.int32))
  ends_B = stops_B | (age_B >= settings.length)
  slots = dataclasses.replace(
    slots,
    token_B=jnp.where(wanted_B, token_B, slots.token_B),
    age_B=age_B,
    live_B=slots.live_B & ~(wanted_B & ends_B),
  )
  drawn = {
    'token_BN': token_B,
    'sampling_logp_BN': sampling_logp_B,
    'policy_logp_BN': policy_logp_B,
  }
  return slots, {n: jnp.where(wanted_B, x_B, 0) for n, x_B in drawn.items()}


def build_empty(
  model: ModelConfig, mesh: Mesh, *, rows: int, context: int, ring: int
):
  """Jits `empty(random key) -> slots`."""

  def empty_slots(random):
    return empty(model, rows, context, ring, random)

  return jax.jit(empty_slots, out_shardings=shardings(model, mesh))


def build_admit(model: ModelConfig, mesh: Mesh, settings: Settings):
  """Jits `admit(params, frozen, slots, ...) -> (slots, drawn)`.

  It consumes the slots. Prompts are sharded over the mesh, as slots are.
  """
  arguments = *admitted(mesh), sharding.replicated(mesh)
  return _build(model, mesh, admit, arguments, settings=settings)


def admitted(mesh: Mesh) -> tuple[NamedSharding, ...]:
  """The shardings of the host's arrays that `admit` reads, in their order."""
  rows = sharding.rows(mesh)
  return rows, rows, sharding.replicated(mesh), rows


def build_decode(
  model: ModelConfig, mesh: Mesh, settings: Settings, width: int
):
  """Jits `decode(params, frozen, slots, ...) -> (slots, drawn)`.

  It consumes the slots.
  """
  arguments = (sharding.replicated(mesh),) * 2
  return _build(model, mesh, decode, arguments, width=width, settings=settings)


def _build(model, mesh, function, arguments, **settings):
  graphdef, *parts = decoder_lib.abstract(model)
  places = [sharding.params(part, mesh) for part in parts]
  state = shardings(model, mesh)

  def run(params, frozen, *args):
    return function(nnx.merge(graphdef, params, frozen), *args, **settings)

  run.__name__ = function.__name__  # Profiles show it.
  return jax.jit(
    run,
    in_shardings=(*places, state, *arguments),
    out_shardings=(state, sharding.replicated(mesh)),
    donate_argnums=2,
  )


def build_resize(model: ModelConfig, mesh: Mesh):
  """Builds `resize(slots, kept_B, ring) -> slots`, which consumes the slots.

  It keeps the slots `kept_B`, or all if that is None, with room for `ring`
  sampled tokens of each row. It is no single program, which would hold the whole
  cache twice.
  """
  places = shardings(model, mesh)

  @functools.cache
  def jitted(place, size):
    def fit(x, step, kept_B):
      x = x if kept_B is None else x[kept_B]
      return cache_lib.resized(x, step, size) if size else x

    return jax.jit(fit, out_shardings=place)

  def resize(slots: Slots, kept_B: np.ndarray | None, ring: int) -> Slots:
    def fit(x, place, size=0):
      if kept_B is None and size in (0, *x.shape[2:3]):
        return x
      fitting = jitted(place, size)(x, slots.step, kept_B)
      x.delete()
      return fitting

    cache = [
      cache_lib.Layer(
        fit(layer.k_BKCE, place.k_BKCE),
        fit(layer.v_BKCE, place.v_BKCE),
        *(
          fit(x, place.k_BKRE, cache_lib.entries(model, i, ring))
          for x in (layer.k_BKRE, layer.v_BKRE)
        ),
      )
      for i, (layer, place) in enumerate(
        zip(slots.cache, places.cache, strict=True)
      )
    ]
    rows = {
      field.name: fit(getattr(slots, field.name), getattr(places, field.name))
      for field in dataclasses.fields(slots)
      if field.name not in ('step', 'cache')
    }
    return Slots(step=slots.step, cache=cache, **rows)

  return resize
