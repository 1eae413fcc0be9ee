"""PRP: peers' rollouts join the group, transferred by THL.

  python launch/tpu_pod.py --config=configs/prp.py

Mutual RL, https://arxiv.org/abs/2605.07244, shares raw rollouts; ratios over
common chunks of bytes and their truncation are our reconstruction
(losses/prp.py).

101 s on 2 CPU cores, beside another run and with the warm start cached. Held-out
accuracy, percent, mean of both policies, 5 seeds: from 35.5 to 68.6 ± 2.1.

To vary: method.prp.max_ratio, method.baseline=own (peers' rollouts against the
policy's own rewards), thl.max_tokens, train.samples.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'prp'
  return config
