"""A study compares complete runs, paired by seed."""

import math

import numpy as np
import pytest

from mrl_jax import workdir
from mrl_jax.analysis import study
from tests.analysis import workdirs


def folder(out, arm, seed):
  return out / arm / f'seed-{seed}'


def write(out, arm, after_by_seed, config=None, **changes):
  """Writes runs of one policy, or of several."""
  for seed, after in after_by_seed.items():
    after = after if isinstance(after, dict) else {'a': after}
    of_seed = {'seed': seed, **(config or {})}
    workdirs.write(
      folder(out, arm, seed), after=after, config=of_seed, **changes
    )


def compare(out, arms, seeds, baseline='base'):
  found = study.read(str(out), arms, seeds)
  assert not found.missing
  return {arm.name: arm for arm in study.compare(found.runs, baseline)}


def read_run(out, **changes):
  return study.read_run(workdirs.write(out, after={'a': 0.5}, **changes))


def test_mean_and_standard_error_by_hand():
  # Deviations -2, 0, 2: s^2 = 8 / 2 = 4, and the error is 2 / sqrt(3).
  one = study.estimate([1.0, 3.0, 5.0])
  assert one.mean == 3
  assert one.error == pytest.approx(2 / math.sqrt(3))
  assert one.ratio == pytest.approx(3 * math.sqrt(3) / 2)
  assert one.count == 3
  assert f'{one:+.1f}' == '+3.0 ± 1.2'
  assert f'{one.percent:.0f}' == '300 ± 115'


def test_one_seed_has_no_error_and_none_has_no_mean():
  assert study.estimate([0.5]) == study.Estimate(0.5, None, 1)
  assert study.estimate([0.5]).ratio is None
  assert f'{study.estimate([0.5]).percent:.1f}' == '50.0 ± -'
  assert study.estimate([None, 0.5]).count == 1
  assert study.estimate([None]) is None
  assert study.estimate([2.0, 2.0]).ratio is None  # The error is 0.


def test_differences_are_paired_by_seed(tmp_path):
  # Seeds differ by far more than arms, and the pairs by 1, 2 and 3 eighths.
  write(tmp_path, 'base', {0: 0.0, 1: 0.5, 2: 0.25, 3: 1.0})
  write(tmp_path, 'mine', {2: 0.5, 0: 0.125, 1: 0.875})
  found = study.read(str(tmp_path), ['base', 'mine'], [0, 1, 2, 3])
  assert found.missing == {('mine', 3): 'not started'}
  base, mine = study.compare(found.runs, 'base')
  assert mine.difference.mean == pytest.approx(0.25)
  assert mine.difference.error == pytest.approx(0.125 / math.sqrt(3))
  assert mine.difference.ratio == pytest.approx(2 * math.sqrt(3))
  assert mine.difference.count == 3
  assert mine.seeds == [0, 1, 2]
  assert base.difference is None
  assert base.after.mean == pytest.approx(0.4375)


def test_without_a_common_seed_there_is_no_difference(tmp_path):
  write(tmp_path, 'base', {0: 0.5})
  write(tmp_path, 'mine', {1: 0.75})
  found = study.read(str(tmp_path), ['base', 'mine'], [0, 1])
  _, mine = study.compare(found.runs, 'base')
  assert mine.difference is None
  (mine,) = study.compare({'mine': found.runs['mine']}, 'base')
  assert mine.difference is None
  assert mine.more_rollouts is None


def test_policies_are_averaged_and_listed(tmp_path):
  write(tmp_path, 'base', {0: {'a': 0.5, 'b': 0.25}, 1: {'a': 0.75, 'b': 0.25}})
  base = compare(tmp_path, ['base'], [0, 1])['base']
  assert base.after == study.Estimate(0.4375, 0.0625, 2)
  assert base.policies == {
    'a': study.Estimate(0.625, 0.125, 2),
    'b': study.Estimate(0.25, 0.0, 2),
  }
  assert base.before == study.Estimate(0.25, 0.0, 2)


def test_rollouts_are_compared_with_the_baseline(tmp_path):
  both = {0: {'a': 0.5, 'b': 0.5}}
  write(tmp_path, 'base', both)
  write(tmp_path, 'wide', both, {'train.samples': 6}, rollouts=24)
  arms = compare(tmp_path, ['base', 'wide'], [0])
  assert arms['base'].rollouts == 4 * 16 * 2  # Rounds ... policies.
  assert arms['base'].more_rollouts == 0
  assert arms['wide'].rollouts == 4 * 24 * 2
  assert arms['wide'].more_rollouts == 0.5
  assert arms['wide'].changes == {'train.samples': 6}


def test_times_are_of_the_run_and_of_its_median_round(tmp_path):
  # A round takes as long as its slowest policy; the first one compiles.
  seconds = [(90, 1), (2, 3), (4, 1), (5, 3)]
  rows = [
    workdirs.row(r, p, timing=workdir.Timing(seconds=s))
    for r, both in enumerate(seconds)
    for p, s in zip('ab', both, strict=True)
  ]
  write(tmp_path, 'base', {0: {'a': 0.5, 'b': 0.5}}, rows=rows, seconds=120)
  base = compare(tmp_path, ['base'], [0])['base']
  assert base.round_seconds.mean == 4.5
  assert base.seconds.mean == 120
  assert base.device_seconds.mean == 8 * 120


def test_curves_are_means_of_the_policies(tmp_path):
  accuracy = {'a': [0, 0.5, 1, 0.5], 'b': [0, 0, 0.5, 0.5]}
  # After round 1 both policies are evaluated, after round 2 only one is.
  heldout = {(1, 'a'): 0.75, (1, 'b'): 0.25, (2, 'a'): 1.0}
  rows = [
    workdirs.row(
      r, p, accuracy=accuracy[p][r],
      heldout_accuracy={'all': heldout[r, p]} if (r, p) in heldout else {},
    )
    for r in range(4)
    for p in 'ab'
  ]  # fmt: skip
  write(tmp_path, 'base', {0: {'a': 1.0, 'b': 0.5}}, rows=rows)
  run = study.read_run(str(folder(tmp_path, 'base', 0)))
  assert [*run.accuracy_R] == [0, 0.25, 0.75, 0.5]
  assert run.heldout == {0: 0.25, 2: 0.5}
  area = compare(tmp_path, ['base'], [0])['base'].area
  assert area.mean == 0.375


def test_support_is_what_came_into_reach_and_stability_the_norms(tmp_path):
  # 20 rounds: the first two fail everywhere but in an eighth, the last two in
  # half. Norms 1 and 3 in turn: mean 2, s^2 = 20 / 19.
  rows = [
    workdirs.row(
      r, 'a', grad_norm=1.0 + 2 * (r % 2), rescue_rate=None,
      all_fail_groups=0.875 if r < 2 else 0.5 if r > 17 else 0.0,
    )
    for r in range(20)
  ]  # fmt: skip
  run = read_run(tmp_path, rows=rows, rounds=20, config={'train.rounds': 20})
  assert run.fall == 0.375
  assert run.unsteadiness == pytest.approx(math.sqrt(20 / 19) / 2)
  assert run.rescue is None


def test_undefined_measures_are_none(tmp_path):
  rates = [None, 0.25, 0.75, None]
  rows = [
    workdirs.row(r, 'a', grad_norm=0.0, rescue_rate=rates[r]) for r in range(4)
  ]
  run = read_run(tmp_path, rows=rows)
  assert run.unsteadiness is None
  assert run.rescue == 0.5


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('summary.json', '{', 'summary.json left out: it is not JSON'),
    ('summary.json', '{"rounds": 4}', 'policies or seconds unknown'),
    ('config.json', '\xff', 'config.json left out: '),
    ('config.json', '{"format": 2}', 'config.json: rounds or devices unknown'),
    ('config.json', '{"seed": 2}', 'another version of mrl_jax wrote it'),
    ('metrics.jsonl', 'no row\n', 'metrics.jsonl, line 1 left out: '),
    ('metrics.jsonl', '{"round": 0, "policy": "a"}\n', '0 rows of a with all'),
    ('metrics.jsonl', '', '0 rows of a with all numbers; a complete run has'),
  ],
)
def test_a_damaged_run_is_missing_with_the_reason(
  tmp_path, name, content, message
):
  write(tmp_path, 'base', {0: 0.5, 1: 0.5})
  path = folder(tmp_path, 'base', 1) / name
  path.write_text(content, encoding='latin-1')
  found = study.read(str(tmp_path), ['base'], [0, 1])
  assert [*found.runs['base']] == [0]
  assert message in found.missing['base', 1]


def test_a_run_that_stopped_is_missing_with_its_progress(tmp_path):
  write(tmp_path, 'base', {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5})
  (folder(tmp_path, 'base', 0) / 'summary.json').unlink()
  (folder(tmp_path, 'base', 1) / 'summary.json').unlink()
  write(tmp_path, 'base', {1: 0.5}, rounds=1)
  path = folder(tmp_path, 'base', 2)
  workdirs.change(path, 'config.json', '"train.rounds": 4', '"train.rounds": 9')
  found = study.read(str(tmp_path), ['base'], range(4), {('base', 3): 'failed'})
  assert found.missing == {
    ('base', 0): 'stopped after 4 of 4 rounds',
    ('base', 1): 'stopped after 1 of 4 rounds',
    ('base', 2): 'summary.json: 4 rounds, but 9 in config.json',
    ('base', 3): 'failed',
  }


def test_runs_of_an_arm_have_one_config(tmp_path):
  write(tmp_path, 'base', {0: 0.5}, {'cache_dir': 'here'})
  write(tmp_path, 'base', {1: 0.5}, {'cache_dir': 'there'})
  write(tmp_path, 'base', {2: 0.5}, {'train.prompts': 9})
  found = study.read(str(tmp_path), ['base'], range(3))
  assert [*found.runs['base']] == [0, 1]
  assert found.missing == {
    ('base', 2): 'its config differs from that of seed 0 in train.prompts'
  }


def test_seeds_with_other_starts_are_named(tmp_path):
  write(tmp_path, 'base', {0: 0.5, 1: 0.5})
  write(tmp_path, 'mine', {0: 0.5})
  write(tmp_path, 'mine', {1: 0.5}, before=0.5)
  arms = compare(tmp_path, ['base', 'mine'], [0, 1])
  assert arms['base'].other_starts == []
  assert arms['mine'].other_starts == [1]


def write_families(out, seed, after):
  """Policy a was shown words/add; policy b was shown words/sub instead."""
  config = {'policies.b.warm_start_families': ['formula/add', 'words/sub']}
  write(out, 'base', {seed: {'a': 0.5, 'b': 0.5}}, config)
  before = dict.fromkeys(('all', *workdirs.FAMILIES), 0.25)
  policies = {
    policy: workdir.PolicySummary(
      workdir.BeforeAfter(0.25, 0.5),
      workdir.BeforeAfter(before, {'all': 0.9, **accuracies}),
    )
    for policy, accuracies in after.items()
  }
  summary = workdirs.summary({'a': 0.5, 'b': 0.5}, 4, policies=policies)
  workdir.write(str(folder(out, 'base', seed)), workdir.SUMMARY, summary)


def test_kinds_tell_who_was_shown_a_family(tmp_path):
  for seed, more in ((0, 0.0), (1, 0.25)):
    write_families(
      tmp_path, seed,
      {
        'a': {'formula/add': 0.5 + more, 'words/add': 0.25, 'words/sub': 0.0},
        'b': {'formula/add': 0.75 + more, 'words/add': 0.5, 'words/sub': 0.75},
      },
    )  # fmt: skip
  base = compare(tmp_path, ['base'], [0, 1])['base']
  assert {kind: one.mean for kind, one in base.kinds_before.items()} == (
    dict.fromkeys(study.KINDS, 0.25)
  )
  assert base.kinds_after == {
    'formulas': study.Estimate(0.75, 0.125, 2),  # Of 0.625 and 0.875.
    'own words': study.Estimate(0.5, 0.0, 2),
    "peer's words": study.Estimate(0.25, 0.0, 2),
  }


def test_kinds_without_families_are_left_out(tmp_path):
  other = {'': 0.1}
  write_families(
    tmp_path, 0,
    {'a': {'formula/add': 0.5, **other}, 'b': {'formula/add': 0.75, **other}},
  )  # fmt: skip
  base = compare(tmp_path, ['base'], [0])['base']
  assert base.kinds_after == {'formulas': study.Estimate(0.625, None, 1)}
  np.testing.assert_equal([*base.kinds_before], [*study.KINDS])
