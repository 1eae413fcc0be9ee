"""XGRPO: peers' rewards move the baseline of a policy's own rollouts.

  python launch/tpu_pod.py --config=configs/xgrpo.py

Mutual RL, https://arxiv.org/abs/2605.07244, shares advantage signals; that they
are pooled moments of rewards is our reconstruction (sharing/xgrpo.py).

80 s and 1.5 GB on 2 CPU cores. Held-out accuracy, percent, mean of both
policies, 5 seeds: from 35.5 to 62.6 ± 2.5; with seed 0, from 34.6 to 67.2.

To vary: train.samples (the fewer there are, the more a peer's rewards say about
a prompt), policies.NAME.warm_start_families (how far their skills are apart),
method.baseline=own (GRPO).
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'xgrpo'
  return config
