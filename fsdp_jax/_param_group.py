"""One communication group: its Variables, and moving their values together.

What must not live here: the module class, validation of `fully_shard`'s arguments, what
runs between gathers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from fsdp_jax import _collectives, _cotangents, _forward_mode
from fsdp_jax._comm import GroupComm, cast_floating
from fsdp_jax._local import shard_in
from fsdp_jax._managed import METADATA, WRITTEN, install
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import constrain, mover, pad, to_rest
from fsdp_jax._param import check_own_trace, mark
from fsdp_jax._spec import ParamSpec


@dataclasses.dataclass
class ParamGroup:
    """The parameters of one `fully_shard` call, in the order of their paths.

    Attributes:
        variables: managed Variables below the module, less those of inner groups.
        mesh: where they live.
    """

    variables: list[nnx.Variable]
    mesh: MeshInfo

    @property
    def specs(self) -> list[ParamSpec]:
        """One spec per parameter."""
        return [v.get_metadata(METADATA) for v in self.variables]

    @property
    def full(self) -> bool:
        """Whether the Variables hold full arrays."""
        return any(spec.full for spec in self.specs)

    def mark(self, full: bool) -> None:
        """Note whether the Variables hold full arrays."""
        for variable in self.variables:
            mark(variable, full)

    def raw_values(self) -> list[Any]:
        """What the Variables hold."""
        return [v.get_raw_value() for v in self.variables]

    def values(self) -> list[Any]:
        """The arrays: shards, or full arrays while unsharded."""
        return [shard_in(v) for v in self.raw_values()]

    def local(self, field: str) -> list[Any]:
        """One field of what `Local` says of each parameter, None where it says none."""
        return [getattr(v, field, None) for v in self.raw_values()]

    def shards(self, comm: GroupComm) -> list[Any]:
        """The values in their resting layout; nothing is changed.

        Args:
            comm: how the group travels.
        """
        return [self._rest(v, comm.only([i])) for i, v in enumerate(self.variables)]

    def check_shards(self) -> None:
        """Raise unless every value is this device's piece, in a per-device program."""
        for variable, spec in zip(self.variables, self.specs):
            value = variable.get_raw_value()
            if spec.dim is None or not spec.cut:
                continue
            spec.check_dims(value)
            size = spec.rest_size // spec.mesh.num_shards
            if value.shape[spec.dim] != size:
                raise ValueError(
                    f"parameter {spec.path!r} entered this per-device program with "
                    f"shape {tuple(value.shape)}; its shard has dim {spec.dim} of "
                    f"{size}. Give shard_map the in_spec "
                    f"{spec.mesh.spec(value.ndim, spec.dim)} for it, or pass the "
                    "model to fsdp_jax.shard_map as an argument, not by closure."
                )

    def gather_global(
        self, dtype: Any = None, in_backward: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Full arrays, replicated on the mesh, in `dtype` where floating and given.

        Traced values come with a custom gradient that returns to the shards.

        Args:
            dtype: None for the parameters' own.
            in_backward: called when a gradient is taken.
        """
        values = self.values()
        for value, spec in zip(values, self.specs, strict=True):
            spec.check_dims(value)
        if self.is_traced():
            return [
                _gather_traced(v, s, dtype, in_backward)
                for v, s in zip(values, self.specs, strict=True)
            ]
        if not values:
            return []
        targets = tuple(s.whole(v.ndim) for v, s in zip(values, self.specs))
        cast = [cast_floating(v, dtype) for v in values]
        full = mover(targets)(*cast)
        return [s.unpadded(v) for v, s in zip(full, self.specs, strict=True)]

    def is_traced(self) -> bool:
        """Whether a value is being traced, or would be as soon as it is used."""
        values = [*self.values(), jnp.zeros(())]
        return any(isinstance(v, Tracer) for v in values)

    def keep_values(self, values: Sequence[Any], *, full: bool, asked: str) -> None:
        """Hold `values` beyond this call, which asked for it.

        Raises:
            RuntimeError: they are traced, and the module is from outside of the trace.
        """
        for variable, value in zip(self.variables, values, strict=True):
            check_own_trace(variable, value, asked)
        self.set_values(values, full=full)

    def set_values(self, values: Sequence[Any], *, full: bool) -> None:
        """Hold `values` from now on: full arrays, or the shards."""
        for variable, value in zip(self.variables, values, strict=True):
            install(variable, value)
            mark(variable, full)

    @contextmanager
    def holding(self, full: Sequence[Any]) -> Iterator[None]:
        """Hold `full` in the Variables for the length of the block.

        Afterwards each holds what it held before, or what the block wrote into it,
        brought to the layout and dtype in which it rests. In a per-device program
        nothing can be written (see `ManagedVariable.set_value`).
        """
        before, was_full = self.raw_values(), self.full
        for variable in self.variables:
            variable._var_metadata.pop(WRITTEN, None)  # what counts is the block
        self.set_values(full, full=True)
        try:
            with _cotangents.holding(full):
                yield
        finally:
            for variable, held, old in zip(self.variables, full, before, strict=True):
                new = variable.get_raw_value()
                written = variable._var_metadata.pop(WRITTEN, False)
                # A transform inside (nnx.jit, nnx.remat) writes back what it was given:
                # where that was cast, it must not replace the parameter.
                returned = held.dtype != old.dtype and not written
                if new is held or returned or self.mesh.per_device():
                    new = old
                elif isinstance(new, (jax.Array, np.ndarray)):
                    spec = variable.get_metadata(METADATA).marked(was_full)
                    new = spec.settled(jnp.asarray(new, old.dtype))
                install(variable, new)
            self.mark(was_full)

    def _rest(self, variable: nnx.Variable, comm: GroupComm) -> Any:
        spec, value = variable.get_metadata(METADATA), variable.get_raw_value()
        if spec.is_shard(value) or value is None:
            return value
        if spec.mesh.per_device():
            return _cotangents.leave_full(_collectives.own_shard(value, comm), comm)
        return spec.marked(False).settled(value)


def _gather_traced(
    value: jax.Array, spec: ParamSpec, dtype: Any, in_backward: Callable[[], None]
) -> jax.Array:
    """Constrain a traced shard to be whole; its gradient returns to the shards."""
    whole = spec.whole(value.ndim)
    own_dtype = value.dtype

    on_device = spec.mesh.sharding(value.ndim, spec.dim, spec.others)

    def to_full(x):
        # Pinned before the cast moves: else the partitioner gathers, then casts.
        full = constrain(cast_floating(constrain(x, on_device), dtype), whole)
        return spec.unpadded(full)

    if not jnp.issubdtype(own_dtype, jnp.inexact):
        return to_full(value)

    def backward(_, ct):
        in_backward()
        if spec.dim is not None and spec.padding:
            ct = pad(ct, spec.dim, spec.padding)
        grad = constrain(ct, on_device).astype(own_dtype)
        return (to_rest(grad, spec.memory_kind),)

    gather = jax.custom_vjp(to_full)
    gather.defvjp(lambda x: (to_full(x), None), backward)
    with _forward_mode.refused():
        return gather(value)
