import contextlib
import json
import os
import struct

from tensorboardX.proto import event_pb2

from mrl_jax.training import metrics


def write(folder, rounds_done, *rounds):
  with contextlib.closing(metrics.Writer(folder, rounds_done)) as writer:
    for round in rounds:
      writer.write(round, 'llama', {'reward': round / 2, 'own': {'ratio': 1.0}})


def rounds(folder):
  rows = metrics.read(os.path.join(folder, 'metrics.jsonl'))
  return [row['round'] for row in rows]


def test_a_row_is_an_object(tmp_path):
  write(str(tmp_path), 0, 0)
  (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(line) == {
    'round': 0,
    'policy': 'llama',
    'reward': 0.0,
    'own': {'ratio': 1.0},
  }


def test_events_are_scalars_by_policy(tmp_path):
  write(str(tmp_path), 0, 0, 1)
  (events,) = (tmp_path / 'tensorboard').iterdir()
  assert b'llama/reward' in events.read_bytes()
  assert b'llama/own/ratio' in events.read_bytes()


def test_what_comes_after_the_checkpoint_is_written_again(tmp_path):
  write(str(tmp_path), 0, 0, 1, 2)
  write(str(tmp_path), 1, 1)
  assert rounds(tmp_path) == [0, 1]


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
  write(str(tmp_path), 0, 0, 1)
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"round": 2, "pol')
  write(str(tmp_path), 2, 2)
  assert rounds(tmp_path) == [0, 1, 2]


def steps_of_starts(folder):
  """The steps at which a log says that it goes on."""
  found = []
  for path in (folder / 'tensorboard').iterdir():
    data = path.read_bytes()
    while data:  # Length, its checksum, an event, its checksum.
      (length,) = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      if event.session_log.status == event_pb2.SessionLog.START:
        found.append(event.step)
      data = data[16 + length :]
  return found


def test_tensorboard_is_told_from_where_a_run_goes_on(tmp_path):
  write(str(tmp_path), 0, 0, 1, 2)
  write(str(tmp_path), 2, 2)
  assert 2 in steps_of_starts(tmp_path)
