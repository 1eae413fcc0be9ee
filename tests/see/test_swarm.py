import pytest

from tests import swarm


# Policies that go on without the dead learn from old records when they return.
@pytest.mark.slow
@pytest.mark.parametrize(('wait_s', 'max_staleness'), [(600.0, 1), (0.2, 10)])
def test_a_fleet_whose_policies_die_and_return_loses_nothing(
  tmp_path, wait_s, max_staleness
):
  plan = swarm.Plan(
    tmp_path,
    rounds=10,
    life_s=15.0,
    awake_s=40.0,
    wait_s=wait_s,
    max_staleness=max_staleness,
  )
  outcome = swarm.play(plan)
  assert swarm.faults(plan, outcome) == []
  assert outcome.deaths > 5
