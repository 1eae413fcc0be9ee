"""GRAFT: a peer's compatible group in place of one's own that failed.

  python launch/tpu_pod.py --config=configs/graft.py

https://arxiv.org/abs/2609.37868, with the settings of its authors.

97 s on 2 CPU cores, beside another run and with the warm start cached. Held-out
accuracy, percent, mean of both policies, 5 seeds: 34.5 to 61.9 ± 1.6.
The gate is all but shut: the median compatibility is 0.03, and 0.7% of the
responses offered enter. With seed 0 (59.4; GRPO 59.7) method.graft.admission=all
gives 59.5, without method.graft.weighted 58.5, and with
method.graft.success_only, too, 71.8.

To vary: method.graft.floor, method.graft.admission=all (no gate) or random,
method.which=complementary (unbalanced) or random, method.how=luffy,
method.peer_advantage=baseline, method.baseline=pooled; policies.NAME.journal
(a stored peer, to which nothing is given back: method.which=complementary).
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'graft'
  return config
