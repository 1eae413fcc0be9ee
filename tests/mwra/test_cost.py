from mrl_jax.architecture import Lora
from mrl_jax.mwra import cost
from tests import examples


def estimate(model, **changes):
  fields = {
    'rows': 2,
    'samples': 2,
    'sampled_prompts': 1,
    'prompt_tokens': 3,
    'response_tokens': 5,
    'micro_rows': 2,
    'logit_chunk': 4,
  }
  return cost.estimate(model, cost.RoundShape(**{**fields, **changes}))


def test_numbers_worked_by_hand():
  model = examples.model()  # 2 layers, D 32, F 64, H 4, K 2, E 8, V 48.
  # A layer: 32*8*2*(4+2) + 3*32*64 + 2*32 = 9,280; embeddings 2*48*32; norm 32.
  params = 2 * 9_280 + 2 * 1_536 + 32
  costs = estimate(model)
  assert (costs.params, costs.adapters) == (params, 0)
  assert costs.state_bytes == 12 * params
  small_moments = estimate(model, moment_bytes=2.5)
  assert small_moments.state_bytes == 6.5 * params
  assert costs.weight_bytes == 4 * params
  # Keys and values of a row: 8 slots * 2 layers * 2 * 2 heads * 8 * 4 bytes.
  # There are 2 rows and the prompt; the scores, 4 heads * 3 * 8, are fewer.
  assert costs.cache_bytes == 3 * 8 * 2 * 128
  # 2 rows * 8 slots * 2 layers * (8*32 + 3*64 + 4*8) values, and 4 tokens'
  # logits twice, 4 bytes each; with a larger chunk there are 10 tokens.
  gradients = 2 * 4 * params
  assert costs.update_bytes == gradients + 4 * (16 * 2 * 480 + 2 * 4 * 48)
  larger = estimate(model, logit_chunk=1000)
  assert larger.update_bytes == gradients + 4 * (16 * 2 * 480 + 2 * 10 * 48)
  # 8 operations per parameter and token; attention 4*2*4*8 * (8/2) / 2 = 512.
  assert costs.flops == 8 * 16 * (params + 512)


def test_memory_grows_with_micro_batches_and_logit_chunks():
  base = estimate(examples.model())
  assert estimate(examples.model(), rows=4).flops == 2 * base.flops
  assert estimate(examples.model(), rows=4).update_bytes == base.update_bytes
  more = estimate(examples.model(), micro_rows=4).update_bytes
  assert base.update_bytes < more
  assert estimate(examples.model(), logit_chunk=2).update_bytes == (
    base.update_bytes - 4 * 2 * 2 * 48
  )


def test_a_reference_is_another_copy_of_the_parameters():
  costs = estimate(examples.model())
  with_reference = estimate(examples.model(), reference=True)
  assert with_reference.state_bytes == costs.state_bytes + costs.weight_bytes


def test_every_part_of_the_fsdp_axis_has_a_sampling_copy():
  wide = estimate(examples.model(d_ff=4096), micro_rows=1, logit_chunk=1)
  assert wide.peak_bytes(1) == wide.state_bytes + wide.update_bytes
  assert wide.peak_bytes(4) == (
    wide.state_bytes + 4 * wide.weight_bytes + wide.cache_bytes
  )


LORA = Lora(rank=2, alpha=4, target_modules=('q_proj', 'o_proj', 'up_proj'))


def test_with_lora_only_adapters_have_moments_and_gradients():
  whole = estimate(examples.model())
  costs = estimate(examples.model(lora=LORA), reference=True)
  # 2 layers of (32 + 32) + (32 + 32) + (32 + 64) inputs and outputs, rank 2.
  assert (costs.params, costs.adapters) == (whole.params, 2 * 2 * 224)
  adapters = 4 * 896
  assert costs.weight_bytes == whole.weight_bytes + adapters
  assert costs.state_bytes == costs.weight_bytes + 3 * adapters
  assert whole.update_bytes - costs.update_bytes == 2 * (
    whole.weight_bytes - adapters
  )
  # The sampling copy stays resident while adapters are updated.
  assert costs.peak_bytes(2) == (
    costs.state_bytes
    + 2 * costs.weight_bytes
    + max(costs.cache_bytes, costs.update_bytes)
  )


def test_remat_saves_activation_memory():
  sizes = [
    estimate(
      examples.model(num_layers=8, remat=remat), micro_rows=64
    ).update_bytes
    for remat in ('none', 'dots', 'block')
  ]
  assert sizes == sorted(sizes, reverse=True)
  assert len(set(sizes)) == 3


def test_bfloat16_takes_half_the_memory():
  whole = estimate(examples.model(), moment_bytes=0)
  stored = estimate(examples.model(param_dtype='bfloat16'), moment_bytes=0)
  sampled = estimate(examples.model(dtype='bfloat16'), moment_bytes=0)
  assert 2 * stored.state_bytes == whole.state_bytes == sampled.state_bytes
  assert stored.weight_bytes == whole.weight_bytes == 2 * sampled.weight_bytes
