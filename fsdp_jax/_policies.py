"""The policies a `fully_shard` call takes: frozen, hashable, checked when made.

What lives here: what a user may ask for. What must not: arrays, devices, meshes,
or anything that acts on a policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

PINNED_HOST, UNPINNED_HOST = "pinned_host", "unpinned_host"


def _float_dtype(owner: str, name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(
            f"{owner}: {name}={value!r} is not a dtype. Give a floating dtype such as "
            "jnp.bfloat16, or None to leave it as it is."
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{owner}: {name}={dtype.name} is not a floating dtype. Give one such as "
            "jnp.bfloat16, or None to leave it as it is."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{owner}: {name}={dtype.name} needs 64-bit types, which are off. Set "
            "jax.config.update('jax_enable_x64', True), or give a smaller dtype."
        )
    return dtype


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of what a group gathers, reduces, takes in and gives out.

    Shards, their gradients and the optimizer state always keep the dtype that the
    parameter was made with. A policy holds for the modules of one `fully_shard` call
    and is not inherited. Integer arrays are never cast.

    Source: specification, "Policies"; PyTorch `MixedPrecisionPolicy`.

    Attributes:
        param_dtype: dtype of the gathered parameters, and so of the gather itself:
            the shard is cast first. None keeps the parameter's own.
        reduce_dtype: dtype in which gradients are summed over devices. None keeps the
            dtype in which they were computed.
        output_dtype: dtype to which floating outputs are cast. None leaves them.
        cast_forward_inputs: whether floating inputs are cast to `param_dtype` on entry.

    Raises:
        TypeError: a dtype that is none, or a flag that is not a bool.
        ValueError: a dtype that is not floating, or 64-bit while that is off.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = _float_dtype("MixedPrecisionPolicy", name, getattr(self, name))
            object.__setattr__(self, name, dtype)
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                "MixedPrecisionPolicy: cast_forward_inputs must be a bool, got "
                f"{self.cast_forward_inputs!r}."
            )


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """No offload: shards rest in device memory (the base of the offload policies).

    Source: specification, "Policies"; PyTorch `OffloadPolicy`.
    """

    @property
    def memory_kind(self) -> str | None:
        """JAX's name for where shards rest; None for device memory."""
        return None


@dataclasses.dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards rest in host memory, and so do their gradients and the optimizer state.

    Full parameters are made on the devices, one group at a time, and
    `fsdp_jax.Optimizer` updates on the host.

    Source: specification, "Policies"; PyTorch `CPUOffloadPolicy`.

    Attributes:
        pin_memory: whether the host memory is page-locked: JAX's memory kind
            `pinned_host`, else `unpinned_host`.

    Raises:
        TypeError: not a bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise TypeError(
                f"CPUOffloadPolicy: pin_memory must be a bool, got {self.pin_memory!r}."
            )

    @property
    def memory_kind(self) -> str | None:
        """JAX's name for where shards rest."""
        return PINNED_HOST if self.pin_memory else UNPINNED_HOST


def _axis_names(field: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if names is None:
        return ()
    if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"DataParallelMeshDims: {field} must be an axis name or a tuple of axis "
            f"names, got {value!r}."
        )
    if not names:
        raise ValueError(
            f"DataParallelMeshDims: {field} is an empty tuple. Name an axis, or give "
            "None."
        )
    if len(set(names)) < len(names):
        raise ValueError(
            f"DataParallelMeshDims: {field} names an axis twice: {names!r}. Name each "
            "axis once."
        )
    return names


@dataclasses.dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh shard parameters and which replicate them.

    Source: specification, "Policies"; PyTorch `DataParallelMeshDims`.

    Attributes:
        shard: axis name, or tuple of names, over which parameters are cut.
        replicate: axis name, or tuple of names, over which they are copied.

    Raises:
        TypeError: a field that is neither a name nor a tuple of names.
        ValueError: both fields None, an empty tuple, or an axis that is named twice.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "DataParallelMeshDims: at least one of shard and replicate must name "
                "a mesh axis, both are None."
            )
        both = set(self.shard_names) & set(self.replicate_names)
        if both:
            raise ValueError(
                f"DataParallelMeshDims: axis {sorted(both)[0]!r} is named in both "
                "shard and replicate. Give each axis one role."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The sharding axes, always as a tuple."""
        return _axis_names("shard", self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicating axes, always as a tuple."""
        return _axis_names("replicate", self.replicate)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A placement: cut a parameter along `dim`, which may count from the end.

    Source: PyTorch `Shard`, as `shard_placement_fn` returns it.

    Raises:
        TypeError: `dim` is not an int.
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"Shard: dim must be an int, got {self.dim!r}.")
