import hypothesis
from hypothesis import strategies as st
import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.sharing import publish
from tests import examples

SOUND = examples.rollout(b'= 13')
NOTHING = {
  'payload': b'',
  'ids': SOUND.ids[:0],
  'byte_lengths': SOUND.byte_lengths[:0],
  'sampling_logp': SOUND.sampling_logp[:0],
  'policy_logp': SOUND.policy_logp[:0],
  'mask': SOUND.mask[:0],
}
STATS = publish.group_stats([SOUND])
OUTCOME = examples.outcome()


def changed(**fields):
  return msgspec.structs.replace(SOUND, **fields)


def lengths(*values):
  return np.array(values, np.int32)


def header(**fields):
  return {'header': examples.header(**fields)}


@pytest.mark.parametrize(
  'record',
  [
    SOUND,
    examples.rollout(b'', finish='stop'),
    examples.rollout(b'', finish='length'),
    examples.rollout(finish='stop_string'),
    examples.rollout(logp=np.zeros(5, np.float32)),
    changed(finish='length', **NOTHING),
    changed(mask=~SOUND.mask, top_p=0.1, temperature=0.0, advantage=-2.0),
    changed(ids=np.repeat(SOUND.ids, 2)[::2]),
    STATS,
    publish.group_stats(examples.group([0.1] * 7)),  # With rounded sums.
    OUTCOME,
    examples.outcome(()),
    msgspec.structs.replace(OUTCOME, successes=4),
  ],
)
def test_sound_records_have_no_fault(record):
  assert records.fault(record) is None


@pytest.mark.parametrize(
  ('fields', 'fault'),
  [
    (header(schema=2), 'schema'),
    (header(prompt='p' * 1025), 'header'),
    (header(policy='p' * 1025), 'header'),
    (header(run='r' * 1025), 'header'),
    (header(tokenizer='t' * 1025), 'header'),
    (header(created=np.nan), 'header'),
    (header(created=-np.inf), 'header'),
    ({'ids': SOUND.ids.astype(np.int64)}, 'ids_type'),
    ({'ids': SOUND.ids.reshape(1, -1)}, 'ids_type'),
    ({'byte_lengths': SOUND.policy_logp}, 'byte_lengths_type'),
    ({'sampling_logp': SOUND.ids}, 'sampling_logp_type'),
    ({'policy_logp': SOUND.policy_logp[:-1]}, 'policy_logp_type'),
    ({'policy_logp': SOUND.policy_logp.astype('>f4')}, 'policy_logp_type'),
    ({'mask': SOUND.ids}, 'mask_type'),
    ({'mask': SOUND.mask[:-1]}, 'mask_type'),
    ({'ids': -SOUND.ids}, 'negative'),
    ({'byte_lengths': lengths(2, -1, 2, 1, 0)}, 'negative'),
    ({'payload': b'= 133'}, 'byte_lengths'),
    ({'byte_lengths': lengths(2**31 - 1, 2**31 - 1, 2, 4, 0)}, 'byte_lengths'),
    (header(sample=-1), 'sample'),
    ({'finish': 'tired'}, 'finish'),
    ({'payload': b'= 133', 'byte_lengths': lengths(1, 1, 1, 1, 1)}, 'finish'),
    (NOTHING, 'finish'),
    ({'finish': 'stop_string'}, 'finish'),  # A stop token is behind the string.
    ({'finish': 'stop_string', **NOTHING}, 'finish'),
    ({'policy_logp': -SOUND.policy_logp}, 'logp'),
    ({'sampling_logp': SOUND.sampling_logp * np.nan}, 'logp'),
    ({'policy_logp': np.full(5, -3e38, np.float32)}, 'logp'),
    ({'sampling_logp': np.full(5, -np.inf, np.float32)}, 'logp'),
    ({'temperature': -0.1}, 'density'),
    ({'temperature': np.nan}, 'density'),
    ({'temperature': np.inf}, 'density'),
    ({'top_p': 0.0}, 'density'),
    ({'top_p': 1.1}, 'density'),
    ({'top_p': np.nan}, 'density'),
    ({'reward': np.inf}, 'reward'),
    ({'reward': np.nan}, 'reward'),
    ({'reward': 1e300}, 'reward'),
    ({'advantage': -np.inf}, 'advantage'),
    ({'advantage': np.nan}, 'advantage'),
  ],
)
def test_every_fault_of_a_rollout_is_named(fields, fault):
  assert records.fault(changed(**fields)) == fault


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 0.1])
def test_an_invalid_log_probability_is_a_fault_at_any_position(value):
  for length in (1, 2, 7, 16, 33):
    sound = examples.rollout(b'x' * length, finish='length')
    for t in range(length):
      logp = sound.policy_logp.copy()
      logp[t] = value
      for name in ('policy_logp', 'sampling_logp'):
        bad = msgspec.structs.replace(sound, **{name: logp})
        assert records.fault(bad) == 'logp'


@pytest.mark.parametrize(
  ('fields', 'fault'),
  [
    (header(schema=0, sample=-1), 'schema'),
    (header(created=np.inf, sample=-1), 'header'),
    (header(sample=0), 'sample'),
    ({'successes': 2}, 'counts'),
    ({'count': 0, 'successes': 0}, 'counts'),
    ({'count': -2, 'successes': -3}, 'counts'),
    ({'reward_sum': np.nan}, 'reward'),
    ({'reward_square_sum': np.nan}, 'reward'),
    ({'reward_sum': 1e300, 'reward_square_sum': 1e300}, 'reward'),
    ({'reward_square_sum': -1.0}, 'moments'),
    ({'reward_sum': 2.0}, 'moments'),  # One reward, 2, has the square 4.
  ],
)
def test_every_fault_of_group_stats_is_named(fields, fault):
  assert records.fault(msgspec.structs.replace(STATS, **fields)) == fault


@pytest.mark.parametrize(
  ('fields', 'fault'),
  [
    (header(schema=2, sample=-1), 'schema'),
    (header(sample=0), 'sample'),
    ({'successes': 5}, 'counts'),
    ({'count': 0, 'successes': 0, 'texts': ()}, 'counts'),
    ({'texts': (b'= 13', b'= 13')}, 'texts'),
    ({'count': 99, 'successes': 99, 'texts': (b'= 13',) * 65}, 'texts'),
    ({'verifier': ''}, 'verifier'),
    ({'verifier': 'v' * 1025}, 'verifier'),
    ({'verdict': 'wrong'}, 'verdict'),
  ],
)
def test_every_fault_of_an_outcome_is_named(fields, fault):
  assert records.fault(msgspec.structs.replace(OUTCOME, **fields)) == fault


def test_the_size_is_that_of_texts_and_arrays_and_256_bytes():
  assert records.size(SOUND) == 256 + 4 + 5 * (4 + 4 + 4 + 4 + 1)
  assert records.size(examples.outcome((b'= 13', b'13'))) == 256 + 6
  assert records.size(STATS) == 256


def test_records_that_differ_in_origin_or_kind_have_different_identities():
  group = examples.group([1.0, 0.0])
  elsewhere = [
    examples.rollout(**{field: value})
    for field, value in (
      ('run', 'other'), ('round', 1), ('policy', 'c'), ('prompt', 'p1')
    )
  ]  # fmt: skip
  same_prompt = [*group, publish.group_stats(group), OUTCOME]
  assert len({records.identity(r) for r in (*same_prompt, *elsewhere)}) == 8


def test_every_record_has_a_kind():
  kinds = [records.kind(record) for record in (SOUND, STATS, OUTCOME)]
  assert kinds == ['rollout', 'group_stats', 'outcome']
  assert {*kinds} == {*records.KINDS}


REWARDS = st.floats(-1e6, 1e6)


@hypothesis.given(st.lists(REWARDS, min_size=1, max_size=20), st.data())
def test_moments_of_rewards_in_a_range_fit_it(rewards, data):
  bounds = [data.draw(st.floats(-1e6, min(rewards)), 'least')]
  bounds.append(data.draw(st.floats(max(rewards), 1e6), 'most'))
  stats = examples.stats(rewards)
  assert records.fault(stats) is None
  assert records.misfit(stats, len(rewards), tuple(bounds)) is None


@hypothesis.given(REWARDS, REWARDS, st.integers(0, 4))
def test_moments_that_fit_are_those_of_some_rewards(total, squares, successes):
  """Of four rewards in [0, 1]: their mean and spread are no larger."""
  stats = msgspec.structs.replace(
    examples.stats([1.0] * 4),
    reward_sum=total,
    reward_square_sum=squares,
    successes=successes,
  )
  if records.fault(stats) or records.misfit(stats, 4, (0.0, 1.0)):
    return
  mean = stats.reward_sum / 4
  assert -1e-6 <= mean <= 1 + 1e-6
  assert -1e-5 <= stats.reward_square_sum / 4 - mean**2 <= 1 / 4 + 1e-5
