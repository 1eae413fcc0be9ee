"""What a chip receives, from the text of compiled programs."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from mrl_jax.training import collectives

# Four chips; a loop of three trips, as TPU writes it, around a conditional.
HLO = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%start (p: f32[1,2]) -> (f32[1,2], f32[4,2]) {
  %p = f32[1,2]{1,0:T(8,128)} parameter(0)
  %gather.1 = f32[4,2]{1,0:T(8,128)} all-gather(%p), channel_id=5, replica_groups=mesh['a'=4,'b'=1] {'a'}, dimensions={0}, backend_config={"async_collective_fusion_config":{}}
  ROOT %custom = (f32[1,2]{1,0}, f32[4,2]{1,0}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p.1: f32[1,2]) -> f32[4,2] {
  %p.1 = f32[1,2]{1,0:T(8,128)} parameter(0)
  ROOT %gather.2 = f32[4,2]{1,0:T(8,128)} all-gather(%p.1), channel_id=5, replica_groups=mesh['a'=4,'b'=1] {'a'}, dimensions={0}, backend_config={"async_collective_fusion_config":{}}
}

%all-reduce-scatter.1 (p.2: f32[8]) -> f32[4] {
  %p.2 = f32[8]{0} parameter(0)
  %reduce.1 = f32[8]{0} all-reduce(%p.2), channel_id=6, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %slice = f32[4]{0} dynamic-slice(%reduce.1), dynamic_slice_sizes={4}
}

%yes (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %permute = f32[8]{0} collective-permute(%p.3), channel_id=7, source_target_pairs={{0,1},{1,0}}
}

%no (p.4: f32[8]) -> f32[8] {
  ROOT %p.4 = f32[8]{0} parameter(0)
}

%inner (i.1: s32[]) -> s32[] {
  %i.1 = s32[] parameter(0)
  ROOT %fused.4 = f32[4,2]{1,0} fusion(%i.1), kind=kCustom, calls=%done
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %fused.1 = (f32[1,2]{1,0}, f32[4,2]{1,0}) fusion(%state), kind=kCustom, calls=%start
  %overlapped = s32[] while(%state), condition=%condition, body=%inner
  %fused.2 = f32[4,2]{1,0} fusion(%fused.1), kind=kCustom, calls=%done
  %fused.3 = f32[4]{0} fusion(%state), kind=kCustom, calls=%all-reduce-scatter.1
  %either = f32[8]{0} conditional(%state), branch_computations={%yes, %no}
  ROOT %next = (s32[], f32[8]{0}) tuple(%state)
}

%condition (state.1: (s32[], f32[8])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %state.1 = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %all = s32[]{:T(128)} all-reduce(%i), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %less = pred[]{:T(512)} compare(%i, %three), direction=LT
}

ENTRY %main (arg: f32[8]) -> f32[8] {
  %arg = f32[8]{0} parameter(0)
  %loop = (s32[], /*index=1*/f32[8]{0}) while(%arg), condition=%condition, body=%body
  %scattered = bf16[2]{0} reduce-scatter(%arg), channel_id=8, replica_groups=[1,4]<=[4], to_apply=%add
  %started = (f32[2]{0}, f32[8]{0}) all-gather-start(%arg), channel_id=9, replica_groups={}, dimensions={0}
  %gathered = f32[8]{0} all-gather-done(%started)
  ROOT %out = f32[8]{0} all-reduce(%arg), channel_id=10, replica_groups={}, to_apply=%add
}
"""


def test_bytes_that_a_chip_receives_by_hand():
  assert collectives.count(HLO) == {
    # In the loop 3/4 of 32 bytes, once a trip though its computation and that
    # of an inner loop name it again; then 3/4 of 32.
    'all-gather': (3 + 1, 3 * 24 + 24),
    # Half of 32 bytes in groups of two; then 3 times the 4 bytes that are kept.
    'reduce-scatter': (3 + 1, 3 * 16 + 12),
    'collective-permute': (3, 3 * 32),
    # The condition's, of 4 bytes, of both loops, and the last one.
    'all-reduce': (3 + 9 + 1, 12 * 6 + 2 * 24),
  }


@pytest.mark.parametrize(
  ('groups', 'size'),
  [
    ('{{0,1},{2,3},{4,5},{6,7}}', 2),
    ('[2,4]<=[8]', 4),
    ('[2,4]<=[4,2]T(1,0)', 4),
    ("mesh['a'=2,'b'=4] {'b'}", 4),
    ("mesh['a'=2,'b'=4] {'a','b'}", 8),
    ("mesh['a'=2,'b'=4] {'b':(1)2}", 2),
    ('{}', 8),
  ],
)
def test_sizes_of_groups(groups, size):
  attributes = f'%x), channel_id=1, replica_groups={groups}, dimensions={{0}}'
  assert collectives._group(attributes, 8) == size


def test_a_compiled_scan_gathers_once_a_trip():
  mesh = Mesh(np.array(jax.devices()[:4]), ('x',))
  rows = NamedSharding(mesh, PartitionSpec('x'))
  matrices = NamedSharding(mesh, PartitionSpec(None, 'x'))

  def forward(w_LDD, x_BD):
    def layer(x_BD, w_DD):
      x_BD = jnp.tanh(x_BD @ w_DD)
      return jax.lax.with_sharding_constraint(x_BD, rows), None

    return jax.lax.scan(layer, x_BD, w_LDD)[0]

  program = jax.jit(forward, in_shardings=(matrices, rows), out_shardings=rows)
  shapes = jnp.zeros((3, 64, 64)), jnp.zeros((512, 64))
  compiled = program.lower(*shapes).compile()
  assert collectives.count(compiled.as_text()) == {
    'all-gather': (3, 3 * 0.75 * 64 * 64 * 4)
  }
