"""A star: two policies learn from a teacher, which learns alone.

  python launch/tpu_pod.py --config=configs/star.py

The teacher, a Qwen-like policy, understands all operations in words, and the
others half of them each. It listens to nobody, so that its own training is
that of GRPO, bit for bit; the others listen to it, and not to each other.

6 minutes on 2 CPU cores that had other work to do. Held-out accuracy, percent,
seed 0: gemma 37.5 to 72.0, llama 33.8 to 91.4, and the teacher 54.9 to 94.5.

To vary: policies.llama.listens_to="('gemma','qwen')" (it hears the other
listener, too), policies.qwen.listens_to="('*',)" (the teacher hears them),
policies.qwen.warm_start_families (what the teacher knows), method.name.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'sgt'
  config.policies.qwen = base.policy(
    family='qwen',
    tokenizer='byte_level',
    vocab_size=320,
    num_layers=3,
    d_model=96,
    d_ff=192,
    num_heads=3,
    num_kv_heads=1,
    head_dim=32,
    warm_start=(
      *('words/add', 'words/sub') * 3,
      'words/max',
      'words/min',
      'words/reverse',
      'words/sort',
    ),
  )
  config.policies.qwen.listens_to = ()
  config.policies.llama.listens_to = ('qwen',)
  config.policies.gemma.listens_to = ('qwen',)
  return config
