"""Records as bytes: msgpack with raw buffers for arrays, never pickle."""

from typing import Literal

import msgspec
import numpy as np

from mrl_jax import records

_DTYPES = ('<i4', '<f4', '|b1')
_SAID = 200  # Characters of a reason, which may quote the bytes themselves.
_CONFIG = records.Rollout.__struct_config__
_ARRAYS = tuple(
  field.name
  for field in msgspec.structs.fields(records.Rollout)
  if field.type is np.ndarray
)
# A rollout with arrays that are still bytes, typed to the last element: asked
# for an array, msgspec first builds whatever objects a sender wants it to.
_Rollout = msgspec.defstruct(
  '_Rollout',
  [
    (
      field.name,
      tuple[Literal[_DTYPES], bytes] if field.name in _ARRAYS else field.type,
      msgspec.field(default=field.default),
    )
    for field in msgspec.structs.fields(records.Rollout)
  ],
  tag=_CONFIG.tag,
  kw_only=True,
  forbid_unknown_fields=_CONFIG.forbid_unknown_fields,
)


def encode(record: records.Record) -> bytes:
  return _ENCODER.encode(record)


def decode(data: bytes) -> records.Record:
  """The record in `data`.

  Raises:
    msgspec.DecodeError: the bytes are not those of a typed record.
  """
  record = strictly(_DECODER, data)
  if not isinstance(record, _Rollout):
    return record
  fields = msgspec.structs.asdict(record)
  try:
    for name in _ARRAYS:
      fields[name] = _from_bytes(*fields[name])
  except ValueError as error:
    raise msgspec.DecodeError(f'{name}: {error}') from error
  return records.Rollout(**fields)


def strictly(decoder: msgspec.msgpack.Decoder, data: bytes):
  """What a decoder makes of bytes that may be anything.

  Raises:
    msgspec.DecodeError: with a short reason in printable characters.
  """
  try:
    return decoder.decode(data)
  except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
    raise msgspec.DecodeError(ascii(str(error)[:_SAID])) from None


def _from_bytes(dtype, data):
  array = np.frombuffer(data, dtype)
  # Other bytes have no meaning as booleans, and numpy does not look.
  if dtype == '|b1' and data.translate(None, b'\x00\x01'):
    raise ValueError('neither true nor false')
  return array


def _to_bytes(value):
  if not isinstance(value, np.ndarray):
    raise NotImplementedError(f'records do not hold {type(value)}')
  if value.dtype.str not in _DTYPES:
    raise ValueError(
      f'an array of {value.dtype} where one of {_DTYPES} belongs'
    )
  return [value.dtype.str, value.tobytes()]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_DECODER = msgspec.msgpack.Decoder(
  _Rollout | records.GroupStats | records.Outcome
)
