"""XLA flags of the processes that run tests. Imports no JAX, which reads them once."""

import importlib.metadata

# Programs run once or twice here: what counts is how fast they compile.
FAST_TO_COMPILE = "--xla_backend_optimization_level=0"
FAST_TO_COMPILE += " --xla_llvm_disable_expensive_passes=true"
FAST_TO_COMPILE += " --xla_cpu_parallel_codegen_split_count=1"  # tests run on all cores
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones refuse it
    FAST_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"


def xla_flags(num_devices: int) -> str:
    """The flags for so many simulated devices."""
    count = f"--xla_force_host_platform_device_count={num_devices}"
    return f"{count} {FAST_TO_COMPILE}"
