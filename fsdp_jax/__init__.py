"""PyTorch FSDP2's `fully_shard` contract for Flax NNX modules, on JAX.

See the README for the contract. Docstrings name the source of each clause:
"specification" is TensorPlay's page on `tensorplay.distributed.fsdp.fully_shard`,
"PyTorch" is version 2.13.
"""

import importlib
import typing

from fsdp_jax._batch import shard_batch as shard_batch
from fsdp_jax._check import check as check
from fsdp_jax._check_report import CheckReport as CheckReport
from fsdp_jax._describe import describe as describe
from fsdp_jax._describe import local_shape as local_shape
from fsdp_jax._fully_shard import fully_shard as fully_shard
from fsdp_jax._knobs import share_comm_ctx as share_comm_ctx
from fsdp_jax._mesh import make_mesh as make_mesh
from fsdp_jax._module import FSDPModule as FSDPModule
from fsdp_jax._module import UnshardHandle as UnshardHandle
from fsdp_jax._module import (
    register_fsdp_forward_method as register_fsdp_forward_method,
)
from fsdp_jax._nested import unsharded as unsharded
from fsdp_jax._new_params import shard_new_params as shard_new_params
from fsdp_jax._norm import global_norm as global_norm
from fsdp_jax._optimizer import Optimizer as Optimizer
from fsdp_jax._ordering import Ordering as Ordering
from fsdp_jax._ordering import compiler_options as compiler_options
from fsdp_jax._pending import PendingGradients as PendingGradients
from fsdp_jax._pending import synchronize_gradients as synchronize_gradients
from fsdp_jax._placement import largest_dim as largest_dim
from fsdp_jax._policies import CPUOffloadPolicy as CPUOffloadPolicy
from fsdp_jax._policies import DataParallelMeshDims as DataParallelMeshDims
from fsdp_jax._policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp_jax._policies import OffloadPolicy as OffloadPolicy
from fsdp_jax._policies import Shard as Shard
from fsdp_jax._scan import scan_layers as scan_layers
from fsdp_jax._transforms import grad as grad
from fsdp_jax._transforms import shard_map as shard_map
from fsdp_jax._transforms import value_and_grad as value_and_grad
from fsdp_jax.report import CommReport as CommReport
from fsdp_jax.report import comm_report as comm_report

if typing.TYPE_CHECKING:
    from fsdp_jax.plan import plan as plan
else:

    def __getattr__(name: str) -> object:
        # Imported when it is asked for, because `python -m fsdp_jax.plan` runs it.
        if name == "plan":
            return importlib.import_module("fsdp_jax.plan")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
