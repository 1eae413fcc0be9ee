"""How far a run has come, and how it is saved and resumed."""

import base64
from collections.abc import Mapping

import jax
import msgspec
import numpy as np

from mrl_jax.thl import transfer
from mrl_jax.training import job as job_lib
from mrl_jax.update import checkpoint


class Progress(msgspec.Struct, kw_only=True):
  """Results of a run so far."""

  rounds: int = 0  # Done.
  seconds: float = 0.0  # Over all the times that the run was started.
  # Held-out accuracy by rounds done, policy and family.
  accuracy: dict[int, dict[str, dict[str, float]]] = {}
  # What THL could not carry, by 'sender->receiver'.
  residuals: dict[str, transfer.Residual] = {}
  # Batch accuracies of the last rounds, by the policy that remembers and the
  # policy that they are of; see `hacpo.remember_accuracies`.
  accuracies: dict[str, dict[str, list[float]]] = {}

  def add_residuals(
    self, receiver: str, by_sender: Mapping[str, transfer.Residual]
  ) -> None:
    for sender, residual in by_sender.items():
      pair = f'{sender}->{receiver}'
      self.residuals.setdefault(pair, transfer.Residual()).add(residual)


def save(
  job: job_lib.Job,
  progress: Progress,
  checkpoints: checkpoint.Checkpoints,
) -> None:
  """Saves everything that the rest of the run depends on."""
  host = {
    'progress': msgspec.to_builtins(progress, str_keys=True),
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
  """Restores what `save` saved last; None if there is no checkpoint."""
  restored = checkpoints.restore({n: w.state for n, w in job.workers.items()})
  if restored is None:
    return None
  states, host = restored
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
  return msgspec.convert(host['progress'], Progress, strict=False)
