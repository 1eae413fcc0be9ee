"""Work dirs in a bucket of Google Cloud Storage.

A bucket has whole objects: nothing in it is appended to, renamed or locked. So a
run writes its small files to a copy of the work dir on disk, which is uploaded as
it changes. Checkpoints and received messages go straight to the bucket.
"""

from collections.abc import Sequence
from concurrent import futures
import contextlib
import os
import pathlib
import shutil
import socket
import tempfile
import uuid

from etils import epath
import fsspec

from mrl_jax import checks
from mrl_jax import cluster
from mrl_jax import files
from mrl_jax import workdir

_OWNER = 'owner'  # The object that names the process that writes.
# What only the bucket has, or only the copy.
_ELSEWHERE = (_OWNER, workdir.LOCK, workdir.RECEIVED)
_COPY = 'mrl_jax-'  # Begins the name of the folder of a process's copy.
_JOURNALED = '.array_record'  # Rounds of a journal: large, and written once.


class WorkDir:
  """A work dir, on disk or in a bucket.

  Attributes:
    given: the path as the user has it.
    folder: where it is on disk. For a bucket, it is a copy in a temporary folder,
      which exists as long as this object.
  """

  def __init__(self, given: str, inner: Sequence[str] = ()):
    """Fetches the files of a work dir in a bucket, and its folders `inner`.

    Raises InputError if the bucket cannot be read.
    """
    checks.require(
      files.in_bucket(given) or '://' not in given,
      f'{given} is neither a folder nor in a bucket, gs://BUCKET/FOLDER',
    )
    self.given = self.folder = given
    self._last, self._stamps, self._owner = None, {}, None
    if not files.in_bucket(given):
      return
    # Other hosts write too: what is there is asked for each time.
    fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
    self._home = epath.Path(given)
    _remove_copies_of_the_dead()
    self._copy = tempfile.TemporaryDirectory(
      prefix=f'{_COPY}{os.getpid()}-', ignore_cleanup_errors=True
    )
    self.folder = os.path.join(self._copy.name, *self._home.parts[2:])
    os.makedirs(self.folder)
    self._thread = futures.ThreadPoolExecutor(1, 'upload')
    if not cluster.leads():
      return
    try:
      self._fetch()
      for name in inner:
        self._fetch(name, is_deep=True)
    except Exception as error:  # Of libraries that are not imported here.
      raise checks.InputError(
        f"{given} cannot be read: {error}. It needs pip install -e '.[gcs]', and "
        'credentials such as those of `gcloud auth application-default login`'
      ) from error

  def path(self, name: str) -> str:
    """The path of what libraries write, to the bucket if there is one."""
    return os.path.join(self.given, name)

  def own(self) -> None:
    """Makes this process the one that writes; that of another raises an error.

    It does so at its next `push`. On disk, a lock of the system does that.
    """
    if files.in_bucket(self.given):
      self._owner = f'process {os.getpid()} on {socket.gethostname()}'
      self._owner += f', {uuid.uuid4().hex}'
      (self._home / _OWNER).write_text(self._owner)

  def push(self, wait: bool = False) -> None:
    """Begins to upload files that changed, after the upload before is done.

    Does nothing for a process that does not write. Raises InputError if another
    one has taken over.
    """
    if self._owner:
      if self._last is not None:
        self._last.result()
      self._last = self._thread.submit(self._upload)
      if wait:
        self._last.result()

  def _fetch(self, within='', is_deep=False):
    home = self._home / within
    for source in home.iterdir() if home.exists() else ():
      name = os.path.join(within, source.name)
      target = os.path.join(self.folder, name)
      if name in _ELSEWHERE:
        continue
      if source.is_dir():
        if is_deep:
          self._fetch(name, is_deep)
      else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        files.write(target, source.read_bytes())
        self._stamps[name] = _stamp(target)

  def _upload(self):
    owner = (self._home / _OWNER).read_text()
    checks.require(
      owner == self._owner,
      f'{self.given} was taken over by {owner.partition(",")[0]}; this run ends',
    )
    for folder, within, names in os.walk(self.folder):
      # Of the cache, exports need the tokenizers.
      if os.path.relpath(folder, self.folder) == workdir.CACHE:
        within[:] = {*within} & {os.path.basename(workdir.TOKENIZERS)}
      for name in names:
        path = os.path.join(folder, name)
        relative = os.path.relpath(path, self.folder)
        if relative in _ELSEWHERE or name.endswith(files.ASIDE):
          continue
        # A file may be replaced meanwhile.
        with contextlib.suppress(FileNotFoundError):
          stamp = _stamp(path)
          if self._stamps.get(relative) == stamp:
            continue
          with open(path, 'rb') as f:
            (self._home / relative).write_bytes(f.read())
          self._stamps[relative] = stamp
          if name.endswith(_JOURNALED):
            os.remove(path)


def _remove_copies_of_the_dead():
  """Makes room: a process that was killed leaves its copy."""
  for path in pathlib.Path(tempfile.gettempdir()).glob(f'{_COPY}*'):
    try:
      os.kill(int(path.name.removeprefix(_COPY).partition('-')[0]), 0)
    except ProcessLookupError:
      shutil.rmtree(path, ignore_errors=True)
    except (ValueError, PermissionError):  # Of somebody else.
      continue


def _stamp(path) -> tuple[int, int]:
  status = os.stat(path)
  return status.st_mtime_ns, status.st_size
