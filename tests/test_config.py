import pytest

from mrl_jax import checks
from mrl_jax import config
from tests import examples


def test_flat_names_every_key():
  flat = config.flat(examples.run_config())
  assert flat['train.rounds'] == 3
  assert flat['policies.llama.model.family'] == 'llama'
  assert flat['data.difficulties'] == [3]


def test_what_a_run_does_tells_configs_apart():
  same, moved, other = (
    config.digest(config.what(examples.run_config(**changes)))
    for changes in ({}, {'cache_dir': 'elsewhere'}, {'seed': 1})
  )
  assert same == moved != other


def test_the_default_is_sound():
  config.check(examples.run_config())


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train.rounds': 0}, 'train.rounds = 0; it must be at least 1'),
    ({'train.prompts': 9}, 'train.mini_batches = 2 does not divide'),
    ({'train.micro_rows': 40}, 'train.row_multiple = 16 does not divide'),
    ({'sample.temperature': 0.0}, 'must be above 0'),
    ({'method.max_ratio': 0.0}, 'method.max_ratio = 0.0'),
    ({'sample.long_prompts': 'skpi'}, "Did you mean 'skip'"),
    ({'policies.llama.template': 'x'}, "policies.llama.template = 'x' lacks"),
    ({'see.capacity_records': 10}, 'see.capacity_records = 10'),
  ],
)
def test_what_cannot_be_is_told_with_its_key(changes, message):
  with pytest.raises(checks.InputError, match=message):
    config.check(examples.run_config(**changes))
