"""The methods on a contextual bandit, where all can be computed with numpy.

An action stands for a whole response to one prompt. Arrays carry their shape
in their name; beside the letters of `mrl_jax`, in this package alone:

  K  actions                     M  simulated groups, or updates
  Z  cells: counts of samples    S  seeds
  X  values of what is varied    Y  of what else is
"""
