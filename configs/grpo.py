"""GRPO: policies learn side by side, and exchange nothing.

  python launch/tpu_pod.py --config=configs/grpo.py

https://arxiv.org/abs/2402.03300, with the asymmetric clip and the mean over
tokens of DAPO, https://arxiv.org/abs/2503.14476. What the other methods are
compared with.

80 s and 1.5 GB on 2 CPU cores. Held-out accuracy, percent, mean of both
policies, 5 seeds: from 35.5 to 63.1 ± 2.0.

To vary: train.aggregation (sequence_mean is GRPO's own, constant is that of
Dr. GRPO), method.clip_high, train.mini_batches, train.samples.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'grpo'
  return config
