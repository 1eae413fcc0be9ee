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
  assert records.fault(xgrpo.group_stats([SOUND])) is None


@pytest.mark.parametrize(
  ('record', 'fault'),
  [
    (changed(header=examples.header(schema=2)), 'schema'),
    (changed(ids=SOUND.ids.astype(np.int64)), 'ids_type'),
    (changed(policy_logp=SOUND.policy_logp[:-1]), 'policy_logp_type'),
    (changed(ids=-SOUND.ids), 'negative'),
    (changed(payload=b'= 133'), 'byte_lengths'),
    (changed(policy_logp=-SOUND.policy_logp), 'logp'),
    (changed(sampling_logp=SOUND.sampling_logp * np.nan), 'logp'),
    (changed(reward=np.inf), 'not_finite'),
    (
      changed(
        payload=b'= 133', byte_lengths=np.array([1, 1, 1, 1, 1], np.int32)
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
  assert records.fault(replace(stats, reward_sum=np.nan)) == 'not_finite'
  assert records.fault(replace(stats, successes=2)) == 'counts'


def test_identity_tells_kinds_and_samples_apart():
  group = examples.group([1.0, 0.0])
  some = [*group, xgrpo.group_stats(group)]
  assert len({records.identity(r) for r in some}) == 3
  assert [records.kind(r) for r in some] == [
    'rollout',
    'rollout',
    'group_stats',
  ]
