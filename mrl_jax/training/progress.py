"""How far a run has come, and how it is saved and resumed."""

import base64
from collections.abc import Mapping
import copy
from typing import NamedTuple

import jax
import msgspec
import numpy as np

from mrl_jax import workdir
from mrl_jax.thl import transfer
from mrl_jax.training import job as job_lib
from mrl_jax.update import checkpoint
from mrl_jax.update import state as state_lib


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
  # Metrics of the last round by policy, until it is evaluated and they are
  # written.
  unwritten: dict[str, workdir.RoundMetrics] = {}

  def add_residuals(
    self, receiver: str, by_sender: Mapping[str, transfer.Residual]
  ) -> None:
    for sender, residual in by_sender.items():
      pair = f'{sender}->{receiver}'
      self.residuals.setdefault(pair, transfer.Residual()).add(residual)


class Snapshot(NamedTuple):
  """All that the rest of a run depends on, at some moment.

  The next update deletes the arrays of `states`, but no later event changes the
  values of a snapshot.
  """

  rounds: int
  states: dict[str, state_lib.TrainState]
  host: dict[str, object]  # All else, as JSON.

  @property
  def is_gone(self) -> bool:
    """Whether an update has begun to replace the states."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.states))


def snapshot(job: job_lib.Job, progress: Progress) -> Snapshot:
  """The state of a run between rounds, or before an evaluation."""
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
  return Snapshot(progress.rounds, states, copy.deepcopy(host))


def save(
  job: job_lib.Job, taken: Snapshot, checkpoints: checkpoint.Checkpoints
) -> None:
  """Starts to write a checkpoint.

  Files are uploaded first: a run that resumes keeps what they say of the rounds
  up to its checkpoint.
  """
  job.home.push(wait=True)
  before = checkpoints.save(taken.rounds, taken.states, taken.host)
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
