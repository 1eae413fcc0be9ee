import json
import os
import pathlib
import timeit

import hypothesis
from hypothesis import strategies
import jax
import numpy as np
import pytest

from mrl_jax.sharing import rows as rows_lib
from mrl_jax.thl import byte_tokenizer
from mrl_jax.training import packing
from tests import examples

PROMPTS = [np.array([7, 8, 9], np.int32), np.array([6], np.int32)]


def row(prompt, length, advantage=1.0):
  ids = np.arange(1, length + 1, dtype=np.int32)
  logp = -np.arange(1, length + 1, dtype=np.float32)
  mask = np.ones(len(ids), bool)
  return rows_lib.Row(prompt, ids, logp, advantage, ids - 1, mask)


def packer(**changes):
  """Rows of at most 9 or 10 tokens, in packed rows of 16 slots."""
  train = {k: changes.pop(k) for k in [*changes] if k in examples.train()}
  return packing.Packer(
    context=4,
    lengths={'own': 5, 'peer': 6},
    train=examples.train(**{'packed_tokens': 16, 'micro_rows': 4, **train}),
    **changes,
  )


def mini_batches(own=(), peer=(), order=(0, 1), prompts=PROMPTS, **changes):
  """The packed own and peer rows of each mini-batch."""
  batch = rows_lib.Batch(own=own, peer=peer, order=order)
  return packer(**changes).mini_batch_parts(prompts, batch)


def whole(micro_batches):
  """All micro-batches as one."""
  return jax.tree.map(lambda *xs: np.concatenate(xs), *micro_batches)


def values(micro_batches, field='weight_BS'):
  """A field's values at each response, by the response's first token."""
  rows = whole(micro_batches)
  found = []
  for b in range(len(rows.tokens_BS)):
    for row in range(1, rows.row_BS[b].max() + 1):
      at_S = (rows.row_BS[b] == row) & rows.is_response_BS[b]
      found.append(getattr(rows, field)[b, at_S].tolist())
  return found


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
  # Both are of four tokens: they are packed in their order.
  first, second = values(parts['own'])
  np.testing.assert_allclose(first, [expected[0]])
  np.testing.assert_allclose(second, [expected[1]] * 3)


def test_rows_are_packed_one_after_the_other():
  weighed = [(row(0, 2), 0.5), (row(1, 5, advantage=-0.5), 0.25)]
  (packed,) = packer().pack(PROMPTS, weighed, 'own', mini_batch=3)
  assert packed.tokens_BS.shape == (1, 16)
  expected = {
    'tokens_BS': [6, 1, 2, 3, 4, 5, 7, 8, 9, 1, 2],
    'row_BS': [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2],
    'old_logp_BS': [0, -1, -2, -3, -4, -5, 0, 0, 0, -1, -2],
    'advantage_BS': [0, *[-0.5] * 5, 0, 0, 0, 1, 1],
    'weight_BS': [0, *[0.25] * 5, 0, 0, 0, 0.5, 0.5],
    'mask_BS': [0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1],
    'chunk_BS': [0, 1, 2, 3, 4, 5, 0, 0, 0, 9, 10],
  }
  for name, values_S in expected.items():
    found_S = getattr(packed, name)[0]
    np.testing.assert_array_equal(found_S, values_S + [0] * 5, err_msg=name)
  assert packed.mini_batch_B1.tolist() == [[3]]


@pytest.mark.parametrize(
  ('rows', 'sizes', 'even'),
  [
    (1, [1], [2]),
    (3, [1, 1, 1], [4]),
    (4, [4], [4]),
    (5, [4, 1], [4, 2]),
    (7, [4, 1, 1, 1], [4, 4]),
  ],
)
def test_packed_rows_are_cut_into_micro_batches_of_two_sizes(rows, sizes, even):
  weighed = [(row(0, 5), 1.0)] * (2 * rows)
  packed = packer().pack(PROMPTS, weighed, 'own')
  assert [len(part.tokens_BS) for part in packed] == sizes
  # On two devices, micro-batches are of even sizes.
  packed = packer(ways=2).pack(PROMPTS, weighed, 'own')
  assert [len(part.tokens_BS) for part in packed] == even
  assert len(values(packed)) == 2 * rows


def test_the_slots_of_packed_rows():
  assert (packer().slots('own'), packer().slots('peer')) == (16, 16)
  # Rows are never cut.
  assert packer(packed_tokens=3).slots('peer') == 16
  assert packer(packed_tokens=0).slots('own') == 128
  longer = packer(packed_tokens=8)
  assert longer.part(PROMPTS, [row(0, 5)]) == 'own'


def test_where_rows_go_by_hand():
  found = packing.places([1, 2, 3, 2], 4)
  assert found == [(0, 3), (1, 0), (0, 0), (1, 2)]


LENGTHS = strategies.lists(
  strategies.tuples(strategies.integers(0, 1), strategies.integers(1, 5)),
  max_size=40,
)


@hypothesis.given(
  LENGTHS, strategies.integers(10, 40), strategies.integers(1, 3)
)
def test_every_row_is_packed_once_and_whole(lengths, slots, ways):
  made = packer(packed_tokens=slots, micro_rows=4 * ways, ways=ways)
  weighed = [
    (row(p, n)._replace(old_logp=np.full(n, -1.0 - i)), 1.0)
    for i, (p, n) in enumerate(lengths)
  ]
  packed = made.pack(PROMPTS, weighed, 'own')
  assert all(len(part.tokens_BS) % ways == 0 for part in packed)
  found = {}
  for part in packed:
    assert part.tokens_BS.shape[1] == made.slots('own') >= slots
    for tokens_S, row_S, logp_S in zip(
      part.tokens_BS, part.row_BS, part.old_logp_BS, strict=True
    ):
      # Ids 1, 2, ... from slot 0 on, then padding.
      count = np.count_nonzero(row_S)
      assert (row_S[:count] > 0).all()
      assert (np.diff(row_S[:count], prepend=0) <= 1).all()
      assert (np.diff(row_S[:count], prepend=0) >= 0).all()
      for n in range(1, row_S.max() + 1):
        i = int(-1 - logp_S[row_S == n].min())
        assert i not in found
        found[i] = tokens_S[row_S == n].tolist()
  assert found == {
    i: [*PROMPTS[p].tolist(), *range(1, n + 1)]
    for i, (p, n) in enumerate(lengths)
  }
  again = made.pack(PROMPTS, weighed, 'own')
  jax.tree.map(np.testing.assert_array_equal, packed, again)
  if weighed:
    rows = [row for row, _ in weighed]
    logps = [part.old_logp_BS for part in packed]
    unpacked = made.unpack(PROMPTS, rows, 'own', logps)
    for each, logp in zip(rows, unpacked, strict=True):
      np.testing.assert_array_equal(logp, each.old_logp)


def share(prompts, responses, context, length):
  """The share of slots with a token, of rows with these numbers of tokens."""
  made = packing.Packer(
    context=context,
    lengths={'own': length},
    train=examples.train(micro_rows=16),
    ways=4,
  )
  prompt_ids = [np.ones(n, np.int32) for n in prompts]
  weighed = [(row(i, n), 1.0) for i, n in enumerate(responses)]
  packed = made.pack(prompt_ids, weighed, 'own')
  return packing.real_slots([{'own': packed}])['own']


@pytest.mark.parametrize('seed', range(3))
def test_most_slots_have_a_token(seed):
  rng = np.random.default_rng(seed)
  responses = np.minimum(rng.lognormal(np.log(400), 1.0, 512), 4096)
  prompts = rng.integers(50, 301, 512)
  assert share(prompts, 1 + responses.astype(int), 1024, 4097) > 0.85


def test_most_slots_have_a_token_of_gsm8k():
  folder = os.environ.get('MRL_TEST_DATA')
  if not folder:
    pytest.skip('MRL_TEST_DATA does not name a folder of real data')
  folder = pathlib.Path(folder)
  tokenizer = byte_tokenizer.load(os.fspath(folder / 'tokenizers/llama3'))
  lines = (folder / 'math/gsm8k_train.jsonl').read_text().splitlines()[:512]
  texts = [json.loads(line) for line in lines]
  prompts, responses = (
    [len(tokenizer.encode(text[key].encode())) for text in texts]
    for key in ('question', 'answer')
  )
  assert share(prompts, responses, max(prompts), max(responses)) > 0.85


def test_packing_takes_little_time():
  lengths = np.random.default_rng(0).integers(50, 4000, 10_000).tolist()
  best = min(
    timeit.repeat(lambda: packing.places(lengths, 5120), number=1, repeat=3)
  )
  assert best < 0.2  # .02 s where nothing else runs.


def test_real_slots_by_hand():
  (parts,) = mini_batches([row(0, 2), row(1, 3)], [row(1, 5)])
  real = packing.real_slots([parts, parts])
  assert real == {'own': 9 / 16, 'peer': 6 / 16}
  assert packing.real_slots([{'own': []}]) == {}


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
  weight_BS = whole(parts['own']).weight_BS
  assert (weight_BS > 0).sum() == 7
  np.testing.assert_allclose(weight_BS.max(), weight)


def test_own_and_peer_rows_share_their_denominator():
  (parts,) = mini_batches([row(0, 2)], [row(1, 6)])
  total = sum(whole(part).weight_BS.sum() for part in parts.values())
  assert total == pytest.approx(1.0)


def test_a_batch_without_signal_is_still_an_update():
  (parts,) = mini_batches([row(0, 2, 0.0)], [row(0, 2, 0.0)])
  assert parts == {'own': []}


def test_masked_tokens_are_neither_trained_on_nor_counted():
  half = row(0, 4)._replace(mask=np.array([True, False, True, False]))
  none = row(1, 3)._replace(mask=np.zeros(3, bool))
  (parts,) = mini_batches([half, none], [row(1, 2)])
  (weights,) = values(parts['own'])
  np.testing.assert_allclose(weights, [0.25, 0, 0.25, 0])
  assert values(parts['own'], 'mask_BS') == [[True, False, True, False]]
  np.testing.assert_allclose(values(parts['peer']), [[0.25, 0.25]])


def test_all_rows_of_a_prompt_are_in_one_mini_batch():
  rows = [row(p, 2) for p in (0, 1, 0, 1)]
  first, second = mini_batches(rows, [row(1, 3)], mini_batches=2)
  assert set(first) == {'own'}
  assert set(second) == {'own', 'peer'}
  for parts, prompt in ((first, [7, 8, 9]), (second, [6])):
    tokens = whole(parts['own']).tokens_BS[0, : 2 * (len(prompt) + 2)]
    assert tokens.tolist() == [*prompt, 1, 2] * 2


def test_mini_batches_follow_the_order_of_the_batch():
  own, peer = [row(0, 2), row(2, 2)], [row(1, 3)]
  prompts = [*PROMPTS, np.array([5], np.int32)]
  first, second, third = mini_batches(
    own, peer, order=[0, 2, 1], prompts=prompts, mini_batches=3
  )
  assert whole(first['own']).tokens_BS[0, 0] == 7
  assert whole(second['own']).tokens_BS[0, 0] == 5
  assert third['own'] == []
  assert whole(third['peer']).tokens_BS[0, 0] == 6
  for m, parts in enumerate((first, second, third)):
    for part in parts.values():
      assert all((rows.mini_batch_B1 == m).all() for rows in part)


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
  np.testing.assert_allclose(whole(parts['own']).weight_BS.max(), own)
  np.testing.assert_allclose(whole(parts['peer']).weight_BS.max(), peer)


def test_the_weight_of_a_row_multiplies_the_averaging_weight_of_its_tokens():
  rows = [
    row(0, 2)._replace(weight=0.5),
    row(1, 2)._replace(weight=np.array([1.0, 0.25], np.float32)),
    row(1, 2)._replace(weight=0.0),
  ]
  (parts,) = mini_batches(rows)
  found = 6 * np.array(values(parts['own']))  # Of six tokens.
  np.testing.assert_allclose(found, [[0.5, 0.5], [1.0, 0.25]])
  masked = row(0, 2)._replace(weight=np.array([1.0, 0.0], np.float32))
  (parts,) = mini_batches([masked])
  # The ratio of the whole response is still over both tokens.
  assert values(parts['own'], 'mask_BS') == [[True, True]]
  (parts,) = mini_batches(rows[:1], rows[2:])
  assert set(parts) == {'own'}  # As if there were no peers.


def test_with_keep_all_own_rows_without_advantage_are_packed_too():
  rows = [row(0, 2, 0.0), row(1, 2)]
  (parts,) = mini_batches(rows, [row(1, 2, 0.0)], keep_all=True)
  assert len(values(parts['own'])) == 2
  assert set(parts) == {'own'}


def test_reference_log_probabilities_are_packed_on_request():
  referenced = row(0, 2)._replace(
    reference_logp=np.array([-3.0, -4.0], np.float32)
  )
  packed = packer(reference=True).pack(PROMPTS, [(referenced, 1.0)], 'own')
  assert values(packed, 'reference_logp_BS') == [[-3, -4]]
  (packed,) = packer().pack(PROMPTS, [(row(0, 2), 1.0)], 'own')
  assert packed.reference_logp_BS is None


@hypothesis.given(
  count=strategies.integers(1, 30),
  ways=strategies.integers(1, 3),
  micro=strategies.sampled_from([1, 2, 4, 6, 8]),
  slots=strategies.integers(1, 40),
  reference=strategies.booleans(),
)
def test_shapes_are_known_without_rows(count, ways, micro, slots, reference):
  made = packer(
    ways=ways,
    micro_rows=ways * micro,
    packed_tokens=slots,
    reference=reference,
  )
  packed = made.pack(PROMPTS, [(row(0, 6), 1.0)] * count, 'peer')
  # These rows are one token shorter than the longest there can be.
  assert len(packed) <= len(made.most(count, 'peer'))
  for part in packed:
    size = len(part.tokens_BS)
    assert size in made.sizes
    for name, x in vars(part).items():
      shape = getattr(made.abstract(size, 'peer'), name)
      if shape is not None:
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
