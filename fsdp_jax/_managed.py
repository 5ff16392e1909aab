"""The Variable class of managed parameters: it guards them and puts values in place.

What must not live here: making Variables managed, and moving them (`_param`).
"""

from __future__ import annotations

import copyreg
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from fsdp_jax._cotangents import guarded, in_f, is_gathered
from fsdp_jax._local import Local
from fsdp_jax._move import for_pickle, move
from fsdp_jax._spec import ParamSpec
from fsdp_jax._threads import LOCK, current, locked

METADATA = "fsdp"
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
WRITTEN = "fsdp_written"  # by the user, while full
COPY = "fsdp_copy"  # of a module that is unsharded for good, in one device's program
OUT_SHARDING = "out_sharding"  # what NNX calls the spec of a Variable

# What a shard, or a padded array, answers as the parameter itself would.
_SAME_FOR_A_SHARD = frozenset({"dtype", "ndim", "weak_type", "sharding"})

# Where the data lies, which is asked of the array at rest, padding and all.
_OF_THE_DATA = frozenset(
    "addressable_data addressable_shards block_until_ready committed "
    "copy_to_host_async delete device devices global_shards is_deleted "
    "is_fully_addressable is_fully_replicated on_device_size_in_bytes".split()
)


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


class _Entries(tuple):
    """Entries of a PartitionSpec, all alike: graphs do not differ by them.

    They follow from the `ParamSpec` and the number of dims, which is another one in a
    scan over a stack. No Variable keeps them: `get_metadata` makes them anew, `_new`
    and whatever else takes metadata drops them.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Entries)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return 0


class ManagedVariable(nnx.Variable):
    """Base of the Variable classes of managed parameters: the guard and the placement.

    Reading a shard as if it were the parameter raises; a value written from outside is
    put where the parameter rests. Padding is seen by nobody who reads or writes the
    Variable. Raw values, which are what goes through `jax.jit`, `jax.tree.map` and
    `nnx.as_pure`, have it.
    """

    @property
    @locked
    def shape(self) -> tuple[int, ...]:
        if (own := current(self)) is not self:
            return own.shape
        self._refuse_shard()
        spec, value = self._spec(), self.get_raw_value()
        return value.shape if spec is None else spec.shape(value)

    @locked
    def get_value(self, **kwargs: Any) -> Any:
        if (own := current(self)) is not self:
            return own.get_value(**kwargs)
        self._refuse_shard()
        if not self._padded() or _asked_by_nnx_optimizer():
            return self._guarded(super().get_value(**kwargs))
        return self._as_original(self._unpadded()).get_value(**kwargs)

    def _guarded(self, value: Any) -> Any:
        """A whole parameter in `f`, which may not be differentiated as it is."""
        spec, own = self._spec(), self._var_metadata.get(COPY, False)
        if not isinstance(value, Tracer) or spec is None or own or not in_f():
            return value
        own = spec.mesh.num_devices == 1 or is_gathered(value)
        own = own or not jnp.issubdtype(value.dtype, jnp.inexact)
        return value if own else guarded(value, spec.path)

    def create_value(self, value: Any) -> Any:
        self._var_metadata.pop(OUT_SHARDING, None)
        spec = self._spec()
        held = spec is not None and (spec.fits(value) or spec.rests(value))
        return spec.settled(value) if spec is not None and held else value

    def get_metadata(self, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in NNX; as the spec the one by which the value really is cut.

        The names that model code gave may be logical ones, or of another mesh.
        """
        spec, value = self._spec(), self.get_raw_value()
        if spec is None or name not in (None, OUT_SHARDING):
            named = () if name is None else (name,)
            return super().get_metadata(*named, *args, **kwargs)
        ndim = getattr(value, "ndim", 0)  # alike for shards and full arrays
        cut = ndim >= -(spec.dim or 0)
        found = _Entries(spec.present(ndim).spec if cut else ())
        if name == OUT_SHARDING:
            return tuple(found)
        return super().get_metadata(*args, **kwargs) | {OUT_SHARDING: found}

    def set_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().set_metadata(*args, **kwargs)
        self._var_metadata.pop(OUT_SHARDING, None)

    @classmethod
    def _new(cls, value: Any, metadata: dict[str, Any]) -> Any:
        metadata.pop(OUT_SHARDING, None)
        return super()._new(value, metadata)

    def copy_from(self, other: nnx.Variable) -> None:
        super().copy_from(other)
        self._var_metadata.pop(OUT_SHARDING, None)

    @locked
    def __getattr__(self, name: str) -> Any:
        if (own := current(self)) is not self:
            return getattr(own, name)
        metadata = object.__getattribute__(self, "_var_metadata")
        if name not in metadata and name not in _SAME_FOR_A_SHARD:
            if hasattr(self.get_raw_value(), name):
                self._refuse_shard()
            if self._padded() and name not in _OF_THE_DATA:
                return getattr(self.get_value(), name)
        return super().__getattr__(name)

    def __nnx_repr__(self) -> Any:
        yield from self._plain().__nnx_repr__()

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return self._plain().__treescope_repr__(path, subtree_renderer)

    @locked
    def _plain(self) -> nnx.Variable:
        """The same value in the original class, which shows shards too, not padding."""
        value, spec = self.get_raw_value(), self._spec()
        if spec is not None and spec.pads(value):
            shape = spec.shape(value)
            here = isinstance(value, jax.Array) and not isinstance(value, Tracer)
            if here and value.is_fully_addressable:
                value = np.asarray(value)[tuple(map(slice, shape))]
            else:
                value = jax.ShapeDtypeStruct(shape, value.dtype)
        return self._as_original(value)

    def _as_original(self, value: Any) -> nnx.Variable:
        """A Variable of the original class."""
        original = original_class(type(self))
        return original.from_metadata(value, dict(self._var_metadata))

    def _spec(self) -> ParamSpec | None:
        return self._var_metadata.get(METADATA)

    def _padded(self) -> bool:
        """Whether it rests with rows that are not its own."""
        spec = self._spec()
        return spec is not None and spec.pads(self.get_raw_value())

    def _unpadded(self) -> Any:
        """The value at rest without padding."""
        spec = self._spec()
        assert spec is not None
        return spec.unpadded(self.get_raw_value())

    @locked
    def set_value(self, value: Any, **kwargs: Any) -> None:
        if (own := current(self)) is not self:
            own.set_value(value, **kwargs)
            return
        spec = self.get_metadata(METADATA, None)
        copy = spec is not None and spec.full and self.get_metadata(COPY, False)
        if spec is not None and not copy and spec.mesh.per_device():
            raise RuntimeError(
                f"parameter {spec.path!r} is written inside a per-device program, "
                "where the module holds a gathered copy that is dropped again. Write "
                "to it outside of value_and_grad and shard_map."
            )
        before = self.get_raw_value()
        concrete = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        if spec is not None and "index" in kwargs and concrete:
            value = move(value, spec.mesh.whole_like(value))  # from another mesh
        if self._padded() and "index" in kwargs:
            install(self, self._unpadded())
        try:
            super().set_value(value, **kwargs)
            self._check_size(self.get_raw_value(), padded=False)
            self._check_kind(before, self.get_raw_value())
        except BaseException:
            install(self, before)
            raise
        if spec is not None and spec.full:
            self._var_metadata[WRITTEN] = True
        self._settle()

    @locked
    def set_raw_value(self, value: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tracer):
            self._check_size(value)
            self._check_kind(self.get_raw_value(), value)
        super().set_raw_value(value, **kwargs)
        self._settle()

    @locked
    def update_from_state(self, variable_state: nnx.Variable) -> None:
        own, theirs = self._spec(), spec_of(variable_state)
        value = variable_state.get_raw_value()
        if own and theirs and theirs.marked(False) != own.marked(False):
            value = theirs.unpadded(value)  # for another number of devices
            variable_state = variable_state.copy(value)
        if not isinstance(value, Tracer):
            self._check_size(value, padded=theirs is not None)
            self._check_kind(self.get_raw_value(), value)
        super().update_from_state(variable_state)
        if own is not None:
            given = self.get_metadata(METADATA, None)
            if not isinstance(given, ParamSpec) or given.marked(own.full) != own:
                self._var_metadata[METADATA] = own  # another model's, or none
        self._var_metadata.pop(OUT_SHARDING, None)
        self._settle()

    def _refuse_shard(self) -> None:
        value, spec = self.get_raw_value(), self.get_metadata(METADATA, None)
        if spec is None or not isinstance(value, jax.Array | Local):
            return
        if spec.padding and not spec.full:
            spec.check_dims(value)
        away = isinstance(value, Local) or spec.is_shard(value)
        if away and spec.mesh.per_device():
            raise ShardReadError(self, spec, tuple(value.shape))

    def _check_size(self, value: Any, padded: bool = True) -> None:
        """Raise if a value has another number of rows than the parameter.

        Args:
            value: to be held.
            padded: whether it may have the parameter's padding.
        """
        spec = self._spec()
        if spec is not None and isinstance(value, Mapping):
            raise TypeError(
                f"parameter {spec.path!r} was given a {type(value).__name__} of "
                f"{sorted(map(str, value))}, not an array."
            )
        if spec is None or spec.dim is None or not isinstance(value, _ARRAYS):
            return
        known = spec.fits(value) or len(value.shape) < -spec.dim
        known = known or (padded and spec.rests(value))
        if not known and not spec.mesh.per_device():
            raise ValueError(
                f"parameter {spec.path!r} has {spec.size} rows on dim {spec.dim}, "
                "along which it is cut, and was given a value of shape "
                f"{tuple(value.shape)}. Give it one of its own size (of a padded "
                "parameter of another model: state_dict() and load_state_dict)."
            )

    def _check_kind(self, old: Any, new: Any) -> None:
        """Raise if one of two values is floating and the other one is not."""
        spec = self._spec()
        if spec is None or not all(isinstance(x, _ARRAYS) for x in (old, new)):
            return
        floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in (old, new)]
        if floating[0] != floating[1]:
            raise ValueError(
                f"parameter {spec.path!r} has dtype {old.dtype} and was given a value "
                f"of dtype {new.dtype}. Convert it first."
            )

    def _settle(self) -> None:
        """Put a value where the parameter rests, or whole while it is full.

        Of traced and abstract ones only those without the padding that they need.
        """
        spec, value = self._spec(), self.get_raw_value()
        if spec is None or not isinstance(value, _ARRAYS):
            return
        lacks = spec.lacks_padding(value)
        if isinstance(value, (Tracer, jax.ShapeDtypeStruct)):
            if lacks and not spec.mesh.per_device():
                install(self, spec.settled(value))
        elif lacks or spec.holds(value):
            if lacks or getattr(value, "sharding", None) != spec.present(value.ndim):
                install(self, spec.settled(value))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        metadata = dict(self._var_metadata)
        spec = metadata[METADATA] = metadata[METADATA].marked(False)  # loaded as shards
        value = for_pickle(self.get_raw_value(), f"parameter {spec.path!r}")
        return _rebuild_variable, (type(self).__bases__[1], value, metadata)


def _asked_by_nnx_optimizer() -> bool:
    """Whether `nnx.Optimizer` asks for the value of a moment that it made.

    It makes moments from raw values and updates them with raw values, but in between it
    takes them by `get_value` (flax 0.12). Padded, they are cut as their parameters.
    """
    caller = sys._getframe(3)
    return caller.f_globals.get("__name__") == "flax.nnx.training.optimizer"


class _ManagedMeta(type(nnx.Variable)):
    """Metaclass of the generated Variable classes, so that pickle can name them."""


def managed_class(original: Any) -> Any:
    """The managed subclass of a Variable class, one per class."""
    with LOCK:  # a cache alone lets two threads make one each
        return _made_class(original)


@functools.cache
def _made_class(original: Any) -> Any:
    namespace = {"__module__": original.__module__, "__doc__": original.__doc__}
    name = f"FSDP{original.__name__}"
    return _ManagedMeta(name, (ManagedVariable, original), namespace)


def any_managed() -> bool:
    """Whether there has been a managed Variable."""
    return _made_class.cache_info().currsize > 0


def original_class(managed: Any) -> Any:
    """The Variable class that `managed_class` was given."""
    return managed.__bases__[1]


def _reduce_class(cls: Any) -> Any:
    return managed_class, (original_class(cls),)


copyreg.pickle(_ManagedMeta, _reduce_class)


def _rebuild_variable(original, value, metadata) -> nnx.Variable:
    variable = managed_class(original).from_metadata(value, metadata)
    if isinstance(value, (np.ndarray, jax.ShapeDtypeStruct)):
        install(variable, metadata[METADATA].settled(value))
    return variable


def install(variable: nnx.Variable, value: Any) -> None:
    """Set a Variable's raw value, without placement and without trace checks."""
    object.__setattr__(variable, "_raw_value", value)


def spec_of(variable: Any) -> ParamSpec | None:
    """The spec of a managed Variable, None for any other value."""
    if isinstance(variable, ManagedVariable):
        return variable.get_metadata(METADATA, None)
    return None
