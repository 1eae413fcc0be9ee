import numpy as np
import pytest

from mrl_jax import parameters
from mrl_jax.architecture import Lora
from mrl_jax.models import decoder
from tests import examples


def test_a_matrix_worked_by_hand():
  # Two heads of size two have four rows in the file, three inputs columns.
  sizes = {'D': 3, 'H': 2, 'E': 2}
  tensor = parameters.Tensor(sizes, 'q_proj', 'DHE', 'HE', 'D')
  assert tensor.shape == (4, 3)
  theirs = np.arange(12).reshape(4, 3)
  ours = tensor.to_ours(theirs)
  assert ours.shape == (3, 2, 2)
  # Input 1 of head 1's output 0 is row 2, column 1.
  assert ours[1, 1, 0] == theirs[2, 1] == 7
  np.testing.assert_array_equal(tensor.to_theirs(ours), theirs)


def test_a_part_of_a_parameter_is_a_part_of_its_matrix():
  tensor = parameters.Tensor({'D': 3, 'H': 4, 'E': 2}, 'q', 'DHE', 'HE', 'D')
  theirs = np.arange(24).reshape(8, 3)
  # Inputs 1 and 2 of heads 2 and 3, which have rows 4 to 7.
  index = slice(1, 3), slice(2, 4), slice(None)
  assert tensor.bounds(index) == ((4, 8), (1, 3))
  np.testing.assert_array_equal(
    tensor.to_ours(theirs[4:8, 1:3]), tensor.to_ours(theirs)[index]
  )


def test_a_vector_of_all_heads_is_flat_in_the_file():
  tensor = parameters.Tensor({'H': 2, 'E': 3}, 'q_norm', 'HE', 'HE')
  assert tensor.shape == (6,)
  assert tensor.to_ours(np.arange(6))[1, 0] == 3


def test_adapters_have_the_names_and_shapes_of_peft():
  lora = Lora(rank=3, alpha=6, target_modules=('o_proj', 'up_proj'))
  adapters = parameters.adapters(examples.model(lora=lora, head_dim=6))
  layer = 'base_model.model.model.layers.1.'
  assert {
    tensor.name.removeprefix(layer): tensor.shape
    for tensor in adapters.values()
    if tensor.name.startswith(layer)
  } == {
    'self_attn.o_proj.lora_A.weight': (3, 24),
    'self_attn.o_proj.lora_B.weight': (32, 3),
    'mlp.up_proj.lora_A.weight': (3, 32),
    'mlp.up_proj.lora_B.weight': (64, 3),
  }


LORA = Lora(rank=3, alpha=6, target_modules=('k_proj', 'o_proj', 'down_proj'))


@pytest.mark.parametrize(
  'changes',
  [
    {'tie_embeddings': True},
    {'norms': 'both', 'qk_norm': 'heads', 'qkv_bias': True, 'lora': LORA},
    {'norms': 'after', 'qk_norm': 'head', 'out_bias': True, 'lora': LORA},
  ],
)
def test_every_parameter_has_one_name_and_every_name_a_parameter(changes):
  model = examples.model(**changes)
  trained, frozen = (
    {'.'.join(map(str, path)): x.shape for path, x in part.flat_state()}
    for part in decoder.abstract(model)[1:]
  )
  tensors, adapters = parameters.tensors(model), parameters.adapters(model)
  if model.lora:
    assert trained.keys() == adapters.keys()
  tensors |= adapters
  assert trained | frozen == {
    path: tuple(model.axis_sizes[letter] for letter in tensor.letters)
    for path, tensor in tensors.items()
  }
  assert len({tensor.name for tensor in tensors.values()}) == len(tensors)
