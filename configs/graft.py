"""GRAFT: a peer's compatible responses in place of an own group that failed.

  python launch/tpu_pod.py --config=configs/graft.py

https://arxiv.org/abs/2609.37868, with the settings of its authors.

97 s on 2 CPU cores, beside another run and with the warm start cached. Held-out
accuracy, percent, mean of both policies, 5 seeds: from 34.5 to 61.9 ± 1.6.
The gate admits 0.7% of the responses offered; the median compatibility is 0.03.
Cumulative ablations with seed 0, where GRAFT has 59.4 and GRPO 59.7: no gate
(method.graft.admission=all) 59.5; no weights (method.graft.weighted=False)
58.5; successes only (method.graft.success_only=True) 71.8.

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
