import numpy as np
import pytest

from mrl_jax.architecture import Lora
from mrl_jax.models import decoder
from mrl_jax.models import hf_names
from mrl_jax.models import modules
from tests import examples


def test_a_matrix_worked_by_hand():
  # Two heads of two, of three inputs: there, rows are outputs.
  tensor = hf_names.Tensor('q_proj', 'DHE', 'HE', 'D')
  sizes = {'D': 3, 'H': 2, 'E': 2}
  assert tensor.shape(sizes) == (4, 3)
  theirs = np.arange(12).reshape(4, 3)
  ours = tensor.to_ours(theirs, sizes)
  assert ours.shape == (3, 2, 2)
  # Input 1 of head 1's output 0 is row 2, column 1.
  assert ours[1, 1, 0] == theirs[2, 1] == 7
  np.testing.assert_array_equal(tensor.to_theirs(ours, sizes), theirs)


def test_a_vector_of_all_heads_is_flat_there():
  tensor = hf_names.Tensor('q_norm', 'HE', 'HE')
  sizes = {'H': 2, 'E': 3}
  assert tensor.shape(sizes) == (6,)
  assert tensor.to_ours(np.arange(6), sizes)[1, 0] == 3


LORA = Lora(rank=3, alpha=6, target_modules=('k_proj', 'o_proj', 'down_proj'))


@pytest.mark.parametrize(
  'changes',
  [
    {'tie_embeddings': True},
    {'norms': 'both', 'qk_norm': 'heads', 'qkv_bias': True, 'lora': LORA},
    {'norms': 'after', 'qk_norm': 'head', 'out_bias': True, 'lora': LORA},
  ],
)
def test_every_parameter_has_a_name_and_every_name_a_parameter(changes):
  model = examples.model(**changes)
  _, *parts = decoder.abstract(model)
  tensors = hf_names.tensors(model)
  if model.lora:
    tensors |= hf_names.adapters(model)
  shapes = {
    '.'.join(map(str, path)): param.shape
    for part in parts
    for path, param in part.flat_state()
  }
  sizes = modules.axis_sizes(model)
  assert shapes == {
    path: tuple(sizes[letter] for letter in tensor.letters)
    for path, tensor in tensors.items()
  }
  assert len({tensor.name for tensor in tensors.values()}) == len(tensors)
