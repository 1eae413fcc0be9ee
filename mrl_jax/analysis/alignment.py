"""A rollout in the tokens of its sender and of a receiver, to be shown."""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax import texts
from mrl_jax.thl import align
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer

SPACE, END, CONTROL = '␣', '∎', '∅'  # How `visible` writes them.

# In a text, these would be taken for what they mark.
_LITERALS = {c: f'\\u{ord(c):04x}' for c in SPACE + END + CONTROL}
_LITERALS = str.maketrans({'\\': '\\\\', **_LITERALS})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Side:
  """A rollout in the tokens of one side.

  Attributes:
    tokens: what each token writes, fit to be shown.
    lengths: i32 [n], bytes of each. End-of-sequence has one, as in `transfer`;
      other control tokens have none.
    logp: f32 [n], log-probabilities (nats).
    chunk: i32 [n], the common-boundary chunk of each.
  """

  tokens: Sequence[str]
  lengths: np.ndarray
  logp: np.ndarray
  chunk: np.ndarray


def sides(
  rollout: records.Rollout,
  receiver: byte_tokenizer.ByteTokenizer,
  limits: transfer.Limits,
) -> tuple[Side, Side]:
  """A rollout as it was sampled, and as `transfer.transfer` carries it.

  Raises:
    InputError: it is refused; the message says why.
  """
  residual = transfer.Residual()
  moved = transfer.transfer(rollout, receiver, limits, residual)
  checks.require(
    moved is not None, f'the rollout is refused: {", ".join(residual.refused)}'
  )
  from_lengths = rollout.byte_lengths.copy()
  to_lengths = receiver.byte_length_V[moved.ids]
  if rollout.finish == 'stop':
    from_lengths[-1] = to_lengths[-1] = 1
  if rollout.header.tokenizer == receiver.fingerprint:
    chunk = moved.chunk
  else:
    chunk, _ = align.chunks(from_lengths, to_lengths)
  sent = Side(
    tokens=visible(rollout, from_lengths),
    lengths=from_lengths,
    logp=rollout.policy_logp,
    chunk=chunk,
  )
  carried = Side(
    tokens=visible(rollout, to_lengths),
    lengths=to_lengths,
    logp=moved.behaviour_logp,
    chunk=moved.chunk,
  )
  return sent, carried


def visible(rollout: records.Rollout, lengths: Sequence[int]) -> list[str]:
  """Tokens of these numbers of bytes, each written in one way only.

  There is no space in any of them, so that spaces can stand between them.
  """
  tokens = []
  for start, end in itertools.pairwise([0, *np.cumsum(lengths)]):
    text = rollout.payload[start:end].decode('utf-8', 'surrogateescape')
    shown = texts.printable(text.translate(_LITERALS)).replace(' ', SPACE)
    tokens.append(shown or CONTROL)
  if rollout.finish == 'stop':
    tokens[-1] = END
  return tokens
