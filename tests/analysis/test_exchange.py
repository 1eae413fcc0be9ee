"""Journals are read beside a run, and THL transfers their rollouts anew."""

import dataclasses
import os

from array_record.python import array_record_module
import msgspec
import pytest

from mrl_jax import checks
from mrl_jax.analysis import exchange as exchange_lib
from mrl_jax.see import wire
from mrl_jax.thl import transfer
from tests.analysis import journals
from tests.analysis import workdirs


def read(folder, newest=9, only=None):
  return exchange_lib.read(os.fspath(folder), newest, only)


def transfer_all(folder, newest=9, limits=journals.LIMITS):
  exchange = read(folder, newest)
  return exchange_lib.transfer_all(dataclasses.replace(exchange, limits=limits))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Journals of four rounds, without other files of a run."""
  return journals.write_all(tmp_path_factory.mktemp('run'), rounds=4)


def test_all_kinds_agree_on_the_samples_that_they_are_about(folder):
  llama = read(folder).journals['llama']
  totals = llama.totals()
  assert {k: t['records'] for k, t in totals.items()} == {
    'rollout': 16, 'group_stats': 4, 'outcome': 4,
  }  # fmt: skip
  for sums in totals.values():
    assert (sums['samples'], sums['successes']) == (16, 4)
  assert totals['rollout']['reward'] == totals['group_stats']['reward'] == 4
  assert 'reward' not in totals['outcome']
  assert totals['rollout']['stopped'] == 12
  rollouts = [r for n in range(4) for r in journals.group('llama', n)]
  assert totals['rollout']['tokens'] == sum(len(r.ids) for r in rollouts)
  assert totals['rollout']['bytes'] == sum(
    len(wire.encode(r)) for r in rollouts
  )
  assert llama.rewards() == dict.fromkeys(range(4), 0.25)


@pytest.mark.parametrize(
  ('newest', 'only', 'rounds'),
  [(2, None, [2, 3]), (9, None, [0, 1, 2, 3]), (2, 0, [0]), (2, 7, [])],
)
def test_rollouts_are_of_the_newest_rounds_or_of_one(
  folder, newest, only, rounds
):
  llama = read(folder, newest, only).journals['llama']
  assert list(llama.rounds) == [0, 1, 2, 3]
  assert sorted(llama.chosen) == rounds
  assert {r.header.round for r in llama.rollouts} == {*rounds}


def test_a_folder_of_journals_is_read_like_its_work_dir(tmp_path, folder):
  whole, inner = read(folder), read(os.path.join(folder, 'see'))
  assert whole.journals.keys() == inner.journals.keys()
  assert whole.journals['llama'].rounds == inner.journals['llama'].rounds
  assert inner.problems == []
  assert inner.limits == transfer.Limits(max_tokens=16)  # Of config_keys.py.


def test_a_journal_may_grow_and_have_empty_rounds(tmp_path):
  rounds = [[], journals.group('llama', 1)]
  writer = journals.write(tmp_path, 'llama', rounds, finish=False)
  (tmp_path / 'llama' / '00000002.array_record.new').write_bytes(b'unfinished')
  first = read(tmp_path).journals['llama']
  assert not first.finished
  assert [bool(by_kind) for by_kind in first.rounds.values()] == [False, True]
  writer.write(2, journals.group('llama', 2))
  writer.finish()
  grown = read(tmp_path).journals['llama']
  assert grown.finished
  assert len(grown.rollouts) == 8


def test_the_residual_is_of_all_rollouts_in_both_directions(folder):
  residuals, offers = transfer_all(folder, newest=2)
  assert residuals.keys() == {'llama->gemma', 'gemma->llama'}
  assert len(offers) == 16
  for pair, residual in residuals.items():
    sender, receiver = pair.split('->')
    expected = transfer.Residual()
    for round in (2, 3):
      for rollout in journals.group(sender, round):
        transfer.transfer(
          rollout, journals.TOKENIZERS[receiver], journals.LIMITS, expected
        )
    assert residual == expected
    assert residual.rollouts == 8
    assert sum(residual.chunks.values()) > residual.chunks['1:1']


def test_refused_rollouts_have_a_reason_and_come_last(folder):
  limits = transfer.Limits(max_tokens=5)
  residuals, offers = transfer_all(folder, newest=1, limits=limits)
  refused = [bool(offer.residual.refused) for offer in offers]
  assert 0 < sum(refused) < len(offers)
  assert sum(r.refused['too_long'] for r in residuals.values()) == sum(refused)
  for sender in journals.TOKENIZERS:
    of_sender = [bool(o.residual.refused) for o in offers if o.sender == sender]
    assert of_sender == sorted(of_sender)


def test_pairs_take_turns_and_rollouts_that_show_most_come_first(tmp_path):
  # Both tokenizers segment the first payload alike.
  payloads = (b'=', b'= 10 = 13', b'= 13 = 10')
  for policy in journals.TOKENIZERS:
    rounds = [journals.group(policy, r, payloads) for r in range(2)]
    for rollouts in rounds:
      rollouts[2] = msgspec.structs.replace(rollouts[2], verdict='correct')
    journals.write(tmp_path, policy, rounds)
  _, offers = transfer_all(tmp_path)
  assert [offer.sender for offer in offers] == ['gemma', 'llama'] * 6
  for sender in journals.TOKENIZERS:
    headers = [o.rollout.header for o in offers if o.sender == sender]
    assert [(h.sample, h.round) for h in headers] == [
      (2, 1), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0),
    ]  # fmt: skip


def test_damaged_records_are_counted_and_the_rest_is_read(tmp_path):
  journals.write_all(tmp_path)
  folder = tmp_path / 'see' / 'llama'
  os.truncate(folder / '00000000.array_record', 1000)
  rollout = journals.group('llama', 1)[0]
  unsound = msgspec.structs.replace(rollout, policy_logp=-rollout.policy_logp)
  writer = array_record_module.ArrayRecordWriter(
    os.fspath(folder / '00000001.array_record'), 'group_size:1'
  )
  for data in (b'\xff', b'', wire.encode(unsound), wire.encode(rollout)):
    writer.write(data)
  writer.close()
  exchange = read(tmp_path)
  assert not exchange.journals['llama'].rounds[0]
  assert len(exchange.journals['llama'].rollouts) == 1 + 4
  assert len(exchange.journals['gemma'].rollouts) == 12
  damaged, *bad = exchange.problems
  assert damaged.startswith('llama, round 0 left out: ')
  assert 'damaged' in damaged
  assert bad == ['llama, round 1: 2 bad records, undecodable',
                 'llama, round 1: 1 bad records, logp']  # fmt: skip


@pytest.mark.parametrize(
  ('name', 'content', 'problem'),
  [
    ('see/gemma/journal.json', '{', 'gemma left out'),
    ('see/gemma/tokenizer.json', '{}', 'the tokenizer of gemma left out'),
    ('metrics.jsonl', 'no row\n', 'metrics.jsonl, line 1 left out'),
  ],
)
def test_a_damaged_file_is_named_and_the_others_are_read(
  tmp_path, name, content, problem
):
  workdirs.write(tmp_path)
  journals.write_all(tmp_path)
  (tmp_path / name).write_text(content)
  exchange = read(tmp_path)
  (found,) = exchange.problems
  assert found.startswith(problem)
  assert len(exchange.journals['llama'].rollouts) == 12
  if name == 'see/gemma/tokenizer.json':
    residuals, _ = exchange_lib.transfer_all(exchange)
    assert residuals.keys() == {'gemma->llama'}


def test_a_folder_without_anything_is_refused_with_what_was_looked_for(
  tmp_path,
):
  for folder in (tmp_path, tmp_path / 'nowhere'):
    with pytest.raises(checks.InputError) as error:
      read(folder)
    for part in (f'{folder}', 'POLICY/journal.json', f'{folder / "see"}'):
      assert part in str(error.value)
  journals.write(tmp_path, 'llama', [])
  (tmp_path / 'llama' / 'journal.json').write_text('{')
  with pytest.raises(checks.InputError, match=r'llama.*truncated'):
    read(tmp_path)


def test_limits_are_those_of_the_run(tmp_path):
  workdirs.write(
    tmp_path, config={'thl.max_tokens': 7, 'thl.max_residual': 0.25}
  )
  assert read(tmp_path).limits == transfer.Limits(
    max_tokens=7, max_residual=0.25
  )


def test_rollouts_not_trained_on_are_a_share_of_those_that_are_settled(
  tmp_path,
):
  fates = {'published': 9, 'used': 7, 'stale': 1}
  stats = {'published': 2, 'used': 2}
  rows = [
    workdirs.row(0, 'b', peer_rows=6, exchange={'a': {'rollout': fates}}),
    # All still wait.
    workdirs.row(1, 'b', exchange={'a': {'rollout': {'published': 9}}}),
    workdirs.row(1, 'a', exchange={'b': {'group_stats': stats}}),
  ]
  workdirs.write(tmp_path, rows=rows)
  assert read(tmp_path).unlearned() == {'b': {0: 0.25}}
