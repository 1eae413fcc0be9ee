import collections
import types

import pytest

from mrl_jax import workdir
from mrl_jax.training import recorder
from tests import examples


class Job:
  """What a recorder reads of a job with one policy, 'a'."""

  def __init__(self):
    self.verified = collections.Counter(wrong=9)  # By evaluations.
    self.ledger = types.SimpleNamespace(
      seconds=1.0,
      waited={'b': 0.5},
      since_last=lambda: {'b': {'rollout': {'used': 3}}},
    )
    judge = types.SimpleNamespace(since_last=self._verified_since_last)
    self.workers = {'a': types.SimpleNamespace(judge=judge)}
    self.endpoints = {'a': types.SimpleNamespace(ledger=self.ledger)}

  def _verified_since_last(self):
    verified, self.verified = self.verified, collections.Counter()
    return dict(verified)


def test_a_row_gets_what_its_round_alone_exchanged_verified_and_took(
  monkeypatch,
):
  now, job = 10.0, Job()
  monkeypatch.setattr(recorder.time, 'monotonic', lambda: now)
  complete = recorder.start(job)
  now = 12.0
  job.ledger.seconds, job.ledger.waited = 1.75, {'b': 0.75, 'c': 0.25}
  job.verified['correct'] = 4
  row = workdir.RoundMetrics(round=0, policy='a', reward=0.5)
  groups = [examples.group([1.0, 0.0])]  # Of five tokens each.
  assert complete(row, groups) == workdir.RoundMetrics(
    round=0,
    policy='a',
    reward=0.5,
    exchange={'b': {'rollout': {'used': 3}}},
    verified={'correct': 4},
    timing=workdir.Timing(
      seconds=2.0,
      tokens_per_second=pytest.approx(5.0),
      exchange=0.75,
      waited={'b': 0.25, 'c': 0.25},
    ),
  )
