"""Files and folders, on disk or in a bucket, that exist completely or not at all."""

from collections.abc import Iterator
import contextlib
import errno
import os
import tempfile
import zlib

from etils import epath

ASIDE = '.new'  # Suffix of a file while it is being written.
_CHUNK = 2**20  # Bytes that are read at once.
# No room on the disk, or within a quota or a limit of the shell.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def in_bucket(path: str | os.PathLike) -> bool:
  """Whether a path is in a bucket, where objects appear whole."""
  return os.fspath(path).startswith('gs://')


def absolute(path: str) -> str:
  """The absolute path of a file on disk; that of a bucket is one."""
  return path if in_bucket(path) else os.path.abspath(path)


def write(path: str, content: str | bytes) -> None:
  """Writes a file; after a kill, the old or the new content is there."""
  aside = path + ASIDE
  data = content.encode() if isinstance(content, str) else content
  if in_bucket(path):
    epath.Path(path).write_bytes(data)
    return
  try:
    with open(aside, 'wb') as f:
      f.write(data)
      f.flush()
      os.fsync(f.fileno())
    os.replace(aside, path)
  except OSError:  # On a full disk, half a file would take the last room.
    with contextlib.suppress(OSError):
      os.remove(aside)
    raise


def digest(path: str) -> int:
  """The CRC-32 of a file, which is not read into memory at once."""
  value = 0
  with open(path, 'rb') as f:
    while chunk := f.read(_CHUNK):
      value = zlib.crc32(chunk, value)
  return value


def no_room(error: BaseException | None) -> str | None:
  """How an error, or one behind it, says that a disk is full; else None.

  Libraries in C++ pass on the text of the system's error without its number.
  """
  seen, left = set(), [error]
  while left:
    error = left.pop()
    if error is None or id(error) in seen:
      continue
    seen.add(id(error))
    left += [error.__cause__, error.__context__]
    for number in _NO_ROOM:
      text = os.strerror(number)
      if getattr(error, 'errno', None) == number or text in str(error):
        return text
  return None


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
  """Yields the path of a folder to make, which becomes `path` at the end.

  If another process made `path` first, its folder stays: runs that share a cache
  make the same files from the same config. In a bucket nothing can be renamed: there it
  yields `path`, and orbax says whether the folder is complete.
  """
  if in_bucket(path):
    yield path
    return
  parent, name = os.path.split(os.path.abspath(path))
  os.makedirs(parent, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='.new-', dir=parent) as aside:
    made = os.path.join(aside, name)
    yield made
    try:
      os.rename(made, path)
    except OSError:
      if not os.path.isdir(path):
        raise
