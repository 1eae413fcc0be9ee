"""The gradient of GRPO beside that of torch, on a model of `transformers`."""

import os

import jax
import numpy as np
import pytest

from mrl_jax import algorithms
from mrl_jax import parameters
from mrl_jax.models import decoder
from mrl_jax.update import objectives
from mrl_jax.update import update
from tests import decoders
from tests import examples
from tests import parity
from tests.models import test_parity

CLIP_LOW, CLIP_HIGH, KL_WEIGHT, LENGTH = 0.2, 0.28, 0.04, 5


def rows() -> objectives.PackedRows:
  """Rows with padding on both sides, and with ratios inside and outside the clip."""
  rng = np.random.default_rng(0)
  valid_BS = np.ones((4, 12), bool)
  valid_BS[1, :3] = valid_BS[2, -2:] = valid_BS[3, :1] = False
  mask_BS = valid_BS & (np.arange(12)[None, :] >= 12 - LENGTH)
  old_BS, reference_BS = -rng.uniform(3.0, 5.5, (2, 4, 12))
  advantage_B1 = np.array([[1.3], [-0.4], [0.7], [-1.6]])
  return objectives.PackedRows(
    tokens_BS=rng.integers(3, 61, (4, 12)).astype(np.int32),
    row_BS=valid_BS.astype(np.int32),
    old_logp_BS=(old_BS * mask_BS).astype(np.float32),
    reference_logp_BS=(reference_BS * mask_BS).astype(np.float32),
    advantage_BS=(advantage_B1 * mask_BS).astype(np.float32),
    weight_BS=(mask_BS / mask_BS.sum()).astype(np.float32),
    mask_BS=mask_BS,
    chunk_BS=mask_BS.astype(np.int32),
    mini_batch_B1=np.zeros((4, 1), np.float32),
  )


def grpo_in_torch(model, rows):
  """The loss of TRL's GRPOTrainer with loss_type='dapo', by its formulas.

  Leaves the gradients at the parameters; returns the loss, and the share of
  tokens whose ratio is outside the clipping range.
  """
  import torch

  tokens, old, reference, advantage = map(
    torch.tensor,
    (rows.tokens_BS, *(x[:, -LENGTH:] for x in (
      rows.old_logp_BS, rows.reference_logp_BS, rows.advantage_BS))),
  )  # fmt: skip
  valid = torch.tensor(rows.row_BS).long()
  logits = model(
    tokens.long(),
    attention_mask=valid,
    position_ids=(valid.cumsum(1) - 1).clamp(min=0),
  ).logits[:, -LENGTH - 1 : -1]
  chosen = tokens[:, -LENGTH:, None].long()
  logp = logits.log_softmax(-1).gather(-1, chosen)[..., 0]
  ratio = (logp - old).exp()
  clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
  loss = -torch.minimum(ratio * advantage, clipped * advantage)
  kl = (reference - logp).exp() - (reference - logp) - 1
  mask = valid[:, -LENGTH:]
  loss = ((loss + KL_WEIGHT * kl) * mask).sum() / mask.sum()
  loss.backward()
  clipped = (ratio < 1 - CLIP_LOW) | (ratio > 1 + CLIP_HIGH)
  return loss.item(), clipped.float().mean().item()


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_those_of_torch(tmp_path):
  pytest.importorskip('torch', reason="pip install -e '.[parity]'")
  folder = os.fspath(tmp_path)
  theirs = parity.write('qwen3', folder)
  expected, clipped = grpo_in_torch(theirs, rows())
  assert 0.1 < clipped < 0.9

  settings = examples.settings(
    clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=0.0, kl_weight=KL_WEIGHT
  )
  model, params = test_parity.read(folder)
  gradient = update.build_gradient(
    model,
    decoders.mesh(1, 1, 1),
    algorithms.build(settings).objectives()['own'],
    logit_chunk=8,
  )
  grads, loss = update.build_zeros(model, decoders.mesh(1, 1, 1))(), 0.0
  for part in (slice(0, 2), slice(2, 4)):
    half = jax.tree.map(lambda x, part=part: x[part], rows())
    grads, statistics = gradient(grads, params, decoder.NO_PARAMS, half)
    loss += float(statistics['loss'])
  assert loss == pytest.approx(expected, abs=1e-5)
  tensors = parameters.tensors(model)
  reference = dict(theirs.named_parameters())
  for path, grad in grads.flat_state():
    tensor = tensors['.'.join(map(str, path))]
    found = tensor.to_theirs(np.asarray(grad.get_value()))
    exact = reference[tensor.name].grad.numpy()
    assert np.abs(found - exact).max() < 1e-4 * np.abs(exact).max(), path
