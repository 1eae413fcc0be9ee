"""The order in which prompts are read, the same for every policy."""

import collections
from collections.abc import Sequence

import grain
import msgspec

from mrl_jax import checks
from mrl_jax import records


def batches(
  prompts: Sequence[records.Prompt], size: int, seed: int
) -> grain.DatasetIterator:
  """Batches of `size` prompts without end, as lists.

  Every family has an equal share of a batch and is shuffled anew in each epoch.
  The iterator's `get_state` and `set_state` are the data cursor.
  """
  checks.require(
    size <= len(prompts),
    f'a round takes {size} prompts and there are only {len(prompts)}',
  )
  families = collections.defaultdict(list)
  for prompt in prompts:
    families[prompt.family].append(prompt)
  dataset = grain.MapDataset.mix(
    [
      grain.MapDataset.source(family).seed(seed + i).shuffle().repeat()
      for i, family in enumerate(families.values())
    ]
  ).batch(size, batch_fn=_with_unique_ids)
  return iter(
    dataset.to_iter_dataset(
      grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
  )


def _with_unique_ids(batch: Sequence[records.Prompt]) -> list[records.Prompt]:
  """Renames a prompt whose id is in the batch already, where epochs meet."""
  seen = collections.Counter()
  unique = []
  for prompt in batch:
    seen[prompt.id] += 1
    if seen[prompt.id] > 1:
      again = f'{prompt.id}#{seen[prompt.id]}'
      prompt = msgspec.structs.replace(prompt, id=again)
    unique.append(prompt)
  return unique
