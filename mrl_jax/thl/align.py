"""Alignment of two tokenizations of the same bytes."""

import numpy as np


def chunks(
  a_lengths: np.ndarray, b_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Cuts both tokenizations at the byte offsets where tokens of both end.

  The common boundaries are the intersection of the two sets of end offsets;
  chunk c lies between the c-th boundary and the one before it. A token without
  bytes joins the chunk of the token before it; at the start, the first chunk.

  Args:
    a_lengths: i32 [n], bytes of each token of the first tokenization.
    b_lengths: i32 [m], of the second, with the same sum.

  Returns:
    The chunk of every token, i32 [n] and i32 [m].

  Raises:
    ValueError: the two do not cover the same number of bytes.
  """
  a_ends, b_ends = _ends(a_lengths, b_lengths)
  common_U, is_b_end_U = np.zeros((2, a_lengths.sum() + 1), bool)
  common_U[a_ends] = is_b_end_U[b_ends] = True
  common_U &= is_b_end_U
  common_U[0] = False  # No chunk ends before the first byte.
  before_U = np.cumsum(common_U, dtype=np.int32)
  before_U -= common_U
  return before_U[a_ends], before_U[b_ends]


def carry_extensive(
  trace: np.ndarray, from_lengths: np.ndarray, to_lengths: np.ndarray
) -> np.ndarray:
  """Carries a trace that adds up, such as log-probabilities, across.

    l'_k = sum_j |I_k ∩ J_j| / |J_j| l_j

  so that each byte of a token has an equal part of its value, and the sum over
  every chunk is conserved. The value of a token without bytes is added to the
  token before it; at the start, to the first token that has some.

  Args:
    trace: [n], a value a token.
    from_lengths: i32 [n], bytes of each token J_j; some may have none.
    to_lengths: i32 [m], bytes of each token I_k, with the same sum; one without
      bytes gets 0.

  Returns:
    f64 [m].

  Raises:
    ValueError: the two do not cover the same number of bytes.
  """
  from_ends, to_ends = _ends(from_lengths, to_lengths)
  if not from_lengths.all():
    full = np.flatnonzero(from_lengths)
    trace = np.bincount(_holder(from_lengths), trace, len(trace))[full]
    from_ends = from_ends[full]
  sums = np.cumsum(trace, dtype=np.float64)
  at_ends = np.interp(
    to_ends, np.concatenate([[0], from_ends]), np.concatenate([[0.0], sums])
  )
  return np.diff(at_ends, prepend=0.0)


def carry_intensive(
  trace: np.ndarray, from_lengths: np.ndarray, to_lengths: np.ndarray
) -> np.ndarray:
  """Carries a trace that does not add up, such as advantages or values, across.

    l'_k = sum_j |I_k ∩ J_j| / |I_k| l_j

  the mean over the bytes of the receiver's token, which lies between the least
  and the greatest of the values there. The value of a sender's token without
  bytes has no weight. A receiver's token without bytes gets the value of the
  token before it; at the start, of the first token that has some.

  Args:
    trace: [n], a value a token.
    from_lengths: i32 [n], bytes of each token J_j; some may have none.
    to_lengths: i32 [m], bytes of each token I_k, with the same sum; some may
      have none.

  Returns:
    f64 [m]; 0 where there are no bytes at all.

  Raises:
    ValueError: the two do not cover the same number of bytes.
  """
  sums = carry_extensive(trace * from_lengths, from_lengths, to_lengths)
  return (sums / np.maximum(to_lengths, 1))[_holder(to_lengths)]


def carry_mask(
  mask: np.ndarray, from_lengths: np.ndarray, to_lengths: np.ndarray
) -> np.ndarray:
  """Carries a mask of the tokens that may be trained on across.

    l'_k = min_j l_j, over the j with I_k ∩ J_j not empty

  so that no byte of a token that is masked is ever trained on. A sender's token
  without bytes counts with the token that `carry_extensive` adds its value to,
  so that no value of a masked token is trained on either. A receiver's token
  without bytes gets what the token before it has; at the start, what the first
  token that has some has.

  Args:
    mask: bool [n].
    from_lengths: i32 [n], bytes of each token J_j; some may have none.
    to_lengths: i32 [m], bytes of each token I_k, with the same sum; some may
      have none.

  Returns:
    bool [m]; False where there are no bytes at all.

  Raises:
    ValueError: the two do not cover the same number of bytes.
  """
  if mask.all():  # As it nearly always is.
    _, to_ends = _ends(from_lengths, to_lengths)
    return np.full(len(to_lengths), to_ends[-1:] > 0)
  masked = carry_extensive(~mask, from_lengths, to_lengths)
  return ((masked == 0) & (to_lengths > 0))[_holder(to_lengths)]


def _ends(a_lengths, b_lengths):
  """The byte offsets where the tokens of both end."""
  a_bytes, b_bytes = a_lengths.sum(), b_lengths.sum()
  if a_bytes != b_bytes:
    raise ValueError(f'{a_bytes} bytes cannot be aligned with {b_bytes}')
  return np.cumsum(a_lengths), np.cumsum(b_lengths)


def _holder(lengths):
  """The token that has what each stands for: itself, if it has bytes.

  Otherwise the last before it that has some; at the start, the first.
  """
  full = np.flatnonzero(lengths)
  if not len(full):
    return np.zeros(len(lengths), np.int64)
  return full[np.maximum(np.cumsum(lengths > 0) - 1, 0)]
