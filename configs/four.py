"""Four policies, no two of them alike, which all listen to one another.

  python launch/tpu_pod.py --config=configs/four.py

Three families, four sizes and four tokenizers: byte-level with 367 and with 320
tokens, SentencePiece-style with 373 and with 340. Each operation in words is
understood by two of the policies and unknown to the other two, and no two
policies understand the same, so that each has something to learn from
every other.

8 minutes on 2 CPU cores that had other work to do. Held-out accuracy, percent,
seed 0: mean of the four 33.6 to 62.6; gemma 37.5 to 56.1, gemma_wide 31.2 to
60.4, llama 33.8 to 75.6, qwen 32.0 to 58.3.

To vary: method.name=prp (rollouts cross all four vocabularies; a policy then
trains on four times the rows), policies.NAME.listens_to (a ring or a star in
place of all pairs), policies.NAME.tokenizer.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.method.name = 'xgrpo'
  config.policies.qwen = base.policy(
    family='qwen',
    tokenizer='byte_level',
    vocab_size=320,
    num_layers=2,
    d_model=64,
    d_ff=192,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    warm_start=(*('words/add',) * 3, 'words/min', 'words/sort'),
  )
  config.policies.gemma_wide = base.policy(
    family='gemma',
    tokenizer='sentencepiece',
    vocab_size=340,
    num_layers=2,
    d_model=128,
    d_ff=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    warm_start=(*('words/sub',) * 3, 'words/max', 'words/reverse'),
  )
  return config
