"""HACPO: policies share all rollouts, weighted by their relative accuracies.

  python launch/tpu_pod.py --config=configs/hacpo.py

https://arxiv.org/abs/2603.02604, on GSPO, with the settings of its authors
(delta, delta_step and alpha differ from pair to pair there).

150 s on 2 CPU cores, beside another run and with the warm start cached.
Held-out accuracy, percent, mean of both policies, 5 seeds: from 35.5 to 61.9 ± 2.7.

To vary: method.baseline=pooled, method.hacpo.capability_weight=False,
method.hacpo.alpha=0 and method.hacpo.clip=False leave out its four mechanisms;
method.clip_low and clip_high.
"""

from configs import gspo


def get_config():
  config = gspo.get_config()
  config.method.name = 'hacpo'
  config.method.scale = 'unbiased_std'
  config.method.kl_weight = 1e-3
  return config
