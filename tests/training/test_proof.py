"""Compiling what a policy runs, from shapes alone."""

import dataclasses
import sys
import types

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax.architecture import Lora
from mrl_jax.models import sharding
from mrl_jax.mwra import meshes
from mrl_jax.training import planning
from mrl_jax.training import programs as programs_lib
from mrl_jax.training import proof
from tests import examples

GIB = 2**30
SMALL = {
  'train.prompts': 16,
  'train.samples': 2,
  'train.mini_batches': 2,
  'train.micro_rows': 8,
  'train.packed_tokens': 8,
  'eval.batch': 4,
  'eval.samples': 2,
  'sample.batch': 6,
  'sample.max_prompt_tokens': 8,
  'sample.max_tokens': 4,
  'thl.max_tokens': 6,
}


def parts(**changes):
  """Config, method, sizes and plan of two small policies."""
  config = examples.run_config(**{**SMALL, **changes})
  for policy in config.policies.values():
    policy.model.num_layers = 1
  method = algorithms.build(config.method)
  sizes = planning.without_data(config)
  plan = planning.plan(config, method, sizes, jax.devices())
  return config, method, sizes, plan


def programs(lora=None, **changes):
  """The programs of one policy, by name."""
  config, method, sizes, plan = parts(**changes)
  name = 'llama'
  mesh = meshes.build(plan, jax.devices())[name]
  model = dataclasses.replace(plan[name].model, lora=lora)
  training = planning.training(config, method, model, mesh, sizes[name].context)
  peer_rows = planning.peer_rows(config, name)
  found = programs_lib.build(training, config, method, peer_rows)
  return {program.name: program for program in found}, training


def test_programs_have_the_largest_shapes_of_a_round():
  found, _ = programs(**{'method.name': 'prp', 'thl.max_tokens': 12})
  assert [*found] == [
    'own gradient', 'peer gradient', 'update', 'prefill', 'decoding'
  ]  # fmt: skip
  own, peer = (
    found[f'{part} gradient'].arguments[3] for part in ('own', 'peer')
  )
  # Of 8 + 4 and 8 + 12 tokens, in multiples of 8.
  assert own.tokens_BS.shape == (8, 16)
  assert peer.weight_BS.shape == (8, 24)
  assert found['own gradient'].micro_batches == 2
  # Six prompts are padded to eight, for four chips.
  assert found['prefill'].arguments[3].shape == (8, 8)
  assert found['prefill'].rows == found['decoding'].rows == 16
  ring_BKRE = found['decoding'].arguments[2].cache[0].k_BKRE
  assert ring_BKRE.shape[2] == 4


@pytest.mark.parametrize(
  ('changes', 'name', 'there'),
  [
    ({'method.name': 'grpo'}, 'peer gradient', False),
    ({'method.name': 'grpo'}, 'own scoring', False),
    ({'method.name': 'gspo'}, 'own scoring', True),
    ({'method.kl_weight': 0.1}, 'own scoring', True),
    ({'method.name': 'graft'}, 'peer scoring', True),
    ({'method.name': 'graft'}, 'own scoring', False),
    ({'method.name': 'graft', 'method.kl_weight': 0.1}, 'own scoring', True),
    ({'method.correction.level': 'token'}, 'own scoring', True),
  ],
)
def test_programs_are_those_that_the_method_runs(changes, name, there):
  found, _ = programs(**changes)
  assert (name in found) == there


def test_what_is_beside_a_program_is_what_it_does_not_take():
  """Beside a gradient: two moments and a reference, each like the parameters."""
  found, training = programs(**{'method.name': 'prp', 'method.kl_weight': 0.1})
  state = training.spec.abstract()
  params = programs_lib.chip_bytes(state.params)
  steps = programs_lib.chip_bytes(state.opt_state) - 2 * params
  assert 0 < steps < 20  # Counts of updates.
  beside = {
    n: (programs_lib.chip_bytes(p.beside) - steps) / params
    for n, p in found.items()
  }
  assert beside['own gradient'] == 3
  assert beside['peer gradient'] == 3
  assert beside['own scoring'] == 3
  update = found['update']
  assert programs_lib.chip_bytes(update.beside) == 0
  grads = update.arguments[1]
  assert programs_lib.chip_bytes(grads) == params


def test_adapters_keep_a_copy_of_the_base_for_sampling():
  lora = Lora(rank=2, alpha=4.0, target_modules=('q_proj',))
  found, training = programs(lora=lora)
  frozen = programs_lib.chip_bytes(found['own gradient'].arguments[2])
  copy = programs_lib.chip_bytes(found['decoding'].arguments[1])
  assert copy > 3 * frozen > 0  # Not sharded over four chips.
  for program in ('own gradient', 'update'):
    assert programs_lib.chip_bytes(found[program].beside) >= copy
  state = training.spec.abstract()
  beside = programs_lib.chip_bytes(found['decoding'].beside)
  assert beside == programs_lib.chip_bytes(state) + frozen


def test_xla_counts_the_arguments_that_the_shapes_have():
  found, training = programs(**{'method.name': 'prp'})
  state = programs_lib.chip_bytes(training.spec.abstract())
  params = programs_lib.chip_bytes(training.spec.abstract().params)
  update = proof.compile_program(found['update'])
  assert update.memory.arguments == state + params
  assert update.memory.aliased == state  # The update is in place.
  assert update.compile_seconds > 0


@pytest.mark.parametrize('time_share', [True, False])
def test_states_of_policies_that_take_turns_stay(monkeypatch, time_share):
  told = []
  monkeypatch.setattr(
    proof,
    'compile_program',
    lambda program: proof.Proof(
      program=program.name,
      rows=program.rows,
      micro_batches=1,
      lower_seconds=0,
      compile_seconds=0,
      beside=programs_lib.chip_bytes(program.beside),
    ),
  )
  config, method, sizes, plan = parts(**{'mwra.time_share': time_share})
  proofs = {}
  for name, result in proof.prove(
    config, method, sizes, plan, jax.devices(), told.append
  ):
    assert told[-1] == f'{name}: {result.program}'
    proofs.setdefault(name, []).append(result)
  assert len(told) == sum(map(len, proofs.values()))
  mesh = meshes.build(plan, jax.devices())['gemma']
  gemma = planning.training(config, method, plan['gemma'].model, mesh, 8)
  update = next(p for p in proofs['llama'] if p.program == 'update')
  state = programs_lib.chip_bytes(gemma.spec.abstract())
  assert update.beside == time_share * state


@pytest.mark.parametrize('name', ['own gradient', 'own scoring'])
def test_passes_over_rows_are_compiled_with_the_options_of_their_platform(
  monkeypatch, name
):
  monkeypatch.setattr(
    sharding, 'compiler_options', lambda mesh: {'xla_no_such_option': '1'}
  )
  found, _ = programs(**{'method.name': 'gspo'})
  with pytest.raises(jax.errors.JaxRuntimeError, match='xla_no_such_option'):
    proof.compile_program(found[name])


def test_only_tpu_has_options():
  def options(platform):
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=np.array([[device]]))
    return sharding.compiler_options(mesh)

  assert 'windowed_einsum' in str(options('tpu'))
  assert options('cpu') == options('gpu') == {}


REFUSALS = [
  (
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required '
    'for HLO temporaries (24.00G) exceeds available HBM (15.75G).\n  more',
    24.0,
    15.75,
  ),
  (
    'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 25.10G of '
    '15.75G hbm. Exceeded hbm capacity by 9.35G.',
    25.1,
    15.75,
  ),
  ('RESOURCE_EXHAUSTED: something else', None, None),
]


class Refused:
  """A program that XLA refuses."""

  def __init__(self, message):
    self.message = message

  def lower(self, *_):
    return self

  def compile(self):
    raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(('message', 'needed', 'limit'), REFUSALS)
def test_a_program_that_does_not_fit_is_a_result(message, needed, limit):
  mesh = jax.make_mesh((1,), ('x',))
  program = programs_lib.Program('own gradient', Refused(message), (), mesh)
  result = proof.compile_program(program)
  assert not result.fits
  assert result.refusal == result.why == message.splitlines()[0]
  assert (result.needed, result.limit) == (
    needed and needed * GIB,
    limit and limit * GIB,
  )


@pytest.mark.slow
def test_chips_of_several_hosts_are_compiled_for_as_a_slice_of_their_own():
  """XLA cannot address them within the slice; neighbours stay neighbours."""
  pytest.importorskip('libtpu', reason="pip install -e '.[tpu]'")
  every = proof.devices('v5e:4x4')
  part = types.SimpleNamespace(devices=(4, 5, 6, 7, 12, 13, 14, 15))
  alone = proof._alone('v5e:4x4', part, every)
  assert sorted(device.id for device in alone.values()) == [*range(8)]
  first = every[4].coords
  for i, device in alone.items():
    offset = [x - low for x, low in zip(every[i].coords, first, strict=True)]
    assert device.coords == offset
  # A part of a host may be no slice that there is.
  part.devices = (3,)
  assert proof._alone('v5e:4x4', part, every)[3].platform == 'tpu'


@pytest.mark.slow
def test_xla_names_what_a_chip_lacks():
  pytest.importorskip('libtpu', reason="pip install -e '.[tpu]'")
  mesh = Mesh(np.array(proof.devices('v5e:2x2')), ('x',))
  place = sharding.replicated(mesh)
  x = jax.ShapeDtypeStruct((3 * GIB,), np.float32, sharding=place)
  program = programs_lib.Program('x', jax.jit(lambda x: x + 1), (x,), mesh)
  result = proof.compile_program(program)
  assert not result.fits
  assert 'exceeds' in result.why
  # The argument and the result.
  assert result.needed == 2 * 12 * GIB
  assert result.limit == 15.75 * GIB


def test_the_peak_is_a_sum_where_the_compiler_reports_no_temporaries():
  stats = types.SimpleNamespace(
    argument_size_in_bytes=5,
    output_size_in_bytes=3,
    alias_size_in_bytes=2,
    temp_size_in_bytes=7,
    peak_memory_in_bytes=6,
  )
  assert proof._memory(stats, on_tpu=True).peak == 6
  assert proof._memory(stats, on_tpu=False).peak == 5 + 3 - 2 + 7


def test_other_errors_of_the_compiler_are_errors():
  mesh = jax.make_mesh((1,), ('x',))
  program = programs_lib.Program('update', Refused('INTERNAL: a bug'), (), mesh)
  with pytest.raises(jax.errors.JaxRuntimeError, match='a bug'):
    proof.compile_program(program)


def test_a_program_must_fit_beside_what_is_resident():
  memory = proof.Memory(
    arguments=4 * GIB,
    outputs=3 * GIB,
    aliased=2 * GIB,
    temporaries=9 * GIB,  # Not all at once.
    peak=6 * GIB,
  )
  fits = proof.Proof(
    program='x',
    rows=1,
    micro_batches=1,
    lower_seconds=0,
    compile_seconds=0,
    beside=2 * GIB,
    memory=memory,
    capacity=8 * GIB,
  )
  assert fits.fits
  short = dataclasses.replace(fits, beside=3 * GIB)
  assert not short.fits
  assert 'lacks 1.00 GiB' in short.why


def test_a_slice_needs_the_compiler(monkeypatch):
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  with pytest.raises(checks.InputError, match=r"pip install -e '\.\[tpu\]'"):
    proof.devices('v5e:2x2')


def test_a_policy_alone_on_a_slice_must_give_work_to_every_host(monkeypatch):
  config, _, _, _ = parts()

  def on(hosts):
    fake = [
      types.SimpleNamespace(
        **{'platform': 'cpu', 'device_kind': 'cpu', 'process_index': i},
        memory_stats=lambda: None,
      )
      for i in range(hosts)
    ]
    monkeypatch.setattr(proof, 'devices', lambda _: fake)
    return proof.alone(config, 'gemma', 'v5e:2x4')

  assert on(1).devices == (0,)
  assert not config.policies.llama.address  # Of a copy.
  plan = planning.plan

  def on_the_first(*arguments):
    return {
      name: dataclasses.replace(part, devices=(0,))
      for name, part in plan(*arguments).items()
    }

  monkeypatch.setattr(planning, 'plan', on_the_first)
  with pytest.raises(
    checks.InputError, match='gemma on v5e:2x4: it would train'
  ):
    on(2)
