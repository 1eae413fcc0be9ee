import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.see import wire
from mrl_jax.sharing import xgrpo
from tests import examples

SOUND = examples.rollout()
GROUP = examples.group([1.0, 0.0])


def written(record, **fields):
  """A record's bytes, with other values for some of its fields."""
  plain = msgspec.msgpack.decode(wire.encode(record))
  return msgspec.msgpack.encode({**plain, **fields})


def undecodable(data) -> str:
  with pytest.raises(msgspec.DecodeError) as raised:
    wire.decode(data)
  return str(raised.value)


@pytest.mark.parametrize(
  'before',
  [
    *GROUP,
    xgrpo.group_stats(GROUP),
    examples.outcome(),
    examples.outcome(()),
    examples.rollout(b'\xff\x00'),
    examples.rollout(b'', finish='length'),
    msgspec.structs.replace(
      SOUND, mask=SOUND.ids > 50, top_p=0.9, advantage=-0.5
    ),
  ],
)
def test_records_come_back_as_they_were(before):
  after = wire.decode(wire.encode(before))
  assert type(after) is type(before)
  assert records.fault(after) is None
  for name in before.__struct_fields__:
    np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    if isinstance(getattr(before, name), np.ndarray):
      assert getattr(after, name).dtype == getattr(before, name).dtype


def test_an_array_may_be_a_part_of_another():
  part = msgspec.structs.replace(SOUND, ids=np.arange(10, dtype=np.int32)[::2])
  after = wire.decode(wire.encode(part))
  np.testing.assert_array_equal(after.ids, [0, 2, 4, 6, 8])


def test_a_sender_is_told_of_arrays_of_another_type():
  wrong = msgspec.structs.replace(SOUND, ids=np.zeros(4, np.int64))
  with pytest.raises(ValueError, match='an array of int64'):
    wire.encode(wrong)


@pytest.mark.parametrize(
  ('data', 'why'),
  [
    (b'', 'truncated'),
    (b'\xc1', 'malformed'),
    (wire.encode(SOUND)[:-1], 'truncated'),
    (wire.encode(SOUND) + b'\x00', 'trailing'),
    (msgspec.msgpack.encode([]), 'Expected `object`, got `array`'),
    (msgspec.msgpack.encode({'type': 'unheard of'}), 'unheard of'),
    (wire.encode(SOUND).replace(b'rollout', b'rollmop'), 'rollmop'),
    (wire.encode(SOUND).replace(b'<f4', b'|O8'), r'sampling_logp\[0\]'),
    (wire.encode(SOUND).replace(b'\xa1a', b'\xa1\xff'), 'utf-8'),
    (written(SOUND, more=1), 'unknown field `more`'),
    (written(SOUND, ids=['<i4', b'\0' * 5]), 'ids: .* multiple of element'),
    (written(SOUND, ids=['<i4']), r'length 2, got 1 - at `\$.ids'),
    (written(SOUND, ids=['<i4', b'', b'']), r'length 2, got 3 - at `\$.ids'),
    (written(SOUND, ids=[1, 2, 3, 4, 0]), 'length 2, got 5'),
    (written(SOUND, ids={'<i4': b''}), 'Expected `array`, got `object`'),
    (written(SOUND, mask=['|b1', b'\1\1\2\1\1']), 'mask: neither true nor'),
    (written(SOUND, reward='1.0'), 'Expected `float`, got `str`'),
    (written(examples.outcome(), count=-1), r'>= 0 - at `\$.count'),
    (written(examples.outcome(), count=2**31), r'<= 2147483647'),
    (written(examples.outcome(), texts=[b''] * 65), 'length <= 64'),
  ],
)
def test_anything_else_is_refused_with_a_typed_error(data, why):
  assert data != wire.encode(SOUND)
  with pytest.raises(msgspec.DecodeError, match=why):
    wire.decode(data)


def test_depth_is_refused_with_a_typed_error():
  deep = b'\x82\xa3ids' + b'\x91' * 100_000 + b'\xc0\xa4type\xa7rollout'
  assert 'recursion' in undecodable(deep)


def test_what_is_quoted_is_short_and_printable():
  said = undecodable(written(SOUND, **{'\n\x1b[31m' + 'x' * 10**6: 1}))
  assert 'unknown field' in said
  assert len(said) < 1000
  assert said.isprintable()
