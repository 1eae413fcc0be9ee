"""SGT: where a policy's whole group fails, a peer's success is demonstrated.

  python launch/tpu_pod.py --config=configs/sgt.py

Mutual RL, https://arxiv.org/abs/2605.07244, as re-implemented by the authors of
GRAFT: GRPO, and 0.1 times the negative log-likelihood of one verified success.

45 s on 2 CPU cores, beside another run and with the warm start cached. Held-out
accuracy, percent, mean of both policies, 5 seeds: from 35.5 to 83.2 ± 1.4, which
is 20.2 ± 2.2 above GRPO, paired by seed.

To vary: method.sgt.weight, method.sgt.normaliser=rescue (divides by the number
of rescued prompts, not of all), method.which=balanced.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'sgt'
  return config
