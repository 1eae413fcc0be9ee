"""Received messages in a folder, from their acknowledgement to a checkpoint."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import hashlib
import re
import threading

from etils import epath

from mrl_jax import files

_NAME = re.compile(r'(\d{20})-(\w+)-[0-9a-f]{32}')
_HALF = re.compile(_NAME.pattern + re.escape(files.ASIDE))
_FILE_BYTES = 4096  # Charged for a file, beside its contents.


class Full(Exception):
  """A sender's messages take as much of the disk as they may."""


class Spool:
  """Keeps acknowledged messages, so that a killed run loses none of them.

  Each message is one file. A resumed run reads those that an earlier process
  left, round by round, and skips those whose names its checkpoint holds. Other
  files in the folder are left alone.
  """

  def __init__(self, folder: str, most_bytes: int):
    """Opens a folder where each sender's messages may take so many bytes."""
    self._folder, self._most_bytes = epath.Path(folder), most_bytes
    self._lock = threading.Lock()  # A message may be resent while it is added.
    self._folder.mkdir(parents=True, exist_ok=True)
    self._charged = {}  # Bytes of each message, by name.
    self._bytes = collections.Counter()  # Of each sender's messages.
    # In a bucket, a folder exists once it holds something.
    paths = sorted(self._folder.iterdir()) if self._folder.exists() else []
    whole = [path for path in paths if _NAME.fullmatch(path.name)]
    sizes = _each(whole, lambda path: path.stat().length)
    for path, size in zip(whole, sizes, strict=True):
      self._charge(path.name, size)
    # Of a process that was killed while it wrote.
    _delete(path for path in paths if _HALF.fullmatch(path.name))
    self._left = collections.deque(self._charged)

  def add(self, sender: str, round: int, data: bytes) -> str:
    """Writes a message of a sender's round to disk, and returns its name.

    Raises Full, and writes nothing, if the sender's messages were too large.
    """
    name = f'{round:020d}-{sender}-{hashlib.sha256(data).hexdigest()[:32]}'
    with self._lock:
      if name not in self._charged:
        if not self.has_room(sender, len(data)):
          raise Full
        files.write(str(self._folder / name), data)
        self._charge(name, len(data))
    return name

  def has_room(self, sender: str, size: int) -> bool:
    """Whether a message of so many bytes may be added."""
    return self._bytes[sender] + size + _FILE_BYTES <= self._most_bytes

  def left(self, round: int) -> Iterator[tuple[str, bytes]]:
    """Yields (name, message) that an earlier process left, up to `round`.

    Sorted by round. Every message is yielded once.
    """
    while self._left and _round(self._left[0]) <= round:
      name = self._left.popleft()
      yield name, (self._folder / name).read_bytes()

  def forget(self, before: int) -> None:
    """Deletes messages of rounds below `before`."""
    with self._lock:
      old = [name for name in self._charged if _round(name) < before]
      for name in old:
        self._bytes[_NAME.fullmatch(name)[2]] -= self._charged.pop(name)
    _delete(self._folder / name for name in old)

  def _charge(self, name, size):
    self._charged[name] = size + _FILE_BYTES
    self._bytes[_NAME.fullmatch(name)[2]] += size + _FILE_BYTES


def _delete(paths: Iterable[epath.Path]) -> None:
  _each(paths, lambda path: path.unlink(missing_ok=True))


def _each(paths: Iterable[epath.Path], function: Callable) -> list:
  """Calls a function with every path at once: a bucket takes its time for each."""
  with futures.ThreadPoolExecutor() as pool:
    return list(pool.map(function, paths))


def _round(name: str) -> int:
  return int(_NAME.fullmatch(name)[1])
