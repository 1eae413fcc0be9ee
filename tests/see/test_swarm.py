import pytest

from tests import swarm


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes',
  [
    {'life_s': 15.0},
    # Nobody waits for the dead; who returns learns from old records.
    {'life_s': 4.0, 'wait_s': 0.2, 'max_staleness': 10},
  ],
)
def test_a_fleet_whose_policies_die_and_return_loses_nothing(tmp_path, changes):
  plan = swarm.Plan(tmp_path, rounds=10, awake_s=30.0, **changes)
  outcome = swarm.play(plan)
  assert swarm.faults(plan, outcome) == []
  assert outcome.deaths > 5
