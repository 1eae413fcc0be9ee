"""GRPO (https://arxiv.org/abs/2402.03300): policies side by side, no exchange.

python launch/tpu_pod.py --config=configs/grpo.py
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'grpo'
  return config
