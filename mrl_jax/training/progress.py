"""How far a run has come, and how it is saved and resumed."""

import base64
from collections.abc import Mapping
import dataclasses

import jax
import msgspec
import numpy as np

from mrl_jax.thl import transfer
from mrl_jax.training import job as job_lib
from mrl_jax.update import checkpoint


@dataclasses.dataclass(kw_only=True)
class Progress:
  """What the host remembers of a run.

  Attributes:
    rounds: done.
    seconds: spent, over all the times the run was started.
    accuracy: held-out accuracy by family, of every policy, by rounds done.
    residuals: what THL could not carry, by direction.
    accuracies: of the last rounds, as every policy knows them of each.
  """

  rounds: int = 0
  seconds: float = 0.0
  accuracy: dict[int, dict[str, dict[str, float]]] = dataclasses.field(
    default_factory=dict
  )
  residuals: dict[str, transfer.Residual] = dataclasses.field(
    default_factory=dict
  )
  accuracies: dict[str, dict[str, list[float]]] = dataclasses.field(
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


def save(
  job: job_lib.Job,
  progress: Progress,
  checkpoints: checkpoint.Checkpoints,
) -> None:
  """Writes down all that the rest of the run depends on."""
  host = {
    'progress': progress.to_json(),
    'batches': job.batches.get_state(),
    'refills': {name: b.get_state() for name, b in job.refills.items()},
    'exchange': {
      name: base64.b64encode(endpoint.state()).decode()
      for name, endpoint in job.endpoints.items()
    },
    'keys': {
      name: jax.random.key_data(worker.key).tolist()
      for name, worker in job.workers.items()
    },
  }
  states = {name: worker.state for name, worker in job.workers.items()}
  before = checkpoints.save(progress.rounds, states, host)
  if before is not None:
    job.node.saved(before)


def resume(
  job: job_lib.Job, checkpoints: checkpoint.Checkpoints
) -> Progress | None:
  """Puts everything back as `save` found it; None if nothing was saved."""
  found = checkpoints.restore({n: w.state for n, w in job.workers.items()})
  if found is None:
    return None
  states, host = found
  for name, worker in job.workers.items():
    worker.state = states[name]
    worker.key = jax.random.wrap_key_data(
      np.array(host['keys'][name], np.uint32)
    )
  job.batches.set_state(host['batches'])
  for name, batches in job.refills.items():
    batches.set_state(host['refills'][name])
  for name, endpoint in job.endpoints.items():
    endpoint.restore(base64.b64decode(host['exchange'][name]))
  return Progress.from_json(host['progress'])
