"""The recipes of CONTRIBUTING.md do what they say, as they stand there."""

import pathlib
import re

import pytest

from mrl_jax import algorithms
from mrl_jax import config as config_lib
from mrl_jax.rewards import functions
from mrl_jax.rewards import judge
from mrl_jax.sharing import publish
from mrl_jax.sharing import sgt
from tests import examples
from tests import test_algorithms
from tests.rewards import test_functions
from tests.sharing import test_sgt

ROOT = pathlib.Path(__file__).parents[1]
GUIDE = ROOT / '.github' / 'CONTRIBUTING.md'


def recipe(title):
  """The blocks of code of a section."""
  section = (
    GUIDE.read_text().partition(f'## {title}\n')[2].partition('\n## ')[0]
  )
  return re.findall(r'```python\n(.*?)```', section, re.DOTALL)


@pytest.fixture
def tables(monkeypatch):
  for module, name in (
    (algorithms, 'METHODS'),
    (algorithms, 'HOW'),
    (functions, 'REWARDS'),
  ):
    monkeypatch.setattr(module, name, dict(getattr(module, name)))


def test_a_method_that_uses_own_success_rates(tables, monkeypatch):
  function, rows, config, test = recipe('Add a method')
  monkeypatch.setattr(sgt, 'faded_rows', None, raising=False)
  exec(function, vars(sgt))
  exec(rows, vars(algorithms))
  names = {}
  exec(config, names)
  made = names['get_config']()
  config_lib.check(made)
  tests = dict(vars(test_sgt))
  exec(test, tests)
  tests['test_demonstrations_fade_as_the_policy_succeeds']()
  # What every method must do, it does: equal its base without peers.
  test_algorithms.test_without_peers_every_method_is_its_base('faded_sgt')
  for which in ('all', 'rescue', 'balanced', 'random'):
    test_algorithms.test_any_which_goes_with_any_how(which, 'faded_sgt')
  method = algorithms.build(made.method)
  assert method.kinds == {'outcome'}
  peers = test_algorithms.groups(test_algorithms.PEER_REWARDS, 'b')
  received = publish.publish(peers, method.kinds, texts=4, verifier='exact')
  batch, _ = test_algorithms.learn('faded_sgt', received)
  # One of four own samples succeeds on p0, and none on p1.
  weights = {row.prompt: row.weight for row in batch.peer}
  assert weights == {0: pytest.approx(0.1 * 0.75**2), 1: 0.1}


def test_a_reward_that_reads_the_text(tables, monkeypatch):
  function, test = recipe('Add a reward')
  monkeypatch.setattr(functions, 'short', None, raising=False)
  exec(function, vars(functions))
  tests = dict(vars(test_functions))
  exec(test, tests)
  tests['test_short_completions_are_rewarded']()
  test_functions.test_every_reward_gives_a_number_for_each_completion('short')
  config = examples.run_config(
    **{'reward.functions': ('exact', 'short'), 'reward.weights': (1.0, 0.5)}
  )
  config_lib.check(config)
  judged = judge.build(config, judge.VERIFIERS['exact'](config.reward))
  assert judged([test_functions.completion(b'= 13')]) == [(1.5, 'correct')]


def test_the_guide_names_what_is_there():
  text = GUIDE.read_text()
  for path in re.findall(r'\]\(\.\./([\w/.]+)\)', text):
    assert (ROOT / path).exists(), path
  for path in re.findall(r'`((?:mrl_jax|tests|configs)/[\w/]+\.py)`', text):
    assert (ROOT / path).exists() or path == 'configs/faded_sgt.py', path
