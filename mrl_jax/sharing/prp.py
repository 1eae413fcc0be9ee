"""PRP: peers' rollouts join the group, carried over by THL."""

from collections.abc import Iterable

from mrl_jax import records
from mrl_jax.sharing import lesson
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer


def carry(
  selected: Iterable[tuple[int, records.Rollout, float]],
  receiver: byte_tokenizer.ByteTokenizer,
  limits: transfer.Limits,
) -> tuple[list[lesson.Row], dict[str, transfer.Residual]]:
  """Rows from peers' rollouts, and what THL could not carry.

  Args:
    selected: prompt, rollout and its advantage in the receiver's group.
    receiver: the learner's tokenizer.
    limits: what it takes.

  Returns:
    Rows with the peer's own log-probabilities as the denominators of their
    ratios, and the residual of each sender.
  """
  carried, residuals = [], {}
  for prompt, rollout, advantage in selected:
    residual = residuals.setdefault(rollout.header.policy, transfer.Residual())
    moved = transfer.transfer(rollout, receiver, limits, residual)
    if moved is not None:
      carried.append(
        lesson.Row(
          prompt,
          moved.ids,
          moved.behaviour_logp,
          advantage,
          moved.chunk,
          moved.mask,
        )
      )
  return carried, residuals
