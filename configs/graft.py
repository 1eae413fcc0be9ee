"""GRAFT: a peer's compatible responses in place of an own group that failed.

  python launch/tpu_pod.py --config=configs/graft.py

https://arxiv.org/abs/2609.37868, with the settings of its authors.

55 s on 2 CPU cores, beside another run and with the warm start cached. Held-out
accuracy, percent, mean of both policies, 5 seeds: from 35.5 to 64.3 ± 2.3.
The gate admitted 38 responses in the five runs; the median compatibility is
0.03. Cumulative ablations with seed 0, where GRAFT has 70.2 and GRPO 68.3: no
gate (method.graft.admission=all) 68.9; no weights (method.graft.weighted=False)
71.5; successes only (method.graft.success_only=True) 77.9.

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
