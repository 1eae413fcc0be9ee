"""Clusters of processes on this machine, and what tests have them do."""

import ast
from collections.abc import Sequence
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]


def free_port() -> int:
  with socket.create_server(('localhost', 0)) as server:
    return server.getsockname()[1]


def run(
  what: str,
  *arguments,
  processes: Sequence[int] = (0, 1),
  sizes: Sequence[int] = (2, 2),
  devices: int = 2,
  wait_s: float = 60.0,
  lost_s: float = 30.0,
) -> list[subprocess.CompletedProcess]:
  """Runs a function of this module in processes of a cluster.

  Its output is what it returned, as JSON, after all that it printed.
  """
  port, environment = free_port(), {**os.environ}
  environment['JAX_NUM_CPU_DEVICES'] = str(devices)
  commands = [
    [sys.executable, '-m', 'tests.hosts', what]
    + [str(x) for x in (port, size, process, wait_s, lost_s)]
    + [repr(argument) for argument in arguments]
    for process, size in zip(processes, sizes, strict=False)
  ]
  started = [
    subprocess.Popen(
      command,
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for command in commands
  ]
  try:
    outputs = [process.communicate(timeout=300) for process in started]
  finally:
    for process in started:
      process.kill()
  return [
    subprocess.CompletedProcess(process.args, process.returncode, *output)
    for process, output in zip(started, outputs, strict=True)
  ]


def values(done: Sequence[subprocess.CompletedProcess]) -> list:
  """What the function returned in each process."""
  for process in done:
    assert process.returncode == 0, process.stderr
  return [json.loads(process.stdout.splitlines()[-1]) for process in done]


def nothing():
  """Joins the cluster, and leaves."""


def die(process: int) -> None:
  """A process dies while the others wait for it."""
  import jax

  from mrl_jax import cluster

  if jax.process_index() == process:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
  cluster.barrier('the update')


def talk() -> dict:
  """What the functions of `cluster` return, and the errors that they raise."""
  import numpy as np

  from mrl_jax import checks
  from mrl_jax import cluster

  here, found, large = int(not cluster.leads()), {}, bytes(range(256)) * 2**15

  def error_of(function, *args):
    try:
      function(*args)
    except (checks.InputError, cluster.LostHostError) as error:
      return f'{type(error).__name__}: {error}'

  found['gathered'] = cluster.gather('numbers', [here, 'x'])
  shared = cluster.share('bytes', None if here else large)
  found['shared'] = shared == large
  found['empty'] = cluster.share('no bytes', None if here else b'').decode()
  found['decided'] = cluster.decided('a float', lambda: 0.5 + here)
  found['failed'] = error_of(
    cluster.decided, 'the seed', lambda: checks.require(False, 'seed = x')
  )
  order = []
  cluster.leader_first('a file', lambda: order.append(here))
  found['called'] = order
  rows = {'tokens': np.arange(3), 'names': ['a', 'b']}
  found['same'] = error_of(cluster.agree, 'rows', {'rows': rows, 'seed': 0})
  rows['tokens'][2] += here
  found['other'] = error_of(
    cluster.agree, 'rows', {'rows': rows, 'seed': 0, 'rounds': here}
  )
  found['step'] = error_of(cluster.barrier, f'step {here}')
  # Process 1 comes too late; then process 0 does.
  time.sleep(1.5 * here)
  found['late'] = error_of(cluster.barrier, 'the update', 0.5)
  time.sleep(1.5 * (1 - here))
  if here:
    found['late'] = error_of(cluster.share, 'the news', None, 0.3)
  return found


def _main(what, port, size, process, wait_s, lost_s, *arguments):
  from configs import base
  from mrl_jax import checks
  from mrl_jax import cluster

  config = base.get_config().cluster
  config.coordinator, config.wait_s = f'localhost:{port}', float(wait_s)
  config.lost_s = float(lost_s)
  config.processes, config.process = int(size), int(process)
  try:
    cluster.start(config)
  except checks.InputError as error:
    sys.exit(f'{error}')
  try:
    result = globals()[what](*map(ast.literal_eval, arguments))
  except BaseException:
    traceback.print_exc()
    cluster.leave(1)
  print(json.dumps(result), flush=True)
  cluster.leave(0)


if __name__ == '__main__':
  _main(*sys.argv[1:])
