"""PyTorch FSDP2's `fully_shard` contract for Flax NNX modules, on JAX.

See the README for the contract. Docstrings name the source of each clause:
"specification" is TensorPlay's page on `tensorplay.distributed.fsdp.fully_shard`,
"PyTorch" is version 2.13.
"""

from fsdp_jax._batch import local_shape as local_shape
from fsdp_jax._batch import shard_batch as shard_batch
from fsdp_jax._describe import describe as describe
from fsdp_jax._fully_shard import fully_shard as fully_shard
from fsdp_jax._module import FSDPModule as FSDPModule
from fsdp_jax._module import UnshardHandle as UnshardHandle
from fsdp_jax._module import (
    register_fsdp_forward_method as register_fsdp_forward_method,
)
from fsdp_jax._optimizer import Optimizer as Optimizer
from fsdp_jax._policies import CPUOffloadPolicy as CPUOffloadPolicy
from fsdp_jax._policies import DataParallelMeshDims as DataParallelMeshDims
from fsdp_jax._policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp_jax._policies import OffloadPolicy as OffloadPolicy
from fsdp_jax._policies import Shard as Shard
from fsdp_jax._transforms import grad as grad
from fsdp_jax._transforms import shard_map as shard_map
from fsdp_jax._transforms import value_and_grad as value_and_grad
