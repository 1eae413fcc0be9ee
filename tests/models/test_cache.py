from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import numpy as np

from mrl_jax.architecture import Layer
from mrl_jax.models import cache
from tests import examples

write = jax.jit(cache.write)
resized = jax.jit(cache.resized, static_argnums=2)


def keys(*numbers):
  """Keys [1, 1, S, 1] that say which token they are of."""
  return np.array(numbers, np.float32).reshape(1, 1, -1, 1)


def numbers(x_BKSE):
  return np.ravel(x_BKSE).astype(int).tolist()


def layer(prompt, ring):
  return cache.Layer(prompt, -prompt, ring, -ring)


def seen(layer, window, step, ages, prompts):
  """Which entries each row attends to."""
  now = cache.Now(np.int32(step), np.array(ages), np.array(prompts))
  return cache.visible(layer, window, now)[:, 0].astype(int).tolist()


def test_a_layer_with_a_window_keeps_no_more_than_its_window():
  model = examples.model(layers=(Layer(window=4), Layer()))
  windowed, whole = cache.empty(model, 3, 10, 2)
  assert [x.shape[2] for x in windowed] == [4, 4, 2, 2]
  assert [x.shape[2] for x in whole] == [10, 10, 2, 2]


def test_the_last_tokens_of_prompts_are_kept_on_the_right():
  assert numbers(cache.of_prompts(keys(1, 2, 3), 2)) == [2, 3]
  assert numbers(cache.of_prompts(keys(1, 2, 3), 5)) == [0, 0, 1, 2, 3]


def test_entries_worked_by_hand():
  rings = layer(keys(5, 6), keys(0, 1, 2))
  for step in (3, 4):
    rings = write(rings, keys(step), keys(-step), step)
  assert numbers(rings.k_BKRE) == [3, 4, 2]
  assert numbers(rings.v_BKRE) == [-3, -4, -2]
  # Rows with one token of a prompt and no sample yet, and with two of both.
  assert seen(rings, 0, 4, [0, 2], [1, 2]) == [
    [0, 1, 0, 1, 0],
    [1, 1, 1, 1, 1],
  ]
  # With a window of 3, the second row has lost its prompt but for nothing, and
  # the first still has it.
  assert seen(rings, 3, 4, [0, 2], [1, 2])[0] == [0, 1, 0, 1, 0]
  assert seen(rings, 3, 4, [0, 2], [1, 2])[1] == [0, 0, 1, 1, 1]
  assert seen(rings, 3, 4, [1, 1], [2, 2])[0] == [0, 1, 1, 1, 0]


@settings(max_examples=50, deadline=None)
@given(
  st.sampled_from([1, 3, 6]),
  st.integers(1, 12),
  st.integers(0, 9),
  st.integers(0, 9),
)
def test_a_row_sees_its_own_tokens_and_no_others(ring, before, age, prompt):
  age, prompt = min(age, ring - 1), min(prompt, 4)
  rings = layer(keys(*range(-4, 0)), keys(*[99] * ring))
  for step in range(before + age + 1):
    rings = write(rings, keys(step), keys(step), np.int32(step))
  every = numbers(rings.k_BKCE) + numbers(rings.k_BKRE)
  (mask,) = seen(rings, 0, before + age, [age], [prompt])
  found = [number for number, there in zip(every, mask, strict=True) if there]
  expected = [*range(-prompt, 0), *range(before, before + age + 1)]
  assert sorted(found) == expected


@settings(max_examples=50, deadline=None)
@given(
  st.sampled_from([1, 3, 6]), st.sampled_from([1, 2, 6]), st.integers(0, 12)
)
def test_a_ring_of_another_size_has_the_last_tokens(size, other, steps):
  ring = layer(keys(0), keys(*[99] * size))
  for step in range(steps):
    ring = write(ring, keys(step), keys(step), np.int32(step))
  found = numbers(resized(ring.k_BKRE, np.int32(steps), other))
  for step in range(max(0, steps - min(size, other)), steps):
    assert found[step % other] == step
