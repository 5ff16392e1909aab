"""One parameter: how it rests, the Variable class that guards it, and moving a value.

With `_param_group` the only file that reads or writes Variable values. What must not
live here: anything about several parameters at once.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from fsdp_jax._local import Local
from fsdp_jax._mesh import MeshInfo, Others
from fsdp_jax._move import move
from fsdp_jax._policies import UNPINNED_HOST

METADATA = "fsdp"
WRITTEN = "fsdp_written"  # by the user, while full
_SAME_FOR_A_SHARD = frozenset({"dtype", "ndim", "weak_type", "sharding"})
Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class ParamSpec:
    """How a managed parameter rests. Static metadata of its Variable.

    Attributes:
        path: dotted name, from the module of the `fully_shard` call.
        dim: dim that is cut, counted from the end and so negative; None for whole.
        size: full size of that dim; 0 for whole.
        mesh: mesh and the roles of its axes.
        reason: why it stays whole; empty if it is cut.
        full: whether the Variable holds the full array at present.
        others: dims, from the end, and the other axes that they are cut over.
        memory_kind: where it rests; None for device memory.
    """

    path: str
    dim: int | None
    size: int
    mesh: MeshInfo
    reason: str = ""
    full: bool = False
    others: Others = ()
    memory_kind: str | None = None

    def __repr__(self) -> str:
        place = f"dim={self.dim}" if self.dim is not None else f"whole: {self.reason}"
        return f"ParamSpec({self.path!r}, {place}, over {self.mesh.num_shards})"

    def is_shard(self, value: Any) -> bool:
        """Whether `value` is one device's piece, as a per-device program sees it."""
        shape, n = getattr(value, "shape", ()), self.mesh.num_shards
        if self.dim is None or n == 1 or len(shape) < -self.dim:
            return False
        return shape[self.dim] * n == self.size

    def fits(self, value: Any) -> bool:
        """Whether `value` has the full size on the dim that is cut."""
        if self.dim is None:
            return True
        return value.ndim >= -self.dim and value.shape[self.dim] == self.size

    def marked(self, full: bool) -> ParamSpec:
        """This spec, for a Variable that holds the full array or not."""
        return self if self.full == full else dataclasses.replace(self, full=full)

    @property
    def cut(self) -> bool:
        """Whether it must be gathered, or brought to the devices, to be used."""
        away = self.mesh.num_shards > 1 or self.memory_kind is not None
        return self.dim is not None and away

    @property
    def blocks(self) -> int:
        """Into how many pieces other axes cut the dim, each of which is cut again."""
        axes = [axes for dim, axes in self.others if dim == self.dim]
        return self.mesh.size(axes[0] if axes and self.cut else ())

    def sharding(self, ndim: int) -> NamedSharding:
        """The sharding at rest of a value with `ndim` dims."""
        return self.mesh.sharding(ndim, self.dim, self.others, self.memory_kind)

    def whole(self, ndim: int) -> NamedSharding:
        """The sharding of the full array, on the devices."""
        return self.mesh.sharding(ndim, None, self.others)

    def present(self, ndim: int) -> NamedSharding:
        """The sharding that the Variable's value has now: whole while it is full."""
        return self.whole(ndim) if self.full else self.sharding(ndim)


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
        self._refuse_shard()
        return super().get_value(**kwargs)

    def __getattr__(self, name: str) -> Any:
        metadata = object.__getattribute__(self, "_var_metadata")
        if name not in metadata and name not in _SAME_FOR_A_SHARD:
            if hasattr(self.get_raw_value(), name):
                self._refuse_shard()
        return super().__getattr__(name)

    def __nnx_repr__(self) -> Any:
        yield from self._plain().__nnx_repr__()

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return self._plain().__treescope_repr__(path, subtree_renderer)

    def _plain(self) -> nnx.Variable:
        """The same value in the original class, which shows shards too."""
        original = original_class(type(self))
        return original.from_metadata(self.get_raw_value(), dict(self.get_metadata()))

    def set_value(self, value: Any, **kwargs: Any) -> None:
        spec = self.get_metadata(METADATA, None)
        if spec is not None and spec.mesh.per_device():
            raise RuntimeError(
                f"parameter {spec.path!r} is written inside a per-device program, "
                "where the module holds a gathered copy that is dropped again. Write "
                "to it outside of value_and_grad and shard_map."
            )
        super().set_value(value, **kwargs)
        if spec is not None and spec.full:
            self._var_metadata[WRITTEN] = True
        self._settle()

    def set_raw_value(self, value: Any, **kwargs: Any) -> None:
        super().set_raw_value(value, **kwargs)
        self._settle()

    def update_from_state(self, variable_state: nnx.Variable) -> None:
        own = self.get_metadata(METADATA, None)
        super().update_from_state(variable_state)
        if own is not None:
            given = self.get_metadata(METADATA, None)
            if not isinstance(given, ParamSpec) or given.marked(own.full) != own:
                self._var_metadata[METADATA] = own  # another model's, or none
        self._settle()

    def _refuse_shard(self) -> None:
        value, spec = self.get_raw_value(), self.get_metadata(METADATA, None)
        if spec is None or not isinstance(value, jax.Array | Local):
            return
        away = isinstance(value, Local) or spec.is_shard(value)
        if away and spec.mesh.per_device():
            raise ShardReadError(self, spec, tuple(value.shape))

    def _settle(self) -> None:
        """Put a concrete value where the parameter rests, or whole while it is full."""
        spec, value = self.get_metadata(METADATA, None), self.get_raw_value()
        if not isinstance(value, (jax.Array, np.ndarray)) or isinstance(value, Tracer):
            return
        if spec is None or not spec.fits(value):
            return
        target = spec.present(value.ndim)
        if getattr(value, "sharding", None) != target:
            install(self, move(value, target))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        metadata = dict(self.get_metadata())
        spec = metadata[METADATA] = metadata[METADATA].marked(False)  # loaded as shards
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


def install(variable: nnx.Variable, value: Any) -> None:
    """Set a Variable's raw value, without placement and without trace checks."""
    object.__setattr__(variable, "_raw_value", value)


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
        return move(x, mesh.whole_like(x))

    install(variable, jax.tree.map(place, variable.get_raw_value()))


def settle_moment(variable: nnx.Variable, mesh: MeshInfo) -> None:
    """Put optimizer state on the mesh: cut as the parameter it was made for, or whole.

    NNX copies a parameter's metadata to its moments, the spec among it.
    """
    spec, value = variable.get_metadata(METADATA, None), variable.get_raw_value()
    if mesh.compile_only and isinstance(value, jax.Array):
        value = jax.ShapeDtypeStruct(value.shape, value.dtype)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct) or mesh.per_device():
        return
    like = isinstance(spec, ParamSpec) and bool(value.ndim) and spec.fits(value)
    target = spec.sharding(value.ndim) if like else mesh.sharding(value.ndim, None)
    install(variable, move(value, target))
    if like and spec.memory_kind == UNPINNED_HOST:
        # Compiled programs return it in device memory: this class puts it back.
        object.__setattr__(variable, "__class__", managed_class(type(variable)))


def with_value(variable: nnx.Variable, value: Any) -> nnx.Variable:
    """A Variable like this one, metadata included, that holds another value.

    A concrete one is moved to the memory in which this one rests.
    """
    spec = spec_of(variable)
    if spec is not None and spec.memory_kind and not isinstance(value, Tracer):
        value = move(value, spec.sharding(value.ndim))
    metadata = dict(variable.get_metadata())
    if spec is not None:
        metadata[METADATA] = spec.marked(False)
    return type(variable).from_metadata(value, metadata)


def mark(variable: nnx.Variable, full: bool) -> None:
    """Note whether a managed Variable holds the full array."""
    variable._var_metadata[METADATA] = variable._var_metadata[METADATA].marked(full)


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
