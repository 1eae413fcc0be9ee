"""Reads and writes parameters as safetensors in Hugging Face folders."""

import collections
from collections.abc import Callable
import hashlib
import json
import os

from flax import nnx
import huggingface_hub
import jax
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from mrl_jax import checks
from mrl_jax import files
from mrl_jax import parameters
from mrl_jax.architecture import ModelConfig

WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_DTYPES = ('F32', 'BF16', 'F16')
_SHOWN = 10  # Problems of each kind that an error lists.
# The most samples of a file that its fingerprint reads, and their size.
_SAMPLES, _SAMPLE_BYTES = 256, 2**16


def read(
  folder: str,
  config: ModelConfig,
  like: nnx.State,
  places: nnx.State,
  advance: Callable[[int], None] = lambda n: None,
) -> nnx.State:
  """Reads parameters, and sends each to its devices before reading the next.

  Every process reads the shards of its own devices.

  Args:
    folder: has `model.safetensors`, or shards and their index.
    config: the model's architecture.
    like: shapes and dtypes of the parameters, without adapters.
    places: the sharding of each parameter.
    advance: called with the number of bytes of every part that was read.

  Raises InputError, which lists all tensors that are missing, unknown or of an
  unexpected shape or type, and all files that cannot be read.
  """
  tensors, paths = parameters.tensors(config), check(folder, config)
  flat_places = _flat(places)

  def load(path, param):
    name = '.'.join(map(str, path))
    tensor, place = tensors[name], flat_places[name].get_value()

    def read_part(bounds):
      # Opened for each part: closing the file frees its mapped memory.
      with safetensors.safe_open(paths[tensor.name], framework='numpy') as f:
        if place.is_fully_replicated:
          x = f.get_tensor(tensor.name)
        else:
          x = f.get_slice(tensor.name)[tuple(slice(*b) for b in bounds)]
      advance(x.nbytes)
      return tensor.to_ours(x).astype(param.dtype, order='C')

    devices = collections.defaultdict(list)  # Several may have the same part.
    indices = place.addressable_devices_indices_map(param.shape)
    for device, index in indices.items():
      devices[tensor.bounds(index)].append(device)
    shards = []
    for bounds, those in devices.items():
      part = read_part(bounds)
      shards += [jax.device_put(part, device) for device in those]
    return param.replace(
      jax.make_array_from_single_device_arrays(param.shape, place, shards)
    )

  return nnx.map_state(load, like)


def fingerprint(folder: str) -> str:
  """A digest of the size, the header and samples of every file of weights."""
  digest = hashlib.sha256()
  for path in _paths(folder):
    size = os.path.getsize(path)
    digest.update(f'{size};'.encode())
    with open(path, 'rb') as f:
      header = int.from_bytes(f.read(8), 'little')
      digest.update(f.read(min(header, size)))
      for at in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
        f.seek(at)
        digest.update(f.read(_SAMPLE_BYTES))
  return digest.hexdigest()[:16]


def num_bytes(folder: str) -> int:
  """Bytes of all files with weights."""
  return sum(map(os.path.getsize, _paths(folder)))


def check(folder: str, config: ModelConfig) -> dict[str, str]:
  """The file of every tensor, by the tensor's name; raises as `read` does."""
  wanted = {t.name: list(t.shape) for t in parameters.tensors(config).values()}
  paths, problems = {}, collections.defaultdict(list)
  for path in _paths(folder):
    try:
      header = _header(path)
    except (safetensors.SafetensorError, OSError) as error:
      problems['damaged'].append(f'{path}: {error}')
      continue
    for name, (shape, dtype) in header.items():
      if name in wanted:
        paths[name] = path
        if shape != wanted[name]:
          problems['of another shape'].append(
            f'{name} {shape}, should be {wanted[name]}'
          )
        if dtype not in _DTYPES:
          kind = f'of an unsupported type (supported: {", ".join(_DTYPES)})'
          problems[kind].append(f'{name} {dtype}')
      # Files may have a copy of tied embeddings, and constants of positions.
      elif name != 'lm_head.weight' and not name.endswith('.inv_freq'):
        problems['not part of the model'].append(name)
  missing = [f'{name} {wanted[name]}' for name in wanted if name not in paths]
  if missing:
    problems['missing'] = missing
  lines = [f'the weights in {folder} do not fit its config:']
  for kind, tensors in problems.items():
    lines += [f'{len(tensors)} {kind}:', *(f'  {x}' for x in tensors[:_SHOWN])]
    if len(tensors) > _SHOWN:
      lines.append(f'  and {len(tensors) - _SHOWN} more')
  checks.require(not problems, '\n'.join(lines))
  return paths


def _paths(folder) -> list[str]:
  path, index = (os.path.join(folder, name) for name in (WEIGHTS, INDEX))
  if os.path.exists(path):  # If both exist, transformers reads the single file.
    return [path]
  checks.require(
    os.path.exists(index),
    f'{folder} has neither {WEIGHTS} nor {INDEX}. Other formats are not read, '
    'because pickles are not safe; transformers writes this one: '
    'AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)',
  )
  try:
    with open(index, encoding='utf-8') as f:
      names = {os.path.basename(n) for n in json.load(f)['weight_map'].values()}
  except (ValueError, KeyError, AttributeError, TypeError) as error:
    raise checks.InputError(
      f'{index} is not an index of safetensors: {error!r}'
    ) from error
  return [os.path.join(folder, name) for name in sorted(names)]


def _header(path) -> dict[str, tuple[list[int], str]]:
  """The shape and the type of every tensor in a file."""
  with safetensors.safe_open(path, framework='numpy') as f:
    slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
    return {name: (x.get_shape(), x.get_dtype()) for name, x in slices.items()}


def write(
  folder: str,
  config: ModelConfig,
  params: nnx.State,
  dtype: str,
  shard_bytes: int,
) -> None:
  """Writes a model into an existing folder, its adapters merged.

  Args:
    folder: gets `model.safetensors`, or shards and their index.
    config: the model's architecture.
    params: all parameters, adapters included.
    dtype: 'float32', 'bfloat16' or 'float16'.
    shard_bytes: the most bytes in a file; a larger tensor has its own file.
  """
  flat, itemsize = _flat(params), np.dtype(dtype).itemsize
  tensors = {
    t.name: (path, t) for path, t in parameters.tensors(config).items()
  }
  split = huggingface_hub.split_state_dict_into_shards_factory(
    tensors,
    get_storage_size=lambda tensor: flat[tensor[0]].size * itemsize,
    filename_pattern='model{suffix}.safetensors',
    max_shard_size=shard_bytes,
  )
  for filename, names in split.filename_to_tensors.items():
    arrays = {}
    for name in names:
      path, tensor = tensors[name]
      arrays[name] = tensor.to_theirs(merged(path, flat, config).astype(dtype))
    _save(arrays, os.path.join(folder, filename))
  if split.is_sharded:
    index = {'metadata': split.metadata, 'weight_map': split.tensor_to_filename}
    files.write(os.path.join(folder, INDEX), json.dumps(index, indent=2))


def write_adapters(
  folder: str, config: ModelConfig, params: nnx.State, base: str
) -> None:
  """Writes the adapters `params` into an existing folder, as PEFT does.

  `base` is the name or path of the base model.
  """
  tensors = parameters.adapters(config)
  arrays = {
    tensors[path].name: tensors[path].to_theirs(np.asarray(x.get_value()))
    for path, x in _flat(params).items()
  }
  _save(arrays, os.path.join(folder, 'adapter_model.safetensors'))
  about = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': config.lora.rank,
    'lora_alpha': config.lora.alpha,
    'target_modules': list(config.lora.target_modules),
    'lora_dropout': 0.0,
    'bias': 'none',
    'inference_mode': True,
  }
  files.write(
    os.path.join(folder, 'adapter_config.json'), json.dumps(about, indent=2)
  )


def _save(arrays, path):
  safetensors_numpy.save_file(arrays, path, metadata={'format': 'pt'})


def _flat(state) -> dict[str, nnx.Variable]:
  """The variables of a state by path, such as 'blocks.0.mlp.up.weight'."""
  return {'.'.join(map(str, k)): v for k, v in nnx.to_flat_state(state)}


def merged(path, flat, config) -> np.ndarray:
  """The parameter at `path`, plus the product of its adapter if it has one."""
  x = np.asarray(flat[path].get_value())
  adapter = path.removesuffix('weight') + 'adapter.'
  if f'{adapter}a' not in flat:
    return x
  a, b = (np.asarray(flat[adapter + n].get_value()) for n in 'ab')
  scale = config.lora.alpha / config.lora.rank
  return x.astype(np.float32) + np.tensordot(a, b, 1) * np.float32(scale)
