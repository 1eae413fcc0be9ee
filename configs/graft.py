"""GRAFT: a peer's compatible group in place of one's own that failed.

  python launch/tpu_pod.py --config=configs/graft.py

https://arxiv.org/abs/2609.37868, with the settings of its authors.

TIME

To vary: method.graft.floor, method.graft.admission=all (no gate) or random,
method.which=complementary (unbalanced) or random, method.how=luffy,
method.peer_advantage=baseline, method.baseline=pooled; see.peers.NAME.journal
(a stored peer, to which nothing is given back: method.which=complementary).
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'graft'
  return config
