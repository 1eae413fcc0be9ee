import itertools

from hypothesis import given
from hypothesis import strategies as st
import pytest

from mrl_jax import checks
from mrl_jax.architecture import Lora
from mrl_jax.mwra import cost
from mrl_jax.mwra import planner
from tests import examples

SHAPE = examples.round_shape(
  rows=64,
  sampled_prompts=64,
  prompt_tokens=16,
  response_tokens=16,
  micro_rows=64,
  logit_chunk=256,
)


def plan(models, devices, **kwargs):
  kwargs = {'divides': 32, **kwargs}
  return planner.plan(models, dict.fromkeys(models, SHAPE), devices, **kwargs)


def test_slices_are_disjoint_contiguous_and_shaped():
  slices = plan({'a': examples.model(), 'b': examples.model()}, 8, tensor=2)
  assert [s.devices for s in slices.values()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
  assert all(s.shape == (1, 2, 2) for s in slices.values())


def test_the_slower_policy_has_the_larger_slice():
  models = {'small': examples.model(), 'large': examples.model(num_layers=8)}
  slices = plan(models, 8)
  assert slices['large'].devices == (0, 1, 2, 3)  # Aligned to its size.
  assert slices['large'].load == 1.0
  assert list(slices) == ['small', 'large']


def test_devices_that_do_not_help_are_left_free():
  # The large policy cannot use more than 4; a second one of 1 is fast enough.
  models = {
    'large': examples.model(num_layers=40, d_model=4),
    'small': examples.model(d_model=4),
  }
  slices = plan(models, 8)
  assert len(slices['large'].devices) == 4
  assert len(slices['small'].devices) == 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(3, 9))
def test_the_makespan_is_that_of_brute_force(layers, devices):
  models = {
    str(i): examples.model(num_layers=n, d_model=24)
    for i, n in enumerate(layers)
  }
  slices = plan(models, devices, divides=24)
  flops = {name: cost.estimate(m, SHAPE).flops for name, m in models.items()}
  sizes = [n for n in range(1, devices + 1) if 24 % n == 0]
  best = min(
    (max(f / n for f, n in zip(flops.values(), split, strict=True)), sum(split))
    for split in itertools.product(sizes, repeat=len(models))
    if sum(split) <= devices
  )
  makespan = max(flops[n] / len(s.devices) for n, s in slices.items())
  assert (makespan, sum(len(s.devices) for s in slices.values())) == best


def test_only_the_rows_are_spread_over_what_is_not_tensor():
  # Four devices are two by two: two parts of the rows and of d_model.
  slices = plan({'a': examples.model(d_model=6)}, 4, tensor=2, divides=2)
  assert slices['a'].shape == (1, 2, 2)


def test_too_few_devices_is_told_with_what_would_help():
  models = {name: examples.model() for name in 'abc'}
  with pytest.raises(checks.InputError, match='3 policies do not fit on 2'):
    plan(models, 2)
  with pytest.raises(checks.InputError, match=r'time_share=True'):
    plan(models, 2)


def test_time_sharing_gives_everyone_all_devices():
  slices = plan({name: examples.model() for name in 'abc'}, 2, time_share=True)
  assert {s.devices for s in slices.values()} == {(0, 1)}


def test_policies_that_take_turns_keep_their_states():
  models = {name: examples.model() for name in 'abc'}
  need = cost.estimate(examples.model(), SHAPE)
  enough = 2 * need.state_bytes + need.peak_bytes(1)
  plan(models, 1, time_share=True, device_bytes=enough)
  with pytest.raises(checks.InputError, match='3 policies that take turns'):
    plan(models, 1, time_share=True, device_bytes=enough - 1)


def test_too_little_memory_is_told_with_the_amount():
  with pytest.raises(checks.InputError, match=r'policy a needs .* GiB'):
    plan({'a': examples.model(num_layers=100)}, 4, device_bytes=1 << 20)


def test_memory_asks_for_a_larger_slice():
  need = cost.estimate(examples.model(), SHAPE).peak_bytes(4)
  slices = plan(
    {'a': examples.model(), 'b': examples.model()},
    8,
    device_bytes=need // 4 + 1,
  )
  assert all(len(s.devices) == 4 for s in slices.values())


def test_every_device_of_the_fsdp_axis_has_room_for_a_copy_of_the_weights():
  wide = examples.model(d_ff=4096)
  tiny = cost.RoundShape(
    rows=1,
    samples=1,
    sampled_prompts=1,
    prompt_tokens=1,
    response_tokens=1,
    micro_rows=1,
    logit_chunk=1,
  )
  weights = 4 * wide.num_params

  def fits(models, size, **kwargs):
    planner.plan(
      models,
      dict.fromkeys(models, tiny),
      4,
      divides=4,
      device_bytes=int(size * weights),
      **kwargs,
    )

  # Of the state, three times the weights, a device of four has .75; and a copy.
  fits({'a': wide}, 1.8)
  with pytest.raises(checks.InputError, match='fits on no slice'):
    fits({'a': wide}, 1.7)
  # Two states, and one of them has its copies: (6 + 4) / 4.
  both = {'a': wide, 'b': wide}
  fits(both, 2.6, time_share=True)
  with pytest.raises(checks.InputError, match='take turns'):
    fits(both, 2.4, time_share=True)


def test_a_tensor_axis_that_does_not_divide_is_told():
  with pytest.raises(checks.InputError, match='num_kv_heads = 2'):
    plan({'a': examples.model()}, 8, tensor=4)
  odd = examples.model(d_ff=65, vocab_size=49)
  with pytest.raises(checks.InputError, match='d_ff = 65, vocab_size = 49'):
    plan({'a': odd}, 8, tensor=2)


def test_what_adapters_leave_stays_while_others_work():
  lora = Lora(rank=1, alpha=1, target_modules=('q_proj',))
  model = examples.model(d_ff=4096, lora=lora, param_dtype='bfloat16')
  found = cost.estimate(model, SHAPE)
  three = dict.fromkeys('abc', model)
  needs = 3 * found.resident_bytes(1) + found.work_bytes(1)
  assert needs > 3 * found.state_bytes + found.peak_bytes(1)
  plan(three, 1, time_share=True, device_bytes=needs)
  with pytest.raises(checks.InputError, match='take turns'):
    plan(three, 1, time_share=True, device_bytes=needs - 1)
