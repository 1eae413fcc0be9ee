"""Parameters from and to the safetensors of a Hugging Face folder."""

from collections.abc import Callable, Mapping
import hashlib
import json
import os
from typing import NamedTuple

from flax import nnx
import jax
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from mrl_jax import checks
from mrl_jax import files
from mrl_jax.architecture import ModelConfig
from mrl_jax.models import hf_names
from mrl_jax.models import modules

WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_ADAPTER = 'adapter_model.safetensors'
_DTYPES = {'F32': 4, 'BF16': 2, 'F16': 2}
_SHOWN = 10  # Of each kind of mistake.
_SAMPLES, _SAMPLE = 256, 2**16  # Of a fingerprint: how many, and their bytes.


class Stored(NamedTuple):
  """A tensor in a file."""

  path: str
  shape: tuple[int, ...]
  dtype: str


def read(
  folder: str,
  config: ModelConfig,
  like: nnx.State,
  places: nnx.State,
  advance: Callable[[int], None] = lambda n: None,
) -> nnx.State:
  """The parameters in a folder, each sent to its place before the next is read.

  Args:
    folder: with `model.safetensors`, or shards and their index.
    config: of the model.
    like: the shapes and dtypes of the parameters, without adapters.
    places: the sharding of each.
    advance: told of the bytes of each that was read.

  Raises:
    InputError: lists all tensors that are missing, unknown or of another shape
      or type, and all files that cannot be read.
  """
  tensors, sizes = hf_names.tensors(config), modules.axis_sizes(config)
  stored = check(folder, config)

  def load(path, param, place):
    tensor = tensors['.'.join(map(str, path))]
    at = stored[tensor.name]
    # Opened for each: what a file has in memory is given back when it closes.
    with safetensors.safe_open(at.path, framework='numpy') as f:
      x = f.get_tensor(tensor.name)
    advance(x.nbytes)
    x = tensor.to_ours(x, sizes).astype(param.dtype, order='C')
    return param.replace(jax.device_put(x, place))

  flat = dict(nnx.to_flat_state(places))
  return nnx.map_state(
    lambda path, param: load(path, param, flat[path].get_value()), like
  )


def fingerprint(folder: str) -> str:
  """Differs for other weights: of each file its size, its header, and samples."""
  print = hashlib.sha256()
  for path in _paths(folder, []):
    size = os.path.getsize(path)
    print.update(f'{size};'.encode())
    with open(path, 'rb') as f:
      header = int.from_bytes(f.read(8), 'little')
      print.update(f.read(min(header, size)))
      for at in range(0, size, max(size // _SAMPLES, _SAMPLE)):
        f.seek(at)
        print.update(f.read(_SAMPLE))
  return print.hexdigest()[:16]


def num_bytes(folder: str) -> int:
  """Of all tensors in a folder; the files need not be sound."""
  return sum(os.path.getsize(path) for path in _paths(folder, []))


def check(folder: str, config: ModelConfig) -> dict[str, Stored]:
  """Where the model's tensors are; raises as `read` does, and reads none."""
  sizes = modules.axis_sizes(config)
  wanted = {t.name: t.shape(sizes) for t in hf_names.tensors(config).values()}
  damaged = []
  stored = {}
  for path in _paths(folder, damaged):
    stored |= _header(path, damaged)
  found = {
    name: at for name, at in stored.items() if not _ignored(name, config)
  }
  problems = {
    'damaged': damaged,
    'missing': [f'{n} {list(s)}' for n, s in wanted.items() if n not in found],
    'not in such a model': sorted({*found} - {*wanted}),
    'of another shape': [
      f'{name} {list(at.shape)}, should be {list(wanted[name])}'
      for name, at in found.items()
      if name in wanted and at.shape != wanted[name]
    ],
    'of a type that is not read (known: ' + ', '.join(_DTYPES) + ')': [
      f'{name} {at.dtype}'
      for name, at in found.items()
      if name in wanted and at.dtype not in _DTYPES
    ],
  }
  checks.require(
    not any(problems.values()),
    f'the weights in {folder} are not those of its config:\n'
    + '\n'.join(_listed(kind, all) for kind, all in problems.items() if all),
  )
  return found


def _listed(kind, problems) -> str:
  more = len(problems) - _SHOWN
  lines = problems[:_SHOWN] + ([f'and {more} more'] if more > 0 else [])
  return f'{len(problems)} {kind}:\n  ' + '\n  '.join(lines)


def _paths(folder, damaged) -> list[str]:
  """The files with weights; adds those that are not there to `damaged`."""
  index = os.path.join(folder, INDEX)
  path = os.path.join(folder, WEIGHTS)
  # Of both, transformers reads the one file.
  if os.path.exists(path) or not os.path.exists(index):
    checks.require(
      os.path.exists(path),
      f'{folder} has neither {WEIGHTS} nor {INDEX}. Other formats are not read '
      '(pickles are not safe to); transformers writes this one: '
      'AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)',
    )
    return [path]
  with open(index, encoding='utf-8') as f:
    try:
      names = {os.path.basename(n) for n in json.load(f)['weight_map'].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
      raise checks.InputError(
        f'{index} is not an index of safetensors: {error!r}'
      ) from error
  paths = []
  for name in sorted(names):
    path = os.path.join(folder, name)
    if os.path.exists(path):
      paths.append(path)
    else:
      damaged.append(f'{path} is not there, and the index names it')
  return paths


def _header(path, damaged) -> dict[str, Stored]:
  """What a file says it holds; a mistake is added to `damaged`."""
  try:
    with safetensors.safe_open(path, framework='numpy') as f:
      slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
      return {
        name: Stored(path, tuple(s.get_shape()), s.get_dtype())
        for name, s in slices.items()
      }
  except (safetensors.SafetensorError, OSError) as error:
    damaged.append(f'{path}: {error}')
    return {}


def _ignored(name, config) -> bool:
  """Copies of the embeddings, and constants that old files have."""
  tied = name == 'lm_head.weight' and config.tie_embeddings
  return tied or name.endswith('.rotary_emb.inv_freq')


def write(
  folder: str,
  config: ModelConfig,
  params: nnx.State,
  dtype: str,
  shard_bytes: int,
) -> None:
  """Writes a model, adapters merged, in shards with an index if there are many.

  Args:
    folder: that exists.
    config: of the model.
    params: all of its parameters, and its adapters'.
    dtype: 'float32', 'bfloat16' or 'float16'.
    shard_bytes: at most in one file, unless a tensor has more.
  """
  tensors, sizes = hf_names.tensors(config), modules.axis_sizes(config)
  flat = {'.'.join(map(str, k)): v for k, v in nnx.to_flat_state(params)}
  itemsize = np.dtype(dtype).itemsize
  shards = _shards(
    {path: flat[path].size * itemsize for path in tensors}, shard_bytes
  )
  where = {}
  for i, paths in enumerate(shards, start=1):
    name = WEIGHTS
    if len(shards) > 1:
      name = f'model-{i:05}-of-{len(shards):05}.safetensors'
    arrays = {}
    for path in paths:
      x = merged(path, flat, config).astype(dtype)
      x = tensors[path].to_theirs(x, sizes)
      arrays[tensors[path].name] = np.ascontiguousarray(x)
    _save(arrays, os.path.join(folder, name))
    where |= dict.fromkeys(arrays, name)
  if len(shards) > 1:
    total = sum(flat[path].size for path in tensors) * itemsize
    index = {'metadata': {'total_size': total}, 'weight_map': where}
    files.write(os.path.join(folder, INDEX), json.dumps(index, indent=2))


def write_adapters(
  folder: str, config: ModelConfig, params: nnx.State, base: str
) -> None:
  """Writes the adapters as PEFT does.

  Args:
    folder: that exists.
    config: of the model.
    params: its adapters.
    base: the name or path of the model under them.
  """
  tensors, sizes = hf_names.adapters(config), modules.axis_sizes(config)
  arrays = {
    tensors['.'.join(map(str, path))]: np.asarray(x.get_value())
    for path, x in nnx.to_flat_state(params)
  }
  _save(
    {
      tensor.name: np.ascontiguousarray(tensor.to_theirs(x, sizes))
      for tensor, x in arrays.items()
    },
    os.path.join(folder, _ADAPTER),
  )
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


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
  """Cuts the tensors, in their order, into files of at most so many bytes."""
  shards, room = [], 0
  for path, size in sizes.items():
    if size > room:
      shards.append([])
      room = most
    shards[-1].append(path)
    room -= size
  return shards


def merged(path, flat, config) -> np.ndarray:
  """A parameter, with what its adapter adds to it."""
  x = np.asarray(flat[path].get_value())
  adapter = path.removesuffix('weight') + 'adapter.'
  if f'{adapter}a' not in flat:
    return x
  a, b = (np.asarray(flat[adapter + n].get_value()) for n in 'ab')
  scale = config.lora.alpha / config.lora.rank
  return x.astype(np.float32) + np.tensordot(a, b, 1) * np.float32(scale)
