"""The typed records that policies exchange, and the prompts they are about.

Records hold arrays and raw bytes. A peer's text is not decoded here, and reading
a record runs no code.
"""

import math
from typing import Annotated, Literal

import msgspec
import numpy as np

SCHEMA = 1
LARGEST = 1e6  # Bound of |reward| and |log-probability|.
REST_BYTES = 256  # Approximate bytes of a record's names and numbers.
MAX_NAME = 1024  # Characters of a name, such as a prompt's id.
MAX_TEXTS = 64  # Texts of an outcome.
WHOLE_GROUP = -1  # The sample number of a record about a whole group.

_MOST = 2**31 - 1  # Bound of counts.
_ROUNDING = 1e-6  # Relative error that sums of rewards may have.

# How a completion ended: with a stop token, the last of its ids; with a stop
# string (`sample.stop`), which its last token completes, and no stop token; or
# at the length limit. A new value needs no new SCHEMA: older peers refuse it.
Finish = Literal['stop', 'stop_string', 'length']
ENDED = ('stop', 'stop_string')  # The policy ended it; it was not cut off.
# 'timeout' and 'crash': the comparison took too much time or memory. That is no
# verdict on the answer, which earns nothing.
Verdict = Literal['correct', 'wrong', 'unparsable', 'timeout', 'crash']
UNDECIDED = ('timeout', 'crash')
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Sample = Annotated[int, msgspec.Meta(ge=WHOLE_GROUP, le=_MOST)]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
  """A prompt and its gold answer; its family and a solution if known."""

  id: str
  text: str
  answer: str
  family: str = ''
  solution: str = ''  # A worked solution.


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
  pass


class Header(_Strict, kw_only=True):
  """The source of a record; (run ... sample) and its kind identify it."""

  run: str
  round: Count
  policy: str
  prompt: str
  sample: Sample = WHOLE_GROUP
  version: Count  # Number of updates of the policy when it sampled.
  tokenizer: str  # Fingerprint of the policy's tokenizer.
  created: float  # Seconds since the epoch.
  schema: int = SCHEMA


class Rollout(_Strict, tag='rollout', kw_only=True, eq=False):
  """One completion, in the tokens of the policy that sampled it."""

  header: Header
  payload: bytes  # The completion's bytes, without the stop token.
  finish: Finish
  ids: np.ndarray  # i32 [T], the sampled tokens.
  # i32 [T], bytes of each token, 0 for control tokens; they sum to the length of
  # the payload.
  byte_lengths: np.ndarray
  sampling_logp: np.ndarray  # f32 [T], under the sampling density (nats).
  policy_logp: np.ndarray  # f32 [T], at temperature 1 (nats).
  mask: np.ndarray  # bool [T], the tokens that may be trained on.
  temperature: float  # Of sampling, as `top_p`.
  top_p: float = 1.0
  reward: float  # The weighted sum of the reward functions.
  advantage: float = 0.0  # GRPO's, in the sender's own group.
  verdict: Verdict  # The sender's, on the answer.

  @property
  def success(self) -> bool:
    return self.verdict == 'correct'


class GroupStats(_Strict, tag='group_stats', kw_only=True):
  """Moments of the rewards of one policy's samples of one prompt."""

  header: Header
  count: Count
  reward_sum: float
  reward_square_sum: float
  successes: Count


class Outcome(_Strict, tag='outcome', kw_only=True):
  """Successes of one policy's samples of one prompt, without probabilities."""

  header: Header
  count: Count  # Number of samples.
  successes: Count  # Number of samples that the verifier found correct.
  # Bytes of some of those samples, each ended by the policy itself.
  texts: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_TEXTS)]
  verifier: str  # The name of the verifier.
  verdict: Verdict  # On every one of `texts`.


Record = Rollout | GroupStats | Outcome
KINDS = ('rollout', 'group_stats', 'outcome')


def kind(record: Record) -> str:
  return record.__struct_config__.tag


def identity(record: Record) -> tuple:
  """The key of a record; a second record with the same key is a duplicate."""
  h = record.header
  return (h.run, h.round, h.policy, h.prompt, h.sample, kind(record))


def size(record: Record) -> int:
  """Approximate bytes of a record: its text and arrays, and a constant."""
  if isinstance(record, GroupStats):
    return REST_BYTES
  if isinstance(record, Outcome):
    return REST_BYTES + sum(map(len, record.texts))
  return REST_BYTES + len(record.payload) + TOKEN_BYTES * len(record.ids)


def fault(record: Record) -> str | None:
  """A short code of why a record must be refused; None if it is sound."""
  header = record.header
  if header.schema != SCHEMA:
    return 'schema'
  names = (header.run, header.policy, header.prompt, header.tokenizer)
  if max(map(len, names)) > MAX_NAME or not math.isfinite(header.created):
    return 'header'
  return _FAULTS[type(record)](record)


def misfit(
  record: Record, samples: int, rewards: tuple[float, float]
) -> str | None:
  """A short code of why a sound record cannot come from a known policy.

  The policy draws `samples` rollouts of every prompt (0 if that is not known),
  and `rewards` are the least and the largest reward that it can give. For n
  rewards r in [a, b], as (r - a)(b - r) >= 0,

    n a <= sum r <= n b    and    sum r^2 <= (a + b) sum r - n a b
  """
  least, most = rewards
  scale = max(abs(least), abs(most))
  slack = _ROUNDING * scale
  if isinstance(record, Rollout):
    if samples and record.header.sample >= samples:
      return 'samples'
    fits = least - slack <= record.reward <= most + slack
    return None if fits else 'reward'
  if samples and record.count != samples:
    return 'samples'
  if isinstance(record, Outcome):
    return None
  mean = record.reward_sum / record.count
  if not least - slack <= mean <= most + slack:
    return 'reward'
  largest = (least + most) * mean - least * most
  mean_square = record.reward_square_sum / record.count
  return None if mean_square <= largest + slack * scale else 'moments'


def _fault_of_stats(stats):
  fault = _fault_of_counts(stats)
  if fault:
    return fault
  mean = stats.reward_sum / stats.count
  mean_square = stats.reward_square_sum / stats.count
  if not (abs(mean) <= LARGEST and mean_square <= LARGEST**2):
    return 'reward'
  # The variance cannot be negative, except by rounding of the sums.
  return None if mean**2 <= mean_square * (1 + _ROUNDING) else 'moments'


def _fault_of_outcome(outcome):
  fault = _fault_of_counts(outcome)
  if fault:
    return fault
  if len(outcome.texts) > min(outcome.successes, MAX_TEXTS):
    return 'texts'
  if not 0 < len(outcome.verifier) <= MAX_NAME:
    return 'verifier'
  return None if outcome.verdict == 'correct' else 'verdict'


def _fault_of_counts(record):
  if record.header.sample != WHOLE_GROUP:
    return 'sample'
  if not 0 <= record.successes <= record.count or record.count == 0:
    return 'counts'
  return None


def _fault_of_rollout(record):
  shape = (record.ids.size,)
  for name, dtype in _ARRAYS.items():
    array = getattr(record, name)
    if array.dtype != dtype or array.shape != shape:
      return f'{name}_type'
  if _least(record.ids) < 0 or _least(record.byte_lengths) < 0:
    return 'negative'
  if np.add.reduce(record.byte_lengths) != len(record.payload):
    return 'byte_lengths'
  if record.header.sample < 0:
    return 'sample'
  # Only the last token of a completion can end it; control tokens have no bytes.
  last = record.byte_lengths.item(-1) if shape[0] else None
  fits = {'stop': last == 0, 'stop_string': bool(last), 'length': True}
  if not fits.get(record.finish):
    return 'finish'
  for logp in (record.sampling_logp, record.policy_logp):
    if not -LARGEST <= _least(logp) <= _greatest(logp) <= 0:
      return 'logp'
  if not (0 <= record.temperature <= LARGEST and 0 < record.top_p <= 1):
    return 'density'
  if not abs(record.reward) <= LARGEST:
    return 'reward'
  return None if abs(record.advantage) <= LARGEST else 'advantage'


# Extremes of arrays that may be empty. NaN counts as both extremes. For short
# arrays this takes a quarter of the time of `min` and `max`.


def _least(array):
  return array.item(array.argmin()) if array.size else 0


def _greatest(array):
  return array.item(array.argmax()) if array.size else 0


_ARRAYS = {
  'ids': np.dtype(np.int32),
  'byte_lengths': np.dtype(np.int32),
  'sampling_logp': np.dtype(np.float32),
  'policy_logp': np.dtype(np.float32),
  'mask': np.dtype(np.bool_),
}
TOKEN_BYTES = sum(dtype.itemsize for dtype in _ARRAYS.values())
_FAULTS = {
  Rollout: _fault_of_rollout,
  GroupStats: _fault_of_stats,
  Outcome: _fault_of_outcome,
}
