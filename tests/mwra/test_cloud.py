"""Slices on Cloud TPU, and what they may be called."""

import pytest

from mrl_jax import checks
from mrl_jax.mwra import cloud as cloud_lib
from tests import examples

SLICES = cloud_lib.parse_slices(
  ['llama=v5p:2x2x4@z-1-a', 'gemma=v6e:4x4@z-2-b']
)


def place(**changes):
  fields = {'project': 'mine', 'folder': 'gs://bucket/pair', 'slices': SLICES}
  return cloud_lib.Cloud(**{**fields, **changes})


@pytest.mark.parametrize(
  ('topology', 'accelerator', 'runtime'),
  [
    ('v4:2x2x2', 'v4-16', 'tpu-ubuntu2204-base'),  # Two TensorCores a chip.
    ('v5e:2x4', 'v5litepod-8', 'v2-alpha-tpuv5-lite'),
    ('v5p:2x2x4', 'v5p-32', 'v2-alpha-tpuv5'),
    ('v6e:16x16', 'v6e-256', 'v2-alpha-tpuv6e'),
  ],
)
def test_a_slice_has_the_names_that_cloud_tpu_knows(
  topology, accelerator, runtime
):
  (found,) = cloud_lib.parse_slices([f'qwen3={topology}@us-east5-b']).values()
  assert found.topology == topology
  assert found.zone == 'us-east5-b'
  assert (found.accelerator, found.runtime) == (accelerator, runtime)


@pytest.mark.parametrize(
  ('text', 'match'),
  [
    ('qwen3=v6e:2x4', 'must be POLICY=GENERATION:SHAPE@ZONE'),
    ('v6e:2x4@us-east5-b', 'must be POLICY=GENERATION:SHAPE@ZONE'),
    ('qwen3=v6e-8@us-east5-b', 'must be POLICY=GENERATION:SHAPE@ZONE'),
    ('qwen3=v7e:2x4@us-east5-b', "unknown generation .*'v7e'.*v6e"),
    ('qwen3=tpu7x:2x2x1@us-east5-b', "unknown generation .*'tpu7x'"),
    # As many chips as v5p:2x4x4, which is what v5p-64 is.
    ('qwen3=v5p:2x2x8@us-east5-b', "unknown shape .*'2x2x8'.*2x4x4"),
    ('qwen3=v6e:2x2x1@us-east5-b', "unknown shape .*'2x2x1'"),
  ],
)
def test_a_slice_that_cannot_be_asked_for_is_refused(text, match):
  with pytest.raises(checks.InputError, match=match):
    cloud_lib.parse_slices([text])


def test_a_policy_has_one_slice():
  with pytest.raises(checks.InputError, match=r'--slice=a=.* is given twice'):
    cloud_lib.parse_slices(['a=v6e:2x4@z-a', 'a=v6e:2x2@z-a'])


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'folder': 'runs/pair'}, 'must be gs://BUCKET/RUN'),
    ({'folder': 'gs://bucket'}, 'must be gs://BUCKET/RUN'),
    ({'folder': 'gs://bucket/My_run'}, 'must be gs://BUCKET/RUN'),
    ({'project': ''}, '--project is missing'),
    ({'folder': 'gs://bucket/' + 'r' * 56}, 'at most 61 characters'),
    ({'slices': {'llama': SLICES['llama']}}, 'policy gemma has no slice'),
    (
      {'slices': {**SLICES, 'lama': SLICES['llama']}},
      "unknown policy in --slice 'lama'. Did you mean 'llama'",
    ),
  ],
)
def test_a_place_that_cannot_be_is_refused(changes, match):
  with pytest.raises(checks.InputError, match=match):
    cloud_lib.check(place(**changes), examples.run_config(), {})


@pytest.mark.parametrize(
  'key',
  [
    *('cluster.coordinator', 'see.listen', 'see.tls.key'),
    *('policies.gemma.address', 'policies.gemma.journal'),
  ],
)
def test_keys_that_connect_slices_are_not_the_users(key):
  with pytest.raises(
    checks.InputError, match=f'--config.{key}: .*leave it out'
  ):
    cloud_lib.check(place(), examples.run_config(), {key: 'x'})


def test_slices_of_two_policies_have_two_names():
  config = examples.run_config()
  config.policies = {
    'Qwen': config.policies.llama,
    'qwen': config.policies.gemma,
  }
  both = {'Qwen': SLICES['llama'], 'qwen': SLICES['gemma']}
  with pytest.raises(
    checks.InputError, match='pair-qwen, pair-qwen; names must'
  ):
    cloud_lib.check(place(slices=both), config, {})
