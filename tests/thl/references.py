"""Alignment token by token, to compare the vectorised alignment with."""

import numpy as np


def overlaps(a_lengths, b_lengths) -> list[tuple[int, int, int]]:
  """Pairs of tokens that share bytes, and how many, by two pointers."""
  a_left, b_left = a_lengths.tolist(), b_lengths.tolist()
  i = j = 0
  pairs = []
  while i < len(a_left) and j < len(b_left):
    shared = min(a_left[i], b_left[j])
    if shared:
      pairs.append((i, j, shared))
    a_left[i] -= shared
    b_left[j] -= shared
    a_done, b_done = not a_left[i], not b_left[j]
    i, j = i + a_done, j + b_done
  return pairs


def owners(lengths) -> list[int]:
  """The token itself, or the last one before it with bytes, or the first."""
  full = [i for i, n in enumerate(lengths) if n]
  owner = full[0] if full else 0
  out = []
  for i, n in enumerate(lengths):
    owner = i if n else owner
    out.append(owner)
  return out


def chunks(a_lengths, b_lengths) -> tuple[list[int], list[int]]:
  """A chunk begins with a pair of tokens that both have no chunk yet."""
  a_chunk, b_chunk = {}, {}
  chunk = -1
  for i, j, _ in overlaps(a_lengths, b_lengths):
    chunk += i not in a_chunk and j not in b_chunk
    a_chunk[i] = b_chunk[j] = chunk
  return (
    [a_chunk.get(i, 0) for i in owners(a_lengths)],
    [b_chunk.get(j, 0) for j in owners(b_lengths)],
  )


def extensive(trace, from_lengths, to_lengths) -> np.ndarray:
  owned = np.zeros(len(trace))
  for i, owner in enumerate(owners(from_lengths)):
    owned[owner] += trace[i]
  projected = np.zeros(len(to_lengths))
  for j, k, shared in overlaps(from_lengths, to_lengths):
    projected[k] += owned[j] * shared / from_lengths[j]
  return projected


def intensive(trace, from_lengths, to_lengths) -> np.ndarray:
  projected = np.zeros(len(to_lengths))
  for j, k, shared in overlaps(from_lengths, to_lengths):
    projected[k] += trace[j] * shared / to_lengths[k]
  return projected[owners(to_lengths)]


def mask(mask, from_lengths, to_lengths) -> np.ndarray:
  owned = np.ones(len(mask), bool)
  for i, owner in enumerate(owners(from_lengths)):
    owned[owner] &= mask[i]
  projected = to_lengths > 0
  for j, k, _ in overlaps(from_lengths, to_lengths):
    projected[k] &= owned[j]
  return projected[owners(to_lengths)]
