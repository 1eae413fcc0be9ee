"""Two processes of a cluster: what they agree on, and whom errors name."""

import os
import signal
import socket
import types

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax import cluster
from mrl_jax import member
from tests import hosts

NAME = socket.gethostname()


@pytest.fixture(scope='module')
def talk():
  return hosts.values(hosts.run('talk'))


def test_all_have_what_each_gave_and_what_the_leader_shared(talk):
  for found in talk:
    assert found['gathered'] == [[0, 'x'], [1, 'x']]
    assert found['shared']  # 8 MiB, which no message can have.
    assert found['empty'] == ''
    assert found['decided'] == 0.5


def test_each_calls_what_the_leader_calls_first(talk):
  assert [found['called'] for found in talk] == [[0], [1]]


def test_an_error_of_the_leader_is_raised_in_the_others(talk):
  leader, other = (found['failed'] for found in talk)
  assert leader == 'InputError: seed = x'
  assert other == 'InputError: host 0, at the seed: seed = x'


def test_a_divergence_names_the_host_and_the_values(talk):
  for found in talk:
    assert found['same'] is None
    assert f'host 1 ({NAME}): rounds, rows.' in found['other']
    assert 'seed' not in found['other'].partition('Give')[0]


def test_hosts_that_are_out_of_step_are_an_error(talk):
  for found in talk:
    step = f'host 0 ({NAME}) is at step 0, host 1 ({NAME}) is at step 1'
    assert step in found['step']


def test_a_host_that_is_late_is_named(talk):
  leader, other = (found['late'] for found in talk)
  assert f'host 1 ({NAME}) did not reach the update within 0.5 s' in leader
  assert f'host 0 ({NAME}) did not share the news within 0.3 s' in other


@pytest.mark.parametrize(
  ('dead', 'why'),
  [(0, 'it cannot be reached'), (1, 'nothing was heard for 1 s')],
)
def test_a_host_that_died_is_named(dead, why):
  done = hosts.run('die', dead, lost_s=1)
  assert done[dead].returncode == -signal.SIGKILL
  assert done[1 - dead].returncode == os.EX_TEMPFAIL
  lost = f'host {dead} ({NAME}) of the cluster is lost: {why}'
  assert lost in done[1 - dead].stderr


def test_a_process_that_nobody_joins_says_so():
  (done,) = hosts.run('nothing', processes=[1], wait_s=1)
  assert done.returncode == 1
  assert 'process 1 of 2 is still waiting for others after 1 s' in done.stderr


def test_all_hosts_have_the_same_number_of_processes():
  for done in hosts.run('nothing', sizes=[2, 3], lost_s=1):
    assert done.returncode == 1
    assert 'cluster.processes is 2 and 3 in 2 processes' in done.stderr


def config(**changes):
  settings = {'processes': 2, 'process': 0, 'wait_s': 1.0, 'lost_s': 10.0}
  return types.SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'coordinator': ''}, 'without cluster.coordinator'),
    ({'coordinator': 'localhost:1', 'process': 2}, 'numbered from 0'),
    ({'coordinator': 'localhost'}, 'it must be HOST:PORT'),
    ({'coordinator': 'localhost:70000'}, 'it must be HOST:PORT'),
  ],
)
def test_a_cluster_that_cannot_be_is_refused(changes, message):
  with pytest.raises(checks.InputError, match=message):
    cluster.start(config(**changes))


def test_a_slice_of_another_size_than_planned_is_refused(monkeypatch):
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **_: None)
  monkeypatch.setattr(member, 'on_abort', lambda _: None)
  with pytest.raises(checks.InputError, match='= 4, but jax finds 1 hosts'):
    cluster.start(config(coordinator='auto', processes=4))
  cluster.start(config(coordinator='auto', processes=0))
  assert cluster.size() == 1


def test_a_second_leader_is_refused():
  with socket.create_server(('', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(checks.InputError, match='the number 0'):
      cluster.start(config(coordinator=f'localhost:{port}'))


def test_a_process_alone_decides_by_itself():
  assert cluster.leads()
  assert cluster.size() == 1
  assert cluster.gather('x', 3) == [3]
  assert cluster.decided('x', lambda: 3) == 3
  assert cluster.leader_first('x', lambda: 4) == 4
  assert cluster.share('x', b'5') == b'5'
  cluster.barrier('x')
  cluster.agree('x', {'y': 6})


@given(
  hnp.arrays(np.float32, (2, 3), elements=st.floats(-1, 1, width=32)),
  st.integers(0, 5),
)
def test_a_digest_tells_trees_apart(x, at):
  other = x.copy()
  other.flat[at] += 1
  digests = [
    {'a': x},
    {'b': x},
    {'a': other},
    {'a': x.reshape(3, 2)},
    {'a': x.view(np.int32)},
    {'a': [x, 'text']},
    {'a': [x, 'other']},
  ]
  assert cluster.digest({'a': x.copy()}) == cluster.digest({'a': x})
  assert len({*map(cluster.digest, digests)}) == len(digests)


def test_a_host_that_could_not_give_a_sign_of_life_gives_the_next(monkeypatch):
  beats = []

  def set_bytes(key, beat, **_):
    beats.append(beat)
    if len(beats) == 1:
      raise jax.errors.JaxRuntimeError('UNAVAILABLE')
    if len(beats) == 3:
      raise SystemExit

  client = types.SimpleNamespace(
    key_value_set_bytes=set_bytes, key_value_dir_get_bytes=lambda _: []
  )
  state = types.SimpleNamespace(
    process_id=1, num_processes=2, client=client, coordinator_address=''
  )
  with pytest.raises(SystemExit):
    member.Member(state, wait_s=1.0, lost_s=0.01).watch()
  assert beats == [b'0', b'1', b'2']
