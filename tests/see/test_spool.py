from concurrent import futures
import contextlib
import os
import threading

from mrl_jax import files
from mrl_jax.see import spool


def messages(folder, round=99):
  return [data for _, data in spool.Spool(os.fspath(folder)).kept(round)]


def test_what_another_process_left_comes_once_and_round_by_round(tmp_path):
  kept = spool.Spool(os.fspath(tmp_path))
  names = {round: kept.add(round, b'%d' % round) for round in (10, 9, 200, 9)}
  assert [*kept.kept(200)] == []  # Its own.
  again = spool.Spool(os.fspath(tmp_path))
  assert [*again.kept(8)] == []
  assert [*again.kept(10)] == [(names[9], b'9'), (names[10], b'10')]
  assert [*again.kept(200)] == [(names[200], b'200')]
  assert [*again.kept(200)] == []


def test_a_message_that_comes_twice_is_one(tmp_path):
  kept = spool.Spool(os.fspath(tmp_path))
  assert kept.add(0, b'same') == kept.add(0, b'same')
  assert kept.add(1, b'same') != kept.add(0, b'other')
  assert len(messages(tmp_path)) == 3


def test_a_message_may_come_again_while_it_is_written(tmp_path, monkeypatch):
  kept = spool.Spool(os.fspath(tmp_path))
  write, both = files.write, threading.Barrier(2)

  def write_together(path, data):
    with contextlib.suppress(threading.BrokenBarrierError):
      both.wait(0.2)  # In vain, if only one may write.
    write(path, data)

  monkeypatch.setattr(files, 'write', write_together)
  with futures.ThreadPoolExecutor(2) as threads:
    names = list(threads.map(lambda _: kept.add(0, b'same'), range(2)))
  assert names[0] == names[1]
  assert messages(tmp_path) == [b'same']


def test_half_a_message_is_not_there(tmp_path, monkeypatch):
  kept = spool.Spool(os.fspath(tmp_path))
  kept.add(0, b'whole')
  with monkeypatch.context() as patched:
    patched.setattr(os, 'replace', lambda *_: None)  # As if killed before.
    kept.add(1, b'half')
  assert messages(tmp_path) == [b'whole']
  kept.add(1, b'half')
  assert messages(tmp_path) == [b'whole', b'half']


def test_earlier_rounds_are_forgotten(tmp_path, monkeypatch):
  kept = spool.Spool(os.fspath(tmp_path))
  for round in range(3):
    kept.add(round, b'%d' % round)
  with monkeypatch.context() as patched:
    patched.setattr(os, 'replace', lambda *_: None)
    kept.add(0, b'half')
  kept.forget(2)
  assert messages(tmp_path) == [b'2']
  assert len(os.listdir(tmp_path)) == 1
