"""The methods with the settings that are studied, by name."""

from mrl_jax.bandit import estimators

# Defaults of `config.py` that are not defaults of the estimators.
CLIP = (0.2, 0.28)
MAX_RATIO = 2.0

METHODS: dict[str, estimators.Estimator] = {
  'GRPO': estimators.Grpo(),
  'GRPO without std': estimators.Grpo(std=False),
  'XGRPO': estimators.Xgrpo(),
  'XGRPO without std': estimators.Xgrpo(std=False),
  'PRP, plain ratio': estimators.Prp(),
  'PRP, truncated': estimators.Prp(max_ratio=MAX_RATIO),
  # As training does by default.
  'PRP': estimators.Prp(std=True, max_ratio=MAX_RATIO, clip=CLIP),
  'PRP, recomputed': estimators.Prp(denominators='recompute'),
  'SGT': estimators.Sgt(),
  'SGT, by rescued': estimators.Sgt(normaliser='rescue', batch=4),
  'HACPO': estimators.Hacpo(),
  'HACPO, 100 tokens': estimators.Hacpo(length=100.0),
  'GRAFT': estimators.Graft(),
  'GRAFT, 100 tokens': estimators.Graft(length=100.0),
}


def compared(
  *,
  std: bool = True,
  length: float = 100.0,
  transfer: float = 0.1,
  capability: float = 1.0,
) -> dict[str, estimators.Estimator]:
  """The methods that the figures compare; GRPO, the baseline, comes first.

  `length` is L of HACPO and GRAFT, in tokens; `transfer` is lambda of SGT.
  `capability` is w of HACPO, a mean over batches of prompts: p and q of one
  hard prompt say nothing about it.
  """
  return {
    'GRPO': estimators.Grpo(std=std),
    'XGRPO': estimators.Xgrpo(std=std),
    'PRP, plain ratio': estimators.Prp(std=std),
    'PRP, truncated': estimators.Prp(std=std, max_ratio=MAX_RATIO),
    'PRP, recomputed': estimators.Prp(std=std, denominators='recompute'),
    'SGT': estimators.Sgt(std=std, weight=transfer),
    'HACPO': estimators.Hacpo(std=std, length=length, ratio=capability),
    'GRAFT': estimators.Graft(std=std, length=length),
  }
