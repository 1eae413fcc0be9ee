"""The pair of Mutual RL, https://arxiv.org/abs/2605.07244.

  python launch/tpu_pod.py --config=configs/pairs/mrl.py
    --config.data.jsonl.train=FILE --config.data.jsonl.heldout=FILE

Qwen2.5-Math-1.5B and Qwen3-1.7B on MATH, about 105 rounds. The sizes of
batches and the clip are our reconstruction. Its final accuracies, read off its
figure: GRPO .682 and .631, PRP .691 and .548, XGRPO .684 and .638, SGT .687 and
.650.

To vary: method.name=prp, sgt or grpo.
"""

from configs.pairs import boxed


def get_config():
  config = boxed.get_config(
    {'qwen2_math': 'Qwen/Qwen2.5-Math-1.5B', 'qwen3': 'Qwen/Qwen3-1.7B'}
  )
  config.method.name = 'xgrpo'
  config.method.clip_high = 0.2
  config.train.rounds = 105
  config.train.prompts = 1024
  config.train.samples = 5
  config.train.mini_batches = 4
  config.sample.max_tokens = 1024
  config.thl.max_tokens = 1536
  return config
