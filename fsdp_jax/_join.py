"""Joining what the devices return: averaged, concatenated, or the same everywhere.

What lives here: the rules, and what a user asked for that they depend on. What must
not: running anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax import _batch, _collectives, _functional
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import place
from fsdp_jax._param import spec_of
from fsdp_jax._spec import ParamSpec, dotted

REDUCTIONS = ("mean", "sum", "weighted")


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for. Hashable if the function is.

    Attributes:
        who: name of the public function, for error texts.
        f: the user's function.
        argnums: differentiated arguments; None for `shard_map`.
        single: whether `argnums` was one int.
        has_aux: whether `f` returns a pair.
        wrt: one nnx filter per entry of `argnums`.
        reduction: one of `REDUCTIONS`.
        num_microbatches: slices of each device's rows.
        in_specs: as given.
        out_specs: as given.
    """

    who: str
    f: Callable
    argnums: tuple[int, ...] | None = None
    single: bool = True
    has_aux: bool = False
    wrt: tuple[Any, ...] = ()
    reduction: str = "mean"
    num_microbatches: int = 1
    in_specs: _batch.FrozenSpecs = _batch.NO_SPECS
    out_specs: _batch.FrozenSpecs = _batch.NO_SPECS


@dataclasses.dataclass(frozen=True)
class Slot:
    """One array of a state.

    Attributes:
        path: where it is.
        kind: class of its Variable.
        spec: how the per-device program cuts it.
        rest: its sharding outside of that.
        param: how the parameter rests, None if it is not a managed one.
    """

    path: tuple[Any, ...]
    kind: type
    spec: PartitionSpec
    rest: NamedSharding
    param: ParamSpec | None

    @property
    def managed(self) -> bool:
        """Whether a group manages it."""
        return self.param is not None

    def placed(self, x: Any) -> Any:
        """The array as the program takes it; an unsharded one may lack its padding."""
        if self.param is not None and self.param.padding and self.param.fits(x):
            return self.param.marked(False).settled(x)
        return place(x, self.rest)


def slots_of(state: Any, mesh: MeshInfo) -> tuple[Slot, ...]:
    """One slot per array of a state, in order."""
    slots = []
    items = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for keys, leaf in items:
        path = tuple(_functional.plain_key(k) for k in keys)
        variable = isinstance(leaf, nnx.Variable)
        spec = spec_of(leaf)
        raw = leaf.get_raw_value() if variable else leaf
        for x in jax.tree.leaves(raw):
            if _functional.is_array(x):
                kind = type(leaf) if variable else jax.Array
                cut = mesh.spec(x.ndim, spec.dim) if spec and spec.cut else None
                rest = spec.sharding(x.ndim) if spec else mesh.whole_like(x)
                slots.append(Slot(path, kind, cut or PartitionSpec(), rest, spec))
    return tuple(slots)


def differs_between_devices(mesh: MeshInfo, eqn: Any) -> bool | None:
    """Whether an equation's results differ between devices, None if it depends."""
    name = eqn.primitive.name
    if name == "axis_index":
        return True
    if name in ("psum", "psum_invariant", "pmax", "pmin", "all_gather"):
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        whole = eqn.params.get("axis_index_groups") is None
        if whole and set(axes) >= set(mesh.data_axes):
            return False
    return None


def as_spec(spec: PartitionSpec) -> Callable:
    """The rule of a value that is right as it is, under `spec`."""
    return lambda value, differ: (value, spec)


def state_rule(request: Request, mesh: MeshInfo, slot: Slot, new: bool) -> Callable:
    """How a Variable that `f` changed or made becomes global."""
    name = dotted(slot.path[2:])

    def rule(value: Any, differ: bool) -> tuple[Any, PartitionSpec]:
        if slot.managed or issubclass(slot.kind, nnx.RngState) or not differ:
            return value, slot.spec
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        if issubclass(slot.kind, nnx.BatchStat) and floating:
            return _collectives.mean_over_devices(value, mesh, name), PartitionSpec()
        if new or issubclass(slot.kind, nnx.Intermediate):
            if value.ndim:
                return value, mesh.data_spec()
            if floating:
                return _collectives.mean_over_devices(
                    value, mesh, name
                ), PartitionSpec()
        raise ValueError(
            f"{request.who}: f changed the {slot.kind.__name__} "
            f"{name!r} to values that differ between devices, and "
            "only BatchStat updates are averaged. Make the value the same everywhere "
            f"(jax.lax.psum over {mesh.data_axes}), or return it as an output."
        )

    return rule


def output_rules(request, mesh, taken, output, arrays) -> list[Callable]:
    """How each array of the user's output becomes global."""
    specs: list[Any] = [None] * len(taken.slots)
    out_specs = request.out_specs.tree()
    if out_specs is not None:
        specs = _batch.broadcast_specs(
            out_specs, output, "the output", request.who, "out_specs"
        )
    leaves = jax.tree_util.tree_leaves_with_path(output, is_leaf=_functional.is_node)
    asked = [
        (spec, jax.tree_util.keystr(keys))
        for spec, slot, (keys, _) in zip(specs, taken.slots, leaves, strict=True)
        if slot == "array"
    ]

    def make(spec: PartitionSpec | None, path: str, x: Any) -> Callable:
        if spec is not None:
            name = f"the output{path} (see out_specs)"
            _batch.check_rank(name, x, spec, request.who)
            return as_spec(spec)

        def rule(value: Any, differ: bool) -> tuple[Any, PartitionSpec]:
            if value.ndim:
                return value, mesh.data_spec()
            if not differ:
                return value, PartitionSpec()
            if jnp.issubdtype(value.dtype, jnp.floating):
                return _collectives.mean_over_devices(
                    value, mesh, "output"
                ), PartitionSpec()
            raise TypeError(
                f"{request.who}: f returned a {value.dtype} scalar that differs "
                f"between devices (output{path}). Return it as a float to have it "
                "averaged, or with shape (1,) to have one entry per device, or sum it "
                f"(jax.lax.psum over {mesh.data_axes}). If it came out of a loop and "
                "is the same everywhere, shard_map's out_specs=PartitionSpec() says so."
            )

        return rule

    return [make(*pair, x) for pair, x in zip(asked, arrays, strict=True)]
