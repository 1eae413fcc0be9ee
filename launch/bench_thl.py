"""The benchmark of the Tokenizer Heterogeneity Layer; see `launch/bench.py`."""

from collections.abc import Callable
import os
import pathlib
import random
import statistics
import time

from absl import flags
import numpy as np
from rich import console as console_lib
from rich import table as table_lib

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.data import arithmetic
from mrl_jax.data import vocabulary
from mrl_jax.thl import align
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer

_REPEATS = flags.DEFINE_integer('repeats', 50, 'thl: of each timing.', 1)
_TOKENS = flags.DEFINE_integer('tokens', 8000, 'thl: of the sender.', 1)
_SENDER = flags.DEFINE_string(
  'sender', None, 'thl: a Hugging Face folder; by default one is trained.'
)
_RECEIVER = flags.DEFINE_string(
  'receiver', None, 'thl: a Hugging Face folder; by default one is trained.'
)
_TEXT = flags.DEFINE_string(
  'text', None, 'thl: a file to take the text from; by default, arithmetic.'
)
_VOCAB_SIZE = 384


def run(console: console_lib.Console) -> dict:
  """The Tokenizer Heterogeneity Layer, and the alignment of TRL's GOLD.

  A rollout of --tokens tokens, cut off by its length, is carried into the
  receiver's vocabulary. Timed are

  - 'THL align': `align.chunks`, from the byte lengths of the tokens of both
    sides to the chunk of each token.
  - 'THL align + carry': that, then `align.carry_extensive` of the sender's
    log-probabilities and `align.carry_mask`, as `transfer.transfer` calls them.
    The goal is 1 ms.
  - 'THL transfer': `transfer.transfer`, with tokenising, checks and counts.
  - 'GOLD align': `ULDLoss._align_by_byte_offsets` of TRL's Generalised
    On-policy Logit Distillation, from tensors of the byte offsets of the same
    tokens to groups of tokens, with the slice and the `tolist` of each side
    that `ULDLoss` does for it. This is the work of 'THL align': GOLD carries
    nothing here, and what its trainer does to get the offsets is not timed.

  Ratios are those of the best times.
  """
  text = _text()
  sender = _tokenizer(_SENDER.value, 'byte_level', text)
  receiver = _tokenizer(_RECEIVER.value, 'sentencepiece', text)
  rollout = _rollout(sender, text)
  sender_lengths = rollout.byte_lengths
  residual = transfer.Residual()
  limits = transfer.Limits(max_tokens=len(rollout.payload))
  carried = transfer.transfer(rollout, receiver, limits, residual)
  checks.require(
    carried is not None, f'the text was refused: {", ".join(residual.refused)}'
  )
  lengths = receiver.byte_length_V[carried.ids]
  timed = {
    'THL align': lambda: align.chunks(sender_lengths, lengths),
    'THL align + carry': lambda: (
      align.chunks(sender_lengths, lengths),
      align.carry_extensive(rollout.policy_logp, sender_lengths, lengths),
      align.carry_mask(rollout.mask, sender_lengths, lengths),
    ),
    'THL transfer': lambda: transfer.transfer(
      rollout, receiver, limits, residual
    ),
  }
  gold = _gold(console, sender_lengths, lengths)
  chunks = int(carried.chunk[-1]) + 1
  if gold:
    groups = len(gold()[0])
    checks.require(
      groups == chunks, f'GOLD finds {groups} groups and THL {chunks} chunks'
    )
    timed['GOLD align'] = gold
  best, median = _milliseconds(timed)
  ratio = {n: best['GOLD align'] / best[n] for n in timed if gold}
  table = table_lib.Table('', 'best ms', 'median ms', 'GOLD takes')
  for name in timed:
    times = f'{ratio[name]:.1f} x' if gold else ''
    table.add_row(name, f'{best[name]:.3f}', f'{median[name]:.3f}', times)
  console.out(
    f'{len(rollout.ids):,} -> {len(lengths):,} tokens, '
    f'{len(rollout.payload):,} bytes, {chunks:,} chunks'
  )
  console.print(table)
  return {
    'sender_tokens': len(rollout.ids),
    'receiver_tokens': len(lengths),
    'bytes': len(rollout.payload),
    'chunks': chunks,
    'best_ms': best,
    'median_ms': median,
    'gold_ratio': ratio,
  }


def _text() -> str:
  if _TEXT.value:
    return pathlib.Path(_TEXT.value).read_text(encoding='utf-8')
  rng = random.Random(0)
  lines = [
    f'{arithmetic.question(surface, operation, numbers, rng)}\n'
    f'{arithmetic.solution(operation, numbers)}\n'
    for surface in arithmetic.SURFACES
    for operation in arithmetic.OPERATIONS
    for numbers in arithmetic.operands(operation, 3)
  ]
  rng.shuffle(lines)
  return ''.join(lines)


def _tokenizer(folder, kind, text) -> byte_tokenizer.ByteTokenizer:
  """The one in `folder`, or without a folder one trained on the text."""
  if folder:
    return byte_tokenizer.load(folder)
  backend = vocabulary.KINDS[kind](text.splitlines(keepends=True), _VOCAB_SIZE)
  eos_id = backend.token_to_id('<eos>')
  return byte_tokenizer.ByteTokenizer(backend, eos_id=eos_id)


def _rollout(sender, text) -> records.Rollout:
  """The first tokens of the text, with random log-probabilities."""
  count = _TOKENS.value
  ids = sender.encode(text.encode())[:count]
  checks.require(
    len(ids) == count, f'--tokens={count}, but the text has {len(ids)}'
  )
  logp = -np.random.default_rng(0).random(count, np.float32)
  return records.Rollout(
    header=records.Header(
      run='', round=0, policy='', prompt='', sample=0, version=0, created=0.0,
      tokenizer=sender.fingerprint,
    ),
    payload=sender.decode(ids),
    finish='length',
    ids=ids,
    byte_lengths=sender.byte_length_V[ids],
    sampling_logp=logp,
    policy_logp=logp,
    mask=np.ones(count, bool),
    temperature=1.0,
    reward=0.0,
    verdict='wrong',
  )  # fmt: skip


def _gold(console, sender_lengths, lengths) -> Callable[[], tuple] | None:
  """GOLD's alignment of these tokens, if TRL is installed."""
  os.environ.setdefault('TRL_EXPERIMENTAL_SILENCE', '1')
  try:
    import torch
    from trl.experimental.gold import gold_trainer
  except ModuleNotFoundError as error:
    console.out(f"{error}; to compare with GOLD: pip install -e '.[bench]'")
    return None
  ends = np.cumsum(sender_lengths), np.cumsum(lengths)
  student = torch.tensor(np.stack([ends[0] - sender_lengths, ends[0]], 1)[None])
  teacher = torch.tensor(np.stack([ends[1] - lengths, ends[1]], 1)[None])
  return lambda: gold_trainer.ULDLoss._align_by_byte_offsets(
    student[0, 0 : len(sender_lengths)].tolist(),
    teacher[0, 0 : len(lengths)].tolist(),
  )


def _milliseconds(timed: dict[str, Callable]) -> tuple[dict, dict]:
  """The best and the median of each; they take turns.

  Garbage is collected meanwhile, as it is in training.
  """
  taken = {name: [] for name in timed}
  for _ in range(_REPEATS.value):
    for name, function in timed.items():
      start = time.perf_counter()
      function()
      taken[name].append(1e3 * (time.perf_counter() - start))
  best = {name: min(times) for name, times in taken.items()}
  return best, {name: statistics.median(t) for name, t in taken.items()}
