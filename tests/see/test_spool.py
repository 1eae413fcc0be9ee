from concurrent import futures
import contextlib
import os
import threading

import pytest

from mrl_jax import files
from mrl_jax.see import spool as spool_lib


@pytest.fixture
def open_spool(tmp_path):
  """Opens the same folder again and again."""
  return lambda most_bytes=2**30: spool_lib.Spool(
    os.fspath(tmp_path), most_bytes
  )


def messages(spool):
  return [data for _, data in spool.left(999)]


def test_messages_of_an_earlier_process_come_once_round_by_round(open_spool):
  spool = open_spool()
  names = {
    round: spool.add('a', round, b'%d' % round) for round in (10, 9, 200, 9)
  }
  assert [*spool.left(200)] == []  # They are its own.
  again = open_spool()
  assert [*again.left(8)] == []
  assert [*again.left(10)] == [(names[9], b'9'), (names[10], b'10')]
  assert [*again.left(200)] == [(names[200], b'200')]
  assert [*again.left(200)] == []


def test_a_message_that_comes_twice_is_stored_once(open_spool):
  spool = open_spool()
  assert spool.add('a', 0, b'same') == spool.add('a', 0, b'same')
  assert spool.add('a', 1, b'same') != spool.add('a', 0, b'other')
  assert len(messages(open_spool())) == 3


def test_a_message_may_come_again_while_it_is_written(open_spool, monkeypatch):
  spool = open_spool()
  write, both = files.write, threading.Barrier(2)

  def write_together(path, data):
    with contextlib.suppress(threading.BrokenBarrierError):
      both.wait(0.05)  # In vain, if only one may write.
    write(path, data)

  monkeypatch.setattr(files, 'write', write_together)
  with futures.ThreadPoolExecutor(2) as threads:
    names = list(threads.map(lambda _: spool.add('a', 0, b'same'), range(2)))
  assert names[0] == names[1]
  assert messages(open_spool()) == [b'same']


def test_messages_of_a_sender_are_bounded_before_they_are_written(
  open_spool, tmp_path
):
  most = 3 * (4096 + 1000)
  spool = open_spool(most)
  for round in range(3):
    spool.add('a', round, bytes(1000))
  for again in (spool, open_spool(most)):  # A resumed run counts what is there.
    with pytest.raises(spool_lib.Full):
      again.add('a', 3, b'')
    again.add('a', 2, bytes(1000))  # It is there.
  again.add('c', 0, bytes(1000))
  assert len(os.listdir(tmp_path)) == 4
  again.forget(1)
  again.add('a', 3, bytes(1000))
  with pytest.raises(spool_lib.Full):
    again.add('a', 3, b'x')


def test_stray_files_are_left_alone(open_spool, tmp_path):
  names = ('README', '.DS_Store', f'{0:020d}-a-x', f'{0:020d}-{"0" * 32}')
  for name in names:
    (tmp_path / name).write_bytes(b'stray')
  spool = open_spool()
  assert messages(spool) == []
  spool.add('a', 0, b'0')
  spool.forget(1)
  assert {*os.listdir(tmp_path)} == {*names}


@pytest.fixture
def with_half(open_spool, monkeypatch):
  """A spool with three rounds, killed while it added one more message."""
  spool = open_spool()
  for round in range(3):
    spool.add('a', round, b'%d' % round)
  with monkeypatch.context() as patched:
    patched.setattr(os, 'replace', lambda *_: None)  # As if killed before it.
    spool.add('a', 0, b'half')
  return spool


def test_half_a_message_is_ignored_and_may_come_again(with_half, open_spool):
  assert messages(open_spool()) == [b'0', b'1', b'2']
  open_spool().add('a', 0, b'half')
  assert {*messages(open_spool())} == {b'0', b'half', b'1', b'2'}


def test_earlier_rounds_are_deleted(with_half, open_spool, tmp_path):
  with_half.forget(2)
  assert messages(open_spool()) == [b'2']
  assert len(os.listdir(tmp_path)) == 1
