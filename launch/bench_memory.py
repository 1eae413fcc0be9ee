"""The benchmark of the memory of logits; see `launch/bench.py`."""

from absl import flags
import bench_tools

_VOCAB = flags.DEFINE_integer('vocab', 128_256, 'memory: vocabulary size.', 1)
_ROWS = flags.DEFINE_integer('rows', 8, 'memory: rows.', 1)
_LENGTH = flags.DEFINE_integer('length', 1024, 'memory: tokens a row.', 1)
_LAYERS = flags.DEFINE_integer('layers', 2, 'memory: layers.', 1)
_D_MODEL = flags.DEFINE_integer('d_model', 256, 'memory: model width.', 64)
_CHUNKS = flags.DEFINE_multi_integer(
  'chunk',
  [256, 1024, 4096],
  'memory: tokens whose logits are in memory; may be repeated.',
  1,
)


def run() -> bench_tools.Result:
  """The temporary memory of scoring and of the gradient, by logit_chunk.

  XLA reports it for programs that are compiled for one device but not run;
  arguments and results are not included. Above them is the size of all logits
  in float32. The last line has all tokens in one chunk.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  import jax
  import jax.numpy as jnp
  import numpy as np

  from mrl_jax import config
  from mrl_jax.models import decoder
  from mrl_jax.models import families
  from mrl_jax.update import objectives
  from mrl_jax.update import update

  jax.config.update('jax_num_cpu_devices', 1)
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), config.MESH_AXES
  )
  model = families.build(
    'llama',
    vocab_size=_VOCAB.value,
    num_layers=_LAYERS.value,
    d_model=_D_MODEL.value,
    d_ff=4 * _D_MODEL.value,
    num_heads=_D_MODEL.value // 64,
    num_kv_heads=1,
    head_dim=64,
  )
  _, params, frozen = decoder.abstract(model)
  grads = jax.eval_shape(update.build_zeros(model, mesh))

  def shape(length, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((_ROWS.value, length), dtype)

  length = _LENGTH.value
  micro_batch = objectives.PackedRows(
    tokens_BS=shape(length, jnp.int32),
    row_BS=shape(length, jnp.int32),
    old_logp_BS=shape(length),
    advantage_BS=shape(length),
    weight_BS=shape(length),
    mask_BS=shape(length, bool),
    chunk_BS=shape(length, jnp.int32),
    mini_batch_B1=shape(1),
  )

  def temporary_mib(program, *before):
    args = *before, params, frozen, micro_batch
    compiled = program.lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20

  tokens, rows = _ROWS.value * length, {}
  for chunk in [*sorted(c for c in _CHUNKS.value if c < tokens), tokens]:
    score = update.build_scorer(model, mesh, chunk)
    differentiate = update.build_gradient(
      model, mesh, objectives.LOG_LIKELIHOOD, chunk
    )
    with jax.set_mesh(mesh):
      rows[f'{chunk} tokens a chunk'] = {
        'scoring, MiB': temporary_mib(score),
        'gradient, MiB': temporary_mib(differentiate, grads),
      }
  about = {
    'tokens': tokens,
    'MiB of logits': 4 * tokens * _VOCAB.value / 2**20,
  }
  return bench_tools.Result(about, rows)
