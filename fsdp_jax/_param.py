"""One parameter: making its Variable a managed one, and moving its value.

With `_managed` and `_param_group` the only file that reads or writes Variable values.
What must not live here: anything about several parameters at once.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from fsdp_jax._managed import (
    METADATA,
    OUT_SHARDING,
    ManagedVariable,
    install,
    managed_class,
    original_class,
    spec_of,
)
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import move
from fsdp_jax._spec import ParamSpec


def check_own_trace(variable: nnx.Variable, value: Any, asked: str) -> None:
    """Raise if a traced value would outlive its trace in a Variable from outside of it.

    Raises:
        RuntimeError: it would.
    """
    if isinstance(value, Tracer) and not variable._can_update:
        raise RuntimeError(
            f"{asked}: the module comes from outside of the function being traced, and "
            "would keep traced arrays when that returns. Pass the module as an "
            f"argument (nnx.jit), or call {asked} outside."
        )


def manage(variable: nnx.Variable, spec: ParamSpec) -> None:
    """Turn a parameter's Variable, in place, into a managed one that rests as told."""
    install(variable, spec.settled(variable.get_raw_value()))
    guard(variable)
    variable._var_metadata[METADATA] = spec
    variable._var_metadata.pop(OUT_SHARDING, None)
    # Copies of it, such as moments, are cut already, and by another mesh's names never.
    variable._var_metadata["eager_sharding"] = False


def guard(variable: nnx.Variable) -> None:
    """Give a Variable, in place, the managed subclass of its class."""
    object.__setattr__(variable, "__class__", managed_class(type(variable)))


def replicate(variable: nnx.Variable, mesh: MeshInfo) -> None:
    """Put the arrays of an unmanaged Variable whole on every device of the mesh.

    Traced and abstract values stay as they are.
    """

    def place(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        return move(x, mesh.whole_like(x))

    install(variable, jax.tree.map(place, variable.get_raw_value()))


def with_value(variable: nnx.Variable, value: Any, full: bool = False) -> nnx.Variable:
    """A Variable like this one, metadata included, that holds another value.

    A concrete one is moved to the memory in which this one rests.
    """
    spec = spec_of(variable)
    if spec is not None and spec.memory_kind and not isinstance(value, Tracer):
        value = move(value, spec.sharding(value.ndim))
    metadata = dict(variable.get_metadata())
    if spec is not None:
        metadata[METADATA] = spec.marked(full)
    return type(variable).from_metadata(value, metadata)


def mark(variable: nnx.Variable, full: bool) -> None:
    """Note whether a managed Variable holds the full array."""
    variable._var_metadata[METADATA] = variable._var_metadata[METADATA].marked(full)


def release(
    variable: nnx.Variable, value: Any, sharding: Any, metadata: dict[str, Any]
) -> None:
    """Undo `manage`: give a Variable its class, metadata and value back."""
    if value is None:
        managed = isinstance(variable, ManagedVariable)
        value = variable.get_value() if managed else variable.get_raw_value()
        if value.sharding != sharding:
            value = jax.device_put(value, sharding)
    if isinstance(variable, ManagedVariable):
        object.__setattr__(variable, "__class__", original_class(type(variable)))
        object.__setattr__(variable, "_var_metadata", metadata)
    install(variable, value)


def is_abstract(variable: nnx.Variable) -> bool:
    """Whether a Variable holds a shape instead of a value."""
    return isinstance(variable.get_raw_value(), jax.ShapeDtypeStruct)
