import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.sharing import xgrpo
from tests import examples

SOUND = examples.rollout(b'= 13')


def changed(**fields):
  return msgspec.structs.replace(SOUND, **fields)


def test_sound_records_have_no_fault():
  assert records.fault(SOUND) is None
  assert records.fault(examples.rollout(b'', finish='stop')) is None
  assert records.fault(examples.rollout(b'', finish='length')) is None
  assert records.fault(examples.rollout(logp=np.zeros(5, np.float32))) is None
  assert records.fault(xgrpo.group_stats([SOUND])) is None


@pytest.mark.parametrize(
  ('record', 'fault'),
  [
    (changed(header=examples.header(schema=2)), 'schema'),
    (changed(ids=SOUND.ids.astype(np.int64)), 'ids_type'),
    (changed(policy_logp=SOUND.policy_logp[:-1]), 'policy_logp_type'),
    (changed(ids=SOUND.ids.reshape(1, -1)), 'ids_type'),
    (changed(ids=-SOUND.ids), 'negative'),
    (changed(byte_lengths=np.array([2, -1, 2, 1, 0], np.int32)), 'negative'),
    (changed(payload=b'= 133'), 'byte_lengths'),
    (changed(policy_logp=-SOUND.policy_logp), 'logp'),
    (changed(sampling_logp=SOUND.sampling_logp * np.nan), 'logp'),
    (changed(policy_logp=np.full(5, -3e38, np.float32)), 'logp'),
    (changed(reward=np.inf), 'reward'),
    (changed(reward=np.nan), 'reward'),
    (changed(reward=1e300), 'reward'),
    (changed(finish='tired'), 'finish'),
    (changed(header=examples.header(sample=-1)), 'sample'),
    (
      changed(
        payload=b'= 133', byte_lengths=np.array([1, 1, 1, 1, 1], np.int32)
      ),
      'finish',
    ),
    (
      changed(
        payload=b'',
        ids=SOUND.ids[:0],
        byte_lengths=SOUND.byte_lengths[:0],
        sampling_logp=SOUND.sampling_logp[:0],
        policy_logp=SOUND.policy_logp[:0],
      ),
      'finish',
    ),
  ],
)
def test_every_fault_is_named(record, fault):
  assert records.fault(record) == fault


def test_faults_of_group_stats():
  stats = xgrpo.group_stats([SOUND])
  replace = msgspec.structs.replace
  for fields, fault in (
    ({'reward_sum': np.nan}, 'reward'),
    ({'reward_square_sum': np.nan}, 'reward'),
    ({'reward_sum': 1e300, 'reward_square_sum': 1e300}, 'reward'),
    ({'reward_square_sum': -1.0}, 'moments'),
    ({'reward_sum': 2.0}, 'moments'),  # One reward, 2, has the square 4.
    ({'successes': 2}, 'counts'),
    ({'count': 0, 'successes': 0}, 'counts'),
    ({'count': -2, 'successes': -3}, 'counts'),
    ({'header': SOUND.header}, 'sample'),
  ):
    assert records.fault(replace(stats, **fields)) == fault, fields
  many = xgrpo.group_stats(examples.group([0.1] * 7))
  assert records.fault(many) is None  # Its sums are rounded.


def test_identity_tells_where_and_when_and_what():
  group = examples.group([1.0, 0.0])
  elsewhere = [
    examples.rollout(**{field: value})
    for field, value in (
      ('run', 'other'), ('round', 1), ('policy', 'c'), ('prompt', 'p1')
    )
  ]  # fmt: skip
  some = [*group, xgrpo.group_stats(group)]
  assert len({records.identity(r) for r in (*some, *elsewhere)}) == 7
  assert [records.kind(r) for r in some] == [
    'rollout',
    'rollout',
    'group_stats',
  ]
