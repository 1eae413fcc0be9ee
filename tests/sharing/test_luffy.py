from mrl_jax.sharing import carry
from mrl_jax.sharing import luffy
from tests import examples


def test_rows_are_taken_as_they_are():
  encoder = examples.tokenizer('byte_level')
  sent = examples.rollout(b'= 9', encoder=encoder, policy='b')
  carried = luffy.carry(
    [carry.Selected(1, sent, 0.5)], examples.learner(encoder), None
  )
  (row,) = carried.rows
  assert (row.prompt, row.advantage, row.weight) == (1, 0.5, 1.0)
  assert encoder.decode(row.ids) == b'= 9'
