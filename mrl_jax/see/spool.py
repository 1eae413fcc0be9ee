"""Messages on disk, from before they are acknowledged until a checkpoint."""

import collections
from collections.abc import Iterator
import hashlib
import os
import threading

from mrl_jax import files


class Spool:
  """Keeps what was acknowledged for a run that may be killed.

  One file a message. A resumed run reads them all, round by round; what its
  checkpoint had is known by name.
  """

  def __init__(self, folder: str):
    self._folder = folder
    self._lock = threading.Lock()  # A message may come again while it is added.
    os.makedirs(folder, exist_ok=True)
    names = (n for n in os.listdir(folder) if not n.endswith(files.ASIDE))
    self._kept = collections.deque(sorted(names))

  def add(self, round: int, data: bytes) -> str:
    """Writes a message of a round, and returns its name."""
    name = f'{round:020d}-{hashlib.sha256(data).hexdigest()[:32]}'
    path = os.path.join(self._folder, name)
    with self._lock:
      if not os.path.exists(path):
        files.write(path, data)
    return name

  def kept(self, round: int) -> Iterator[tuple[str, bytes]]:
    """Messages up to a round, with their names, that another process left.

    The earlier rounds come first; each message comes once.
    """
    while self._kept and _round(self._kept[0]) <= round:
      name = self._kept.popleft()
      with open(os.path.join(self._folder, name), 'rb') as f:
        yield name, f.read()

  def forget(self, before: int) -> None:
    """Removes messages of earlier rounds."""
    with self._lock:
      for name in os.listdir(self._folder):
        if _round(name) < before:
          os.remove(os.path.join(self._folder, name))


def _round(name):
  return int(name.partition('-')[0])
