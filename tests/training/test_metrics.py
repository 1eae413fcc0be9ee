from concurrent import futures
import contextlib
import errno
import json
import os
import pathlib
import struct
import tempfile
from unittest import mock

from absl import logging
import hypothesis
from hypothesis import strategies
import msgspec
import numpy as np
import pytest
import tensorboardX
from tensorboardX.proto import event_pb2

from mrl_jax import workdir
from mrl_jax.thl import transfer
from mrl_jax.training import metrics
from tests import examples

RESIDUAL = transfer.Residual(
  rollouts=2, sender_tokens=4, receiver_tokens=4, chunks={'1:1': 2, '1:n': 1}
)


def row(round):
  return workdir.RoundMetrics(
    round=round,
    policy='llama',
    reward=0.5,
    own=workdir.Ratios(ratio=1.0),
    method={'novelty': 2.0},
    heldout_accuracy={'all': 0.25},
    timing=workdir.Timing(seconds=3.0),
    residuals={'gemma': RESIDUAL},
  )


def completion(text):
  return workdir.Completion(
    prompt='1 + 1',
    completion=text,
    answer='2',
    reward=1.0,
    verdict='correct',
    tokens=3,
    logp=-0.25,
  )


def evaluation(rounds):
  return workdir.Evaluation(
    rounds=rounds,
    policy='llama',
    accuracy={'all': 0.25, 'sums': 0.5},
    error={'all': 0.125, 'sums': None},
    best=[completion('= 2')],
    worst=[completion('# **3**\n\x1b[2J')],
  )


def write(folder, rounds_done, *rounds, evaluations=(), config=None):
  with contextlib.closing(
    metrics.Writer(str(folder), rounds_done, config or {})
  ) as writer:
    for round in rounds:
      writer.round(row(round))
    for done in evaluations:
      writer.evaluation(evaluation(done))


def rounds(folder):
  lines = examples.lines(folder / 'metrics.jsonl')
  return [line['round'] for line in lines]


def evaluations(folder):
  lines = examples.lines(folder / 'evaluations.jsonl')
  return [line['rounds'] for line in lines]


def events(folder):
  """All events in the files of a folder, in order."""
  found = []
  for path in sorted(folder.iterdir()):
    data = b'' if path.is_dir() else path.read_bytes()
    while data:  # Length, its checksum, an event, its checksum.
      (length,) = struct.unpack('<Q', data[:8])
      found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return found


def values(folder):
  """The last value under each tag of TensorBoard."""
  return {v.tag: v for e in events(folder) for v in e.summary.value}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A work dir with one round and one evaluation."""
  folder = tmp_path_factory.mktemp('written')
  config = {'seed': 1, 'method.name': 'prp', 'data.families': ('a', 'b')}
  write(folder, None, 0, evaluations=[0], config=config)
  return folder


def test_a_round_is_a_line(written):
  (line,) = examples.lines(written / 'metrics.jsonl')
  error = line['residuals']['gemma'].pop('segmentation_error')
  assert error == RESIDUAL.segmentation_error == 0.25
  assert msgspec.convert(line, workdir.RoundMetrics) == row(0)


def test_an_evaluation_is_a_line(written):
  (line,) = examples.lines(written / 'evaluations.jsonl')
  assert msgspec.convert(line, workdir.Evaluation) == evaluation(0)


def test_events_are_of_a_policy_and_by_topic(written):
  numbers = {
    tag: value.simple_value
    for tag, value in values(written / 'tensorboard' / 'llama').items()
    if value.HasField('simple_value')
  }
  assert numbers['thl/residuals/gemma/segmentation_error'] == 0.25
  assert {
    tag: x for tag, x in numbers.items() if not tag.startswith('thl/')
  } == {
    'learning/reward': 0.5,
    'update/own/ratio': 1.0,
    'method/novelty': 2.0,
    'timing/seconds': 3.0,
    'heldout/accuracy/all': 0.25,
    'heldout/accuracy/sums': 0.5,
    'heldout/error/all': 0.125,
  }


def test_every_metric_has_a_topic():
  fields = workdir.RoundMetrics.__struct_fields__
  assert {*fields} == {*metrics._NOT_EVENTS, *metrics._TOPIC}


def test_importance_ratios_are_a_histogram(tmp_path):
  counts = np.zeros(41, int)
  counts[[0, 20, 30]] = 1, 5, 2  # Log ratios of -2 and less, about 0, about 1.
  ratios = workdir.Ratios(log_ratio_counts=counts.tolist())
  with contextlib.closing(metrics.Writer(str(tmp_path), None, {})) as writer:
    writer.round(workdir.RoundMetrics(round=3, policy='llama', own=ratios))
  (value,) = values(tmp_path / 'tensorboard' / 'llama').values()
  histogram = value.histo
  assert (histogram.min, histogram.max) == (pytest.approx(-2), pytest.approx(1))
  assert histogram.num == 8
  assert histogram.sum == pytest.approx(-2 + 2 * 1)
  assert histogram.sum_squares == pytest.approx(4 + 2 * 1)
  ends, bucket = histogram.bucket_limit, histogram.bucket
  assert [x for x in bucket if x] == [1, 5, 2]
  middle = list(bucket).index(5)
  assert ends[middle - 1] < 0 < ends[middle]


def test_nothing_in_a_completion_is_markup(written):
  (text,) = (
    value.tensor.string_val[0].decode()
    for tag, value in values(written / 'tensorboard' / 'llama').items()
    if tag.startswith('completions/worst')
  )
  head, _, *lines = text.split('\n')
  assert head == 'correct, reward 1, 3 tokens, -0.250 nats a token'
  assert lines == ['    1 + 1', '    # **3**', '    \\x1b[2J',
                   '    [gold answer: 2]']  # fmt: skip


def test_hyper_parameters_have_the_last_accuracy(written):
  folder = written / 'tensorboard'
  assert events(folder) == []  # Each policy has a folder of its own.
  found = values(folder / 'hyperparameters')
  assert found['heldout_accuracy/llama'].simple_value == 0.25
  start = found['_hparams_/session_start_info'].metadata.plugin_data.content
  assert b'method.name' in start
  assert b"('a', 'b')" in start


def test_a_resumed_run_replaces_the_lines_after_its_checkpoint(tmp_path):
  write(tmp_path, None, 0, 1, 2, evaluations=[0, 1, 2])
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"round": 3, "pol')  # A kill cut this line short.
  write(tmp_path, 1, 1, evaluations=[2])
  assert rounds(tmp_path) == [0, 1]
  assert evaluations(tmp_path) == [0, 1, 2]
  assert 1 in [
    event.step
    for event in events(tmp_path / 'tensorboard' / 'llama')
    if event.session_log.status == event_pb2.SessionLog.START
  ]


def test_damaged_lines_are_set_aside_and_counted(tmp_path, caplog):
  write(tmp_path, None, 0, 1, 2, evaluations=[0, 1])
  path = tmp_path / 'metrics.jsonl'
  lines = path.read_bytes().splitlines(keepends=True)
  broken = [
    lines[1].replace(b'"round": 1', b'"round" 1'),
    lines[2][:40] + b'\xff' + lines[2][40:],
    b'[3]\n',
    b'{"round": true, "policy": "llama"}\n',
    lines[0][:-1],  # Whole, but for its end: the next line would join it.
  ]
  path.write_bytes(lines[0] + b''.join(broken))
  logging.use_absl_handler()
  for _ in range(2):  # The second time there is nothing to mend.
    with caplog.at_level('WARNING', logger='absl'):
      write(tmp_path, 3, evaluations=[2])
    assert path.read_bytes() == lines[0]
  assert caplog.text.count('5 of 6 lines could not be read') == 1
  assert f'moved to {path}.damaged' in caplog.text
  aside = (tmp_path / 'metrics.jsonl.damaged').read_bytes()
  assert aside == b''.join(broken) + b'\n'
  assert evaluations(tmp_path) == [0, 1, 2, 2]
  assert 'evaluations.jsonl' not in caplog.text


@hypothesis.given(strategies.data())
@hypothesis.settings(max_examples=50, deadline=None)
def test_no_byte_of_a_damaged_file_is_lost(data):
  """Whatever a file holds, its lines are kept, dropped as later, or aside."""
  line = json.dumps({'round': 0, 'policy': 'llama'}).encode() + b'\n'
  found = data.draw(strategies.lists(strategies.sampled_from(
    [line, line[:9], b'\n', b'\r', b'{}\n', b'\xff\n', b'[' * 9]
  ), max_size=9))  # fmt: skip
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'metrics.jsonl')
    path.write_bytes(b''.join(found))
    write(path.parent, 1)
    kept, aside = path.read_bytes(), b''
    if os.path.exists(f'{path}.damaged'):
      aside = pathlib.Path(f'{path}.damaged').read_bytes()
  assert kept == line * kept.count(b'\n')
  ends = b'\r\n'
  assert sorted((kept + aside).translate(None, ends)) == sorted(
    b''.join(found).translate(None, ends)
  )


def test_a_run_without_a_checkpoint_replaces_all_lines(tmp_path):
  write(tmp_path, None, 0, evaluations=[0])
  write(tmp_path, None, evaluations=[0])
  assert rounds(tmp_path) == []
  assert evaluations(tmp_path) == [0]


def test_no_file_exists_before_its_first_line(tmp_path):
  # The first row tells a study that the warm starts are in the cache.
  write(tmp_path, None)
  assert not (tmp_path / 'metrics.jsonl').exists()


def test_what_was_flushed_is_on_disk(tmp_path):
  writer = metrics.Writer(os.fspath(tmp_path), None, {})
  writer.round(row(0))
  writer.flush()
  assert values(tmp_path / 'tensorboard' / row(0).policy)
  writer.close()


def test_an_error_of_the_thread_that_writes_events_is_raised(
  tmp_path, monkeypatch
):
  full = mock.Mock(side_effect=OSError(errno.ENOSPC, 'no room'))
  writer = metrics.Writer(os.fspath(tmp_path), None, {})
  monkeypatch.setattr(tensorboardX.SummaryWriter, 'add_scalar', full)
  writer.round(row(0))
  futures.wait(writer._pending)
  with pytest.raises(OSError, match='no room'):
    writer.round(row(1))
  late = metrics.Writer(os.fspath(tmp_path), None, {})
  late.round(row(0))
  with pytest.raises(OSError, match='no room'):
    late.close()
