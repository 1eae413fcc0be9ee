"""Figures of THL show the numbers that they are given, legibly."""

import msgspec
import numpy as np
import pytest

from mrl_jax.analysis import alignment
from mrl_jax.analysis.figures import thl as figures
from mrl_jax.thl import transfer
from tests import examples
from tests.analysis.figures import legible

BYTE_LEVEL, SENTENCEPIECE = (
  examples.tokenizer('byte_level'),
  examples.tokenizer('sentencepiece'),
)
LIMITS = transfer.Limits(max_tokens=1000)
TEXT = b'sort 7 0 2\n= 0 2 7'


def side(tokens, chunk, logp=None):
  """Tokens with as many bytes as letters."""
  if logp is None:
    logp = -np.arange(1, len(tokens) + 1) / 8
  return alignment.Side(
    tokens=tokens,
    lengths=np.array([len(t) for t in tokens], np.int32),
    logp=np.array(logp, np.float32),
    chunk=np.array(chunk, np.int32),
  )


# Boundaries of the first at bytes 1 3 5 6, of the second at 2 3 4 5 6.
SENT = side(['a', 'bc', 'de', '∎'], [0, 0, 1, 2], [-1, -2, -5, -4])
CARRIED = side(
  ['ab', 'c', 'd', 'e', '∎'], [0, 0, 1, 1, 2], [-2, -1, -2.5, -2.5, -4]
)


def residuals(texts, limits=LIMITS):
  found = []
  for text in texts:
    found.append(transfer.Residual())
    rollout = examples.rollout(text, encoder=BYTE_LEVEL)
    transfer.transfer(rollout, SENTENCEPIECE, limits, found[-1])
  return found


def test_kinds_of_chunks_are_those_that_a_residual_counts():
  assert figures.kinds(SENT, CARRIED) == ['n:m', '1:n', '1:1']
  assert figures.kinds(CARRIED, SENT) == ['n:m', 'n:1', '1:1']
  for text in examples.TEXTS:
    (one,) = residuals([text.encode()])
    rollout = examples.rollout(text.encode(), encoder=BYTE_LEVEL)
    found = figures.kinds(*alignment.sides(rollout, SENTENCEPIECE, LIMITS))
    assert one.chunks == {k: found.count(k) for k in one.chunks}
    assert sum(one.chunks.values()) == len(found)


def shown(figure):
  """The texts in the axes, by text and byte."""
  (axes,) = figure.axes
  return {(t.get_text(), t.get_position()[0]): t for t in axes.texts}


def header(figure):
  """The text below the title."""
  return figure.texts[1].get_text()


def boundaries(figure):
  """Positions of the black lines."""
  return {
    (line.get_xdata()[0], max(line.get_ydata()))
    for line in figure.axes[0].lines
    if len(line.get_xdata()) == 2
  }


def test_tokens_and_sums_stand_over_their_bytes():
  figure = figures.alignment(SENT, CARRIED, ('one', 'other'))
  found = shown(figure)
  for text, x in (
    *(('a', 0.5), ('bc', 2), ('de', 4), ('∎', 5.5)),
    *(('ab', 1), ('c', 2.5), ('d', 3.5), ('e', 4.5)),
    *(('-1.00', 0.5), ('-2.00', 2), ('-2.00', 1), ('-1.00', 2.5)),
    *(('-2.50', 3.5), ('-2.50', 4.5)),
  ):
    assert (text, x) in found
  middle = found['-3.00', 1.5].get_position()[1]
  between = [
    (t.get_text(), t.get_position()[0])
    for t in figure.axes[0].texts
    if t.get_position()[1] == middle
  ]
  assert between == [('-3.00', 1.5), ('-5.00', 4), ('-4.00', 5.5)]
  assert {x for x, _ in boundaries(figure)} == {0, 3, 5, 6}
  heights = [
    found[key].get_position()[1]
    for key in (('a', 0.5), ('-3.00', 1.5), ('ab', 1))
  ]
  assert heights == sorted(heights, reverse=True)
  assert 'Above: tokens of one. Below: tokens of other.' in header(figure)
  (legend,) = figure.legends
  assert [t.get_text() for t in legend.get_texts()] == ['1:1', '1:n', 'n:m']
  colors = [p.get_facecolor() for p in figure.axes[0].patches]
  for patch, chunk in zip(legend.get_patches(), (2, 1, 0), strict=True):
    starts = [0, 3, 5]
    (band,) = [
      p
      for p, color in zip(figure.axes[0].patches, colors, strict=True)
      if color == patch.get_facecolor()
    ]
    assert band.get_x() == starts[chunk]


def test_lines_end_at_common_boundaries():
  lengths = [10, 5, 4, 12, 1]
  sent = side(['x' * n for n in lengths], range(5))
  figure = figures.alignment(sent, sent, ('a', 'b'))
  by_line = {}
  for x, y in boundaries(figure):
    by_line.setdefault(y, set()).add(x)
  ends = [by_line[y] for y in sorted(by_line, reverse=True)]
  assert ends == [{0, 10, 15}, {0, 4, 16}, {0, 1}]


def test_a_chunk_is_never_cut():
  sent = side(['x' * 3, 'y' * 30, 'z'], range(3))
  carried = side(['x' * 3, *'y' * 30, 'z'], [0, *[1] * 30, 2])
  figure = figures.alignment(sent, carried, ('a', 'b'))
  xs = sorted({x for x, _ in boundaries(figure)})
  assert xs == [0, 1, 3, 30]
  assert figure.axes[0].get_xlim()[1] >= 30


def test_only_the_first_lines_of_a_long_rollout_are_drawn():
  sent = side(['x' * 16] * 11, range(11))
  figure = figures.alignment(sent, sent, ('a', 'b'))
  assert '3 more chunks follow' in header(figure)
  assert len({y for _, y in boundaries(figure)}) == 8
  whole = figures.alignment(side(['x'], [0]), side(['x'], [0]), ('a', 'b'))
  assert 'follow' not in header(whole)


def test_a_control_token_is_marked_where_it_was_sampled():
  rollout = examples.rollout(b'= 13', encoder=BYTE_LEVEL)
  end = int(rollout.byte_lengths[0])
  values = {'ids': 0, 'byte_lengths': 0, 'sampling_logp': -1.0,
            'policy_logp': -1.0, 'mask': True}  # fmt: skip
  changed = {k: np.insert(getattr(rollout, k), 1, v) for k, v in values.items()}
  rollout = msgspec.structs.replace(rollout, **changed)
  sent, carried = alignment.sides(rollout, SENTENCEPIECE, LIMITS)
  assert sent.tokens[1] == '∅'
  figure = figures.alignment(sent, carried, ('a', 'b'))
  marks = [line for line in figure.axes[0].lines if line.get_marker() == 'v']
  assert [mark.get_xdata()[0] for mark in marks] == [end]


def test_characters_that_the_font_lacks_are_escaped():
  sent = side(['日', 'é'], range(2))
  texts = {text for text, _ in shown(figures.alignment(sent, sent, ('a', 'b')))}
  assert {'\\u65e5', 'é'} <= texts


def test_small_log_probabilities_are_not_rounded_to_zero():
  values = [-1.25, -0.006, -0.0049, -3e-7, 0]
  sent = side([*'abcde'], range(5), values)
  texts = [*shown(figures.alignment(sent, sent, ('a', 'b')))]
  for x, text in enumerate(('-1.25', '-0.01', '-5e-3', '-3e-7', '0')):
    assert (text, x + 0.5) in texts


def test_names_are_not_taken_for_mathematics():
  bad = '$\\frac$'
  sent = side([bad], [0])
  figures.alignment(sent, sent, (bad, bad)).draw_without_rendering()
  figures.residual({bad: []}).draw_without_rendering()


def test_the_carried_share_is_what_each_limit_lets_through():
  texts = [*(t.encode() for t in examples.TEXTS), 'a ▁'.encode(), b'2']
  errors, shares = figures.carried_share(residuals(texts))
  assert shares[-1] == 5 / 6  # A literal ▁ is never carried.
  assert (np.diff(errors) > 0).all()
  for error, share in zip(errors, shares, strict=True):
    for limit, at_least in ((error, True), (error - 1e-6, False)):
      limits = transfer.Limits(max_tokens=1000, max_residual=limit)
      carried = sum(not r.refused for r in residuals(texts, limits=limits))
      assert (carried >= share * len(texts) - 1e-6) == at_least
      assert carried <= share * len(texts) + 1e-6


def test_shares_of_nothing_are_zero():
  limits, shares = figures.carried_share([])
  assert len(limits) == len(shares) == 0
  assert set(figures.chunk_shares([]).values()) == {0}
  figures.residual({'a to b': []}).draw_without_rendering()


def test_shares_of_chunks_are_over_all_rollouts():
  found = [
    transfer.Residual(chunks={'1:1': 1, 'n:m': 2}),
    transfer.Residual(chunks={'1:1': 4, '1:n': 1}),
  ]
  assert figures.chunk_shares(found) == {
    '1:1': 5 / 8, '1:n': 1 / 8, 'n:1': 0, 'n:m': 2 / 8
  }  # fmt: skip


def test_directions_are_drawn_at_their_numbers():
  found = {
    'a to b': [
      transfer.Residual(receiver_tokens=4, chunks={'1:n': 2}),  # e_seg 1 / 2
      transfer.Residual(receiver_tokens=4, chunks={'1:1': 3}),  # 1 / 4
    ],
    'b to a': [
      transfer.Residual(receiver_tokens=2, chunks={'n:1': 2}),  # 0
      transfer.Residual(refused={'round_trip': 1}),
    ],
  }
  top, bottom = figures.residual(found).axes
  for line, name, points in zip(
    top.lines,
    found,
    (
      [(0, 0), (0.25, 50), (0.5, 100), (1, 100)],
      [(0, 0), (0, 50), (1, 50)],
    ),
    strict=True,
  ):
    assert line.get_label() == name
    assert [*map(tuple, line.get_xydata())] == points
    assert line.get_drawstyle() == 'steps-post'
  bars = [
    (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width())
    for bar in bottom.patches
    if bar.get_width()
  ]
  assert bars == [
    (0, 0, pytest.approx(60)), (0, pytest.approx(60), pytest.approx(40)),
    (1, 0, 100),
  ]  # fmt: skip


def test_an_alignment_is_legible():
  text = ' '.join(examples.TEXTS[:2]).encode()
  rollout = examples.rollout(text, encoder=BYTE_LEVEL)
  sent, carried = alignment.sides(rollout, SENTENCEPIECE, LIMITS)
  figure = figures.alignment(sent, carried, ('byte-level', 'SentencePiece'))
  legible.check(figure, least=3)
  (axes,) = figure.axes
  # Two for each token, and one for each chunk.
  assert len(axes.texts) == 2 * (len(sent.logp) + len(carried.logp)) + (
    sent.chunk[-1] + 1
  )
  for text in axes.texts:
    assert text.get_fontsize() / 72 / 8 * 800 >= 8


def test_residuals_are_legible():
  texts = [text.encode() for text in examples.TEXTS]
  found = {'byte-level to SentencePiece': residuals(texts), 'none': []}
  legible.check(figures.residual(found), least=7)
