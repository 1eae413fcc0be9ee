"""Settings of all tests: 8 emulated devices, no silent broadcasting."""

from importlib import metadata
import os
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
# Programs this small take longer to optimise than to run. XLA refuses flags that
# it does not know, by name.
_NEW = int(metadata.version('jaxlib').split('.')[1]) >= 12
os.environ['XLA_FLAGS'] = ' '.join(
  (
    '--xla_backend_optimization_level=0',
    '--xla_llvm_disable_expensive_passes=true',
    '--xla_cpu_parallel_codegen_split_count=1',
    # After 40 s, as on a machine that was held up, XLA would abort all tests.
    '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    '--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE'
    if _NEW
    else '--xla_cpu_use_fusion_emitters=false',
  )
)
# A program that several tests compile is compiled once.
os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp()
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'
