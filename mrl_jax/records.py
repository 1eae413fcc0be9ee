"""The typed records that policies exchange, and the prompts they are about.

Records hold arrays and raw bytes. A peer's text is not decoded here, and no
record runs code when it is read.
"""

from typing import Annotated, get_args, Literal

import msgspec
import numpy as np

SCHEMA = 1
LARGEST = 1e6  # Of rewards and log-probabilities, in absolute value.
WHOLE_GROUP = -1  # The sample number of a record about a whole group.

Finish = Literal['stop', 'length']
Verdict = Literal['correct', 'wrong', 'unparsable']
Count = Annotated[int, msgspec.Meta(ge=0)]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
  """A question, its gold answer and, where the source has it, its family."""

  id: str
  text: str
  answer: str
  family: str = ''
  solution: str = ''  # A worked example, where the source has one.


class Header(msgspec.Struct, frozen=True, kw_only=True):
  """Where a record comes from; (run ... sample) and the kind identify it."""

  run: str
  round: Count
  policy: str
  prompt: str
  sample: int = WHOLE_GROUP
  version: Count  # Updates of the policy when it sampled.
  tokenizer: str  # Fingerprint of the policy's tokenizer.
  created: float  # Seconds since the epoch.
  schema: int = SCHEMA


class Rollout(
  msgspec.Struct, tag='rollout', frozen=True, kw_only=True, eq=False
):
  """One completion, as the policy that sampled it saw it.

  Attributes:
    header: where it comes from.
    payload: the completion's bytes, without the stop token.
    finish: 'stop' when `ids` ends with a stop token, else 'length'.
    ids: i32 [T], the sampled tokens.
    byte_lengths: i32 [T], bytes of each token; they sum to the payload's, and
      control tokens have none.
    sampling_logp: f32 [T], under the density sampled from (nats).
    policy_logp: f32 [T], under the policy at temperature 1 (nats).
    temperature: of sampling.
    reward: the weighted sum of the reward functions.
    verdict: what the verifier said of the answer.
  """

  header: Header
  payload: bytes
  finish: Finish
  ids: np.ndarray
  byte_lengths: np.ndarray
  sampling_logp: np.ndarray
  policy_logp: np.ndarray
  temperature: float
  reward: float
  verdict: Verdict

  @property
  def success(self) -> bool:
    return self.verdict == 'correct'


class GroupStats(msgspec.Struct, tag='group_stats', frozen=True, kw_only=True):
  """The rewards of one policy's samples of one prompt, as moments."""

  header: Header
  count: Count
  reward_sum: float
  reward_square_sum: float
  successes: Count


Record = Rollout | GroupStats


def kind(record: Record) -> str:
  return record.__struct_config__.tag


def identity(record: Record) -> tuple:
  """What makes a second copy of a record a duplicate."""
  h = record.header
  return (h.run, h.round, h.policy, h.prompt, h.sample, kind(record))


def size(record: Record) -> int:
  """Bytes of the record's payload and arrays; headers are not counted."""
  if not isinstance(record, Rollout):
    return 0
  arrays = (record.ids, record.byte_lengths, record.sampling_logp,
            record.policy_logp)  # fmt: skip
  return len(record.payload) + sum(a.nbytes for a in arrays)


def fault(record: Record) -> str | None:
  """Why a record must be refused, as a short code; None when it is sound."""
  if record.header.schema != SCHEMA:
    return 'schema'
  if isinstance(record, GroupStats):
    return _fault_of_stats(record)
  return _fault_of_rollout(record)


def _fault_of_stats(stats):
  if stats.header.sample != WHOLE_GROUP:
    return 'sample'
  if not 0 <= stats.successes <= stats.count or stats.count == 0:
    return 'counts'
  mean = stats.reward_sum / stats.count
  mean_square = stats.reward_square_sum / stats.count
  if not (abs(mean) <= LARGEST and mean_square <= LARGEST**2):
    return 'reward'
  # No rewards have a negative variance; sums may be rounded.
  return None if mean**2 <= mean_square * (1 + 1e-6) else 'moments'


def _fault_of_rollout(record):
  arrays = {
    'ids': np.int32,
    'byte_lengths': np.int32,
    'sampling_logp': np.float32,
    'policy_logp': np.float32,
  }
  for name, dtype in arrays.items():
    array = getattr(record, name)
    if array.dtype != dtype or array.shape != (record.ids.size,):
      return f'{name}_type'
  if (record.ids < 0).any() or (record.byte_lengths < 0).any():
    return 'negative'
  if record.byte_lengths.sum() != len(record.payload):
    return 'byte_lengths'
  if record.header.sample < 0:
    return 'sample'
  ended = bool(len(record.ids)) and not record.byte_lengths[-1]
  if record.finish not in get_args(Finish) or (
    record.finish == 'stop' and not ended
  ):
    return 'finish'
  logps = np.concatenate([record.sampling_logp, record.policy_logp])
  if not ((logps <= 0) & (logps >= -LARGEST)).all():
    return 'logp'
  return None if abs(record.reward) <= LARGEST else 'reward'
