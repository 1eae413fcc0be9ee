"""Work dirs as runs write them, small and with numbers to check by hand."""

from collections.abc import Iterable, Mapping
import dataclasses
import itertools
import json
import os
import pathlib

import msgspec

from mrl_jax import workdir
from mrl_jax.thl import transfer

POLICIES = ('gemma', 'llama')
FAMILIES = ('formula/add', 'words/add', 'words/sub')
CONFIG = {
  'method.name': 'prp', 'method.kl_weight': 0.0, 'method.clip_low': 0.2,
  'method.clip_high': 0.28, 'mwra.emulated_devices': 8, 'seed': 3,
  'cache_dir': 'somewhere', 'train.rounds': 4,
}  # fmt: skip
RESIDUAL = transfer.Residual(
  rollouts=8, payload_bytes=80, refused={'too_long': 2},
  refused_bytes={'too_long': 30}, specials_dropped=1, sender_tokens=20,
  receiver_tokens=40, chunks={'1:1': 10, '1:n': 20, 'n:1': 0, 'n:m': 0},
)  # fmt: skip
FATES = {'published': 10, 'bytes': 2048, 'used': 7, 'stale': 2}
PHASES = {'sampling': 1.0, 'updates': 2.5, 'other': 0.5}
RATIOS = workdir.Ratios(
  clip_fraction=0.1, max_ratio=2.0, ess_fraction=0.9,
  log_ratio_counts=[1] + [0] * 19 + [97] + [0] * 19 + [2],
)  # fmt: skip
COMPLETION = workdir.Completion(
  prompt='sort 3 1', completion='= 1 3', answer='1 3', reward=1.0,
  verdict='correct', finish='stop', tokens=6, logp=-0.25,
)  # fmt: skip
PLAN = workdir.PolicyPlan(
  model='llama', tokenizer='byte_level', parameters=255264, vocabulary=367,
  devices=[0, 1, 2, 3], mesh={'data': 1, 'fsdp': 4, 'tensor': 1},
  memory_bytes=2.0**20, load=0.93,
)  # fmt: skip


def row(
  round: int, policy: str, peers: Iterable[str] = (), **fields
) -> workdir.RoundMetrics:
  """The metrics of a round of four seconds; the run started 10 s before."""
  timing = workdir.Timing(
    seconds=4.0, tokens_per_second=100.0, elapsed=10.0 + 4 * (round + 1),
    phases=PHASES,
  )  # fmt: skip
  values = {
    'reward': 0.5, 'accuracy': 0.25, 'all_fail_groups': 0.5,
    'zero_signal_groups': 0.5, 'rows_with_signal': 0.5, 'rollouts': 16,
    'entropy': 0.1, 'response_length': 5.0, 'stopped': 1.0, 'grad_norm': 1.0,
    'peer_records': 10, 'peer_rows': 6, 'own': RATIOS, 'peer': RATIOS,
    'mismatch': workdir.Ratios(kl=1e-8), 'rescue_rate': 1.0,
    'rescued_by': dict.fromkeys(peers, 0.5),
    'exchange': {peer: {'rollout': FATES} for peer in peers},
    'residuals': dict.fromkeys(peers, RESIDUAL), 'timing': timing, **fields,
  }  # fmt: skip
  return workdir.RoundMetrics(round=round, policy=policy, **values)


def evaluation(
  rounds: int, policy: str, accuracy: float, **fields
) -> workdir.Evaluation:
  worst = msgspec.structs.replace(
    COMPLETION, completion='= 3 1', verdict='wrong', finish='stop_string'
  )
  values = {
    'accuracy': {'all': accuracy, 'words/add': accuracy / 2},
    'error': {'all': 0.02, 'words/add': None},
    'best': [COMPLETION],
    'worst': [worst],
    **fields,
  }
  return workdir.Evaluation(rounds=rounds, policy=policy, **values)


def summary(
  after: Mapping[str, float],
  rounds: int,
  before: float = 0.25,
  seconds: float | None = None,
  **fields,
) -> workdir.Summary:
  """Totals over the rounds of rows as `row` makes them."""
  total = transfer.Residual()
  for _ in range(rounds):
    total.add(RESIDUAL)
  fates = {fate: rounds * n for fate, n in FATES.items()}
  pairs = [f'{a}->{b}' for a, b in itertools.permutations(after, 2)]
  values = {
    'method': 'prp',
    'seed': 3,
    'timing': workdir.RunTiming(
      seconds=10.0 + 4 * rounds if seconds is None else seconds
    ),
    'policies': {
      name: workdir.PolicySummary(
        workdir.BeforeAfter(before, accuracy),
        workdir.BeforeAfter(
          dict.fromkeys(('all', *FAMILIES), before),
          dict.fromkeys(('all', *FAMILIES), accuracy),
        ),
      )
      for name, accuracy in after.items()
    },
    'exchange': {
      pair: {'rollout': {**fates, 'waiting': rounds}} for pair in pairs
    },
    'residuals': {pair: dataclasses.replace(total) for pair in pairs},
    **fields,
  }
  return workdir.Summary(rounds=rounds, **values)


def lines(structs: Iterable[msgspec.Struct]) -> str:
  """JSON lines, with numbers that are not finite as a run writes them."""
  return ''.join(json.dumps(msgspec.to_builtins(s)) + '\n' for s in structs)


def write(
  folder: pathlib.Path,
  *,
  policies: Iterable[str] = POLICIES,
  rounds: int = 4,
  config: Mapping[str, object] | None = None,
  rows: Iterable[workdir.RoundMetrics] | None = None,
  after: Mapping[str, float] | None = None,
  before: float = 0.25,
  seconds: float | None = None,
  **of_row,
) -> str:
  """Writes a run, finished if its config plans `rounds` rounds.

  Args:
    folder: the work dir.
    policies: names, unless `after` has them.
    rounds: number of rounds that are done.
    config: changes of `CONFIG`.
    rows: instead of those that `row` makes with the fields `of_row`.
    after: the accuracy of each policy after the last round.
    before: the accuracy of all policies before the first round.
    seconds: of the run.
    **of_row: fields of every row.

  Returns:
    The path of the work dir.
  """
  os.makedirs(folder, exist_ok=True)
  after = after or dict.fromkeys(policies, min(before + rounds / 8, 1.0))
  shown = {f'policies.{n}.warm_start_families': FAMILIES[:2] for n in after}
  config = {**CONFIG, **shown, **(config or {})}
  if rows is None:
    rows = [
      row(round, name, [peer for peer in after if peer != name], **of_row)
      for round in range(rounds)
      for name in after
    ]
  evaluations = [evaluation(0, name, before) for name in after]
  if rounds:
    evaluations += [evaluation(rounds, name, a) for name, a in after.items()]
  plan = workdir.Plan('8 x cpu', policies=dict.fromkeys(after, PLAN))
  workdir.write(folder, workdir.SETUP, workdir.Setup(config=config))
  workdir.write(folder, workdir.PLAN, plan)
  texts = {
    workdir.ROUNDS: lines(rows),
    workdir.EVALUATIONS: lines(evaluations),
  }
  for name, text in texts.items():
    pathlib.Path(folder, name).write_text(text)
  if rounds == config['train.rounds']:
    total = summary(after, rounds, before, seconds)
    workdir.write(folder, workdir.SUMMARY, total)
  return os.fspath(folder)


def change(folder: pathlib.Path, name: str, old: str, new: str) -> None:
  """Replaces the first place of a text in a file of a work dir."""
  path = pathlib.Path(folder, name)
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new, 1))
