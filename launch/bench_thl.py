"""The benchmark of the Tokenizer Heterogeneity Layer; see `launch/bench.py`."""

from collections.abc import Callable
import os
import pathlib
import random
import statistics

from absl import flags
import bench_tools
import numpy as np

from mrl_jax import checks
from mrl_jax import records
from mrl_jax.data import arithmetic
from mrl_jax.data import vocabulary
from mrl_jax.thl import align
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer

_REPEATS = flags.DEFINE_integer('repeats', 50, 'thl: repetitions.', 1)
_TOKENS = flags.DEFINE_integer(
  'tokens', 8000, 'thl: sender tokens of the text.', 1
)
SENDER = flags.DEFINE_string(
  'sender', None, 'thl: a Hugging Face folder; by default one is trained.'
)
RECEIVER = flags.DEFINE_string(
  'receiver', None, 'thl: a Hugging Face folder; by default one is trained.'
)
_TEXT = flags.DEFINE_string(
  'text', None, 'thl: a file with the text; by default, arithmetic.'
)
_VOCAB_SIZE = 384


def run() -> bench_tools.Result:
  """Times the transfer of a rollout, and the alignment of TRL's GOLD.

  A rollout of --tokens tokens, cut off by its length, is transferred to the
  receiver's vocabulary. Timed are

  - 'THL align': `align.chunks`, from the byte lengths of the tokens of both
    sides to the chunk of each token.
  - 'THL align + project': the same, and the projection of log-probabilities and
    mask, as in `transfer.transfer`. The goal is 1 ms.
  - 'THL transfer': `transfer.transfer`, with encoding, checks and counts.
  - 'GOLD align': `ULDLoss._align_by_byte_offsets` of TRL's Generalised
    On-policy Logit Distillation, from tensors of the byte offsets of the same
    tokens to groups of tokens, with the slice and the `tolist` of each side that
    `ULDLoss` does for it. It does the work of 'THL align'; how GOLD's trainer
    computes the offsets is not timed.

  Ratios are those of the best times; the functions alternate.
  """
  written = text()
  sender = tokenizer(SENDER.value, 'byte_level', written)
  receiver = tokenizer(RECEIVER.value, 'sentencepiece', written)
  rollout = _rollout(sender, written)
  residual = transfer.Residual()
  limits = transfer.Limits(max_tokens=len(rollout.payload))
  moved = transfer.transfer(rollout, receiver, limits, residual)
  checks.require(
    moved is not None, f'the text was refused: {", ".join(residual.refused)}'
  )
  lengths = rollout.byte_lengths, receiver.byte_length_V[moved.ids]
  timed = {
    'THL align': lambda: align.chunks(*lengths),
    'THL align + project': lambda: (
      align.chunks(*lengths),
      align.project_extensive(rollout.sampling_logp, *lengths),
      align.project_mask(rollout.mask, *lengths),
    ),
    'THL transfer': lambda: transfer.transfer(
      rollout, receiver, limits, residual
    ),
  }
  gold, chunks = _gold(*lengths), int(moved.chunk[-1]) + 1
  if gold:
    groups = len(gold()[0])
    checks.require(
      groups == chunks, f'GOLD finds {groups} groups and THL {chunks} chunks'
    )
    timed['GOLD align'] = gold
  taken = {name: [] for name in timed}
  for _ in range(_REPEATS.value):  # Garbage collection stays on.
    for name, function in timed.items():
      taken[name].append(1e3 * bench_tools.seconds(function))
  rows = {
    name: {'best ms': min(times), 'median ms': statistics.median(times)}
    for name, times in taken.items()
  }
  if gold:
    for row in rows.values():
      row['GOLD takes, x'] = rows['GOLD align']['best ms'] / row['best ms']
  about = {
    'sender tokens': len(rollout.ids),
    'receiver tokens': len(moved.ids),
    'bytes': len(rollout.payload),
    'chunks': chunks,
  }
  return bench_tools.Result(about, rows)


def text() -> str:
  """What rollouts say: the contents of --text."""
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


def tokenizer(folder, kind, text) -> byte_tokenizer.ByteTokenizer:
  """The tokenizer in `folder` or, without a folder, one trained on the text."""
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
  payload, header = sender.decode(ids), {'tokenizer': sender.fingerprint}
  return bench_tools.rollout(ids, sender.byte_length_V[ids], payload, **header)


def _gold(sender_lengths, lengths) -> Callable[[], tuple] | None:
  """GOLD's alignment of these tokens; None if TRL is not installed."""
  os.environ.setdefault('TRL_EXPERIMENTAL_SILENCE', '1')
  try:
    import torch
    from trl.experimental.gold import gold_trainer
  except ModuleNotFoundError as error:
    print(f"{error}; to compare with GOLD: pip install -e '.[bench]'")
    return None

  def offsets(lengths):
    ends = np.cumsum(lengths)
    return torch.tensor(np.stack([ends - lengths, ends], 1)[None])

  student, teacher = offsets(sender_lengths), offsets(lengths)
  return lambda: gold_trainer.ULDLoss._align_by_byte_offsets(
    student[0, 0 : len(sender_lengths)].tolist(),
    teacher[0, 0 : len(lengths)].tolist(),
  )
