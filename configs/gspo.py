"""GSPO: ratios of whole responses; policies exchange nothing.

  python launch/tpu_pod.py --config=configs/gspo.py

https://arxiv.org/abs/2507.18071, with the clip of its authors, 3e-4 and 4e-4,
and the mean over responses. The base that HACPO builds on.

50 s on 2 CPU cores, beside another run and with the warm start cached. Held-out
accuracy, percent, mean of both policies, 5 seeds: from 35.5 to 61.7 ± 2.0.

To vary: method.clip_low and clip_high (policies this small move further in an
update than the authors' do), train.mini_batches.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'gspo'
  config.method.clip_low = 3e-4
  config.method.clip_high = 4e-4
  config.method.dual_clip = 0.0
  config.train.aggregation = 'sequence_mean'
  return config
