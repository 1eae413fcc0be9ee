"""Plans of whole fleets: slices, time sharing, and what errors say."""

import dataclasses
import itertools
import re

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from mrl_jax import checks
from mrl_jax.architecture import Lora
from mrl_jax.mwra import chips
from mrl_jax.mwra import layouts
from mrl_jax.mwra import planner
from tests import examples
from tests import fleets

SHAPE = examples.round_shape(
  prompts=64, prompt_tokens=16, response_tokens=16, logit_chunk=256
)
CPU = dataclasses.replace(chips.CHIPS['cpu'], rows=None)
# Without a tensor axis and copies, a round takes less the more devices there are.
SPLIT = layouts.Choices(data=1, tensor=1, decode_tensor=1)


def plan(models, devices, shape=SHAPE, gib=None, choices=SPLIT, **kwargs):
  chip = CPU
  if gib:
    chip = dataclasses.replace(CPU, hbm_bytes=gib * 2**30 / layouts.SHARE)
  return planner.plan(
    models,
    dict.fromkeys(models, shape),
    fleets.named(f'cpu:{devices}'),
    chip,
    choices=choices,
    **kwargs,
  )


def cost(model, devices, shape=SHAPE):
  return layouts.best(model, shape, CPU, devices, SPLIT).cost


def test_slices_are_disjoint_and_contiguous():
  choices = layouts.Choices(data=1, tensor=2, decode_tensor=1)
  models = {'a': examples.model(), 'b': examples.model()}
  slices = plan(models, 8, choices=choices)
  assert [s.devices for s in slices.values()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
  assert all(s.layout.train == (1, 2, 2) for s in slices.values())
  assert all(s.layout.decode == (4, 1, 1) for s in slices.values())


def test_the_slower_policy_has_the_larger_slice():
  models = {'small': examples.model(), 'large': examples.model(num_layers=12)}
  slices = plan(models, 6)
  assert len(slices['small'].devices) < len(slices['large'].devices) == 4
  assert slices['large'].load == 1.0
  assert slices['small'].load < 1.0
  assert list(slices) == ['small', 'large']


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(3, 8))
def test_makespan_and_devices_are_those_of_brute_force(layers, devices):
  models = {
    str(i): examples.model(num_layers=n, d_model=24)
    for i, n in enumerate(layers)
  }
  slices = plan(models, devices)
  sizes = [n for n in range(1, devices + 1) if 8 % n == 0]
  seconds = {
    name: {n: cost(model, n).seconds for n in sizes}
    for name, model in models.items()
  }
  best = min(
    (max(seconds[m][n] for m, n in zip(models, split, strict=True)), sum(split))
    for split in itertools.product(sizes, repeat=len(models))
    if sum(split) <= devices
  )
  makespan = max(s.cost.seconds for s in slices.values())
  assert (makespan, sum(len(s.devices) for s in slices.values())) == best
  every = [i for s in slices.values() for i in s.devices]
  assert len(every) == len(set(every))


def test_the_error_for_too_few_devices_says_what_would_help():
  models = {name: examples.model() for name in 'abc'}
  with pytest.raises(checks.InputError, match='3 policies do not fit on 2'):
    plan(models, 2)
  with pytest.raises(checks.InputError, match=r'time_share=True'):
    plan(models, 2)


def test_time_sharing_gives_every_policy_all_devices():
  slices = plan({name: examples.model() for name in 'abc'}, 2, time_share=True)
  assert {s.devices for s in slices.values()} == {(0, 1)}


LORA = Lora(rank=1, alpha=1, target_modules=('q_proj',))
WIDE = examples.model(d_ff=4096)
ADAPTED = examples.model(d_ff=4096, lora=LORA, param_dtype='bfloat16')


@pytest.mark.parametrize(
  'models',
  [
    dict.fromkeys('abc', examples.model()),
    {'small': examples.model(), 'large': WIDE},
    dict.fromkeys('abc', ADAPTED),
  ],
)
def test_states_stay_resident_while_policies_take_turns(models):
  """They need all states, and the memory to work of what needs the most."""
  costs = [cost(model, 1) for model in models.values()]
  needs = sum(c.resident_bytes for c in costs) + max(
    c.work_bytes for c in costs
  )
  fixed = dataclasses.replace(SPLIT, micro_rows=16, sample_batch=64)
  gib = needs / 2**30
  plan(models, 1, gib=gib * 1.0001, choices=fixed, time_share=True)
  with pytest.raises(checks.InputError, match='take turns'):
    plan(models, 1, gib=gib * 0.9999, choices=fixed, time_share=True)


def test_policies_that_take_turns_have_smaller_micro_batches():
  models = dict.fromkeys('ab', WIDE)
  shape = dataclasses.replace(SHAPE, response_tokens=256)
  alone = cost(WIDE, 1, shape).peak_bytes / 2**30 * 1.0001
  (part,) = plan({'a': WIDE}, 1, shape, gib=alone).values()
  assert part.layout.micro_rows == 16
  slices = plan(models, 1, shape, gib=alone, time_share=True)
  assert {part.layout.micro_rows for part in slices.values()} == {8}


def test_a_policy_gets_a_slice_with_enough_memory():
  fixed = dataclasses.replace(SPLIT, micro_rows=32, sample_batch=64)
  need = layouts.best(WIDE, SHAPE, CPU, 4, fixed).cost.peak_bytes / 2**30
  slices = plan({'a': WIDE, 'b': WIDE}, 8, gib=need * 1.01, choices=fixed)
  assert all(len(s.devices) == 4 for s in slices.values())
  assert 'on 2 ' in slices['a'].reason
  assert 'lacks' in slices['a'].reason


def test_the_error_for_too_little_memory_has_the_amounts():
  fixed = dataclasses.replace(SPLIT, micro_rows=64, sample_batch=64)
  found = layouts.best(WIDE, SHAPE, CPU, 4, fixed)
  needs = found.cost.peak_bytes / 2**30
  phases = found.cost.phases
  largest = max(phases, key=lambda name: phases[name].bytes)
  with pytest.raises(checks.InputError) as error:
    plan({'a': WIDE}, 4, gib=needs - 0.01, choices=fixed)
  text = str(error.value)
  assert (
    f'policy a does not fit: on 4 devices {largest} needs {needs:.2f}' in text
  )
  assert '0.01 GiB more than plans use of' in text


@pytest.mark.parametrize(
  ('choices', 'flag'),
  [
    ({'micro_rows': 64}, 'train.micro_rows'),
    ({'micro_rows': 64, 'sample_batch': 64}, 'train.micro_rows'),
    ({'data': 4}, 'mwra.data'),
    ({'data': 1, 'tensor': 1}, 'mwra.tensor'),
    ({}, 'train.logit_chunk'),
  ],
)
def test_the_error_has_a_change_with_which_it_fits(choices, flag):
  model = examples.model(
    d_ff=2048, num_layers=8, vocab_size=8192, remat='block', attention='splash'
  )
  shape = examples.round_shape(
    prompts=64, prompt_tokens=512, response_tokens=512, logit_chunk=4096
  )
  fixed = layouts.Choices(**choices)
  tiny = dataclasses.replace(CPU, hbm_bytes=1)
  least = layouts.best(model, shape, tiny, 4, fixed).bytes * 0.98 / 2**30
  with pytest.raises(checks.InputError) as error:
    plan({'a': model}, 4, shape=shape, gib=least, choices=fixed)
  text = str(error.value)
  assert flag in text, text
  # With the change, it does fit.
  keys = {'mwra.data': 'data', 'mwra.tensor': 'tensor',
          'mwra.decode_tensor': 'decode_tensor',
          'train.micro_rows': 'micro_rows',
          'train.logit_chunk': 'logit_chunk',
          'sample.batch': 'sample_batch'}  # fmt: skip
  changed = {
    keys[key]: int(value)
    for key, value in re.findall(r'--config\.([a-z_.]+)=(\d+)', text)
  }
  chunk = changed.pop('logit_chunk', 4096)
  now = dataclasses.replace(fixed, **changed)
  shape = dataclasses.replace(shape, logit_chunk=chunk)
  plan({'a': model}, 4, shape=shape, gib=least, choices=now)


def test_the_error_may_have_more_devices_or_adapters():
  # Nothing helps that would make activations smaller.
  shape = examples.round_shape(
    prompts=4, prompt_tokens=4, response_tokens=4, logit_chunk=4
  )
  for kv_heads, change in (
    (2, 'It fits on 8 devices'),
    (1, 'It fits with --config.policies.a.lora.rank=16'),
  ):
    model = examples.model(
      d_ff=4096,
      num_kv_heads=kv_heads,
      remat='auto',
      dtype='bfloat16',
      param_dtype='bfloat16',
    )
    tiny = dataclasses.replace(CPU, hbm_bytes=1)
    least = layouts.best(model, shape, tiny, 4).bytes * 0.9 / 2**30
    with pytest.raises(checks.InputError) as error:
      plan({'a': model}, 4, shape, gib=least, choices=layouts.Choices())
    assert change in str(error.value)


def test_the_error_names_what_the_tensor_axis_does_not_divide():
  with pytest.raises(checks.InputError, match='num_kv_heads = 2'):
    plan({'a': examples.model()}, 8, choices=layouts.Choices(tensor=4))
  odd = examples.model(d_ff=65, vocab_size=49)
  with pytest.raises(checks.InputError, match='d_ff = 65, vocab_size = 49'):
    plan({'a': odd}, 8, choices=layouts.Choices(decode_tensor=2))


def test_the_error_names_what_the_data_and_fsdp_axes_do_not_divide():
  choices = dataclasses.replace(SPLIT, data=2)
  odd = dataclasses.replace(SHAPE, prompts=7)
  with pytest.raises(checks.InputError, match=r'train\.samples = 7'):
    plan({'a': examples.model()}, 2, shape=odd, choices=choices)
  choices = dataclasses.replace(choices, micro_rows=7)
  with pytest.raises(checks.InputError, match=r'train\.micro_rows = 7'):
    plan({'a': examples.model()}, 2, choices=choices)


def test_an_explanation_names_bounds_and_the_smaller_slice():
  slices = plan({'a': examples.model()}, 4)
  text = planner.explain(slices, fleets.named('cpu:4'))['a']
  assert text.startswith('devices 0 to 3; on 2 a round takes')
  assert 'own gradient is ' in text
  assert 'bounded by compute' in text
