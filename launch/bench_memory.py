"""The benchmark of the memory of logits; see `launch/bench.py`."""

from absl import flags
from rich import console as console_lib
from rich import table as table_lib

_VOCAB = flags.DEFINE_integer('vocab', 128_256, 'memory: V.', 1)
_ROWS = flags.DEFINE_integer('rows', 8, 'memory: B.', 1)
_LENGTH = flags.DEFINE_integer('length', 1024, 'memory: T.', 1)
_LAYERS = flags.DEFINE_integer('layers', 2, 'memory: L.', 1)
_D_MODEL = flags.DEFINE_integer('d_model', 256, 'memory: D.', 64)
_CHUNKS = flags.DEFINE_multi_integer(
  'chunk', [256, 1024, 4096], 'memory: tokens; may be repeated.', 1
)
_PROMPT = 8  # Tokens.
_MIB = 2**20


def run(console: console_lib.Console) -> dict:
  """What scoring and the gradient of an update hold at once, by logit_chunk.

  It is XLA's own account of temporary memory on one device, of programs that
  are compiled but not run: arguments and results are not in it. Beside it are
  the bytes of all logits in float32. The last line is of all tokens in one
  chunk.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  import jax

  jax.config.update('jax_num_cpu_devices', 1)
  tokens = _ROWS.value * _LENGTH.value
  logits = tokens * _VOCAB.value * 4
  table = table_lib.Table(
    'tokens a chunk', 'scoring, MiB', 'gradient, MiB', 'float32 [B, T, V], MiB'
  )
  for column in table.columns:
    column.justify = 'right'
  chunks = {}
  for chunk in [*sorted(c for c in _CHUNKS.value if c < tokens), tokens]:
    chunks[chunk] = _temporary(chunk)
    sizes = (*chunks[chunk].values(), logits)
    table.add_row(f'{chunk:,}', *(f'{size / _MIB:,.0f}' for size in sizes))
  console.print(table)
  return {'logits_bytes': logits, 'temporary_bytes': chunks}


def _temporary(chunk) -> dict[str, int]:
  """Bytes, by what is done."""
  import jax
  from jax.sharding import Mesh
  import numpy as np

  from mrl_jax import config
  from mrl_jax.models import decoder
  from mrl_jax.update import objectives
  from mrl_jax.update import update

  model = _model()
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), config.MESH_AXES)
  _, params, frozen = decoder.abstract(model)
  programs = {
    'scoring': update.build_scorer(model, mesh, chunk),
    'gradient': update.build_gradient(
      model, mesh, objectives.log_likelihood, chunk
    ),
  }
  sizes = {}
  with jax.set_mesh(mesh):
    for name, program in programs.items():
      compiled = program.lower(params, frozen, _rows()).compile()
      sizes[name] = compiled.memory_analysis().temp_size_in_bytes
  return sizes


def _model():
  from mrl_jax.models import families

  d_model = _D_MODEL.value
  return families.build(
    'llama',
    vocab_size=_VOCAB.value,
    num_layers=_LAYERS.value,
    d_model=d_model,
    d_ff=4 * d_model,
    num_heads=d_model // 64,
    num_kv_heads=1,
    head_dim=64,
  )


def _rows():
  """The shapes of one micro-batch."""
  import jax
  import jax.numpy as jnp

  from mrl_jax.update import update

  def shape(length, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((1, _ROWS.value, length), dtype)

  length = _LENGTH.value
  return update.Rows(
    tokens_BS=shape(_PROMPT + length, jnp.int32),
    valid_BS=shape(_PROMPT + length, bool),
    old_logp_BT=shape(length),
    advantage_B1=shape(1),
    weight_BT=shape(length),
    mask_BT=shape(length, bool),
    chunk_BT=shape(length, jnp.int32),
    mini_batch_B1=shape(1),
  )
