"""Weights that correct for what differs between sampler and trainer."""

import numpy as np

LEVELS = ('none', 'token', 'sequence')
KINDS = ('truncate', 'mask')

_MOST = 50.0  # Of logarithms of ratios in metrics, which would overflow.


def weights(
  trainer_logp: np.ndarray, sampler_logp: np.ndarray, settings
) -> np.ndarray:
  """Weights of a response's tokens.

    w_t = exp(log pi_trainer(y_t) - log pi_sampler(y_t))

  at level 'token', their product over the response at level 'sequence'; a
  weight above the cap is lowered to it ('truncate') or set to 0 ('mask').
  Sampler and trainer differ by kernels, precision, and the temperature that was
  sampled with.

  Truncated importance sampling: https://fengyao.notion.site/off-policy-rl;
  masked: https://arxiv.org/abs/2510.18855, IcePop, of which this is the upper
  bound.

  Args:
    trainer_logp: f32 [T], of the trainer's forward pass, before it learns.
    sampler_logp: f32 [T], of the density that was sampled from.
    settings: `config.method.correction`, of which `level` is not 'none'.
      The weights are of all that is learnt from the response's tokens, a KL
      penalty and an entropy bonus among it.

  Returns:
    f32 [T].
  """
  log_weight_T = trainer_logp.astype(np.float64) - sampler_logp
  if settings.level == 'sequence':
    log_weight_T = np.full_like(log_weight_T, log_weight_T.sum())
  weight_T = np.exp(np.minimum(log_weight_T, np.log(settings.cap) + 1))
  if settings.kind == 'mask':
    weight_T[weight_T > settings.cap] = 0.0
  return np.minimum(weight_T, settings.cap).astype(np.float32)


def mismatch(
  trainer_logps: list[np.ndarray], sampler_logps: list[np.ndarray]
) -> dict[str, float]:
  """How far the two are apart, over all tokens.

  Returns:
    kl: KL of sampler from trainer, in nats a token, by its plain estimate;
    max_ratio: the largest weight; ess_fraction: effective sample size of the
    weights, over the number of tokens.
  """
  log_ratio_T = np.concatenate(trainer_logps).astype(np.float64)
  log_ratio_T -= np.concatenate(sampler_logps)
  ratio_T = np.exp(np.minimum(log_ratio_T, _MOST))
  return {
    'kl': float(-log_ratio_T.mean()),
    'max_ratio': float(ratio_T.max()),
    'ess_fraction': float(ratio_T.sum() ** 2 / (ratio_T**2).sum())
    / len(ratio_T),
  }
