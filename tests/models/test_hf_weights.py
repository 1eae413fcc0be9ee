import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from mrl_jax import checks
from mrl_jax import hugging_face
from mrl_jax.architecture import Lora
from mrl_jax.models import decoder as decoder_lib
from mrl_jax.models import families
from mrl_jax.models import hf_weights
from mrl_jax.models import sharding
from tests import decoders
from tests import imports
from tests import parity
from tests.models import test_parity

SOURCE = os.fspath(parity.GOLDEN / 'qwen2')
Q = 'model.layers.0.self_attn.q_proj.weight'


@pytest.fixture
def folder(tmp_path):
  return shutil.copytree(SOURCE, tmp_path / 'model')


def tensors(folder):
  return safetensors_numpy.load_file(os.path.join(folder, hf_weights.WEIGHTS))


def save(folder, arrays):
  safetensors_numpy.save_file(
    arrays, os.path.join(folder, hf_weights.WEIGHTS), {'format': 'pt'}
  )


def config(folder=SOURCE, **changes):
  return families.from_hugging_face(hugging_face.load_config(folder), **changes)


def fault(folder) -> str:
  with pytest.raises(checks.InputError) as error:
    hf_weights.check(folder, config())
  return str(error.value)


def test_one_error_lists_every_tensor_that_does_not_fit(folder):
  arrays = tensors(folder)
  del arrays['model.norm.weight']
  arrays['model.layers.9.mlp.up_proj.weight'] = np.zeros((2, 2), np.float32)
  arrays[Q] = arrays[Q][:-1]
  arrays['lm_head.weight'] = arrays['lm_head.weight'].astype(np.int8)
  save(folder, arrays)
  text = fault(folder)
  assert '1 missing:\n  model.norm.weight [16]' in text
  assert '1 not part of the model:\n  model.layers.9.mlp.up_proj.weight' in text
  assert f'{Q} [23, 16], should be [24, 16]' in text
  assert 'lm_head.weight I8' in text


def test_a_truncated_file_is_named_with_the_tensors_it_should_have(folder):
  path = os.path.join(folder, hf_weights.WEIGHTS)
  with open(path, 'r+b') as f:
    f.truncate(os.path.getsize(path) - 1)
  text = fault(folder)
  assert f'1 damaged:\n  {path}' in text
  assert 'missing' in text
  assert 'and 29 more' in text


def test_shards_in_the_index_must_exist(folder):
  arrays = tensors(folder)
  os.remove(os.path.join(folder, hf_weights.WEIGHTS))
  index = os.path.join(folder, hf_weights.INDEX)
  with open(index, 'w') as f:
    json.dump({'weight_map': dict.fromkeys(arrays, 'a.safetensors')}, f)
  assert 'a.safetensors: No such file or directory' in fault(folder)
  with open(index, 'w') as f:
    f.write('{"weight_map": 3}')
  assert 'is not an index' in fault(folder)


def test_pickles_are_not_read(tmp_path):
  (tmp_path / 'pytorch_model.bin').write_bytes(b'')
  assert 'pickles are not safe;' in fault(tmp_path)


def test_copies_of_tied_embeddings_and_old_constants_are_ignored(folder):
  arrays = tensors(folder)
  arrays['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(
    3, np.float32
  )
  save(folder, arrays)
  hf_weights.check(folder, config())
  assert 'lm_head.weight' in hf_weights.check(folder, config())
  tied = config(tie_embeddings=True)
  assert 'lm_head.weight' not in hf_weights.check(folder, tied)


@pytest.mark.parametrize('stored', ['float16', 'bfloat16'])
def test_half_precision_is_read_and_written_without_loss(
  folder, tmp_path, stored
):
  halves = {name: x.astype(stored) for name, x in tensors(folder).items()}
  save(folder, halves)
  model, params = test_parity.read(folder)
  assert {str(x.dtype) for x in jax.tree.leaves(params)} == {'float32'}
  out = tmp_path / 'out'
  out.mkdir()
  hf_weights.write(out, model, params, stored, 10**9)
  for name, x in tensors(out).items():
    assert x.dtype == stored
    np.testing.assert_array_equal(x, halves[name])


def test_parameters_may_be_read_in_half_precision():
  _, params = test_parity.read(SOURCE, param_dtype='bfloat16')
  assert {str(x.dtype) for x in jax.tree.leaves(params)} == {'bfloat16'}


def test_tensors_are_placed_on_their_shards_and_progress_is_in_bytes():
  read_bytes = []
  model = config()
  mesh = decoders.mesh(2, 2, 1)
  _, like, _ = decoder_lib.abstract(model)
  places = sharding.params(like, mesh)
  params = hf_weights.read(SOURCE, model, like, places, read_bytes.append)
  _, whole = test_parity.read(SOURCE)
  for x, y, z in zip(
    *map(jax.tree.leaves, (params, places, whole)), strict=True
  ):
    assert x.sharding == y
    np.testing.assert_array_equal(x, z)
  assert sum(read_bytes) == sum(x.nbytes for x in tensors(SOURCE).values())
  q = params['blocks'][0]['attention']['q']['weight'].get_value()
  theirs = tensors(SOURCE)[Q]
  np.testing.assert_array_equal(
    q.addressable_shards[0].data, theirs.T.reshape(16, 4, 6)[:8]
  )


def test_adapters_are_merged_into_the_matrices_that_have_them():
  lora = Lora(rank=2, alpha=3, target_modules=('o_proj', 'up_proj'))
  model = config(lora=lora)
  rng = np.random.default_rng(0)
  _, params, frozen = decoder_lib.abstract(model)
  params, frozen = (
    jax.tree.map(lambda x: rng.normal(size=x.shape), part)
    for part in (params, frozen)
  )
  flat = {
    '.'.join(map(str, path)): param
    for part in (params, frozen)
    for path, param in part.flat_state()
  }
  merged = hf_weights.merged('blocks.1.attention.o.weight', flat, model)
  o, a, b = (
    flat[f'blocks.1.attention.o.{n}'].get_value()
    for n in ('weight', 'adapter.a', 'adapter.b')
  )
  np.testing.assert_allclose(
    merged, o + 1.5 * np.einsum('HER,RD->HED', a, b), rtol=1e-5
  )
  q = 'blocks.1.attention.q.weight'
  assert hf_weights.merged(q, flat, model) is flat[q].get_value()


@pytest.mark.slow
def test_an_import_takes_little_more_memory_than_its_parameters(tmp_path):
  model = families.build(
    'llama',
    vocab_size=32_000,
    num_layers=7,
    d_model=2048,
    d_ff=5632,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
  )
  about = families.to_hugging_face('llama', model)
  (tmp_path / 'config.json').write_text(json.dumps(about))
  rng = np.random.default_rng(0)
  _, params, _ = decoder_lib.abstract(model)
  params = jax.tree.map(
    lambda x: rng.standard_normal(x.shape, np.float32), params
  )
  hf_weights.write(tmp_path, model, params, 'float32', 7 * 10**8)
  assert len(list(tmp_path.glob('*.safetensors'))) == 3
  del params
  ran = subprocess.run(
    [sys.executable, imports.__file__, os.fspath(tmp_path)],
    env={**os.environ, 'PYTHONPATH': os.getcwd()},
    capture_output=True,
    text=True,
    check=True,
  )
  figures = json.loads(ran.stdout)
  print(figures)
  assert figures['megabytes'] > 1900
  assert figures['peak_over_parameters'] < 1.3


def test_the_single_file_is_read_before_an_index(folder):
  with open(os.path.join(folder, hf_weights.INDEX), 'w') as f:
    json.dump({'weight_map': {Q: 'stale.safetensors'}}, f)
  hf_weights.check(folder, config())


def test_the_fingerprint_changes_with_the_weights(folder):
  before = hf_weights.fingerprint(folder)
  assert before == hf_weights.fingerprint(SOURCE)
  arrays = tensors(folder)
  arrays[Q] = arrays[Q] + np.float32(1e-6)
  save(folder, arrays)
  assert hf_weights.fingerprint(folder) != before
