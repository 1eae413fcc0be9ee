"""The methods, as one table: what is computed and what simulates it."""

from collections.abc import Callable
import dataclasses
import functools

import numpy as np

from mrl_jax import checks
from mrl_jax.bandit import closed_form
from mrl_jax.bandit import problem as problem_lib
from mrl_jax.bandit import simulate

# Of the product's config, where it is not a default of the functions.
CLIP = (0.2, 0.28)
MAX_RATIO = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """A method with its settings.

  Attributes:
    closed_form: the moments of its gradient.
    simulator: its coefficients on sampled groups; see `simulate`.
    batch: groups that one update takes.
  """

  closed_form: Callable[[problem_lib.Problem], closed_form.Moments]
  simulator: Callable[[simulate.Draw], np.ndarray]
  batch: int = 1


def method(name: str, **settings) -> Method:
  """A method with settings of its `closed_form` and `simulate` functions.

  Raises:
    InputError: there is none of this name.
  """
  table = {
    'grpo': (closed_form.grpo, simulate.grpo),
    'xgrpo': (closed_form.xgrpo, simulate.xgrpo),
    'prp': (closed_form.prp, simulate.prp),
    'sgt': (closed_form.sgt, simulate.sgt),
    'hacpo': (closed_form.hacpo, simulate.hacpo),
    'graft': (closed_form.graft, simulate.graft),
  }
  exact, simulator = checks.choose(name, table, 'method of the bandit')
  return Method(
    closed_form=functools.partial(exact, **settings),
    simulator=functools.partial(simulator, **settings),
    batch=settings.get('batch', 1),
  )


METHODS = {
  'GRPO': method('grpo'),
  'GRPO without std': method('grpo', std=False),
  'XGRPO': method('xgrpo'),
  'XGRPO without std': method('xgrpo', std=False),
  'PRP, plain ratio': method('prp'),
  'PRP, truncated': method('prp', max_ratio=MAX_RATIO),
  # What a run does by default.
  'PRP': method('prp', std=True, max_ratio=MAX_RATIO, clip=CLIP),
  'PRP, recomputed': method('prp', denominators='recompute'),
  'SGT': method('sgt'),
  'SGT, by rescued': method('sgt', normaliser='rescue', batch=4),
  'HACPO': method('hacpo'),
  'HACPO, 100 tokens': method('hacpo', length=100.0),
  'GRAFT': method('graft'),
  'GRAFT, 100 tokens': method('graft', length=100.0),
}


def compared(
  *,
  std: bool = True,
  length: float = 100.0,
  transfer: float = 0.1,
  capability: float = 1.0,
) -> dict[str, Method]:
  """The methods side by side, on the same scale; GRPO first.

  Args:
    std: whether all of them divide by the deviation.
    length: tokens of a response, of HACPO and GRAFT.
    transfer: SGT's weight.
    capability: HACPO's w. It is a mean over batches: of one prompt that is
      harder than others, p and q do not tell it.
  """
  return {
    'GRPO': method('grpo', std=std),
    'XGRPO': method('xgrpo', std=std),
    'PRP, plain ratio': method('prp', std=std),
    'PRP, truncated': method('prp', std=std, max_ratio=MAX_RATIO),
    'PRP, recomputed': method('prp', std=std, denominators='recompute'),
    'SGT': method('sgt', std=std, weight=transfer),
    'HACPO': method('hacpo', std=std, length=length, ratio=capability),
    'GRAFT': method('graft', std=std, length=length),
  }
