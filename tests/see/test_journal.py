import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.see import journal
from mrl_jax.see import wire
from mrl_jax.sharing import publish
from tests import examples
from tests import exchanges

KINDS = exchanges.KINDS
write, read = exchanges.write_journal, exchanges.read_journal
rounds = exchanges.rounds


def group(round, count=2):
  return exchanges.rollouts(round, count)


def connect(folder, kinds=KINDS, **limits):
  """An inbox that has the journal of a as its only peer."""
  inbox = exchanges.inbox(**limits)
  journal.Transport({'b': inbox}, {'a': read(folder)}, kinds)
  return inbox


def collect(inbox, count):
  """Collects rounds; returns how many records each gave, and did not wait."""
  began = time.monotonic()
  counts = [len(inbox.collect(round, KINDS)) for round in range(count)]
  assert time.monotonic() - began < exchanges.DEADLINE_S
  return counts


def damage(folder, round):
  path = folder / 'a' / f'{round:08d}.array_record'
  path.write_bytes(path.read_bytes()[:-1000])


# Files.


def test_a_journal_describes_itself(tmp_path):
  about = exchanges.journal_about(kinds=('rollout',))
  journal.Writer(os.fspath(tmp_path), about, '{"a": 1}')
  reader = read(tmp_path)
  assert reader.about == about
  assert reader.tokenizer() == '{"a": 1}'
  assert not reader.finished()


def test_a_work_dir_may_be_given_for_its_folder_of_journals(tmp_path):
  write(tmp_path / 'see').write(0, group(0))
  for folder in (tmp_path, tmp_path / 'see'):
    assert read(folder).rounds() == [0]


def test_records_are_read_as_they_are_on_the_wire(tmp_path):
  sent = [*group(3), publish.group_stats(group(3)), examples.outcome(round=3)]
  write(tmp_path).write(3, sent)
  assert read(tmp_path).read(3) == [wire.encode(record) for record in sent]


def test_only_the_kinds_of_a_journal_are_written(tmp_path):
  write(tmp_path, kinds=('outcome',)).write(0, [*group(0), examples.outcome()])
  assert read(tmp_path).read(0) == [wire.encode(examples.outcome())]


def test_a_round_that_is_written_again_is_replaced(tmp_path):
  write(tmp_path).write(0, group(0))
  write(tmp_path).write(0, group(0, count=3))
  assert len(read(tmp_path).read(0)) == 3
  assert read(tmp_path).rounds() == [0]


def test_a_round_appears_when_it_is_whole(tmp_path, monkeypatch):
  writer = write(tmp_path)
  writer.write(0, group(0))

  def kill(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(os, 'replace', kill)
    for round in (0, 1):
      with pytest.raises(KeyboardInterrupt):
        writer.write(round, group(round, count=3))
  assert read(tmp_path).rounds() == [0]
  assert len(read(tmp_path).read(0)) == 2
  writer.write(1, group(1))
  assert read(tmp_path).rounds() == [0, 1]


WRITER = """
import sys
from tests import exchanges
writer = exchanges.write_journal(sys.argv[1])
groups = [exchanges.rollouts(round, 200) for round in range(3)]
for n in range(10**6):
  writer.write(n % 3, groups[n % 3])
  print(n, flush=True)
"""


def test_a_kill_leaves_no_half_of_a_round(tmp_path):
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


def test_other_files_are_ignored(tmp_path):
  write(tmp_path).write(1, group(1))
  for name in ('2.txt', 'x.array_record', '00000002.array_record.new'):
    (tmp_path / 'a' / name).write_bytes(b'')
  assert read(tmp_path).rounds() == [1]


@pytest.mark.parametrize('content', [b'', b'{}', bytes(10**5)])
def test_a_file_with_other_contents_is_damaged(tmp_path, content):
  write(tmp_path)
  (tmp_path / 'a' / '00000000.array_record').write_bytes(content)
  with pytest.raises(checks.InputError, match='is damaged'):
    read(tmp_path).read(0)


@pytest.mark.parametrize(
  ('about', 'why'),
  [
    (b'{"policy": "c"}', 'missing required field'),
    (b'not json', 'malformed'),
    (b'{"policy": "\xff"}', 'utf-8'),
    (b'{"x": ' + b'[' * 10**5, 'recursion'),
  ],
)
def test_a_damaged_description_is_reported(tmp_path, about, why):
  write(tmp_path)
  (tmp_path / 'a' / 'journal.json').write_bytes(about)
  with pytest.raises(checks.InputError, match=why):
    read(tmp_path)


def test_a_folder_that_is_not_the_policys_journal_is_reported(tmp_path):
  write(tmp_path, policy='c')
  with pytest.raises(checks.InputError, match='not the journal of a'):
    read(tmp_path)
  os.rename(tmp_path / 'c', tmp_path / 'a')
  with pytest.raises(checks.InputError, match="is about 'c', not 'a'"):
    read(tmp_path)


def test_a_journal_without_a_tokenizer_is_reported(tmp_path):
  write(tmp_path)
  os.remove(tmp_path / 'a' / 'tokenizer.json')
  with pytest.raises(checks.InputError, match=r'tokenizer\.json'):
    read(tmp_path).tokenizer()


# As a peer.


def test_a_journal_that_ends_before_the_run_is_not_waited_for(tmp_path, caplog):
  writer = write(tmp_path)
  writer.write(0, group(0))
  writer.finish()
  inbox = connect(tmp_path, wait_s=exchanges.AGES_S)
  assert collect(inbox, 4) == [2, 0, 0, 0]
  messages = [r.getMessage() for r in caplog.records]
  assert messages == ['the journal of a ends before round 1']


def test_a_journal_that_ends_while_it_is_read_is_not_waited_for(tmp_path):
  writer = write(tmp_path)
  inbox = connect(tmp_path, wait_s=exchanges.AGES_S)
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    received = threads.submit(inbox.collect, 1, KINDS)
    writer.write(0, group(0))
    writer.finish()
    assert received.result(exchanges.DEADLINE_S) == []


def test_a_journal_that_goes_on_is_read_by_a_resumed_run(tmp_path):
  writer = write(tmp_path)
  writer.write(0, group(0))
  writer.finish()
  inbox = connect(tmp_path)
  assert collect(inbox, 2) == [2, 0]
  write(tmp_path).write(2, group(2))
  again = connect(tmp_path)
  again.restore(inbox.state())
  assert rounds(again.collect(2, KINDS)) == [2, 2]
  assert again.ledger.table()['a']['rollout']['published'] == 4


def test_a_journal_is_read_only_up_to_the_round_of_the_run(tmp_path):
  writer = write(tmp_path)
  for round in range(3):
    writer.write(round, group(round))
  inbox = connect(tmp_path)
  inbox.collect(1, KINDS)
  assert inbox.finished['a'] == 1
  assert inbox.ledger.table()['a']['rollout']['published'] == 4


def test_only_shared_kinds_are_delivered(tmp_path):
  write(tmp_path).write(0, [*group(0), examples.outcome()])
  inbox = connect(tmp_path, kinds={'outcome'})
  assert [*map(records.kind, inbox.collect(0, KINDS))] == ['outcome']
  assert {*inbox.ledger.table()['a']} == {'outcome'}


@pytest.mark.parametrize('finished', [False, True])
def test_missing_and_empty_rounds_have_no_records(tmp_path, finished):
  writer = write(tmp_path)
  for round, count in ((0, 2), (1, 0), (3, 2)):
    writer.write(round, group(round, count))
  if finished:
    writer.finish()
  inbox = connect(tmp_path, wait_s=exchanges.AGES_S)
  assert collect(inbox, 4) == [2, 0, 0, 2]


def test_a_damaged_round_is_refused_and_the_run_goes_on(tmp_path, caplog):
  writer = write(tmp_path)
  for round in range(3):
    writer.write(round, group(round))
  for round in (0, 2):
    damage(tmp_path, round)
  with pytest.raises(checks.InputError, match='is damaged'):
    read(tmp_path).read(0)
  inbox = connect(tmp_path, wait_s=exchanges.AGES_S)
  assert collect(inbox, 3) == [0, 2, 0]
  assert inbox.ledger.refusals() == {'a': {'damaged': 2}}
  assert 'b refused a journal of a: damaged' in caplog.text


def test_what_a_journal_holds_is_not_trusted(tmp_path):
  writer = write(tmp_path)
  writer.write(0, exchanges.rollouts(policy='c'))
  writer.write(1, group(1), encode=lambda record: b'\xc1')
  inbox = connect(tmp_path)
  assert collect(inbox, 2) == [0, 0]
  assert inbox.ledger.refusals() == {'a': {'sender': 1, 'undecodable': 2}}


def test_a_journal_does_not_wait_for_room(tmp_path):
  write(tmp_path).write(0, group(0, count=3))
  inbox = connect(tmp_path, records=1, block_s=exchanges.AGES_S)
  assert collect(inbox, 1) == [3]
  assert inbox.ledger.table()['a']['rollout']['evicted'] == 0


def test_a_journal_stops_at_its_limit(tmp_path, caplog):
  about, most = exchanges.journal_about(), 2**20
  for _ in range(2):  # A writer that resumes knows what is there.
    writer = journal.Writer(os.fspath(tmp_path), about, '{}', most)
    for round in range(20):
      writer.write(round, group(round, count=3))
  stored = sum(path.stat().st_size for path in (tmp_path / 'a').iterdir())
  assert most / 4 < stored <= most
  rounds = exchanges.read_journal(tmp_path).rounds()
  assert rounds == [*range(len(rounds))]
  assert 0 < len(rounds) < 20
  assert 'raise see.journal_mib' in caplog.text


@pytest.mark.parametrize(
  ('name', 'finished'), [('journal.json', False), ('', False), ('', True)]
)
def test_a_journal_that_vanishes_is_a_silent_peer(
  tmp_path, name, finished, caplog
):
  writer = write(tmp_path)
  writer.write(0, group(0))
  writer.write(2, group(2))
  if finished:
    writer.finish()
  inbox = connect(tmp_path, wait_s=0.01)
  inbox.collect(0, KINDS)
  os.rename(tmp_path / 'a' / name, tmp_path / 'elsewhere')
  assert inbox.collect(1, KINDS) == []
  assert 'b heard nothing from a' in caplog.text
  os.rename(tmp_path / 'elsewhere', tmp_path / 'a' / name)
  assert rounds(inbox.collect(2, KINDS)) == [2, 2]
