"""Connects the policies of this process with their peers, from the config."""

from collections.abc import Collection, Mapping
import dataclasses

import ml_collections

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.see import in_process
from mrl_jax.see import inbox
from mrl_jax.see import journal
from mrl_jax.see import node
from mrl_jax.see import security
from mrl_jax.thl import byte_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
  """Where the policies of a run are, and what they share.

  peers = peers.check(config, method.kinds, tokenizers)
  ...                                # Check the rest of the config.
  node = peers.connect(run, folder)
  """

  config: ml_collections.ConfigDict
  kinds: Collection[str]  # Of records that the run's method shares.
  tokenizers: Mapping[str, byte_tokenizer.ByteTokenizer]  # By policy.
  network: security.Network  # Reaches policies that other processes train.
  stored: Mapping[str, journal.Reader]  # Journals that replace policies.

  @property
  def here(self) -> list[str]:
    """The policies that this process trains."""
    elsewhere = {*self.network.addresses, *self.stored}
    return [name for name in self.config.policies if name not in elsewhere]

  @property
  def journaled(self) -> frozenset[str]:
    """The kinds of records that this process writes to its journals."""
    journaled = {'published': self.kinds, 'all': records.KINDS, 'none': ()}
    return frozenset(journaled[self.config.see.journal])

  def connect(self, run: str, folder: str) -> node.Node:
    """Builds the endpoints of this process's policies, and their transports.

    Policies of this process exchange records in memory. Those of other processes
    are reached over gRPC, which is imported only if there are any. Journals
    replace policies that nobody trains.

    Args:
      run: the fingerprint that all processes of the run have.
      folder: where journals and received messages are written.

    Raises:
      InputError: the address to listen on cannot be used.
    """
    see = self.config.see
    listens_to = config_lib.listens_to(self.config.policies)
    limits = inbox.Limits(
      records=see.capacity_records,
      bytes=see.capacity_mib * 2**20,
      max_staleness=see.max_staleness,
      block_s=see.block_s,
      wait_s=see.wait_s,
    )
    known = {
      name: inbox.Peer(
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        run=self.stored[name].about.run if name in self.stored else run,
      )
      for name, tokenizer in self.tokenizers.items()
    }
    inboxes = {
      name: inbox.Inbox(
        name, {n: p for n, p in known.items() if n in listens_to[name]}, limits
      )
      for name in self.here
    }
    journals = {}
    for name in self.here if self.journaled else ():
      about = journal.About(
        policy=name,
        kinds=tuple(sorted(self.journaled)),
        **known[name]._asdict(),
      )
      journals[name] = journal.Writer(
        folder, about, self.tokenizers[name].to_json()
      )
    transports = [
      in_process.Transport(inboxes),
      journal.Transport(inboxes, self.stored, self.kinds),
    ]
    if self.network.addresses and self.kinds:  # Without kinds nothing is sent.
      from mrl_jax.see import rpc

      transports.append(
        rpc.Transport(inboxes, self.network, listens_to, limits, run, folder)
      )
    return node.Node(inboxes, transports, self.kinds, journals)


def check(
  config: ml_collections.ConfigDict,
  kinds: Collection[str],
  tokenizers: Mapping[str, byte_tokenizer.ByteTokenizer],
) -> Peers:
  """Resolves and validates where each policy is.

  Raises:
    InputError: an address or a journal cannot be used.
  """
  see, policies = config.see, config.policies
  network = security.Network(
    listen=see.listen,
    addresses={n: p.address for n, p in policies.items() if p.address},
    max_bytes=see.max_message_mib * 2**20,
    allow_insecure=see.allow_insecure,
    **see.tls,
  )
  network.check()
  stored = {
    name: _open_journal(name, policy.journal, kinds, tokenizers[name])
    for name, policy in policies.items()
    if policy.journal
  }
  return Peers(
    config=config,
    kinds=kinds,
    tokenizers=tokenizers,
    network=network,
    stored=stored,
  )


def _open_journal(policy, path, kinds, tokenizer) -> journal.Reader:
  """Opens a journal, and requires that it can replace the policy."""
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
