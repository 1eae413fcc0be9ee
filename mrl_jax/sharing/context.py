"""What a policy knows when it turns a round into training rows."""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
from typing import NamedTuple

import ml_collections
import msgspec
import numpy as np

from mrl_jax import records
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer


class Place(NamedTuple):
  """Where a group belongs: the index of its prompt, and the peer's name."""

  prompt: int
  peer: str


@dataclasses.dataclass
class Log:
  """What happened while rows were made, for the metrics of the round."""

  # Peers' claims that were not believed and responses that were not admitted,
  # counted by reason.
  refused: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  judged: int = 0  # Peers' responses that the learner judged.
  # What THL could not carry, by sender.
  residuals: dict[str, transfer.Residual] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(transfer.Residual)
  )
  # Of sampler and trainer, if own rows were corrected for it.
  mismatch: Mapping[str, float] | None = None
  # Numbers of the method alone, by name; any method may add some.
  metrics: dict[str, float | Mapping[str, float]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Context:
  """A round as one policy, the learner, sees it before it trains.

  Baselines, selections and the makers of peer rows all take it; `algorithms`
  has the tables.
  """

  # The learner's own rollouts, a group for each prompt.
  groups: Sequence[Sequence[records.Rollout]]
  received: Sequence[records.Record]  # From its peers.
  settings: ml_collections.ConfigDict  # `config.method`
  tokenizer: byte_tokenizer.ByteTokenizer  # The learner's.
  limits: transfer.Limits  # Which rollouts of peers the learner accepts.
  # Judges peers' responses with the learner's own verifier and rewards: maps
  # (index of the prompt, payload, finish, number of tokens) of each response to
  # (reward, verdict).
  judge: Callable[
    [Sequence[tuple[int, bytes, records.Finish, int]]],
    Sequence[tuple[float, records.Verdict]],
  ]
  # Selects, of the groups that peers offer, those that the learner judges. It can
  # learn from no others, and has only the peers' claims about them. None is all.
  choose: Callable[['Context', Sequence[Place]], Collection[Place]] | None = (
    None
  )
  # Log-probabilities of rows under the learner as it is, each f32 [T]; with
  # `reference=True`, under the reference policy.
  score: Callable[..., Sequence[np.ndarray]]
  rng: np.random.Generator  # Of the learner's random choices in this round.
  # w(learner, policy) of every policy that reported its accuracy; see
  # `hacpo.capability_ratios`. Filled once `peer_records` are judged.
  capability_ratio: dict[str, float] = dataclasses.field(default_factory=dict)
  # Indices of the prompts whose own groups are trained on; None is all.
  kept: Sequence[int] | None = None
  log: Log = dataclasses.field(default_factory=Log)  # Changed in place.

  @functools.cached_property
  def index(self) -> dict[str, int]:
    """The index of every prompt of the round, by the prompt's id."""
    return {group[0].header.prompt: p for p, group in enumerate(self.groups)}

  @functools.cached_property
  def peer_records(self) -> list[records.Record]:
    """Records about prompts of this round, as the learner's judge sees them.

    The learner judges the responses of `chosen` groups anew. Where it disagrees
    with what the peer claims, its own verdict holds, and the disagreement is
    counted. Statistics of a chosen group whose rollouts crossed are computed from
    these rewards; those of other groups are the peer's claim. An outcome's number
    of successes is a claim, too, which counts if any text that it quotes is a
    success.

    With `see.max_staleness`, a peer's records of several rounds may be about the
    same prompt; of each kind, only those of the newest round count.
    """
    responses = [
      (self.index[r.header.prompt], *response)
      for r in self._newest
      if self.place(r) in self.chosen
      for response in _responses(r)
    ]
    judgements = iter(self.judge(responses))
    self.log.judged += len(responses)
    rewards = collections.defaultdict(list)
    judged = [
      self._judged(r, judgements, rewards)
      if self.place(r) in self.chosen
      else r
      for r in self._newest
    ]
    return [_recomputed(r, rewards) for r in judged]

  @functools.cached_property
  def chosen(self) -> frozenset[Place]:
    """The peers' groups of responses that the learner judges."""
    offered = {
      self.place(r)
      for r in self._newest
      if not isinstance(r, records.GroupStats)
    }
    if self.choose is None:
      return frozenset(offered)
    return frozenset(self.choose(self, sorted(offered)))

  def place(self, record: records.Record) -> Place:
    """The group that a record about a prompt of this round is about."""
    return Place(self.index[record.header.prompt], record.header.policy)

  @functools.cached_property
  def _newest(self) -> list[records.Record]:
    """The records of `peer_records`, as the peers sent them."""
    about = [r for r in self.received if r.header.prompt in self.index]
    newest = {}
    for r in about:
      newest[_source(r)] = max(newest.get(_source(r), 0), r.header.round)
    return [r for r in about if r.header.round == newest[_source(r)]]

  @property
  def late_records(self) -> list[records.Record]:
    """Records about prompts of other rounds, which nobody can judge here."""
    return [r for r in self.received if r.header.prompt not in self.index]

  def _judged(self, record, judgements, rewards) -> records.Record:
    """The record with the next judgements, which are added to `rewards`."""
    refused, header = self.log.refused, record.header
    if isinstance(record, records.Rollout):
      reward, verdict = next(judgements)
      # A comparison that took too long disagrees with nobody.
      if verdict in records.UNDECIDED:
        refused['undecided'] += 1
      elif record.verdict not in records.UNDECIDED:
        refused['false_verdict'] += verdict != record.verdict
      rewards[header.policy, header.round, header.prompt].append(
        (reward, verdict == 'correct')
      )
      return msgspec.structs.replace(record, reward=reward, verdict=verdict)
    if isinstance(record, records.Outcome):
      verdicts = [next(judgements)[1] for _ in record.texts]
      texts = [
        t for t, v in zip(record.texts, verdicts, strict=True) if v == 'correct'
      ]
      undecided = sum(v in records.UNDECIDED for v in verdicts)
      refused['undecided'] += undecided
      refused['false_success'] += len(verdicts) - len(texts) - undecided
      return msgspec.structs.replace(
        record,
        texts=tuple(texts),
        successes=record.successes if texts else 0,
      )
    return record

  @functools.cached_property
  def rewards_PG(self) -> np.ndarray:
    """f64, rewards of own rollouts."""
    return np.array([[r.reward for r in group] for group in self.groups])

  @functools.cached_property
  def successes_P(self) -> np.ndarray:
    """i64, the number of own successes on every prompt."""
    return np.array([sum(r.success for r in group) for group in self.groups])

  @property
  def success_rate_P(self) -> np.ndarray:
    """f64, the share of own samples of every prompt that succeed."""
    return self.successes_P / self.group_size

  @property
  def group_size(self) -> int:
    """G, own samples of a prompt."""
    return len(self.groups[0])

  @functools.cached_property
  def own_moments_P3(self) -> np.ndarray:
    """`moments` of own rewards."""
    return moments(self.rewards_PG)

  @functools.cached_property
  def peer_moments(self) -> dict[str, np.ndarray]:
    """`moments` of what each peer sent in `GroupStats`, f64 [P, 3].

    They are zeros for prompts that a peer sent nothing about.
    """
    peers = {}
    for r in self.peer_records:
      if isinstance(r, records.GroupStats):
        moments_P3 = peers.setdefault(
          r.header.policy, np.zeros((len(self.groups), 3))
        )
        sums = (r.count, r.reward_sum, r.reward_square_sum)
        moments_P3[self.index[r.header.prompt]] += sums
    return peers

  def rescore(self, rows: Sequence[rows_lib.Row]) -> list[rows_lib.Row]:
    """The rows with the learner's log-probabilities as denominators."""
    return rows_lib.replaced(rows, old_logp=self.score(rows))


def moments(rewards_PG: np.ndarray) -> np.ndarray:
  """Count, sum and sum of squares of the rewards of every group, f64 [P, 3]."""
  count_P = np.full(len(rewards_PG), rewards_PG.shape[1], np.float64)
  return np.stack([count_P, rewards_PG.sum(1), (rewards_PG**2).sum(1)], 1)


def _responses(record) -> list[tuple[bytes, records.Finish, int]]:
  """The bytes, the finish and the number of tokens of a record's responses."""
  if isinstance(record, records.Rollout):
    return [(record.payload, record.finish, len(record.ids))]
  # An outcome does not say how many tokens its texts have.
  texts = record.texts if isinstance(record, records.Outcome) else ()
  return [(text, 'stop', 0) for text in texts]


def _recomputed(record, judged) -> records.Record:
  header = record.header
  group = judged.get((header.policy, header.round, header.prompt))
  if not group or not isinstance(record, records.GroupStats):
    return record
  rewards, successes = zip(*group, strict=True)
  count, reward_sum, reward_square_sum = moments(np.array([rewards]))[0]
  return msgspec.structs.replace(
    record,
    count=int(count),
    reward_sum=float(reward_sum),
    reward_square_sum=float(reward_square_sum),
    successes=sum(successes),
  )


def _source(record):
  header = record.header
  return header.policy, header.prompt, records.kind(record)
