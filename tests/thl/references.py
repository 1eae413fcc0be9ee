"""Alignment one token after the other, to compare the vectorised one with."""

import numpy as np


def overlaps(a_lengths, b_lengths) -> list[tuple[int, int, int]]:
  """Tokens of the two that share bytes, and how many, by two pointers."""
  a_left, b_left = a_lengths.tolist(), b_lengths.tolist()
  i = j = 0
  found = []
  while i < len(a_left) and j < len(b_left):
    shared = min(a_left[i], b_left[j])
    if shared:
      found.append((i, j, shared))
    a_left[i] -= shared
    b_left[j] -= shared
    a_done, b_done = not a_left[i], not b_left[j]
    i, j = i + a_done, j + b_done
  return found


def holders(lengths) -> list[int]:
  """Each token with bytes, or the one before it; at the start, the first."""
  full = [i for i, n in enumerate(lengths) if n]
  holder = full[0] if full else 0
  out = []
  for i, n in enumerate(lengths):
    holder = i if n else holder
    out.append(holder)
  return out


def chunks(a_lengths, b_lengths) -> tuple[list[int], list[int]]:
  """A chunk begins with a pair of tokens that are both new."""
  a_chunk, b_chunk = {}, {}
  chunk = -1
  for i, j, _ in overlaps(a_lengths, b_lengths):
    chunk += i not in a_chunk and j not in b_chunk
    a_chunk[i] = b_chunk[j] = chunk
  return (
    [a_chunk.get(i, 0) for i in holders(a_lengths)],
    [b_chunk.get(j, 0) for j in holders(b_lengths)],
  )


def extensive(trace, from_lengths, to_lengths) -> np.ndarray:
  held = np.zeros(len(trace))
  for i, holder in enumerate(holders(from_lengths)):
    held[holder] += trace[i]
  carried = np.zeros(len(to_lengths))
  for j, k, shared in overlaps(from_lengths, to_lengths):
    carried[k] += held[j] * shared / from_lengths[j]
  return carried


def intensive(trace, from_lengths, to_lengths) -> np.ndarray:
  carried = np.zeros(len(to_lengths))
  for j, k, shared in overlaps(from_lengths, to_lengths):
    carried[k] += trace[j] * shared / to_lengths[k]
  return carried[holders(to_lengths)]


def mask(mask, from_lengths, to_lengths) -> np.ndarray:
  held = np.ones(len(mask), bool)
  for i, holder in enumerate(holders(from_lengths)):
    held[holder] &= mask[i]
  carried = to_lengths > 0
  for j, k, _ in overlaps(from_lengths, to_lengths):
    carried[k] &= held[j]
  return carried[holders(to_lengths)]
