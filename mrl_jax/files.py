"""Files and folders that exist completely or not at all."""

from collections.abc import Iterator
import contextlib
import os
import tempfile

ASIDE = '.new'  # Suffix of a file while it is being written.


def write(path: str, content: str | bytes) -> None:
  """Writes a file; after a kill, the old or the new content is there."""
  aside = path + ASIDE
  data = content.encode() if isinstance(content, str) else content
  with open(aside, 'wb') as f:
    f.write(data)
    f.flush()
    os.fsync(f.fileno())
  os.replace(aside, path)


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
  """Yields the path of a folder to make, which is then renamed to `path`.

  If another process made `path` first, its folder stays: runs that share a cache
  make the same files from the same config.
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
