"""Fixtures of the exchange's tests."""

import contextlib

from absl import logging
import pytest

from mrl_jax.see import rpc


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
  monkeypatch.setattr(rpc, '_RETRY_S', (0.01, 0.1))


@pytest.fixture
def caplog(caplog):
  """With what absl logs."""
  logging.use_absl_handler()
  return caplog


@pytest.fixture
def stack():
  """Closes what a test opens, the last first."""
  with contextlib.ExitStack() as opened:
    yield opened
