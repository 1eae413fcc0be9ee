import pytest

from mrl_jax.rewards import verify


@pytest.mark.parametrize(
  ('text', 'gold', 'verdict'),
  [
    ('= 10 = 13', '13', 'correct'),  # The last marker counts.
    ('= 13 = 10', '13', 'wrong'),
    ('=13.0', '13', 'correct'),
    ('= $1,300.00', '1300', 'correct'),
    ('= 1/2', '0.5', 'correct'),
    ('= 0.333', '1/3', 'wrong'),
    ('= 3 4 9', '3 4 9', 'correct'),
    ('=  3  4 9 ', '3 4 9', 'correct'),
    ('= 349', '3 4 9', 'wrong'),
    ('= 3 4 8', '3 4 9', 'wrong'),
    ('= -2', '-2', 'correct'),
    ('= 1/0', '0', 'wrong'),
    ('= 1e3', '1000', 'wrong'),
    ('= 9**9**9', '1', 'wrong'),
    ('= ' + '9' * 10_000, '1', 'wrong'),
    ('13', '13', 'unparsable'),  # A number without a marker is no answer.
    (': 13', '13', 'unparsable'),
    ('= ', '13', 'unparsable'),
    ('', '13', 'unparsable'),
    ('= 1,234.5', '1234.5', 'correct'),
    ('= 12', '1,2', 'wrong'),  # A list, not a number.
    ('= 1,2', '12', 'wrong'),
  ],
)
def test_verdicts(text, gold, verdict):
  assert verify.verify(text, gold, '=') == verdict


def test_the_gold_answer_may_follow_its_own_marker():
  gold = 'She has 16 - 3 = 13 left.\n#### 13'
  assert verify.verify('so it is #### 13', gold, '####') == 'correct'
  assert verify.verify('so it is #### 16', gold, '####') == 'wrong'
