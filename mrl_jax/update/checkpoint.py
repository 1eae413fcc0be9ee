"""Checkpoints: all that a run needs to go on as if it had never stopped."""

from collections.abc import Mapping
import os

import jax
import orbax.checkpoint as ocp

from mrl_jax import checks
from mrl_jax import files
from mrl_jax.update import state as state_lib

FOLDER = 'checkpoints'  # In a work dir.
_HOST = '_host'  # No policy is called this.


class Checkpoints:
  """The checkpoints of a run; orbax writes each aside and renames it whole.

  A step is the number of rounds done. It holds the `TrainState` of every
  policy and, as JSON, what the host knows: data cursor, random keys, the state
  of the exchange, and results so far.
  """

  def __init__(self, folder: str, keep: int):
    self._manager = ocp.CheckpointManager(
      os.path.abspath(folder),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, step_prefix='round', cleanup_tmp_directories=True
      ),
    )

  def save(
    self,
    rounds: int,
    states: Mapping[str, state_lib.TrainState],
    host: Mapping,
  ) -> int | None:
    """Starts to write a checkpoint; arrays are copied before it returns.

    Returns the rounds of the checkpoint before it, which is whole by then.
    """
    self._manager.wait_until_finished()
    before = self._manager.latest_step()
    items = {
      name: ocp.args.StandardSave(state) for name, state in states.items()
    }
    items[_HOST] = ocp.args.JsonSave(host)
    self._manager.save(rounds, args=ocp.args.Composite(**items))
    return before

  def restore(
    self, like: Mapping[str, state_lib.TrainState]
  ) -> tuple[dict[str, state_lib.TrainState], dict] | None:
    """The newest whole checkpoint, placed as `like`; None if there is none."""
    rounds = self._manager.latest_step()
    if rounds is None:
      return None
    items = {
      name: ocp.args.StandardRestore(jax.tree.map(_abstract, state))
      for name, state in like.items()
    }
    items[_HOST] = ocp.args.JsonRestore()
    restored = self._manager.restore(rounds, args=ocp.args.Composite(**items))
    return {name: restored[name] for name in like}, restored[_HOST]

  def close(self) -> None:
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()
    self._manager.close()


def read_params(folder: str, rounds: int | None, name: str, like):
  """One policy's parameters from the checkpoints of a run, which may go on.

  Args:
    folder: of the checkpoints.
    rounds: after how many; None is the newest.
    name: of the policy.
    like: shapes and places.

  Returns:
    The parameters, and after how many rounds they are.

  Raises:
    InputError: there is no such checkpoint.
  """
  # A run that goes on writes there.
  options = ocp.CheckpointManagerOptions(
    read_only=True, create=False, save_interval_steps=0, step_prefix='round'
  )
  with ocp.CheckpointManager(os.path.abspath(folder), options=options) as saved:
    known = sorted(saved.all_steps())
    checks.require(bool(known), f'{folder} has no checkpoint yet')
    rounds = known[-1] if rounds is None else rounds
    checks.require(
      rounds in known,
      f'{folder} has no checkpoint of {rounds} rounds, but of '
      f'{", ".join(map(str, known))}',
    )
    args = ocp.args.PyTreeRestore(
      {'params': like},
      restore_args={
        'params': jax.tree.map(
          lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding), like
        )
      },
      partial_restore=True,
    )
    found = saved.restore(rounds, args=ocp.args.Composite(**{name: args}))
  return found[name]['params'], rounds


def _abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def save_params(path: str, params) -> None:
  """Writes parameters to a new folder."""
  with files.new_folder(path) as aside, ocp.StandardCheckpointer() as writer:
    writer.save(aside, params)


def restore_params(path: str, like):
  """Reads parameters, placed as `like`; None if they are not there."""
  path = os.path.abspath(path)
  if not os.path.isdir(path):
    return None
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path, jax.tree.map(_abstract, like))
