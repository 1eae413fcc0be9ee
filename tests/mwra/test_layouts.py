"""The choice of a policy's layout, against trying all of them."""

import dataclasses
import itertools
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from mrl_jax.architecture import Lora
from mrl_jax.mwra import chips
from mrl_jax.mwra import cost
from mrl_jax.mwra import layouts
from mrl_jax.mwra import sizes
from tests import examples

V5E = chips.CHIPS['v5e']
SHAPE = examples.round_shape(
  prompts=16,
  samples=4,
  mini_batches=2,
  peer_rows=64,
  scored_rows=64,
  prompt_tokens=512,
  response_tokens=1024,
  peer_tokens=2048,
  logit_chunk=512,
)
MODEL = examples.model(
  vocab_size=32_000,
  num_layers=12,
  d_model=1024,
  d_ff=4096,
  num_heads=16,
  num_kv_heads=4,
  head_dim=64,
  dtype='bfloat16',
  remat='auto',
)
LORA = Lora(rank=8, alpha=8, target_modules=('q_proj',))


def every_layout(model, shape, devices):
  """All layouts that XLA accepts but for memory, without any order."""
  axes = range(1, devices + 1)
  meshes = [
    mesh
    for mesh in itertools.product(axes, axes, axes)
    if math.prod(mesh) == devices
    and model.d_model % mesh[1] == 0
    and not any(
      size % mesh[2]
      for size in (
        model.num_heads, model.num_kv_heads, model.d_ff, model.vocab_size
      )
    )
  ]  # fmt: skip
  rows = shape.packed_rows(shape.prompts * shape.samples, shape.response_tokens)
  for train, decode in itertools.product(meshes, meshes):
    ways = train[0] * train[1]
    if decode[1] > 1:
      continue
    for k, batch, remat in itertools.product(
      range(6), (1, 2, 4, 8, 16), layouts.REMAT
    ):
      micro = ways * 2**k
      if k <= 2 or micro <= rows / 4:
        yield sizes.Layout(train, decode, micro, batch, remat)


@settings(max_examples=8, deadline=None)
@given(
  st.sampled_from([2, 4]),
  st.floats(0.4, 16.0),
  st.sampled_from([None, LORA]),
)
def test_the_layout_is_the_best_of_all(devices, gib, lora):
  chip = dataclasses.replace(V5E, hbm_bytes=gib * 2**30)
  model = dataclasses.replace(MODEL, lora=lora, num_layers=4, vocab_size=8000)
  room = layouts.SHARE * chip.hbm_bytes
  costs = [
    (layout, cost.estimate(model, SHAPE, layout, chip))
    for layout in every_layout(model, SHAPE, devices)
  ]
  fits = [(each, got) for each, got in costs if got.peak_bytes <= room]
  found = layouts.best(model, SHAPE, chip, devices)
  if not fits:
    assert isinstance(found, layouts.Misfit)
    assert found.bytes > room
    return
  assert found.cost.peak_bytes <= room
  # The smallest tensor axis first; then the time, but for what is not worth it.
  tensor = min(layout.train[2] for layout, _ in fits)
  assert found.layout.train[2] == tensor
  least = min(c.seconds for each, c in fits if each.train[2] == tensor)
  assert least <= found.cost.seconds <= least / (1 - 0.02) ** 2


def test_what_the_user_fixed_stays():
  fixed = layouts.Choices(
    data=2, tensor=2, decode_tensor=4, micro_rows=8, sample_batch=3
  )
  model = dataclasses.replace(MODEL, remat='dots')
  layout = layouts.best(model, SHAPE, V5E, 8, fixed).layout
  assert layout == sizes.Layout((2, 2, 2), (2, 1, 4), 8, 3, 'dots')


def test_the_model_has_the_remat_that_was_chosen():
  model, layout, _ = layouts.best(MODEL, SHAPE, V5E, 4)
  assert model == dataclasses.replace(MODEL, remat=layout.remat)
  assert model.remat != 'auto'


def test_without_a_bound_of_memory_nothing_is_divided_or_recomputed():
  unbounded = dataclasses.replace(V5E, hbm_bytes=math.inf)
  _, layout, _ = layouts.best(MODEL, SHAPE, unbounded, 4)
  assert layout.train == (1, 4, 1)
  assert layout.micro_rows == 16  # Four rows a device, more than a quarter.
  assert layout.sample_batch == max(16, SHAPE.evaluated[0])
  assert layout.remat == 'none'


def test_micro_batches_have_no_more_rows_than_are_faster():
  _, layout, _ = layouts.best(MODEL, SHAPE, chips.CHIPS['cpu'], 4)
  assert layout.micro_rows == 3 * 4
  fixed = layouts.Choices(micro_rows=8)
  _, layout, _ = layouts.best(MODEL, SHAPE, chips.CHIPS['cpu'], 4, fixed)
  assert layout.micro_rows == 8


@pytest.mark.parametrize('devices', [3, 6])
def test_some_numbers_of_devices_have_no_layout(devices):
  # There are 64 rows, and the tensor axis is 1, 2 or 4.
  fixed = layouts.Choices(tensor=1)
  assert layouts.best(MODEL, SHAPE, V5E, devices, fixed) is None


def test_a_misfit_names_the_program_that_needs_the_most():
  tiny = dataclasses.replace(V5E, hbm_bytes=1e6)
  misfit = layouts.best(MODEL, SHAPE, tiny, 4)
  phases = cost.estimate(
    dataclasses.replace(MODEL, remat=misfit.layout.remat),
    SHAPE,
    misfit.layout,
    tiny,
  ).phases
  assert phases[misfit.program].bytes == misfit.bytes


def test_reserved_memory_is_not_used():
  whole = layouts.best(MODEL, SHAPE, V5E, 2).cost.peak_bytes
  half = V5E.hbm_bytes * layouts.SHARE - whole / 2
  found = layouts.best(MODEL, SHAPE, V5E, 2, reserved=half)
  assert (
    not isinstance(found, layouts.Fit) or found.cost.peak_bytes <= whole / 2
  )


def test_weights_are_copied_over_the_data_axis_if_links_are_slow():
  """A few tokens a device: gathering weights takes longer than computing."""
  shape = dataclasses.replace(
    SHAPE, prompt_tokens=16, response_tokens=16, peer_rows=0
  )
  slow = dataclasses.replace(chips.CHIPS['v5p'], link_bandwidth=1e9)
  _, layout, costs = layouts.best(MODEL, shape, slow, 8)
  assert costs.phases['own gradient'].bound == 'links'
  assert layout.train[0] > 1
