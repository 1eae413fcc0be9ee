"""Dr. GRPO: GRPO without division by the standard deviation and by the length.

  python launch/tpu_pod.py --config=configs/dr_grpo.py

https://arxiv.org/abs/2503.20783. Policies exchange nothing.

70 s on 2 CPU cores, beside another run and with the warm start cached. Held-out
accuracy, percent, mean of both policies, seed 0: from 35.7 to 69.6; GRPO 68.3.

To vary: method.leave_one_out, method.scale, train.aggregation.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'grpo'
  config.method.scale = 'none'
  config.method.clip_high = 0.2
  config.method.dual_clip = 0.0
  config.train.aggregation = 'constant'
  return config
