import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from mrl_jax import processes

ROOT = pathlib.Path(__file__).parents[1]
OBEY = 'tests.children:obey'


@pytest.fixture(scope='module')
def pool():
  with contextlib.closing(processes.Pool(OBEY, 30.0, processes=2)) as pool:
    yield pool


@pytest.fixture(scope='module')
def hasty_pool():
  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.closing(processes.Pool(OBEY, 0.5, processes=2)) as pool,
  ):
    patch.setattr(processes, '_PATIENCE', 4.0)
    yield pool


def alive(pid):
  """Whether a process exists and has not ended."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


def eventually(condition):
  """Waits until the condition holds; returns whether it does."""
  end = time.monotonic() + 10.0
  while not condition() and time.monotonic() < end:
    time.sleep(0.01)
  return condition()


def both(pool):
  """The ids of both processes of a pool, once they have started."""
  pids = set()

  def both_replied():
    pids.update(pool.map([('ask',)] * 2))
    return len(pids) == 2

  assert eventually(both_replied)
  return pids


def test_replies_are_in_the_order_of_requests(pool):
  assert pool.map([('count', 'x' * n) for n in range(50)]) == [
    str(n) for n in range(50)
  ]
  assert pool.map([]) == []


@pytest.mark.parametrize(
  'text', ['\0', 'a\nb\r\n', '\ud800', '\udc80\ud83d', 'é€😀', '"\\', ' ']
)
def test_any_text_crosses(pool, text):
  assert pool.map([('count', text)]) == [str(len(text))]


def test_requests_are_shared_by_several_processes(pool):
  pids = both(pool)
  assert {*pool.map([('ask',)] * 50)} == pids
  assert str(os.getpid()) not in pids


def test_processes_load_no_more_than_they_need(pool):
  assert pool.map([('modules',)]) == ['mrl_jax']


@pytest.mark.parametrize(
  ('order', 'outcome'), [('hang', 'timeout'), ('sleep', 'crash')]
)
def test_a_request_that_never_ends_is_stopped(hasty_pool, order, outcome):
  hasty_pool.map([('count',)] * 2)  # Starts both processes.
  began = time.monotonic()
  replies = hasty_pool.map([('count', 'x'), (order,), ('count', 'xx')])
  assert replies == ['1', outcome, '2']
  assert 0.5 <= time.monotonic() - began < 10.0
  assert hasty_pool.map([('count',)] * 4) == ['0'] * 4


def test_a_suspended_process_is_stopped(hasty_pool):
  (pid,) = hasty_pool.map([('ask',)])
  os.kill(int(pid), signal.SIGSTOP)
  assert hasty_pool.map([('count', 'x')]) == ['crash']
  assert hasty_pool.map([('count', 'x')]) == ['1']


def test_signals_to_all_processes_of_a_job_end_no_request(hasty_pool):
  parent, pid = hasty_pool.map([('parent',), ('ask',)])
  for number in (signal.SIGINT, signal.SIGTERM):
    for process in (parent, pid):
      os.kill(int(process), number)
  assert hasty_pool.map([('ask',)] * 4).count('crash') == 0


def test_deadlines_are_in_cpu_time(hasty_pool):
  (pid,) = hasty_pool.map([('ask',)])
  before = hasty_pool.cpu_s
  timers = [
    threading.Timer(wait, os.kill, (int(pid), signal_of))
    for wait, signal_of in ((0.1, signal.SIGSTOP), (1.0, signal.SIGCONT))
  ]
  for timer in timers:
    timer.start()
  # Of a time of 1 second, it uses 0.3, of 0.5 that it may.
  assert hasty_pool.map([('burn', 'x' * 30)]) == ['30']
  assert hasty_pool.cpu_s - before == pytest.approx(0.3, abs=0.05)
  # The limit of a call may be smaller.
  assert hasty_pool.map([('burn', 'x' * 30)], 0.1) == ['timeout']
  assert hasty_pool.cpu_s - before == pytest.approx(0.4, abs=0.05)


def test_a_stopped_process_is_replaced_by_a_fork_without_imports():
  with contextlib.closing(processes.Pool(OBEY, 0.2, processes=1)) as pool:
    orders = [(order,) for order in ('parent', 'ask', 'hang', 'parent', 'ask')]
    parent, pid, outcome, same_parent, other_pid = pool.map(orders)
    assert outcome == 'timeout'
    assert parent == same_parent
    assert len({parent, pid, other_pid, str(os.getpid())}) == 4


def test_replies_may_be_long(pool):
  assert pool.map([('long', 'x' * 300)]) == ['x' * 300_000]


@pytest.mark.parametrize('order', ['eat', 'raise'])
def test_a_request_that_breaks_its_process_is_a_crash_alone(pool, order):
  replies = pool.map([('count', 'x'), (order,), ('count', 'xx')])
  assert replies == ['1', 'crash', '2']
  assert pool.map([('count',)] * 4) == ['0'] * 4


def test_a_request_whose_process_is_killed_is_a_crash(pool):
  (pid,) = pool.map([('ask',)])
  # `pid` is the first process that is idle, and gets the first request.
  timer = threading.Timer(0.3, os.kill, (int(pid), signal.SIGKILL))
  timer.start()
  assert pool.map([('sleep',)]) == ['crash']
  assert pool.map([('count', 'x')]) == ['1']


def test_an_idle_process_that_was_killed_loses_no_request(pool):
  (pid,) = pool.map([('ask',)])
  os.kill(int(pid), signal.SIGKILL)
  assert eventually(lambda: not alive(pid))
  assert pool.map([('count', 'x')] * 3) == ['1'] * 3


def test_closing_kills_all_processes_and_is_final():
  pool = processes.Pool(OBEY, 30.0, processes=2)
  pids = both(pool)
  assert all(map(alive, pids))
  began = time.monotonic()
  pool.close()
  pool.close()
  assert time.monotonic() - began < 1.0
  assert eventually(lambda: not any(map(alive, pids)))
  with pytest.raises(RuntimeError, match='closed'):
    pool.map([('count',)])


def test_an_interruption_waits_for_no_reply_and_leaves_none(pool):
  def interrupt(*_):
    raise KeyboardInterrupt

  before = signal.signal(signal.SIGALRM, interrupt)
  began = time.monotonic()
  try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
      pool.map([('nap', 'xxx'), ('sleep',)])
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
  assert time.monotonic() - began < 5.0
  # A stale reply would come during the second nap.
  assert pool.map([('count', 'x'), ('nap', 'xx')]) == ['1', '2']


@pytest.mark.parametrize('by', ['exit', 'kill'])
def test_no_process_outlives_the_owner_of_the_pool(by):
  # Of two processes, one is idle, and one hangs in a request.
  script = (
    'from mrl_jax import processes\n'
    f'pool = processes.Pool("{OBEY}", 0.5, processes=2)\n'
    'pids = set()\n'
    'while len(pids) < 2: pids |= {*pool.map([("ask",)] * 2)}\n'
    'print(*pids, flush=True)\n'
    'if input() == "kill": pool.map([("hang",)])\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', script],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as owner:
    pids = owner.stdout.readline().decode().split()
    assert len(pids) == 2
    assert all(map(alive, pids))
    owner.stdin.write(f'{by}\n'.encode())
    owner.stdin.flush()
    if by == 'kill':
      time.sleep(0.2)
      owner.kill()
    owner.wait()
  # A process that hangs kills itself a second after its deadline.
  assert eventually(lambda: not any(map(alive, pids)))


def test_the_error_for_a_missing_module_names_it():
  with (
    contextlib.closing(processes.Pool('tests.nothing:obey', 1.0)) as pool,
    pytest.raises(RuntimeError, match=r"No module named 'tests.nothing'"),
  ):
    pool.map([('count',)])
