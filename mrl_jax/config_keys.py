"""Every key of the config: its default, its meaning, and what it may be.

A file of configs/ changes some of the defaults, and flags change more. NAME
stands for the name of a policy.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mrl_jax import records as records_lib
from mrl_jax.architecture import AUTO
from mrl_jax.architecture import REMAT

EVERYBODY = '*'  # All other policies, in `listens_to`.
THINKING = {'': None, 'on': True, 'off': False}


class Key(NamedTuple):
  """A key of the config."""

  default: object  # It is always allowed, and sets the type.
  about: str  # The meaning of the key, in a line.
  least: float | None = None  # Inclusive bounds of a number.
  most: float | None = None
  above: float | None = None  # Exclusive lower bound of a number.
  # The allowed values, or elements of a tuple. A string 'module:TABLE' allows the
  # names of the rows of that table of mrl_jax.
  choices: Iterable[str] | str = ()


_DTYPES = ('float32', 'bfloat16')


def _optimizer(learning_rate, warmup_steps, final_fraction, weight_decay):
  return {
    'name': Key('adamw', 'Optimizer.', choices='update.optimizer:OPTIMIZERS'),
    'state_dtype': Key('float32', 'Of stored moments.', choices=_DTYPES),
    'learning_rate': Key(learning_rate, 'Peak learning rate.', 0),
    'warmup_steps': Key(warmup_steps, 'Updates of linear warm-up.', 0),
    'final_fraction': Key(final_fraction, 'Share of it at the end.', 0, 1),
    'weight_decay': Key(weight_decay, 'Decoupled weight decay.', 0),
    'b1': Key(0.9, 'Decay of the first moment.', 0, 0.999999),
    'b2': Key(0.99, 'Decay of the second moment.', 0, 0.999999),
    'clip_norm': Key(1.0, 'Largest global norm of a gradient.', above=0),
  }


def _under(prefix: str, keys: Mapping[str, Key]) -> dict[str, Key]:
  return {f'{prefix}.{name}': key for name, key in keys.items()}


KEYS = {
  'seed': Key(0, 'Of all randomness of a run.', 0, 2**32 - 1),
  # Generated data, tokenizers, warm starts and compiled programs.
  'cache_dir': Key('', 'Folder that runs may share; else in the work dir.'),
  # The method. A row of the table `algorithms.METHODS` and its settings.
  'method.name': Key(
    'grpo', 'Row of the table of methods.', choices='algorithms:METHODS'
  ),
  'method.which': Key(
    '', 'Replaces which peer groups are selected.', choices='algorithms:WHICH'
  ),
  'method.how': Key(
    '', 'Replaces how they enter the update.', choices='algorithms:HOW'
  ),
  'method.baseline': Key(
    '', 'Replaces the baseline of advantages.', choices='algorithms:BASELINES'
  ),
  'method.ratio': Key(
    '', 'Replaces what own ratios are over.', choices='algorithms:RATIOS'
  ),
  'method.max_peer_groups': Key(
    0, 'Peer groups a prompt, drawn by a hash; 0 takes all.', 0
  ),
  # With the learner's baseline, or in the group of its source.
  'method.peer_advantage': Key(
    '', "Replaces how peers' rewards compare.", choices=('baseline', 'source')
  ),
  'method.scale': Key(
    'std', 'What advantages are divided by.', choices='sharing.grpo:SCALES'
  ),
  'method.leave_one_out': Key(
    False, 'Compare each reward with the mean of the others (RLOO).'
  ),
  'method.interpolation': Key(
    0.5, "Weight of peers' mean, for baseline=interpolated.", 0, 1
  ),
  # In units of advantages, against those of the own group alone.
  'method.max_shift': Key(
    5.0, "How far peers' rewards may move an advantage; 0 is no bound.", 0
  ),
  'method.clip_low': Key(0.2, 'Ratios are clipped below 1 - it.', 0, 1),
  'method.clip_high': Key(0.28, 'Ratios are clipped above 1 + it.', 0),
  'method.dual_clip': Key(
    3.0, 'Bound of ratios at negative advantages; 0 is none.', 0
  ),
  'method.kl_weight': Key(
    0.0, 'Weight of the KL penalty; above 0, the first policy is kept.', 0
  ),
  'method.kl_form': Key('k3', 'Estimator of it.', choices='losses.kl:FORMS'),
  'method.entropy_weight': Key(0.0, 'Weight of the entropy bonus.', 0),
  # Correction of own rows for the mismatch between sampler and trainer.
  'method.correction.level': Key(
    'none', 'Its importance weights.', choices='sharing.correction:LEVELS'
  ),
  'method.correction.kind': Key(
    'truncate', 'Of weights above the cap.', choices='sharing.correction:KINDS'
  ),
  'method.correction.cap': Key(2.0, 'Largest such weight.', above=0),
  'method.prp.level': Key(
    'chunk', 'What ratios are over.', choices='sharing.prp:LEVELS'
  ),
  'method.prp.denominators': Key(
    'behaviour', 'Of ratios.', choices='sharing.prp:DENOMINATORS'
  ),
  'method.prp.max_ratio': Key(2.0, 'Truncation of ratios.', above=0),
  'method.sgt.weight': Key(0.1, 'Lambda, the weight of the NLL.', 0),
  'method.sgt.normaliser': Key(
    'batch', 'What the NLL is averaged over.', choices='sharing.sgt:NORMALISERS'
  ),
  'method.hacpo.window': Key(5, 'Rounds that capability is a mean of.', 1),
  'method.hacpo.capability_weight': Key(True, 'Weigh peers by capability.'),
  'method.hacpo.clip': Key(True, "Clip peers' ratios stepwise."),
  'method.hacpo.delta': Key(0.2, 'Their lower bound begins at 1 - it.', 0, 1),
  'method.hacpo.delta_step': Key(0.01, 'Its rise with each mini-batch.', 0),
  'method.hacpo.alpha': Key(1.0, 'Exponent of the weight of ratios.', 0),
  'method.graft.admission': Key(
    'compatibility', 'The gate.', choices='sharing.graft:ADMISSIONS'
  ),
  'method.graft.floor': Key(0.8, 'Compatibility at which it opens.', 0),
  'method.graft.weighted': Key(True, 'Weigh rows by compatibility.'),
  'method.graft.success_only': Key(False, 'Graft successes only.'),
  'method.graft.order': Key(
    'last',
    'When grafted groups are trained on.',
    choices='sharing.graft:ORDERS',
  ),
  'method.luffy.gamma': Key(0.1, 'Probability that moves most.', above=0),
  # Data.
  'data.source': Key(
    'arithmetic', 'Where prompts come from.', choices='data.prompts:SOURCES'
  ),
  'data.seed': Key(0, 'arithmetic: which operands are held out.'),
  'data.families': Key((), 'arithmetic: families of prompts.'),
  'data.difficulties': Key((3,), 'arithmetic: numbers of operands.'),
  'data.jsonl.train': Key('', 'jsonl: a file with an object a line.'),
  'data.jsonl.heldout': Key('', 'jsonl: the same for evaluation.'),
  'data.jsonl.prompt': Key('question', 'jsonl: field of the prompt.'),
  'data.jsonl.answer': Key('answer', 'jsonl: field of the gold answer.'),
  'data.max_faulty': Key(
    0.01, 'Share of gold answers that may not verify themselves.', 0, 1
  ),
  # The supervised phase before reinforcement.
  'warm_start.steps': Key(900, 'Updates; 0 is no warm start.', 0),
  'warm_start.batch': Key(64, 'Demonstrations an update.', 1),
  'warm_start.rejected_share': Key(
    0.4, 'Share of them in a form that the verifier rejects.', 0, 1
  ),
  'warm_start.rejected_marker': Key(':', 'Their marker of the answer.'),
  **_under('warm_start.optimizer', _optimizer(4e-3, 50, 0.1, 0.01)),
  # Rewards.
  'reward.functions': Key(
    ('exact',), 'Reward functions.', choices='rewards.functions:REWARDS'
  ),
  'reward.weights': Key((1.0,), 'The weight of each.'),
  # 'math' takes \\boxed{} before a marker, and accepts equivalent answers.
  'reward.verifier': Key(
    'exact', 'What verifies answers.', choices='rewards.judge:VERIFIERS'
  ),
  # Of CPU time, for one answer: verdicts do not depend on the machine's load.
  'reward.timeout_s': Key(1.0, "Seconds that 'math' may take.", above=0),
  'reward.processes': Key(
    0, "Processes of 'math'; 0 is one per core, up to four.", 0, 256
  ),
  'reward.marker': Key('=', 'The answer follows the last one.'),
  # From so many tokens below sample.max_tokens on, 'overlong' falls to -1.
  'reward.overlong_tokens': Key(0, "Length of 'overlong''s ramp.", 0),
  # Sampling.
  # The policy that is trained is the one that samples, softmax(logits / T).
  'sample.temperature': Key(1.0, 'T of sampling to train on.', above=0),
  # With filters, the trainer computes the denominators of importance ratios.
  'sample.top_k': Key(0, 'Draw from the k most likely tokens; 0: all.', 0),
  'sample.top_p': Key(
    1.0, 'Draw from the likeliest that sum to p.', above=0, most=1
  ),
  'sample.min_p': Key(0.0, 'Least share of the largest probability.', 0, 1),
  # The completion keeps the string, and the rest of the token that completes it.
  'sample.stop': Key((), 'Strings that end a completion.'),
  'sample.batch': Key(0, 'Prompts sampled at a time; 0 is as many as fit.', 0),
  'sample.max_prompt_tokens': Key(64, 'Longest prompt.', 1),
  'sample.long_prompts': Key(
    'skip', 'What to do with longer ones.', choices=('skip', 'error')
  ),
  'sample.max_tokens': Key(12, 'Longest completion.', 1),
  # DAPO's dynamic sampling: train.prompts more, in place of the groups that all
  # fail or all succeed: alone they teach nothing, though peers' rewards may.
  'sample.refills': Key(0, 'How often in a round, at most.', 0),
  # Training.
  'train.rounds': Key(150, 'Rounds of sampling and learning.', 1),
  'train.prompts': Key(32, 'Prompts a round.', 1),
  'train.samples': Key(8, 'Samples a prompt: the group size.', 1),
  'train.mini_batches': Key(2, 'Updates a round.', 1),
  # Prompts and responses are packed, whole, into rows of the same length.
  'train.packed_tokens': Key(
    0, 'Tokens of a packed row; 0, or too few: the longest, at least 128.', 0
  ),
  'train.micro_rows': Key(
    0, 'Packed rows of one backward pass; 0: by the memory.', 0
  ),
  'train.logit_chunk': Key(65536, 'Tokens whose logits are held at once.', 1),
  # Sampler and trainer differ by kernels and precision. 'auto' is the trainer for
  # policies in bfloat16 or with adapters, and for ratios of sequences, whose
  # clip is narrower than the difference; else the sampler, which costs nothing.
  'train.old_logp': Key(
    'auto',
    'Denominators of own ratios.',
    choices=('auto', 'trainer', 'sampler'),
  ),
  'train.aggregation': Key(
    'token_mean', 'Mean over tokens.', choices='training.packing:AGGREGATIONS'
  ),
  'train.mask_truncated': Key(False, 'Mask responses that were cut off.'),
  **_under('train.optimizer', _optimizer(3e-4, 0, 0.2, 0.0)),
  # Evaluation on held-out prompts, also before the first round.
  'eval.every': Key(50, 'Rounds between evaluations.', 1),
  'eval.prompts': Key(256, 'Held-out prompts.', 1),
  'eval.samples': Key(8, 'Samples a prompt.', 1),
  'eval.batch': Key(32, 'Prompts sampled at a time.', 1),
  'eval.temperature': Key(1.0, 'Of sampling; 0 is greedy.', 0),
  'eval.completions': Key(3, 'Best and worst completions to write down.', 0),
  # SEE, the exchange.
  'see.max_staleness': Key(0, 'Rounds that a record may be old.', 0),
  # A peer that nobody waited for runs ahead. Its messages beyond this bound stay
  # with it until the receiver is near.
  'see.max_ahead': Key(16, 'Rounds that a peer may be ahead.', 1),
  # By default these hold what the config's rounds may need.
  'see.capacity_records': Key(0, 'Bound of records that wait, a peer.', 0),
  'see.capacity_mib': Key(0, 'The same in MiB.', 0),
  'see.spool_mib': Key(0, 'Bound of messages on disk, a peer.', 0),
  'see.journal_mib': Key(65536, 'Bound of the journal of a policy.', 1),
  'see.block_s': Key(10.0, 'Seconds that a full queue blocks.', 0),
  'see.wait_s': Key(120.0, 'Seconds that a peer may be silent.', 0),
  # Of records of all kinds, later runs of any method can learn.
  'see.journal': Key(
    'published', 'Records to write down.', choices=('published', 'all', 'none')
  ),
  'see.outcome_texts': Key(4, 'Successes to quote.', 0, records_lib.MAX_TEXTS),
  'see.listen': Key('', 'HOST:PORT where other processes find this one.'),
  'see.max_message_mib': Key(16, 'Largest message.', 1, 1024),
  'see.tls.ca': Key('', 'PEM file of the authority; needed off loopback.'),
  'see.tls.cert': Key('', "PEM file of this process's certificate."),
  'see.tls.key': Key('', 'PEM file of its key.'),
  'see.allow_insecure': Key(False, 'Do without TLS in a trusted network.'),
  # THL, the transfer between vocabularies.
  'thl.max_tokens': Key(16, "Of a peer's rollout, in own tokens.", 1),
  'thl.max_residual': Key(1.0, 'Of token boundaries not shared.', 0, 1),
  # MWRA, the planner.
  # Where there is no accelerator. Each takes time; more show how slices differ.
  'mwra.emulated_devices': Key(
    0, 'CPU devices to emulate; 0 is one for each policy.', 0
  ),
  # Sizes of every policy's mesh axes; 0 is the planner's choice.
  'mwra.data': Key(0, 'Of the data axis in training.', 0),
  'mwra.tensor': Key(1, 'Of the tensor axis in training.', 0),
  'mwra.decode_tensor': Key(0, 'Of the tensor axis while sampling.', 0),
  'mwra.time_share': Key(False, 'All policies take turns on all devices.'),
  # A cluster of processes that train the same policies: its hosts.
  'cluster.coordinator': Key(
    '', "HOST:PORT of its process 0, or 'auto' on Cloud TPU; '' is no cluster."
  ),
  'cluster.processes': Key(
    0, 'Their number; with auto, 0 is whatever the slice has.', 0
  ),
  'cluster.process': Key(0, 'The number of this one; not with auto.', 0),
  # Long enough for a leader that waits for peers, and verifies.
  'cluster.wait_s': Key(
    600.0, 'Seconds that processes wait for each other.', above=0
  ),
  'cluster.lost_s': Key(
    30.0, 'Seconds of silence after which a process is lost.', 1
  ),
  # Traces for TensorBoard's profiler, of the devices of the first process.
  'profile.rounds': Key(0, 'Rounds to profile; 0 is none.', 0),
  'profile.first': Key(2, 'The first of them, counted from 0.', 0),
  'checkpoint.every': Key(50, 'Rounds between checkpoints.', 1),
  'checkpoint.minutes': Key(0.0, 'Minutes between them; 0 is no such rule.', 0),
  # A machine that is taken away gives some 30 s after SIGTERM.
  'checkpoint.stop_s': Key(
    25.0, 'Seconds from SIGTERM or Ctrl-C to the exit, at most.', above=0
  ),
  'checkpoint.keep': Key(2, 'Checkpoints that are kept.', 1),
}
POLICY = {
  # Family, sizes, weights and tokenizer of a pretrained model. Without a path,
  # the model is random, of the family and sizes below.
  'path': Key('', 'A Hugging Face folder or hub name.'),
  'model.family': Key('', 'Family of a random model.'),
  'model.dtype': Key('float32', 'Of activations.', choices=_DTYPES),
  # As bfloat16, parameters lose small updates.
  'model.param_dtype': Key('float32', 'Of parameters.', choices=_DTYPES),
  # To save memory: all but products with weights ('dots'), or whole layers
  # ('block'); 'auto' is the planner's choice.
  'model.remat': Key(
    'none', 'What the backward pass recomputes.', choices=(*REMAT, AUTO)
  ),
  # By default by platform and length; see models/attention.py.
  'model.attention': Key(
    'auto', 'How it is computed.', choices='architecture:ATTENTION'
  ),
  **{
    f'model.{size}': Key(least, 'Of a random model.', least)
    for size, least in (
      ('num_layers', 1),
      ('d_model', 1),
      ('d_ff', 1),
      ('num_heads', 1),
      ('num_kv_heads', 1),
      ('head_dim', 2),
    )
  },
  'lora.rank': Key(0, 'Rank of adapters, which alone train; 0 is none.', 0),
  'lora.alpha': Key(32.0, 'Scale of adapters, alpha / rank.', 0),
  'lora.target_modules': Key(
    ('q_proj', 'k_proj', 'v_proj', 'o_proj'),
    'Projections that have adapters.',
    choices='architecture:PROJECTIONS',
  ),
  # Or 'chat', the chat template of the tokenizer.
  'template': Key('{prompt}\n', 'Text around a prompt.'),
  'system': Key('', 'System prompt of a chat.'),
  'thinking': Key('', 'Whether a chat has it.', choices=THINKING),
  # A policy that this process does not train: another process trains it, or
  # what an earlier run published stands for it.
  'address': Key('', 'HOST:PORT of the process that trains it.'),
  'journal': Key('', 'A work dir whose journal replaces it.'),
  'listens_to': Key((EVERYBODY,), "Peers it learns from; '*' is all of them."),
  'tokenizer.path': Key('', 'A Hugging Face folder; by default `path`.'),
  # Without either path, a tokenizer is trained on the data.
  'tokenizer.kind': Key('', 'Of this kind.', choices='data.vocabulary:KINDS'),
  'tokenizer.vocab_size': Key(1, 'Its size.', 1, 2**20),
  'warm_start_families': Key((), 'Families that its warm start demonstrates.'),
}
KEYS |= _under('policies.NAME', POLICY)
