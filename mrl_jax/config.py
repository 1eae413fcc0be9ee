"""A run's config: how it is made of its keys, compared, and checked."""

from collections.abc import Iterable, Mapping
import hashlib
import json
import math
import operator
import pkgutil
import re
from typing import NamedTuple

import ml_collections
import numpy as np

from mrl_jax import checks
from mrl_jax import config_keys
from mrl_jax import records as records_lib

MESH_AXES = ('data', 'fsdp', 'tensor')  # Of every policy's slice.
CHAT = 'chat'  # The template that is the tokenizer's own.

# Between the bins in which log importance ratios are counted, in nats; the
# first and the last bin are open.
LOG_RATIO_EDGES = np.linspace(-1.95, 1.95, 40)

# Keys that say where files and hosts are, and when a run is saved: a resumed run
# may change them.
_PLACES = re.compile(
  r'cache_dir|reward\.processes|(checkpoint|cluster|profile)\.\w+|'
  r'see\.(listen|tls\.\w+)|'
  r'policies\.\w+\.address'
)
# Keys in which the processes of one run may differ.
_OF_PROCESS = re.compile(
  r'cache_dir|reward\.processes|(see|mwra|checkpoint|cluster|profile)\..*|'
  r'policies\.\w+\.(address|journal)'
)
# A mean of squared gradients in bfloat16 has 8 bits: with a slower decay it
# stands still, because it should move by less than half of its last bit.
_MAX_BFLOAT16_B2 = 0.99
# Text of a token, in the estimate of a round: four times that of English.
_TEXT_BYTES = 16
# Rounds of a peer of another process that wait at most: it cannot publish a third
# before it has this process's second, unless nobody is waited for any more.
_ROUNDS_WAITING = 2
_ENCODABLE = re.compile(r'[^\ud800-\udfff]+')  # Text that has bytes in UTF-8.
_NAMED = re.compile(r'(?<=^policies\.)[^.]+')


def default() -> ml_collections.ConfigDict:
  """A config of all keys at their defaults, which has no policies yet."""
  keys = config_keys.KEYS.items()
  config = nested({k: key.default for k, key in keys if 'NAME' not in k})
  config.policies = {}
  return config


def policy() -> ml_collections.ConfigDict:
  """The config of a policy, all keys at their defaults."""
  return nested({k: key.default for k, key in config_keys.POLICY.items()})


def flat(config: ml_collections.ConfigDict, prefix: str = '') -> dict:
  """Flattens a config to {'train.rounds': 150, ...}, as JSON would have it."""
  items = {}
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      items |= flat(value, f'{prefix}{name}.')
    else:
      items[prefix + name] = list(value) if isinstance(value, tuple) else value
  return items


def nested(values: Mapping) -> ml_collections.ConfigDict:
  """Makes a config of flat values; the inverse of `flat`."""
  config = {}
  for key, value in values.items():
    *folders, name = key.split('.')
    part = config
    for folder in folders:
      part = part.setdefault(folder, {})
    part[name] = tuple(value) if isinstance(value, list) else value
  return ml_collections.ConfigDict(config)


def without_places(values: Mapping) -> dict:
  """The part of a flat config that decides what a run computes."""
  return {k: v for k, v in values.items() if not _PLACES.fullmatch(k)}


def of_all_processes(values: Mapping) -> dict:
  """The part of a flat config that all processes of a run must share."""
  return {k: v for k, v in values.items() if not _OF_PROCESS.fullmatch(k)}


def listens_to(policies: ml_collections.ConfigDict) -> dict[str, list[str]]:
  """The peers that each policy takes records from, in their order."""
  return {
    name: [
      n
      for n in policies
      if n != name and {n, config_keys.EVERYBODY} & {*policy.listens_to}
    ]
    for name, policy in policies.items()
  }


def trained_here(config: ml_collections.ConfigDict) -> list[str]:
  """The policies of this process; others have an address or a journal."""
  return [
    name
    for name, policy in config.policies.items()
    if not (policy.address or policy.journal)
  ]


def settle_devices(config: ml_collections.ConfigDict) -> int:
  """Sets how many devices a CPU is to emulate, and returns it."""
  one_each = max(1, len(trained_here(config)))
  config.mwra.emulated_devices = config.mwra.emulated_devices or one_each
  return config.mwra.emulated_devices


def digest(values) -> str:
  """Sixteen characters that are equal for equal JSON values."""
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(config: ml_collections.ConfigDict) -> None:
  """Checks every key, and keys against each other, before anything is built.

  Raises InputError, which names the key, its value and what it may be.
  """
  for name, value in flat(config).items():
    pattern = _NAMED.sub('NAME', name)
    checks.choose(pattern, config_keys.KEYS, 'key of the config')
    _check_value(name, value, config_keys.KEYS[pattern])
  require = checks.require
  require(bool(config.policies), 'policies is empty; a run needs at least one')
  for name, policy in config.policies.items():
    _check_policy(name, policy, config.warm_start.steps)
    _check_listens_to(name, policy.listens_to, config.policies)
  require(
    config.method.dual_clip == 0 or config.method.dual_clip > 1,
    f'method.dual_clip = {config.method.dual_clip}; it must be above 1, or 0 '
    'for none',
  )
  require(bool(config.data.families), 'data.families is empty')
  require(bool(config.reward.marker), 'reward.marker is empty')
  for string in config.sample.stop:
    require(
      isinstance(string, str) and bool(_ENCODABLE.fullmatch(string)),
      f'sample.stop has {string!r}; it must have strings of at least one '
      'character, without halves of surrogate pairs',
    )
  functions, weights = config.reward.functions, config.reward.weights
  require(
    len(functions) == len(weights) > 0,
    f'reward.functions = {functions} and reward.weights = {weights}; give a '
    'weight for each function, and at least one',
  )
  require(
    config.train.prompts % config.train.mini_batches == 0,
    f'train.mini_batches = {config.train.mini_batches} does not divide '
    f'train.prompts = {config.train.prompts}',
  )
  require(
    config.reward.overlong_tokens <= config.sample.max_tokens,
    f'reward.overlong_tokens = {config.reward.overlong_tokens} is more than '
    f'sample.max_tokens = {config.sample.max_tokens}',
  )
  require(
    config.reward.overlong_tokens == 0 or 'overlong' in functions,
    f'reward.overlong_tokens = {config.reward.overlong_tokens} has no effect: '
    f"reward.functions = {functions} does not have 'overlong'",
  )
  for phase in ('warm_start', 'train'):
    optimizer = config[phase].optimizer
    require(
      optimizer.state_dtype == 'float32' or optimizer.b2 <= _MAX_BFLOAT16_B2,
      f'{phase}.optimizer.b2 = {optimizer.b2}: a {optimizer.state_dtype} mean '
      f'of squared gradients would stand still. Give at most '
      f'{_MAX_BFLOAT16_B2}, or state_dtype = float32',
    )
  require(
    trained_here(config),
    'every policy has an address or a journal; at least one must be trained '
    'here',
  )
  _check_capacity(config)


def _check_value(name, value, key: config_keys.Key) -> None:
  if value == key.default:
    return
  for element in value if isinstance(value, list) else [value]:
    checks.require(
      not isinstance(element, float) or math.isfinite(element),
      f'{name} = {value}; it must be a finite number',
    )
    if key.choices:
      checks.choose(element, dict.fromkeys(choices(key)), name)
  for bound, fits, relation in (
    (key.least, operator.ge, 'at least'),
    (key.most, operator.le, 'at most'),
    (key.above, operator.gt, 'above'),
  ):
    checks.require(
      bound is None or fits(value, bound),
      f'{name} = {value}; it must be {relation} {bound}',
    )


def choices(key: config_keys.Key) -> Iterable[str]:
  """The values that a key may have; a table is imported to list its rows."""
  if isinstance(key.choices, str):
    return pkgutil.resolve_name(f'mrl_jax.{key.choices}')
  return key.choices


def _check_policy(name, policy, warm_start_steps):
  checks.require(
    name.isidentifier() and not name.startswith('_'),
    f'a policy is called {name!r}; folders and flags are named after it, so it '
    'must be letters, digits and underscores',
  )
  _check_template(f'policies.{name}', policy)
  checks.require(
    not (policy.address and policy.journal),
    f'policies.{name} has an address and a journal; give one of them',
  )
  checks.require(
    bool(policy.path) or not policy.lora.rank,
    f'policies.{name}.lora.rank = {policy.lora.rank}: adapters need a '
    f'pretrained model; give policies.{name}.path',
  )
  checks.require(
    bool(policy.warm_start_families) or not warm_start_steps,
    f'policies.{name}.warm_start_families is empty; with '
    '--config.warm_start.steps=0 there is no warm start',
  )


def _check_template(key, policy):
  template = f'{key}.template = {policy.template!r}'
  if policy.template == CHAT:
    checks.require(
      bool(policy.tokenizer.path or policy.path),
      f'{template} is the chat template of a Hugging Face folder; give '
      f'{key}.tokenizer.path or {key}.path',
    )
    return
  checks.require(
    policy.template.count('{prompt}') == 1,
    f'{template} must have "{{prompt}}" once, or be {CHAT!r}',
  )
  for field in ('system', 'thinking'):
    checks.require(
      not policy[field],
      f'{key}.{field} = {policy[field]!r} is for a chat template; give '
      f'{key}.template = {CHAT!r} with it, or write it into {template}',
    )


def _check_listens_to(name, listed, policies):
  key = f'policies.{name}.listens_to'
  everybody = config_keys.EVERYBODY
  checks.require(
    name not in listed,
    f'{key} = {listed} has {name} itself; a policy learns from its own '
    'rollouts in any case',
  )
  checks.require(
    everybody not in listed or len(listed) == 1,
    f"{key} = {listed} has names beside '{everybody}', which is all others; "
    'give one or the other',
  )
  others = {n: p for n, p in policies.items() if n != name}
  for peer in listed:
    if peer != everybody:
      checks.choose(peer, others, f'policy in {key}')


class Size(NamedTuple):
  """A number of records, and their bytes as `records.size` counts them."""

  records: int
  bytes: int

  def times(self, n: int) -> 'Size':
    return Size(n * self.records, n * self.bytes)


def round_size(config: ml_collections.ConfigDict) -> Size:
  """The most that one policy publishes in a round, of all kinds."""
  train, tokens = config.train, config.sample.max_tokens
  rollouts = train.prompts * train.samples
  texts = train.prompts * min(train.samples, records_lib.MAX_TEXTS)
  records = rollouts + 2 * train.prompts  # And statistics, and outcomes.
  return Size(
    records,
    records * records_lib.REST_BYTES
    + rollouts * tokens * (records_lib.TOKEN_BYTES + _TEXT_BYTES)
    + texts * tokens * _TEXT_BYTES,
  )


def capacity(config: ml_collections.ConfigDict) -> Size:
  """The most of a peer that waits in a queue.

  By default, small rounds get more room than they need: an absent peer finds
  what it missed.
  """
  see, needed = config.see, _needed(config)
  return Size(
    see.capacity_records or max(needed.records, 2**16),
    see.capacity_mib * 2**20 or max(needed.bytes, 2**28),
  )


def spool_bytes(config: ml_collections.ConfigDict) -> int:
  """The most that messages of a peer may take on disk.

  A checkpoint lets those go that the one before it holds. Every policy of this
  process may get its own.
  """
  see, size = config.see, round_size(config)
  rounds = min(2 * config.checkpoint.every, config.train.rounds)
  rounds += see.max_staleness + _ROUNDS_WAITING
  rounds *= len(trained_here(config))
  # Encoded, names and numbers take more than `records.REST_BYTES`.
  encoded = size.bytes + 2 * records_lib.REST_BYTES * size.records + 2**20
  return see.spool_mib * 2**20 or rounds * encoded


def _needed(config):
  """What waits at most: policies of one process publish in turn."""
  remote = any(policy.address for policy in config.policies.values())
  return round_size(config).times(_ROUNDS_WAITING if remote else 1)


def _check_capacity(config):
  """Queues must hold a peer's rounds, and messages a rollout."""
  see, needed, have = config.see, _needed(config), capacity(config)
  mib = math.ceil(needed.bytes / 2**20)
  checks.require(
    have.records >= needed.records and have.bytes >= needed.bytes,
    f'see.capacity_records = {see.capacity_records} and see.capacity_mib = '
    f'{see.capacity_mib}: rounds of a peer may have {needed.records} records '
    f'and {mib} MiB, and some would be lost; give as much, or 0',
  )
  largest = config.sample.max_tokens * (records_lib.TOKEN_BYTES + _TEXT_BYTES)
  mib = math.ceil((largest + 2**12) / 2**20)
  checks.require(
    see.max_message_mib >= mib,
    f'see.max_message_mib = {see.max_message_mib}; a rollout of '
    f'sample.max_tokens = {config.sample.max_tokens} needs {mib}',
  )
