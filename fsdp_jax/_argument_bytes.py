"""What the arguments of a step occupy on one device, by kind.

What lives here: a walk over arguments by shape and sharding. What must not: anything
that reads a value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from fsdp_jax._functional import plain_key
from fsdp_jax._policies import PINNED_HOST, UNPINNED_HOST

ShapeAndBytes = tuple[tuple[int, ...], int]


@dataclasses.dataclass
class ArgumentBytes:
    """Bytes of one device, and facts of the parameters.

    Attributes:
        parameter_bytes: `nnx.Param` Variables in device memory, and what lies under
            `params`, as in Linen's variables and `TrainState`.
        moment_bytes: optimizer state there: `nnx.OptState` Variables, optax states.
        other_bytes: everything else there.
        host_parameter_bytes: one device's share of the parameters in host memory.
        host_moment_bytes: the same of optimizer state.
        host_other_bytes: the same of everything else.
        parameter_elements: elements of all full parameters.
        missing: elements and bytes of each that one device does not hold, by its shape
            and the bytes of all of it.
        device_kind: of the first sharding met, such as `TPU v5 lite`; empty if none.
    """

    parameter_bytes: int = 0
    moment_bytes: int = 0
    other_bytes: int = 0
    host_parameter_bytes: int = 0
    host_moment_bytes: int = 0
    host_other_bytes: int = 0
    parameter_elements: int = 0
    missing: dict[ShapeAndBytes, list[tuple[int, int]]] = dataclasses.field(
        default_factory=dict
    )
    device_kind: str = ""

    def lacking(
        self, gathered: Mapping[ShapeAndBytes, int] | None = None
    ) -> tuple[int, int]:
        """Elements and bytes of parameters that one device does not hold.

        Args:
            gathered: how many arrays of each kind a program gathers; others, such as
                an averaged copy of the model, do not count. None: all count.
        """
        found = [
            pair
            for kind, pairs in self.missing.items()
            for pair in sorted(pairs, reverse=True)[
                : len(pairs) if gathered is None else gathered.get(kind, 0)
            ]
        ]
        if gathered is not None and not any(elements for elements, _ in found):
            return self.lacking()
        return sum(e for e, _ in found), sum(b for _, b in found)


def measure_arguments(arguments: Any) -> ArgumentBytes:
    """Add up the arguments of a step, each shared Variable once.

    Args:
        arguments: a pytree of modules, optimizers, states and arrays, concrete or
            `ShapeDtypeStruct`. An array without a sharding counts in full.

    Returns:
        The bytes of one device.
    """
    total = ArgumentBytes()
    for kind, array in _arrays(arguments):
        shape, sharding = tuple(array.shape), getattr(array, "sharding", None)
        local = shape if sharding is None else sharding.shard_shape(shape)
        total.device_kind = total.device_kind or device_kind_of(sharding)
        size = math.prod(local) * array.dtype.itemsize
        away = getattr(sharding, "memory_kind", None) in (PINNED_HOST, UNPINNED_HOST)
        field = f"{'host_' if away else ''}{kind}_bytes"
        setattr(total, field, getattr(total, field) + size)
        if kind == "parameter":
            total.parameter_elements += math.prod(shape)
            missing = math.prod(shape) - math.prod(local)
            pair = missing, missing * array.dtype.itemsize
            kind_of = shape, math.prod(shape) * array.dtype.itemsize
            total.missing.setdefault(kind_of, []).append(pair)
    return total


def device_kind_of(sharding: Any) -> str:
    """Kind of the devices of a sharding; empty without one."""
    devices = getattr(sharding, "device_set", ())
    return next((device.device_kind for device in devices), "")


def _arrays(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Every array of the arguments and its kind."""
    seen: set[int] = set()
    leaves = jax.tree_util.tree_leaves_with_path(arguments, is_leaf=_is_whole)
    for path, leaf in leaves:
        found: list[tuple[str, Any]] = []
        if isinstance(leaf, nnx.Variable):
            found = [_variable(leaf)]
        elif _is_optax(leaf):
            found = [("moment", x) for x in jax.tree.leaves(leaf)]
        elif isinstance(leaf, nnx.Module):
            variables = [v for _, v in nnx.iter_graph(leaf, graph=True)]
            found = [_variable(v) for v in variables if isinstance(v, nnx.Variable)]
        else:
            below = any(plain_key(key) == "params" for key in path)
            found = [("parameter" if below else "other", leaf)]
        for kind, array in found:
            if hasattr(array, "shape") and hasattr(array, "dtype"):
                if id(array) not in seen:
                    seen.add(id(array))
                    yield kind, array


def _is_optax(x: Any) -> bool:
    named = isinstance(x, tuple) and hasattr(x, "_fields")
    return named and type(x).__module__.startswith("optax")


def _is_whole(x: Any) -> bool:
    return isinstance(x, nnx.Variable) or _is_optax(x)


def _variable(variable: nnx.Variable) -> tuple[str, Any]:
    kind = "other"
    if isinstance(variable, nnx.Param):
        kind = "parameter"
    elif isinstance(variable, nnx.OptState):
        kind = "moment"
    return kind, variable.get_raw_value()
