import types

import pytest

from mrl_jax.mwra import planner
from mrl_jax.training import overview
from tests import examples


@pytest.fixture
def job():
  """As much of a job as an overview is of, with tensor parallel policies."""
  config = examples.run_config()
  config.policies.gemma.path = 'hub/gemma'
  models = {name: examples.model() for name in config.policies}
  config.see.peers.gemma.address = 'host:1'
  return types.SimpleNamespace(
    config=config,
    plan=planner.plan(
      models,
      dict.fromkeys(models, examples.round_shape()),
      8,
      divides=32,
      tensor=2,
    ),
    inputs=types.SimpleNamespace(skipped=3),
  )


def test_it_tells_which_policy_is_where(job):
  told = overview.of_job(job)
  assert told['devices'] == '8 x cpu'
  assert told['elsewhere'] == {'gemma': 'at host:1'}
  assert told['prompts_skipped'] == 3
  gemma, llama = told['policies']['gemma'], told['policies']['llama']
  assert sorted(gemma['devices'] + llama['devices']) == [*range(8)]
  assert llama['mesh'] == {'data': 1, 'fsdp': 2, 'tensor': 2}


def test_memory_is_that_of_each_device(job):
  llama = overview.of_job(job)['policies']['llama']
  planned = job.plan['llama'].cost
  assert llama['memory_bytes'] == planned.peak_bytes(2) / 4


def test_it_tells_what_a_policy_is(job):
  told = overview.of_job(job)['policies']
  names = {name: (p['model'], p['tokenizer']) for name, p in told.items()}
  assert names == {
    'gemma': ('hub/gemma', 'hub/gemma'),
    'llama': ('llama', 'byte_level'),
  }
  assert told['llama']['parameters'] == examples.model().num_params
