"""What a policy published, on disk; and a policy that is only a journal.

A journal is a folder of its own for each policy:

  see/llama/journal.json            whose it is, and whether it is finished
  see/llama/tokenizer.json          what its ids stand for
  see/llama/00000012.array_record   the records of round 12

Every file is there whole or not at all, so that a journal can be read while it
grows. A finished or growing journal takes the place of a policy: its records
are offered to the others, round by round, as if it were training beside them.
"""

from collections.abc import Collection, Sequence
import contextlib
import os

from absl import logging
from array_record.python import array_record_module
import msgspec

from mrl_jax import checks
from mrl_jax import files
from mrl_jax import records
from mrl_jax.see import inbox as inbox_lib
from mrl_jax.see import wire

_ABOUT, _TOKENIZER, _SUFFIX = 'journal.json', 'tokenizer.json', '.array_record'


class About(msgspec.Struct, frozen=True, kw_only=True):
  """What `journal.json` says.

  Attributes:
    policy: whose records these are.
    run: the fingerprint of what was run.
    tokenizer, vocab_size: fingerprint and size of the policy's tokenizer.
    kinds: of records that are written.
    finished: whether more rounds will follow.
    schema: of the records.
  """

  policy: str
  run: str
  tokenizer: str
  vocab_size: int
  kinds: tuple[str, ...]
  finished: bool = False
  schema: int = records.SCHEMA


class Writer:
  """Writes a policy's records; a round that is written again is replaced."""

  def __init__(self, directory: str, about: About, tokenizer: str):
    """Into `directory`, with the tokenizer as its own JSON."""
    self._folder = os.path.join(directory, about.policy)
    self._about = about
    os.makedirs(self._folder, exist_ok=True)
    files.write(os.path.join(self._folder, _TOKENIZER), tokenizer)
    self._describe(about)

  def write(self, round: int, published: Sequence[records.Record]) -> None:
    path = _path(self._folder, round)
    aside = path + files.ASIDE
    writer = array_record_module.ArrayRecordWriter(aside, 'group_size:256')
    for record in published:
      if records.kind(record) in self._about.kinds:
        writer.write(wire.encode(record))
    writer.close()
    os.replace(aside, path)

  def finish(self) -> None:
    """Tells readers that no round will follow."""
    self._describe(msgspec.structs.replace(self._about, finished=True))

  def _describe(self, about):
    text = msgspec.json.encode(about).decode()
    files.write(os.path.join(self._folder, _ABOUT), text)


class Reader:
  """A policy's journal; reading raises `InputError` for what is damaged.

  Attributes:
    about: what the journal says of itself.
  """

  def __init__(self, directory: str, policy: str):
    """The journal of `policy` in a folder of journals, or in a work dir."""
    inner = os.path.join(directory, 'see')
    parent = inner if os.path.isdir(inner) else directory
    self._folder = os.path.join(parent, policy)
    self._policy = policy
    self.about = self._read_about()

  def _read_about(self) -> About:
    path = os.path.join(self._folder, _ABOUT)
    checks.require(
      os.path.isfile(path),
      f'{self._folder} is not the journal of {self._policy}: it has no '
      f'{_ABOUT}. A run writes one unless see.journal is "none"',
    )
    with open(path, 'rb') as f:
      try:
        about = wire.strictly(_DECODER, f.read())
      except msgspec.DecodeError as error:
        raise checks.InputError(f'{path}: {error}') from error
    checks.require(
      about.policy == self._policy,
      f'{path} is about {about.policy!r}, not {self._policy!r}',
    )
    return about

  def finished(self) -> bool:
    """Whether no round will follow; a journal may grow while it is read."""
    if not self.about.finished:
      self.about = self._read_about()
    return self.about.finished

  def tokenizer(self) -> str:
    """The policy's tokenizer, as its own JSON."""
    path = os.path.join(self._folder, _TOKENIZER)
    checks.require(os.path.isfile(path), f'{path} is missing')
    with open(path, encoding='utf-8') as f:
      return f.read()

  def rounds(self) -> list[int]:
    """The rounds that are there, in order."""
    parts = [os.path.splitext(name) for name in os.listdir(self._folder)]
    return sorted(
      int(stem)
      for stem, suffix in parts
      if suffix == _SUFFIX and stem.isdecimal()
    )

  def read(self, round: int) -> list[bytes]:
    """The records of a round, as they are on the wire."""
    path = _path(self._folder, round)
    try:
      with contextlib.closing(
        array_record_module.ArrayRecordReader(path)
      ) as reader:
        return reader.read_all()
    except RuntimeError as error:
      raise checks.InputError(f'{path} is damaged: {error}') from error


class Source:
  """A journal as a peer."""

  def __init__(
    self, reader: Reader, inbox: inbox_lib.Inbox, kinds: Collection[str]
  ):
    """Delivers what `reader` has of these kinds to `inbox`."""
    self._reader, self._inbox, self._kinds = reader, inbox, kinds
    self._ended = False

  def fetch(self, round: int) -> None:
    policy, inbox = self._reader.about.policy, self._inbox
    first = inbox.heard(policy) + 1
    if self._ended or first > round:
      return
    try:
      finished = self._reader.finished()  # Before looking for the last rounds.
      written = self._reader.rounds()
    except (checks.InputError, OSError) as error:
      logging.log_first_n(
        logging.WARNING, 'the journal of %s is silent: %s', 10, policy, error
      )
      return
    for there in written:
      if first <= there <= round:
        self._deliver(policy, there)
    if inbox.heard(policy) >= round:
      return
    if written and written[-1] > round:  # It was left out.
      inbox.deliver(policy, round, [])
    elif finished:
      logging.warning('the journal of %s ends before round %d', policy, round)
      self._ended = True
      inbox.ended(policy)

  def _deliver(self, policy, round):
    try:
      data = self._reader.read(round)
    except checks.InputError as error:
      self._inbox.refuse(policy, 'journal', 'damaged', str(error))
      data = []
    self._inbox.deliver_encoded(
      policy, round, data, kinds=self._kinds, waits=False
    )


def _path(folder, round):
  return os.path.join(folder, f'{round:08d}{_SUFFIX}')


_DECODER = msgspec.json.Decoder(About)
