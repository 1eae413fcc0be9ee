import dataclasses
import itertools
import logging
import types

import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import records
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.training import compiling
from mrl_jax.training import evaluation
from mrl_jax.training import planning
from mrl_jax.training import programs
from tests import examples
from tests import workers

# The functions that a policy runs in a round.
ROUND = {
  'admit',
  'decode',
  'empty_slots',
  'score',
  'gradient',
  'zeros',
  'apply',
}
PROMPTS, HELDOUT = 8, 10  # Of a round, and of an evaluation.


@pytest.fixture
def compiled(caplog):
  """Lists the names of functions that were compiled since it was last called."""
  caplog.set_level(logging.WARNING)

  def compiled():
    names = [
      record.args[0].removeprefix('jit(').removesuffix(')')
      for record in caplog.records
      if record.msg.startswith('Compiling')
    ]
    caplog.clear()
    return [name for name in names if name in ROUND]

  jax.config.update('jax_log_compiles', True)  # In all threads.
  yield compiled
  jax.config.update('jax_log_compiles', False)


@pytest.mark.parametrize(
  ('method', 'changes'),
  [
    # One sampler for evaluation, where rows end at different times, and training.
    ('prp', {'eval.samples': 2, 'sample.max_tokens': 60}),
    ('grpo', {'train.mini_batches': 2, 'sample.max_tokens': 80}),
  ],
)
def test_a_round_compiles_nothing_that_was_compiled_ahead(
  method, changes, compiled
):
  config = examples.run_config(
    **{
      'method.name': method,
      'train.prompts': PROMPTS,
      'train.samples': 2,
      'train.packed_tokens': 16,
      'train.micro_rows': 16,
      'eval.batch': PROMPTS,
      'eval.samples': 1,
      'sample.max_tokens': 6,
      **changes,
    }
  )
  method, shared = algorithms.build(config.method), workers.worker()
  packer = dataclasses.replace(
    shared.packer,
    train=config.train,
    lengths=dict.fromkeys(('own', 'peer'), config.sample.max_tokens),
  )
  worker = dataclasses.replace(
    shared,
    config=config,
    packer=packer,
    objectives=method.objectives(),
    rescores=config.train.mini_batches > 1,
  )
  worker.start_from()
  with compiling.ahead({'a': programs.ahead(worker, method, HELDOUT)}) as wait:
    wait()
  assert set(compiled()) == ROUND - (set() if worker.rescores else {'score'})
  prompts = [
    records.Prompt(id=f'p{i}', text='a' * (i % 3), answer='')
    for i in range(HELDOUT)
  ]
  key = jax.random.key(0)
  evaluation.evaluate({'a': worker}, prompts, config.eval, {'a': key}, rounds=0)
  groups = worker.sample(
    prompts[:PROMPTS],
    2,
    key,
    planning.density(config.sample),
    run='run',
    round=0,
  )
  own = [
    rows_lib.own_row(p, rollout, 1.0)
    for p, group in enumerate(groups)
    for rollout in group
  ]
  # Enough rows for micro-batches of both sizes.
  peer = own * 9 if 'peer' in worker.objectives else []
  batch = rows_lib.Batch(own=own * 9, peer=peer, order=range(PROMPTS))
  mini_batches = worker.pack(prompts, batch)
  sizes = {
    len(rows.tokens_BS)
    for rows in itertools.chain.from_iterable(mini_batches[0].values())
  }
  assert sizes == {*packer.sizes}
  worker.rescore(mini_batches)
  for statistics in worker.update(mini_batches):
    assert np.isfinite(jax.device_get(statistics['grad_norm']))
  assert compiled() == []


def test_an_error_of_compiling_is_raised_and_the_rest_left():
  def fail(x):
    raise ValueError('no such program')

  program = programs.Program(
    'fails', jax.jit(fail), (1,), workers.worker().spec.mesh
  )
  with (
    pytest.raises(ValueError, match='no such program'),
    compiling.ahead({'a': [program] * 3, 'b': []}) as wait,
  ):
    wait()


@pytest.mark.parametrize(
  ('platform', 'chips', 'kept'),
  [('tpu', (0, 1), True), ('tpu', (2, 3), False), ('cpu', (2, 3), True)],
)
def test_programs_are_kept_where_they_can_be_read_back(
  platform, chips, kept, monkeypatch, tmp_path
):
  def compile_something(x):
    return jax.jit(lambda x: x * chips[0] - len(platform))(x)

  slice = [types.SimpleNamespace(platform=platform, id=i) for i in range(4)]
  mesh = types.SimpleNamespace(devices=np.array([slice[i] for i in chips]))
  x, options = jax.numpy.ones(3), jax.config
  before = options.jax_compilation_cache_dir
  options.update('jax_compilation_cache_dir', str(tmp_path))
  options.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  compilation_cache.reset_cache()
  try:
    with monkeypatch.context() as patch:
      patch.setattr(jax, 'devices', lambda: slice)
      compiling.keep_if_sound([mesh])
    compile_something(x)
    assert bool([*tmp_path.iterdir()]) == kept
  finally:
    options.update('jax_enable_compilation_cache', True)
    options.update('jax_compilation_cache_dir', before)
    options.update('jax_persistent_cache_min_compile_time_secs', 0.1)
    compilation_cache.reset_cache()
