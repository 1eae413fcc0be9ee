"""Settings of all tests: 8 emulated devices, no silent broadcasting."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
