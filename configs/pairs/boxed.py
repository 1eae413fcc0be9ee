r"""What the pairs of this folder have in common: mathematics, boxed answers.

Nothing is downloaded but models; name the data with

  --config.data.jsonl.train=FILE --config.data.jsonl.heldout=FILE

Each line is JSON, {"problem": ..., "answer": ...}; the answer is bare, in
\boxed{}, or behind ####. The verifier needs `pip install -e '.[math]'`.

MWRA chooses micro-batches, recomputation and meshes for the slice that is there;
launch/README.md has what XLA says of some. Not run at this size: no accelerator
was at hand. The tests run one pair with small models in place of its own.
"""

from configs import base

TASK = 'Please reason step by step, and put your final answer within \\boxed{}.'


def get_config(paths):
  """The config of policies whose models are `paths`, by the policy's name."""
  config = base.get_config()
  config.policies = {
    name: base.pretrained(path, f'{{prompt}}\n{TASK}\n')
    for name, path in paths.items()
  }
  config.warm_start.steps = 0

  config.data.source = 'jsonl'
  config.data.jsonl.prompt = 'problem'
  config.reward.verifier = 'math'
  config.reward.marker = '####'

  config.sample.max_prompt_tokens = 1024
  config.sample.max_tokens = 4096
  config.thl.max_tokens = 6144  # Another vocabulary may need more of them.

  config.train.prompts = 128
  config.train.samples = 8
  config.train.logit_chunk = 8192
  config.mwra.tensor = 0
  config.train.optimizer.learning_rate = 1e-6
  config.train.optimizer.final_fraction = 1.0
  config.train.optimizer.weight_decay = 0.01
  config.train.optimizer.b2 = 0.999
  config.checkpoint.every = 20
  config.eval.every = 20
  config.eval.temperature = 0.6
  return config
