"""Traces of rounds for TensorBoard's profiler."""

from collections.abc import Iterator
import contextlib
import os

import jax

from mrl_jax import cluster
from mrl_jax import workdir
from mrl_jax.training import job as job_lib
from mrl_jax.training import progress as progress_lib


@contextlib.contextmanager
def of_round(
  job: job_lib.Job, progress: progress_lib.Progress
) -> Iterator[None]:
  """Writes a trace of what happens inside, if `config.profile` has this round."""
  profile = job.config.profile
  if not (
    0 <= progress.rounds - profile.first < profile.rounds and cluster.leads()
  ):
    yield
    return
  folder = os.path.join(job.home.folder, workdir.TENSORBOARD)
  with jax.profiler.trace(folder):
    yield
