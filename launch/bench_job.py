"""A job of one small policy, for benchmarks; see `launch/bench.py`."""

import contextlib
import itertools
import json
import os
import random
import tempfile

import bench_model

from mrl_jax import bucket
from mrl_jax import config as config_lib
from mrl_jax import hugging_face
from mrl_jax.data import vocabulary
from mrl_jax.models import hf_weights
from mrl_jax.rewards import judge

POLICY = 'qwen'
PROMPTS, SAMPLES = 8, 4  # Of a round.


class Alternating(judge.Judge):
  """Rewards every other completion, so that every row has a gradient."""

  def __init__(self):
    super().__init__(verifier=None, rewards=())
    self._rewards = itertools.cycle((0.0, 1.0))

  def __call__(self, completions):
    return [
      judge.Judgement(next(self._rewards), 'correct') for _ in completions
    ]


@contextlib.contextmanager
def folder():
  """A temporary folder with a random policy, its tokenizer and prompts.

  A prompt is so many digits, each of which is a token.
  """
  from flax import nnx

  from mrl_jax.models import decoder

  rng = random.Random(0)
  with tempfile.TemporaryDirectory() as path:
    tokenizer, model = (os.path.join(path, n) for n in ('tokenizer', 'model'))
    words = [''.join(rng.choices('etaoinshrdlu', k=8)) for _ in range(20_000)]
    vocabulary.train('byte_level', words, bench_model.VOCAB, tokenizer)
    os.mkdir(model)
    hugging_face.save_config(
      bench_model.about(), tokenizer, model, dtype='float32'
    )
    config = bench_model.build()
    params = nnx.state(decoder.Decoder(config, nnx.Rngs(0)))
    hf_weights.write(model, config, params, 'float32', 2**40)
    for split in ('train', 'heldout'):
      with open(os.path.join(path, split), 'w', encoding='utf-8') as f:
        for _ in range(16 * PROMPTS):
          digits = ''.join(
            rng.choices('0123456789', k=bench_model.CONTEXT.value)
          )
          f.write(json.dumps({'question': digits, 'answer': '1'}) + '\n')
    yield path


@contextlib.contextmanager
def job(path: str, kl_weight: float):
  """GRPO of the policy in a `folder`, with one update a round."""
  import io

  from rich import console

  from mrl_jax.training import job as job_lib
  from mrl_jax.training import pretrained

  config, policy = config_lib.default(), config_lib.policy()
  policy.path, policy.template = os.path.join(path, 'model'), '{prompt}'
  config.policies[POLICY] = policy
  config.data.source, config.data.families = 'jsonl', ('',)
  config.data.jsonl.train = os.path.join(path, 'train')
  config.data.jsonl.heldout = os.path.join(path, 'heldout')
  config.warm_start.steps = 0
  config.sample.max_tokens = bench_model.NEW.value
  config.sample.max_prompt_tokens = bench_model.CONTEXT.value
  config.train.prompts, config.train.samples = PROMPTS, SAMPLES
  config.train.mini_batches = 1
  config.method.kl_weight = kl_weight
  with contextlib.closing(
    job_lib.build(config, bucket.WorkDir(tempfile.mkdtemp(dir=path)))
  ) as built:
    pretrained.start(built.workers, config, console.Console(file=io.StringIO()))
    built.workers[POLICY].judge = Alternating()
    yield built
