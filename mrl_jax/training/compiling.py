"""Compiles programs in threads before they are needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import itertools
import os

import jax

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
