"""The cost model, against figures by hand and of XLA."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
import pytest

from mrl_jax.architecture import Layer
from mrl_jax.architecture import Lora
from mrl_jax.models import attention
from mrl_jax.models import decoder
from mrl_jax.mwra import chips
from mrl_jax.mwra import cost
from mrl_jax.mwra import sizes as sizes_lib
from mrl_jax.sampling import sampler
from tests import examples

GIB = 2**30
LORA = Lora(rank=2, alpha=4, target_modules=('q_proj', 'o_proj', 'up_proj'))
# 2 layers, D 32, F 64, H 4, K 2, E 8, V 48. A layer has
# 32*8*2*(4+2) + 3*32*64 + 2*32 = 9,280 parameters; embeddings and head 2*48*32;
# the norm 32.
LAYERS, TABLES = 2 * 9_280 + 32, 2 * 1_536
PARAMS = LAYERS + TABLES
CHIP = dataclasses.replace(
  chips.CHIPS['v5e'], flops=1e12, hbm_bandwidth=1e9, link_bandwidth=1e8
)


def estimate(model=None, layout=None, **changes):
  fields = {
    'prompts': 4,
    'samples': 2,
    'prompt_tokens': 3,
    'response_tokens': 5,
    'logit_chunk': 4,
    'packed_tokens': 8,
  }
  layout = {
    'train': (1, 2, 1),
    'decode': (2, 1, 1),
    'micro_rows': 4,
    'sample_batch': 4,
    'remat': 'none',
    **(layout or {}),
  }
  return cost.estimate(
    model or examples.model(attention='splash'),
    sizes_lib.RoundShape(**{**fields, **changes}),
    sizes_lib.Layout(**layout),
    CHIP,
  )


def test_resident_bytes_by_hand():
  costs = estimate()
  assert (costs.params, costs.adapters) == (PARAMS, 0)
  # Parameters and two moments in float32, on two devices.
  assert costs.resident_bytes == 12 * PARAMS / 2
  assert estimate(moment_bytes=2.5).resident_bytes == 6.5 * PARAMS / 2
  assert estimate(reference=True).resident_bytes == 16 * PARAMS / 2
  copied = estimate(layout={'train': (2, 1, 1)})
  assert copied.resident_bytes == 12 * PARAMS
  stored = examples.model(param_dtype='bfloat16')
  assert estimate(stored).resident_bytes == (2 + 8) * PARAMS / 2


def test_what_is_beside_each_program_by_hand():
  phases = estimate(reference=True, scored_rows=8).phases
  part = PARAMS / 2
  beside = {name: phase.beside / part for name, phase in phases.items()}
  assert beside == {
    'own gradient': 8 + 4,  # Moments and reference.
    'own scoring': 8 + 4,
    'update': 4,
    'move': 8 + 4,
    'prefill': 4 + 8 + 4,
    'decoding': 4 + 8 + 4,
  }
  # What programs certainly hold: gradients, moments, and copies for sampling.
  assert phases['own gradient'].program > 8 * part
  assert phases['own scoring'].program > 4 * part
  assert phases['update'].program > (4 + 4 + 8) * part
  assert phases['move'].program == 4 * part + 4 * PARAMS
  muon = estimate(reference=True, whole_matrices=True).phases['update'].program
  assert muon - phases['update'].program == pytest.approx(0.8 * 4 * LAYERS)
  assert phases['decoding'].program > 4 * PARAMS


def test_sampling_with_the_training_weights_copies_nothing():
  one = {'train': (1, 1, 1), 'decode': (1, 1, 1)}
  phases = estimate(layout=one).phases
  assert phases['decoding'].beside == 8 * PARAMS
  assert phases['move'].program == 4 * PARAMS
  moved = estimate(examples.model(dtype='bfloat16'), layout=one).phases
  assert moved['decoding'].beside == 12 * PARAMS
  assert moved['move'].program == (4 + 2) * PARAMS


def test_with_lora_only_adapters_have_moments_and_gradients():
  costs = estimate(examples.model(lora=LORA), reference=True)
  # 2 layers of (32 + 32) + (32 + 32) + (32 + 64) inputs and outputs, rank 2.
  adapters = 2 * 2 * 224
  assert (costs.params, costs.adapters) == (PARAMS, adapters)
  # The base in both layouts; adapters, their reference and moments.
  base = 4 * PARAMS / 2 + 4 * PARAMS
  assert costs.resident_bytes == base + (4 + 4 + 8) * adapters / 2
  assert costs.phases['own gradient'].beside == 4 * PARAMS + 12 * adapters / 2
  assert costs.phases['update'].program == 16 * adapters / 2
  assert costs.phases['decoding'].program > 4 * (PARAMS + adapters)
  assert costs.phases['decoding'].beside == 4 * PARAMS / 2 + 16 * adapters / 2


def test_the_cache_holds_the_keys_and_values_of_all_rows():
  def sampling(**changes):
    model = examples.model(attention='splash', num_layers=8)
    phases = estimate(model, **changes).phases
    assert phases['prefill'].program > phases['decoding'].program
    return phases['decoding'].program

  # 2 * 2 heads * 8 values * 4 bytes, 8 layers; 4 prompts on 2 devices.
  token = 8 * 128
  more = sampling(response_tokens=6) - sampling(response_tokens=5)
  assert more == 2 * 2 * token
  assert sampling(samples=3) - sampling(samples=2) == 2 * 8 * token
  # Three prompts are padded to four, which the mesh divides.
  assert sampling(layout={'sample_batch': 3}) == sampling()
  # Evaluation samples more.
  more = sampling(evaluated=(4, 9)) - sampling()
  assert more == 2 * (9 - 2) * 8 * token
  windowed = examples.model(layers=(Layer(window=2), Layer()))
  assert sizes_lib.cached(windowed, 8) == (2 + 8) * 128


def test_seconds_of_an_update_by_hand():
  """With one device; links and memory are not what bounds it."""
  layout = {'train': (1, 1, 1), 'decode': (1, 1, 1), 'micro_rows': 3}
  fast = dataclasses.replace(CHIP, hbm_bandwidth=1e15)

  def seconds(model, layout, packed=8):
    shape = sizes_lib.RoundShape(
      prompts=4,
      samples=2,
      prompt_tokens=3,
      response_tokens=5,
      logit_chunk=4,
      packed_tokens=packed,
    )
    layout = sizes_lib.Layout(sample_batch=4, **layout)
    return (
      cost.estimate(model, shape, layout, fast).phases['own gradient'].seconds
    )

  # Eight rows of eight tokens, each a packed row. A token attends to four on
  # average: 2 layers, scores and results of 4*8 values each.
  tokens, attended = 8 * 8, 2 * 2 * 4 * 8 * 4
  layers, head = 2 * tokens * LAYERS, 2 * tokens * 32 * 48
  attention = 2 * tokens * attended
  # Forward 1, backward 2; the head's forward pass is computed again. With
  # adapters, the backward pass of matrices is 1.
  for lora, remat, expected in (
    (None, 'none', 3 * layers + 3 * attention + 4 * head),
    (None, 'dots', 3 * layers + 4 * attention + 4 * head),
    (None, 'block', 4 * layers + 4 * attention + 4 * head),
    (LORA, 'none', 2 * layers + 3 * attention + 3 * head),
  ):
    model = examples.model(lora=lora)
    found = seconds(model, {**layout, 'remat': remat})
    assert found == pytest.approx(expected / 1e12)
    # Two to a packed row: no token attends to the other row.
    found = seconds(model, {**layout, 'remat': remat}, packed=16)
    assert found == pytest.approx(expected / 1e12)


def test_bytes_over_links_by_hand():
  # Two micro-batches. A device lacks half of the layers for each of three
  # collectives, and of the head for two.
  half = (3 * 4 * LAYERS + 2 * 4 * 32 * 48) / 2
  assert estimate().phases['own gradient'].links == pytest.approx(
    2 * half / 1e8
  )
  # Copies of the weights sum their gradients.
  copied = estimate(layout={'train': (2, 1, 1)}).phases['own gradient'].links
  assert copied == pytest.approx(2 * 4 * PARAMS / 1e8)
  # Attention and feed-forward of 2 layers sum [4, 8, 32] in three passes; the
  # head's matrix is gathered and scattered.
  split = estimate(layout={'train': (1, 1, 2)}).phases['own gradient'].links
  summed = 3 * 2 * 2 * (4 * 8 * 32 * 4) + 4 * 32 * 48
  assert split == pytest.approx(2 * summed / 1e8)
  # Half of the weights, to where they sample.
  assert estimate().phases['move'].links == 4 * PARAMS / 2 / 1e8


def test_seconds_of_sampling_by_hand():
  phases = estimate(layout={'sample_batch': 2}).phases
  # Two batches of two prompts: a prompt, or two rows, a device. All weights are
  # read for the prompts, and for each of 5 tokens with a cache of 8 slots.
  prefill, decoding = phases['prefill'], phases['decoding']
  assert prefill.memory == pytest.approx(2 * 4 * PARAMS / 1e9)
  reads = 2 * 5 * (4 * PARAMS + 2 * 8 * 2 * 128)
  assert decoding.memory == pytest.approx(reads / 1e9)
  prompt = 2 * 3 * (LAYERS + 2 * 2 * 4 * 8 * 1.5)
  assert prefill.compute == pytest.approx(2 * prompt / 1e12)
  token = 2 * 2 * (LAYERS + 32 * 48 + 2 * 2 * 4 * 8 * 8)
  assert decoding.compute == pytest.approx(2 * 5 * token / 1e12)
  assert prefill.links == decoding.links == 0


def test_a_tensor_axis_sums_after_every_layer_of_every_token():
  layout = {'train': (1, 1, 2), 'decode': (1, 1, 2)}
  phases = estimate(layout=layout).phases
  # 8 rows of 5 tokens and 4 prompts of 3; 2 sums a layer of D values, to which
  # each of two devices adds half a ring of 2; a pass waits for 2 * 2 * 2 hops.
  for name, tokens, passes in (('prefill', 4 * 3, 1), ('decoding', 8 * 5, 5)):
    values = tokens * 2 * 2 * 32
    expected = values * 4 / 1e8 + passes * 8 * 1e-6
    assert phases[name].links == pytest.approx(expected)


def test_peers_rows_have_their_own_length():
  costs = estimate(peer_rows=8, peer_tokens=50, scored_peer_rows=8)
  longer, own = costs.phases['peer gradient'], costs.phases['own gradient']
  assert longer.program > own.program
  assert longer.compute > 6 * own.compute
  same = estimate(peer_rows=8, peer_tokens=5, scored_peer_rows=8).phases
  assert same['peer gradient'] == same['own gradient']
  assert costs.phases['peer scoring'].program < longer.program


def test_packed_rows_hold_as_many_as_fit():
  shape = examples.round_shape(packed_tokens=50)  # Of 8 + 8 tokens each.
  assert shape.slots(8) == 56
  assert shape.packed_rows(15, 8) == 5
  halves = dataclasses.replace(shape, mini_batches=2)
  assert halves.packed_rows(15, 8) == 3
  assert shape.slots(100) == 112  # The longest row fits.
  assert shape.packed_rows(15, 100) == 15
  assert dataclasses.replace(shape, packed_tokens=0).slots(8) == 128


def test_what_is_mirrored_from_the_device_half():
  assert decoder._MANY == sizes_lib.SCANNED
  assert attention.LONG == sizes_lib.LONG
  for length in (1, 511, 512, 1023, 1024, 1025, 4096, 6144):
    assert sizes_lib.rings(length) == sampler.rings(length)


BIG = examples.model(
  vocab_size=32_000,
  num_layers=12,
  d_model=1024,
  d_ff=4096,
  num_heads=16,
  num_kv_heads=4,
  head_dim=64,
  dtype='bfloat16',
)
LONG_ROWS = {'prompt_tokens': 512, 'response_tokens': 1024, 'prompts': 16}


@given(
  st.sampled_from(['none', 'dots', 'block']),
  st.sampled_from([1, 2, 4]),
  st.sampled_from([None, LORA]),
)
def test_memory_grows_with_all_that_there_is_more_of(remat, tensor, lora):
  model = dataclasses.replace(BIG, lora=lora)

  def update(layout=None, model=model, **changes):
    layout = {'train': (1, 4, tensor), 'remat': remat, **(layout or {})}
    phases = estimate(model, layout, **{**LONG_ROWS, **changes}).phases
    return phases['own gradient'].bytes

  base = update()
  assert update(layout={'micro_rows': 8}) > base
  assert update(response_tokens=2048) > base
  assert update(reference=True) > base
  assert update(model=dataclasses.replace(model, num_layers=24)) > base
  assert update(layout={'train': (2, 2, tensor)}) > base
  if remat != 'block':
    assert update(layout={'remat': 'block'}) < base


def test_memory_grows_linearly_in_length():
  sizes = [
    estimate(BIG, response_tokens=n, layout={'micro_rows': 32})
    .phases['own gradient']
    .program
    for n in (2048, 4096, 8192)
  ]
  step = sizes[1] - sizes[0]
  assert sizes[2] - sizes[1] == pytest.approx(2 * step, rel=0.2)
  plain = dataclasses.replace(BIG, attention='plain')
  held = [
    estimate(plain, response_tokens=n, layout={'micro_rows': 32})
    .phases['own gradient']
    .program
    for n in (2048, 4096, 8192)
  ]
  assert held[2] - held[1] > 2.5 * (held[1] - held[0])
