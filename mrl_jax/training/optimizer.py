"""The optimizer, from its config."""

import optax


def build(config, steps: int) -> optax.GradientTransformation:
  """AdamW behind a global-norm clip: linear warm-up, then cosine decay.

  Args:
    config: fields of `optimizer` in `configs/base.py`.
    steps: updates in the whole run, at least 1; the decay ends with them.
  """
  warmup = min(config.warmup_steps, steps - 1)
  rate = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.learning_rate,
    warmup_steps=warmup,
    decay_steps=steps,
    end_value=config.learning_rate * config.final_fraction,
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay
    ),
  )
