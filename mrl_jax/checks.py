"""Errors that tell a user what was wrong, where, and what to do."""

from collections.abc import Iterable
import difflib


class InputError(ValueError):
  """The user gave something that cannot be used; the message says how to fix it."""


def require(condition: bool, message: str) -> None:
  """Raises `InputError(message)` unless `condition` holds."""
  if not condition:
    raise InputError(message)


def choose(name: str, table: dict, what: str):
  """Returns `table[name]`; the error for an unknown name suggests the nearest."""
  if name in table:
    return table[name]
  raise InputError(f'unknown {what} {name!r}.{did_you_mean(name, table)}')


def did_you_mean(name: str, known: Iterable[str]) -> str:
  known = list(known)
  near = difflib.get_close_matches(str(name), known, n=1)
  hint = f' Did you mean {near[0]!r}?' if near else ''
  return f'{hint} Known: {", ".join(sorted(known))}.'
