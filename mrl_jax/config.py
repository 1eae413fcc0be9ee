"""A run's config: its keys, its digest, and what they may be."""

from collections.abc import Mapping
import hashlib
import json
import math
import re

import ml_collections

from mrl_jax import checks
from mrl_jax import records as records_lib

MESH_AXES = ('data', 'fsdp', 'tensor')  # Of every policy's slice.

# Keys that say where things are, not what is done.
_PLACES = re.compile(r'cache_dir|see\.(listen|tls\.\w+|peers\.\w+\.address)')
# Keys in which the processes of one run may differ.
_OF_PROCESS = re.compile(r'cache_dir|(see|mwra|checkpoint)\..*')
EVERYBODY = '*'  # All other policies, where policies are listed.
JOURNALS = ('published', 'all', 'none')
CHAT = 'chat'  # The template that is the tokenizer's own.
THINKING = {'': None, 'on': True, 'off': False}


def flat(config: ml_collections.ConfigDict, prefix: str = '') -> dict:
  """{'train.rounds': 150, ...}."""
  items = {}
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      items |= flat(value, f'{prefix}{name}.')
    else:
      items[prefix + name] = list(value) if isinstance(value, tuple) else value
  return items


def nested(values: Mapping) -> ml_collections.ConfigDict:
  """The config that `flat` made `values` of."""
  config = ml_collections.ConfigDict()
  for key, value in values.items():
    *folders, name = key.split('.')
    part = config
    for folder in folders:
      if folder not in part:
        part[folder] = ml_collections.ConfigDict()
      part = part[folder]
    part[name] = tuple(value) if isinstance(value, list) else value
  return config


def without_places(values: Mapping) -> dict:
  """The part of `flat` that decides what a run does."""
  return {k: v for k, v in values.items() if not _PLACES.fullmatch(k)}


def of_all_processes(values: Mapping) -> dict:
  """The part of `flat` that the processes of one run have in common."""
  return {k: v for k, v in values.items() if not _OF_PROCESS.fullmatch(k)}


def listens_to(policies: ml_collections.ConfigDict) -> dict[str, list[str]]:
  """The policies that each policy listens to, in their order."""
  listed = {name: policy.listens_to for name, policy in policies.items()}
  return {
    name: [
      n for n in policies if n != name and (n in some or EVERYBODY in some)
    ]
    for name, some in listed.items()
  }


def digest(values) -> str:
  """Sixteen characters that are equal for equal JSON values."""
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses values that cannot be, before anything is built of them.

  Raises:
    InputError: names the key, its value and what it may be.
  """
  for name, value in flat(config).items():
    _check_value(name, value)
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
  checks.choose(
    config.sample.long_prompts,
    dict.fromkeys(('skip', 'error')),
    'sample.long_prompts',
  )
  require(
    config.train.prompts % config.train.mini_batches == 0,
    f'train.mini_batches = {config.train.mini_batches} does not divide '
    f'train.prompts = {config.train.prompts}',
  )
  require(
    config.train.micro_rows % config.train.row_multiple == 0,
    f'train.row_multiple = {config.train.row_multiple} does not divide '
    f'train.micro_rows = {config.train.micro_rows}',
  )
  require(
    config.reward.overlong_tokens <= config.sample.max_tokens,
    f'reward.overlong_tokens = {config.reward.overlong_tokens} is more than '
    f'sample.max_tokens = {config.sample.max_tokens}',
  )
  _check_exchange(config)


def _check_value(name, value):
  least, most = _RANGES.get(
    re.sub(r'^policies\.[^.]+', 'policies.NAME', name), (None, None)
  )
  checks.require(
    not isinstance(value, float) or math.isfinite(value),
    f'{name} = {value}; it must be a finite number',
  )
  checks.require(
    least is None or value >= least,
    f'{name} = {value}; it must be at least {least}',
  )
  checks.require(
    most is None or value <= most,
    f'{name} = {value}; it must be at most {most}',
  )
  checks.require(
    name not in _POSITIVE or value > 0, f'{name} = {value}; it must be above 0'
  )


def _check_policy(name, policy, warm_start_steps):
  checks.require(
    name.isidentifier() and not name.startswith('_'),
    f'a policy is called {name!r}; folders and flags are named after it, so it '
    'must be letters, digits and underscores',
  )
  _check_template(f'policies.{name}', policy)
  checks.require(
    bool(policy.path) or not policy.lora.rank,
    f'policies.{name}.lora.rank = {policy.lora.rank} adapts a model that is '
    f'there; give its policies.{name}.path',
  )
  checks.require(
    bool(policy.warm_start_families) or not warm_start_steps,
    f'policies.{name}.warm_start_families is empty; with '
    '--config.warm_start.steps=0 there is no warm start',
  )


def _check_template(key, policy):
  template = f'{key}.template = {policy.template!r}'
  checks.choose(policy.thinking, THINKING, f'{key}.thinking')
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
  others = {n: p for n, p in policies.items() if n != name}
  checks.require(
    name not in listed,
    f'{key} = {listed} has {name} itself; a policy learns from its own '
    'rollouts in any case',
  )
  checks.require(
    EVERYBODY not in listed or len(listed) == 1,
    f"{key} = {listed} has names beside '{EVERYBODY}', which is all others; "
    'give one or the other',
  )
  for peer in listed:
    if peer != EVERYBODY:
      checks.choose(peer, others, f'policy in {key}')


def _check_exchange(config):
  _check_capacity(config)
  checks.choose(config.see.journal, dict.fromkeys(JOURNALS), 'see.journal')
  missing = {*config.policies} - {*config.see.peers}
  checks.require(
    not missing,
    f'see.peers lacks {", ".join(sorted(missing))}; every policy has an entry '
    'there, with an empty address and journal if it is trained here',
  )
  for name, peer in config.see.peers.items():
    checks.choose(name, config.policies, 'policy in see.peers')
    checks.require(
      not (peer.address and peer.journal),
      f'see.peers.{name} has an address and a journal; give one of them',
    )
  checks.require(
    any(not (p.address or p.journal) for p in config.see.peers.values()),
    'see.peers gives every policy an address or a journal; one at least must '
    'be trained here',
  )


def _check_capacity(config):
  """A queue has room for at least the arrays of a round of all peers."""
  peers = max(map(len, listens_to(config.policies).values()))
  records = peers * config.train.prompts * (config.train.samples + 1)
  size = (
    records_lib.TOKEN_BYTES * config.sample.max_tokens + records_lib.REST_BYTES
  )
  mib = records * size / 2**20
  checks.require(
    config.see.capacity_records >= records,
    f'see.capacity_records = {config.see.capacity_records}; a round of the '
    f'peers may have {records} records, and publishers would wait',
  )
  checks.require(
    config.see.capacity_mib >= mib,
    f'see.capacity_mib = {config.see.capacity_mib}; a round of the peers may '
    f'have {mib:.0f} MiB, and publishers would wait',
  )


_POSITIVE = (
  'reward.timeout_s',
  'sample.temperature',
  'method.correction.cap',
  'method.prp.max_ratio',
  'method.luffy.gamma',
  'train.micro_rows',
  'train.optimizer.clip_norm',
  'warm_start.optimizer.clip_norm',
)
# The least and the most that a value may be; None is no bound.
_RANGES = {
  'seed': (0, 2**32 - 1),
  'method.clip_low': (0, 1),
  'method.clip_high': (0, None),
  'method.dual_clip': (0, None),
  'method.interpolation': (0, 1),
  'method.max_peer_groups': (0, None),
  'method.kl_weight': (0, None),
  'method.entropy_weight': (0, None),
  'method.sgt.weight': (0, None),
  'method.hacpo.window': (1, None),
  'method.hacpo.delta': (0, 1),
  'method.hacpo.delta_step': (0, None),
  'method.hacpo.alpha': (0, None),
  'method.graft.floor': (0, None),
  'reward.overlong_tokens': (0, None),
  'policies.NAME.model.num_layers': (1, None),
  'policies.NAME.model.d_model': (1, None),
  'policies.NAME.model.d_ff': (1, None),
  'policies.NAME.model.num_heads': (1, None),
  'policies.NAME.model.num_kv_heads': (1, None),
  'policies.NAME.model.head_dim': (2, None),
  'policies.NAME.tokenizer.vocab_size': (1, 2**20),
  'policies.NAME.lora.rank': (0, None),
  'policies.NAME.lora.alpha': (0, None),
  'warm_start.steps': (0, None),
  'warm_start.batch': (1, None),
  'warm_start.rejected_share': (0, 1),
  'sample.max_prompt_tokens': (1, None),
  'sample.max_tokens': (1, None),
  'sample.refills': (0, None),
  'sample.batch': (0, None),
  'train.rounds': (1, None),
  'train.prompts': (1, None),
  'train.samples': (1, None),
  'train.mini_batches': (1, None),
  'train.row_multiple': (1, None),
  'train.logit_chunk': (1, None),
  'eval.every': (1, None),
  'eval.prompts': (1, None),
  'eval.samples': (1, None),
  'eval.batch': (1, None),
  'eval.temperature': (0, None),
  'eval.completions': (0, None),
  'see.max_staleness': (0, None),
  'see.capacity_mib': (1, None),
  'see.block_s': (0, None),
  'see.wait_s': (0, None),
  'see.outcome_texts': (0, records_lib.MAX_TEXTS),
  'see.max_message_mib': (1, 1024),
  'thl.max_tokens': (1, None),
  'thl.max_residual': (0, 1),
  'mwra.emulated_devices': (1, None),
  'mwra.tensor': (1, None),
  'checkpoint.every': (1, None),
  'checkpoint.keep': (1, None),
  **{
    f'{phase}.optimizer.{field}': bounds
    for phase in ('warm_start', 'train')
    for field, bounds in (
      ('learning_rate', (0, None)),
      ('warmup_steps', (0, None)),
      ('final_fraction', (0, 1)),
      ('weight_decay', (0, None)),
      ('b1', (0, 0.999999)),
      ('b2', (0, 0.999999)),
    )
  },
}
