"""Functions that tests call in processes of a pool."""

import os
import sys
import time


def obey(order, text=''):
  """Does what it is told to."""
  print('not a reply', flush=True)
  if order == 'hang':
    pow(10, 300_000_000)  # In C, where no thread and no signal handler runs.
  if order == 'sleep':
    time.sleep(60)
  if order == 'nap':
    time.sleep(0.5)
  if order == 'burn':  # Hundredths of a second of CPU time.
    end = time.process_time() + len(text) / 100
    while time.process_time() < end:
      pass
  if order == 'eat':
    bytearray(2**31)
  if order == 'raise':
    raise ValueError
  if order == 'ask':
    return str(os.getpid())
  if order == 'parent':
    return str(os.getppid())
  if order == 'modules':
    return ' '.join({'jax', 'numpy', 'mrl_jax'} & {*sys.modules})
  if order == 'long':
    return text * 1000
  return f'{len(text)}'
