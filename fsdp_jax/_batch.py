"""Placing arguments: which array is cut over the data devices, and how.

What lives here: `in_specs`, the error that names an argument, `shard_batch`. What must
not: running anything.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax import _functional
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import move
from fsdp_jax._state import sharded_modules, state_of


def mesh_of(nodes: Sequence[Any], who: str) -> MeshInfo:
    """The one mesh that all sharded modules in `nodes` share.

    Raises:
        ValueError: there is no sharded module, or there are several meshes.
    """
    modules = [m for node in nodes for m in sharded_modules(node)]
    if not modules:
        raise ValueError(
            f"{who}: no argument is, or contains, a module that fully_shard was "
            "applied to. Shard the model first, or use nnx for an unsharded one."
        )
    meshes = {state_of(m).mesh for m in modules}
    if len(meshes) > 1:
        raise ValueError(
            f"{who}: the sharded modules live on {len(meshes)} different meshes. Shard "
            "all modules of one program over one mesh."
        )
    return meshes.pop()


def check_context(mesh: MeshInfo, who: str) -> None:
    """Raise if `jax.set_mesh` has set another mesh than the model's."""
    context, own = jax.sharding.get_abstract_mesh(), mesh.mesh
    if context.empty:
        return
    if (context.axis_names, context.axis_sizes) != (own.axis_names, own.axis_sizes):
        raise ValueError(
            f"{who}: jax.set_mesh has set a mesh with axes {context.axis_names} of "
            f"sizes {context.axis_sizes}, but the model is sharded over "
            f"{own.axis_names} of sizes {own.axis_sizes}. Shard the model over the "
            "mesh that is set, or call this under the model's own mesh."
        )


def parameter_names(f: Callable) -> set[str]:
    """Names of the parameters of a function, as far as they are known."""
    try:
        return set(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return set()


def argument_names(f: Callable, args: Sequence[Any]) -> list[str]:
    """Names of the positional arguments of a call, for error texts."""
    try:
        bound = inspect.signature(f).bind(*args)
    except (TypeError, ValueError):
        return [f"argument {i}" for i in range(len(args))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"argument {name!r}[{i}]" for i in range(len(value))]
        else:
            names.append(f"argument {name!r}")
    return (names + [f"argument {i}" for i in range(len(names), len(args))])[
        : len(args)
    ]


def default_spec(path: str, x: Any, mesh: MeshInfo, who: str) -> PartitionSpec:
    """Cut dim 0, or replicate a scalar.

    Raises:
        ValueError: dim 0 does not divide by the number of devices.
    """
    if x.ndim == 0:
        return PartitionSpec()
    spec = mesh.data_spec()
    check_divides(path, x, spec, mesh, who)
    return spec


def axes_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes that each entry of a spec names."""
    return [
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in spec
    ]


def check_spec(what: str, spec: Any, mesh: MeshInfo, who: str) -> None:
    """Raise unless `spec` is a spec of data axes, or None.

    Raises:
        TypeError: it is neither.
        ValueError: it names an axis twice, or one that is no data axis.
    """
    if not is_spec(spec):
        raise TypeError(f"{who}: {what} holds {spec!r}, not a PartitionSpec.")
    named = [] if spec is None else [axis for axes in axes_of(spec) for axis in axes]
    for axis in named:
        if named.count(axis) > 1:
            raise ValueError(f"{who}: the spec {spec} of {what} names {axis!r} twice.")
        if axis not in mesh.data_axes:
            raise ValueError(
                f"{who}: the spec {spec} of {what} names axis {axis!r}; the data axes "
                f"of the model's mesh are {mesh.data_axes}."
            )


def check_rank(path: str, x: Any, spec: PartitionSpec, who: str) -> None:
    """Raise if a spec has more entries than an array has dims."""
    if len(spec) > x.ndim:
        raise ValueError(
            f"{who}: {path} has shape {tuple(x.shape)}, but its spec {spec} has "
            f"{len(spec)} entries."
        )


def check_divides(
    path: str, x: Any, spec: PartitionSpec, mesh: MeshInfo, who: str
) -> None:
    """Raise unless a spec names data axes only and divides the dims of an array."""
    check_spec(path, spec, mesh, who)
    check_rank(path, x, spec, who)
    for dim, axes in enumerate(axes_of(spec)):
        count = int(np.prod([mesh.mesh.shape[a] for a in axes])) if axes else 1
        if x.shape[dim] % count:
            raise ValueError(
                f"{who}: {path} has size {x.shape[dim]} on dim {dim}, which does not "
                f"divide over {count} devices (mesh axes {axes}). Pad or trim it, or "
                "replicate it with in_specs (PartitionSpec())."
            )


def resolve_specs(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    names: Sequence[str],
    in_specs: Any,
    mesh: MeshInfo,
    who: str,
    num_slices: int = 1,
) -> list[PartitionSpec]:
    """One spec per array in `(args, kwargs)`, in the order of `_functional.take`."""
    given = _given_specs(args, in_specs, who)
    specs: list[PartitionSpec] = []
    labelled = [
        *zip(names, args, given),
        *((f"argument {k!r}", v, None) for k, v in sorted(kwargs.items())),
    ]
    for name, arg, asked in labelled:
        leaves = jax.tree_util.tree_leaves_with_path(arg, is_leaf=_functional.is_node)
        asked_leaves = broadcast_specs(asked, arg, name, who)
        for (keys, leaf), spec in zip(leaves, asked_leaves, strict=True):
            if not _functional.is_array(leaf):
                continue
            path = name + jax.tree_util.keystr(keys)
            if spec is None:
                spec = default_spec(path, leaf, mesh, who)
            else:
                check_divides(path, leaf, spec, mesh, who)
            if (dim := cut_dim(spec)) is not None:
                rows = leaf.shape[dim] // mesh.size(axes_of(spec)[dim])
                if rows % num_slices:
                    raise ValueError(
                        f"{who}: {path} has {rows} rows per device, which do not "
                        f"divide into num_microbatches={num_slices}. Pad or trim it, "
                        "or take another number."
                    )
            specs.append(spec)
    return specs


def cut_dim(spec: PartitionSpec) -> int | None:
    """The first dim that a spec cuts over the devices, None for none."""
    return next((dim for dim, axes in enumerate(axes_of(spec)) if axes), None)


def is_spec(x: Any) -> bool:
    """Whether `x` is a spec, or the None that stands for the default."""
    return x is None or isinstance(x, PartitionSpec)


@dataclasses.dataclass(frozen=True)
class FrozenSpecs:
    """A tree of specs as the user gave it, hashable; trailing Nones are dropped.

    Attributes:
        treedef: structure of the tree.
        leaves: specs, or None for the default.
    """

    treedef: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(specs: Any) -> FrozenSpecs:
        """Freeze a tree of specs."""
        leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
        return FrozenSpecs(treedef, tuple(_trimmed(s) for s in leaves))

    def tree(self) -> Any:
        """The tree again."""
        return jax.tree.unflatten(self.treedef, self.leaves)


def _trimmed(spec: Any) -> Any:
    if not isinstance(spec, PartitionSpec):
        return spec
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


NO_SPECS = FrozenSpecs.of(None)


def _given_specs(args: Sequence[Any], in_specs: Any, who: str) -> list[Any]:
    """Spread `in_specs` over the positional arguments; None means the default."""
    others = [i for i, a in enumerate(args) if not _functional.is_node(a)]
    given: list[Any] = [None] * len(args)
    if in_specs is None:
        return given
    if isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,) * len(others)
    if not isinstance(in_specs, (tuple, list)):
        raise TypeError(
            f"{who}: in_specs must be a PartitionSpec or a tuple with one entry per "
            f"argument after the model, got {type(in_specs).__name__}."
        )
    if len(in_specs) == len(others):
        places = others
    elif len(in_specs) == len(args):
        places = list(range(len(args)))
    else:
        raise ValueError(
            f"{who}: in_specs has {len(in_specs)} entries for {len(others)} arguments "
            "besides the model. Give one per argument; None keeps the default."
        )
    for i, spec in zip(places, in_specs):
        given[i] = spec
    return given


def broadcast_specs(
    asked: Any, arg: Any, name: str, who: str, field: str = "in_specs"
) -> list[Any]:
    """Spread a prefix of specs over the leaves of an argument."""
    count = len(jax.tree.leaves(arg, is_leaf=_functional.is_node))
    if is_spec(asked):
        return [asked] * count
    try:
        spread = jax.tree.map(
            lambda spec, sub: (
                [spec] * len(jax.tree.leaves(sub, is_leaf=_functional.is_node))
            ),
            asked,
            arg,
            is_leaf=is_spec,
        )
    except ValueError as error:
        raise ValueError(
            f"{who}: {field} {asked!r} does not fit {name}: {error}"
        ) from None
    flat = jax.tree.leaves(spread, is_leaf=is_spec)
    bad = [s for s in flat if not is_spec(s)]
    if bad:
        raise TypeError(f"{who}: {field} holds {bad[0]!r}, not a PartitionSpec.")
    return flat


def shard_batch(batch: Any, model: Any) -> Any:
    """Place host arrays on the model's mesh, cut on dim 0 over the data devices.

    In a program of several processes each passes its own part of the global batch, the
    same number of rows everywhere, in the order of the process index. They compare
    their numbers of rows first, which waits for work that the devices have yet to do;
    where that matters use `jax.make_array_from_process_local_data`.

    Args:
        batch: tree of arrays, `(rows, ...)` of this process; scalars are replicated. A
            `jax.ShapeDtypeStruct` stands for the rows of all processes and stays one.
        model: a sharded module, or one that contains some; also a Linen one.

    Returns:
        The tree with global `jax.Array`s, `(rows of all processes, ...)`.

    Raises:
        ValueError: no sharded module in `model`, the rows of this process do not divide
            over its data devices, or another process has another number of rows.
        TypeError: a leaf that is neither an array nor a number.

    Source: README, "The loop".
    """
    who = "shard_batch"
    mesh = mesh_of(_functional.model_nodes(model), who)
    here = mesh.places_here()

    def place(keys: Any, x: Any) -> Any:
        path = "batch" + jax.tree_util.keystr(keys)
        if mesh.compile_only or isinstance(x, jax.ShapeDtypeStruct):
            x = jax.eval_shape(jnp.asarray, x)
            return move(x, NamedSharding(mesh.mesh, default_spec(path, x, mesh, who)))
        if not _functional.is_array(x) and not isinstance(x, (bool, int, float)):
            raise TypeError(f"{who}: {path} is a {type(x).__name__}, not an array.")
        if isinstance(x, Tracer):
            raise TypeError(
                f"{who}: {path} is being traced. Call shard_batch outside of jit; "
                "value_and_grad cuts traced arrays itself."
            )
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return move(x, NamedSharding(mesh.mesh, default_spec(path, x, mesh, who)))
        host = x if isinstance(x, jax.Array) else np.asarray(x)
        if isinstance(host.dtype, np.dtype) and host.dtype.kind in "OSU":
            raise TypeError(f"{who}: {path} has dtype {host.dtype}, not numbers.")
        if host.ndim == 0:
            return move(host, mesh.sharding(0, None))
        if host.shape[0] % here:
            raise ValueError(
                f"{who}: {path} has {host.shape[0]} rows, which do not divide over the "
                f"{here} devices of this process. Pad or trim the batch."
            )
        target = NamedSharding(mesh.mesh, mesh.data_spec())
        if target.is_fully_addressable:
            return jax.device_put(host, target)
        if jnp.issubdtype(host.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(host))
            data = jax.make_array_from_process_local_data(target, data)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(host))
        return jax.make_array_from_process_local_data(target, np.asarray(host))

    _agree_on_rows(batch, mesh)
    return jax.tree_util.tree_map_with_path(place, batch)


_NUM_COMPARED = 64


def _agree_on_rows(batch: Any, mesh: MeshInfo) -> None:
    """Raise in every process if processes bring different numbers of rows.

    With different sizes they would compile different programs, whose collectives then
    wait for each other or mix up their data. Each call compares a vector of fixed
    length, so that this very comparison cannot go wrong in that way.
    """
    if jax.process_count() == 1 or mesh.mesh.devices.size != jax.device_count():
        return
    leaves = [
        (jax.tree_util.keystr(keys), np.shape(x)[0])
        for keys, x in jax.tree_util.tree_leaves_with_path(batch)
        if np.ndim(x) and getattr(x, "is_fully_addressable", True)
    ]
    mine = np.full(_NUM_COMPARED + 1, -1, np.int32)
    rows = [size for _, size in leaves[:_NUM_COMPARED]]
    mine[: len(rows)] = rows
    mine[-1] = zlib.crc32(repr(leaves).encode()) & 0x7FFFFFFF
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    if (everyone == mine).all():
        return
    differ = int(np.argmax((everyone != everyone[0]).any(axis=0)))
    found = "the arrays have other names, or are more than the first 64"
    if differ < _NUM_COMPARED:
        key = leaves[differ][0] if differ < len(rows) else ""
        found = (
            f"batch{key} has {everyone[:, differ].tolist()} rows in the processes 0, "
            "1, ... (-1: no such array)"
        )
    raise ValueError(
        f"shard_batch: processes bring different batches: {found}. Every process must "
        "bring the same arrays with the same number of rows. Pad or trim them."
    )
