"""What a round exchanged and how long it took."""

import collections
from collections.abc import Callable, Sequence
import time

import msgspec

from mrl_jax import records
from mrl_jax import workdir
from mrl_jax.training import job as job_lib


def start(
  job: job_lib.Job,
) -> Callable[
  [workdir.RoundMetrics, Sequence[Sequence[records.Rollout]]],
  workdir.RoundMetrics,
]:
  """Starts the counters and clocks of a round.

    complete = recorder.start(job)
    ...  # Play the round.
    result = complete(result, groups)

  adds the exchange, verification results and times to a policy's metrics;
  `groups` are its rollouts of the prompts that all policies share.
  """
  began = time.monotonic()
  before = {
    name: (endpoint.ledger.seconds, collections.Counter(endpoint.ledger.waited))
    for name, endpoint in job.endpoints.items()
  }
  for worker in job.workers.values():
    worker.judge.since_last()  # Forget the answers of evaluations.

  def complete(result, groups):
    ledger = job.endpoints[result.policy].ledger
    exchange_s, waited_s = before[result.policy]
    seconds = time.monotonic() - began
    tokens = sum(len(r.ids) for group in groups for r in group)
    return msgspec.structs.replace(
      result,
      exchange=ledger.since_last(),
      verified=job.workers[result.policy].judge.since_last(),
      timing=workdir.Timing(
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        exchange=ledger.seconds - exchange_s,
        waited=dict(collections.Counter(ledger.waited) - waited_s),
      ),
    )

  return complete
