"""The work dir of a run: its files, and the schema of what is in them.

  config.json        `Setup`: the config, and digests of what the run read
  plan.json          `Plan`: which policy has which devices
  metrics.jsonl      `RoundMetrics`: a line for each round and policy
  evaluations.jsonl  `Evaluation`: a line for each evaluation and policy
  summary.json       `Summary`, once the run is finished
  lock               held by the process that writes here
  checkpoints/ tensorboard/ see/ (journals) cache/ report.html

Runs write these structs, and analysis reads them; both import this module. A
field that is None or empty is not written: it is not known, or does not apply.
"""

from collections.abc import Mapping
import fcntl
import json
import os
import socket
from typing import Annotated, Generic, TypeVar

from absl import logging
import ml_collections
import msgspec

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax.thl import transfer

SETUP, PLAN, SUMMARY = 'config.json', 'plan.json', 'summary.json'
ROUNDS, EVALUATIONS = 'metrics.jsonl', 'evaluations.jsonl'
CHECKPOINTS, TENSORBOARD, JOURNALS = 'checkpoints', 'tensorboard', 'see'
RECEIVED = 'see/_received'  # No policy has such a name.
CACHE, REPORT, LOCK = 'cache', 'report.html', 'lock'
TOKENIZERS = 'cache/tokenizers'
FORMAT = 2  # Of config.json; a run of another format is not resumed.
OVERALL = 'all'  # Names the accuracy over all families.
_LOCKS = {}  # Files that this process has locked, by path, until it ends.

Number = float | None
Count = Annotated[int, msgspec.Meta(ge=0)]
# Counts of records by 'sender->receiver' (in `RoundMetrics`, by sender), kind and
# fate.
Pairs = dict[str, dict[str, dict[str, int]]]
Residuals = dict[str, transfer.Residual]
_Accuracy = TypeVar('_Accuracy')  # A number, or numbers by family.


class _Struct(msgspec.Struct, frozen=True, omit_defaults=True):
  pass


class Setup(_Struct, omit_defaults=False):
  """What a run was started with."""

  format: int = FORMAT  # Of the version that wrote it.
  config: dict[str, object] = {}  # The flat config.
  inputs: str = ''  # A digest of prompts, tokenizers and templates.
  # Each policy's tokenizer folder, relative if within the work dir.
  tokenizers: dict[str, str] = {}
  # Fingerprints of the pretrained weights of policies that have a path.
  weights: dict[str, str] = {}


class PolicyPlan(_Struct):
  """What a policy is, and its devices.

  `memory_bytes` is the planner's estimate for each device and `seconds` for a
  round, `load` its time relative to that of the slowest policy, and `reason`
  why it has so many devices, and what bounds its round.
  """

  model: str = ''
  tokenizer: str = ''
  parameters: Count | None = None
  adapters: Count = 0
  vocabulary: Count | None = None
  devices: list[Count] = []
  mesh: dict[str, Count] = {}
  decode_mesh: dict[str, Count] = {}
  micro_rows: Count | None = None
  sample_batch: Count | None = None
  remat: str = ''
  memory_bytes: Number = None
  seconds: Number = None
  load: Number = None
  reason: str = ''

  @property
  def span(self) -> str:
    """The numbers of the devices, such as '0-3, 8-11'."""
    starts = sorted(n for n in self.devices if n - 1 not in self.devices)
    ends = sorted(n for n in self.devices if n + 1 not in self.devices)
    return ', '.join(
      f'{first}-{last}' if first < last else f'{first}'
      for first, last in zip(starts, ends, strict=True)
    )


class Plan(_Struct):
  """The policies of this process and, by place, those that are elsewhere."""

  devices: str = ''
  policies: dict[str, PolicyPlan] = {}
  elsewhere: dict[str, str] = {}
  prompts_skipped: Count = 0
  answers_faulty: Count = 0  # Gold answers that could never be rewarded.


class Ratios(_Struct):
  """Means over the tokens of one kind of rows, own or peers'.

  `log_ratio_counts` is the histogram of log importance ratios with the edges
  `config.LOG_RATIO_EDGES`.
  """

  loss: Number = None
  ratio: Number = None
  ratio_second_moment: Number = None
  ess_fraction: Number = None
  clip_fraction: Number = None
  truncated: Number = None
  max_ratio: Number = None
  kl: Number = None
  logp: Number = None
  log_ratio_counts: list[Count] = []

  def __post_init__(self):
    bins = len(config_lib.LOG_RATIO_EDGES) + 1
    if self.log_ratio_counts and len(self.log_ratio_counts) != bins:
      raise ValueError(f'{len(self.log_ratio_counts)} bins in place of {bins}')


class Timing(_Struct):
  """Seconds: of the round, in the exchange, and of the run so far."""

  seconds: Number = None
  tokens_per_second: Number = None
  exchange: Number = None
  waited: dict[str, float] = {}  # By peer.
  elapsed: Number = None
  phases: dict[str, float] = {}


class RoundMetrics(_Struct):
  """Metrics of one policy in one round.

  `rescue_rate` and `rescued_by` are shares of the prompts that a whole own group
  failed. The learner verified `peer_responses_judged` responses of peers;
  `refused` counts false verdicts among these alone, and of all others the peers'
  claims hold. `slots` has the shares of slots with a token: in 'sampling', and
  of 'own' and 'peer' packed rows. `exchange`, `residuals` and `rescued_by` are by
  sender. `method` has the metrics of one method only, such as GRAFT's median
  compatibility.
  """

  round: Count
  policy: str
  reward: Number = None
  accuracy: Number = None
  response_length: Number = None
  stopped: Number = None
  entropy: Number = None
  all_fail_groups: Number = None
  zero_signal_groups: Number = None
  rollouts: Count | None = None
  rows_with_signal: Number = None
  grad_norm: Number = None
  slots: dict[str, float] = {}
  own: Ratios = Ratios()
  peer: Ratios = Ratios()
  mismatch: Ratios = Ratios()
  peer_records: Count | None = None
  peer_records_unused: Count | None = None
  peer_responses_judged: Count | None = None
  peer_rows: Count | None = None
  peer_rows_refused: Count | None = None
  rescue_rate: Number = None
  rescued_by: dict[str, float] = {}
  method: dict[str, float | dict[str, float]] = {}
  refused: dict[str, Count] = {}
  exchange: Pairs = {}
  residuals: Residuals = {}
  verified: dict[str, Count] = {}
  heldout_accuracy: dict[str, float] = {}
  timing: Timing = Timing()


class Completion(_Struct):
  """A completion of a held-out prompt, and its verdict.

  `logp` is the mean log-probability of its tokens (nats).
  """

  prompt: str
  completion: str
  answer: str = ''
  reward: Number = None
  verdict: str = ''
  finish: str = ''
  tokens: Count | None = None
  logp: Number = None


class Evaluation(_Struct):
  """How a policy does on held-out prompts."""

  rounds: Count  # Done before it.
  policy: str
  # The share of right answers, over several samples a prompt; under 'all', and
  # under each family's name.
  accuracy: dict[str, float]
  # Its standard error over prompts; None if there is one prompt only.
  error: dict[str, Number] = {}
  # Completions with the highest rewards, of the prompts with the lowest accuracy
  # first; every family gets one before any gets a second.
  best: list[Completion] = []
  # Those with the lowest rewards, the most likely ones first; families take turns.
  worst: list[Completion] = []

  @property
  def overall(self) -> tuple[Number, Number]:
    """Accuracy over all prompts, and its error."""
    return self.accuracy.get(OVERALL), self.error.get(OVERALL)


class BeforeAfter(_Struct, Generic[_Accuracy]):
  """A policy's accuracy before the first round and after the last."""

  before: _Accuracy
  after: _Accuracy


class PolicySummary(_Struct):
  heldout_accuracy: BeforeAfter[float]
  heldout_accuracy_by_family: BeforeAfter[dict[str, float]]


class RunTiming(_Struct, omit_defaults=False):
  """Seconds: of the run, in the exchange, and waited, by 'sender->receiver'."""

  seconds: Number = None
  exchange: Number = None
  waited: dict[str, float] = {}


class Summary(_Struct, omit_defaults=False):
  """What came of a run; pairs are 'sender->receiver'.

  `exchange` counts what was offered to the policies of this process, `sent`
  what they sent to other processes.
  """

  rounds: Count
  method: str = ''
  seed: int | None = None
  timing: RunTiming = RunTiming()
  policies: dict[str, PolicySummary] = {}
  exchange: Pairs = {}
  sent: Pairs = {}
  refusals: dict[str, dict[str, Count]] = {}
  messages_refused: dict[str, Count] = {}
  residuals: Residuals = {}
  prompts_skipped: Count = 0


def write(folder: str, name: str, value: msgspec.Struct) -> None:
  """Writes a JSON file of a work dir; a kill leaves the old or the new one."""
  text = json.dumps(msgspec.to_builtins(value, str_keys=True), indent=1)
  files.write(os.path.join(folder, name), text)


def setup(folder: str) -> Setup | None:
  """Reads the `Setup` of a work dir; None if there is none.

  Raises InputError if it is damaged, or of another format.
  """
  path = os.path.join(folder, SETUP)
  if not os.path.exists(path):
    return None
  with open(path, 'rb') as f:
    data = f.read()
  try:
    format = msgspec.json.decode(data, type=dict).get('format')
    checks.require(
      format == FORMAT,
      f'{folder} was written by another version of mrl_jax, which this one can '
      'neither resume nor export; give a fresh --workdir',
    )
    return msgspec.json.decode(data, type=Setup)
  except msgspec.DecodeError as error:
    raise checks.InputError(
      f'{path} is damaged: {error}; restore it, or give a fresh --workdir'
    ) from error


def cache_dir(config: ml_collections.ConfigDict, folder: str) -> str:
  """The folder of what several runs may use."""
  return config.cache_dir or os.path.join(folder, CACHE)


def prepare(folder: str, config: ml_collections.ConfigDict) -> None:
  """Makes a work dir, or checks that the one that exists has this config.

  It stays locked until this process ends. Raises InputError if another process
  has locked it, if it belongs to another config, or is not a work dir.
  """
  began = setup(folder)
  if began is not None:
    theirs, mine = map(
      config_lib.without_places, (began.config, config_lib.flat(config))
    )
    differ = [
      f'{key}: {theirs.get(key)!r} there, {mine.get(key)!r} now'
      for key in sorted({*theirs, *mine})
      if theirs.get(key) != mine.get(key)
    ]
    checks.require(
      not differ,
      f'{folder} was written by another config; give a fresh --workdir, or '
      'the same flags to resume. They differ in\n  ' + '\n  '.join(differ),
    )
    _lock(folder)
    return
  checks.require(
    not os.path.isfile(folder), f'--workdir={folder} is a file, not a folder'
  )
  os.makedirs(folder, exist_ok=True)
  begun = {CACHE, LOCK, SETUP + files.ASIDE}  # What a kill may leave.
  others = sorted({*os.listdir(folder)} - begun)
  checks.require(
    not others,
    f'{folder} is not a work dir: it has no {SETUP}, and holds '
    f'{", ".join(others[:3])}. Give a fresh --workdir',
  )
  _lock(folder)


def _lock(folder):
  """Locks a work dir for this process; the system unlocks it at its end."""
  path = os.path.realpath(os.path.join(folder, LOCK))
  if path in _LOCKS:
    return
  lock = open(path, 'a+', encoding='utf-8')  # noqa: SIM115
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    lock.seek(0)
    holder = lock.read().strip() or 'another process'
    lock.close()
    raise checks.InputError(
      f"{folder} is in use by {holder}. Two runs would destroy each other's "
      'files: stop that one to resume it here, or give a fresh --workdir'
    ) from error
  except OSError as error:
    logging.warning('%s cannot be locked, start no other run in it: %s',
                    folder, error)  # fmt: skip
  lock.truncate(0)
  lock.write(f'process {os.getpid()} on {socket.gethostname()}\n')
  lock.flush()
  _LOCKS[path] = lock


def claim(
  folder: str,
  config: ml_collections.ConfigDict,
  *,
  inputs: str,
  tokenizers: Mapping[str, str],
  weights: Mapping[str, str],
) -> None:
  """Writes the `Setup` of a run; if it is resumed, requires the same inputs.

  Raises InputError if prompts, tokenizers or weights have changed.
  """
  began = setup(folder)
  if began is None:
    mine = Setup(
      config=config_lib.flat(config),
      inputs=inputs,
      tokenizers={n: _within(p, folder) for n, p in tokenizers.items()},
      weights=dict(weights),
    )
    write(folder, SETUP, mine)
    return
  checks.require(
    (began.inputs, began.weights) == (inputs, weights),
    f'{folder} began with other prompts, tokenizers or weights than its config '
    'leads to now; put the files back to resume, or give a fresh --workdir',
  )


def _within(path, folder) -> str:
  """A path relative to a folder that it is in; otherwise absolute."""
  if not os.path.isdir(path):
    return path  # A hub name.
  relative = os.path.relpath(path, folder)
  outside = relative.partition(os.sep)[0] == os.pardir
  return os.path.abspath(path) if outside else relative
