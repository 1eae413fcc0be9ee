"""The policy that sampler, update and round are measured with, and their flags."""

from absl import flags

from mrl_jax.models import families

WIDTH = flags.DEFINE_integer(
  'width', 256, 'sampler, update, round: model width.', 64
)
DEPTH = flags.DEFINE_integer('depth', 4, 'sampler, update, round: layers.', 1)
CONTEXT = flags.DEFINE_integer(
  'context', 32, 'sampler, update, round: tokens of a prompt.', 1
)
NEW = flags.DEFINE_integer(
  'new', 128, 'sampler, update, round: most tokens of a completion.', 2
)
MEAN = flags.DEFINE_integer(
  'mean', 32, 'sampler, update: mean tokens of uneven completions, about.', 2
)
REPEAT = flags.DEFINE_integer(
  'repeat', 5, 'sampler, update, round: runs; the best counts.', 1
)
VOCAB = 4096
_HEAD = 32  # Size of a head.


def about() -> dict:
  """The Hugging Face config of a Qwen2 model."""
  return {
    'model_type': 'qwen2',
    'architectures': ['Qwen2ForCausalLM'],  # TRL reads it.
    'vocab_size': VOCAB,
    'num_hidden_layers': DEPTH.value,
    'hidden_size': WIDTH.value,
    'intermediate_size': 3 * WIDTH.value,
    'num_attention_heads': WIDTH.value // _HEAD,
    'num_key_value_heads': WIDTH.value // _HEAD // 2,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6},
    'tie_word_embeddings': True,
  }


def build():
  """The architecture, in float32."""
  return families.from_hugging_face(about())


def mesh():
  """A mesh of one device."""
  import jax
  import numpy as np

  from mrl_jax import config

  jax.config.update('jax_num_cpu_devices', 1)
  devices = np.array(jax.devices()[:1])
  return jax.sharding.Mesh(devices.reshape(1, 1, 1), config.MESH_AXES)
