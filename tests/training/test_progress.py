import json
import types

import jax

from mrl_jax.thl import transfer
from mrl_jax.training import progress as progress_lib

RESIDUAL = transfer.Residual(
  rollouts=2, refused={'empty': 1}, chunks={'1:1': 4}
)


class Checkpoints:
  """Keeps the newest checkpoint in memory, its host part as JSON."""

  saved = None

  def save(self, rounds, states, host):
    before = self.saved and self.saved[0]
    self.saved = rounds, states, json.dumps(host)
    return before

  def restore(self, like):
    if self.saved is None:
      return None
    _, states, host = self.saved
    assert like.keys() == states.keys()
    return states, json.loads(host)


class Stateful:
  """Data cursors and endpoints, as far as a checkpoint sees them."""

  def __init__(self, state):
    self.value = state

  def state(self):
    return self.value

  def set_state(self, value):
    self.value = value

  get_state, restore = state, set_state


def job(seed, cursor, received):
  return types.SimpleNamespace(
    batches=Stateful({'next': cursor}),
    refills={'b': Stateful({'next': cursor + 1})},
    endpoints={'b': Stateful(received)},
    workers={
      'b': types.SimpleNamespace(
        key=jax.random.key(seed), state=f'state {seed}'
      )
    },
    node=types.SimpleNamespace(saved=[].append),
    home=types.SimpleNamespace(push=lambda wait: None),
  )


def test_residuals_add_up_by_pair():
  progress = progress_lib.Progress()
  progress.add_residuals('b', {'a': RESIDUAL})
  progress.add_residuals('b', {'a': RESIDUAL, 'c': RESIDUAL})
  assert progress.residuals['a->b'].rollouts == 4
  assert progress.residuals['a->b'].refused == {'empty': 2}
  assert progress.residuals['c->b'] == RESIDUAL


def save(job, progress, checkpoints):
  taken = progress_lib.snapshot(job, progress)
  progress_lib.save(job, taken, checkpoints)


def test_all_that_a_run_depends_on_comes_back_from_a_checkpoint():
  progress = progress_lib.Progress(
    rounds=3,
    seconds=1.5,
    accuracy={0: {'b': {'all': 0.25}}, 3: {'b': {'all': 0.5}}},
    residuals={'a->b': RESIDUAL},
    accuracies={'b': {'a': [0.5, 1.0]}},
  )
  checkpoints, stopped, resumed = (
    Checkpoints(),
    job(7, 5, b'\0\xff'),
    job(0, 0, b''),
  )
  assert progress_lib.resume(resumed, checkpoints) is None
  save(stopped, progress, checkpoints)
  assert progress_lib.resume(resumed, checkpoints) == progress
  (worker,) = resumed.workers.values()
  assert worker.state == 'state 7'
  assert worker.key == jax.random.key(7)
  assert resumed.batches.value == {'next': 5}
  assert resumed.refills['b'].value == {'next': 6}
  assert resumed.endpoints['b'].value == b'\0\xff'


def test_the_exchange_learns_which_checkpoint_is_whole():
  checkpoints, running, whole = Checkpoints(), job(0, 0, b''), []
  running.node.saved = whole.append
  for rounds in (1, 2):
    progress = progress_lib.Progress(rounds=rounds)
    save(running, progress, checkpoints)
  assert whole == [1]  # That of two rounds may still be incomplete.
