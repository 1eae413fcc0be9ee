"""The results of a finished run, as `summary.json` has them."""

from mrl_jax import workdir
from mrl_jax.see import ledger as ledger_lib
from mrl_jax.training import job as job_lib
from mrl_jax.training import progress as progress_lib


def build(job: job_lib.Job, progress: progress_lib.Progress) -> workdir.Summary:
  """Accuracy before and after, and what became of the records of every pair."""
  before, after = progress.accuracy[0], progress.accuracy[progress.rounds]
  overall, endpoints = workdir.OVERALL, job.endpoints
  received = {
    f'{sender}->{receiver}': (endpoint.ledger, sender)
    for receiver, endpoint in endpoints.items()
    for sender in job.config.policies
  }
  sent = {
    f'{sender}->{receiver}': (ledger, receiver)
    for sender, endpoint in endpoints.items()
    for receiver, ledger in endpoint.sent.items()
  }

  def by_pair(ledgers, table):
    return {
      pair: row
      for pair, (ledger, peer) in ledgers.items()
      if (row := table(ledger).get(peer))
    }

  return workdir.Summary(
    method=job.config.method.name,
    seed=job.config.seed,
    rounds=progress.rounds,
    timing=workdir.RunTiming(
      seconds=progress.seconds,
      exchange=sum(e.ledger.seconds for e in endpoints.values()),
      waited=by_pair(received, lambda ledger: ledger.waited),
    ),
    policies={
      name: workdir.PolicySummary(
        workdir.BeforeAfter(before[name][overall], after[name][overall]),
        workdir.BeforeAfter(before[name], after[name]),
      )
      for name in job.workers
    },
    exchange=by_pair(received, ledger_lib.Ledger.table),
    sent=by_pair(sent, ledger_lib.Ledger.table),
    refusals=by_pair(sent | received, ledger_lib.Ledger.refusals),
    messages_refused=job.node.refused,
    residuals=progress.residuals,
    prompts_skipped=job.inputs.skipped,
  )
