"""SGT: one verified success of a peer, as a demonstration."""

from collections.abc import Sequence

import numpy as np

from mrl_jax.sharing import lesson
from mrl_jax.sharing import offers as offers_lib
from mrl_jax.thl import transfer

# How its terms are averaged in a mini-batch: over all prompts, so that they
# fade as fewer are rescued, or over those that are (`batch.PEER_AVERAGES`).
NORMALISERS = {'batch': 'prompts', 'rescue': 'rows'}


def average(settings) -> str:
  """The average that `config.method.sgt.normaliser` stands for."""
  return NORMALISERS[settings.sgt.normaliser]


def carry(
  chosen: Sequence[offers_lib.Offer], learner: lesson.Learner, settings
) -> lesson.Carried:
  """A row for each prompt, of a success drawn from those of its offers.

  Its loss is lambda times the mean negative log-likelihood of its tokens. No
  probability of the peer is needed, so that texts are all that cross.

  Mutual RL, https://arxiv.org/abs/2605.07244, as re-implemented by GRAFT's
  authors; that the success is drawn from the different ones that a peer quotes
  (`see.outcome_texts`) is our reconstruction. One that the learner's
  vocabulary cannot write is not drawn.

  Args:
    chosen: offers of verified successes.
    learner: who learns from them.
    settings: `config.method`, of which `sgt.weight` is lambda.
  """
  texts, residuals = {}, {}  # Texts once each, whoever quotes them.
  for offer in chosen:
    residual = residuals.setdefault(offer.peer, transfer.Residual())
    for payload in dict.fromkeys(offer.right()):
      ids = transfer.encode(
        payload, learner.tokenizer, learner.limits, residual
      )
      if ids is not None:
        texts.setdefault(offer.prompt, {})[payload] = ids
  rows = []
  for prompt, candidates in texts.items():
    ids = [*candidates.values()][learner.rng.integers(len(candidates))]
    zeros = np.zeros(len(ids), np.int32)
    rows.append(
      lesson.Row(
        prompt,
        ids,
        old_logp=zeros.astype(np.float32),
        advantage=1.0,
        chunk=zeros,
        mask=np.ones(len(ids), bool),
        weight=settings.sgt.weight,
      )
    )
  return lesson.Carried(rows=rows, residuals=residuals)
