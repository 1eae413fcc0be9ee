"""Alignment of two tokenizations of the same bytes.

For example, `= 13` as the tokens `=`, ` 13` of a sender and `= `, `1`, `3` of a
receiver, with the byte offsets where tokens end:

  sender      =| 13|        1, 4
  receiver    = |1|3|       2, 3, 4
  common              |     4: a single chunk, of 2 and 3 tokens
"""

import numpy as np


def chunks(
  a_lengths: np.ndarray, b_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The common-boundary chunk of every token of both tokenizations.

  The common boundaries are the byte offsets where tokens of both end; chunk c
  lies between common boundary c - 1 and common boundary c. A token without
  bytes joins the chunk of the token before it; at the start, the first chunk.

  Args:
    a_lengths: i32 [n], bytes of each token of the first tokenization.
    b_lengths: i32 [m], the same of the second; their sums are equal.

  Returns:
    Indices of chunks, i32 [n] and i32 [m].

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


def project_extensive(
  trace: np.ndarray, from_lengths: np.ndarray, to_lengths: np.ndarray
) -> np.ndarray:
  """Projects a trace that adds up, such as log-probabilities.

    l'_k = sum_j |I_k ∩ J_j| / |J_j| l_j

  Each byte of a token gets an equal part of its value, so that the sum over
  every chunk is conserved. The value of a token without bytes is added to the
  token before it; at the start, to the first token with bytes.

  Args:
    trace: [n], a value for each sender token.
    from_lengths: i32 [n], bytes of each sender token J_j, which may be 0.
    to_lengths: i32 [m], bytes of each receiver token I_k, with the same sum; a
      token without bytes gets the value 0.

  Returns:
    f64 [m].

  Raises:
    ValueError: the two do not cover the same number of bytes.
  """
  from_ends, to_ends = _ends(from_lengths, to_lengths)
  if not from_lengths.all():
    full = np.flatnonzero(from_lengths)
    trace = np.bincount(_owner(from_lengths), trace, len(trace))[full]
    from_ends = from_ends[full]
  sums = np.cumsum(trace, dtype=np.float64)
  at_ends = np.interp(
    to_ends, np.concatenate([[0], from_ends]), np.concatenate([[0.0], sums])
  )
  return np.diff(at_ends, prepend=0.0)


def project_intensive(
  trace: np.ndarray, from_lengths: np.ndarray, to_lengths: np.ndarray
) -> np.ndarray:
  """Projects a trace that does not add up, such as advantages or values.

    l'_k = sum_j |I_k ∩ J_j| / |I_k| l_j

  The mean of the sender's values over the bytes of the receiver token, which is
  between their smallest and their largest. A sender token without bytes has no
  weight. A receiver token without bytes gets the value of the token before it;
  at the start, of the first token with bytes.

  Args:
    trace: [n], a value for each sender token.
    from_lengths: i32 [n], bytes of each sender token J_j, which may be 0.
    to_lengths: i32 [m], bytes of each receiver token I_k, with the same sum.

  Returns:
    f64 [m]; zeros if there are no bytes at all.

  Raises:
    ValueError: the two do not cover the same number of bytes.
  """
  sums = project_extensive(trace * from_lengths, from_lengths, to_lengths)
  return (sums / np.maximum(to_lengths, 1))[_owner(to_lengths)]


def project_mask(
  mask: np.ndarray, from_lengths: np.ndarray, to_lengths: np.ndarray
) -> np.ndarray:
  """Projects a mask, True for the tokens that may be trained on.

    l'_k = min_j l_j, over the j with I_k ∩ J_j not empty

  No byte of a masked token is ever trained on. A sender token without bytes
  counts with the token that `project_extensive` adds its value to, so that no
  value of a masked token is trained on either. A receiver token without bytes
  gets the mask of the token before it; at the start, of the first token with
  bytes.

  Args:
    mask: bool [n].
    from_lengths: i32 [n], bytes of each sender token J_j, which may be 0.
    to_lengths: i32 [m], bytes of each receiver token I_k, with the same sum.

  Returns:
    bool [m]; False if there are no bytes at all.

  Raises:
    ValueError: the two do not cover the same number of bytes.
  """
  if mask.all():  # The usual case.
    _, to_ends = _ends(from_lengths, to_lengths)
    return np.full(len(to_lengths), to_ends[-1:] > 0)
  masked = project_extensive(~mask, from_lengths, to_lengths)
  return ((masked == 0) & (to_lengths > 0))[_owner(to_lengths)]


def _ends(a_lengths, b_lengths):
  """The byte offsets where tokens end, of both tokenizations."""
  a_bytes, b_bytes = a_lengths.sum(), b_lengths.sum()
  if a_bytes != b_bytes:
    raise ValueError(f'{a_bytes} bytes cannot be aligned with {b_bytes}')
  return np.cumsum(a_lengths), np.cumsum(b_lengths)


def _owner(lengths):
  """Index of the token that each token's value belongs to.

  The value of a token with bytes belongs to the token itself. That of a token
  without bytes belongs to the last token with bytes before it; at the start, to
  the first token with bytes:

    lengths 0 2 0 0 3  ->  1 1 1 1 4
  """
  full = np.flatnonzero(lengths)
  if not len(full):
    return np.zeros(len(lengths), np.int64)
  return full[np.maximum(np.cumsum(lengths > 0) - 1, 0)]
