"""Fixtures of the exchange's tests."""

import contextlib

import pytest


@pytest.fixture
def stack():
  """Closes what a test opens, the last first."""
  with contextlib.ExitStack() as opened:
    yield opened
