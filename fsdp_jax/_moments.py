"""Optimizer state that rests as the parameters that it was made for.

What must not live here: how it is updated (`_optimizer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from fsdp_jax._managed import METADATA, OUT_SHARDING, install, spec_of
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import move
from fsdp_jax._param import guard
from fsdp_jax._policies import UNPINNED_HOST
from fsdp_jax._spec import ParamSpec


def as_full(variable: Any) -> Any:
    """A Variable like this one that holds the parameter's own rows, as a full one."""
    spec = spec_of(variable)
    if spec is None or not spec.pads(variable.get_raw_value()):
        return variable
    metadata = variable.get_metadata() | {METADATA: spec.marked(True)}
    return type(variable).from_metadata(variable.get_value(), metadata)


def settle_moment(variable: nnx.Variable, mesh: MeshInfo) -> None:
    """Put optimizer state on the mesh: cut as the parameter it was made for, or whole.

    NNX copies a parameter's metadata to its moments, the spec among it.
    """
    spec, value = variable.get_metadata(METADATA, None), variable.get_raw_value()
    if mesh.compile_only and isinstance(value, jax.Array):
        value = jax.ShapeDtypeStruct(value.shape, value.dtype)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct) or mesh.per_device():
        return
    like = isinstance(spec, ParamSpec) and bool(value.ndim)
    if not like or not spec.fits(value):
        target = mesh.sharding(value.ndim, None)
        install(variable, move(value, target))
        if like:
            variable.set_metadata(OUT_SHARDING, tuple(target.spec))
        return
    rest = spec.marked(False)
    install(variable, rest.settled(value))
    variable.set_metadata(METADATA, rest)
    if rest.padding or rest.memory_kind == UNPINNED_HOST:
        # This class hides the padding, and puts back into host memory what compiled
        # programs return in device memory.
        guard(variable)


class Memory:
    """The memory that arrays take, so that each of them can have its own.

    JAX cannot donate two arrays that share memory, as the state of an optimizer does
    that keeps the parameters it began with.

    Args:
        tree: of arrays or Variables, that keep theirs.
    """

    def __init__(self, tree: Any) -> None:
        self._taken: dict[Any, Any] = {}
        for x in jax.tree.leaves(tree):
            self._taken.update(dict.fromkeys(_memory(x), x))

    def own(self, tree: Any) -> Any:
        """The tree, with copies in place of arrays that share what is taken."""

        def own(x: Any) -> Any:
            if any(place in self._taken for place in _memory(x)):
                traced = isinstance(x, Tracer)
                x = jnp.copy(x) if traced else _copied(x)
            self._taken.update(dict.fromkeys(_memory(x), x))
            return x

        return jax.tree.map(own, tree)


def _copied(x: jax.Array) -> jax.Array:
    return jax.device_put(x, x.sharding, may_alias=False)


def _memory(x: Any) -> Iterator[Any]:
    """What is equal for two arrays only if they share memory."""
    if not isinstance(x, jax.Array) or not x.size:
        return
    yield id(x)
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if key or isinstance(x, Tracer) or x.is_deleted():
        return
    for shard in x.addressable_shards:
        yield shard.device, shard.data.unsafe_buffer_pointer()
