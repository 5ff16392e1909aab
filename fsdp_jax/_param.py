"""One parameter: how it rests, the Variable class that guards it, and moving a value.

With `_param_group` the only file that reads or writes Variable values. What must not
live here: anything about several parameters at once.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from fsdp_jax._mesh import MeshInfo

METADATA = "fsdp"
Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class ParamSpec:
    """How a managed parameter rests. Static metadata of its Variable.

    Attributes:
        path: dotted name, from the module of the `fully_shard` call.
        dim: dim that is cut, counted from the end and so negative; None for whole.
        size: full size of that dim; 0 for whole.
        mesh: mesh and sharding axes.
        reason: why it stays whole; empty if it is cut.
    """

    path: str
    dim: int | None
    size: int
    mesh: MeshInfo
    reason: str = ""

    def __repr__(self) -> str:
        place = f"dim={self.dim}" if self.dim is not None else f"whole: {self.reason}"
        return f"ParamSpec({self.path!r}, {place}, over {self.mesh.num_shards})"

    def is_shard(self, value: Any) -> bool:
        """Whether `value` is one device's piece, as a per-device program sees it."""
        shape = getattr(value, "shape", ())
        if self.dim is None or len(shape) < -self.dim:
            return False
        return shape[self.dim] != self.size

    def sharding(self, ndim: int) -> NamedSharding:
        """The sharding at rest of a value with `ndim` dims."""
        return self.mesh.sharding(ndim, self.dim)


class ShardReadError(RuntimeError):
    """A parameter was read in a per-device program while it was sharded.

    Attributes:
        variable: the parameter's Variable.
        path: its dotted name, as far as it is known.
    """

    def __init__(self, variable: Any, spec: ParamSpec, shape: tuple[int, ...]) -> None:
        super().__init__(variable, spec, shape)
        self.variable = variable
        self.path = spec.path
        self._found = f"this device holds {shape}, dim {spec.dim} of the full size"
        self._size = spec.size

    def __str__(self) -> str:
        return (
            f"parameter {self.path!r} is read while it is sharded: {self._found} "
            f"{self._size}. Call the module itself (model(x), not a method that "
            "fully_shard does not know), or register the method with "
            "register_fsdp_forward_method(module, name), or call module.unshard() "
            "first."
        )


class ManagedVariable(nnx.Variable):
    """Base of the Variable classes of managed parameters: the guard and the placement.

    Reading a shard as if it were the parameter raises; a value written from outside is
    put where the parameter rests.
    """

    def get_value(self, **kwargs: Any) -> Any:
        value = self.get_raw_value()
        spec = self.get_metadata(METADATA, None)
        if spec is not None and isinstance(value, jax.Array) and spec.is_shard(value):
            raise ShardReadError(self, spec, tuple(value.shape))
        return super().get_value(**kwargs)

    def set_value(self, value: Any, **kwargs: Any) -> None:
        before, spec = self.get_raw_value(), self.get_metadata(METADATA, None)
        if spec is not None and spec.dim is not None and spec.mesh.per_device():
            raise RuntimeError(
                f"parameter {spec.path!r} is written inside a per-device program, "
                "where the module holds a gathered copy that is dropped again. Write "
                "to it outside of value_and_grad and shard_map."
            )
        super().set_value(value, **kwargs)
        self._settle(before)

    def set_raw_value(self, value: Any, **kwargs: Any) -> None:
        before = self.get_raw_value()
        super().set_raw_value(value, **kwargs)
        self._settle(before)

    def update_from_state(self, variable_state: nnx.Variable) -> None:
        before, spec = self.get_raw_value(), self.get_metadata(METADATA, None)
        super().update_from_state(variable_state)
        if spec is not None and self.get_metadata(METADATA, None) is None:
            self.set_metadata(**{METADATA: spec})
        self._settle(before)

    def _settle(self, before: Any) -> None:
        """Put a concrete value where the one before it was, or where it rests."""
        spec, value = self.get_metadata(METADATA, None), self.get_raw_value()
        if spec is None or isinstance(value, Tracer):
            return
        if not isinstance(value, (jax.Array, np.ndarray)):
            return
        if isinstance(before, Tracer) or spec.is_shard(value):
            return
        target = getattr(before, "sharding", None)
        if not isinstance(target, NamedSharding) or target.mesh != spec.mesh.mesh:
            target = spec.sharding(value.ndim)
        if getattr(value, "sharding", None) != target:
            install(self, move(value, target))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        metadata = dict(self.get_metadata())
        spec = metadata[METADATA]
        value = to_host(self.get_raw_value(), f"parameter {spec.path!r}")
        return _rebuild_variable, (type(self).__bases__[1], value, metadata)


class _ManagedMeta(type(nnx.Variable)):
    """Metaclass of the generated Variable classes, so that pickle can name them."""


@functools.cache
def managed_class(original: Any) -> Any:
    """The managed subclass of a Variable class, one per class."""
    namespace = {"__module__": original.__module__, "__doc__": original.__doc__}
    name = f"FSDP{original.__name__}"
    return _ManagedMeta(name, (ManagedVariable, original), namespace)


def original_class(managed: Any) -> Any:
    """The Variable class that `managed_class` was given."""
    return managed.__bases__[1]


def _reduce_class(cls: Any) -> Any:
    return managed_class, (original_class(cls),)


copyreg.pickle(_ManagedMeta, _reduce_class)


def _rebuild_variable(original, value, metadata) -> nnx.Variable:
    variable = managed_class(original).from_metadata(value, metadata)
    if isinstance(value, (np.ndarray, jax.ShapeDtypeStruct)):
        install(variable, move(value, metadata[METADATA].sharding(value.ndim)))
    return variable


def to_host(value: Any, what: str) -> Any:
    """Copy an array to host memory for pickling; abstract values pass."""
    if isinstance(value, jax.Array):
        if isinstance(value, Tracer):
            raise RuntimeError(
                f"pickle: {what} is being traced. Pickle outside of jit."
            )
        if not value.is_fully_addressable:
            raise RuntimeError(
                f"pickle: {what} is spread over several processes, so no process can "
                "pickle it alone. Use a checkpoint library on model.state_dict()."
            )
        return np.asarray(value)
    if isinstance(value, jax.ShapeDtypeStruct):  # its sharding holds devices
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return value


@functools.lru_cache(maxsize=256)
def mover(targets: tuple[NamedSharding, ...]) -> Callable:
    """A compiled identity that puts arrays under shardings, one dispatch for all."""
    return jax.jit(lambda *xs: xs, out_shardings=targets)


def move(value: Any, target: NamedSharding) -> Any:
    """Put a value under a sharding, whatever kind of value it is.

    Concrete arrays are copied (also across processes), traced ones constrained,
    abstract ones relabelled.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=target)
    if isinstance(value, Tracer):
        return constrain(value, target)
    if getattr(value, "sharding", None) == target:
        return value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return mover((target,))(value)[0]
    if target.is_fully_addressable:
        return jax.device_put(value, target)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def constrain(value: jax.Array, target: NamedSharding) -> jax.Array:
    """Put a traced array under a sharding, on axes of either kind."""
    if AxisType.Explicit in target.mesh.axis_types:
        return jax.sharding.reshard(value, target)
    return jax.lax.with_sharding_constraint(value, target)


def install(variable: nnx.Variable, value: Any) -> None:
    """Set a Variable's raw value, without placement and without trace checks."""
    object.__setattr__(variable, "_raw_value", value)


def manage(variable: nnx.Variable, spec: ParamSpec) -> None:
    """Turn a parameter's Variable, in place, into a managed one that rests as told."""
    install(variable, move(variable.get_raw_value(), spec.sharding(variable.ndim)))
    object.__setattr__(variable, "__class__", managed_class(type(variable)))
    variable._var_metadata[METADATA] = spec


def replicate(variable: nnx.Variable, mesh: MeshInfo) -> None:
    """Put the arrays of an unmanaged Variable whole on every device of the mesh.

    Traced and abstract values stay as they are.
    """

    def place(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        return move(x, mesh.sharding(x.ndim, None))

    install(variable, jax.tree.map(place, variable.get_raw_value()))


def settle_moment(variable: nnx.Variable, mesh: MeshInfo) -> None:
    """Put optimizer state on the mesh: cut as the parameter it was made for, or whole.

    NNX copies a parameter's metadata to its moments, the spec among it.
    """
    spec, value = variable.get_metadata(METADATA, None), variable.get_raw_value()
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return
    if isinstance(spec, ParamSpec) and spec.dim is not None:
        if value.ndim >= -spec.dim and value.shape[spec.dim] == spec.size:
            install(variable, move(value, spec.sharding(value.ndim)))
            return
    replicate(variable, mesh)


def release(variable: nnx.Variable, value: Any, sharding: Any) -> None:
    """Undo `manage`: give a Variable its class and value back."""
    if isinstance(variable, ManagedVariable):
        object.__setattr__(variable, "__class__", original_class(type(variable)))
        variable._var_metadata.pop(METADATA, None)
    if value is None:
        value = variable.get_raw_value()
        if value.sharding == sharding:
            return
        value = jax.device_put(value, sharding)
    install(variable, value)


def is_abstract(variable: nnx.Variable) -> bool:
    """Whether a Variable holds a shape instead of a value."""
    return isinstance(variable.get_raw_value(), jax.ShapeDtypeStruct)


def spec_of(variable: Any) -> ParamSpec | None:
    """The spec of a managed Variable, None for any other value."""
    if isinstance(variable, ManagedVariable):
        return variable.get_metadata(METADATA, None)
    return None


def dotted(path: Path) -> str:
    """A path as users write it: `('blocks', 3, 'scale')` is `blocks.3.scale`."""
    return ".".join(str(part) for part in path)
