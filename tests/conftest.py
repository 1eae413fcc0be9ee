"""Settings of all tests: 8 emulated devices, no silent broadcasting."""

import os
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
# Programs this small take longer to optimise than to run. XLA refuses flags that
# it does not know, by name: drop one here if a newer XLA has dropped it.
os.environ['XLA_FLAGS'] = ' '.join(
  (
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    '--xla_cpu_use_fusion_emitters=false',
    '--xla_cpu_parallel_codegen_split_count=1',
  )
)
# A program that several tests compile is compiled once.
os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp()
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'
