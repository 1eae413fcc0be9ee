import msgspec
import numpy as np
import pytest

from mrl_jax import records
from mrl_jax.see import wire
from mrl_jax.sharing import xgrpo
from tests import examples


def test_records_come_back_as_they_were():
  group = examples.group([1.0, 0.0])
  sent = [*group, xgrpo.group_stats(group), examples.rollout(b'\xff\x00')]
  back = wire.decode(wire.encode(sent))
  for before, after in zip(sent, back, strict=True):
    assert records.fault(after) is None
    for name in before.__struct_fields__:
      np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
      if isinstance(getattr(before, name), np.ndarray):
        assert getattr(after, name).dtype == getattr(before, name).dtype


def test_a_sender_is_told_of_arrays_of_another_type():
  wrong = msgspec.structs.replace(examples.rollout(), ids=np.zeros(4, np.int64))
  with pytest.raises(ValueError, match='an array of int64'):
    wire.encode([wrong])


@pytest.mark.parametrize(
  'data',
  [
    b'',
    b'\xc1',
    wire.encode(examples.group([1.0]))[:-1],
    msgspec.msgpack.encode([{'type': 'unheard of'}]),
    msgspec.msgpack.encode([{'type': 'rollout', 'ids': ['|O8', b'']}]),
    wire.encode(examples.group([1.0])).replace(b'<f4', b'|O8'),
    wire.encode(examples.group([1.0])).replace(b'rollout', b'rollmop'),
  ],
)
def test_anything_else_is_refused_with_a_typed_error(data):
  with pytest.raises(msgspec.DecodeError):
    wire.decode(data)
