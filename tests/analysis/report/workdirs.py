"""Work dirs as runs leave them, small and with numbers to check by hand."""

import json
import os

CONFIG = {
  'method.name': 'prp',
  'method.kl_weight': 0.0,
  'method.clip_low': 0.2,
  'method.clip_high': 0.28,
  'seed': 3,
  'train.rounds': 4,
  'policies.gemma.template': '{prompt}\n',
}
RESIDUAL = {
  'rollouts': 8,
  'payload_bytes': 80,
  'refused': {'too_long': 2},
  'refused_bytes': {'too_long': 30},
  'specials_dropped': 1,
  'sender_tokens': 20,
  'receiver_tokens': 40,
  'chunks': {'1:1': 10, '1:n': 20, 'n:1': 0, 'n:m': 0},
}
FATES = {'published': 10, 'bytes': 2048, 'used': 7, 'stale': 2}
PHASES = {'sampling': 1.0, 'updates': 2.5, 'other': 0.5}
RATIOS = {
  'clip_fraction': 0.1,
  'max_ratio': 2.0,
  'ess_fraction': 0.9,
  'log_ratio_counts': [1] + [0] * 19 + [97] + [0] * 19 + [2],
}


def row(round, policy, peers, **fields):
  """Of `metrics.jsonl`; four of the ten seconds before the end are phases."""
  return {
    'round': round,
    'policy': policy,
    'reward': 0.5,
    'accuracy': 0.25,
    'all_fail_groups': 0.5,
    'zero_signal_groups': 0.5,
    'rows_with_signal': 0.5,
    'rollouts': 16,
    'entropy': 0.1,
    'response_length': 5.0,
    'stopped': 1.0,
    'grad_norm': 1.0,
    'peer_records': 10,
    'peer_rows': 6,
    'own': RATIOS,
    'peer': RATIOS,
    'mismatch': {'kl': 1e-8},
    'rescue_rate': 1.0,
    'rescued_by': dict.fromkeys(peers, 0.5),
    'exchange': {peer: {'rollout': FATES} for peer in peers},
    'residuals': dict.fromkeys(peers, RESIDUAL),
    'timing': {
      'seconds': 4.0,
      'tokens_per_second': 100.0,
      'elapsed': 10.0 + 4 * (round + 1),
      'phases': PHASES,
    },
    **fields,
  }


def evaluation(rounds, policy, accuracy, **fields):
  """Of `evaluations.jsonl`."""
  completion = {
    'prompt': 'sort 3 1',
    'answer': '1 3',
    'completion': '= 1 3',
    'reward': 1.0,
    'verdict': 'correct',
    'finish': 'stop',
    'tokens': 6,
    'logp': -0.25,
  }
  return {
    'rounds': rounds,
    'policy': policy,
    'accuracy': {'all': accuracy, 'words/add': accuracy / 2},
    'error': {'all': 0.02, 'words/add': None},
    'best': [completion],
    'worst': [{**completion, 'completion': '= 3 1', 'verdict': 'wrong'}],
    **fields,
  }


def part():
  """Of `plan.json`."""
  return {
    'model': 'llama',
    'tokenizer': 'byte_level',
    'parameters': 255264,
    'adapters': 0,
    'vocabulary': 367,
    'devices': [0, 1, 2, 3],
    'mesh': {'data': 1, 'fsdp': 4, 'tensor': 1},
    'memory_bytes': 2.0**20,
    'load': 0.93,
  }


def lines(rows):
  return ''.join(json.dumps(one) + '\n' for one in rows)


def write(
  folder, *, policies=('gemma', 'llama'), rounds=4, config=None, **of_row
):
  """Writes a run of so many rounds, ended if these are all; returns its path.

  `config` and `of_row` replace keys and fields.
  """
  os.makedirs(folder, exist_ok=True)
  config = {**CONFIG, **(config or {})}
  rows = [
    row(round, name, [p for p in policies if p != name], **of_row)
    for round in range(rounds)
    for name in policies
  ]
  evaluations = [
    evaluation(done, name, min(0.25 + done / 8, 1.0))
    for done in ((0, rounds) if rounds else (0,))
    for name in policies
  ]
  contents = {
    'config.json': json.dumps(config),
    'plan.json': json.dumps(
      {
        'devices': '8 x cpu',
        'policies': {name: part() for name in policies},
        'elsewhere': {},
        'prompts_skipped': 0,
      }
    ),
    'metrics.jsonl': lines(rows),
    'evaluations.jsonl': lines(evaluations),
  }
  if rounds == config['train.rounds']:
    contents['summary.json'] = json.dumps(summary(policies, rounds))
  for name, text in contents.items():
    with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
      f.write(text)
  return os.fspath(folder)


def summary(policies, rounds):
  pairs = [f'{a}->{b}' for a in policies for b in policies if a != b]
  return {
    'method': 'prp',
    'seed': 3,
    'rounds': rounds,
    'timing': {'seconds': 10.0 + 4 * rounds, 'waited': {}},
    'policies': {
      name: {
        'heldout_accuracy_by_family': {
          'before': {'all': 0.25},
          'after': {'all': 0.25 + rounds / 8},
        }
      }
      for name in policies
    },
    'exchange': {
      pair: {
        'rollout': {
          **{fate: rounds * n for fate, n in FATES.items()},
          'waiting': rounds,
        }
      }
      for pair in pairs
    },
    'sent': {},
    'refusals': {},
    'messages_refused': {},
    'residuals': {
      pair: {
        key: {k: rounds * n for k, n in value.items()}
        if isinstance(value, dict)
        else rounds * value
        for key, value in RESIDUAL.items()
      }
      for pair in pairs
    },
  }
