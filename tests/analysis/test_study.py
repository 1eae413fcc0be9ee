import json
import math
import os

import numpy as np
import pytest

from mrl_jax import checks
from mrl_jax.analysis import study
from tests import studies


def folder(out, arm, seed):
  return out / arm / f'seed-{seed}'


def write_arm(out, arm, after_by_seed, **values):
  """Runs of one policy, or of several."""
  for seed, after in after_by_seed.items():
    policies = after if isinstance(after, dict) else {'a': after}
    studies.write(folder(out, arm, seed), policies, seed=seed, **values)


def compared(out, arms, seeds, baseline):
  found = study.read(os.fspath(out), arms, seeds)
  assert not found.missing
  return {arm.name: arm for arm in study.compare(found.runs, baseline)}


def test_mean_and_standard_error_by_hand():
  # Deviations -2, 0, 2: s^2 = 8 / 2 = 4, and the error is 2 / sqrt(3).
  one = study.estimate([1.0, 3.0, 5.0])
  assert one.mean == 3
  assert one.error == pytest.approx(2 / math.sqrt(3))
  assert one.ratio == pytest.approx(3 * math.sqrt(3) / 2)
  assert one.count == 3


def test_one_seed_tells_no_error_and_none_no_mean():
  assert study.estimate([0.5]) == study.Estimate(0.5, None, 1)
  assert study.estimate([0.5]).ratio is None
  assert study.estimate([None, 0.5]).count == 1
  assert study.estimate([None]) is None
  assert study.estimate([2.0, 2.0]).ratio is None  # Their error is 0.


def test_differences_are_paired_by_seed(tmp_path):
  # Seeds differ by far more than arms, and the pairs by 1, 2 and 3 eighths.
  write_arm(tmp_path, 'base', {0: 0.0, 1: 0.5, 2: 0.25, 3: 1.0})
  write_arm(tmp_path, 'mine', {2: 0.5, 0: 0.125, 1: 0.875})
  found = study.read(os.fspath(tmp_path), ['base', 'mine'], [0, 1, 2, 3])
  assert found.missing == {('mine', 3): 'not begun'}
  arms = {arm.name: arm for arm in study.compare(found.runs, 'base')}
  difference = arms['mine'].difference
  assert difference.mean == pytest.approx(0.25)
  assert difference.error == pytest.approx(0.125 / math.sqrt(3))
  assert difference.ratio == pytest.approx(2 * math.sqrt(3))
  assert difference.count == 3
  assert arms['mine'].seeds == [0, 1, 2]
  assert arms['base'].difference is None
  assert arms['base'].after.mean == pytest.approx(0.4375)


def test_without_a_seed_in_common_there_is_no_difference(tmp_path):
  write_arm(tmp_path, 'base', {0: 0.5})
  write_arm(tmp_path, 'mine', {1: 0.75})
  found = study.read(os.fspath(tmp_path), ['base', 'mine'], [0, 1])
  _, mine = study.compare(found.runs, 'base')
  assert mine.difference is None
  (mine,) = study.compare({'mine': found.runs['mine']}, 'base')
  assert mine.difference is None
  assert mine.more_rollouts is None


def test_policies_are_averaged_and_told_apart(tmp_path):
  write_arm(
    tmp_path, 'base', {0: {'a': 0.5, 'b': 0.25}, 1: {'a': 0.75, 'b': 0.25}}
  )
  base = compared(tmp_path, ['base'], [0, 1], 'base')['base']
  assert base.after == study.Estimate(0.4375, 0.0625, 2)
  assert base.policies == {
    'a': study.Estimate(0.625, 0.125, 2),
    'b': study.Estimate(0.25, 0.0, 2),
  }
  assert base.before == study.Estimate(0.25, 0.0, 2)


def test_rollouts_are_those_of_the_config_or_of_the_rows(tmp_path):
  both = {'a': 0.5, 'b': 0.5}
  write_arm(tmp_path, 'base', {0: both})
  write_arm(tmp_path, 'wide', {0: both}, train__samples=6)
  rows = [studies.row(r, p, rollouts=10 + r) for r in range(4) for p in 'ab']
  rows[0].pop('rollouts')  # As many as the config says, 32.
  write_arm(tmp_path, 'own', {0: both}, rows=rows)
  arms = compared(tmp_path, ['base', 'wide', 'own'], [0], 'base')
  assert arms['base'].rollouts == 4 * 8 * 4 * 2  # Rounds ... policies.
  assert arms['base'].more_rollouts == 0
  assert arms['wide'].rollouts == 384
  assert arms['wide'].more_rollouts == 0.5
  assert arms['wide'].changes == {'train.samples': 6}
  assert arms['own'].rollouts == 32 + 10 + 2 * (11 + 12 + 13)


def test_times_are_of_the_run_and_of_its_median_round(tmp_path):
  # A round takes as long as its slowest policy; the first one compiles.
  seconds = [(90, 1), (2, 3), (4, 1), (5, 3)]
  rows = [
    studies.row(r, p, timing={'seconds': s})
    for r, both in enumerate(seconds)
    for p, s in zip('ab', both, strict=True)
  ]
  write_arm(tmp_path, 'base', {0: {'a': 0.5, 'b': 0.5}}, rows=rows, seconds=120)
  base = compared(tmp_path, ['base'], [0], 'base')['base']
  assert base.round_seconds.mean == 4.5
  assert base.seconds.mean == 120
  assert base.device_seconds.mean == 8 * 120


def test_curves_are_of_the_mean_policy(tmp_path):
  accuracy = {'a': [0, 0.5, 1, 0.5], 'b': [0, 0, 0.5, 0.5]}
  rows = [
    studies.row(r, p, accuracy=accuracy[p][r]) for r in range(4) for p in 'ab'
  ]
  for row in rows[2:4]:
    row['heldout_accuracy'] = {'all': 0.25 + 0.5 * (row['policy'] == 'a')}
  rows[4]['heldout_accuracy'] = {'all': 1.0}  # Of one policy alone.
  folder = studies.write(tmp_path, {'a': 1.0, 'b': 0.5}, rows=rows)
  run = study.read_run(os.fspath(folder))
  assert [*run.accuracy_R] == [0, 0.25, 0.75, 0.5]
  assert run.heldout == {0: 0.25, 2: 0.5}


def test_area_is_the_mean_of_the_curve(tmp_path):
  rows = [studies.row(r, 'a', accuracy=r / 4) for r in range(4)]
  write_arm(tmp_path, 'base', {0: 0.5}, rows=rows)
  assert compared(tmp_path, ['base'], [0], 'base')['base'].area.mean == 0.375


def test_a_window_narrows_towards_the_ends():
  values_R = np.array([0.0, 3.0, 6.0, 0.0])
  assert [*study.smooth(values_R, 3)] == [1.5, 3.0, 3.0, 3.0]
  assert [*study.smooth(values_R, 1)] == [0.0, 3.0, 6.0, 0.0]
  assert len(study.smooth(values_R, 9)) == 4


def test_a_band_is_the_error_of_smoothed_curves(tmp_path):
  for seed, height in enumerate((0.25, 0.75)):
    rows = [studies.row(r, 'a', accuracy=height) for r in range(4)]
    write_arm(tmp_path, 'base', {seed: 0.5}, rows=rows)
  runs = study.read(os.fspath(tmp_path), ['base'], [0, 1]).runs['base']
  mean_R, error_R = study.curve(runs.values(), 3)
  np.testing.assert_allclose(mean_R, 0.5)
  np.testing.assert_allclose(error_R, 0.25)  # s = 0.5 / sqrt(2), n = 2.
  assert study.curve([runs[0]], 3)[1] is None


def test_support_is_what_came_into_reach_and_stability_the_norms(tmp_path):
  # 20 rounds: the first two fail everywhere but in an eighth, the last two in
  # half. Norms 1 and 3 in turn: mean 2, s^2 = 20 / 19.
  rows = [
    studies.row(
      r, 'a', grad_norm=1.0 + 2 * (r % 2),
      all_fail_groups=0.875 if r < 2 else 0.5 if r > 17 else 0.0,
    )
    for r in range(20)
  ]  # fmt: skip
  path = studies.write(tmp_path, {'a': 0.5}, rows=rows, train__rounds=20)
  run = study.read_run(os.fspath(path))
  assert run.fall == 0.375
  assert run.unsteadiness == pytest.approx(math.sqrt(20 / 19) / 2)
  assert run.rescue is None


def test_what_is_not_defined_is_not_a_number(tmp_path):
  rows = [
    studies.row(r, 'a', grad_norm=0.0, rescue_rate=[None, 0.25, 0.75, None][r])
    for r in range(4)
  ]
  run = study.read_run(os.fspath(studies.write(tmp_path, {'a': 1}, rows=rows)))
  assert run.unsteadiness is None
  assert run.rescue == 0.5


@pytest.mark.parametrize(
  ('name', 'content', 'told'),
  [
    ('summary.json', '{', 'summary.json: Expecting property name'),
    ('summary.json', '[]', 'summary.json: Expected `object`'),
    ('summary.json', '{"rounds": 4}', 'missing required field `timing`'),
    ('config.json', '{}', 'config.json: Object missing required field'),
    ('config.json', '\xff', 'config.json: '),
    ('metrics.jsonl', 'no row\n', 'metrics.jsonl: Expecting value'),
    ('metrics.jsonl', '{"round": 0}\n', 'metrics.jsonl: Object missing'),
    ('metrics.jsonl', '', '0 rows of a; it takes one for each of 4 rounds'),
  ],
)
def test_a_damaged_run_is_missing_and_says_why(tmp_path, name, content, told):
  write_arm(tmp_path, 'base', {0: 0.5, 1: 0.5})
  path = folder(tmp_path, 'base', 1) / name
  path.write_text(content, encoding='latin-1')
  found = study.read(os.fspath(tmp_path), ['base'], [0, 1])
  assert [*found.runs['base']] == [0]
  assert told in found.missing['base', 1]


def test_a_run_that_stopped_says_where(tmp_path):
  write_arm(tmp_path, 'base', {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5})
  folder(tmp_path, 'base', 0).joinpath('summary.json').unlink()
  studies.write(
    folder(tmp_path, 'base', 1), {'a': 0.5}, rows=[studies.row(0, 'a')]
  )
  folder(tmp_path, 'base', 1).joinpath('summary.json').unlink()
  path = folder(tmp_path, 'base', 2) / 'config.json'
  path.write_text(json.dumps({**studies.SETTINGS, 'train.rounds': 9}))
  found = study.read(
    os.fspath(tmp_path), ['base'], range(4), {('base', 3): 'failed'}
  )
  assert found.missing == {
    ('base', 0): 'stopped after 4 of 4 rounds',
    ('base', 1): 'stopped after 1 of 4 rounds',
    ('base', 2): 'summary.json: 4 rounds, and 9 in config.json',
    ('base', 3): 'failed',
  }


def test_an_arm_is_of_one_config(tmp_path):
  write_arm(tmp_path, 'base', {0: 0.5}, cache_dir='here')
  write_arm(tmp_path, 'base', {1: 0.5}, cache_dir='there')
  write_arm(tmp_path, 'base', {2: 0.5}, train__prompts=9)
  found = study.read(os.fspath(tmp_path), ['base'], range(3))
  assert [*found.runs['base']] == [0, 1]
  assert found.missing == {
    ('base', 2): 'its config is not that of seed 0: train.prompts'
  }


def test_other_starts_are_told(tmp_path):
  write_arm(tmp_path, 'base', {0: 0.5, 1: 0.5})
  write_arm(tmp_path, 'mine', {0: 0.5})
  write_arm(tmp_path, 'mine', {1: 0.5}, before=0.5)
  arms = compared(tmp_path, ['base', 'mine'], [0, 1], 'base')
  assert arms['base'].other_starts == []
  assert arms['mine'].other_starts == [1]


def test_a_folder_that_is_not_there_is_a_run_not_begun(tmp_path):
  with pytest.raises(checks.InputError, match='not begun'):
    study.read_run(os.fspath(tmp_path / 'nowhere'))
