"""Parses a page as a browser does, and checks that it is safe."""

from html import parser
import re

_VOID = {'meta', 'br'}
_REFERENCES = {'src', 'href', 'srcset', 'data', 'action', 'poster', 'content'}


class Page(parser.HTMLParser):
  """The tags, attributes and text of a page whose elements are all closed."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.ids = set(), [], []
    self.styles, self._open, self._text = [], [], []
    self.feed(text)
    self.close()
    assert self._open == []

  def handle_starttag(self, tag, attributes):
    self.handle_startendtag(tag, attributes)
    if tag not in _VOID:
      self._open.append(tag)

  def handle_startendtag(self, tag, attributes):
    self.tags.add(tag)
    self.attributes += attributes
    self.ids += [value for name, value in attributes if name == 'id']
    self.styles += [value for name, value in attributes if name == 'style']

  def handle_endtag(self, tag):
    # The end tags of table cells may be omitted.
    while self._open[-1] in ('th', 'td') and tag not in ('th', 'td'):
      self._open.pop()
    assert self._open.pop() == tag

  def handle_data(self, data):
    if 'style' in self._open:
      self.styles.append(data)
    self._text.append(data)

  @property
  def text(self):
    return ' '.join(' '.join(self._text).split())


def check(text) -> Page:
  """Checks that a page loads no other file and runs no script."""
  page = Page(text)
  assert not page.tags & {
    'script', 'link', 'img', 'iframe', 'object', 'embed', 'form', 'base',
    'image', 'foreignobject', 'animate', 'set',
  }  # fmt: skip
  for name, value in page.attributes:
    assert not name.startswith('on'), name
    if name in _REFERENCES - {'content'}:
      assert value.startswith('#'), value
  for style in page.styles:
    assert '@import' not in style
    assert all(
      target.startswith('#') for target in re.findall(r'url\((.*?)\)', style)
    )
  assert len(page.ids) == len({*page.ids})
  policy = "default-src 'none'; style-src 'unsafe-inline'"
  assert ('content', policy) in page.attributes
  return page
