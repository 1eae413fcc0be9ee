"""The methods on a contextual bandit, computed exactly and by simulation.

An action of the bandit stands for a whole response to one prompt, and numpy is
enough. Arrays carry their shape in their name. Beside the letters of `mrl_jax`,
in this package only:

  K  actions                             M  simulated prompts
  Z  cells (pairs of success counts),    S  seeds
     or simulated prompts                X  values of the varied quantity
"""
