"""Checkpoints: all that a run needs to resume as if it had never stopped."""

from collections.abc import Mapping
import contextlib
import glob
import json
import os
import re

from absl import logging
from etils import epath
import jax
import orbax.checkpoint as ocp

from mrl_jax import checks
from mrl_jax import cluster
from mrl_jax import files
from mrl_jax.update import state as state_lib

_HOST = '_host'  # An item of each checkpoint; no policy has this name.
_PREFIX = 'round'
_FOLDER = re.compile(rf'{_PREFIX}_(\d+)')
_DAMAGED = 'damaged-'  # Begins the name of a checkpoint that was set aside.
_DIGESTS = 'digests.json'  # Of the other files of a checkpoint.
# Orbax writes these after the digests, and no restore needs what is in them.
_NO_DIGEST = ('_CHECKPOINT_METADATA', 'commit_success.txt')


class Checkpoints:
  """The checkpoints of a run; orbax writes each aside and renames it whole.

  The step of a checkpoint is the number of rounds done. It holds the
  `TrainState` of every policy and, as JSON, the state of the host: data cursor,
  random keys, the state of the exchange, and results so far. Digests of its
  files are in it from the moment of the renaming on.
  """

  def __init__(self, folder: str, keep: int):
    self._folder, self._saving = files.absolute(folder), None
    # A bucket checks objects itself, and has none to rename.
    digests = None if files.in_bucket(folder) else self._write_digests
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        step_prefix=_PREFIX,
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(post_finalization_callback=digests),
      ),
    )

  @property
  def newest(self) -> int | None:
    """The rounds of the newest checkpoint, which may still be written."""
    return self._manager.latest_step()

  def save(
    self,
    rounds: int,
    states: Mapping[str, state_lib.TrainState],
    host: Mapping,
  ) -> int | None:
    """Starts to write a checkpoint; arrays are copied before it returns.

    Returns the rounds of the previous checkpoint, which is complete by then.
    """
    self.wait()
    before, known = self.newest, self._manager.all_steps()
    if rounds in known and len(known) > 1:
      # It was made while its round was being evaluated. A kill before the new
      # one is complete leaves the one before.
      self._manager.delete(rounds)
      before = self.newest
    items = {
      name: ocp.args.StandardSave(state) for name, state in states.items()
    }
    items[_HOST] = ocp.args.JsonSave(host)
    self._saving = rounds
    self._manager.save(rounds, args=ocp.args.Composite(**items))
    return before

  def restore(
    self, like: Mapping[str, state_lib.TrainState]
  ) -> tuple[dict[str, state_lib.TrainState], dict] | None:
    """Reads the newest checkpoint, sharded as `like`; None if there is none.

    A damaged one is renamed, with a warning, and the one before is read. Raises
    InputError if all are damaged.
    """
    rounds = cluster.decided('the checkpoints', self._choose)
    if rounds is None:
      return None
    if not cluster.leads():
      self._manager.reload()  # The leader may have set some aside.
    items = {
      name: ocp.args.StandardRestore(jax.tree.map(_abstract, state))
      for name, state in like.items()
    }
    items[_HOST] = ocp.args.JsonRestore()
    restored = self._manager.restore(rounds, args=ocp.args.Composite(**items))
    return {name: restored[name] for name in like}, restored[_HOST]

  def _choose(self) -> int | None:
    """The newest checkpoint that is not damaged; damaged ones are renamed."""
    while (rounds := self.newest) is not None:
      path = os.path.join(self._folder, f'{_PREFIX}_{rounds}')
      damage = _damage(path)
      if damage is None:
        return rounds
      aside = _set_aside(path)
      logging.warning(
        '%s is damaged: %s. It is kept as %s, and the checkpoint before it is '
        'used',
        path,
        damage,
        os.path.basename(aside),
      )
      self._manager.reload()
    damaged = glob.glob(os.path.join(glob.escape(self._folder), f'{_DAMAGED}*'))
    checks.require(
      not damaged,
      f'{self._folder} has damaged checkpoints only: put back a copy of one '
      f'as {_PREFIX}_N, delete the folder to train from the beginning, or '
      'give a fresh --workdir',
    )
    return None

  def wait(self) -> None:
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits until everything is on disk."""
    self.wait()
    self._manager.close()

  def _write_digests(self) -> None:
    """Writes the digests of a checkpoint that is about to be renamed."""
    (path,) = glob.glob(
      os.path.join(glob.escape(self._folder), f'{_PREFIX}_{self._saving}.*')
    )
    digests = {
      os.path.relpath(os.path.join(folder, name), path): files.digest(
        os.path.join(folder, name)
      )
      for folder, _, names in os.walk(path)
      for name in names
      if name not in _NO_DIGEST
    }
    files.write(os.path.join(path, _DIGESTS), json.dumps(digests))


def newest(folder: str) -> int | None:
  """The rounds of the newest complete checkpoint in a folder, if any."""
  place = epath.Path(folder)
  names = [
    path.name
    for path in (place.iterdir() if place.is_dir() else ())
    if not files.in_bucket(folder) or _is_complete(path)
  ]
  matches = map(_FOLDER.fullmatch, names)
  return max((int(match[1]) for match in matches if match), default=None)


def _damage(path) -> str | None:
  """What is wrong with a checkpoint; None if nothing is known to be.

  An earlier version wrote no digests.
  """
  try:
    with open(os.path.join(path, _DIGESTS), 'rb') as f:
      digests = dict(json.loads(f.read()))
  except FileNotFoundError:
    return None
  except (OSError, ValueError, TypeError) as error:
    return f'{_DIGESTS} cannot be read: {error}'
  for name, digest in digests.items():
    try:
      changed = files.digest(os.path.join(path, name)) != digest
    except (OSError, ValueError) as error:
      return f'{name!r} cannot be read: {error}'
    if changed:
      return f'{name!r} has changed since it was written'
  return None


def _set_aside(path) -> str:
  """Renames a damaged checkpoint; returns its new path."""
  folder, name = os.path.split(path)
  aside = os.path.join(folder, _DAMAGED + name)
  while os.path.exists(aside):
    aside += '-again'
  os.rename(path, aside)
  return aside


def read_params(folder: str, rounds: int | None, name: str, like):
  """Reads the parameters of the policy `name`, with the sharding of `like`.

  They are from the checkpoint after `rounds` rounds, or the newest, of a run that
  may still be going on. Returns them, and the rounds of their checkpoint. Raises
  InputError if there is no such checkpoint.
  """
  options = ocp.CheckpointManagerOptions(
    read_only=True, create=False, save_interval_steps=0, step_prefix=_PREFIX
  )
  with ocp.CheckpointManager(files.absolute(folder), options=options) as saved:
    known = sorted(saved.all_steps())
    checks.require(bool(known), f'{folder} has no checkpoint yet')
    rounds = known[-1] if rounds is None else rounds
    checks.require(
      rounds in known,
      f'{folder} has no checkpoint of {rounds} rounds, but of '
      f'{", ".join(map(str, known))}',
    )
    path = os.path.join(folder, f'{_PREFIX}_{rounds}')
    damage = _damage(path)
    checks.require(
      damage is None, f'{path} is damaged: {damage}; name another checkpoint'
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
  with contextlib.ExitStack() as stack:
    aside = cluster.decided(
      'a new folder', lambda: stack.enter_context(files.new_folder(path))
    )
    with ocp.StandardCheckpointer() as writer:
      # In a bucket, what a kill has left there is replaced.
      writer.save(aside, params, force=files.in_bucket(path))


def restore_params(path: str, like):
  """Reads parameters, sharded as `like`; None if the folder does not exist."""
  path = files.absolute(path)
  if not cluster.decided('what is in the cache', lambda: _is_complete(path)):
    return None
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path, jax.tree.map(_abstract, like))


def _is_complete(path) -> bool:
  place = epath.Path(path)
  return place.exists() and ocp.utils.is_checkpoint_finalized(place)
