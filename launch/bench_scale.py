"""The benchmark of a round with many peers; see `launch/bench.py`."""

import contextlib
import functools
import gc
import multiprocessing
import pathlib
import time
from typing import NamedTuple

from absl import flags
import bench_thl
import bench_tools
import numpy as np

from configs import base
from mrl_jax import algorithms
from mrl_jax import records
from mrl_jax.rewards import functions
from mrl_jax.rewards import judge as judge_lib
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import wire
from mrl_jax.sharing import context as context_lib
from mrl_jax.sharing import publish
from mrl_jax.thl import align
from mrl_jax.thl import byte_tokenizer
from mrl_jax.thl import transfer

_PEERS = flags.DEFINE_list('peers', ['1', '3', '7'], 'scale: numbers of peers.')
_PROMPTS = flags.DEFINE_integer('prompts', 16, 'scale: prompts of a round.', 1)
_SAMPLES = flags.DEFINE_integer(
  'per_prompt', 8, 'scale: rollouts of a prompt.', 1
)
_TOKENS = flags.DEFINE_integer(
  'response_tokens', 4096, 'scale: tokens of a rollout.', 64
)
_METHOD = flags.DEFINE_string('method', 'prp', 'scale: name of the method.')
_GROUPS = flags.DEFINE_integer(
  'max_peer_groups', 1, 'scale: method.max_peer_groups.', 0
)
_VERIFIER = flags.DEFINE_enum(
  'verifier', 'math', [*judge_lib.VERIFIERS], 'scale: reward.verifier.'
)
_STATUS = pathlib.Path('/proc/self/status')
_BODIES = 64  # Different texts before the answers, to be ready soon.
# Equal to the answer whatever k is; only mathematics can tell.
_GOLD, _ANSWER = 'x({i}+x)', 'x^2 + {k}x + {rest}x'


class _Round(NamedTuple):
  """A round to be measured; crosses to the process that plays it."""

  peers: int
  prompts: int
  samples: int
  tokens: int
  method: str
  max_peer_groups: int
  verifier: str
  text: str
  sender: str  # Tokenizers as JSON.
  receiver: str


def run() -> bench_tools.Result:
  """Times what peers add to the host's work in a learner's round.

  Every peer publishes --per_prompt rollouts with --response_tokens tokens for
  each of --prompts prompts, with the records that the method needs besides. The
  learner has another tokenizer. All answers are different, and half of them are
  correct. A column is a number of peers, played in a process of its own:

  - 'receive': records that the peers sent are decoded, checked, queued and
    collected.
  - 'choose': which groups the learner uses, and statistics of groups.
  - 'judge': the learner verifies responses.
  - 'encode' and 'align': of THL, of the rollouts that are transferred.
  - 'rows': the rest of the training rows.

  Of the rollouts that peers have, some are 'sent', some of these 'judged', and
  some 'taken' as training rows; 'ms a rollout' is 'encode', 'align' and 'rows' of
  one of the last. Peak memory is that of the process, less what it had before the
  round; it includes the encoded records of one peer.
  """
  text = bench_thl.text()
  sender = bench_thl.tokenizer(bench_thl.SENDER.value, 'byte_level', text)
  receiver = bench_thl.tokenizer(
    bench_thl.RECEIVER.value, 'sentencepiece', text
  )
  spawn = multiprocessing.get_context('spawn')
  columns = {}
  for peers in map(int, _PEERS.value):
    play = _Round(
      peers=peers,
      prompts=_PROMPTS.value,
      samples=_SAMPLES.value,
      tokens=_TOKENS.value,
      method=_METHOD.value,
      max_peer_groups=_GROUPS.value,
      verifier=_VERIFIER.value,
      text=text,
      sender=sender.to_json(),
      receiver=receiver.to_json(),
    )
    with spawn.Pool(1) as pool:
      columns[f'{peers} peers'] = pool.apply(_play, [play])
  rows = {
    name: {peers: column[name] for peers, column in columns.items()}
    for name in next(iter(columns.values()))
  }
  about = {
    'prompts': _PROMPTS.value,
    'rollouts a peer': _PROMPTS.value * _SAMPLES.value,
    'tokens a rollout': _TOKENS.value,
  }
  return bench_tools.Result(about, rows)


def _play(play: _Round) -> dict[str, float]:
  """Plays a round, and returns its column of the table."""
  sender, receiver = map(byte_tokenizer.from_json, (play.sender, play.receiver))
  config = base.get_config()
  config.method.name = play.method
  config.method.max_peer_groups = play.max_peer_groups
  config.reward.verifier = play.verifier
  method = algorithms.build(config.method)
  verifier = judge_lib.VERIFIERS[play.verifier](config.reward)
  with contextlib.closing(verifier):
    judge = judge_lib.build(config, verifier)
    verifier.verify_all([(verifier.stated(f'x+{i}'), 'y') for i in range(8)])
    return _measure(play, method, judge, sender, receiver)


def _measure(play, method, judge, sender, receiver) -> dict[str, float]:
  prompts = [
    records.Prompt(id=f'p{p:05}', text='', answer=_GOLD.format(i=10**6 + p))
    for p in range(play.prompts)
  ]
  bodies = _bodies(play, sender)
  names = [f'peer{n}' for n in range(play.peers)]
  inbox = inbox_lib.Inbox(
    'learner',
    {
      name: inbox_lib.Peer(sender.fingerprint, sender.vocab_size, 'bench')
      for name in names
    },
    inbox_lib.Limits(
      records=2**30, bytes=2**50, max_staleness=0, block_s=60.0, wait_s=60.0
    ),
  )
  published = functools.partial(
    publish.publish, kinds=method.kinds, texts=4, verifier=play.verifier
  )
  addressed = functools.partial(
    method.addressed, {'learner': names}, receiver='learner'
  )
  own = _groups(play, 'learner', 0, receiver, _bodies(play, receiver), prompts)
  clock, before = _Clock(), _mib('VmRSS')
  _STATUS.with_name('clear_refs').write_text('5')  # Forgets an earlier peak.
  for n, name in enumerate(names, 1):  # 0 is the learner.
    offered = published(_groups(play, name, n, sender, bodies, prompts))
    message = [*map(wire.encode, addressed(offered))]
    del offered
    with clock('receive'):
      inbox.deliver(name, 0, message)
    del message
  with clock('receive'):
    received = inbox.collect(0, method.kinds)
  del inbox
  receiver.encode_all = clock.stepwise('encode', receiver.encode_all)
  for name in ('chunks', 'project_extensive', 'project_mask'):
    setattr(align, name, clock.timed('align', getattr(align, name)))

  def judged(responses):
    return judge(
      [
        functions.completion(payload, finish, tokens, prompts[p])
        for p, payload, finish, tokens in responses
      ]
    )

  context = context_lib.Context(
    groups=own,
    received=received,
    settings=method.settings,
    tokenizer=receiver,
    limits=transfer.Limits(max_tokens=8 * play.tokens),
    judge=clock.timed('judge', judged),
    choose=method.choose,
    score=lambda rows, reference=False: [row.old_logp for row in rows],
    rng=np.random.default_rng(0),
    capability_ratio=dict.fromkeys(['learner', *names], 1.0),
  )
  with clock('choose'):
    assert len(context.peer_records) == len(received)
  with clock('rows'):
    batch = method.batch(context)
  steps = ('receive', 'choose', 'judge', 'encode', 'align', 'rows')
  carried_s = sum(clock.seconds[step] for step in steps[-3:])
  return {
    **{f'{step}, s': clock.seconds[step] for step in steps},
    'all, s': sum(clock.seconds.values()),
    'sent': sum(isinstance(r, records.Rollout) for r in received),
    'judged': context.log.judged,
    'taken': len(batch.peer),
    'ms a rollout': 1e3 * carried_s / max(len(batch.peer), 1),
    'peak MiB': _mib('VmHWM') - before,
  }


class _Clock:
  """Seconds by step; a step inside another one is taken out of that."""

  def __init__(self):
    self.seconds, self._inner_s = {}, [0.0]

  @contextlib.contextmanager
  def __call__(self, step):
    began = time.perf_counter()
    self._inner_s.append(0.0)
    yield
    took_s = time.perf_counter() - began
    inner_s = self._inner_s.pop()
    self._inner_s[-1] += took_s
    self.seconds[step] = self.seconds.get(step, 0.0) + took_s - inner_s

  def timed(self, step, function):
    def timed(*arguments, **options):
      with self(step):
        return function(*arguments, **options)

    return timed

  def stepwise(self, step, iterate):
    """The same for a function that returns an iterator."""

    def stepwise(*arguments):
      iterator = iterate(*arguments)
      advance = self.timed(step, lambda: next(iterator, None))
      while (item := advance()) is not None:
        yield item

    return stepwise


def _bodies(play, tokenizer) -> list[tuple[np.ndarray, bytes]]:
  """Texts that leave room for an answer, as ids and bytes."""
  lines, count = play.text.splitlines(keepends=True), play.tokens - 48
  bodies = []
  for i in range(min(_BODIES, len(lines))):
    text = ''.join(lines[i:] + lines[:i])[: 16 * play.tokens].encode()
    ids = tokenizer.encode(text)[:count]
    bodies.append((ids, tokenizer.decode(ids)))
  return bodies


def _groups(play, policy, number, tokenizer, bodies, prompts):
  """A policy's rollouts: a body, and an answer that no other rollout has."""
  rng, groups = np.random.default_rng(number), []
  for p, prompt in enumerate(prompts):
    group = []
    for sample in range(play.samples):
      k, correct = 1 + number * play.samples + sample, sample % 2
      answer = _ANSWER.format(k=k, rest=10**6 + p - k + 1 - correct)
      body_ids, body = bodies[rng.integers(len(bodies))]
      end = rf' \boxed{{{answer}}}'.encode()
      end_ids = tokenizer.encode(end)
      ids = np.concatenate([body_ids, end_ids, [tokenizer.eos_id]])
      ids = ids.astype(np.int32)
      logp = -rng.random(len(ids), np.float32)
      group.append(
        records.Rollout(
          header=records.Header(
            run='bench',
            round=0,
            policy=policy,
            prompt=prompt.id,
            sample=sample,
            version=0,
            tokenizer=tokenizer.fingerprint,
            created=0.0,
          ),
          payload=body + end,
          finish='stop',
          ids=ids,
          byte_lengths=tokenizer.byte_length_V[ids],
          sampling_logp=logp,
          policy_logp=logp,
          mask=np.ones(len(ids), bool),
          temperature=1.0,
          reward=float(correct),
          verdict='correct' if correct else 'wrong',
        )
      )
    groups.append(group)
  return groups


def _mib(field: str) -> float:
  """Memory of this process: 'VmRSS', or its peak so far, 'VmHWM'."""
  gc.collect()
  # Not that of `resource`, which a process takes over from its parent.
  status = _STATUS.read_text(encoding='utf-8')
  return int(status.partition(f'{field}:')[2].split()[0]) / 2**10
