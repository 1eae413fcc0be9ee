"""Makes untrusted text safe to show."""

import unicodedata


def printable(text: str) -> str:
  """Escapes control characters in a line, so that no terminal obeys them."""
  return ''.join(map(_escaped, text))


def _escaped(c: str) -> str:
  code = ord(c)
  # Combining marks would change the character before them.
  if c.isprintable() and not unicodedata.category(c).startswith('M'):
    return c
  if 0xDC80 <= code <= 0xDCFF:
    return f'\\x{code - 0xDC00:02x}'  # A byte that is not UTF-8.
  if code < 0x80:
    return c.encode('unicode_escape').decode()
  return f'\\u{code:04x}' if code < 0x10000 else f'\\U{code:08x}'
