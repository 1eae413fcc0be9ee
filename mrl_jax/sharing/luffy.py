"""LUFFY's update on peers' rollouts: the learner's probabilities, reshaped."""

from collections.abc import Sequence

from mrl_jax.sharing import carry as carry_lib
from mrl_jax.sharing import lesson


def carry(
  selected: Sequence[carry_lib.Selected], learner: lesson.Learner, settings
) -> lesson.Carried:
  """Rows as they are: `losses/luffy.py` reads no denominators."""
  del settings
  return carry_lib.rows(selected, learner)[1]
