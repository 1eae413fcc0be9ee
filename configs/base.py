"""Defaults of every run. The other files of this folder say what they change.

The default job needs no download. Two small policies of different families,
sizes and tokenizers learn arithmetic on 8 emulated CPU devices. Before any
reinforcement, a short supervised phase (`warm_start`) gives them something to
find and something to give:

- Both see every operation as a formula, `max 4 9 3`. Each sees only half of
  the operations in words, `the top score of 4 9 3`; the other half it never
  sees. Networks this small need thousands of examples for a new fact, so what
  is left to reinforcement must be elicited rather than learnt: here, that
  words stand for operations which the policy already knows.
- In a share of all demonstrations every `=` is a `:`, which the verifier
  rejects. GRPO unlearns that quickly; without it, there would be little for a
  policy to gain without peers. The missing words are what peers can teach.
"""

import ml_collections

# Sums take more practice than lists, and so they are listed more often.
FORMULAS = (
  *('formula/add', 'formula/sub') * 3,
  'formula/max',
  'formula/min',
  'formula/reverse',
  'formula/sort',
)


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.seed = 0
  # Generated data, tokenizers, warm starts and compiled programs, which runs
  # may share; '' keeps them in the work dir.
  config.cache_dir = ''

  config.method = method()
  config.policies = ml_collections.ConfigDict()
  config.policies.llama = policy(
    family='llama',
    tokenizer='byte_level',
    vocab_size=384,
    num_layers=2,
    d_model=96,
    d_ff=192,
    num_heads=3,
    num_kv_heads=3,
    head_dim=32,
    warm_start=(*('words/add',) * 3, 'words/max', 'words/reverse'),
  )
  config.policies.gemma = policy(
    family='gemma',
    tokenizer='sentencepiece',
    vocab_size=384,
    num_layers=3,
    d_model=64,
    d_ff=192,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    warm_start=(*('words/sub',) * 3, 'words/min', 'words/sort'),
  )

  config.data = ml_collections.ConfigDict()
  config.data.source = 'arithmetic'  # Or 'jsonl'.
  config.data.seed = 0  # Which operands are held out.
  config.data.families = (
    'words/add',
    'words/sub',
    'words/max',
    'words/min',
    'words/reverse',
    'words/sort',
    'formula/add',
    'formula/sort',
  )
  config.data.difficulties = (3,)  # Numbers of operands.
  config.data.jsonl = ml_collections.ConfigDict()
  config.data.jsonl.train = ''  # Path of a file, one JSON object a line.
  config.data.jsonl.heldout = ''
  config.data.jsonl.prompt = 'question'  # Fields of its objects.
  config.data.jsonl.answer = 'answer'

  config.warm_start = ml_collections.ConfigDict()
  config.warm_start.steps = 900  # 0 leaves the policies as they are.
  config.warm_start.batch = 64
  config.warm_start.rejected_share = 0.4
  config.warm_start.rejected_marker = ':'
  config.warm_start.optimizer = optimizer(
    learning_rate=4e-3, warmup_steps=50, final_fraction=0.1, weight_decay=0.01
  )

  config.reward = ml_collections.ConfigDict()
  # Or 'math', which takes \boxed{} before a marker, and what is equivalent.
  config.reward.verifier = 'exact'
  config.reward.timeout_s = 5.0  # Of 'math', for the comparison of two answers.
  config.reward.marker = '='  # The answer follows the last one.
  config.reward.weights = ml_collections.ConfigDict()
  config.reward.weights.exact = 1.0
  config.reward.weights.format = 0.0
  # DAPO's soft punishment of length: from so many tokens below
  # sample.max_tokens on, the reward falls, by 1 at the end. 0 is none.
  config.reward.overlong_tokens = 0

  config.sample = ml_collections.ConfigDict()
  config.sample.temperature = 1.0
  config.sample.batch = 0  # Prompts sampled at a time, or 0 for all of a round.
  config.sample.max_prompt_tokens = 64
  config.sample.long_prompts = 'skip'  # Or 'error'.
  config.sample.max_tokens = 12
  # DAPO's dynamic sampling: how often in a round a policy may sample another
  # train.prompts, in place of groups that all fail or all succeed: these teach
  # nothing by themselves, though a baseline of peers' rewards may.
  config.sample.refills = 0

  config.train = ml_collections.ConfigDict()
  config.train.rounds = 150
  config.train.prompts = 32  # A round.
  config.train.samples = 8  # A prompt.
  config.train.mini_batches = 2  # Updates a round.
  config.train.row_multiple = 32  # Rows are padded to it; bounds recompilation.
  config.train.micro_rows = 512  # Rows of one forward and backward pass.
  config.train.logit_chunk = 65536  # Tokens whose logits are held at once.
  config.train.aggregation = 'token_mean'
  config.train.mask_truncated = False  # Learn nothing from what was cut off.
  config.train.optimizer = optimizer(
    learning_rate=3e-4, warmup_steps=0, final_fraction=0.2, weight_decay=0.0
  )

  config.eval = ml_collections.ConfigDict()
  config.eval.every = 50  # Rounds; before and after is evaluated in any case.
  config.eval.prompts = 256
  config.eval.samples = 8
  config.eval.batch = 32  # Prompts sampled at a time.
  config.eval.temperature = 1.0  # 0 is greedy.
  config.eval.completions = 3  # Best and worst ones that are written down.

  config.see = ml_collections.ConfigDict()
  config.see.max_staleness = 0  # Rounds that a record may be old.
  config.see.capacity_records = 65536  # Of each queue.
  config.see.capacity_mib = 256
  # Policies of one process publish and collect in turn, so that nothing waits
  # as long as the capacity suffices; those of other processes may be late.
  config.see.block_s = 10.0  # What a publisher waits for room in a full queue.
  config.see.wait_s = 120.0  # How long a peer may be silent.
  # What is written under see/ in the work dir: 'published' is what peers get,
  # 'all' lets later runs of any method learn from it, 'none' is nothing.
  config.see.journal = 'published'
  config.see.outcome_texts = 4  # Verified responses of a prompt, at most.
  # Policies that this process does not train: one with an address is trained
  # by another process, which finds those of this one where it listens; one
  # with a journal is not trained at all, and gives what it once published.
  config.see.peers = peers(config.policies)
  config.see.listen = ''  # HOST:PORT
  config.see.max_message_mib = 16
  # Certificates of both sides, by one authority; needed off loopback.
  config.see.tls = ml_collections.ConfigDict({'ca': '', 'cert': '', 'key': ''})
  config.see.allow_insecure = False

  config.thl = ml_collections.ConfigDict()
  # Refuses rollouts of peers with more tokens in the receiver's vocabulary.
  config.thl.max_tokens = 16
  # Refuses those of which a larger share of the receiver's token boundaries are
  # not boundaries of the sender's tokens.
  config.thl.max_residual = 1.0

  config.mwra = ml_collections.ConfigDict()
  config.mwra.emulated_devices = 8  # Where there is no accelerator.
  config.mwra.tensor = 1  # Size of every policy's tensor axis.
  config.mwra.time_share = False

  config.checkpoint = ml_collections.ConfigDict()
  config.checkpoint.every = 50  # Rounds; the last round is always saved.
  config.checkpoint.keep = 2
  return config


def method():
  """Settings of the methods, each part of `mrl_jax/algorithms.py` by itself."""
  config = ml_collections.ConfigDict()
  # A row of the table; configs/NAME.py sets what else belongs to it.
  config.name = 'grpo'
  config.which = ''  # Replaces one part of the row; '' leaves it.
  config.how = ''
  config.baseline = ''
  config.ratio = ''  # 'token' or 'sequence'.
  # Of each prompt, drawn at random; with 1, a round of many policies costs each
  # of them what a round of two does. 0 is no bound.
  config.max_peer_groups = 0
  config.peer_advantage = ''  # 'baseline' or 'source'; '' is that of `how`.
  # Advantages: what they are divided by ('std', 'unbiased_std', 'batch_std' or
  # 'none'), and whether a reward is compared with those of the others only.
  config.scale = 'std'
  config.leave_one_out = False
  config.interpolation = 0.5  # Of the baseline 'interpolated'.
  config.clip_low = 0.2
  config.clip_high = 0.28
  config.dual_clip = 3.0  # 0 is off.
  # Against the policy as it was before reinforcement; at 0 none is kept.
  config.kl_weight = 0.0
  config.kl_form = 'k3'  # Or 'k1' or 'k2'.
  config.entropy_weight = 0.0
  # Of what sampler and trainer differ in.
  config.correction = ml_collections.ConfigDict(
    {'level': 'none', 'kind': 'truncate', 'cap': 2.0}
  )
  config.prp = ml_collections.ConfigDict(
    {'level': 'chunk', 'denominators': 'behaviour', 'max_ratio': 2.0}
  )
  config.sgt = ml_collections.ConfigDict(
    {'weight': 0.1, 'normaliser': 'batch'}  # Or 'rescue'.
  )
  config.hacpo = ml_collections.ConfigDict(
    {
      'window': 5,  # Rounds over which capability is measured.
      'capability_weight': True,
      'clip': True,
      'delta': 0.2,
      'delta_step': 0.01,
      'alpha': 1.0,
    }
  )
  config.graft = ml_collections.ConfigDict(
    {
      'admission': 'compatibility',  # Or 'random' or 'all'.
      'floor': 0.8,
      'weighted': True,
      'success_only': False,
      'order': 'last',  # Or 'first' or 'uniform'.
    }
  )
  config.luffy = ml_collections.ConfigDict({'gamma': 0.1})
  return config


def policy(family, tokenizer, vocab_size, warm_start, **sizes):
  """A policy; `sizes` are fields of `mrl_jax.architecture.ModelConfig`."""
  config = ml_collections.ConfigDict()
  config.model = ml_collections.ConfigDict(
    {
      'family': family,
      'dtype': 'float32',  # Of activations; or 'bfloat16'.
      'param_dtype': 'float32',  # Or 'bfloat16', which loses small updates.
      # What the backward pass computes again to save memory: 'none', 'dots'
      # (all but products with weights) or 'block'.
      'remat': 'none',
      **sizes,
    }
  )
  # A Hugging Face folder, or a hub name, that gives family, sizes, weights and
  # tokenizer; '' is a random model of the family and sizes above.
  config.path = ''
  # Low-rank adapters, which are then all that is trained; rank 0 is none.
  config.lora = ml_collections.ConfigDict()
  config.lora.rank = 0
  config.lora.alpha = 32.0
  config.lora.target_modules = ('q_proj', 'k_proj', 'v_proj', 'o_proj')
  # Or 'chat', which is the tokenizer's own.
  config.template = '{prompt}\n'
  config.system = ''  # The system prompt of a chat.
  config.thinking = ''  # 'on' or 'off', for chat templates that can.
  # The policies whose records it takes; '*' is all others, () is none.
  config.listens_to = ('*',)
  config.tokenizer = ml_collections.ConfigDict()
  config.tokenizer.path = ''  # As `path`, which it is by default; or trained.
  config.tokenizer.kind = tokenizer  # 'byte_level' or 'sentencepiece'.
  config.tokenizer.vocab_size = vocab_size
  config.warm_start_families = (*FORMULAS, *warm_start)
  return config


def pretrained(path, template):
  """A policy that starts as the model at `path`, in bfloat16 but for sums."""
  config = policy(family='', tokenizer='', vocab_size=1, warm_start=())
  config.path, config.template = path, template
  config.model.dtype = 'bfloat16'
  config.model.remat = 'block'
  return config


def peers(policies):
  """An entry for each of the policies, all of them trained here."""
  return ml_collections.ConfigDict(
    {name: {'address': '', 'journal': ''} for name in policies}
  )


def optimizer(learning_rate, warmup_steps, final_fraction, weight_decay):
  """Linear warm-up, then cosine to `final_fraction` of the rate."""
  config = ml_collections.ConfigDict()
  # Or 'adafactor', which has neither b1 nor b2 and next to no state, or 'muon',
  # which is AdamW for embeddings, norms and biases only, and else has one
  # moment, of b1. For all three a learning rate means about the same.
  config.name = 'adamw'
  # Or 'bfloat16', which halves the state; updates are computed in float32.
  config.state_dtype = 'float32'
  config.learning_rate = learning_rate
  config.warmup_steps = warmup_steps
  config.final_fraction = final_fraction
  config.weight_decay = weight_decay
  config.b1 = 0.9
  config.b2 = 0.99
  config.clip_norm = 1.0
  return config
