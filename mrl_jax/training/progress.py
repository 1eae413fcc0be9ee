"""How far a run has come, and what it found on the way."""

from collections.abc import Mapping
import dataclasses

import msgspec

from mrl_jax.thl import transfer


@dataclasses.dataclass(kw_only=True)
class Progress:
  """What the host remembers of a run.

  Attributes:
    rounds: done.
    seconds: spent, over all the times the run was started.
    accuracy: held-out accuracy by family, of every policy, by rounds done.
    residuals: what THL could not carry, by direction.
  """

  rounds: int = 0
  seconds: float = 0.0
  accuracy: dict[int, dict[str, dict[str, float]]] = dataclasses.field(
    default_factory=dict
  )
  residuals: dict[str, transfer.Residual] = dataclasses.field(
    default_factory=dict
  )

  def add_residuals(
    self, receiver: str, by_sender: Mapping[str, transfer.Residual]
  ) -> None:
    for sender, residual in by_sender.items():
      direction = f'{sender}->{receiver}'
      self.residuals.setdefault(direction, transfer.Residual()).add(residual)

  def to_json(self) -> dict:
    return msgspec.to_builtins(self, str_keys=True)

  @classmethod
  def from_json(cls, values: Mapping) -> 'Progress':
    return msgspec.convert(values, cls, strict=False)
