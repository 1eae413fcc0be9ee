"""When a run is saved: on time, and before it stops."""

from collections.abc import Iterator
import contextlib
import functools
import math
import time

from mrl_jax import cluster
from mrl_jax.training import job as job_lib
from mrl_jax.training import metrics
from mrl_jax.training import progress as progress_lib
from mrl_jax.training import stopping
from mrl_jax.update import checkpoint


class Saver:
  """Saves a run after rounds, and ends it if any of its hosts is asked to."""

  def __init__(
    self,
    job: job_lib.Job,
    progress: progress_lib.Progress,
    checkpoints: checkpoint.Checkpoints,
    writer: metrics.Writer | metrics.Silent,
    stop: stopping.Stop,
  ):
    self._job, self._progress = job, progress
    self._checkpoints, self._writer, self._stop = checkpoints, writer, stop
    self._saved = time.monotonic()
    self._took_s = {}  # Of the last round, and the last evaluation.

  @contextlib.contextmanager
  def leaving_behind(self, step: str) -> Iterator[None]:
    """Saves what was before this step, if there is no time to end it."""
    taken = progress_lib.snapshot(self._job, self._progress)
    save, began = functools.partial(self._left_behind, taken), time.monotonic()
    with self._stop.leaving_behind(save, self._took_s.get(step, 0.0)):
      yield
    self._took_s[step] = time.monotonic() - began

  def before_evaluation(self) -> None:
    """Ends a run of several hosts: none alone can leave an evaluation behind."""
    if cluster.size() > 1 and any(
      cluster.gather('an evaluation', self._stop.asked)
    ):
      self._save_and_leave()

  def after_round(self) -> None:
    """Saves if it is time to, and ends the run if it is asked to stop."""
    rounds, settings = self._progress.rounds, self._job.config.checkpoint
    total = self._job.config.train.rounds
    late_s = 60 * settings.minutes or math.inf
    # Any host may be asked to stop; the leader's clock holds.
    asked, late = zip(
      *cluster.gather(
        f'the end of round {rounds}',
        (self._stop.asked, time.monotonic() - self._saved > late_s),
      ),
      strict=True,
    )
    if any(asked) and rounds < total:
      self._save_and_leave()
    if rounds % settings.every == 0 or rounds == total or late[0]:
      self._save()
    else:
      self._job.home.push()

  def _save(self):
    self._writer.flush()
    with self._job.watch('checkpoints'):
      taken = progress_lib.snapshot(self._job, self._progress)
      progress_lib.save(self._job, taken, self._checkpoints)
    self._saved = time.monotonic()

  def _save_and_leave(self):
    self._save()
    self._checkpoints.wait()
    self._writer.close()
    cluster.end()
    self._stop.leave()

  def _left_behind(self, taken) -> bool:
    """Saves the state before a round, unless its update has begun.

    Of several hosts none can: to save, all would have to run programs, and their
    devices are at work on the round. It ends first, or the time to stop is over;
    then the last checkpoint remains.
    """
    if taken.is_gone or cluster.size() > 1:
      return False
    if self._checkpoints.newest != taken.rounds:
      progress_lib.save(self._job, taken, self._checkpoints)
    self._checkpoints.wait()
    return True
