import json
import os

from array_record.python import array_record_module
import msgspec
import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.analysis import exchange as inspection
from mrl_jax.see import journal
from mrl_jax.see import wire
from mrl_jax.sharing import xgrpo
from mrl_jax.thl import transfer
from tests import examples

TOKENIZERS = {
  'llama': examples.tokenizer('byte_level'),
  'gemma': examples.tokenizer('sentencepiece'),
}
LIMITS = transfer.Limits(max_tokens=64)
PAYLOADS = (b'= 10 = 13', b'top score\n= 9', ' ≈ 3\\␣∎'.encode(), b'\xe2\x89')


def write(folder, policy, rounds, kinds=records.KINDS, finish=True):
  """Journals the records of each round; returns the writer."""
  tokenizer = TOKENIZERS[policy]
  about = journal.About(
    policy=policy, run='run', tokenizer=tokenizer.fingerprint,
    vocab_size=tokenizer.vocab_size, kinds=kinds,
  )  # fmt: skip
  writer = journal.Writer(os.fspath(folder), about, tokenizer.to_json())
  for round, published in enumerate(rounds):
    writer.write(round, published)
  if finish:
    writer.finish()
  return writer


def group(policy, round, prompt='p0', payloads=PAYLOADS):
  """Rollouts of a prompt; the first is correct, and the last is cut off."""
  return [
    examples.rollout(
      payload, float(g == 0), encoder=TOKENIZERS[policy], policy=policy,
      round=round, prompt=prompt, sample=g,
      finish='stop' if g < len(payloads) - 1 else 'length',
    )
    for g, payload in enumerate(payloads)
  ]  # fmt: skip


def published(policy, round):
  """Records of all kinds about one group."""
  rollouts = group(policy, round)
  outcome = examples.outcome(PAYLOADS[:1], policy=policy, round=round)
  return [*rollouts, xgrpo.group_stats(rollouts), outcome]


def workdir(folder, rounds=3):
  for policy in TOKENIZERS:
    write(folder / 'see', policy, [published(policy, r) for r in range(rounds)])
  return folder


def row(round, policy, sender, peer_rows=0, **kinds):
  return {'round': round, 'policy': policy, 'peer_rows': peer_rows,
          'reward': 0.5, 'exchange': {sender: kinds}}  # fmt: skip


def write_rows(folder, *rows):
  lines = ''.join(json.dumps(r) + '\n' for r in rows)
  (folder / 'metrics.jsonl').write_text(lines)


def test_kinds_agree_on_the_samples_they_are_about(tmp_path):
  found = inspection.read(os.fspath(workdir(tmp_path)), newest=1)
  llama = found.journals['llama']
  totals = llama.totals()
  assert {k: t['records'] for k, t in totals.items()} == {
    'rollout': 12, 'group_stats': 3, 'outcome': 3,
  }  # fmt: skip
  for sums in totals.values():
    assert (sums['samples'], sums['successes']) == (12, 3)
  assert totals['rollout']['reward'] == totals['group_stats']['reward'] == 3
  assert 'reward' not in totals['outcome']
  assert totals['rollout']['stopped'] == 9
  rollouts = [r for n in range(3) for r in group('llama', n)]
  assert totals['rollout']['tokens'] == sum(len(r.ids) for r in rollouts)
  assert totals['rollout']['bytes'] == sum(
    len(wire.encode(r)) for r in rollouts
  )
  assert llama.rewards() == {0: 0.25, 1: 0.25, 2: 0.25}


def test_rollouts_are_of_the_newest_rounds_or_of_one(tmp_path):
  folder = os.fspath(workdir(tmp_path, rounds=4))

  def rounds(*which):
    llama = inspection.read(folder, *which).journals['llama']
    assert list(llama.rounds) == [0, 1, 2, 3]
    assert {r.header.round for r in llama.rollouts} == {*llama.looked_at}
    return sorted(llama.looked_at)

  assert rounds(2) == [2, 3]
  assert rounds(9) == [0, 1, 2, 3]
  assert rounds(2, 0) == [0]
  assert rounds(2, 7) == []


def test_see_is_read_like_its_work_dir(tmp_path):
  found, inner = (
    inspection.read(os.fspath(folder), newest=1)
    for folder in (workdir(tmp_path), tmp_path / 'see')
  )
  assert found.journals.keys() == inner.journals.keys() == TOKENIZERS.keys()
  assert found.journals['llama'].rounds == inner.journals['llama'].rounds


def test_a_journal_may_grow_and_have_empty_rounds(tmp_path):
  writer = write(tmp_path, 'llama', [[], group('llama', 1)], finish=False)
  (tmp_path / 'llama' / '00000002.array_record.new').write_bytes(b'unfinished')

  def read():
    return inspection.read(os.fspath(tmp_path), newest=9).journals['llama']

  first = read()
  assert not first.finished
  assert [bool(by_kind) for by_kind in first.rounds.values()] == [False, True]
  writer.write(2, group('llama', 2))
  writer.finish()
  assert read().finished
  assert len(read().rollouts) == 8


def test_the_residual_is_that_of_every_rollout_in_both_directions(tmp_path):
  found = inspection.read(os.fspath(workdir(tmp_path)), newest=2)
  residuals, tries = inspection.carry(found.journals, LIMITS)
  assert residuals.keys() == {'llama->gemma', 'gemma->llama'}
  assert len(tries) == 16
  for pair, residual in residuals.items():
    sender, receiver = pair.split('->')
    expected = transfer.Residual()
    for round in (1, 2):
      for rollout in group(sender, round):
        transfer.transfer(rollout, TOKENIZERS[receiver], LIMITS, expected)
    assert residual == expected
    assert residual.rollouts == 8
    assert sum(residual.chunks.values()) > residual.chunks['1:1']


def test_refused_rollouts_have_a_reason_and_come_last(tmp_path):
  found = inspection.read(os.fspath(workdir(tmp_path)), newest=1)
  limits = transfer.Limits(max_tokens=5)
  residuals, tries = inspection.carry(found.journals, limits)
  refused = [bool(t.residual.refused) for t in tries]
  assert 0 < sum(refused) < len(tries)
  assert sum(r.refused['too_long'] for r in residuals.values()) == sum(refused)
  for sender in TOKENIZERS:
    of_sender = [bool(t.residual.refused) for t in tries if t.sender == sender]
    assert of_sender == sorted(of_sender)


def test_pairs_take_turns_with_what_is_cut_otherwise_correct_and_new(tmp_path):
  payloads = (b'=', b'= 10 = 13', b'= 13 = 10')  # The first is cut alike.
  for policy in TOKENIZERS:
    rounds = [group(policy, r, payloads=payloads) for r in range(2)]
    for rollouts in rounds:
      rollouts[2] = msgspec.structs.replace(rollouts[2], verdict='correct')
    write(tmp_path, policy, rounds)
  found = inspection.read(os.fspath(tmp_path), newest=9)
  _, tries = inspection.carry(found.journals, LIMITS)
  assert [t.sender for t in tries] == ['gemma', 'llama'] * 6
  for sender in TOKENIZERS:
    headers = [t.rollout.header for t in tries if t.sender == sender]
    assert [(h.sample, h.round) for h in headers] == [
      (2, 1), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0),
    ]  # fmt: skip


def byte_ends(lengths):
  return {sum(lengths[: i + 1]) for i in range(len(lengths))}


@pytest.mark.parametrize('payload', PAYLOADS)
@pytest.mark.parametrize('finish', ['stop', 'length'])
@pytest.mark.parametrize('sender', TOKENIZERS)
def test_chunks_lie_between_common_boundaries_and_keep_sums(
  sender, finish, payload
):
  (receiver,) = (t for p, t in TOKENIZERS.items() if p != sender)
  rollout = examples.rollout(payload, finish=finish, encoder=TOKENIZERS[sender])
  chunks = inspection.chunks(rollout, receiver, LIMITS)
  carried = receiver.byte_length_V[receiver.encode(payload)]
  common = byte_ends([*rollout.byte_lengths]) & byte_ends([*carried])
  assert len(chunks) == len(common) + (finish == 'stop')
  texts = [c.text for c in chunks]
  if finish == 'stop':
    assert chunks[-1][:3] == ('∎', ['∎'], ['∎'])
    texts.pop()
  assert b''.join(map(examples.read_back, texts)) == payload
  for c in chunks[: len(texts)]:
    assert examples.read_back(c.text) == b''.join(
      map(examples.read_back, c.sent)
    )
    assert examples.read_back(c.text) == b''.join(
      map(examples.read_back, c.carried)
    )
  for c in chunks:
    assert c.sent_logp == pytest.approx(c.carried_logp, abs=1e-5)
  total = rollout.policy_logp.sum(dtype=float)
  assert sum(c.sent_logp for c in chunks) == pytest.approx(total)


def test_between_equal_tokenizers_every_token_is_a_chunk():
  tokenizer = TOKENIZERS['llama']
  control = next(
    i for i, b in enumerate(tokenizer.token_bytes)
    if not b and i != tokenizer.eos_id
  )  # fmt: skip
  ids = [*tokenizer.encode(b'= 9'), control, tokenizer.eos_id]
  rollout = msgspec.structs.replace(
    examples.rollout(b'= 9', encoder=tokenizer),
    ids=np.array(ids, np.int32),
    byte_lengths=tokenizer.byte_length_V[ids],
    policy_logp=-np.arange(len(ids), dtype=np.float32),
    mask=np.ones(len(ids), bool),
  )
  chunks = inspection.chunks(rollout, tokenizer, LIMITS)
  assert len(chunks) == len(ids)
  assert [c[:3] for c in chunks[-2:]] == [('∅', ['∅'], ['∅']),
                                          ('∎', ['∎'], ['∎'])]  # fmt: skip
  assert [c.carried_logp for c in chunks] == [*rollout.policy_logp]


def test_what_is_damaged_is_told_and_the_rest_is_there(tmp_path):
  workdir(tmp_path)
  folder = tmp_path / 'see' / 'llama'
  os.truncate(folder / '00000000.array_record', 1000)
  rollout = group('llama', 1)[0]
  unsound = msgspec.structs.replace(rollout, policy_logp=-rollout.policy_logp)
  writer = array_record_module.ArrayRecordWriter(
    os.fspath(folder / '00000001.array_record'), 'group_size:1'
  )
  for data in (b'\xff', b'', wire.encode(unsound), wire.encode(rollout)):
    writer.write(data)
  writer.close()
  found = inspection.read(os.fspath(tmp_path), newest=9)
  assert not found.journals['llama'].rounds[0]
  assert len(found.journals['llama'].rollouts) == 1 + 4
  assert len(found.journals['gemma'].rollouts) == 12
  damaged, *bad = found.problems
  assert damaged.startswith('llama, round 0: ')
  assert 'damaged' in damaged
  assert bad == ['llama, round 1: 2 bad records, undecodable',
                 'llama, round 1: 1 bad records, logp']  # fmt: skip


@pytest.mark.parametrize(
  ('name', 'content'),
  [
    ('see/gemma/journal.json', '{'),
    ('see/gemma/tokenizer.json', '{}'),
    ('config.json', '{"thl.max_tokens": "many"}'),
    ('summary.json', '{"exchange": 3}'),
    ('metrics.jsonl', 'no row\n'),
  ],
)
def test_a_damaged_file_is_told_and_the_others_are_there(
  tmp_path, name, content
):
  workdir(tmp_path)
  (tmp_path / name).write_text(content)
  found = inspection.read(os.fspath(tmp_path), newest=9)
  (problem,) = found.problems
  assert {'gemma', name} & {*problem.replace(':', '').split(' ')}
  assert len(found.journals['llama'].rollouts) == 12
  if name == 'see/gemma/tokenizer.json':
    residuals, _ = inspection.carry(found.journals, LIMITS)
    assert residuals.keys() == {'gemma->llama'}


def test_a_folder_without_anything_is_told_what_was_looked_for(tmp_path):
  for folder in (tmp_path, tmp_path / 'nowhere'):
    with pytest.raises(checks.InputError) as told:
      inspection.read(os.fspath(folder), newest=1)
    for part in (f'{folder}', 'POLICY/journal.json', f'{folder / "see"}'):
      assert part in str(told.value)


def test_a_folder_with_nothing_sound_is_told_why(tmp_path):
  write(tmp_path, 'llama', [])
  (tmp_path / 'llama' / 'journal.json').write_text('{')
  with pytest.raises(checks.InputError, match=r'llama.*truncated'):
    inspection.read(os.fspath(tmp_path), newest=1)


def test_limits_are_those_of_the_run(tmp_path):
  workdir(tmp_path)
  assert inspection.read(os.fspath(tmp_path), newest=1).limits is None
  values = {'thl.max_tokens': 7, 'thl.max_residual': 0.25, 'seed': 0}
  (tmp_path / 'config.json').write_text(json.dumps(values))
  assert inspection.read(os.fspath(tmp_path), newest=1).limits == (
    transfer.Limits(max_tokens=7, max_residual=0.25)
  )


def test_fates_add_up_over_rounds_until_there_is_a_summary(tmp_path):
  write_rows(
    tmp_path,
    row(0, 'b', 'a', rollout={'published': 5, 'bytes': 9, 'used': 3}),
    row(0, 'a', 'b', group_stats={'published': 2, 'used': 2}),
    row(1, 'b', 'a', rollout={'published': 4, 'used': 1, 'stale': 2}),
  )
  found = inspection.read(os.fspath(tmp_path), newest=1)
  assert found.fates() == {
    'a->b': {'rollout': {'published': 9, 'bytes': 9, 'used': 4, 'stale': 2,
                         'waiting': 3}},
    'b->a': {'group_stats': {'published': 2, 'used': 2, 'waiting': 0}},
  }  # fmt: skip
  summary = {
    'exchange': {'a->b': {'rollout': {'published': 9, 'used': 8}}},
    'sent': {'b->c': {'rollout': {'published': 1, 'acknowledged': 1}}},
  }
  (tmp_path / 'summary.json').write_text(json.dumps(summary))
  found = inspection.read(os.fspath(tmp_path), newest=1)
  assert found.fates() == {**summary['exchange'], **summary['sent']}


def test_what_was_not_learned_from_is_stale_or_refused(tmp_path):
  write_rows(
    tmp_path,
    row(0, 'b', 'a', 6, rollout={'published': 9, 'used': 7, 'stale': 1}),
    row(1, 'b', 'a', 0, rollout={'published': 9}),  # Still waiting.
    row(1, 'a', 'b', 0, group_stats={'published': 2, 'used': 2}),
  )
  found = inspection.read(os.fspath(tmp_path), newest=1)
  assert found.unlearned() == {'b': {0: 0.25}}
