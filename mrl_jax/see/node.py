"""One process's part of the exchange: its policies, and the ways to others."""

from collections.abc import Collection, Mapping
import dataclasses
import os

from mrl_jax import checks
from mrl_jax.see import exchange
from mrl_jax.see import in_process
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import journal as journal_lib
from mrl_jax.see import rpc
from mrl_jax.see import security as security_lib
from mrl_jax.see import spool as spool_lib

_RECEIVED = '_received'  # No policy is called this.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """Where policies of other processes are.

  Attributes:
    listen: HOST:PORT where they find the policies of this one; '' for nowhere.
    addresses: of those in other processes, by name.
    security: of all connections.
    max_bytes: of a message.
  """

  listen: str = ''
  addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)
  security: security_lib.Security = dataclasses.field(
    default_factory=security_lib.Security
  )
  max_bytes: int = 16 * 2**20

  def check(self) -> None:
    """Refuses what nobody could use, or anybody.

    Raises:
      InputError: says what to give.
    """
    checks.require(
      bool(self.listen) or not self.addresses,
      'see.listen is empty; policies of other processes need an address, '
      'HOST:PORT, where they find those of this one',
    )
    for address in filter(None, (self.listen, *self.addresses.values())):
      self.security.check(address)


class Node:
  """The endpoints of the policies that are trained in this process.

    node = Node(...)
    ...            # restore endpoints
    node.open()
    ...            # node.endpoints['llama'].publish(...)
    node.close()

  A policy listens to others of this process in memory, to those of other
  processes over gRPC, and to journals in place of policies that are not trained
  at all. It is sent, waits for and takes the records of nobody else.

  Attributes:
    endpoints: by policy.
  """

  def __init__(
    self,
    policies: Mapping[str, inbox_lib.Peer],
    limits: inbox_lib.Limits,
    kinds: Collection[str],
    *,
    listens_to: Mapping[str, Collection[str]] | None = None,
    run: str = '',
    network: Network = Network(),
    stored: Mapping[str, journal_lib.Reader] | None = None,
    journals: Mapping[str, journal_lib.Writer] | None = None,
    folder: str = '',
  ):
    """Connects policies.

    Args:
      policies: all of them, wherever they are.
      limits: of each queue.
      kinds: of records that are shared; none at all connects nobody.
      listens_to: the policies that each policy listens to, wherever it is; by
        default everybody listens to everybody else.
      run: what other processes must run, too.
      network: where they are.
      stored: journals that take the place of policies, by name.
      journals: what the policies of this process write, by name.
      folder: where what other processes sent is kept until a checkpoint.

    Raises:
      InputError: an address cannot be used.
    """
    stored, journals = stored or {}, journals or {}
    if listens_to is None:
      listens_to = {name: {*policies} - {name} for name in policies}
    # Nobody is listened to about nothing.
    remote = network.addresses if kinds else {}
    here = [p for p in policies if p not in {*network.addresses, *stored}]
    self._limits = limits
    self._inboxes = {
      name: inbox_lib.Inbox(
        name,
        {n: p for n, p in policies.items() if n in listens_to[name]},
        limits,
      )
      for name in here
    }
    for inbox in self._inboxes.values():
      inbox.sources += [
        journal_lib.Source(reader, inbox, kinds)
        for peer, reader in stored.items()
        if peer in inbox.peers
      ]
    self._spool = self._server = None
    if remote:
      network.check()
      self._spool = spool_lib.Spool(os.path.join(folder, _RECEIVED))
      self._server = rpc.Server(
        network.listen,
        self._inboxes,
        senders=remote,
        run=run,
        security=network.security,
        max_bytes=network.max_bytes,
        spool=self._spool,
      )
    self.endpoints = {}
    for name, inbox in self._inboxes.items():
      outlets = {
        peer: in_process.Outlet(name, theirs)
        for peer, theirs in self._inboxes.items()
        if name in theirs.peers
      }
      outlets |= {
        peer: rpc.Outlet(
          name,
          peer,
          address,
          run=run,
          security=network.security,
          limits=limits,
          max_bytes=network.max_bytes,
        )
        for peer, address in remote.items()
        if name in listens_to[peer]
      }
      self.endpoints[name] = exchange.Endpoint(
        inbox, outlets, journals.get(name), kinds
      )

  @property
  def refused(self) -> dict[str, int]:
    """Messages of other processes that were not taken, by reason."""
    return dict(self._server.refused) if self._server else {}

  def open(self) -> None:
    """Begins to listen to other processes; endpoints are restored before."""
    if self._server:
      self._server.start()

  def saved(self, rounds: int) -> None:
    """Told of a checkpoint after so many rounds, forgets what it holds."""
    before = rounds - self._limits.max_staleness
    if self._spool:
      self._spool.forget(before)
    for inbox in self._inboxes.values():
      inbox.forget(before)

  def close(self) -> None:
    """Waits, for a bounded time, until others have all that was published."""
    for endpoint in self.endpoints.values():
      endpoint.close()
    if self._server:
      self._server.close()
