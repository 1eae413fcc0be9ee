"""A rollout in the tokens of its sender and in those of a receiver."""

from collections.abc import Sequence
import itertools
from typing import NamedTuple

import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax import texts
from mrl_jax.thl import align
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer

# `visible` writes a space, end-of-sequence and a token without bytes like this;
# the same characters in a text are escaped.
SPACE, END, CONTROL = '␣', '∎', '∅'
_ESCAPES = {c: f'\\u{ord(c):04x}' for c in SPACE + END + CONTROL}
_ESCAPES = str.maketrans({'\\': '\\\\', **_ESCAPES})


class Side(NamedTuple):
  """A rollout in the tokens of one tokenizer."""

  tokens: Sequence[str]  # As `visible` writes them.
  # i32 [n], bytes of each token. End-of-sequence has one, as in `transfer`;
  # other control tokens have none.
  lengths: np.ndarray
  logp: np.ndarray  # f32 [n], log-probabilities (nats).
  chunk: (
    np.ndarray
  )  # i32 [n], index of the common-boundary chunk of each token.


def sides(
  rollout: records.Rollout,
  receiver: byte_tokenizer.ByteTokenizer,
  limits: transfer.Limits,
) -> tuple[Side, Side]:
  """A rollout as it was sampled, and as `transfer.transfer` carries it over.

  Raises InputError with the reason if THL refuses the rollout.
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
  chunk = moved.chunk
  if rollout.header.tokenizer != receiver.fingerprint:
    chunk, _ = align.chunks(from_lengths, to_lengths)

  def side(lengths, logp, chunk):
    return Side(visible(rollout, lengths), lengths, logp, chunk)

  return (
    side(from_lengths, rollout.sampling_logp, chunk),
    side(to_lengths, moved.behaviour_logp, moved.chunk),
  )


def visible(rollout: records.Rollout, lengths: Sequence[int]) -> list[str]:
  """Cuts the payload of a rollout into printable tokens of `lengths` bytes.

  Different bytes are never written alike, and no token contains a space, so
  that tokens can be separated by spaces: b' a b' with lengths (2, 2) becomes
  ['␣a', '␣b']. The stop token at the end of a rollout is end-of-sequence.
  """
  tokens = []
  for start, end in itertools.pairwise([0, *np.cumsum(lengths)]):
    text = rollout.payload[start:end].decode('utf-8', 'surrogateescape')
    shown = texts.printable(text.translate(_ESCAPES)).replace(' ', SPACE)
    tokens.append(shown or CONTROL)
  if rollout.finish == 'stop':
    tokens[-1] = END
  return tokens


class Chunk(NamedTuple):
  """The text between two common boundaries, whole and in tokens of both sides."""

  text: str
  sent: Sequence[str]
  carried: Sequence[str]
  sent_logp: float  # Sum over the tokens (nats); so is `carried_logp`.
  carried_logp: float


def chunks(
  rollout: records.Rollout,
  receiver: byte_tokenizer.ByteTokenizer,
  limits: transfer.Limits,
) -> list[Chunk]:
  """Cuts a rollout at the common boundaries of sender and receiver.

  Raises InputError with the reason if THL refuses the rollout.
  """
  both = sent, _ = sides(rollout, receiver, limits)
  lengths = [part.sum() for part in _cut(sent.lengths, sent.chunk)]
  tokens = [_cut(side.tokens, side.chunk) for side in both]
  logps = [
    [float(part.sum()) for part in _cut(side.logp, side.chunk)] for side in both
  ]
  return list(map(Chunk, visible(rollout, lengths), *tokens, *logps))


def _cut(values, chunk) -> list:
  """Cuts values where the chunk changes: 'abc', [0, 0, 1] gives 'ab', 'c'."""
  edges = [0, *np.flatnonzero(np.diff(chunk)) + 1, len(chunk)]
  return [values[start:end] for start, end in itertools.pairwise(edges)]
