"""Every objective on one response, token by token in float64.

They have the form of the papers, over sequences and chunks, not the per-token
form of the losses. Finite differences of them are compared with the gradients
of the losses.
"""

import math

import jax
import numpy as np


def bounded(x: float, low: float, high: float) -> float:
  return min(max(x, low), high)


def clipped(ratio, advantage, low, high, dual_clip=0.0) -> float:
  """PPO's surrogate of the ratio of a token, a sequence or a chunk."""
  objective = min(
    ratio * advantage, bounded(ratio, 1 - low, 1 + high) * advantage
  )
  if dual_clip and advantage < 0:
    objective = max(objective, dual_clip * advantage)
  return objective


def grpo(logp_T, old_T, mask_T, advantage, low, high, dual_clip=0.0) -> float:
  """The mean surrogate of the tokens in the mask."""
  return mean_kept(
    [
      clipped(math.exp(logp - old), advantage, low, high, dual_clip)
      for logp, old in zip(logp_T, old_T, strict=True)
    ],
    mask_T,
  )


def chunk_ratios(logp_T, behaviour_T, chunk_T) -> dict[int, float]:
  """The density ratio of each chunk."""
  ratios = {}
  for logp, behaviour, chunk in zip(logp_T, behaviour_T, chunk_T, strict=True):
    ratios[int(chunk)] = ratios.get(int(chunk), 1.0) * math.exp(
      logp - behaviour
    )
  return ratios


def prp(logp_T, behaviour_T, chunk_T, advantage, low, high) -> float:
  """The sum of one surrogate per chunk, over the length."""
  ratios = chunk_ratios(logp_T, behaviour_T, chunk_T)
  return sum(
    clipped(ratio, advantage, low, high) for ratio in ratios.values()
  ) / len(logp_T)


def mean_kept(x_T, mask_T) -> float:
  """The mean over the mask; 0 if the mask is empty."""
  kept = [x for x, keep in zip(x_T, mask_T, strict=True) if keep]
  return sum(kept) / len(kept) if kept else 0.0


def gspo_ratio(logp_T, old_T, mask_T) -> float:
  """The geometric mean of the ratios of the tokens in the mask."""
  return math.exp(mean_kept(logp_T, mask_T) - mean_kept(old_T, mask_T))


def gspo(logp_T, old_T, mask_T, advantage, low, high) -> float:
  if not any(mask_T):
    return 0.0
  return clipped(gspo_ratio(logp_T, old_T, mask_T), advantage, low, high)


def hacpo_ratio(logp_T, mask_T, source_logps) -> float:
  """Each mean is over its own tokens, whose numbers differ."""
  return math.exp(
    mean_kept(logp_T, mask_T) - sum(source_logps) / len(source_logps)
  )


def hacpo(ratio, constant_ratio, advantage, low, high, alpha) -> float:
  """The weight is made of `constant_ratio`, which has no gradient."""
  weight = bounded(constant_ratio, low, high) ** alpha
  return bounded(ratio, low, high) * weight * advantage


def hacpo_low(delta, delta_step, mini_batch) -> float:
  low = 1 - delta
  for _ in range(mini_batch):
    low += delta_step
  return min(1.0, low)


def luffy(logp_T, mask_T, advantage, gamma) -> float:
  """The mean shaped probability of the tokens in the mask."""
  shaped_T = [math.exp(logp) / (math.exp(logp) + gamma) for logp in logp_T]
  return mean_kept(shaped_T, mask_T) * advantage


def kl(logp, reference, form) -> float:
  """Schulman's estimates, from r = pi_ref / pi."""
  ratio = math.exp(reference - logp)
  if form == 'k1':
    return -math.log(ratio)
  if form == 'k2':
    return math.log(ratio) ** 2 / 2
  return (ratio - 1) - math.log(ratio)


def entropy(logits_V) -> float:
  weights = [math.exp(logit - max(logits_V)) for logit in logits_V]
  total = sum(weights)
  return -sum(w / total * math.log(w / total) for w in weights if w)


def gradient(function, x, step: float = 1e-6) -> np.ndarray:
  """Central differences of a function of one vector."""
  x = np.asarray(x, np.float64)
  out = np.zeros_like(x)
  for i in range(len(x)):
    up, down = x.copy(), x.copy()
    up[i] += step
    down[i] -= step
    out[i] = (function(up) - function(down)) / (2 * step)
  return out


def rows(seed: int, spread: float):
  """Random log-probabilities of 16 responses under two policies.

  Positions outside the mask have numbers too.

  Returns:
    logp_BT, old_logp_BT, mask_BT; advantage_B1, of both signs.
  """
  rng = np.random.default_rng(seed)
  shape = (16, 6)
  logp_BT = -rng.exponential(2.0, shape)
  old_BT = logp_BT - spread * rng.standard_normal(shape)
  mask_BT = np.arange(6)[None, :] < rng.integers(1, 7, (16, 1))
  mask_BT[0] = True
  mask_BT[1] = False
  mask_BT[2:5, 1] = False  # A hole, as left by the output of a tool.
  advantage_B1 = rng.uniform(0.5, 2.0, (16, 1)) * (-1) ** np.arange(16)[:, None]
  return (
    logp_BT.astype(np.float32),
    old_BT.astype(np.float32),
    mask_BT,
    advantage_B1.astype(np.float32),
  )


def over_length(mask_BT) -> np.ndarray:
  """Weights that average over the tokens in the mask."""
  lengths_B1 = np.maximum(mask_BT.sum(1, keepdims=True), 1)
  return (mask_BT / lengths_B1).astype(np.float32)


def weighted(objective, logp_BT, weight_BT):
  """Values and gradients, by JAX, of the weighted sums of a token objective.

  Args:
    objective: `logp_BT -> objective_BT`.
    logp_BT: where to evaluate.
    weight_BT: weights of the tokens.

  Returns:
    value_B, gradient_BT.
  """

  @jax.jit
  def run(logp_BT):
    def total(logp_BT):
      value_B = (weight_BT * objective(logp_BT)).sum(1)
      return value_B.sum(), value_B

    return jax.grad(total, has_aux=True)(logp_BT)

  gradient_BT, value_B = run(logp_BT)
  return np.asarray(value_B), np.asarray(gradient_BT)


def by_row(function, logp_BT, *arrays, **settings):
  """Values and finite differences of a function of one row, in float64.

  Args:
    function: of a row of `logp_BT` and one of every array, and the settings.
    logp_BT: where to evaluate.
    *arrays: with a row for every row of `logp_BT`; floats become float64.
    **settings: keyword arguments of the function.

  Returns:
    value_B, gradient_BT.
  """
  logp_BT, *arrays = (
    x.astype(np.float64) if x.dtype == np.float32 else x
    for x in (logp_BT, *arrays)
  )
  values, gradients = [], []
  for logp_T, *rest in zip(logp_BT, *arrays, strict=True):

    def row(logp_T, rest=rest):
      return function(logp_T, *rest, **settings)

    values.append(row(logp_T))
    gradients.append(gradient(row, logp_T))
  return np.array(values), np.array(gradients)


def assert_agree(actual, expected):
  """Compares float32 values and gradients with float64; zeros are exact."""
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(a[b == 0], 0.0)
