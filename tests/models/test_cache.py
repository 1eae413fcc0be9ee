from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np

from mrl_jax.architecture import Layer
from mrl_jax.models import cache
from tests import examples

write = jax.jit(cache.write)


def slots(*numbers):
  """Keys [1, 1, S, 1] that say which slot they are of."""
  return np.array(numbers, np.float32).reshape(1, 1, -1, 1)


def entries(x_BKSE):
  return np.ravel(x_BKSE).astype(int).tolist()


def test_a_layer_with_a_window_has_no_more_entries_than_its_window():
  model = examples.model(layers=(Layer(window=4), Layer()))
  assert [cache.entries(model, i, 10) for i in (0, 1)] == [4, 10]
  assert [cache.entries(model, i, 3) for i in (0, 1)] == [3, 3]


def test_entries_worked_by_hand():
  # Slots 1 to 4 of five are kept; slot s is in entry s % 4.
  kept_BKSE = cache.of_prompts(slots(0, 1, 2, 3, 4), 4)
  assert entries(kept_BKSE) == [4, 1, 2, 3]
  layer = cache.write((kept_BKSE, kept_BKSE), slots(5), -slots(5), 5)
  assert [entries(x) for x in layer] == [[4, 5, 2, 3], [4, -5, 2, 3]]
  # The tokens of the second row begin in slot 4.
  np.testing.assert_array_equal(
    cache.visible(layer, np.array([0, 4]), 5)[:, 0],
    [[1, 1, 1, 1], [1, 1, 0, 0]],
  )


def test_entries_that_are_not_written_are_not_visible():
  kept_BKSE = cache.of_prompts(slots(0, 1), 4)
  assert entries(kept_BKSE) == [0, 1, 0, 0]
  mask_B1S = cache.visible((kept_BKSE, kept_BKSE), np.array([1]), 1)
  assert mask_B1S[0, 0].tolist() == [False, True, False, False]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_a_prompt_and_tokens_are_kept_as_if_written_one_by_one(
  size, context, more
):
  numbers = np.arange(1, context + 1 + more)
  kept = (cache.of_prompts(slots(*numbers[:context]), size),) * 2
  one_by_one = (np.zeros((1, 1, size, 1), np.float32),) * 2
  for slot, number in enumerate(numbers):
    token = slots(number)
    one_by_one = write(one_by_one, token, token, slot)
    if slot >= context:
      kept = write(kept, token, token, slot)
  assert entries(kept[0]) == entries(one_by_one[0])
  # The last tokens are visible, and nothing else.
  mask_B1S = cache.visible(kept, np.zeros(1, int), len(numbers) - 1)
  seen = sorted(np.array(entries(kept[0]))[np.asarray(mask_B1S[0, 0])])
  assert seen == numbers[-size:].tolist()


def test_a_cache_grows_where_slots_are_missing():
  model = examples.model(layers=(Layer(window=3), Layer()))
  before = [(slots(1, 2, 3),) * 2, (slots(1, 2, 3, 4),) * 2]
  after = cache.grow(before, model, 6)
  assert entries(after[0][0]) == [1, 2, 3]
  assert entries(after[1][1]) == [1, 2, 3, 4, 0, 0]
