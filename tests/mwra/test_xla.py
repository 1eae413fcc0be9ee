"""The cost model and the planner against what XLA says of compiled programs.

Programs are those of `update.build_gradient`, `update.build_scorer` and
`sampling.slots`, at full depth, compiled ahead of time for TPU with jax 0.10.2 and
libtpu 0.0.42. `launch/plan.py --compile` compiles them for a plan.
"""

import dataclasses

import pytest

from mrl_jax import checks
from mrl_jax.architecture import Layer
from mrl_jax.architecture import ModelConfig
from mrl_jax.mwra import chips
from mrl_jax.mwra import cost
from mrl_jax.mwra import layouts
from mrl_jax.mwra import planner
from mrl_jax.mwra import sizes as sizes_lib
from tests import fleets

GIB = 2**30


def _big(vocab, depth, d, f, heads, kv_heads, head_dim, **changes):
  return ModelConfig(
    vocab_size=vocab,
    num_layers=depth,
    d_model=d,
    d_ff=f,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    **{'dtype': 'bfloat16', 'remat': 'block', **changes},
  )


QWEN3 = 151_936, 28, 2048, 6144, 16, 8, 128
PAIRED = (Layer(), Layer(rope=None))
MODELS = {
  'qwen2.5-0.5b': _big(151_936, 24, 896, 4864, 14, 2, 64),
  'qwen2.5-1.5b': _big(151_936, 28, 1536, 8960, 12, 2, 128),
  'qwen3-1.7b': _big(*QWEN3, qk_norm='head'),
  'qwen3-1.7b, in pairs': _big(*QWEN3, qk_norm='head', layers=PAIRED),
  'smollm3-3b': _big(
    128_256, 36, 2048, 11_008, 16, 4, 128, layers=(*PAIRED[:1] * 3, PAIRED[1])
  ),
  'qwen2.5-1.5b, none': _big(151_936, 28, 1536, 8960, 12, 2, 128, remat='none'),
  'llama3.2-3b': _big(128_256, 28, 3072, 8192, 24, 8, 128),
  'llama3.2-3b, dots': _big(128_256, 28, 3072, 8192, 24, 8, 128, remat='dots'),
  'qwen3-4b': _big(151_936, 36, 2560, 9728, 32, 8, 128, qk_norm='head'),
  'qwen3-4b, dots': _big(
    151_936, 36, 2560, 9728, 32, 8, 128, qk_norm='head', remat='dots'
  ),
  'llama3.1-8b': _big(
    128_256, 32, 4096, 14_336, 32, 8, 128, tie_embeddings=False
  ),
}
# The peak memory of a chip in GiB. Update and scoring: what is recomputed, (data,
# fsdp, tensor), rows of a micro-batch, prompt and response tokens, chunk of logits.
PASSES = [
  ('own gradient', 'qwen2.5-1.5b', 'block', 'v5e', (1, 4, 1), 16, 1024, 4096, 8192, 8.153),
  ('own scoring', 'qwen2.5-1.5b', 'block', 'v5e', (1, 4, 1), 16, 1024, 4096, 8192, 3.091),
  ('own gradient', 'qwen3-1.7b', 'block', 'v5e', (1, 4, 1), 16, 1024, 4096, 8192, 9.428),
  ('own scoring', 'qwen3-1.7b', 'block', 'v5e', (1, 4, 1), 16, 1024, 4096, 8192, 3.420),
  ('own gradient', 'qwen3-1.7b', 'block', 'v5e', (1, 8, 1), 32, 2048, 4096, 8192, 7.909),
  ('peer gradient', 'qwen3-1.7b', 'block', 'v5e', (1, 8, 1), 32, 2048, 6144, 8192, 9.378),
  ('own scoring', 'qwen3-1.7b', 'block', 'v5e', (1, 8, 1), 32, 2048, 4096, 8192, 2.056),
  ('peer scoring', 'qwen3-1.7b', 'block', 'v5e', (1, 8, 1), 32, 2048, 6144, 8192, 2.087),
  ('own gradient', 'smollm3-3b', 'block', 'v5e', (1, 8, 1), 16, 2048, 4096, 8192, 7.397),
  ('peer gradient', 'smollm3-3b', 'block', 'v5e', (1, 8, 1), 16, 2048, 6144, 8192, 9.223),
  ('own scoring', 'smollm3-3b', 'block', 'v5e', (1, 8, 1), 16, 2048, 4096, 8192, 2.789),
  ('peer scoring', 'smollm3-3b', 'block', 'v5e', (1, 8, 1), 16, 2048, 6144, 8192, 2.981),
  ('own gradient', 'llama3.1-8b', 'dots', 'v5p', (1, 8, 1), 16, 1024, 4096, 8192, 40.848),
  ('peer gradient', 'llama3.1-8b', 'dots', 'v5p', (1, 8, 1), 16, 1024, 6144, 8192, 52.059),
  ('own scoring', 'llama3.1-8b', 'dots', 'v5p', (1, 8, 1), 16, 1024, 4096, 8192, 5.906),
  ('own gradient', 'qwen3-4b', 'none', 'v5p', (1, 8, 1), 8, 1024, 4096, 8192, 47.460),
  ('peer gradient', 'qwen3-4b', 'none', 'v5p', (1, 8, 1), 8, 1024, 6144, 8192, 63.272),
  ('own scoring', 'qwen3-4b', 'none', 'v5p', (1, 8, 1), 8, 1024, 4096, 8192, 3.203),
]  # fmt: skip
# Sampling: (data, 1, tensor), prompts, samples, prompt and response tokens.
SAMPLING = [
  ('prefill', 'qwen2.5-1.5b', 'v5e', (2, 1, 2), 16, 8, 1024, 4096, 6.149),
  ('decoding', 'qwen2.5-1.5b', 'v5e', (2, 1, 2), 16, 8, 1024, 4096, 5.972),
  ('prefill', 'qwen3-1.7b', 'v5e', (1, 1, 4), 8, 8, 1024, 4096, 9.780),
  ('decoding', 'qwen3-1.7b', 'v5e', (1, 1, 4), 8, 8, 1024, 4096, 9.697),
  ('prefill', 'qwen3-1.7b', 'v5e', (1, 1, 8), 16, 8, 2048, 4096, 11.880),
  ('decoding', 'qwen3-1.7b', 'v5e', (1, 1, 8), 16, 8, 2048, 4096, 11.001),
  ('prefill', 'smollm3-3b', 'v5e', (2, 1, 4), 16, 8, 2048, 4096, 8.878),
  ('decoding', 'smollm3-3b', 'v5e', (2, 1, 4), 16, 8, 2048, 4096, 8.313),
  ('prefill', 'llama3.1-8b', 'v5p', (2, 1, 4), 64, 8, 1024, 4096, 45.756),
  ('decoding', 'llama3.1-8b', 'v5p', (2, 1, 4), 64, 8, 1024, 4096, 44.269),
  ('prefill', 'qwen3-4b', 'v5p', (2, 1, 4), 64, 8, 1024, 4096, 49.015),
  ('decoding', 'qwen3-4b', 'v5p', (2, 1, 4), 64, 8, 1024, 4096, 47.464),
]  # fmt: skip


def _phase(program, model, chip, train, decode, rows, samples, *sizes):
  prompt, response, chunk = sizes
  shape = sizes_lib.RoundShape(
    prompts=rows,
    samples=samples,
    scored_rows=rows,
    prompt_tokens=prompt,
    response_tokens=response,
    logit_chunk=chunk,
  )
  layout = sizes_lib.Layout(train, decode, rows, rows, model.remat)
  costs = cost.estimate(model, shape, layout, chips.CHIPS[chip])
  return costs.phases[program]


@pytest.mark.parametrize('row', PASSES)
def test_memory_of_passes_is_that_of_xla(row):
  program, name, remat, chip, mesh, rows, *sizes, gib = row
  model = dataclasses.replace(MODELS[name], remat=remat)
  decode = mesh[1], 1, 1
  kind = program.partition(' ')[2]
  found = _phase(f'own {kind}', model, chip, mesh, decode, rows, 1, *sizes)
  assert 0.95 < found.program / GIB / gib < 1.2


@pytest.mark.parametrize('row', SAMPLING)
def test_memory_of_sampling_is_that_of_xla(row):
  program, name, chip, mesh, prompts, samples, prompt, response, gib = row
  train = 1, mesh[0] * mesh[2], 1
  sizes = prompt, response, 1
  found = _phase(
    program, MODELS[name], chip, train, mesh, prompts, samples, *sizes
  )
  assert 0.95 < found.program / GIB / gib < 1.15


def _policy(name, chip, refused, needed, change, peak, **shape):
  sizes = {
    'prompts': 128,
    'samples': 8,
    'mini_batches': 4,
    'scored_rows': 1024,
    'prompt_tokens': 1024,
    'response_tokens': 4096,
    'logit_chunk': 8192,
  }
  shape = sizes_lib.RoundShape(**{**sizes, **shape})
  return name, chip, shape, refused, needed, change, peak


# What the user has fixed, the GiB of a program with which XLA refuses it, the
# change that the planner proposes, and the peak of the same program with it.
REFUSED = [
  _policy(
    'qwen2.5-1.5b, none', 'v5e:2x2', {'micro_rows': 32}, 68.47,
    'policies.a.model.remat=block', 7.773, response_tokens=1024,
  ),
  _policy(
    'smollm3-3b', 'v5e:2x4', {'decode_tensor': 1, 'sample_batch': 64}, 28.98,
    'sample.batch=8', 8.992,
  ),
  _policy(
    'qwen3-4b, dots', 'v5p:2x2x1', {'micro_rows': 64}, 259.65,
    'train.micro_rows=4', 28.909, peer_rows=1024, peer_tokens=6144,
  ),
  _policy(
    'llama3.1-8b', 'v6e:2x4', {'micro_rows': 128}, 48.37,
    'train.micro_rows=16', 17.740, logit_chunk=2048,
  ),
]  # fmt: skip


@pytest.mark.parametrize('policy', REFUSED)
def test_what_xla_refuses_is_refused_with_a_change_that_xla_accepts(policy):
  name, where, shape, fixed, needed, change, peak = policy
  model, chip = MODELS[name], chips.CHIPS[where.partition(':')[0]]
  assert needed * GIB > chip.hbm_bytes
  choices = layouts.Choices(**{'data': 1, 'tensor': 1, **fixed})
  with pytest.raises(checks.InputError) as error:
    planner.plan(
      {'a': model}, {'a': shape}, fleets.named(where), chip, choices=choices
    )
  assert str(error.value).endswith(f'It fits with --config.{change}')
  # Beside the program there are moments, and while sampling parameters too.
  devices = fleets.named(where).size
  params = sizes_lib.numbers(model).params
  beside = (12 if 'sample' in change else 8) * params / devices
  assert peak * GIB + beside < chip.hbm_bytes
