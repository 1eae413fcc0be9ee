"""Training rows: single responses, before they are packed into arrays."""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from mrl_jax import records


class Row(NamedTuple):
  """One response, own or a peer's, in the learner's tokens."""

  prompt: int  # Index of the prompt in the round.
  ids: np.ndarray  # i32 [T], the response's tokens.
  old_logp: np.ndarray  # f32 [T], in the denominator of the importance ratio.
  advantage: float  # Of the whole response.
  chunk: np.ndarray  # i32 [T], the chunk of each token; see `losses/prp.py`.
  mask: np.ndarray  # bool [T], the tokens that are trained on.
  # Multiplies the averaging weight of the row's tokens in the loss; a number, or
  # f32 [T].
  weight: float | np.ndarray = 1.0
  # f32 [T], under the reference policy, if there is a KL penalty.
  reference_logp: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """The rows that a policy trains on in one round."""

  own: Sequence[Row] = ()  # Of the policy's own rollouts.
  peer: Sequence[Row] = ()  # Of what its peers gave.
  order: Sequence[int] = ()  # Prompts, in the order of the mini-batches.


def replaced(rows: Iterable[Row], **column: Iterable) -> list[Row]:
  """The rows with a value of their own in one field: `old_logp=logps`."""
  ((field, values),) = column.items()
  return [
    row._replace(**{field: x}) for row, x in zip(rows, values, strict=True)
  ]


def own_row(prompt: int, rollout: records.Rollout, advantage: float) -> Row:
  """A row of the learner's own rollout: the sampled ids, each its own chunk."""
  chunk = np.arange(len(rollout.ids), dtype=np.int32)
  return Row(
    prompt, rollout.ids, rollout.sampling_logp, advantage, chunk, rollout.mask
  )


def demonstration(prompt: int, ids: np.ndarray, weight: float = 1.0) -> Row:
  """A row whose likelihood is maximised, without a source's log-probabilities."""
  return Row(
    prompt,
    ids,
    old_logp=np.zeros(len(ids), np.float32),
    advantage=1.0,
    chunk=np.zeros(len(ids), np.int32),
    mask=np.ones(len(ids), bool),
    weight=weight,
  )
