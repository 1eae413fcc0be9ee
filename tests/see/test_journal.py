import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

from absl import logging
import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import inbox
from mrl_jax.see import journal
from mrl_jax.see import wire
from mrl_jax.sharing import xgrpo
from tests import examples
from tests import exchanges

KINDS = set(records.KINDS)


def write(folder, **about):
  return journal.Writer(
    os.fspath(folder), exchanges.journal_about(**about), '{}'
  )


def read(folder, policy='a'):
  return journal.Reader(os.fspath(folder), policy)


def mount(folder, kinds=KINDS, **limits):
  """A queue that has the journal of a as its only peer."""
  box = inbox.Inbox('b', {'a': exchanges.PEER}, exchanges.limits(**limits))
  box.sources.append(journal.Source(read(folder), box, kinds))
  return box


def group(round, samples=2):
  return examples.group([1.0] * samples, round=round)


def rounds(received):
  return [record.header.round for record in received]


def damage(folder, round):
  path = folder / 'a' / f'{round:08d}.array_record'
  path.write_bytes(path.read_bytes()[:-1000])


def test_a_journal_says_whose_it_is(tmp_path):
  about = exchanges.journal_about(kinds=('rollout',))
  journal.Writer(os.fspath(tmp_path), about, '{"a": 1}')
  reader = read(tmp_path)
  assert reader.about == about
  assert reader.tokenizer() == '{"a": 1}'
  assert not reader.finished()


def test_a_work_dir_is_as_good_as_its_folder_of_journals(tmp_path):
  write(tmp_path / 'see').write(0, group(0))
  for folder in (tmp_path, tmp_path / 'see'):
    assert read(folder).rounds() == [0]


def test_records_are_read_as_they_are_on_the_wire(tmp_path):
  sent = [*group(3), xgrpo.group_stats(group(3)), examples.outcome(round=3)]
  write(tmp_path).write(3, sent)
  assert read(tmp_path).read(3) == [wire.encode(record) for record in sent]


def test_only_the_kinds_of_a_journal_are_written(tmp_path):
  write(tmp_path, kinds=('outcome',)).write(0, [*group(0), examples.outcome()])
  assert read(tmp_path).read(0) == [wire.encode(examples.outcome())]


def test_an_empty_round_is_there(tmp_path):
  write(tmp_path).write(0, [])
  assert read(tmp_path).read(0) == []
  box = mount(tmp_path, wait_s=exchanges.AGES_S)
  assert box.collect(0, KINDS) == []
  assert box.heard('a') == 0


def test_a_round_that_is_written_again_is_replaced(tmp_path):
  write(tmp_path).write(0, group(0))
  write(tmp_path).write(0, group(0, samples=3))
  assert len(read(tmp_path).read(0)) == 3
  assert read(tmp_path).rounds() == [0]


def test_a_round_appears_when_it_is_whole(tmp_path, monkeypatch):
  writer = write(tmp_path)
  writer.write(0, group(0))

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(os, 'replace', killed)
    for round in (0, 1):
      with pytest.raises(KeyboardInterrupt):
        writer.write(round, group(round, samples=3))
  assert read(tmp_path).rounds() == [0]
  assert len(read(tmp_path).read(0)) == 2
  writer.write(1, group(1))
  assert read(tmp_path).rounds() == [0, 1]


WRITER = """
import sys
from tests import examples
from tests.see import test_journal
writer = test_journal.write(sys.argv[1])
for n in range(10**6):
  writer.write(n % 3, examples.group([1.0] * 200, round=n % 3))
  print(n, flush=True)
"""


def test_a_kill_leaves_nothing_by_halves(tmp_path):
  process = subprocess.Popen(
    [sys.executable, '-c', WRITER, os.fspath(tmp_path)],
    cwd=pathlib.Path(__file__).parents[2],
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    while process.stdout.readline() != '20\n':
      pass
    process.kill()
  reader = read(tmp_path)
  assert [len(reader.read(round)) for round in reader.rounds()] == [200] * 3


def test_a_journal_that_grows_is_waited_for(tmp_path):
  writer = write(tmp_path)
  box = mount(tmp_path, wait_s=0.1)
  for round in range(3):
    writer.write(round, group(round))
    assert rounds(box.collect(round, KINDS)) == [round] * 2
  assert box.collect(3, KINDS) == []
  assert box.ledger.waited['a'] >= 0.1


def test_a_journal_that_ends_before_the_run_is_not_waited_for(tmp_path, caplog):
  logging.use_absl_handler()
  writer = write(tmp_path)
  writer.write(0, group(0))
  writer.finish()
  box = mount(tmp_path, wait_s=exchanges.AGES_S)
  began = time.monotonic()
  assert [len(box.collect(round, KINDS)) for round in range(4)] == [2, 0, 0, 0]
  assert time.monotonic() - began < exchanges.DEADLINE_S
  told = [r.getMessage() for r in caplog.records]
  assert told == ['the journal of a ends before round 1']


def test_a_journal_that_went_on_is_read_by_a_resumed_run(tmp_path):
  writer = write(tmp_path)
  writer.write(0, group(0))
  writer.finish()
  box = mount(tmp_path)
  for round in range(2):
    box.collect(round, KINDS)
  write(tmp_path).write(2, group(2))
  again = mount(tmp_path)
  again.restore(box.state())
  assert rounds(again.collect(2, KINDS)) == [2, 2]


def test_a_journal_that_ends_while_it_is_read_is_not_waited_for(tmp_path):
  writer = write(tmp_path)
  box = mount(tmp_path, wait_s=exchanges.AGES_S)
  began = time.monotonic()
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    received = threads.submit(box.collect, 1, KINDS)
    writer.write(0, group(0))
    writer.finish()
    assert received.result() == []
  assert time.monotonic() - began < exchanges.DEADLINE_S


def test_a_journal_is_read_as_far_as_the_run_has_come(tmp_path):
  writer = write(tmp_path)
  for round in range(3):
    writer.write(round, group(round))
  box = mount(tmp_path)
  box.collect(1, KINDS)
  assert box.heard('a') == 1
  assert box.ledger.table()['a']['rollout']['published'] == 4


def test_only_kinds_that_are_shared_are_taken_from_a_journal(tmp_path):
  write(tmp_path).write(0, [*group(0), examples.outcome()])
  box = mount(tmp_path, kinds={'outcome'})
  assert [*map(records.kind, box.collect(0, KINDS))] == ['outcome']
  assert {*box.ledger.table()['a']} == {'outcome'}


def test_rounds_that_were_read_are_not_read_again(tmp_path):
  writer = write(tmp_path)
  writer.write(0, group(0))
  box = mount(tmp_path)
  box.collect(0, KINDS)
  again = mount(tmp_path)
  again.restore(box.state())
  writer.write(1, group(1))
  assert rounds(again.collect(1, KINDS)) == [1, 1]
  assert again.ledger.table()['a']['rollout']['published'] == 4


@pytest.mark.parametrize('finished', [False, True])
def test_a_round_that_is_missing_is_empty(tmp_path, finished):
  writer = write(tmp_path)
  for round in (0, 1, 3):
    writer.write(round, group(round))
  if finished:
    writer.finish()
  box = mount(tmp_path, wait_s=exchanges.AGES_S)
  began = time.monotonic()
  assert [len(box.collect(round, KINDS)) for round in range(4)] == [2, 2, 0, 2]
  assert time.monotonic() - began < exchanges.DEADLINE_S


def test_a_damaged_round_is_refused_and_the_run_goes_on(tmp_path, caplog):
  logging.use_absl_handler()
  writer = write(tmp_path)
  for round in range(3):
    writer.write(round, group(round))
  for round in (0, 2):
    damage(tmp_path, round)
  with pytest.raises(checks.InputError, match='is damaged'):
    read(tmp_path).read(0)
  box = mount(tmp_path, wait_s=exchanges.AGES_S)
  began = time.monotonic()
  assert [len(box.collect(round, KINDS)) for round in range(3)] == [0, 2, 0]
  assert time.monotonic() - began < exchanges.DEADLINE_S
  assert box.ledger.refusals() == {'a': {'damaged': 2}}
  assert 'b refused a journal of a: damaged' in caplog.text


@pytest.mark.parametrize('content', [b'', b'{}', bytes(10**5)])
def test_a_file_that_is_something_else_is_damaged(tmp_path, content):
  write(tmp_path)
  (tmp_path / 'a' / '00000000.array_record').write_bytes(content)
  with pytest.raises(checks.InputError, match='is damaged'):
    read(tmp_path).read(0)


def test_other_files_are_left_alone(tmp_path):
  write(tmp_path).write(1, group(1))
  for name in ('2.txt', 'x.array_record', '00000002.array_record.new'):
    (tmp_path / 'a' / name).write_bytes(b'')
  assert read(tmp_path).rounds() == [1]


def test_what_is_no_record_in_a_journal_is_refused(tmp_path, monkeypatch):
  with monkeypatch.context() as patched:
    patched.setattr(wire, 'encode', lambda record: b'\xc1')
    write(tmp_path).write(0, group(0))
  box = mount(tmp_path)
  assert box.collect(0, KINDS) == []
  assert box.ledger.refusals() == {'a': {'undecodable': 2}}


def test_the_records_of_another_policy_are_refused(tmp_path):
  write(tmp_path).write(0, examples.group([1.0], policy='c'))
  box = mount(tmp_path)
  assert box.collect(0, KINDS) == []
  assert box.ledger.refusals() == {'a': {'sender': 1}}


def test_a_journal_does_not_wait_for_room(tmp_path):
  write(tmp_path).write(0, group(0, samples=3))
  box = mount(tmp_path, records=1, block_s=exchanges.AGES_S)
  began = time.monotonic()
  assert len(box.collect(0, KINDS)) == 1
  assert time.monotonic() - began < exchanges.DEADLINE_S
  assert box.ledger.table()['a']['rollout']['evicted'] == 2


def test_what_is_no_journal_is_told(tmp_path):
  write(tmp_path)
  with pytest.raises(checks.InputError, match='not the journal of c'):
    read(tmp_path, 'c')


@pytest.mark.parametrize(
  ('about', 'why'),
  [
    (b'{"policy": "c"}', 'missing required field'),
    (b'not json', 'malformed'),
    (b'{"policy": "\xff"}', 'utf-8'),
    (b'{"x": ' + b'[' * 10**5, 'recursion'),
  ],
)
def test_what_only_looks_like_a_journal_is_told(tmp_path, about, why):
  write(tmp_path)
  (tmp_path / 'a' / 'journal.json').write_bytes(about)
  with pytest.raises(checks.InputError, match=why):
    read(tmp_path)


def test_the_journal_of_another_policy_is_told(tmp_path):
  write(tmp_path, policy='c')
  os.rename(tmp_path / 'c', tmp_path / 'a')
  with pytest.raises(checks.InputError, match="is about 'c', not 'a'"):
    read(tmp_path)


@pytest.mark.parametrize(
  ('name', 'finished'), [('journal.json', False), ('', False), ('', True)]
)
def test_a_journal_that_vanishes_is_a_silent_peer(
  tmp_path, name, finished, caplog
):
  logging.use_absl_handler()
  writer = write(tmp_path)
  writer.write(0, group(0))
  writer.write(2, group(2))
  if finished:
    writer.finish()
  box = mount(tmp_path, wait_s=0.01)
  box.collect(0, KINDS)
  os.rename(tmp_path / 'a' / name, tmp_path / 'elsewhere')
  assert box.collect(1, KINDS) == []
  assert 'b heard nothing from a' in caplog.text
  os.rename(tmp_path / 'elsewhere', tmp_path / 'a' / name)
  assert rounds(box.collect(2, KINDS)) == [2, 2]


def test_a_journal_without_a_tokenizer_is_told(tmp_path):
  write(tmp_path)
  os.remove(tmp_path / 'a' / 'tokenizer.json')
  with pytest.raises(checks.InputError, match=r'tokenizer\.json'):
    read(tmp_path).tokenizer()
