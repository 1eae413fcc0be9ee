import math
import pathlib
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from configs import base
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
    config.without_places(config.flat(examples.run_config(**changes)))
    for changes in (
      {},
      {
        'cache_dir': 'elsewhere',
        'see.listen': '127.0.0.1:1',
        'see.tls.key': 'key.pem',
        'see.peers.gemma.address': '127.0.0.1:2',
      },
      {'see.peers.gemma.journal': 'runs/other'},
    )
  )
  assert same == moved != other


def test_processes_of_one_run_may_differ_in_where_they_are_and_how_they_wait():
  here, there, other = (
    config.of_all_processes(config.flat(examples.run_config(**changes)))
    for changes in (
      {},
      {'see.wait_s': 9.0, 'mwra.emulated_devices': 4, 'checkpoint.keep': 1},
      {'seed': 1},
    )
  )
  assert here == there != other


def test_the_default_is_sound():
  config.check(examples.run_config())
  config.check(examples.run_config(**{'see.capacity_records': 40}))
  chat = {'template': 'chat', 'system': 'Hi', 'thinking': 'off'}
  chat = {f'policies.llama.{key}': value for key, value in chat.items()}
  for path in ('policies.llama.path', 'policies.llama.tokenizer.path'):
    config.check(examples.run_config(**chat, **{path: 'folder'}))


def test_digests_do_not_depend_on_the_order_of_keys():
  assert config.digest({'a': 1, 'b': 2}) == config.digest({'b': 2, 'a': 1})


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train.rounds': 0}, 'train.rounds = 0; it must be at least 1'),
    ({'train.prompts': 9}, 'train.mini_batches = 2 does not divide'),
    ({'train.micro_rows': 40}, 'train.row_multiple = 16 does not divide'),
    ({'sample.temperature': 0.0}, 'must be above 0'),
    ({'sample.temperature': math.inf}, 'must be a finite number'),
    ({'reward.weights.exact': math.nan}, 'must be a finite number'),
    ({'reward.timeout_s': 0.0}, r'reward\.timeout_s = 0.0; it must be above 0'),
    ({'seed': -1}, 'seed = -1; it must be at least 0'),
    ({'seed': 2**40}, 'it must be at most 4294967295'),
    ({'policies.gemma.model.num_layers': 0}, 'num_layers = 0'),
    ({'policies.gemma.tokenizer.vocab_size': -1}, 'vocab_size = -1'),
    ({'train.optimizer.b1': 1.0}, r'train\.optimizer\.b1 = 1.0'),
    ({'data.families': ()}, r'data\.families is empty'),
    ({'method.dual_clip': 0.5}, 'it must be above 1, or 0 for none'),
    ({'train.optimizer.clip_norm': 0.0}, r'clip_norm = 0.0; it must be above'),
    ({'reward.marker': ''}, r'reward\.marker is empty'),
    ({'policies.llama.warm_start_families': ()}, 'llama.warm_start_families'),
    # 40 records of 2000 tokens of 17 bytes are 1.3 MiB.
    ({'sample.max_tokens': 2000}, 'a round of the peers may have 1 MiB'),
    ({'method.prp.max_ratio': 0.0}, r'method\.prp\.max_ratio = 0.0'),
    (
      {'method.correction.cap': 0.0},
      r'correction\.cap = 0.0; it must be above',
    ),
    ({'method.luffy.gamma': 0.0}, r'luffy\.gamma = 0.0; it must be above 0'),
    ({'method.kl_weight': -0.1}, 'kl_weight = -0.1; it must be at least 0'),
    ({'method.interpolation': 1.5}, 'it must be at most 1'),
    ({'method.hacpo.window': 0}, r'hacpo\.window = 0; it must be at least 1'),
    ({'sample.refills': -1}, r'sample\.refills = -1; it must be at least 0'),
    ({'reward.overlong_tokens': 13}, 'is more than sample.max_tokens = 12'),
    ({'sample.long_prompts': 'skpi'}, "Did you mean 'skip'"),
    ({'policies.llama.template': 'x'}, "llama.template = 'x' must have"),
    ({'policies.llama.template': '{prompt}{prompt}'}, '"{prompt}" once, or'),
    ({'policies.llama.template': 'chat'}, 'give policies.llama.tokenizer.path'),
    ({'policies.llama.system': 'Hi'}, "system = 'Hi' is for a chat template"),
    ({'policies.llama.thinking': 'on'}, "'on' is for a chat template"),
    ({'policies.llama.thinking': 'of'}, "thinking 'of'. Did you mean 'off'"),
    ({'train.micro_rows': 0}, 'train.micro_rows = 0; it must be above 0'),
    # One peer, 8 prompts, 4 samples and the statistics of each group.
    ({'see.capacity_records': 39}, 'see.capacity_records = 39'),
    ({'see.journal': 'al'}, "unknown see.journal 'al'. Did you mean 'all'"),
    ({'see.max_message_mib': 0}, 'see.max_message_mib = 0'),
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
      {'see.peers.llama.address': 'x:1', 'see.peers.llama.journal': 'runs/x'},
      'see.peers.llama has an address and a journal',
    ),
    (
      {'see.peers.llama.address': 'x:1', 'see.peers.gemma.journal': 'runs/x'},
      'one at least must be trained here',
    ),
  ],
)
def test_what_cannot_be_is_told_with_its_key(changes, message):
  with pytest.raises(checks.InputError, match=message):
    config.check(examples.run_config(**{'see.capacity_mib': 1, **changes}))


def of_three(**listed):
  some = examples.run_config(**{'see.capacity_records': 40})
  with some.unlocked():
    some.policies.third = some.policies.llama.copy_and_resolve_references()
    some.see.peers.third = some.see.peers.llama
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


def test_a_queue_has_room_for_those_who_are_listened_to():
  # 8 prompts of 4 samples and their statistics are 40 records of a peer.
  config.check(of_three(gemma=(), llama=('gemma',), third=('gemma',)))
  config.check(of_three(gemma=(), llama=(), third=()))
  with pytest.raises(checks.InputError, match='may have 80 records'):
    config.check(of_three(gemma=(), llama=('gemma',)))


def test_a_policy_has_a_name_that_a_folder_can_have():
  some = examples.run_config()
  with some.unlocked():
    some.policies['a/b'] = some.policies.llama
  with pytest.raises(checks.InputError, match="called 'a/b'"):
    config.check(some)


def test_policies_and_peers_have_the_same_names():
  some = examples.run_config()
  with some.unlocked():
    some.policies.third = some.policies.llama
  with pytest.raises(checks.InputError, match=r'see\.peers lacks third'):
    config.check(some)
  with some.unlocked():
    some.see.peers.third = some.see.peers.llama
    del some.policies['third']
  with pytest.raises(checks.InputError, match=r"policy in see\.peers 'third'"):
    config.check(some)
