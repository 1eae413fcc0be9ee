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
        finish='stop' if c.stopped else 'length',
        ids=c.ids,
        byte_lengths=tokenizer.byte_length_V[c.ids],
        sampling_logp=c.sampling_logp,
        policy_logp=c.policy_logp,
        mask=np.full(len(c.ids), c.stopped or not mask_truncated),
        temperature=density.temperature,
        top_p=density.top_p,
        reward=0.0,  # Until it is judged.
        verdict='unparsable',
      )
    )
  return rollouts
