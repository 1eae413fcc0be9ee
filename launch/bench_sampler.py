"""The benchmark of sampling; see `launch/bench.py`."""

from absl import flags
import bench_tools

_BATCH = flags.DEFINE_multi_integer(
  'batch', [32, 64], 'sampler: rows at a time; may be repeated.', 1
)
_REQUESTS = flags.DEFINE_integer(
  'requests', 256, 'sampler: prompts of uneven completions.', 1
)
_NEW = flags.DEFINE_integer('new', 128, 'sampler: most tokens drawn a row.', 2)
_MEAN = flags.DEFINE_integer(
  'mean', 32, 'sampler: mean length of uneven completions, about.', 1
)
_REPEAT = flags.DEFINE_integer('repeat', 5, 'sampler: runs; best counts.', 1)
_PROMPT = 32  # Tokens of a prompt.
_VOCAB = 4096


def run() -> bench_tools.Result:
  """Tokens a second of a small random policy on one device, in float32.

  At even lengths, every row draws as many tokens as it may. At uneven ones, so
  many tokens of the vocabulary end a row that lengths are about geometric. The
  rate of a matrix product in the same process tells how fast the machine is.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  from flax import nnx
  import jax
  import numpy as np

  from mrl_jax import config
  from mrl_jax.models import decoder
  from mrl_jax.models import families
  from mrl_jax.sampling import drawing
  from mrl_jax.sampling import sampler
  from mrl_jax.sampling import slots

  jax.config.update('jax_num_cpu_devices', 1)
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), config.MESH_AXES
  )
  model = families.build(
    'qwen',
    vocab_size=_VOCAB,
    num_layers=4,
    d_model=256,
    d_ff=768,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
  )
  _, params, frozen = decoder.split(decoder.Decoder(model, nnx.Rngs(0)))
  rng = np.random.default_rng(0)

  def measured(batch, requests, stop_ids):
    sample = sampler.Sampler(
      model,
      mesh,
      slots.Settings(
        samples=1,
        length=_NEW.value,
        stop_ids=stop_ids,
        density=drawing.Density(),
      ),
      prompts=batch,
      context=_PROMPT,
    )
    prompts = [
      rng.integers(0, _VOCAB, _PROMPT).astype(np.int32) for _ in range(requests)
    ]

    def complete():
      for _ in sample(params, frozen, prompts, jax.random.key(0)):
        pass

    complete()  # Compiles.
    best = min(bench_tools.seconds(complete) for _ in range(_REPEAT.value))
    return {
      'tokens': sample.real,
      'best s': best,
      'tokens/s': sample.real / best,
      'real slots, %': 100 * sample.real / sample.used,
    }

  rows = {
    f'{batch} rows, even': measured(batch, batch, (-1,))
    for batch in _BATCH.value
  }
  ends = tuple(range(_VOCAB // _MEAN.value))
  rows |= {
    f'{batch} rows at a time, uneven': measured(batch, _REQUESTS.value, ends)
    for batch in _BATCH.value
  }
  x = np.ones((1024, 1024), np.float32)
  product = jax.jit(lambda x: x @ x)
  product(x).block_until_ready()
  best = min(
    bench_tools.seconds(lambda: product(x).block_until_ready())
    for _ in range(10)
  )
  return bench_tools.Result(
    {'GFLOP/s of a matrix product': 2 * 1024**3 / best / 1e9}, rows
  )
