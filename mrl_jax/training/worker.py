"""A policy at work on its own mesh: it samples, scores and updates."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools

from flax import nnx
import jax
from jax.sharding import Mesh
import ml_collections
import numpy as np

from mrl_jax import cluster
from mrl_jax import records
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding
from mrl_jax.rewards import functions
from mrl_jax.rewards import judge as judge_lib
from mrl_jax.sampling import drawing
from mrl_jax.sampling import move
from mrl_jax.sampling import sampler
from mrl_jax.sampling import slots
from mrl_jax.sharing import grpo
from mrl_jax.sharing import rows as rows_lib
from mrl_jax.training import inputs
from mrl_jax.training import packing
from mrl_jax.training import rollouts as rollouts_lib
from mrl_jax.update import objectives as objectives_lib
from mrl_jax.update import state as state_lib
from mrl_jax.update import update

# Micro-batches of own and of peers' rows, by the name of their objective.
MiniBatch = dict[str, list[objectives_lib.PackedRows]]


@dataclasses.dataclass(eq=False, kw_only=True)
class Worker:
  """One policy on its mesh: its state, and the programs it compiled.

  `state` is the policy's `TrainState`, sharded over the mesh; it has only
  shapes and shardings until `start_from`. `frozen` has the base weights under
  LoRA adapters, if there are any.
  """

  name: str
  policy: inputs.PolicyInputs
  judge: judge_lib.Judge
  spec: state_lib.StateSpec
  # The devices of `spec.mesh` while sampling, when the fsdp axis has size 1.
  decode_mesh: Mesh
  # What is maximised on each kind of rows.
  objectives: Mapping[str, objectives_lib.Objective]
  packer: packing.Packer
  rescores: bool  # Whether denominators of own ratios are by the trainer.
  key: jax.Array  # The random key of all sampling.
  config: ml_collections.ConfigDict  # Of the run.

  def __post_init__(self):
    self.key, self._init_key = jax.random.split(self.key)
    self.state = self.spec.abstract()
    model, mesh = self.spec.model, self.spec.mesh
    chunk = self.config.train.logit_chunk
    temperature = self.config.sample.temperature
    self._move, self._move_frozen = (
      move.build(model, mesh, self.decode_mesh, part) for part in (0, 1)
    )
    if model.lora is None:
      self.freeze(decoder_lib.NO_PARAMS)
    self._sampler = functools.cache(self._build_sampler)
    # The share of slots with a token, of the last completions.
    self.sampled_slots = 0.0
    self.updater = update.Update(self.spec, self.objectives, chunk, temperature)
    self.scorer = update.build_scorer(model, mesh, chunk, temperature)

  def freeze(self, params: nnx.State) -> None:
    """Sets the base weights that stay as they are under LoRA adapters."""
    self.frozen = params
    # Under LoRA the base never changes, and its sampling copy stays resident.
    self._frozen_to_decode = self._move_frozen(params)

  def start_from(self, params: nnx.State | None = None) -> None:
    """Resets the state to these parameters, by default random ones."""
    if params is None:
      params = self.spec.random_params(self._init_key)
    self.state = self.spec.fresh(params)

  def sample(
    self,
    prompts: Sequence[records.Prompt],
    per_prompt: int,
    key: jax.Array,
    density: drawing.Density,
    run: str,
    round: int,
    batch: int = 0,
  ) -> list[list[records.Rollout]]:
    """Samples and judges completions; returns a group for each prompt.

    Args:
      prompts: what to complete.
      per_prompt: G, completions of each.
      key: the random key.
      density: what tokens are drawn from.
      run: the name of the run in the records.
      round: the round that they are of.
      batch: prompts that are sampled at a time; 0 is all, as far as memory
        allows. It does not change the completions.
    """
    sample = self.sampler_for(len(prompts), per_prompt, density, batch)
    prompt_ids = [self.policy.prompt_ids(prompt) for prompt in prompts]
    cluster.agree(
      f'sampling of {self.name}',
      {'prompts': prompt_ids, 'random key': np.array(jax.random.key_data(key))},
    )
    finished = sample(
      self._move(self.state.params),
      self._frozen_to_decode,
      prompt_ids,
      key,
      rollouts_lib.ends(self.policy.tokenizer, self.config.sample.stop),
    )
    completions = [*itertools.chain.from_iterable(finished)]
    self.sampled_slots = sample.real / sample.used
    rollouts = rollouts_lib.of_completions(
      completions,
      records.Header(
        run=run,
        round=round,
        policy=self.name,
        prompt='',
        sample=0,
        version=int(self.state.step),
        tokenizer=self.policy.tokenizer.fingerprint,
        created=0.0,
      ),
      prompts,
      self.policy.tokenizer,
      density,
      self.config.train.mask_truncated,
    )
    judgements = self.judge_responses(
      prompts,
      [
        (row // per_prompt, r.payload, r.finish, len(r.ids))
        for row, r in enumerate(rollouts)
      ],
    )
    return [
      grpo.judged(rollouts[i : i + per_prompt], judgements[i : i + per_prompt])
      for i in range(0, len(rollouts), per_prompt)
    ]

  def sampler_for(
    self, prompts: int, per_prompt: int, density: drawing.Density, batch: int
  ) -> sampler.Sampler:
    """What samples so many prompts; see `sample`."""
    batch = min(batch or prompts, self.config.sample.batch or prompts)
    return self._sampler(per_prompt, density, batch)

  def pack(
    self, prompts: Sequence[records.Prompt], batch: rows_lib.Batch
  ) -> list[MiniBatch]:
    """Packs the rows of a round into mini-batches."""
    prompt_ids = [self.policy.prompt_ids(prompt) for prompt in prompts]
    return self.packer.mini_batch_parts(prompt_ids, batch)

  def rescore(self, mini_batches: Sequence[MiniBatch]) -> list[jax.Array]:
    """Replaces the sampler's log-probabilities of own rows by the trainer's.

    Not those of the first mini-batch: its update scores it by itself. Does
    nothing if the sampler's are to be used. The device may still be working on
    the log-probabilities that this returns.
    """
    logps, place = [], sharding.rows(self.spec.mesh)
    for parts in mini_batches[1:] if self.rescores else ():
      own = parts['own']
      scores = self._scores(self.state.params, own)
      scores = [sharding.put(logp_BS, place) for logp_BS in scores]
      parts['own'] = [
        dataclasses.replace(rows, old_logp_BS=logp_BS)
        for rows, logp_BS in zip(own, scores, strict=True)
      ]
      logps += scores
    return logps

  def _scores(self, params, micro_batches) -> list[jax.Array]:
    mesh = self.spec.mesh
    with jax.set_mesh(mesh):
      return [
        self.scorer(params, self.frozen, update.placed(rows, mesh))
        for rows in micro_batches
      ]

  def update(
    self, mini_batches: Sequence[MiniBatch]
  ) -> list[dict[str, list[jax.Array]]]:
    """Updates the state on every mini-batch.

    Returns the statistics of its micro-batches, see `update.Update`; the device
    may still be working on them.
    """
    cluster.agree(
      f'the update of {self.name}',
      {f'mini-batch {i}': parts for i, parts in enumerate(mini_batches)},
    )
    statistics = []
    for parts in mini_batches:
      self.state, found = self.updater(self.state, parts, self.frozen)
      statistics.append(found)
    return statistics

  def score(
    self,
    prompts: Sequence[records.Prompt],
    rows: Sequence[rows_lib.Row],
    reference: bool = False,
  ) -> list[np.ndarray]:
    """Log-probabilities of each row by the policy or its reference, f32 [T]."""
    if not rows:
      return []
    prompt_ids = [self.policy.prompt_ids(prompt) for prompt in prompts]
    part = self.packer.part(prompt_ids, rows)
    packed = self.packer.pack(prompt_ids, [(row, 1.0) for row in rows], part)
    params = self.state.reference if reference else self.state.params
    scores = jax.device_get(self._scores(params, packed))
    return self.packer.unpack(prompt_ids, rows, part, scores)

  def judge_responses(
    self,
    prompts: Sequence[records.Prompt],
    responses: Sequence[tuple[int, bytes, records.Finish, int]],
  ) -> list[judge_lib.Judgement]:
    """Judges responses to prompts; see `sharing.context.Context.judge`."""
    return cluster.decided(
      f'verification for {self.name}',
      lambda: self.judge(
        [
          functions.completion(payload, finish, tokens, prompts[prompt])
          for prompt, payload, finish, tokens in responses
        ]
      ),
      list[judge_lib.Judgement],
    )

  def _build_sampler(self, per_prompt, density, batch):
    settings = slots.Settings(
      samples=per_prompt,
      length=self.packer.lengths['own'],
      stop_ids=self.policy.tokenizer.stop_ids,
      density=density,
    )
    return sampler.Sampler(
      self.spec.model,
      self.decode_mesh,
      settings,
      prompts=batch,
      context=self.packer.context,
    )
