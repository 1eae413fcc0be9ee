"""SGT: one verified success of a peer, as a demonstration."""

from collections.abc import Sequence

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.thl import transfer

# What the NLL terms of a mini-batch are divided by: the number of its prompts, so
# that they shrink as fewer prompts are rescued, or the number of rescued prompts.
# The values are names in `packing.PEER_AVERAGES`.
NORMALISERS = {'batch': 'prompts', 'rescue': 'rows'}


def average(settings) -> str:
  """The average that `config.method.sgt.normaliser` stands for."""
  return NORMALISERS[settings.sgt.normaliser]


def rows(
  groups: Sequence[peer_groups.PeerGroup], context: context_lib.Context
) -> list[rows_lib.Row]:
  """At most one row for each prompt: a success drawn from the selected groups.

  A mini-batch of P prompts adds to the loss of own rows, over its rescued prompts
  p with the success y_p,

    (lambda / P) sum_p (1 / |y_p|) sum_t -log pi(y_pt | x_p, y_p<t)

  where lambda is `config.method.sgt.weight`, and |y_p| counts the learner's
  tokens with end-of-sequence. With `sgt.normaliser` 'rescue', P is the number of
  rescued prompts. Here are the rows with lambda; `packing.PEER_AVERAGES` has the
  averages, `objectives.log_likelihood` the log-likelihood, and `update.build`
  sums and negates. No probability of the peer enters: only texts and numbers of
  successes cross.

  Mutual RL, https://arxiv.org/abs/2605.07244, as re-implemented by GRAFT's
  authors. Our reconstruction: the success is drawn uniformly from the different
  ones that peers quote (`see.outcome_texts`) and that the learner's vocabulary
  can write.
  """
  offered = [
    (group, payload)
    for group in groups
    for payload in dict.fromkeys(group.successful_texts())
  ]
  encoded = transfer.encode_all(
    [
      (payload, context.log.residuals[group.peer]) for group, payload in offered
    ],
    context.tokenizer,
    context.limits,
  )
  candidates = {}  # By prompt, ids by text: a text counts once.
  for (group, payload), ids in zip(offered, encoded, strict=True):
    if ids is not None:
      candidates.setdefault(group.prompt, {})[payload] = ids
  found = []
  for prompt, by_text in candidates.items():
    ids = [*by_text.values()][context.rng.integers(len(by_text))]
    weight = context.settings.sgt.weight
    found.append(rows_lib.demonstration(prompt, ids, weight))
  return found
