"""Connects the policies of this process with their peers, from the config."""

from collections.abc import Collection, Mapping
import functools

import ml_collections

from mrl_jax import algorithms
from mrl_jax import checks
from mrl_jax import cluster
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.rewards import functions
from mrl_jax.see import exchange
from mrl_jax.see import in_process
from mrl_jax.see import inbox
from mrl_jax.see import journal
from mrl_jax.see import security
from mrl_jax.see import wire
from mrl_jax.thl import byte_tokenizer


class Peers:
  """Where the policies of a run are, and what they share.

  places = peers.Peers(config, method.kinds, tokenizers)
  ...                                # Check the rest of the config.
  node = places.connect(run, folder, received)
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    kinds: Collection[str],
    tokenizers: Mapping[str, byte_tokenizer.ByteTokenizer],
  ):
    """Resolves and validates where each policy is.

    The method shares records of these kinds; every policy has a tokenizer.
    Raises InputError if an address or a journal cannot be used.
    """
    self._config, self._kinds, self._tokenizers = config, kinds, tokenizers
    see, policies = config.see, config.policies
    # Reaches policies that other processes train.
    self.network = security.Network(
      listen=see.listen,
      addresses={n: p.address for n, p in policies.items() if p.address},
      max_bytes=see.max_message_mib * 2**20,
      allow_insecure=see.allow_insecure,
      **see.tls,
    )
    self.network.check()
    self._stored = {  # Journals that replace policies.
      name: _open_journal(name, policy.journal, kinds, tokenizers[name])
      for name, policy in policies.items()
      if policy.journal
    }

  @property
  def here(self) -> list[str]:
    """The policies that this process trains."""
    elsewhere = {*self.network.addresses, *self._stored}
    return [name for name in self._config.policies if name not in elsewhere]

  @property
  def journaled(self) -> frozenset[str]:
    """The kinds of records that this process writes to its journals."""
    journaled = {'published': self._kinds, 'all': records.KINDS, 'none': ()}
    return frozenset(journaled[self._config.see.journal])

  def connect(self, run: str, folder: str, received: str) -> exchange.Node:
    """Builds the endpoints of this process's policies, and their transports.

    Policies of this process exchange records in memory. Those of other processes
    are reached over gRPC, which is imported only if there are any. Journals
    replace policies that nobody trains.

    `run` is the fingerprint that all processes of the run have; journals are
    written to `folder`, and received messages to `received`. Raises InputError if
    the address to listen on cannot be used.

    In a cluster the leader alone exchanges: other processes have endpoints that
    send nothing and receive nothing.
    """
    see = self._config.see
    listens_to = config_lib.listens_to(self._config.policies)
    capacity = config_lib.capacity(self._config)
    limits = inbox.Limits(
      records=capacity.records,
      bytes=capacity.bytes,
      max_staleness=see.max_staleness,
      block_s=see.block_s,
      wait_s=see.wait_s,
      rounds=self._config.train.rounds,
      max_ahead=see.max_ahead,
      spool_bytes=config_lib.spool_bytes(self._config),
    )
    known = {
      name: self._peer(name, tokenizer, run)
      for name, tokenizer in self._tokenizers.items()
    }
    inboxes = {
      name: inbox.Inbox(
        name, {n: p for n, p in known.items() if n in listens_to[name]}, limits
      )
      for name in self.here
    }
    if not cluster.leads():
      return exchange.Node(inboxes, [], self._kinds)
    journals = {}
    for name in self.here if self.journaled else ():
      peer = known[name]
      about = journal.About(
        policy=name,
        run=peer.run,
        tokenizer=peer.tokenizer,
        vocab_size=peer.vocab_size,
        kinds=tuple(sorted(self.journaled)),
        samples=peer.samples,
        rewards=peer.rewards,
      )
      journals[name] = journal.Writer(
        folder,
        about,
        self._tokenizers[name].to_json(),
        see.journal_mib * 2**20,
      )
    transports = [
      in_process.Transport(inboxes),
      journal.Transport(inboxes, self._stored, self._kinds),
    ]
    if self.network.addresses and self._kinds:  # Without kinds nothing is sent.
      from mrl_jax.see import rpc

      transports.append(
        rpc.Transport(inboxes, self.network, listens_to, limits, run, received)
      )
    method = algorithms.build(self._config.method)
    addressed = functools.partial(method.addressed, listens_to)
    return exchange.Node(inboxes, transports, self._kinds, journals, addressed)

  def _peer(self, name, tokenizer, run) -> inbox.Peer:
    """What the records of a policy must agree with."""
    peer = inbox.Peer(
      tokenizer=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, run=run
    )
    if name in self._stored:  # By a run whose rounds may be larger than ours.
      about = self._stored[name].about
      return peer._replace(
        run=about.run, samples=about.samples, rewards=about.rewards
      )
    most = config_lib.round_size(self._config)
    return peer._replace(
      samples=self._config.train.samples,
      rewards=functions.reward_range(self._config.reward),
      round_records=most.records,
      round_bytes=most.bytes,
    )


def _open_journal(policy, path, kinds, tokenizer) -> journal.Reader:
  reader = journal.Reader(path, policy)
  key, about = f'policies.{policy}.journal', reader.about
  missing = {*kinds} - {*about.kinds}
  checks.require(
    not missing,
    f'{key} has no {" and no ".join(sorted(missing))}, which this method needs; '
    'a run with --config.see.journal=all writes records of all kinds',
  )
  checks.require(
    about.tokenizer == tokenizer.fingerprint,
    f'{key} was written with another tokenizer than policies.{policy} has: '
    f'fingerprint {about.tokenizer} there, {tokenizer.fingerprint} here',
  )
  return reader


def collect(
  endpoint: exchange.Endpoint, round: int, kinds: Collection[str]
) -> list[records.Record]:
  """What peers published, which the leader of a cluster collects for all."""
  if cluster.size() == 1:
    return endpoint.collect(round, kinds)
  encoded = cluster.decided(
    f'what peers published in round {round}',
    lambda: [wire.encode(record) for record in endpoint.collect(round, kinds)],
    list[bytes],
  )
  return [wire.decode(data) for data in encoded]
