"""What policies need, from the config: their devices, and how they train.

A plan needs neither data nor weights: `without_data` replaces what would be
read from them.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
from typing import NamedTuple

import jax
from jax.sharding import Mesh
import ml_collections

from mrl_jax import algorithms
from mrl_jax import cluster
from mrl_jax import config as config_lib
from mrl_jax import hugging_face
from mrl_jax import workdir as workdir_lib
from mrl_jax.architecture import ModelConfig
from mrl_jax.models import decoder
from mrl_jax.models import public
from mrl_jax.mwra import layouts
from mrl_jax.mwra import meshes
from mrl_jax.mwra import planner
from mrl_jax.mwra import sizes as sizes_lib
from mrl_jax.sampling import drawing
from mrl_jax.thl import byte_tokenizer
from mrl_jax.training import inputs
from mrl_jax.training import packing
from mrl_jax.training import pretrained
from mrl_jax.update import objectives as objectives_lib
from mrl_jax.update import optimizer
from mrl_jax.update import state

LoadConfig = Callable[[str], Mapping]  # From a path to a Hugging Face config.


class Sizes(NamedTuple):
  """What a plan needs to know of a policy's data and tokenizer."""

  context: int  # C, prompt positions.
  vocabulary: int  # Number of tokens of a random model.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """How a policy trains, on its mesh."""

  spec: state.StateSpec
  decode_mesh: Mesh  # The devices of `spec.mesh` while sampling.
  # What is maximised on each kind of rows.
  objectives: Mapping[str, objectives_lib.Objective]
  packer: packing.Packer
  rescores: bool  # Whether denominators of own ratios are by the trainer.


def without_data(config: ml_collections.ConfigDict) -> dict[str, Sizes]:
  """The sizes of policies whose prompts are as long as the config allows."""
  context = inputs.context(config.sample.max_prompt_tokens)
  return {
    name: Sizes(context, _vocabulary(config.policies[name]))
    for name in config_lib.trained_here(config)
  }


def _vocabulary(policy) -> int:
  if policy.tokenizer.path and not policy.path:
    return byte_tokenizer.load(policy.tokenizer.path).vocab_size
  return policy.tokenizer.vocab_size


def load_config(path: str) -> dict:
  """The Hugging Face config of a model: of a folder, shipped, or of the hub.

  Raises InputError if there is none.
  """
  if path in public.CONFIGS and not os.path.isdir(path):
    return hugging_face.with_defaults(public.CONFIGS[path])
  return hugging_face.load_config(path)


def plan(
  config: ml_collections.ConfigDict,
  method: algorithms.Method,
  sizes: Mapping[str, Sizes],
  devices: Sequence[jax.Device],
  load_config: LoadConfig = hugging_face.load_config,
) -> planner.Plan:
  """Plans the devices of the policies that have `sizes`.

  Raises InputError if they do not fit.
  """
  models, shapes = {}, {}
  for name, (context, vocabulary) in sizes.items():
    models[name] = pretrained.architecture(
      config.policies[name], vocabulary, load_config
    )
    shapes[name] = _round_shape(config, method, name, models[name], context)
  chip = meshes.chip(devices)
  # Of the devices of other processes, memory is not known.
  known = cluster.gather('the plan', chip.hbm_bytes)
  return planner.plan(
    models,
    shapes,
    meshes.topology(devices),
    dataclasses.replace(chip, hbm_bytes=min(known)),
    choices=layouts.Choices(
      data=config.mwra.data,
      tensor=config.mwra.tensor,
      decode_tensor=config.mwra.decode_tensor,
      micro_rows=config.train.micro_rows,
      sample_batch=config.sample.batch,
    ),
    time_share=config.mwra.time_share,
  )


def _round_shape(config, method, name, model, context) -> sizes_lib.RoundShape:
  train, own = config.train, config.train.prompts * config.train.samples
  by_trainer = _by_trainer(config, method, model)
  corrected = config.method.correction.level != 'none'
  trains_on_peers = 'peer' in method.objectives(by_trainer)
  peers = peer_rows(config, name)
  _, params, _ = decoder.abstract(model)
  return sizes_lib.RoundShape(
    prompts=train.prompts,
    samples=train.samples,
    mini_batches=train.mini_batches,
    peer_rows=trains_on_peers * peers,
    scored_rows=own * ((by_trainer or corrected) + method.reference),
    scored_peer_rows=scores_peers(config, method) * peers,
    evaluated=(config.eval.batch, config.eval.samples),
    prompt_tokens=context,
    response_tokens=config.sample.max_tokens,
    peer_tokens=config.thl.max_tokens,
    logit_chunk=train.logit_chunk,
    packed_tokens=train.packed_tokens,
    moment_bytes=optimizer.moment_bytes(train.optimizer, params),
    whole_matrices=train.optimizer.name == 'muon',
    reference=method.reference,
  )


def peer_rows(config: ml_collections.ConfigDict, name: str) -> int:
  """The most rows of its peers that a policy can have in a round."""
  heard = len(config_lib.listens_to(config.policies)[name])
  groups = min(heard, config.method.max_peer_groups or heard)
  return config.train.prompts * config.train.samples * groups


def scores_peers(config: ml_collections.ConfigDict, method) -> bool:
  """Whether policies score the rows of peers."""
  prp = method.parts.how == 'prp'
  return method.parts.how == 'graft' or (
    prp and config.method.prp.denominators != 'behaviour'
  )


def settled(
  config: ml_collections.ConfigDict, part: planner.Slice
) -> ml_collections.ConfigDict:
  """A copy of a run's config, with what the plan of one policy chose for it."""
  config = config.copy_and_resolve_references()
  config.train.micro_rows = part.layout.micro_rows
  most = max(config.train.prompts, config.eval.batch)
  if config.sample.batch or part.layout.sample_batch < most:
    config.sample.batch = part.layout.sample_batch
  return config


def training(
  config: ml_collections.ConfigDict,
  method: algorithms.Method,
  model: ModelConfig,
  placed: meshes.Meshes,
  context: int,
) -> Training:
  """How a policy of this architecture trains, with `context` prompt positions."""
  train = config.train
  by_trainer = _by_trainer(config, method, model)
  objectives = method.objectives(by_trainer)
  return Training(
    spec=state.StateSpec(
      model=model,
      mesh=placed.train,
      optimizer=optimizer.build(
        train.optimizer, train.rounds * train.mini_batches
      ),
      reference=method.reference,
    ),
    decode_mesh=placed.decode,
    objectives=objectives,
    # A correction has scored the rows already.
    rescores=by_trainer and config.method.correction.level == 'none',
    packer=packing.Packer(
      context=context,
      lengths={
        'own': config.sample.max_tokens,
        'peer': config.thl.max_tokens,
      },
      train=train,
      ways=placed.train.shape['data'] * placed.train.shape['fsdp'],
      peer_average=method.peer_average,
      keep_all=method.reference or objectives['own'].reads_entropy,
      reference=method.reference,
    ),
  )


def density(sample: ml_collections.ConfigDict) -> drawing.Density:
  """What tokens to train on are drawn from, by `config.sample`."""
  return drawing.Density(
    temperature=sample.temperature,
    top_k=sample.top_k,
    top_p=sample.top_p,
    min_p=sample.min_p,
  )


def _by_trainer(config, method, model) -> bool:
  """Whether denominators of own ratios are by the trainer, not the sampler."""
  if config.train.old_logp != 'auto':
    return config.train.old_logp == 'trainer'
  differs = model.dtype != 'float32' or model.lora is not None
  differs |= density(config.sample).is_filtered
  return differs or method.parts.ratio == 'sequence'


def describe(
  config: ml_collections.ConfigDict,
  plan: planner.Plan,
  devices: Sequence[jax.Device],
) -> workdir_lib.Plan:
  """The plan, for `plan.json` and the terminal."""
  policies = config.policies
  reasons = planner.explain(plan, meshes.topology(devices))
  return workdir_lib.Plan(
    devices=f'{len(devices)} x {devices[0].device_kind}',
    policies={
      name: workdir_lib.PolicyPlan(
        model=policy.path or policy.model.family,
        tokenizer=policy.tokenizer.path or policy.path or policy.tokenizer.kind,
        parameters=part.cost.params,
        adapters=part.cost.adapters,
        vocabulary=part.model.vocab_size,
        devices=list(part.devices),
        mesh=dict(zip(config_lib.MESH_AXES, part.layout.train, strict=True)),
        decode_mesh=dict(
          zip(config_lib.MESH_AXES, part.layout.decode, strict=True)
        ),
        micro_rows=part.layout.micro_rows,
        sample_batch=part.layout.sample_batch,
        remat=part.layout.remat,
        memory_bytes=part.cost.peak_bytes,
        seconds=part.cost.seconds,
        load=part.load,
        reason=reasons[name],
      )
      for name, part in plan.items()
      for policy in [policies[name]]
    },
    elsewhere={
      name: f'at {policy.address}'
      if policy.address
      else f'from {policy.journal}'
      for name, policy in policies.items()
      if policy.address or policy.journal
    },
  )
