"""PRP (https://arxiv.org/abs/2605.07244): peers' rollouts, through THL.

python launch/tpu_pod.py --config=configs/prp.py
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'prp'
  return config
