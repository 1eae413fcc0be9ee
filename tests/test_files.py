import os

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
