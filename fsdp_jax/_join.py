"""Joining what the devices return: averaged, concatenated, or the same everywhere.

What lives here: the rules, and what a user asked for that they depend on. What must
not: running anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax import _arguments, _collectives, _functional, _means, _opaque
from fsdp_jax._managed import spec_of
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import place
from fsdp_jax._rows import rows_dim, stacked_dims
from fsdp_jax._spec import ParamSpec, Path, dotted

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
    in_specs: _arguments.FrozenSpecs = _arguments.NO_SPECS
    out_specs: _arguments.FrozenSpecs = _arguments.NO_SPECS


@dataclasses.dataclass(frozen=True)
class Slot:
    """One array of a state.

    Attributes:
        path: where it is.
        kind: class of its Variable.
        spec: how the per-device program cuts it.
        rest: its sharding outside of that.
        param: how the parameter rests, None if it is not a managed one.
        shape: of the array.
        rows: the dim of an `nnx.Cache` that has the rows of the batch; None for none.
    """

    path: tuple[Any, ...]
    kind: type
    spec: PartitionSpec
    rest: NamedSharding
    param: ParamSpec | None
    shape: tuple[int, ...]
    rows: int | None = None

    @property
    def managed(self) -> bool:
        """Whether a group manages it."""
        return self.param is not None

    def placed(self, x: Any) -> Any:
        """The array as the program takes it; an unsharded one may lack its padding."""
        if self.param is not None and self.param.padding and self.param.fits(x):
            return self.param.marked(False).settled(x)
        return place(x, self.rest)


def slots_of(
    state: Any, mesh: MeshInfo, rows: Collection[int] = ()
) -> tuple[Slot, ...]:
    """One slot per array of a state, in order.

    Args:
        state: an NNX state.
        mesh: mesh and the roles of its axes.
        rows: how many rows a batch has, as the caller sees it. Caches are cut over
            them.
    """
    slots, arrays = [], []
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
                cut = cut or PartitionSpec()
                slots.append(Slot(path, kind, cut, rest, spec, tuple(x.shape)))
                arrays.append(x)
    if not rows or not any(issubclass(slot.kind, nnx.Cache) for slot in slots):
        return tuple(slots)
    stacks = stacks_of(slots)
    for i, (slot, x) in enumerate(zip(slots, arrays)):
        if issubclass(slot.kind, nnx.Cache):
            dim = rows_dim(slot.path, slot.shape, stacks, rows)
            if dim is not None:
                spec, rest = mesh.data_spec(dim), mesh.whole_like(x, dim)
                slots[i] = dataclasses.replace(slot, spec=spec, rest=rest, rows=dim)
    return tuple(slots)


def stacks_of(slots: Sequence[Slot]) -> dict[Path, int]:
    """Over how many leading dims each node is a stack, see `stacked_dims`."""
    return stacked_dims((s.path, s.param.layers) for s in slots if s.param)


def check_no_rows(
    request: Request, slots: Sequence[Slot], positions: Sequence[int]
) -> None:
    """Raise if state with the rows of the batch is to be differentiated."""
    for slot in (slots[at] for at in positions if at < len(slots)):
        name = f"{slot.kind.__name__} {dotted(slot.path[1:])!r}"
        if slot.rows is not None:
            raise TypeError(
                f"{request.who}: wrt selects the {name}, which is cut with the rows of "
                "the batch. Pass its array as an argument, and name that in argnums."
            )
        if issubclass(slot.kind, nnx.Perturbation):
            raise TypeError(
                f"{request.who}: wrt selects the {name}, which is whole on every "
                "device, and intermediates have rows. Take nnx.grad of a loss of "
                "model(x) on global arrays, or name an argument in argnums."
            )


def as_spec(spec: PartitionSpec) -> Callable:
    """The rule of a value that is right as it is, under `spec`."""
    return lambda value, differ: (value, spec)


@dataclasses.dataclass(frozen=True)
class Change:
    """One array of the state that `f` changed or made.

    Attributes:
        slot: as `f` left it, on one device.
        before: what it replaces, None for nothing.
        new: whether its Variable held no value before.
        owner: class of the metric that it belongs to, None for none.
    """

    slot: Slot
    before: Slot | None
    new: bool
    owner: type | None

    @property
    def summed(self) -> bool:
        """Whether the devices add to it, so that its global value is their sum."""
        additive = self.owner is not None and issubclass(
            self.owner, nnx.metrics.Average
        )
        return additive and issubclass(self.slot.kind, nnx.metrics.MetricState)


def owners(nodes: Sequence[Any]) -> dict[tuple[Any, ...], type]:
    """By the path of a Variable in `nodes`, the class of the metric that it is in."""
    found: dict[tuple[Any, ...], type] = {}
    for i, node in enumerate(nodes):
        classes: dict[tuple[Any, ...], type] = {}
        for path, child in _functional.walk(node):
            if isinstance(child, nnx.metrics.Metric):
                classes[path] = type(child)
            elif isinstance(child, nnx.Variable) and path[:-1] in classes:
                found[(i, *path)] = classes[path[:-1]]
    return found


def state_rule(request: Request, mesh: MeshInfo, change: Change) -> Callable:
    """How a Variable that `f` changed or made becomes global."""
    slot = change.slot
    name, kind = dotted(slot.path[2:]), slot.kind

    def rule(value: Any, differ: bool) -> tuple[Any, PartitionSpec]:
        stream = issubclass(kind, nnx.RngState)
        if slot.managed or (stream and change.before is not None):  # see `_streams`
            return value, slot.spec
        if change.summed:
            return _collectives.sum_over_devices(value, mesh, name), PartitionSpec()
        rows = _cache_spec(request, mesh, change, differ)
        if rows is not None:
            return value, rows
        if not differ:
            return value, PartitionSpec()
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        averaged = issubclass(kind, nnx.BatchStat) and floating
        if not averaged and not issubclass(kind, nnx.metrics.MetricState):
            if change.new or issubclass(kind, nnx.Intermediate):
                if value.ndim:
                    return value, mesh.data_spec()
                averaged = floating
        if averaged:
            return _means.mean_over_devices(value, mesh, name), PartitionSpec()
        raise ValueError(_refusal(request, mesh, change))

    return rule


def _cache_spec(
    request: Request, mesh: MeshInfo, change: Change, differ: bool
) -> PartitionSpec | None:
    """How the pieces of a cache are joined, None if the devices hold no pieces."""
    slot, before = change.slot, change.before
    if not issubclass(slot.kind, nnx.Cache):
        return None
    if before is not None and before.rows is not None:
        piece = before.shape[before.rows] // mesh.num_devices
        if len(slot.shape) > before.rows and slot.shape[before.rows] % piece == 0:
            return before.spec
    if slot.rows is None or (before is not None and before.shape == slot.shape):
        return None
    if slot.rows == 0:
        return mesh.data_spec()
    if not differ:
        return None
    raise ValueError(
        f"{request.who}: f made the {slot.kind.__name__} {dotted(slot.path[2:])!r}, "
        f"{slot.shape} on each device, with the rows of the batch on dim {slot.rows}. "
        "Only new caches with the rows on dim 0 are joined: make it before the call, "
        "for the rows of the whole batch."
    )


def _refusal(request: Request, mesh: MeshInfo, change: Change) -> str:
    """Why a Variable cannot become global, and what to do."""
    kind, name = change.slot.kind.__name__, dotted(change.slot.path[2:])
    found = (
        f"{request.who}: f changed the {kind} {name!r} to values that differ between "
        "devices, and "
    )
    if issubclass(change.slot.kind, nnx.Cache):
        return (
            f"{found}no dim of its shape {change.slot.shape} has as many rows as an "
            "argument that is cut over the devices, so each of them holds all of it. "
            "Make the cache for the rows of the whole batch, and pass the batch as an "
            "argument."
        )
    if issubclass(change.slot.kind, nnx.RngState):
        return (
            f"{found}random streams are the same everywhere after a call. One that "
            "follows from a stream of the model has the device's index in its key: "
            "make it (fork, split) before the call."
        )
    if issubclass(change.slot.kind, nnx.metrics.MetricState):
        owner = change.owner.__name__ if change.owner else "metric"
        return (
            f"{found}the state of a {owner} is not a sum over devices, as that of "
            "nnx.metrics.Average and its subclasses is. Return what it is to be "
            "updated with (arrays are concatenated), and update it outside."
        )
    return (
        f"{found}only BatchStat updates are averaged. Make the value the same "
        f"everywhere (jax.lax.psum over {mesh.data_axes}), or return it as an output."
    )


def output_rules(
    request, mesh, taken, output, arrays
) -> tuple[list[Callable], list[bool]]:
    """How each array of the user's output becomes global, and whether the user says."""
    specs: list[Any] = [None] * len(taken.slots)
    out_specs = request.out_specs.tree()
    if out_specs is not None:
        specs = _arguments.broadcast_specs(
            out_specs, output, "the output", request.who, "out_specs"
        )
    leaves = jax.tree_util.tree_leaves_with_path(output, is_leaf=_functional.is_node)
    for (keys, leaf), slot in zip(leaves, taken.slots, strict=True):
        if isinstance(slot, tuple):
            _opaque.check_output(request.who, jax.tree_util.keystr(keys), leaf)
    asked = [
        (spec, jax.tree_util.keystr(keys))
        for spec, slot, (keys, _) in zip(specs, taken.slots, leaves, strict=True)
        if slot == "array"
    ]

    def make(spec: PartitionSpec | None, path: str, x: Any) -> Callable:
        if spec is not None:
            name = f"the output{path} (see out_specs)"
            _arguments.check_rank(name, x, spec, request.who)
            return as_spec(spec)

        def rule(value: Any, differ: bool) -> tuple[Any, PartitionSpec]:
            if value.ndim:
                return value, mesh.data_spec()
            if not differ:
                return value, PartitionSpec()
            if jnp.issubdtype(value.dtype, jnp.floating):
                return _means.mean_over_devices(value, mesh, "output"), PartitionSpec()
            raise TypeError(
                f"{request.who}: f returned a {value.dtype} scalar that differs "
                f"between devices (output{path}). Return it as a float to have it "
                "averaged, or with shape (1,) to have one entry per device, or sum it "
                f"(jax.lax.psum over {mesh.data_axes}). If it came out of a loop and "
                "is the same everywhere, shard_map's out_specs=PartitionSpec() says so."
            )

        return rule

    rules = [make(*pair, x) for pair, x in zip(asked, arrays, strict=True)]
    return rules, [spec is not None for spec, _ in asked]
