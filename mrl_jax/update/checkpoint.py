"""Checkpoints: all that a run needs to resume as if it had never stopped."""

from collections.abc import Mapping
import os

import jax
import orbax.checkpoint as ocp

from mrl_jax import checks
from mrl_jax import files
from mrl_jax.update import state as state_lib

_HOST = '_host'  # An item of each checkpoint; no policy has this name.


class Checkpoints:
  """The checkpoints of a run; orbax writes each aside and renames it whole.

  The step of a checkpoint is the number of rounds done. It holds the
  `TrainState` of every policy and, as JSON, the state of the host: data cursor,
  random keys, the state of the exchange, and results so far.
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

    Returns the rounds of the previous checkpoint, which is complete by then.
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
    """Reads the newest checkpoint, sharded as `like`; None if there is none."""
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
  """Reads the parameters of the policy `name`, with the sharding of `like`.

  They are from the checkpoint after `rounds` rounds, or the newest, of a run that
  may still be going on. Returns them, and the rounds of their checkpoint. Raises
  InputError if there is no such checkpoint.
  """
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
    places = jax.tree.map(
      lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding), like
    )
    args = ocp.args.PyTreeRestore(
      {'params': like}, restore_args={'params': places}, partial_restore=True
    )
    restored = saved.restore(rounds, args=ocp.args.Composite(**{name: args}))
  return restored[name]['params'], rounds


def _abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def save_params(path: str, params) -> None:
  """Writes parameters to a new folder."""
  with files.new_folder(path) as aside, ocp.StandardCheckpointer() as writer:
    writer.save(aside, params)


def restore_params(path: str, like):
  """Reads parameters, sharded as `like`; None if the folder does not exist."""
  path = os.path.abspath(path)
  if not os.path.isdir(path):
    return None
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path, jax.tree.map(_abstract, like))
