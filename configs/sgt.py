"""SGT: where a policy's whole group fails, a peer's success is demonstrated.

  python launch/tpu_pod.py --config=configs/sgt.py

Mutual RL, https://arxiv.org/abs/2605.07244, as re-implemented by the authors of
GRAFT: GRPO, and 0.1 times the negative log-likelihood of one verified success.

TIME

To vary: method.sgt.weight, method.sgt.normaliser=rescue (as strong however few
prompts are rescued), method.which=balanced.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'sgt'
  return config
