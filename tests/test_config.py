import math
import pathlib
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from configs import base
from mrl_jax import checks
from mrl_jax import config
from mrl_jax import config_keys
from tests import examples

KEYS = config_keys.KEYS


def test_flat_names_every_key():
  flat = config.flat(examples.run_config())
  assert flat['train.rounds'] == 3
  assert flat['policies.llama.model.family'] == 'llama'
  assert flat['data.difficulties'] == [3]


def test_what_a_run_does_tells_configs_apart():
  same, moved, other = (
    config.without_places(config.flat(examples.run_config(**changes)))
    for changes in (
      {},
      {
        'cache_dir': 'elsewhere',
        'see.listen': '127.0.0.1:1',
        'see.tls.key': 'key.pem',
        'policies.gemma.address': '127.0.0.1:2',
      },
      {'policies.gemma.journal': 'runs/other'},
    )
  )
  assert same == moved != other


def test_processes_of_one_run_may_differ_in_where_they_are_and_how_they_wait():
  here, there, other = (
    config.of_all_processes(config.flat(examples.run_config(**changes)))
    for changes in (
      {},
      {
        'see.wait_s': 9.0,
        'mwra.emulated_devices': 4,
        'checkpoint.keep': 1,
        'reward.processes': 3,
      },
      {'seed': 1},
    )
  )
  assert here == there != other


def test_the_default_is_sound():
  config.check(examples.run_config())
  config.check(examples.run_config(**{'see.capacity_records': 48}))
  config.check(examples.run_config(**{'sample.stop': ('\n\n', 'é')}))
  chat = {'template': 'chat', 'system': 'Hi', 'thinking': 'off'}
  chat = {f'policies.llama.{key}': value for key, value in chat.items()}
  for path in ('policies.llama.path', 'policies.llama.tokenizer.path'):
    config.check(examples.run_config(**chat, **{path: 'folder'}))


def test_digests_do_not_depend_on_the_order_of_keys():
  assert config.digest({'a': 1, 'b': 2}) == config.digest({'b': 2, 'a': 1})


BOUNDED = [
  n for n, k in KEYS.items() if (k.least, k.most, k.above) != (None,) * 3
]
CHOOSING = [name for name, key in KEYS.items() if key.choices]


def with_key(name, value):
  """The default job with another value of a key of the table."""
  changes = {'reward.functions': ('exact', 'overlong')}
  changes['reward.weights'] = (1.0, 1.0)
  changes[name.replace('NAME', 'llama')] = value
  return examples.run_config(**changes)


def outside(key):
  """Values next to the bounds of a key, of its type."""
  whole = isinstance(key.default, int)
  if key.least is not None:
    yield key.least - (1 if whole else 1e-3), 'at least'
  if key.most is not None:
    yield key.most + (1 if whole else 1e-3), 'at most'
  if key.above is not None:
    yield type(key.default)(key.above), 'above'


def test_the_default_job_has_all_keys_and_no_others():
  names = config.flat(base.get_config())
  patterns = {
    name.replace('.llama', '.NAME').replace('.gemma', '.NAME') for name in names
  }
  assert patterns == {*KEYS}


@pytest.mark.parametrize('name', BOUNDED)
def test_every_bound_is_checked(name):
  key = KEYS[name]
  for value, what in outside(key):
    with pytest.raises(checks.InputError) as error:
      config.check(with_key(name, value))
    assert name.replace('NAME', 'llama') in str(error.value)
    assert what in str(error.value)
  if isinstance(key.default, float):
    with pytest.raises(checks.InputError, match='must be a finite number'):
      config.check(with_key(name, math.nan))


@pytest.mark.parametrize('name', CHOOSING)
def test_every_choice_is_checked(name):
  key, choices = KEYS[name], config.choices(KEYS[name])
  several = isinstance(key.default, tuple)
  wrong = next(filter(None, choices)) + 'x'
  with pytest.raises(checks.InputError, match='Did you mean'):
    config.check(with_key(name, (wrong,) if several else wrong))
  defaults = key.default if several else [key.default]
  assert {*defaults} - {''} <= {*choices}


@pytest.mark.parametrize('name', KEYS)
def test_every_key_is_explained_in_a_line(name):
  about = KEYS[name].about
  assert about.endswith('.')
  assert len(about) < 80


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train.prompts': 9}, 'train.mini_batches = 2 does not divide'),
    ({'reward.weights': (math.nan,)}, 'must be a finite number'),
    ({'reward.weights': (1.0, 2.0)}, 'give a weight for each function'),
    ({'reward.functions': (), 'reward.weights': ()}, 'and at least one'),
    ({'method.dual_clip': 0.5}, 'it must be above 1, or 0 for none'),
    ({'policies': {}}, 'policies is empty'),
    ({'data.families': ()}, 'data.families is empty'),
    ({'reward.marker': ''}, 'reward.marker is empty'),
    ({'sample.stop': ('\n\n', '')}, "sample.stop has ''; it must have strings"),
    ({'sample.stop': (1,)}, 'sample.stop has 1; it must'),
    ({'sample.stop': ('a\ud800',)}, r"sample.stop has 'a\\ud800'; it must"),
    ({'policies.llama.warm_start_families': ()}, 'llama.warm_start_families'),
    ({'policies.llama.lora.rank': 2}, 'give policies.llama.path'),
    # 32 rollouts of 2000 tokens of 17 bytes, and twice a text of 16 bytes each.
    ({'sample.max_tokens': 2000}, 'may have 48 records and 4 MiB'),
    # 8 prompts: 4 samples, statistics and an outcome of each.
    ({'see.capacity_records': 47}, 'see.capacity_records = 47'),
    (
      {
        'policies.llama.address': 'x:1',
        'see.listen': 'x:2',
        'see.capacity_records': 95,
      },
      'may have 96 records',
    ),
    (
      {
        'sample.max_tokens': 32_000,
        'see.max_message_mib': 1,
        'see.capacity_mib': 0,
      },
      'tokens = 32000 needs 2',
    ),
    ({'reward.overlong_tokens': 3}, "does not have 'overlong'"),
    (
      {
        'reward.functions': ('overlong',),
        'reward.overlong_tokens': 13,
      },
      'is more than sample.max_tokens = 12',
    ),
    (
      {
        'train.optimizer.state_dtype': 'bfloat16',
        'train.optimizer.b2': 0.999,
      },
      'train.optimizer.b2 = 0.999: a bfloat16 mean .* would stand still',
    ),
    ({'policies.llama.template': 'x'}, "llama.template = 'x' must have"),
    ({'policies.llama.template': '{prompt}{prompt}'}, '"{prompt}" once, or'),
    ({'policies.llama.template': 'chat'}, 'give policies.llama.tokenizer.path'),
    ({'policies.llama.system': 'Hi'}, "system = 'Hi' is for a chat template"),
    ({'policies.llama.thinking': 'on'}, "'on' is for a chat template"),
    (
      {'policies.gemma.listens_to': ('lama',)},
      r"unknown policy in policies\.gemma\.listens_to 'lama'\. "
      "Did you mean 'llama'",
    ),
    (
      {'policies.gemma.listens_to': ('gemma',)},
      r"policies\.gemma\.listens_to = \('gemma',\) has gemma itself",
    ),
    (
      {'policies.gemma.listens_to': ('*', 'llama')},
      r"gemma\.listens_to = \('\*', 'llama'\) has names beside '\*'",
    ),
    (
      {'policies.llama.address': 'x:1', 'policies.llama.journal': 'runs/x'},
      r'policies\.llama has an address and a journal',
    ),
    (
      {'policies.llama.address': 'x:1', 'policies.gemma.journal': 'runs/x'},
      'at least one must be trained here',
    ),
  ],
)
def test_what_cannot_be_is_told_with_its_key(changes, message):
  with pytest.raises(checks.InputError, match=message):
    config.check(examples.run_config(**{'see.capacity_mib': 1, **changes}))


def test_a_key_that_nothing_reads_is_refused():
  some = examples.run_config()
  with some.unlocked():
    some.train.round = 3
  with pytest.raises(checks.InputError, match=r"Did you mean 'train\.rounds'"):
    config.check(some)


def of_three(**listed):
  some = examples.run_config(**{'see.capacity_records': 48})
  with some.unlocked():
    some.policies.third = some.policies.llama.copy_and_resolve_references()
  for name, names in listed.items():
    some.policies[name].listens_to = names
  return some


@pytest.mark.parametrize(
  ('listed', 'expected'),
  [
    ({}, {'gemma': ['llama', 'third'], 'llama': ['gemma', 'third'],
          'third': ['gemma', 'llama']}),
    ({'gemma': (), 'llama': ('gemma',), 'third': ('gemma', 'gemma')},
     {'gemma': [], 'llama': ['gemma'], 'third': ['gemma']}),
    ({'gemma': ('third', 'llama'), 'llama': (), 'third': ()},
     {'gemma': ['llama', 'third'], 'llama': [], 'third': []}),
  ],
)  # fmt: skip
def test_who_listens_to_whom(listed, expected):
  assert config.listens_to(of_three(**listed).policies) == expected


@pytest.mark.parametrize(
  ('flag', 'listed'),
  [
    ("('llama',)", ('llama',)),
    ('()', ()),
    ("('*',)", ('*',)),
  ],
)
def test_who_listens_is_a_flag(monkeypatch, flag, listed):
  values = flags.FlagValues()
  argv = [
    'tpu_pod.py',
    f'--config={pathlib.Path(base.__file__).with_name("prp.py")}',
    f'--config.policies.gemma.listens_to={flag}',
  ]
  monkeypatch.setattr(sys, 'argv', argv)  # There, too, it looks for keys.
  holder = config_flags.DEFINE_config_file(
    'config', lock_config=True, flag_values=values
  )
  values(argv)
  assert holder.value.policies.gemma.listens_to == listed
  config.check(holder.value)


def test_capacities_are_those_of_each_peer():
  config.check(of_three(gemma=(), llama=('gemma',)))
  assert config.capacity(of_three()).records == 48
  assert config.capacity(examples.run_config()) == (2**16, 2**28)
  large = examples.run_config(**{'train.prompts': 2**14})
  assert config.capacity(large).records == 2**14 * (4 + 2)


def test_the_spool_holds_what_comes_between_two_checkpoints():
  some = examples.run_config(**{'checkpoint.every': 2})
  of_a_round = config.round_size(some)
  # The checkpoint before the newest is not forgotten; two policies may get it.
  assert 2 * (3 + 2) * of_a_round.bytes < config.spool_bytes(some) < 2**24
  ten, twenty = (
    config.spool_bytes(
      examples.run_config(**{'train.rounds': 99, 'checkpoint.every': every})
    )
    for every in (10, 20)
  )
  assert ten / twenty == (2 * 10 + 2) / (2 * 20 + 2)
  some.see.spool_mib = 3
  assert config.spool_bytes(some) == 3 * 2**20


def test_a_policy_has_a_name_that_a_folder_can_have():
  some = examples.run_config()
  with some.unlocked():
    some.policies['a/b'] = some.policies.llama
  with pytest.raises(checks.InputError, match="called 'a/b'"):
    config.check(some)
