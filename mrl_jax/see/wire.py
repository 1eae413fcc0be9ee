"""Records as bytes: msgpack with raw buffers for arrays, never pickle."""

from typing import Literal

import msgspec
import numpy as np

from mrl_jax import records

_DTYPES = ('<i4', '<f4', '|b1')
_QUOTED = 200  # Characters of an error, which may quote the bytes themselves.
_FIELDS = msgspec.structs.fields(records.Rollout)
_ARRAYS = [field.name for field in _FIELDS if field.type is np.ndarray]
# A rollout whose arrays are still (dtype, bytes). Typed down to the elements:
# asked for an array, msgspec would first build any objects that a sender asks
# for.
_Rollout = msgspec.defstruct(
  '_Rollout',
  [
    (
      field.name,
      tuple[Literal[_DTYPES], bytes] if field.name in _ARRAYS else field.type,
      msgspec.field(default=field.default),
    )
    for field in _FIELDS
  ],
  tag=records.Rollout.__struct_config__.tag,
  kw_only=True,
  forbid_unknown_fields=True,
)


def encode(record: records.Record) -> bytes:
  """Returns the bytes of a record.

  Raises ValueError if an array of it has a type that records do not have.
  """
  return _ENCODER.encode(record)


def decode(data: bytes) -> records.Record:
  """Returns the record in `data`, which may be any bytes.

  Raises `msgspec.DecodeError` if they are not those of a record.
  """
  record = decode_untrusted(_DECODER, data)
  if not isinstance(record, _Rollout):
    return record
  fields = msgspec.structs.asdict(record)
  try:
    for name in _ARRAYS:
      dtype, raw = fields[name]
      fields[name] = np.frombuffer(raw, dtype)
      # Other bytes are undefined as booleans, and numpy does not check.
      if dtype == '|b1' and raw.translate(None, b'\x00\x01'):
        raise ValueError('neither true nor false')
  except ValueError as error:
    raise msgspec.DecodeError(f'{name}: {error}') from error
  return records.Rollout(**fields)


def decode_untrusted(
  decoder: msgspec.msgpack.Decoder | msgspec.json.Decoder, data: bytes
):
  """Returns what `decoder` reads from bytes that may be anything.

  Raises only `msgspec.DecodeError`, which is short and printable.
  """
  try:
    return decoder.decode(data)
  except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
    raise msgspec.DecodeError(ascii(str(error)[:_QUOTED])) from None


def _to_bytes(value) -> list:
  if not isinstance(value, np.ndarray):
    raise NotImplementedError(f'records do not hold {type(value)}')
  if value.dtype.str not in _DTYPES:
    raise ValueError(f'an array of {value.dtype}; records hold {_DTYPES}')
  return [value.dtype.str, value.tobytes()]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_DECODER = msgspec.msgpack.Decoder(
  _Rollout | records.GroupStats | records.Outcome
)
