"""Journals of two policies with different tokenizers."""

import os

from mrl_jax import records
from mrl_jax.see import journal
from mrl_jax.sharing import publish
from mrl_jax.thl import transfer
from tests import examples

TOKENIZERS = {
  'llama': examples.tokenizer('byte_level'),
  'gemma': examples.tokenizer('sentencepiece'),
}
LIMITS = transfer.Limits(max_tokens=64)
PAYLOADS = (b'= 10 = 13', b'top score\n= 9', ' ≈ 3\\␣∎'.encode(), b'\xe2\x89')


def write(folder, policy, rounds, finish=True):
  """Writes the records of each round; returns the writer."""
  tokenizer = TOKENIZERS[policy]
  about = journal.About(
    policy=policy, run='run', tokenizer=tokenizer.fingerprint,
    vocab_size=tokenizer.vocab_size, kinds=records.KINDS,
  )  # fmt: skip
  writer = journal.Writer(os.fspath(folder), about, tokenizer.to_json())
  for round, published in enumerate(rounds):
    writer.write(round, published)
  if finish:
    writer.finish()
  return writer


def rollout(policy, payload, reward=1.0, **fields):
  return examples.rollout(
    payload, reward, encoder=TOKENIZERS[policy], policy=policy, **fields
  )


def group(policy, round, payloads=PAYLOADS):
  """Rollouts of a prompt; the first is correct, and the last is truncated."""
  last = len(payloads) - 1
  return [
    rollout(
      policy, payload, float(g == 0), round=round, prompt='p0', sample=g,
      finish='stop' if g < last else 'length',
    )
    for g, payload in enumerate(payloads)
  ]  # fmt: skip


def published(policy, round):
  """Records of all kinds about one group."""
  return publish.publish(
    [group(policy, round)], records.KINDS, texts=4, verifier='exact'
  )


def write_all(folder, rounds=3):
  """Writes journals of both policies below a work dir; returns its path."""
  for policy in TOKENIZERS:
    write(folder / 'see', policy, [published(policy, r) for r in range(rounds)])
  return os.fspath(folder)
