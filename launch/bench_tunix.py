"""google-tunix, beside which sampler, update and round are measured."""

from collections.abc import Callable, Sequence
import importlib.util
import logging as python_logging

from absl import logging
import bench_model
import bench_tools
import numpy as np


def load(model) -> 'Tunix | None':
  """tunix with a model of this architecture; None if it is not installed."""
  if not importlib.util.find_spec('tunix'):
    print("No tunix; to compare with it: pip install -e '.[bench]', Python 3.12")
    return None
  return Tunix(model)


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
