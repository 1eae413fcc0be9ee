import contextlib
import json
import os
import struct

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from mrl_jax.training import metrics

ROW = {
  'reward': 0.5,
  'own': {'ratio': 1.0},
  'heldout_accuracy': {'all': 0.25},
  'novelty': 2.0,
  'timing': {'seconds': 3.0},
}


def completion(text):
  return {
    'prompt': '1 + 1',
    'answer': '2',
    'completion': text,
    'reward': 1.0,
    'verdict': 'correct',
    'tokens': 3,
    'logp': -0.25,
  }


EVALUATION = {
  'accuracy': {'all': 0.25, 'sums': 0.5},
  'error': {'all': 0.125, 'sums': None},
  'best': [completion('= 2')],
  'worst': [completion('# **3**\n\x1b[2J')],
}


def write(folder, rounds_done, *rounds, evaluations=(), config=None):
  with contextlib.closing(
    metrics.Writer(str(folder), rounds_done, config or {})
  ) as writer:
    for round in rounds:
      writer.round(round, 'llama', ROW)
    for done in evaluations:
      writer.evaluation(done, 'llama', EVALUATION)


def rounds(folder):
  rows = metrics.read(os.path.join(folder, 'metrics.jsonl'))
  return [row['round'] for row in rows]


def evaluations(folder):
  rows = metrics.read(os.path.join(folder, 'evaluations.jsonl'))
  return [row['rounds'] for row in rows]


def events(folder):
  """All events that are in a folder itself, in order."""
  found = []
  for path in sorted(folder.iterdir()):
    data = b'' if path.is_dir() else path.read_bytes()
    while data:  # Length, its checksum, an event, its checksum.
      (length,) = struct.unpack('<Q', data[:8])
      found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return found


def values(folder):
  """What is written to TensorBoard under each tag."""
  return {v.tag: v for e in events(folder) for v in e.summary.value}


def test_a_row_is_an_object(tmp_path):
  write(tmp_path, None, 0)
  (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(line) == {'round': 0, 'policy': 'llama', **ROW}


def test_an_evaluation_is_an_object(tmp_path):
  write(tmp_path, None, evaluations=[0])
  (line,) = (tmp_path / 'evaluations.jsonl').read_text().splitlines()
  assert json.loads(line) == {'rounds': 0, 'policy': 'llama', **EVALUATION}


def test_events_are_of_a_policy_and_by_topic(tmp_path):
  write(tmp_path, None, 0, evaluations=[0])
  found = values(tmp_path / 'tensorboard' / 'llama')
  assert found['learning/reward'].simple_value == 0.5
  assert found['update/own/ratio'].simple_value == 1.0
  assert found['method/novelty'].simple_value == 2.0
  assert found['timing/seconds'].simple_value == 3.0
  assert found['heldout/accuracy/all'].simple_value == 0.25
  assert found['heldout/error/all'].simple_value == 0.125
  assert 'heldout/error/sums' not in found
  assert not [tag for tag in found if 'heldout_accuracy' in tag]


def test_ratios_are_a_histogram(tmp_path):
  counts = np.zeros(41, int)
  counts[[0, 20, 30]] = 1, 5, 2  # -2 and less, about 0, about 1.
  with contextlib.closing(metrics.Writer(str(tmp_path), None, {})) as writer:
    writer.round(3, 'llama', {'own': {'log_ratio_counts': counts.tolist()}})
  (histogram,) = (
    value.histo for value in values(tmp_path / 'tensorboard' / 'llama').values()
  )
  assert (histogram.min, histogram.max) == (pytest.approx(-2), pytest.approx(1))
  assert histogram.num == 8
  assert histogram.sum == pytest.approx(-2 + 2 * 1)
  assert histogram.sum_squares == pytest.approx(4 + 2 * 1)
  ends, bucket = histogram.bucket_limit, histogram.bucket
  assert len(ends) == len(bucket) == 41
  assert bucket[20] == 5
  assert ends[19] < 0 < ends[20]


def test_completions_are_text_and_nothing_in_them_is_markup(tmp_path):
  write(tmp_path, None, evaluations=[0])
  found = values(tmp_path / 'tensorboard' / 'llama')
  (text,) = (
    value.tensor.string_val[0].decode()
    for tag, value in found.items()
    if tag.startswith('completions/worst')
  )
  head, _, *lines = text.split('\n')
  assert head == 'correct, reward 1, 3 tokens, -0.250 nats a token'
  assert lines == ['    1 + 1', '    # **3**', '    \\x1b[2J',
                   '    [gold answer: 2]']  # fmt: skip


def test_hyper_parameters_have_the_last_accuracy(tmp_path):
  config = {'seed': 1, 'method.name': 'prp', 'data.families': ('a', 'b')}
  write(tmp_path, None, evaluations=[0], config=config)
  folder = tmp_path / 'tensorboard'
  assert events(folder) == []  # Runs are in folders of their own.
  found = values(folder / 'hyperparameters')
  assert found['heldout_accuracy/llama'].simple_value == 0.25
  start = found['_hparams_/session_start_info'].metadata.plugin_data.content
  assert b'method.name' in start
  assert b"('a', 'b')" in start


def test_what_comes_after_the_checkpoint_is_written_again(tmp_path):
  write(tmp_path, None, 0, 1, 2, evaluations=[0, 1, 2])
  write(tmp_path, 1, 1, evaluations=[2])
  assert rounds(tmp_path) == [0, 1]
  assert evaluations(tmp_path) == [0, 1, 2]


def test_there_is_no_file_before_there_is_a_row(tmp_path):
  # A study takes the first row as the sign that warm starts are there.
  write(tmp_path, None)
  assert not (tmp_path / 'metrics.jsonl').exists()


def test_without_a_checkpoint_nothing_stays(tmp_path):
  write(tmp_path, None, evaluations=[0])
  write(tmp_path, None, evaluations=[0])
  assert evaluations(tmp_path) == [0]


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
  write(tmp_path, None, 0, 1)
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"round": 2, "pol')
  write(tmp_path, 2, 2)
  assert rounds(tmp_path) == [0, 1, 2]


def test_tensorboard_is_told_from_where_a_run_goes_on(tmp_path):
  write(tmp_path, None, 0, 1, 2)
  write(tmp_path, 2, 2)
  assert 2 in [
    event.step
    for event in events(tmp_path / 'tensorboard' / 'llama')
    if event.session_log.status == event_pb2.SessionLog.START
  ]
