"""Received messages on disk, from their acknowledgement to a checkpoint."""

import collections
from collections.abc import Iterator
import hashlib
import os
import threading

from mrl_jax import files


class Spool:
  """Keeps acknowledged messages, so that a killed run loses none of them.

  Each message is one file. A resumed run reads those that an earlier process
  left, round by round, and skips those whose names its checkpoint holds.
  """

  def __init__(self, folder: str):
    self._folder = folder
    self._lock = threading.Lock()  # A message may be resent while it is added.
    os.makedirs(folder, exist_ok=True)
    names = (n for n in os.listdir(folder) if not n.endswith(files.ASIDE))
    self._left = collections.deque(sorted(names))

  def add(self, round: int, data: bytes) -> str:
    """Writes a message of a round to disk, and returns its name."""
    name = f'{round:020d}-{hashlib.sha256(data).hexdigest()[:32]}'
    path = os.path.join(self._folder, name)
    with self._lock:
      if not os.path.exists(path):
        files.write(path, data)
    return name

  def left(self, round: int) -> Iterator[tuple[str, bytes]]:
    """Yields (name, message) that an earlier process left, up to `round`.

    Sorted by round. Every message is yielded once.
    """
    while self._left and _round(self._left[0]) <= round:
      name = self._left.popleft()
      with open(os.path.join(self._folder, name), 'rb') as f:
        yield name, f.read()

  def forget(self, before: int) -> None:
    """Deletes messages of rounds below `before`."""
    with self._lock:
      for name in os.listdir(self._folder):
        if _round(name) < before:
          os.remove(os.path.join(self._folder, name))


def _round(name: str) -> int:
  return int(name.partition('-')[0])
