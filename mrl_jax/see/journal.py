"""What policies publish, on disk; and the transport from such a journal.

Each policy has a folder:

  see/llama/journal.json            whose it is, and whether it is finished
  see/llama/tokenizer.json          the tokenizer of its token ids
  see/llama/00000012.array_record   the records of round 12

Every file appears whole or not at all, so that a journal can be read while it
grows. A journal, finished or growing, can replace a policy: its records reach
the others round by round, as if the policy were training beside them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import functools
import os
import re

from absl import logging
from array_record.python import array_record_module
import msgspec

from mrl_jax import checks
from mrl_jax import files
from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import transport
from mrl_jax.see import wire

_ABOUT, _TOKENIZER = 'journal.json', 'tokenizer.json'
_PADDING = 2**17  # Most bytes of an array_record beside its records.
_ROUND = re.compile(r'(\d+)\.array_record')


class About(msgspec.Struct, frozen=True, kw_only=True):
  """The contents of `journal.json`."""

  policy: str  # That published the records.
  run: str  # Fingerprint of the policy's run.
  tokenizer: str  # Fingerprint of the policy's tokenizer.
  vocab_size: int
  kinds: tuple[str, ...]  # Of records that are written.
  samples: int = 0  # Rollouts of each prompt; 0 if an old journal.
  # The least and the largest reward that the run's config allowed.
  rewards: tuple[float, float] = (-records.LARGEST, records.LARGEST)
  finished: bool = False  # Whether no round will follow.
  schema: int = records.SCHEMA


class Writer:
  """Writes a policy's journal."""

  def __init__(
    self,
    directory: str,
    about: About,
    tokenizer: str,
    most_bytes: int = 2**62,
  ):
    """Opens a journal in `directory`; `tokenizer` is the policy's, as JSON.

    Rounds that would make it larger than `most_bytes` are not written.
    """
    self._folder = os.path.join(directory, about.policy)
    self._about, self._most_bytes = about, most_bytes
    os.makedirs(self._folder, exist_ok=True)
    self._sizes = {e.path: e.stat().st_size for e in os.scandir(self._folder)}
    files.write(os.path.join(self._folder, _TOKENIZER), tokenizer)
    self._write_about(about)

  def write(
    self,
    round: int,
    published: Sequence[records.Record],
    encode: Callable[[records.Record], bytes] = wire.encode,
  ) -> None:
    """Stores the records of a round; replaces what was stored of it.

    `encode` gives the bytes of a record, as for `transport.Outlet.send`.
    """
    path = _path(self._folder, round)
    aside = path + files.ASIDE
    encoded = [
      encode(record)
      for record in published
      if records.kind(record) in self._about.kinds
    ]
    others = sum(n for p, n in self._sizes.items() if p != path)
    if others + sum(map(len, encoded)) + _PADDING > self._most_bytes:
      logging.log_first_n(
        logging.WARNING,
        'round %d is not written to the journal %s, which has %d MiB: raise '
        'see.journal_mib, or set see.journal=none',
        3,
        round,
        self._folder,
        others // 2**20,
      )
      return
    writer = array_record_module.ArrayRecordWriter(aside, 'group_size:256')
    for data in encoded:
      writer.write(data)
    writer.close()
    os.replace(aside, path)
    self._sizes[path] = os.path.getsize(path)

  def finish(self) -> None:
    """Marks the journal as finished: no round will follow."""
    self._write_about(msgspec.structs.replace(self._about, finished=True))

  def _write_about(self, about):
    path = os.path.join(self._folder, _ABOUT)
    files.write(path, msgspec.json.encode(about))


class Reader:
  """Reads a policy's journal.

  Its methods raise `InputError` if a file is missing or damaged.
  """

  def __init__(self, directory: str, policy: str):
    """Opens the journal of `policy` in a folder of journals or a work dir."""
    inner = os.path.join(directory, 'see')
    parent = inner if os.path.isdir(inner) else directory
    self._folder = os.path.join(parent, policy)
    self._policy = policy
    self.about = self._read_about()  # As last read.

  def finished(self) -> bool:
    """Whether no round will follow; read anew while the journal grows."""
    if not self.about.finished:
      self.about = self._read_about()
    return self.about.finished

  def tokenizer(self) -> str:
    """Returns the policy's tokenizer as JSON."""
    return self._read_file(_TOKENIZER).decode()

  def rounds(self) -> list[int]:
    """Returns the rounds in the journal, in order."""
    matches = map(_ROUND.fullmatch, os.listdir(self._folder))
    return sorted(int(match[1]) for match in matches if match)

  def read(self, round: int) -> list[bytes]:
    """Returns the encoded records of a round; see `wire.decode`."""
    path = _path(self._folder, round)
    try:
      with contextlib.closing(
        array_record_module.ArrayRecordReader(path)
      ) as reader:
        return reader.read_all()
    except RuntimeError as error:
      raise checks.InputError(f'{path} is damaged: {error}') from error

  def _read_file(self, name: str) -> bytes:
    path = os.path.join(self._folder, name)
    checks.require(
      os.path.isfile(path),
      f'{self._folder} is not the journal of {self._policy}: it has no {name}. '
      'A run writes one unless see.journal is "none"',
    )
    with open(path, 'rb') as f:
      return f.read()

  def _read_about(self) -> About:
    try:
      about = wire.decode_untrusted(_DECODER, self._read_file(_ABOUT))
    except msgspec.DecodeError as error:
      raise checks.InputError(f'{self._folder}/{_ABOUT}: {error}') from error
    checks.require(
      about.policy == self._policy,
      f'{self._folder} is about {about.policy!r}, not {self._policy!r}',
    )
    return about


class Transport(transport.Transport):
  """Delivers the records of journals, which are sources of inboxes."""

  def __init__(
    self,
    inboxes: Mapping[str, inbox_lib.Inbox],
    readers: Mapping[str, Reader],
    kinds: Collection[str],
  ):
    """Delivers records of these kinds from the journals in `readers`."""
    self._kinds = kinds
    self._ended = set()  # (inbox, policy) where the journal has no more rounds.
    for inbox in inboxes.values():
      inbox.sources += [
        functools.partial(self._fetch, inbox, policy, reader)
        for policy, reader in readers.items()
        if policy in inbox.peers
      ]

  def _fetch(self, inbox, policy, reader, round) -> None:
    first = inbox.finished[policy] + 1
    if (inbox, policy) in self._ended or first > round:
      return
    try:
      # In this order: rounds that are missing in a finished journal never come.
      finished = reader.finished()
      written = reader.rounds()
    except (checks.InputError, OSError) as error:
      logging.log_first_n(
        logging.WARNING, 'cannot read the journal of %s: %s', 10, policy, error
      )
      return
    # Up to the last round that was written, as the policy skips others.
    for n in range(first, min(round, max(written, default=-1)) + 1):
      data = []
      if n in written:
        try:
          data = reader.read(n)
        except checks.InputError as error:
          inbox.refuse(policy, 'journal', 'damaged', str(error))
      inbox.deliver(policy, n, data, self._kinds, may_block=False)
    if inbox.finished[policy] < round and finished:
      logging.warning('the journal of %s ends before round %d', policy, round)
      self._ended.add((inbox, policy))
      inbox.end(policy)


def _path(folder: str, round: int) -> str:
  return os.path.join(folder, f'{round:08d}.array_record')


_DECODER = msgspec.json.Decoder(About)
