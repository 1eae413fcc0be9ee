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
  a_ends, b_ends = np.cumsum(a_lengths), np.cumsum(b_lengths)
  a_bytes, b_bytes = a_lengths.sum(), b_lengths.sum()
  if a_bytes != b_bytes:
    raise ValueError(f'{a_bytes} bytes cannot be aligned with {b_bytes}')
  is_end_2U = np.zeros((2, a_bytes + 1), bool)
  is_end_2U[0, a_ends] = is_end_2U[1, b_ends] = True
  common_U = is_end_2U.all(0)
  before_U = (np.cumsum(common_U) - common_U).astype(np.int32)
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
    to_lengths: i32 [m], bytes of each token I_k, with the same sum.

  Returns:
    f64 [m].
  """
  full = np.flatnonzero(from_lengths)
  if not len(full):
    return np.zeros(len(to_lengths))
  before = np.searchsorted(full, np.arange(len(trace)), side='right') - 1
  holder = np.maximum(before, 0)
  values = np.bincount(holder, trace.astype(np.float64), len(full))
  from_ends = np.concatenate([[0], np.cumsum(from_lengths[full])])
  cumulative = np.concatenate([[0.0], np.cumsum(values)])
  to_ends = np.concatenate([[0], np.cumsum(to_lengths)])
  return np.diff(np.interp(to_ends, from_ends, cumulative))
