"""A policy at work on its own mesh: it samples, and learns."""

from collections.abc import Mapping, Sequence
import functools
import math
import time
from typing import NamedTuple

from flax import nnx
import jax
from jax.sharding import Mesh
import msgspec
import numpy as np
import optax

from mrl_jax import records
from mrl_jax.architecture import ModelConfig
from mrl_jax.data import prompts as prompts_lib
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import sharding
from mrl_jax.rewards import functions
from mrl_jax.sampling import sampler
from mrl_jax.sharing import grpo
from mrl_jax.sharing import lesson as lesson_lib
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer
from mrl_jax.training import packing as batch
from mrl_jax.update import state as state_lib
from mrl_jax.update import update


class Sampling(NamedTuple):
  """Completions on their way from the device, of `size` prompts a part."""

  prompts: Sequence[records.Prompt]
  parts: Sequence[sampler.Samples]
  size: int
  per_prompt: int
  temperature: float


def _joined(sampling: Sampling) -> sampler.Samples:
  """The samples of all prompts in one, those of the first prompt first."""
  rows = sampling.size * sampling.per_prompt
  # What was missing at the end of the last part was filled up behind it.
  parts = [
    jax.tree.map(lambda x: x[:rows], part)
    for part in jax.device_get(sampling.parts)
  ]
  return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


class Worker:
  """One policy: its tokenizer, its mesh, its state and what it compiled.

  Attributes:
    name: of the policy.
    model: its architecture.
    tokenizer: its vocabulary.
    template: what it reads around a prompt.
    mesh: its devices.
    optimizer: of `state`.
    packer: the shapes that it trains on.
    state: its `TrainState`, sharded over the mesh; only shapes until it starts.
    frozen: the parameters that its adapters leave, where it has adapters.
    key: the random key that all its sampling derives from.
  """

  def __init__(
    self,
    name: str,
    *,
    model: ModelConfig,
    tokenizer: byte_tokenizer.ByteTokenizer,
    template: prompts_lib.Template,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    objectives: dict[str, update.Objective],
    packer: batch.Packer,
    logit_chunk: int,
    mask_truncated: bool,
    overlong_tokens: int = 0,
    key: jax.Array,
    entropy_weight: float = 0.0,
    reference: bool = False,
    sample_batch: int = 0,
  ):
    self.name, self.model, self.mesh = name, model, mesh
    self.tokenizer, self.template = tokenizer, template
    self.optimizer, self.packer = optimizer, packer
    self._reference, self._sample_batch = reference, sample_batch
    self.key, self._init_key = jax.random.split(key)
    self.state = state_lib.abstract(model, optimizer, mesh, reference)
    self._cast = jax.jit(functools.partial(decoder_lib.cast, dtype=model.dtype))
    if model.lora is None:
      self.freeze(decoder_lib.NO_PARAMS)
    self._mask_truncated = mask_truncated
    self._overlong_tokens = overlong_tokens
    self._samplers = {}
    self._update = update.build(
      model,
      optimizer,
      mesh,
      objectives,
      logit_chunk,
      entropy_weight=entropy_weight,
      reference=reference,
    )
    self._score = update.build_scorer(model, mesh, logit_chunk)

  def freeze(self, params: nnx.State) -> None:
    """Puts these parameters under the adapters."""
    self.frozen = params
    # Not moved again: only adapters change.
    self._frozen_to_decode = self._to_decode(params)

  def _to_decode(self, params):
    """The parameters where, and as what, they are decoded.

    Those that are so already are not copied.
    """
    if self.model.dtype != self.model.param_dtype:
      params = self._cast(params)
    places = sharding.params(params, self.mesh, sharding.DECODE)
    return jax.device_put(params, places)

  def start_from(self, params: nnx.State | None = None) -> None:
    """Begins anew with these parameters, by default random ones."""
    if params is None:
      params = state_lib.init_params(self.model, self.mesh, self._init_key)
    self.state = state_lib.fresh(
      params, self.model, self.optimizer, self.mesh, self._reference
    )

  def prompt_ids(self, prompt: records.Prompt) -> np.ndarray:
    """The prompt in the policy's template and tokens, i32 [C]."""
    return self.template.encode(self.tokenizer, prompt)

  def start_sampling(
    self,
    prompts: Sequence[records.Prompt],
    per_prompt: int,
    key: jax.Array,
    temperature: float,
  ) -> Sampling:
    """Sends the prompts off to be completed; does not wait.

    They are completed in parts of as many as fit at a time; the parts do not
    change the completions.
    At temperature 0 the likeliest token is taken.
    """
    size = self._sample_batch or len(prompts)
    draw = self._sampler(per_prompt, greedy=temperature == 0)
    params = self._to_decode(self.state.params)
    parts = []
    with jax.set_mesh(self.mesh):
      for first in range(0, len(prompts), size):
        samples = draw(
          params,
          self._frozen_to_decode,
          *self._packed_prompts(prompts[first : first + size], size),
          key,
          np.float32(temperature),
          np.int32(first),
        )
        parts.append(samples)
    return Sampling(prompts, parts, size, per_prompt, temperature)

  def _packed_prompts(self, prompts, size):
    """Left-padded prompts and what is valid of them, as many as `size`."""
    context = self.packer.context
    spread = self.mesh.shape['data'] * self.mesh.shape['fsdp']
    size = math.ceil(size / spread) * spread
    prompt_PC = np.zeros((size, context), np.int32)
    valid_PC = np.zeros((size, context), bool)
    for p, prompt in enumerate(prompts):
      ids = self.prompt_ids(prompt)
      prompt_PC[p, context - len(ids) :] = ids
      valid_PC[p, context - len(ids) :] = True
    return prompt_PC, valid_PC

  def finish_sampling(
    self, sampling: Sampling, judge: functions.Judge, run: str, round: int
  ) -> list[list[records.Rollout]]:
    """Waits for completions, and has them judged; groups of each prompt."""
    samples = _joined(sampling)
    version = int(self.state.step)
    created = time.time()
    completions = self._completions(sampling, samples)
    judged = judge.judge_all(completions)
    groups = []
    for p, prompt in enumerate(sampling.prompts):
      header = records.Header(
        run=run,
        round=round,
        policy=self.name,
        prompt=prompt.id,
        version=version,
        tokenizer=self.tokenizer.fingerprint,
        created=created,
      )
      first = p * sampling.per_prompt
      groups.append(
        grpo.with_advantages(
          [
            self._rollout(
              samples,
              row,
              msgspec.structs.replace(header, sample=row - first),
              completions[row],
              judged[row],
              sampling.temperature,
            )
            for row in range(first, first + sampling.per_prompt)
          ]
        )
      )
    return groups

  def _completions(self, sampling, samples):
    """What the judge is given of each sample of a prompt."""
    return [
      (
        self.tokenizer.decode(samples.tokens_BT[row, : samples.length_B[row]]),
        'stop' if samples.stopped_B[row] else 'length',
        sampling.prompts[row // sampling.per_prompt].answer,
      )
      for row in range(len(sampling.prompts) * sampling.per_prompt)
    ]

  def _rollout(self, samples, row, header, completion, judged, temperature):
    n = samples.length_B[row]
    ids = samples.tokens_BT[row, :n]
    payload, finish, _ = completion
    reward, verdict = self._with_penalty(judged, int(n))
    return records.Rollout(
      header=header,
      payload=payload,
      finish=finish,
      ids=ids,
      byte_lengths=self.tokenizer.byte_length_V[ids],
      sampling_logp=samples.sampling_logp_BT[row, :n],
      policy_logp=samples.policy_logp_BT[row, :n],
      mask=np.full(n, finish == 'stop' or not self._mask_truncated),
      temperature=temperature,
      reward=reward,
      verdict=verdict,
    )

  def _with_penalty(self, judged, tokens):
    reward, verdict = judged
    reward += functions.overlong_penalty(
      tokens, self.packer.lengths['own'], self._overlong_tokens
    )
    return reward, verdict

  def update(
    self, prompts: Sequence[records.Prompt], lesson: lesson_lib.Lesson
  ) -> list[dict[str, jax.Array]]:
    """Updates on own and peer rows, mini-batch by mini-batch.

    Returns the statistics of every mini-batch, still on their way.
    """
    mini_batches = self.packer.mini_batch_parts(
      [self.prompt_ids(prompt) for prompt in prompts], lesson
    )
    statistics = []
    for parts in mini_batches:
      self.state, more = self._update(self.state, parts, self.frozen)
      statistics.append(more)
    return statistics

  def learner(
    self,
    prompts: Sequence[records.Prompt],
    judge: functions.Judge,
    limits: transfer.Limits,
    *,
    rng: np.random.Generator,
    ratios: Mapping[str, float],
  ) -> lesson_lib.Learner:
    """The policy as its lesson on these prompts sees it."""

    def judge_rollout(prompt, rollout):
      judged = judge(rollout.payload, rollout.finish, prompts[prompt].answer)
      return self._with_penalty(judged, len(rollout.ids))

    def verify(prompt, payload):
      return judge(payload, 'stop', prompts[prompt].answer)[1] == 'correct'

    return lesson_lib.Learner(
      tokenizer=self.tokenizer,
      limits=limits,
      judge=judge_rollout,
      verify=verify,
      score=functools.partial(self.score, prompts),
      rng=rng,
      ratios=ratios,
    )

  def score(
    self,
    prompts: Sequence[records.Prompt],
    rows: Sequence[lesson_lib.Row],
    reference: bool = False,
  ) -> list[np.ndarray]:
    """The log-probability of every row's tokens, each f32 [T].

    Under the policy as it is or, with `reference`, as it began.
    """
    if not rows:
      return []
    # Own rows fit the shorter shape; peers' responses may be longer.
    longest = max(len(row.ids) for row in rows)
    length = min(n for n in self.packer.lengths.values() if n >= longest)
    packed = self.packer.pack(
      [self.prompt_ids(prompt) for prompt in prompts],
      [(row, 1.0) for row in rows],
      length,
    )
    params = self.state.reference if reference else self.state.params
    with jax.set_mesh(self.mesh):
      logp_MBT = jax.device_get(self._score(params, self.frozen, packed))
    logp_BT = logp_MBT.reshape(-1, length)
    return [logp_BT[b, : len(row.ids)] for b, row in enumerate(rows)]

  def _sampler(self, per_prompt, greedy):
    if (per_prompt, greedy) not in self._samplers:
      self._samplers[per_prompt, greedy] = sampler.build(
        self.model,
        self.mesh,
        samples=per_prompt,
        length=self.packer.lengths['own'],
        stop_ids=self.tokenizer.stop_ids,
        greedy=greedy,
      )
    return self._samplers[per_prompt, greedy]
