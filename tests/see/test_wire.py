"""Records that come back; for those that do not, see also test_untrusted."""

import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.see import wire
from mrl_jax.sharing import publish
from tests import examples

SOUND = examples.rollout()
GROUP = examples.group([1.0, 0.0])


def changed(record, **fields):
  """The bytes of a record, with other values for some of its fields."""
  plain = msgspec.msgpack.decode(wire.encode(record))
  return msgspec.msgpack.encode({**plain, **fields})


@pytest.mark.parametrize(
  'before',
  [
    *GROUP,
    publish.group_stats(GROUP),
    examples.outcome(),
    examples.outcome(()),
    examples.rollout(b'\xff\x00'),
    examples.rollout(b'', finish='length'),
    examples.rollout(finish='stop_string'),
    msgspec.structs.replace(
      SOUND, mask=SOUND.ids > 50, top_p=0.9, advantage=-0.5
    ),
  ],
)
def test_records_come_back_unchanged(before):
  after = wire.decode(wire.encode(before))
  assert type(after) is type(before)
  assert records.fault(after) is None
  for name in before.__struct_fields__:
    np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    if isinstance(getattr(before, name), np.ndarray):
      assert getattr(after, name).dtype == getattr(before, name).dtype


def test_an_array_may_be_a_view_with_strides():
  view = msgspec.structs.replace(SOUND, ids=np.arange(10, dtype=np.int32)[::2])
  after = wire.decode(wire.encode(view))
  np.testing.assert_array_equal(after.ids, [0, 2, 4, 6, 8])


def test_an_array_of_another_type_is_not_encoded():
  wrong = msgspec.structs.replace(SOUND, ids=np.zeros(4, np.int64))
  with pytest.raises(ValueError, match='an array of int64'):
    wire.encode(wrong)


@pytest.mark.parametrize(
  ('data', 'why'),
  [
    (b'', 'truncated'),
    (b'\xc1', 'malformed'),
    (wire.encode(SOUND) + b'\x00', 'trailing'),
    (msgspec.msgpack.encode({'type': 'unheard of'}), 'unheard of'),
    (wire.encode(SOUND).replace(b'<f4', b'|O8'), r'sampling_logp\[0\]'),
    (wire.encode(SOUND).replace(b'\xa1a', b'\xa1\xff'), 'utf-8'),
    (changed(SOUND, more=1), 'unknown field `more`'),
    (changed(SOUND, ids=['<i4', b'\0' * 5]), 'ids: .* multiple of element'),
    (changed(SOUND, ids=['<i4']), r'length 2, got 1 - at `\$.ids'),
    (changed(SOUND, mask=['|b1', b'\1\1\2\1\1']), 'mask: neither true nor'),
    (changed(examples.outcome(), count=2**31), r'<= 2147483647'),
    (changed(examples.outcome(), texts=[b''] * 65), 'length <= 64'),
    (b'\x82\xa3ids' + b'\x91' * 10**5 + b'\xc0\xa4type\xa7rollout', 'recursion'),
    # What is quoted is short and printable.
    (changed(SOUND, **{'\n\x1b[31m' + 'x' * 10**6: 1}), r'^[ -~]{,999}$'),
  ],
)  # fmt: skip
def test_other_bytes_are_refused_with_a_reason(data, why):
  with pytest.raises(msgspec.DecodeError, match=why):
    wire.decode(data)
