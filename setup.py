"""Installs mrl_jax: `pip install -e .`, or `pip install -e '.[test]'`."""

import setuptools

_MATH = 'math-verify[antlr4_13_2]==0.9.*'

setuptools.setup(
  name='mrl_jax',
  version='0.1.0',
  description='Mutual reinforcement learning of different language models',
  license='Apache-2.0',
  packages=setuptools.find_packages(include=['mrl_jax', 'mrl_jax.*']),
  package_data={'mrl_jax.analysis.report': ['*.html', '*.css']},
  python_requires='>=3.11',
  install_requires=[
    'absl-py',
    'array_record',
    'flax>=0.12',
    'grain',
    'grpcio',
    'huggingface_hub',
    'importlib_resources',  # tensorflow-datasets needs it and does not say so.
    'jax>=0.10',
    'jinja2>=3.1.6',  # transformers needs it and does not say so.
    'matplotlib',
    'ml-collections',
    'msgspec',
    'numpy',
    'optax',
    'orbax-checkpoint',
    'rich',
    'safetensors',
    'tensorboardX',
    'tensorflow-datasets',
    'tokenizers',
    'transformers>=5',
  ],
  extras_require={
    'math': [_MATH],
    'bench': [
      "google-tunix==0.1.7; python_version >= '3.12'",
      *('torch==2.13.0', 'trl==1.16.*'),
    ],
    'parity': [
      *('gcp-storage-emulator', 'gcsfs', 'peft==0.21.*', 'torch==2.13.0')
    ],
    'test': [
      *('hypothesis', 'ipykernel', 'nbclient', 'pytest', 'trustme'),
      _MATH,
    ],
    # For work dirs in buckets of Google Cloud Storage.
    'gcs': ['gcsfs'],
    # On TPU VMs and, elsewhere, for `launch/plan.py --topology`.
    'tpu': ['jax[tpu]'],
    'lint': ['pre-commit', 'ruff==0.17.5'],
  },
)
