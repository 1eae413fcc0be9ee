"""google-tunix, beside which sampler, update and round are measured."""

from collections.abc import Callable, Sequence
import itertools
import logging as python_logging
import os

from absl import logging
import bench_job
import bench_model
import bench_tools
import numpy as np

from mrl_jax import hugging_face
from mrl_jax.sharing import rows as rows_lib


def load(model) -> 'Tunix | None':
  """Tunix with a model of this architecture; None if it is not installed."""
  try:
    return Tunix(model)
  except ModuleNotFoundError as error:
    print(
      f"{error}; to compare with tunix, in Python 3.12: pip install -e '.[bench]'"
    )
    return None


class Tunix:
  """tunix on one device, in float32, with its defaults for GRPO."""

  def __init__(self, model):
    import jax

    # All that is used later: on import, tunix sets options of flax.
    from tunix.generate import sampler
    from tunix.models.qwen2 import model as qwen2
    from tunix.rl.grpo import grpo_learner

    del sampler, grpo_learner
    logging.set_verbosity(logging.ERROR)
    python_logging.disable(python_logging.WARNING)
    self._config = qwen2.ModelConfig(
      num_layers=model.num_layers,
      vocab_size=model.vocab_size,
      embed_dim=model.d_model,
      hidden_dim=model.d_ff,
      num_heads=model.num_heads,
      head_dim=model.head_dim,
      num_kv_heads=model.num_kv_heads,
      rope_theta=int(model.layer(0).rope.base),
      norm_eps=model.norm_eps,
      use_tied_embedding=model.tie_embeddings,
      dtype=jax.numpy.float32,
      param_dtype=jax.numpy.float32,
    )

  def sampler(
    self, context: int, new: int, stop_ids: Sequence[int]
  ) -> Callable[..., int]:
    """`sample(prompts, seed) -> tokens drawn`, with at most `new` of each row."""
    from tunix.generate import sampler

    config = self._config
    sample = sampler.Sampler(
      self._policy(),
      _Ids(),
      sampler.CacheConfig(
        cache_size=context + new,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
      ),
    )

    def drawn(prompts: Sequence[np.ndarray], seed: int) -> int:
      rows = sample(
        [' '.join(map(str, ids)) for ids in prompts],
        max_generation_steps=new,
        max_prompt_length=context,
        temperature=1.0,
        top_p=1.0,
        seed=seed,
        eos_tokens=stop_ids or [config.vocab_size],
      ).tokens
      # A row comes without the token that ended it.
      return sum(min(len(ids) + 1, new) for ids in rows)

    return drawn

  def update(
    self,
    prompt_ids: Sequence[np.ndarray],
    rows: Sequence[rows_lib.Row],
    new: int,
  ) -> Callable[[], None]:
    """An update of these rows, padded to `new` tokens; without a reference."""
    from flax import nnx
    import jax
    from tunix.rl import common

    learner = self._learner(_Ids(), 0.0, 1, new, len(prompt_ids[0]))
    trainer = learner.rl_cluster.actor_trainer
    step, _ = trainer.jit_train_and_eval_step(False, True)
    ids = np.zeros((len(rows), new), np.int32)
    for i, row in enumerate(rows):
      ids[i, : len(row.ids)] = row.ids
    prompts = np.stack([prompt_ids[row.prompt] for row in rows])

    def update():
      step(
        common.TrainExample(
          prompt_ids=jax.numpy.asarray(prompts),
          prompt_mask=jax.numpy.asarray(prompts != 0),
          completion_ids=jax.numpy.asarray(ids),
          completion_mask=jax.numpy.asarray(ids != 0),
          advantages=jax.numpy.asarray([row.advantage for row in rows]),
          ref_per_token_logps=None,
          old_per_token_logps=None,
        )
      )
      jax.block_until_ready(nnx.state(trainer.model))

    return update

  def rounds(
    self, folder: str, prompts: Sequence[str], kl_weight: float, count: int
  ) -> Callable[[], None]:
    """A step of GRPO, `count` times, of the tokenizer in a `bench_job.folder`."""
    from flax import nnx
    import jax

    new, context = bench_model.NEW.value, bench_model.CONTEXT.value
    tokenizer = _Texts(os.path.join(folder, 'model'))
    learner = self._learner(tokenizer, kl_weight, count, new, context)
    texts = itertools.cycle(prompts)

    def train(pause):
      def batches():
        for _ in range(count):
          policy = learner.rl_cluster.actor_trainer.model
          jax.block_until_ready(nnx.state(policy))
          pause()
          batch = [next(texts) for _ in range(bench_job.PROMPTS)]
          yield {'prompts': np.array(batch)}

      learner.train(batches())

    return bench_tools.Steps(train)

  def _learner(self, tokenizer, kl_weight, updates, new, context):
    import jax
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout import base_rollout

    mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp')
    )
    cluster = rl_cluster.RLCluster(
      actor=self._policy(),
      reference=self._policy(seed=1) if kl_weight else None,
      tokenizer=tokenizer,
      cluster_config=rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(
          (
            rl_cluster.Role.ACTOR,
            rl_cluster.Role.REFERENCE,
            rl_cluster.Role.ROLLOUT,
          ),
          mesh,
        ),
        rollout_engine='vanilla',
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
          actor_optimizer=optax.adamw(3e-4),
          eval_every_n_steps=10**9,
          max_steps=updates,
        ),
        rollout_config=base_rollout.RolloutConfig(
          max_tokens_to_generate=new,
          max_prompt_length=context,
          kv_cache_size=context + new,
          temperature=1.0,
          top_p=1.0,
          eos_tokens=[tokenizer.eos_id()],
        ),
      ),
    )
    return grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      reward_fns=lambda prompts, completions, **_: [
        float(i % 2) for i in range(len(completions))
      ],
      algo_config=grpo_learner.GRPOConfig(
        num_generations=bench_job.SAMPLES, beta=kl_weight
      ),
    )

  def _policy(self, seed: int = 0):
    """A random model: matrices are normal, biases 0 and norms 1."""
    from flax import nnx
    import jax
    from tunix.models.qwen2 import model as qwen2

    graph, state = nnx.split(qwen2.Qwen2(self._config, rngs=nnx.Rngs(seed)))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    leaves = [
      0.02 * jax.random.normal(key, x.shape) if x.ndim > 1 else x
      for key, x in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


class _Ids:
  """A tokenizer whose texts are token ids in decimal digits."""

  def encode(self, text, **_):
    return [int(word) for word in text.split()]

  def decode(self, ids, **_):
    return ''

  def bos_id(self):
    return 0  # tunix then adds none.

  def eos_id(self):
    return bench_model.VOCAB

  def pad_id(self):
    return 0


class _Texts:
  """The tokenizer in a folder, as tunix calls it."""

  def __init__(self, folder):
    self._tokenizer = hugging_face.load_tokenizer(folder)

  def encode(self, text, **_):
    return self._tokenizer.encode(text, add_special_tokens=False)

  def decode(self, ids, **_):
    return self._tokenizer.decode(ids)

  def bos_id(self):
    return 0  # tunix then adds none.

  def eos_id(self):
    return self._tokenizer.eos_token_id

  def pad_id(self):
    return self._tokenizer.pad_token_id
