"""Compiles programs in threads before they are needed, and keeps them if it can."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import itertools
import os

from absl import logging
import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from mrl_jax.training import programs as programs_lib


@contextlib.contextmanager
def ahead(
  programs: Mapping[str, Sequence[programs_lib.Program]],
) -> Iterator[Callable[[], None]]:
  """Starts to compile the programs of every policy, on all cores.

  It yields a function that waits for all of them; only then are they called, or
  else they would be compiled twice. At the end, what has not begun is left. Hosts
  of a cluster compile in one order, but run nothing here.
  """
  in_turn = itertools.chain(*itertools.zip_longest(*programs.values()))
  pool = futures.ThreadPoolExecutor(os.cpu_count(), 'compile')
  started = [pool.submit(_compile, p) for p in in_turn if p is not None]

  def wait():
    for future in started:
      future.result()

  try:
    yield wait
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _compile(program):
  with jax.set_mesh(program.mesh):
    program.function.lower(*program.arguments).compile()


def keep_if_sound(meshes: Collection[Mesh]) -> None:
  """Does without jax's persistent cache of programs where it has crashed.

  A program for TPU that is read from it has halted chips, unless its mesh had the
  first one of the slice: https://github.com/jax-ml/jax/issues/38004. Policies on
  slices of their own have it.
  """
  first = jax.devices()[0]
  if first.platform == 'tpu' and any(
    first not in m.devices.flat for m in meshes
  ):
    logging.warning(
      'compiled programs are not kept: on TPU, those of a policy without the '
      'first chip of the slice could not be read back'
    )
    jax.config.update('jax_enable_compilation_cache', False)
    compilation_cache.reset_cache()
