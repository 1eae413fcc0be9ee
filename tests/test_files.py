import errno
import itertools
import os
import zlib

import pytest

from mrl_jax import files


def test_a_file_has_its_old_content_if_writing_is_interrupted(
  tmp_path, monkeypatch
):
  path = os.fspath(tmp_path / 'summary.json')
  files.write(path, 'old')

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    files.write(path, 'new')
  assert (tmp_path / 'summary.json').read_text() == 'old'


def test_a_full_disk_leaves_the_old_file_and_no_half(tmp_path, monkeypatch):
  path = os.fspath(tmp_path / 'summary.json')
  files.write(path, 'old')

  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space left') as error:
    files.write(path, 'new')
  assert os.listdir(tmp_path) == ['summary.json']
  assert (tmp_path / 'summary.json').read_text() == 'old'
  assert files.no_room(error.value) == 'No space left on device'


def test_a_full_disk_is_known_behind_other_errors():
  def chained(*errors):
    for first, second in itertools.pairwise(errors):
      first.__cause__ = second
    return errors[0]

  full = OSError(errno.EDQUOT, 'any text')
  in_c = ValueError('RESOURCE_EXHAUSTED: write: No space left on device [x]')
  assert files.no_room(full) == os.strerror(errno.EDQUOT)
  assert files.no_room(in_c) == 'No space left on device'
  assert files.no_room(chained(KeyError(), ValueError(), in_c))
  circle = chained(KeyError(), ValueError())
  circle.__cause__.__context__ = circle
  for other in (circle, OSError(errno.EACCES, 'no'), None):
    assert files.no_room(other) is None


def test_a_digest_is_of_the_whole_file(tmp_path):
  path = tmp_path / 'file'
  data = os.urandom(2**20 + 9)
  path.write_bytes(data)
  assert files.digest(os.fspath(path)) == zlib.crc32(data)


def fill(folder, text):
  os.mkdir(folder)
  with open(os.path.join(folder, 'text'), 'w') as f:
    f.write(text)


def test_a_new_folder_appears_when_it_is_complete(tmp_path):
  path = tmp_path / 'parent' / 'folder'
  with files.new_folder(os.fspath(path)) as aside:
    fill(aside, 'full')
    assert not path.exists()
  assert (path / 'text').read_text() == 'full'
  assert os.listdir(tmp_path / 'parent') == ['folder']


def test_a_folder_that_another_process_made_first_stays(tmp_path):
  path = tmp_path / 'folder'
  with files.new_folder(os.fspath(path)) as mine:
    fill(mine, 'mine')
    fill(os.fspath(path), 'theirs')
  assert (path / 'text').read_text() == 'theirs'
  assert os.listdir(tmp_path) == ['folder']


def interrupted(folder):
  with files.new_folder(folder) as aside:
    fill(aside, 'half')
    raise KeyboardInterrupt


def test_an_incomplete_folder_does_not_appear(tmp_path):
  with pytest.raises(KeyboardInterrupt):
    interrupted(os.fspath(tmp_path / 'folder'))
  assert os.listdir(tmp_path) == []


def make(folder):
  with files.new_folder(folder) as aside:
    fill(aside, 'full')


def test_a_file_at_the_path_of_a_folder_is_an_error(tmp_path):
  (tmp_path / 'folder').write_text('a file')
  with pytest.raises(NotADirectoryError):
    make(os.fspath(tmp_path / 'folder'))
