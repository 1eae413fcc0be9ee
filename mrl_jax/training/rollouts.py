"""Makes judged rollouts of what a sampler gives."""

from collections.abc import Sequence
import time

import msgspec
import numpy as np

from mrl_jax import records
from mrl_jax.sampling import drawing
from mrl_jax.sampling import sampler
from mrl_jax.thl import byte_tokenizer


def of_completions(
  completions: Sequence[sampler.Completion],
  header: records.Header,
  prompts: Sequence[records.Prompt],
  tokenizer: byte_tokenizer.ByteTokenizer,
  density: drawing.Density,
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
        finish=c.finish,
        ids=c.ids,
        byte_lengths=tokenizer.byte_length_V[c.ids],
        sampling_logp=c.sampling_logp,
        policy_logp=c.policy_logp,
        mask=np.full(
          len(c.ids), c.finish in records.ENDED or not mask_truncated
        ),
        temperature=density.temperature,
        top_p=density.top_p,
        reward=0.0,  # Until it is judged.
        verdict='unparsable',
      )
    )
  return rollouts


def ends(
  tokenizer: byte_tokenizer.ByteTokenizer, strings: Sequence[str]
) -> sampler.Ends | None:
  """Finds the token that completes the first of these strings in a completion.

  It searches the bytes, so that a string may lie across tokens, and tokens may
  be parts of characters.
  """
  if not strings:
    return None
  wanted, lengths_V = [s.encode() for s in strings], tokenizer.byte_length_V
  longest = max(map(len, wanted))

  def end(ids: np.ndarray, new: int) -> int | None:
    # A string that ends in new tokens begins at most longest - 1 bytes before.
    first, needed = len(ids) - new, longest - 1
    while first and needed > 0:
      first -= 1
      needed -= lengths_V[ids[first]]
    text = tokenizer.decode(ids[first:])
    found = [at + len(s) for s in wanted if (at := text.find(s)) >= 0]
    if not found:
      return None
    end_T = np.cumsum(lengths_V[ids[first:]])
    return first + int(np.searchsorted(end_T, min(found))) + 1

  return end
