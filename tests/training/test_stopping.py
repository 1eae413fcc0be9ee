import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mrl_jax.training import stopping

ROOT = pathlib.Path(__file__).parents[2]
CHILD = """
import hashlib, sys, time
from mrl_jax.training import stopping

case, seconds = sys.argv[1], float(sys.argv[2])

def save():
  say('save')
  if case == 'raises':
    raise RuntimeError('deleted')
  return case not in ('gone', 'evaluation')

def say(*words):
  print(*words, flush=True)

def wait_for_a_device():  # No handler runs in it, but other threads do.
  say('ready')
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)

stop = stopping.Stop()
def end(has_time):
  say('end', has_time)
  if case == 'dead terminal':
    raise SystemExit(1)

stop.listen(seconds, end)
try:
  if case == 'start':
    say('ready')
    time.sleep(60)
  with stop.deferred():
    if case == 'busy':
      wait_for_a_device()
    for i in range(1000):
      with stop.leaving_behind(save, 60.0 if case == 'hopeless' else 0.0):
        if case not in ('short', 'dead terminal', 'evaluation'):
          wait_for_a_device()
        if not i:
          say('ready')
        time.sleep(0.05 if case != 'evaluation' else 1.5)
      if case == 'evaluation':
        with stop.leaving_behind(lambda: say('saved') or True, 0.0):
          say('evaluating')
      if stop.asked:
        say('last')
        stop.leave()
except KeyboardInterrupt:
  say('interrupted')
  sys.exit(stopping.EXIT)
"""


def stopped(case, seconds, numbers=(signal.SIGTERM,), gap_s=0.1):
  """What a process says after signals, and the seconds until it exits."""
  with subprocess.Popen(
    [sys.executable, '-c', CHILD, case, str(seconds)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  ) as process:
    try:
      assert process.stdout.readline() == 'ready\n'
      began = time.monotonic()
      for number in numbers:
        process.send_signal(number)
        time.sleep(gap_s)
      said, _ = process.communicate(timeout=20)
    finally:
      process.kill()
  assert process.returncode == stopping.EXIT == 75
  return said.split('\n')[:-1], time.monotonic() - began


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_round_is_finished_if_there_is_time(number):
  said, seconds = stopped('short', 20, [number])
  assert said == ['last', 'end True']
  assert seconds < 10


def test_before_the_first_round_a_signal_interrupts():
  assert stopped('start', 20)[0] == ['interrupted']


@pytest.mark.parametrize(
  'case', ['long', pytest.param('raises', marks=pytest.mark.slow)]
)
def test_a_round_that_takes_too_long_is_left_behind_at_half_time(case):
  said, seconds = stopped(case, 3)
  assert said == ['save', 'end True']
  assert 1.5 <= seconds < 2.9


def test_a_round_that_will_take_too_long_is_left_behind_at_once():
  said, seconds = stopped('hopeless', 20)
  assert said == ['save', 'end True']
  assert seconds < 5


@pytest.mark.parametrize(
  ('case', 'expected'),
  [
    ('gone', ['save', 'end False']),
    pytest.param('busy', ['end False'], marks=pytest.mark.slow),
  ],
)
def test_when_the_time_is_over_the_process_exits_whatever_it_does(
  case, expected
):
  said, seconds = stopped(case, 1)
  assert said == expected
  assert 1 <= seconds < 5


def test_a_second_signal_ends_the_process_at_once():
  both = [signal.SIGINT, signal.SIGTERM]
  said, seconds = stopped('long', 20, both, gap_s=1.2)
  assert (said, seconds < 5) == ([], True)


def test_a_signal_that_is_sent_twice_is_one():
  said, _ = stopped('short', 20, [signal.SIGTERM] * 2, gap_s=0.05)
  assert said == ['last', 'end True']


def test_a_process_exits_though_its_terminal_is_gone():
  said, _ = stopped('dead terminal', 20)
  assert said == ['last', 'end True']


def test_what_follows_a_round_that_could_not_be_left_is_left():
  said, _ = stopped('evaluation', 2)  # At half time the round still has .5 s.
  assert said == ['save', 'saved', 'end True']


def test_nobody_can_stop_a_run_that_does_not_listen():
  handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
  stop = stopping.Stop()
  with stop.deferred(), stop.leaving_behind(os.abort, 0.0):
    assert not stop.asked
  assert handlers == [
    signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)
  ]
