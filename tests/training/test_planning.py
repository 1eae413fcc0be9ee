"""Plans that are made without data, weights or network."""

import types

import jax
import pytest

from mrl_jax import algorithms
from mrl_jax import hugging_face
from mrl_jax.models import public
from mrl_jax.mwra import sizes
from mrl_jax.training import planning
from tests import examples
from tests import pretrained


def test_prompts_are_as_long_as_the_config_allows():
  config = examples.run_config(**{'sample.max_prompt_tokens': 61})
  config.policies.gemma.address = 'host:1'
  assert planning.without_data(config) == {'llama': (64, 384)}


def test_a_folder_goes_before_the_shipped_config_and_this_before_the_hub(
  tmp_path, monkeypatch
):
  path = 'Qwen/Qwen3-0.6B'
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(
    hugging_face, '_load', lambda *_: pytest.fail('asked the hub')
  )
  shipped = planning.load_config(path)
  assert shipped['hidden_size'] == public.CONFIGS[path]['hidden_size']
  assert shipped['hidden_act'] == 'silu'  # The default of its family.
  monkeypatch.undo()
  monkeypatch.chdir(tmp_path)
  pretrained.write(path, 'qwen')
  assert planning.load_config(path)['hidden_size'] != shipped['hidden_size']


def test_each_policy_has_what_the_plan_chose_for_it_and_the_run_its_config():
  config = examples.run_config(
    **{'train.micro_rows': 64, 'sample.batch': 4, 'train.prompts': 32}
  )
  parts = [
    types.SimpleNamespace(
      layout=sizes.Layout((1, 1, 1), (1, 1, 1), rows, batch, 'none')
    )
    for rows, batch in ((16, 2), (8, 1))
  ]
  chosen = [planning.settled(config, part) for part in parts]
  assert [c.train.micro_rows for c in chosen] == [16, 8]
  assert [c.sample.batch for c in chosen] == [2, 1]
  assert (config.train.micro_rows, config.sample.batch) == (64, 4)


def test_rows_of_peers_are_those_of_the_peers_that_a_policy_listens_to():
  config = examples.run_config(**{'train.prompts': 4, 'train.samples': 2})
  config.policies.third = config.policies.llama.copy_and_resolve_references()
  assert planning.peer_rows(config, 'llama') == 2 * 4 * 2
  config.method.max_peer_groups = 1
  assert planning.peer_rows(config, 'llama') == 4 * 2
  config.policies.llama.listens_to = ()
  assert planning.peer_rows(config, 'llama') == 0


@pytest.mark.parametrize(
  ('changes', 'is_scored'),
  [
    ({}, False),
    ({'method.correction.level': 'token'}, True),
    ({'train.old_logp': 'trainer'}, True),
  ],
)
def test_own_rows_are_scored_where_the_trainer_needs_it(changes, is_scored):
  config = examples.run_config(**changes)
  method, sizes = algorithms.build(config.method), planning.without_data(config)
  plan = planning.plan(config, method, sizes, jax.devices())
  assert ('own scoring' in plan['llama'].cost.phases) == is_scored
