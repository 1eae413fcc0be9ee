"""The benchmark of sampling; see `launch/bench.py`."""

from absl import flags
import bench_model
import bench_tools
import bench_tunix

_BATCH = flags.DEFINE_multi_integer(
  'batch', [32, 64], 'sampler: rows at a time; may be repeated.', 1
)
_REQUESTS = flags.DEFINE_integer(
  'requests', 256, 'sampler: prompts of uneven completions.', 1
)
_SHARED = flags.DEFINE_integer(
  'shared', 512, 'sampler: tokens of a prompt with 8 completions.', 1
)
_GROUPS, _SAMPLES = 4, 8  # Such prompts, and completions of each.


def run() -> bench_tools.Result:
  """Tokens a second of a small random policy on one device, in float32.

  At even lengths, every row draws as many tokens as it may. At uneven ones, so
  many tokens of the vocabulary end a row that lengths are about geometric, and
  there are --requests of them. In the last line there are 4 prompts of --shared
  tokens with 8 rows each, which draw half as many tokens.

  Where google-tunix is installed, its sampler draws the same numbers of tokens,
  in turn with ours, from a model of the same architecture and with the same
  tokens that end a row. It does not return log-probabilities, as its GRPO has it;
  ours does. It samples one batch after the other, of as many rows at a time.
  """
  # Not before the flags are parsed: a mistake in them is reported at once.
  from flax import nnx
  import jax
  import numpy as np

  from mrl_jax.models import decoder
  from mrl_jax.sampling import drawing
  from mrl_jax.sampling import sampler
  from mrl_jax.sampling import slots

  mesh, model = bench_model.mesh(), bench_model.build()
  peer = bench_tunix.load(model)
  _, params, frozen = decoder.split(decoder.Decoder(model, nnx.Rngs(0)))
  rng = np.random.default_rng(0)

  def measured(batch, requests, stop_ids=(), samples=1, context=0, new=0):
    context = context or bench_model.CONTEXT.value
    new = new or bench_model.NEW.value
    prompts = [
      rng.integers(1, bench_model.VOCAB, context).astype(np.int32)
      for _ in range(requests)
    ]
    sample = sampler.Sampler(
      model,
      mesh,
      slots.Settings(
        samples=samples,
        length=new,
        stop_ids=stop_ids or (-1,),
        density=drawing.Density(),
      ),
      prompts=batch // samples,
      context=context,
    )
    tokens = {}

    def ours():
      for _ in sample(params, frozen, prompts, jax.random.key(0)):
        pass
      tokens['ours'] = sample.real

    timed = {'ours': ours}
    if peer:
      rows = [ids for ids in prompts for _ in range(samples)]
      theirs = peer.sampler(context, new, stop_ids)

      def tunix():
        tokens['tunix'] = sum(
          theirs(rows[i : i + batch], seed=i)
          for i in range(0, len(rows), batch)
        )

      timed['tunix'] = tunix
    best = bench_tools.best(timed, bench_model.REPEAT.value)
    rates = {name: tokens[name] / best[name] for name in timed}
    columns = {
      'tokens': tokens['ours'],
      'tokens/s': rates['ours'],
      'real slots, %': 100 * sample.real / sample.used,
    }
    if peer:
      columns |= {
        'tunix, tokens/s': rates['tunix'],
        'x tunix': rates['ours'] / rates['tunix'],
      }
    return columns

  rows = {
    f'{batch} rows, even': measured(batch, batch) for batch in _BATCH.value
  }
  # From 1 on: 0 is padding for tunix.
  ends = tuple(range(1, 1 + bench_model.VOCAB // bench_model.MEAN.value))
  rows |= {
    f'{batch} rows, uneven': measured(batch, _REQUESTS.value, ends)
    for batch in _BATCH.value
  }
  rows[f'{_GROUPS} x {_SAMPLES} rows'] = measured(
    _GROUPS * _SAMPLES,
    _GROUPS,
    samples=_SAMPLES,
    context=_SHARED.value,
    new=bench_model.NEW.value // 2,
  )
  return bench_tools.Result(bench_tools.machine(), rows)
