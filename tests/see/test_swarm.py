import pytest

from tests import swarm


@pytest.mark.slow
@pytest.mark.parametrize('wait_s', [swarm.Plan.deadline_s, 0.2])
def test_a_fleet_whose_policies_die_and_return_loses_nothing(tmp_path, wait_s):
  plan = swarm.Plan(
    tmp_path, rounds=12, life_s=20.0, awake_s=40.0, wait_s=wait_s
  )
  outcome = swarm.play(plan)
  assert swarm.faults(plan, outcome) == []
  assert outcome.deaths > 10
