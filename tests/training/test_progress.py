import json

from mrl_jax.thl import transfer
from mrl_jax.training import progress


def test_progress_comes_back_from_json():
  some = progress.Progress(
    rounds=3,
    seconds=1.5,
    accuracy={0: {'a': {'all': 0.25}}, 3: {'a': {'all': 0.5}}},
  )
  residual = transfer.Residual(
    rollouts=2, refused={'empty': 1}, chunks={'1:1': 4}
  )
  some.add_residuals('b', {'a': residual})
  some.add_residuals('b', {'a': residual, 'c': residual})
  again = progress.Progress.from_json(json.loads(json.dumps(some.to_json())))
  assert again == some
  assert again.residuals['a->b'].rollouts == 4
  assert again.residuals['a->b'].refused == {'empty': 2}
  again.add_residuals('b', {'a': residual})
  assert again.residuals['a->b'].chunks == {'1:1': 12}
