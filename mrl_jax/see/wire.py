"""Records as bytes: msgpack with raw buffers for arrays, never pickle."""

import msgspec
import numpy as np

from mrl_jax import records

_DTYPES = ('<i4', '<f4')


def encode(items: list[records.Record]) -> bytes:
  return _ENCODER.encode(items)


def decode(data: bytes) -> list[records.Record]:
  """The records in `data`.

  Raises:
    msgspec.DecodeError: the bytes are not a list of typed records.
  """
  return _DECODER.decode(data)


def _from_array(value):
  if not isinstance(value, np.ndarray):
    raise NotImplementedError(f'records do not hold {type(value)}')
  if value.dtype.str not in _DTYPES:
    raise ValueError(
      f'an array of {value.dtype} where one of {_DTYPES} belongs'
    )
  return [value.dtype.str, value.tobytes()]


def _to_array(kind, value):
  if kind is not np.ndarray:
    raise NotImplementedError(f'records do not hold {kind}')
  dtype, data = value
  if dtype not in _DTYPES:
    raise ValueError(f'an array of {dtype!r} where one of {_DTYPES} belongs')
  return np.frombuffer(data, dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_from_array)
_DECODER = msgspec.msgpack.Decoder(list[records.Record], dec_hook=_to_array)
