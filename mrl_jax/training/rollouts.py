"""Makes judged rollouts of what a sampler gives."""

from collections.abc import Callable, Sequence
import time

import msgspec
import numpy as np

from mrl_jax import records
from mrl_jax.sampling import sampler
from mrl_jax.thl import byte_tokenizer


def of_completions(
  completions: Sequence[sampler.Completion],
  header: records.Header,
  prompts: Sequence[records.Prompt],
  tokenizer: byte_tokenizer.ByteTokenizer,
  temperature: float,
  mask_truncated: bool,
) -> list[records.Rollout]:
  """Rollouts that are not judged yet, by prompt and sample.

  `header` has what they share. With `mask_truncated`, completions that were cut
  off are not trained on.
  """
  rollouts, now = [], time.time()
  for c in sorted(completions, key=lambda c: (c.prompt, c.sample)):
    rollouts.append(
      records.Rollout(
        header=msgspec.structs.replace(
          header, prompt=prompts[c.prompt].id, sample=c.sample, created=now
        ),
        payload=tokenizer.decode(c.ids),
        finish='stop' if c.stopped else 'length',
        ids=c.ids,
        byte_lengths=tokenizer.byte_length_V[c.ids],
        sampling_logp=c.sampling_logp,
        policy_logp=c.policy_logp,
        mask=np.full(len(c.ids), c.stopped or not mask_truncated),
        temperature=temperature,
        reward=0.0,  # Until it is judged.
        verdict='unparsable',
      )
    )
  return rollouts


def ends(
  tokenizer: byte_tokenizer.ByteTokenizer, strings: Sequence[str]
) -> Callable[[np.ndarray, int], int | None] | None:
  """Tells where a completion has one of these strings; see `sampler.Ends`.

  A completion ends with the token that completes the string.
  """
  if not strings:
    return None
  wanted = [string.encode() for string in strings]
  longest = max(map(len, wanted))

  def end(ids: np.ndarray, new: int) -> int | None:
    end_T = np.cumsum(tokenizer.byte_length_V[ids])  # In bytes.
    old = int(end_T[-new - 1]) if new < len(ids) else 0
    # A string may begin in tokens that are not new.
    first = int(np.searchsorted(end_T, max(0, old - longest + 1), 'right'))
    begin = int(end_T[first - 1]) if first else 0
    text = tokenizer.decode(ids[first:])
    found = [
      at + len(string) for string in wanted if (at := text.find(string)) >= 0
    ]
    if not found:
      return None
    return int(np.searchsorted(end_T, begin + min(found), 'left')) + 1

  return end
