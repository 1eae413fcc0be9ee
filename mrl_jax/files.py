"""Files and folders that are there whole or not at all."""

from collections.abc import Iterator
import contextlib
import os
import tempfile

ASIDE = '.new'  # How the name of a file ends while it is written.


def write(path: str, content: str | bytes) -> None:
  """Writes a file so that a kill leaves the old one or the new one."""
  aside = path + ASIDE
  data = content.encode() if isinstance(content, str) else content
  with open(aside, 'wb') as f:
    f.write(data)
    f.flush()
    os.fsync(f.fileno())
  os.replace(aside, path)


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
  """Gives the path of a folder to make; once made, it is moved to `path`.

  Where another process was first, what it made stays: runs that share a cache
  make the same of the same config.
  """
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
