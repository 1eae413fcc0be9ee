"""Exports a policy from a checkpoint to a Hugging Face folder."""

import os

from flax import nnx
import jax
from jax.sharding import Mesh
import numpy as np
import optax

from mrl_jax import bucket
from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax import hugging_face
from mrl_jax import workdir as workdir_lib
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from mrl_jax.thl import byte_tokenizer
from mrl_jax.training import pretrained
from mrl_jax.update import checkpoint
from mrl_jax.update import state

DTYPES = ('float32', 'bfloat16', 'float16')


def export(
  workdir: str,
  name: str,
  out: str,
  *,
  rounds: int | None = None,
  dtype: str = '',
  adapters: bool = False,
  shard_bytes: int = 4 * 2**30,
) -> int:
  """Writes a policy for `transformers`, or its adapters for `peft`.

  Args:
    workdir: the work dir of a run, finished or not.
    name: the policy's name.
    out: the folder to write, which must not exist; all of it is written, or none.
    rounds: the rounds of the checkpoint; None is the newest.
    dtype: of the weights; by default as the model was imported, or as trained.
    adapters: writes the adapters alone, instead of merging them into the weights.
    shard_bytes: size of one file of weights, at most.

  Returns the rounds of the checkpoint. Raises InputError if there is no such
  run, policy or checkpoint, or if `out` exists.
  """
  checks.require(
    bool(out) and not os.path.lexists(out), f'--out={out} exists already'
  )
  home = bucket.WorkDir(workdir, inner=[workdir_lib.TOKENIZERS])
  policy, setup = _policy(home.folder, name)
  tokenizer = _tokenizer(policy, home.folder, setup.tokenizers[name])
  model = pretrained.architecture(
    policy, byte_tokenizer.load(tokenizer).vocab_size
  )
  if model.lora is None:
    checks.require(
      not adapters, f'{name} has no adapters; leave out --adapters'
    )
  else:
    weights = hugging_face.weights_folder(policy.path)
    checks.require(
      hf_weights.fingerprint(weights) == setup.weights[name],
      f'the weights at {policy.path} are not those that the adapters of {name} '
      'were trained on',
    )
  checks.require(
    not (adapters and dtype), f'adapters stay float32; leave out dtype={dtype}'
  )
  if not dtype:
    source = hugging_face.source_dtype(policy.path) if policy.path else None
    dtype = source or model.param_dtype
  checks.choose(dtype, dict.fromkeys(DTYPES), 'dtype')
  params, rounds = _trained(home, name, model, rounds)
  with files.new_folder(out) as folder:
    os.mkdir(folder)
    if adapters:
      hf_weights.write_adapters(folder, model, params, policy.path)
      return rounds
    if policy.path:
      hugging_face.copy_config(policy.path, tokenizer, folder, dtype)
    else:
      about = families.to_hugging_face(policy.model.family, model)
      hugging_face.save_config(about, tokenizer, folder, dtype)
    if model.lora is not None:
      base = pretrained.read(policy.path, model, _host())
      params = nnx.merge_state(base, params)
    hf_weights.write(folder, model, params, dtype, shard_bytes)
  return rounds


def _policy(workdir, name):
  """The config of a policy that was trained in the work dir, and its setup."""
  setup = workdir_lib.setup(workdir)
  checks.require(setup is not None, f'{workdir} is not the work dir of a run')
  policies = config_lib.nested(setup.config).policies
  policy = checks.choose(name, dict(policies), 'policy')
  checks.require(
    not (policy.address or policy.journal),
    f'{name} was not trained in {workdir}, but is '
    + (f'at {policy.address}' if policy.address else f'in {policy.journal}'),
  )
  return policy, setup


def _tokenizer(policy, workdir, stored) -> str:
  """The path of a policy's tokenizer; one trained by the run is in its folder."""
  if policy.path and not policy.tokenizer.path:
    return policy.path
  inside = os.path.join(workdir, stored)
  return inside if os.path.isdir(inside) else stored


def _trained(home, name, model, rounds) -> tuple[nnx.State, int]:
  spec = state.StateSpec(model=model, mesh=_host(), optimizer=optax.identity())
  folder = home.path(workdir_lib.CHECKPOINTS)
  return checkpoint.read_params(folder, rounds, name, spec.abstract().params)


def _host() -> Mesh:
  """A mesh of one device, whose memory the model must fit."""
  return Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), config_lib.MESH_AXES
  )
