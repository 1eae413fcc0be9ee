"""XGRPO (https://arxiv.org/abs/2605.07244): peers' rewards in the baselines.

python launch/tpu_pod.py --config=configs/xgrpo.py
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'xgrpo'
  return config
