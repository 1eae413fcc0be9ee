"""Transfers a peer's rollout into the receiver's vocabulary."""

from collections.abc import Iterable, Iterator
import dataclasses

import numpy as np

from mrl_jax import records
from mrl_jax.thl import align
from mrl_jax.thl import byte_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Which rollouts a receiver accepts."""

  max_tokens: int  # Length of a response in the receiver's tokens, at most.
  # The largest e_seg, the share of the receiver's token boundaries that are not
  # boundaries of the sender; 1 accepts all rollouts.
  max_residual: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Transferred:
  """A peer's rollout in the receiver's tokens."""

  ids: np.ndarray  # i32 [m]; ends with end-of-sequence if the peer's do.
  # f32 [m], the peer's log-probabilities at temperature 1, projected as an
  # extensive trace: every chunk conserves their sum.
  behaviour_logp: np.ndarray
  # bool [m], False for tokens with a byte of a token that the peer masked.
  mask: np.ndarray
  chunk: np.ndarray  # i32 [m], the common-boundary chunk of each token.


@dataclasses.dataclass(kw_only=True)
class Residual:
  """What could not be transferred, summed over rollouts of one direction."""

  rollouts: int = 0  # Rollouts that were offered.
  payload_bytes: int = 0  # Their bytes.
  # Numbers and bytes of the rollouts that were refused, by reason.
  refused: dict[str, int] = dataclasses.field(default_factory=dict)
  refused_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
  # Control tokens in transferred rollouts, which have no bytes and are lost;
  # end-of-sequence is not among them.
  specials_dropped: int = 0
  sender_tokens: int = 0  # Tokens of transferred rollouts.
  receiver_tokens: int = 0
  # Chunks of transferred rollouts by their numbers of sender and receiver
  # tokens: '1:1', '1:n', 'n:1' and 'n:m'.
  chunks: dict[str, int] = dataclasses.field(default_factory=dict)

  def add(self, other: 'Residual') -> None:
    for field, theirs in vars(other).items():
      if isinstance(theirs, dict):
        for name, n in theirs.items():
          _count(getattr(self, field), name, n)
      else:
        setattr(self, field, getattr(self, field) + theirs)

  def refuse(self, payload: bytes, reason: str) -> None:
    _count(self.refused, reason, 1)
    _count(self.refused_bytes, reason, len(payload))

  @property
  def segmentation_error(self) -> float:
    """e_seg, the share of the receiver's boundaries that the sender lacks."""
    if not self.receiver_tokens:
      return 0.0
    return 1 - sum(self.chunks.values()) / self.receiver_tokens


def transfer(
  rollout: records.Rollout,
  receiver: byte_tokenizer.ByteTokenizer,
  limits: Limits,
  residual: Residual,
) -> Transferred | None:
  """Transfers a rollout, and adds what was lost to `residual`.

  With equal tokenizers the sampled ids are kept, control tokens included.
  Otherwise the payload is encoded anew; control tokens, which have no bytes,
  are dropped and counted. End-of-sequence is an event for which both sides have
  a token: those two tokens are aligned with each other. A completion that a stop
  string ended gets no such token: the string, which is among its bytes, ends the
  receiver's own completions as well.

  Args:
    rollout: a record of a peer without a `records.fault`.
    receiver: the tokenizer of the policy that will learn from it.
    limits: which rollouts that policy accepts.
    residual: of this direction; changed in place.

  Returns:
    The rollout in the receiver's tokens, or None if it is refused: its bytes
    cannot be written in these tokens ('round_trip'), its ids do not stand for
    its bytes and finish ('ids'), it is 'empty', 'too_long', or too many of the
    receiver's boundaries are not the sender's ('residual').
  """
  (moved,) = transfer_all([(rollout, residual)], receiver, limits)
  return moved


def transfer_all(
  offered: Iterable[tuple[records.Rollout, Residual]],
  receiver: byte_tokenizer.ByteTokenizer,
  limits: Limits,
) -> Iterator[Transferred | None]:
  """Yields `transfer` of each rollout, whose payloads are encoded in parallel.

  Beside each rollout is the residual of its direction.
  """
  offered = [*offered]
  encoded = receiver.encode_all(
    rollout.payload
    for rollout, _ in offered
    if rollout.header.tokenizer != receiver.fingerprint
  )
  for rollout, residual in offered:
    yield _transfer(rollout, receiver, limits, residual, encoded)


def encode_all(
  offered: Iterable[tuple[bytes, Residual]],
  receiver: byte_tokenizer.ByteTokenizer,
  limits: Limits,
) -> Iterator[np.ndarray | None]:
  """Yields the tokens of each finished text with end-of-sequence, i32 [m].

  Without sender tokens there is nothing to align. The residual beside each text
  counts it as `transfer` counts rollouts; yields None if it is refused.
  """
  offered = [*offered]
  encoded = receiver.encode_all(payload for payload, _ in offered)
  for (payload, residual), ids in zip(offered, encoded, strict=True):
    residual.rollouts += 1
    residual.payload_bytes += len(payload)
    if receiver.decode(ids) != payload:
      residual.refuse(payload, 'round_trip')
    elif len(ids) + 1 > limits.max_tokens:
      residual.refuse(payload, 'too_long')
    else:
      # Outcomes do not say whether a stop string ended the text. End-of-sequence
      # behind the string does no harm: the receiver's completions end before it.
      yield np.append(ids, np.int32(receiver.eos_id))
      continue
    yield None


def _transfer(
  rollout, receiver, limits, residual, encoded
) -> Transferred | None:
  """`transfer`, which takes the ids of the payload from `encoded` if need be."""
  residual.rollouts += 1
  residual.payload_bytes += len(rollout.payload)
  specials_dropped = 0
  if rollout.header.tokenizer == receiver.fingerprint:
    ids, behaviour_logp = rollout.ids, rollout.sampling_logp
    if not _can_be_sampled(rollout, receiver):
      residual.refuse(rollout.payload, 'ids')
      return None
    mask = rollout.mask
    sender_chunk = chunk = np.arange(len(ids), dtype=np.int32)
  else:
    ids = next(encoded)
    if receiver.decode(ids) != rollout.payload:
      residual.refuse(rollout.payload, 'round_trip')
      return None
    sender_lengths = rollout.byte_lengths.copy()
    lengths = receiver.byte_length_V[ids]
    if rollout.finish == 'stop':
      # One more byte stands for end-of-sequence, on both sides.
      sender_lengths[-1] = 1
      lengths = np.append(lengths, np.int32(1))
      ids = np.append(ids, np.int32(receiver.eos_id))
    specials_dropped = int((sender_lengths == 0).sum())
    sender_chunk, chunk = align.chunks(sender_lengths, lengths)
    behaviour_logp = align.project_extensive(
      rollout.sampling_logp, sender_lengths, lengths
    ).astype(np.float32)
    mask = align.project_mask(rollout.mask, sender_lengths, lengths)
  reason = _refusal(chunk, limits)
  if reason:
    residual.refuse(rollout.payload, reason)
    return None
  residual.specials_dropped += specials_dropped
  _count_chunks(residual, sender_chunk, chunk)
  return Transferred(
    ids=ids, behaviour_logp=behaviour_logp, mask=mask, chunk=chunk
  )


def _can_be_sampled(rollout, receiver) -> bool:
  """Whether a policy with the receiver's tokenizer can have sampled the ids.

  Sampling ends with the first stop token. Other control tokens may be anywhere:
  a policy may sample them, and the payload has no bytes of them.
  """
  ids = rollout.ids
  if (ids >= receiver.vocab_size).any():
    return False
  last = [len(ids) - 1] if rollout.finish == 'stop' else []
  ends = np.flatnonzero(np.isin(ids, receiver.stop_ids))
  return ends.tolist() == last and receiver.decode(ids) == rollout.payload


def _refusal(chunk, limits) -> str | None:
  if not len(chunk):
    return 'empty'
  if len(chunk) > limits.max_tokens:
    return 'too_long'
  # The index of the last chunk is the number of common boundaries less one.
  if 1 - (chunk[-1] + 1) / len(chunk) > limits.max_residual:
    return 'residual'
  return None


def _count_chunks(residual, sender_chunk, chunk):
  senders, receivers = np.bincount(sender_chunk), np.bincount(chunk)
  residual.sender_tokens += len(sender_chunk)
  residual.receiver_tokens += len(chunk)
  kinds = 2 * (senders > 1) + (receivers > 1)
  for kind, name in enumerate(('1:1', '1:n', 'n:1', 'n:m')):
    _count(residual.chunks, name, int((kinds == kind).sum()))


def _count(counts: dict[str, int], name: str, n: int) -> None:
  counts[name] = counts.get(name, 0) + n
