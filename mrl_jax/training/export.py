"""From a run's checkpoint to a folder that Hugging Face's libraries load."""

import os

from flax import nnx
import jax
from jax.sharding import Mesh
import ml_collections
import numpy as np

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import files
from mrl_jax import hugging_face
from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from mrl_jax.models import sharding
from mrl_jax.thl import byte_tokenizer
from mrl_jax.training import job
from mrl_jax.training import pretrained
from mrl_jax.update import checkpoint

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
  """Writes a policy as `transformers`, or its adapters as `peft`, loads it.

  Args:
    workdir: of a run, finished or not.
    name: of the policy.
    out: a folder that is not there yet; it is there whole, or not at all.
    rounds: those of the checkpoint; None is the newest.
    dtype: of the weights; '' is that of the model it came from, or else of its
      parameters.
    adapters: only them, as PEFT writes them; otherwise they are merged.
    shard_bytes: at most in one file of weights.

  Returns:
    The rounds of the checkpoint.

  Raises:
    InputError: there is no such run, policy or checkpoint, or `out` is there.
  """
  checks.require(
    bool(out) and not os.path.lexists(out), f'--out={out} is there already'
  )
  policy, tokenizer, model = _checked(workdir, name, adapters)
  checks.require(
    not (adapters and dtype), f'adapters stay float32; leave out dtype={dtype}'
  )
  if not dtype:
    source = hugging_face.source_dtype(policy.path) if policy.path else None
    dtype = source or model.param_dtype
  checks.choose(dtype, dict.fromkeys(DTYPES), 'dtype')
  params, rounds = _trained(workdir, name, model, rounds)
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


def _checked(
  workdir, name, adapters
) -> tuple[ml_collections.ConfigDict, str, ModelConfig]:
  """A policy's config, the path of its tokenizer, and its decoder."""
  values = job.claimed(workdir)
  checks.require(values is not None, f'{workdir} is not the work dir of a run')
  checks.require(
    {job.TOKENIZERS, job.WEIGHTS} <= {*values},
    f'{workdir} was written by an earlier version, and cannot be exported',
  )
  config = config_lib.nested(
    {k: v for k, v in values.items() if k not in job.NOT_CONFIG}
  )
  policy = checks.choose(name, dict(config.policies), 'policy')
  peer = config.see.peers[name]
  checks.require(
    not (peer.address or peer.journal),
    f'{name} was not trained in {workdir}, but is '
    + (f'at {peer.address}' if peer.address else f'in {peer.journal}'),
  )
  tokenizer = _tokenizer(policy, workdir, values[job.TOKENIZERS][name])
  rows = byte_tokenizer.load(tokenizer).vocab_size
  model = pretrained.architecture(policy, rows)
  checks.require(
    model.lora is not None or not adapters,
    f'{name} has no adapters; export it whole',
  )
  if model.lora is not None:
    found = hf_weights.fingerprint(hugging_face.weights_folder(policy.path))
    checks.require(
      found == values[job.WEIGHTS][name],
      f'the weights at {policy.path} are not those that {name} adapted',
    )
  return policy, tokenizer, model


def _tokenizer(policy, workdir, stored) -> str:
  """The path of a policy's tokenizer, which may be within the work dir."""
  if policy.path and not policy.tokenizer.path:
    return policy.path
  inside = os.path.join(workdir, stored)
  return inside if os.path.isdir(inside) else stored


def _trained(workdir, name, model, rounds) -> tuple[nnx.State, int]:
  """What was trained, and for how many rounds."""
  _, params, _ = decoder.abstract(model)
  like = jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    params,
    sharding.params(params, _host(), sharding.TRAIN),
  )
  folder = os.path.join(workdir, checkpoint.FOLDER)
  return checkpoint.read_params(folder, rounds, name, like)


def _host() -> Mesh:
  """One device, so that what is exported has to fit its memory."""
  return Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), config_lib.MESH_AXES
  )
