"""Who learns with whom: this process's part in the exchange, from the config."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses

import ml_collections

from mrl_jax import checks
from mrl_jax import config as config_lib
from mrl_jax import records
from mrl_jax.see import inbox
from mrl_jax.see import journal
from mrl_jax.see import node
from mrl_jax.see import security
from mrl_jax.thl import byte_tokenizer

Tokenizers = Mapping[str, byte_tokenizer.ByteTokenizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
  """Where the policies of a config are.

  Attributes:
    here: those that this process trains.
    network: those that other processes train.
    stored: journals that stand for the rest.
    journaled: kinds of records that the policies of this process write down.
  """

  here: Sequence[str]
  network: node.Network
  stored: Mapping[str, journal.Reader]
  journaled: frozenset[str]


def check(
  config: ml_collections.ConfigDict,
  kinds: Collection[str],
  tokenizers: Tokenizers,
) -> Peers:
  """Finds out where the policies are, and that they can be there.

  Args:
    config: of the run.
    kinds: of records that its method shares.
    tokenizers: of all policies.

  Raises:
    InputError: an address or a journal cannot be used.
  """
  see = config.see
  network = node.Network(
    listen=see.listen,
    addresses={n: p.address for n, p in see.peers.items() if p.address},
    security=security.Security(**see.tls, allow_insecure=see.allow_insecure),
    max_bytes=see.max_message_mib * 2**20,
  )
  network.check()
  stored = {
    name: _stored(name, peer.journal, kinds, tokenizers[name])
    for name, peer in see.peers.items()
    if peer.journal
  }
  journaled = {'published': kinds, 'all': records.KINDS, 'none': ()}
  return Peers(
    here=[n for n in config.policies if n not in {*network.addresses, *stored}],
    network=network,
    stored=stored,
    journaled=frozenset(journaled[see.journal]),
  )


def _stored(name, path, kinds, tokenizer) -> journal.Reader:
  """A journal that can stand for a policy."""
  reader = journal.Reader(path, name)
  key, about = f'see.peers.{name}.journal', reader.about
  lacking = {*kinds} - {*about.kinds}
  checks.require(
    not lacking,
    f'{key} has no {" and no ".join(sorted(lacking))}, which this method needs; '
    'a run with --config.see.journal=all writes records of all kinds',
  )
  checks.require(
    about.tokenizer == tokenizer.fingerprint,
    f'{key} was written with another tokenizer than policies.{name} has: '
    f'fingerprint {about.tokenizer} there, {tokenizer.fingerprint} here',
  )
  return reader


def connect(
  config: ml_collections.ConfigDict,
  kinds: Collection[str],
  tokenizers: Tokenizers,
  peers: Peers,
  *,
  run: str,
  folder: str,
) -> node.Node:
  """The endpoints of the policies of this process.

  Args:
    config: of the run.
    kinds: of records that its method shares.
    tokenizers: of all policies.
    peers: what `check` found.
    run: the fingerprint that all processes of the run have.
    folder: where journals are written.

  Raises:
    InputError: the address to listen on is taken.
  """
  see = config.see
  known = {}
  for name, tokenizer in tokenizers.items():
    theirs = peers.stored[name].about.run if name in peers.stored else run
    known[name] = inbox.Peer(
      tokenizer.fingerprint, tokenizer.vocab_size, theirs
    )
  journals = {}
  for name in peers.here if peers.journaled else ():
    about = journal.About(
      policy=name,
      run=run,
      tokenizer=known[name].tokenizer,
      vocab_size=known[name].vocab_size,
      kinds=tuple(sorted(peers.journaled)),
    )
    journals[name] = journal.Writer(folder, about, tokenizers[name].to_json())
  return node.Node(
    known,
    inbox.Limits(
      records=see.capacity_records,
      bytes=see.capacity_mib * 2**20,
      max_staleness=see.max_staleness,
      block_s=see.block_s,
      wait_s=see.wait_s,
    ),
    kinds,
    listens_to=config_lib.listens_to(config.policies),
    run=run,
    network=peers.network,
    stored=peers.stored,
    journals=journals,
    folder=folder,
  )
