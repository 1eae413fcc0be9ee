"""Installs mrl_jax: `pip install -e .`, or `pip install -e '.[test]'`."""

import setuptools

setuptools.setup(
  name='mrl_jax',
  version='0.1.0',
  description='Mutual reinforcement learning of different language models',
  license='Apache-2.0',
  packages=setuptools.find_packages(include=['mrl_jax', 'mrl_jax.*']),
  python_requires='>=3.11',
  install_requires=[
    'absl-py',
    'array_record',
    'flax>=0.12',
    'grain',
    'grpcio',
    'importlib_resources',  # tensorflow-datasets needs it and does not say so.
    'jax>=0.10',
    'matplotlib',
    'ml-collections',
    'msgspec',
    'numpy',
    'optax',
    'orbax-checkpoint',
    'rich',
    'tensorboardX',
    'tensorflow-datasets',
    'tokenizers',
    'transformers>=5',
  ],
  extras_require={
    'bench': ['torch==2.13.0', 'trl==1.16.*'],
    'test': ['hypothesis', 'ipykernel', 'nbclient', 'pytest', 'trustme'],
    'lint': ['pre-commit', 'ruff==0.17.5'],
  },
)
