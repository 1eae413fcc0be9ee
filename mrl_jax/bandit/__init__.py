"""The methods on a contextual bandit, where all can be computed; numpy only.

An action stands for a whole response to one prompt. Arrays carry their shape
in their name; beside the letters of `mrl_jax`, in this package alone:

  K  actions                     M  simulated groups, or updates
  Z  cells: counts of samples    S  seeds
"""
