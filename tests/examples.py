"""Small things that many tests are about; no jax."""

import collections
import functools
import json
import os
import random
import string

import ml_collections
import msgspec
import numpy as np

from configs import base
from mrl_jax import architecture
from mrl_jax import records
from mrl_jax.analysis import alignment as sides
from mrl_jax.data import vocabulary
from mrl_jax.mwra import sizes
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import publish
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer

TEXTS = (
  'Tom has 4, gets 6, gets 3\n= 10 = 13',
  'the top score of 4 9 3\n= 9',
  'line up 4 9 3 in order\n= 3 4 9',
  'sort 7 0 2\n= 0 2 7',
)


@functools.cache
def tokenizer(kind: str) -> byte_tokenizer.ByteTokenizer:
  """A tokenizer of `vocabulary.KINDS`, trained on a few lines."""
  backend = vocabulary.KINDS[kind](TEXTS * 20, 340)
  return byte_tokenizer.ByteTokenizer(backend, eos_id=1)


def lines(path: str | os.PathLike) -> list[dict]:
  """The objects in a file of JSON lines, up to one that a kill cut short."""
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f if line.endswith('\n')]


def noise(count: int) -> str:
  """Letters that no tokenizer packs."""
  return ''.join(random.Random(0).choices(string.ascii_letters, k=count))


SIZES = {
  'vocab_size': 48,
  'num_layers': 2,
  'd_model': 32,
  'd_ff': 64,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 8,
}


def model(**changes) -> architecture.ModelConfig:
  """A Llama-like decoder's config."""
  return architecture.ModelConfig(
    **{**SIZES, 'tie_embeddings': False, 'norm_eps': 1e-5, **changes}
  )


def round_shape(**changes) -> sizes.RoundShape:
  """What a policy does in a small round."""
  fields = {
    'prompts': 32,
    'samples': 1,
    'prompt_tokens': 8,
    'response_tokens': 8,
    'logit_chunk': 64,
    'packed_tokens': 16,
  }
  return sizes.RoundShape(**{**fields, **changes})


def header(**changes) -> records.Header:
  fields = {
    'run': 'run',
    'round': 0,
    'policy': 'a',
    'prompt': 'p0',
    'sample': 0,
    'version': 0,
    'tokenizer': 'fingerprint',
    'created': 0.0,
  }
  return records.Header(**{**fields, **changes})


def rollout(
  payload: bytes = b'= 13',
  reward: float = 1.0,
  *,
  finish: str = 'stop',
  encoder: byte_tokenizer.ByteTokenizer | None = None,
  logp: np.ndarray | None = None,
  **header_fields,
) -> records.Rollout:
  """A sound rollout; without an encoder every byte is a token.

  `logp` is that of the distribution it was sampled from.
  """
  if encoder is None:
    ids = np.frombuffer(payload, np.uint8).astype(np.int32)
    lengths = np.ones(len(ids), np.int32)
    eos = 0
  else:
    ids = encoder.encode(payload)
    lengths, eos = encoder.byte_length_V[ids], encoder.eos_id
    header_fields['tokenizer'] = encoder.fingerprint
  if finish == 'stop':
    ids, lengths = (
      np.append(ids, np.int32(eos)),
      np.append(lengths, np.int32(0)),
    )
  if logp is None:
    logp = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
  return records.Rollout(
    header=header(**header_fields),
    payload=payload,
    finish=finish,
    ids=ids,
    byte_lengths=lengths,
    sampling_logp=logp,
    policy_logp=2 * logp,
    mask=np.ones(len(ids), bool),
    temperature=0.5,
    reward=reward,
    verdict='correct' if reward else 'wrong',
  )


def outcome(
  payloads: tuple[bytes, ...] = (b'= 13',), **header_fields
) -> records.Outcome:
  """A sound outcome of four samples, with these successes."""
  return records.Outcome(
    header=header(**{'sample': records.WHOLE_GROUP, **header_fields}),
    count=4,
    successes=len(payloads),
    texts=payloads,
    verifier='exact',
    verdict='correct',
  )


def settings(name: str = 'grpo', **changes) -> ml_collections.ConfigDict:
  """`config.method` of a method; keys as 'prp.level'."""
  method = base.get_config().method
  method.update_from_flattened_dict({'name': name, **changes})
  return method


def train(**changes) -> ml_collections.ConfigDict:
  """`config.train`, with one mini-batch a round."""
  train = base.get_config().train
  train.update({'mini_batches': 1, 'aggregation': 'token_mean', **changes})
  return train


def context(
  tokenizer: byte_tokenizer.ByteTokenizer | None = None,
  groups=None,
  received=(),
  *,
  method: ml_collections.ConfigDict | None = None,
  **changes,
) -> context_lib.Context:
  """A round of policy 'a', whose own group fails on three prompts.

  It believes its peers, and gives every token the log-probability -1.
  """
  if groups is None:
    groups = [group([0.0, 0.0], prompt=f'p{p}') for p in range(3)]
  fields = {
    'groups': groups,
    'received': received,
    'settings': method or settings(),
    'tokenizer': tokenizer,
    'limits': transfer.Limits(max_tokens=20),
    'judge': lambda responses: _claims(groups, received, responses),
    'score': lambda rows, reference=False: [
      np.full(len(row.ids), -1.0, np.float32) for row in rows
    ],
    'rng': np.random.default_rng(0),
    'capability_ratio': {'a': 1.0, 'b': 1.0},
  }
  return context_lib.Context(**{**fields, **changes})


def _claims(groups, received, responses):
  """What peers claim of their responses: of rollouts, or that texts are right."""
  index = {group[0].header.prompt: p for p, group in enumerate(groups)}
  claims = collections.defaultdict(list)
  for r in received:
    if isinstance(r, records.Rollout):
      place = index.get(r.header.prompt), r.payload
      claims[place].append((r.reward, r.verdict))
  return [
    claims[prompt, payload].pop(0)
    if claims[prompt, payload]
    else (1.0, 'correct')
    for prompt, payload, _, _ in responses
  ]


def group(rewards, **fields) -> list[records.Rollout]:
  """A rollout for each reward, of one prompt."""
  return [
    rollout(reward=reward, sample=g, **fields)
    for g, reward in enumerate(rewards)
  ]


def stats(rewards, **fields) -> records.GroupStats:
  """What a peer says of a group with these rewards."""
  return publish.group_stats(group(rewards, **fields))


replace = msgspec.structs.replace  # Of a record.


def peer_group(*rollouts, prompt: int = 0) -> peer_groups.PeerGroup:
  """The rollouts of one peer, with their advantages as they are."""
  successes = sum(rollout.success for rollout in rollouts)
  peer = rollouts[0].header.policy
  return peer_groups.PeerGroup(
    peer, prompt, len(rollouts), successes, rollouts=rollouts
  )


def read_back(shown):
  """The bytes of what `sides.visible` wrote."""
  if shown == sides.CONTROL:
    return b''
  out, rest = b'', shown.replace(sides.SPACE, ' ')
  while rest:
    width = {'x': 4, 'u': 6, 'U': 10}.get(rest[1:2], 2)
    width = width if rest[0] == '\\' else 1
    part, rest = rest[:width], rest[width:]
    if width == 4:
      out += bytes([int(part[2:], 16)])
    elif part[0] == '\\':
      out += part.encode().decode('unicode_escape').encode()
    else:
      out += part.encode()
  return out


def run_config(**changes) -> ml_collections.ConfigDict:
  """The default job, so small that it takes seconds; keys as 'train.rounds'."""
  small = base.get_config()
  small.update_from_flattened_dict(
    {
      'train.rounds': 3,
      'train.prompts': 8,
      'train.samples': 4,
      'warm_start.steps': 20,
      'eval.prompts': 16,
      'eval.samples': 4,  # As in a round: one program samples for both.
      'eval.batch': 8,
      'eval.every': 2,
      'checkpoint.every': 1,
      'policies.llama.model.num_layers': 1,
      'policies.llama.model.d_model': 48,
      'policies.gemma.model.num_layers': 1,
      'policies.gemma.model.d_model': 32,
      **changes,
    }
  )
  return small
