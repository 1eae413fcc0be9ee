"""SGT: one verified success of a peer, as a demonstration."""

from collections.abc import Sequence

from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import peer_groups
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.thl import transfer

# What the NLL terms of a mini-batch are averaged over: all its prompts, so that
# transfer fades as fewer prompts are rescued, or the rescued prompts only. The
# values are names in `packing.PEER_AVERAGES`.
NORMALISERS = {'batch': 'prompts', 'rescue': 'rows'}


def average(settings) -> str:
  """The average that `config.method.sgt.normaliser` stands for."""
  return NORMALISERS[settings.sgt.normaliser]


def rows(
  groups: Sequence[peer_groups.PeerGroup], context: context_lib.Context
) -> list[rows_lib.Row]:
  """A row for each prompt: a success drawn from those of the selected groups.

  The loss of a row is lambda (`config.method.sgt.weight`) times the mean
  negative log-likelihood of its tokens. It needs no probability of the peer, so
  that only texts cross.

  Mutual RL, https://arxiv.org/abs/2605.07244, as re-implemented by GRAFT's
  authors. Our reconstruction: the success is drawn uniformly from the different
  ones that peers quote (`see.outcome_texts`) and that the learner's vocabulary
  can write.
  """
  candidates = {}  # By prompt, ids by text: a text counts once.
  for group in groups:
    for payload in dict.fromkeys(group.successful_texts()):
      ids = transfer.encode(
        payload,
        context.tokenizer,
        context.limits,
        context.log.residuals[group.peer],
      )
      if ids is not None:
        candidates.setdefault(group.prompt, {})[payload] = ids
  found = []
  for prompt, by_text in candidates.items():
    ids = [*by_text.values()][context.rng.integers(len(by_text))]
    weight = context.settings.sgt.weight
    found.append(rows_lib.demonstration(prompt, ids, weight))
  return found
