"""The parameters that policies start from: imported or random."""

from collections.abc import Callable, Mapping
import time

from flax import nnx
from jax.sharding import Mesh
import ml_collections
from rich import console as console_lib
from rich import progress

from mrl_jax import hugging_face
from mrl_jax.architecture import Lora
from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from mrl_jax.models import sharding
from mrl_jax.training import worker as worker_lib


def architecture(
  policy: ml_collections.ConfigDict,
  vocab_size: int,
  load_config: Callable[[str], Mapping] = hugging_face.load_config,
) -> ModelConfig:
  """The architecture of a policy: of the model at its path, or of its sizes.

  `load_config` maps a path to the Hugging Face config of the model there.
  Raises InputError if the decoder cannot compute the model at the path.
  """
  shared = ('dtype', 'param_dtype', 'remat', 'attention')
  fields = {key: policy.model[key] for key in shared}
  if policy.lora.rank:
    fields['lora'] = Lora(**policy.lora)
  if policy.path:
    values = load_config(policy.path)
    return families.from_hugging_face(values, **fields)
  return families.build(vocab_size=vocab_size, **{**policy.model, **fields})


def check(
  policies: ml_collections.ConfigDict, models: Mapping[str, ModelConfig]
) -> dict[str, str]:
  """Checks pretrained weights; returns their fingerprints by policy.

  Raises InputError if the weights at a path do not fit the model there.
  """
  folders = {
    name: hugging_face.weights_folder(policies[name].path)
    for name in models
    if policies[name].path
  }
  for name, folder in folders.items():
    hf_weights.check(folder, models[name])
  return {name: hf_weights.fingerprint(f) for name, f in folders.items()}


def freeze(
  workers: Mapping[str, worker_lib.Worker],
  config: ml_collections.ConfigDict,
  console: console_lib.Console,
) -> None:
  """Loads the frozen base weights that sit under LoRA adapters."""
  for name, worker in workers.items():
    if worker.spec.model.lora is not None:
      worker.freeze(_import(worker, config.policies[name].path, console))


def start(
  workers: Mapping[str, worker_lib.Worker],
  config: ml_collections.ConfigDict,
  console: console_lib.Console,
) -> None:
  """Initialises the trained parameters of policies: imported, or random."""
  for name, worker in workers.items():
    path = config.policies[name].path
    imported = path and worker.spec.model.lora is None
    worker.start_from(_import(worker, path, console) if imported else None)


def read(
  path: str,
  model: ModelConfig,
  mesh: Mesh,
  advance: Callable[[int], None] = lambda n: None,
) -> nnx.State:
  """Reads the model at a path, without adapters, onto a mesh.

  `advance` is called with the bytes of each tensor.
  """
  _, params, frozen = decoder.abstract(model)
  like = frozen if model.lora else params
  places = sharding.params(like, mesh)
  folder = hugging_face.weights_folder(path)
  return hf_weights.read(folder, model, like, places, advance)


def _import(worker, path, console) -> nnx.State:
  total = hf_weights.num_bytes(hugging_face.weights_folder(path))
  began = time.monotonic()
  columns = (
    progress.TextColumn('{task.description}'),
    progress.BarColumn(),
    progress.DownloadColumn(),
    progress.TransferSpeedColumn(),
  )
  with progress.Progress(*columns, console=console, transient=True) as bar:
    task = bar.add_task(f'weights of {worker.name}', total=total)
    params = read(
      path, worker.spec.model, worker.spec.mesh, lambda n: bar.advance(task, n)
    )
  seconds = time.monotonic() - began
  console.print(
    f'weights of {worker.name}: {total / 1e6:,.0f} MB from {path}, '
    f'{total / 1e6 / seconds:,.0f} MB/s',
    markup=False,
  )
  return params
