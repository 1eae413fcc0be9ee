"""Importance weights that correct the mismatch of sampler and trainer."""

import numpy as np

LEVELS = ('none', 'token', 'sequence')
KINDS = ('truncate', 'mask')

_MAX_LOG_RATIO = 50.0  # In metrics; larger ones would overflow.


def weights(
  trainer_logp: np.ndarray, sampler_logp: np.ndarray, settings
) -> np.ndarray:
  """Importance weights of a response's tokens, f32 [T].

    w_t = exp(log pi_trainer(y_t) - log pi_sampler(y_t))

  at level 'token', and their product over the response at level 'sequence'. A
  weight above the cap is lowered to it ('truncate') or set to 0 ('mask').
  Sampler and trainer differ by kernels and precision. The weights multiply the
  whole objective of a token, with KL penalty and entropy bonus.

  Truncated importance sampling: https://fengyao.notion.site/off-policy-rl;
  masked: https://arxiv.org/abs/2510.18855, IcePop, of which this has the upper
  bound only.

  Args:
    trainer_logp: f32 [T], log-probabilities of the trainer before it updates.
    sampler_logp: f32 [T], those of the density that was sampled from.
    settings: `config.method.correction`, whose `level` is not 'none'.
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
  """Statistics of the mismatch, over the tokens of all responses.

  Returns:
    'kl', KL(sampler || trainer) by the k1 estimate, in nats a token;
    'max_ratio', the largest uncapped token weight; 'ess_fraction', the effective
    sample size of the token weights over the number of tokens.
  """
  log_ratio_T = np.concatenate(trainer_logps).astype(np.float64)
  log_ratio_T -= np.concatenate(sampler_logps)
  ratio_T = np.exp(np.minimum(log_ratio_T, _MAX_LOG_RATIO))
  return {
    'kl': float(-log_ratio_T.mean()),
    'max_ratio': float(ratio_T.max()),
    'ess_fraction': float(ratio_T.sum() ** 2 / (ratio_T**2).sum())
    / len(ratio_T),
  }
