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


def test_devices_that_shorten_no_round_stay_free():
  # The large policy can use 4 at most; the small one is faster on a single one.
  models = {
    'large': examples.model(num_layers=40, d_model=4),
    'small': examples.model(d_model=4),
  }
  slices = plan(models, 8)
  assert len(slices['large'].devices) == 4
  assert len(slices['small'].devices) == 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(3, 9))
def test_makespan_and_devices_are_those_of_brute_force(layers, devices):
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


def test_the_tensor_axis_need_not_divide_the_rows():
  # Of four devices, fsdp = 2 divides the 2 rows and d_model.
  slices = plan({'a': examples.model(d_model=6)}, 4, tensor=2, divides=2)
  assert slices['a'].shape == (1, 2, 2)


def test_the_error_for_too_few_devices_says_what_would_help():
  models = {name: examples.model() for name in 'abc'}
  with pytest.raises(checks.InputError, match='3 policies do not fit on 2'):
    plan(models, 2)
  with pytest.raises(checks.InputError, match=r'time_share=True'):
    plan(models, 2)


def test_time_sharing_gives_every_policy_all_devices():
  slices = plan({name: examples.model() for name in 'abc'}, 2, time_share=True)
  assert {s.devices for s in slices.values()} == {(0, 1)}


def test_states_stay_resident_while_policies_take_turns():
  models = {name: examples.model() for name in 'abc'}
  costs = cost.estimate(examples.model(), SHAPE)
  enough = 2 * costs.state_bytes + costs.peak_bytes(1)
  plan(models, 1, time_share=True, device_bytes=enough)
  with pytest.raises(checks.InputError, match='3 policies that take turns'):
    plan(models, 1, time_share=True, device_bytes=enough - 1)


def test_policies_that_take_turns_need_the_memory_of_the_largest():
  models = {'small': examples.model(), 'large': examples.model(d_ff=4096)}
  costs = {name: cost.estimate(m, SHAPE) for name, m in models.items()}
  assert costs['large'].work_bytes(1) > costs['small'].work_bytes(1)
  enough = costs['large'].peak_bytes(1) + costs['small'].resident_bytes(1)
  plan(models, 1, time_share=True, device_bytes=enough)
  with pytest.raises(checks.InputError, match='take turns'):
    plan(models, 1, time_share=True, device_bytes=enough - 1)


def test_the_error_for_too_little_memory_has_the_amounts():
  model = examples.model(num_layers=100)
  needs = cost.estimate(model, SHAPE).peak_bytes(4) / 2**30
  device = needs / 4 - 0.25
  with pytest.raises(checks.InputError) as error:
    plan({'a': model}, 4, device_bytes=device * 2**30)
  assert f'policy a needs {needs:.2f} GiB' in str(error.value)
  assert f'devices of {device:.2f} GiB: each lacks 0.25 GiB' in str(error.value)


def test_a_policy_gets_a_slice_with_enough_memory():
  need = cost.estimate(examples.model(), SHAPE).peak_bytes(4)
  slices = plan(
    {'a': examples.model(), 'b': examples.model()},
    8,
    device_bytes=need // 4 + 1,
  )
  assert all(len(s.devices) == 4 for s in slices.values())


def test_every_part_of_the_fsdp_axis_needs_memory_for_a_sampling_copy():
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
  weights = cost.estimate(wide, tiny).weight_bytes

  def fits(models, size, **kwargs):
    planner.plan(
      models,
      dict.fromkeys(models, tiny),
      4,
      divides=4,
      device_bytes=int(size * weights),
      **kwargs,
    )

  # Each of 4 devices has 3/4 of the weights as state (3 copies), and one copy.
  fits({'a': wide}, 1.8)
  with pytest.raises(checks.InputError, match='fits on no slice'):
    fits({'a': wide}, 1.7)
  # Two states, and the 4 copies of one policy: (6 + 4) / 4.
  both = {'a': wide, 'b': wide}
  fits(both, 2.6, time_share=True)
  with pytest.raises(checks.InputError, match='take turns'):
    fits(both, 2.4, time_share=True)


def test_the_error_names_what_the_tensor_axis_does_not_divide():
  with pytest.raises(checks.InputError, match='num_kv_heads = 2'):
    plan({'a': examples.model()}, 8, tensor=4)
  odd = examples.model(d_ff=65, vocab_size=49)
  with pytest.raises(checks.InputError, match='d_ff = 65, vocab_size = 49'):
    plan({'a': odd}, 8, tensor=2)


def test_sampling_copies_under_lora_stay_resident():
  lora = Lora(rank=1, alpha=1, target_modules=('q_proj',))
  model = examples.model(d_ff=4096, lora=lora, param_dtype='bfloat16')
  costs = cost.estimate(model, SHAPE)
  models = dict.fromkeys('abc', model)
  needs = 3 * costs.resident_bytes(1) + costs.work_bytes(1)
  assert needs > 3 * costs.state_bytes + costs.peak_bytes(1)
  plan(models, 1, time_share=True, device_bytes=needs)
  with pytest.raises(checks.InputError, match='take turns'):
    plan(models, 1, time_share=True, device_bytes=needs - 1)
