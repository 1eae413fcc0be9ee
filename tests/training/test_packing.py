import hypothesis
from hypothesis import strategies
import jax
import numpy as np
import pytest

from mrl_jax.sharing import rows as rows_lib
from mrl_jax.training import packing
from tests import examples

PROMPTS = [np.array([7, 8, 9], np.int32), np.array([6], np.int32)]


def row(prompt, length, advantage=1.0):
  ids = np.arange(1, length + 1, dtype=np.int32)
  logp = -np.arange(1, length + 1, dtype=np.float32)
  mask = np.ones(len(ids), bool)
  return rows_lib.Row(prompt, ids, logp, advantage, ids - 1, mask)


def packer(**changes):
  train = {k: changes.pop(k) for k in [*changes] if k in examples.train()}
  return packing.Packer(
    context=4,
    lengths={'own': 5, 'peer': 6},
    train=examples.train(**{'row_multiple': 2, 'micro_rows': 4, **train}),
    **changes,
  )


def mini_batches(own=(), peer=(), order=(0, 1), prompts=PROMPTS, **changes):
  """The packed own and peer rows of each mini-batch."""
  batch = rows_lib.Batch(own=own, peer=peer, order=order)
  return packer(**changes).mini_batch_parts(prompts, batch)


@pytest.mark.parametrize(
  ('aggregation', 'expected'),
  [
    ('token_mean', [0.25, 0.25]),  # Four tokens.
    ('sequence_mean', [0.5, 1 / 6]),  # Rows of one and of three tokens.
    ('constant', [0.1, 0.1]),  # Two rows of at most five.
  ],
)
def test_averaging_weights_by_hand(aggregation, expected):
  (parts,) = mini_batches([row(0, 1), row(1, 3)], aggregation=aggregation)
  weight_BT = parts['own'].weight_BT[0]
  np.testing.assert_allclose(weight_BT[0], [expected[0], 0, 0, 0, 0])
  np.testing.assert_allclose(weight_BT[1], [expected[1]] * 3 + [0, 0])


def test_prompts_are_padded_left_and_responses_right():
  packed = packer().pack(
    PROMPTS, [(row(0, 2), 0.5), (row(1, 5, advantage=-0.5), 0.25)], 5
  )
  np.testing.assert_array_equal(
    packed.tokens_BS[0],
    [[0, 7, 8, 9, 1, 2, 0, 0, 0], [0, 0, 0, 6, 1, 2, 3, 4, 5]],
  )
  np.testing.assert_array_equal(
    packed.valid_BS[0].astype(int),
    [[0, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]],
  )
  np.testing.assert_array_equal(packed.old_logp_BT[0, 0], [-1, -2, 0, 0, 0])
  np.testing.assert_array_equal(packed.weight_BT[0, 0], [0.5, 0.5, 0, 0, 0])
  np.testing.assert_array_equal(packed.advantage_B1[0], [[1.0], [-0.5]])
  np.testing.assert_array_equal(packed.chunk_BT[0, 1], [0, 1, 2, 3, 4])


@pytest.mark.parametrize(
  ('rows', 'shape'), [(0, (1, 2)), (1, (1, 2)), (3, (1, 4)), (5, (2, 4))]
)
def test_row_counts_are_padded_to_few_shapes(rows, shape):
  packed = packer().pack(PROMPTS, [(row(0, 2), 1.0)] * rows, 5)
  assert packed.tokens_BS.shape == (*shape, 9)
  assert packed.advantage_B1.shape == (*shape, 1)
  assert (packed.weight_BT > 0).any(2).sum() == rows


@pytest.mark.parametrize(
  ('aggregation', 'weight'),
  [('token_mean', 1 / 10), ('sequence_mean', 1 / 6), ('constant', 1 / 15)],
)
def test_rows_without_advantage_are_left_out_but_counted_in_the_average(
  aggregation, weight
):
  rows = [row(0, 2), row(0, 3, advantage=0.0), row(1, 5, advantage=-1.0)]
  (parts,) = mini_batches(rows, aggregation=aggregation)
  assert set(parts) == {'own'}
  weights_BT = parts['own'].weight_BT[0]
  assert (weights_BT > 0).sum() == 7
  np.testing.assert_allclose(weights_BT.max(), weight)


def test_own_and_peer_rows_share_their_denominator():
  (parts,) = mini_batches([row(0, 2)], [row(1, 6)])
  assert parts['own'].weight_BT.shape[-1] == 5
  assert parts['peer'].weight_BT.shape[-1] == 6
  total = sum(part.weight_BT.sum() for part in parts.values())
  assert total == pytest.approx(1.0)


def test_a_batch_without_signal_is_still_an_update():
  (parts,) = mini_batches([row(0, 2, 0.0)], [row(0, 2, 0.0)])
  assert set(parts) == {'own'}
  assert not parts['own'].weight_BT.any()


def test_masked_tokens_are_neither_trained_on_nor_counted():
  half = row(0, 4)._replace(mask=np.array([True, False, True, False]))
  none = row(1, 3)._replace(mask=np.zeros(3, bool))
  (parts,) = mini_batches([half, none], [row(1, 2)])
  weight_BT = parts['own'].weight_BT[0]
  np.testing.assert_allclose(weight_BT[0], [0.25, 0, 0.25, 0, 0])
  np.testing.assert_array_equal(parts['own'].mask_BT[0], weight_BT > 0)
  assert not weight_BT[1].any()
  assert (parts['own'].tokens_BS[0, :, 4] > 0).sum() == 1
  np.testing.assert_allclose(parts['peer'].weight_BT[0, 0, :2], 0.25)


def test_all_rows_of_a_prompt_are_in_one_mini_batch():
  rows = [row(p, 2) for p in (0, 1, 0, 1)]
  first, second = mini_batches(rows, [row(1, 3)], mini_batches=2)
  assert set(first) == {'own'}
  assert set(second) == {'own', 'peer'}
  np.testing.assert_array_equal(first['own'].tokens_BS[0, :, 3], [9, 9])
  np.testing.assert_array_equal(second['own'].tokens_BS[0, :, 3], [6, 6])


def test_mini_batches_follow_the_order_of_the_batch():
  own, peer = [row(0, 2), row(2, 2)], [row(1, 3)]
  prompts = [*PROMPTS, np.array([5], np.int32)]
  first, second, third = mini_batches(
    own, peer, order=[0, 2, 1], prompts=prompts, mini_batches=3
  )
  assert first['own'].tokens_BS[0, 0, 3] == 9
  assert second['own'].tokens_BS[0, 0, 3] == 5
  assert not third['own'].weight_BT.any()
  assert third['peer'].tokens_BS[0, 0, 3] == 6
  for m, parts in enumerate((first, second, third)):
    for part in parts.values():
      assert (part.mini_batch_B1 == m).all()


@pytest.mark.parametrize(
  ('peer_average', 'own', 'peer'),
  [
    ('joint', 1 / 8, 1 / 8),  # Own and peer tokens together.
    ('prompts', 1 / 5, 1 / 6),  # A mean of 3 tokens, over two prompts.
    ('rows', 1 / 5, 1 / 3),  # Over one row.
  ],
)
def test_peer_rows_may_be_averaged_by_themselves(peer_average, own, peer):
  (parts,) = mini_batches(
    [row(0, 2), row(1, 3)], [row(1, 3)], peer_average=peer_average
  )
  np.testing.assert_allclose(parts['own'].weight_BT.max(), own)
  np.testing.assert_allclose(parts['peer'].weight_BT.max(), peer)


def test_the_weight_of_a_row_multiplies_the_averaging_weight_of_its_tokens():
  rows = [
    row(0, 2)._replace(weight=0.5),
    row(1, 2)._replace(weight=np.array([1.0, 0.25], np.float32)),
    row(1, 2)._replace(weight=0.0),
  ]
  (parts,) = mini_batches(rows)
  weight_BT = 6 * parts['own'].weight_BT[0]  # Of six tokens.
  np.testing.assert_allclose(weight_BT[0, :2], 0.5)
  np.testing.assert_allclose(weight_BT[1, :2], [1.0, 0.25])
  assert (weight_BT > 0).any(1).sum() == 2
  masked = row(0, 2)._replace(weight=np.array([1.0, 0.0], np.float32))
  (parts,) = mini_batches([masked])
  # The ratio of the whole response is still over both tokens.
  assert parts['own'].mask_BT[0, 0, :2].all()
  (parts,) = mini_batches(rows[:1], rows[2:])
  assert set(parts) == {'own'}  # As if there were no peers.


def test_with_keep_all_own_rows_without_advantage_are_packed_too():
  rows = [row(0, 2, 0.0), row(1, 2)]
  (parts,) = mini_batches(rows, [row(1, 2, 0.0)], keep_all=True)
  assert (parts['own'].weight_BT > 0).any(2).sum() == 2
  assert set(parts) == {'own'}


def test_reference_log_probabilities_are_packed_on_request():
  referenced = row(0, 2)._replace(
    reference_logp=np.array([-3.0, -4.0], np.float32)
  )
  packed = packer(reference=True).pack(PROMPTS, [(referenced, 1.0)], 5)
  np.testing.assert_array_equal(
    packed.reference_logp_BT[0, 0], [-3, -4, 0, 0, 0]
  )
  # Without any row, a KL penalty still has its array.
  (parts,) = mini_batches(reference=True)
  assert not parts['own'].reference_logp_BT.any()
  assert packer().pack(PROMPTS, [(row(0, 2), 1.0)], 5).reference_logp_BT is None


@hypothesis.given(
  count=strategies.integers(0, 20),
  multiple=strategies.integers(1, 4),
  micro=strategies.integers(1, 3),
  length=strategies.integers(3, 6),
  reference=strategies.booleans(),
)
def test_shapes_are_known_without_rows(
  count, multiple, micro, length, reference
):
  made = packer(
    row_multiple=multiple, micro_rows=multiple * micro, reference=reference
  )
  packed = made.pack(PROMPTS, [(row(0, 3), 1.0)] * count, length)
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), packed)
  assert shapes == jax.tree.map(
    lambda x: (x.shape, x.dtype), made.abstract(count, length)
  )
