"""How the arguments of a call are cut over the data devices.

What lives here: names of arguments, `in_specs`, the errors that name an argument. What
must not: placing arrays (`_batch`), and running anything.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fsdp_jax import _functional, _opaque
from fsdp_jax._mesh import MeshInfo

# By this name, which no parameter has, Linen's collections come that are cut.
CACHES = "the variables"


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a call.

    Attributes:
        name: of the parameter that takes it; empty if that is not known.
        index: in `*args`; None elsewhere.
        value: what was passed.
    """

    name: str
    index: int | None
    value: Any
    position: int = 0

    def __str__(self) -> str:
        if not self.name:
            return f"argument {self.position}"
        at = "" if self.index is None else f"[{self.index}]"
        return f"argument {self.name!r}{at}"


def arguments_of(f: Callable, args: Sequence[Any]) -> list[Argument]:
    """The positional arguments of a call, with their names as far as they are known."""
    try:
        bound = inspect.signature(f).bind_partial(*args)
    except (TypeError, ValueError):
        return [Argument("", None, x, i) for i, x in enumerate(args)]
    found: list[Argument] = []
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            found += [Argument(name, i, x) for i, x in enumerate(value)]
        else:
            found.append(Argument(name, None, value))
    return found


def _parameters(f: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):
        return {}


def parameter_names(f: Callable) -> set[str]:
    """Names of the parameters of a function, as far as they are known."""
    return set(_parameters(f))


def default_spec(
    path: str, x: Any, mesh: MeshInfo, who: str, spelled: str = ""
) -> PartitionSpec:
    """Cut dim 0, or replicate a scalar.

    Raises:
        ValueError: dim 0 does not divide by the number of devices, or it is a raw key.
    """
    if x.ndim == 0:
        return PartitionSpec()
    spec = mesh.data_spec()
    if x.shape == (2,) and x.dtype == np.uint32 and mesh.num_devices > 1:
        raise ValueError(
            f"{who}: {path} is an array of two uint32, as jax.random.PRNGKey makes it, "
            "and would be cut in two. Make the key by jax.random.key"
            + (f", or replicate it: {spelled}." if spelled else ".")
        )
    check_divides(path, x, spec, mesh, who, spelled)
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
    path: str,
    x: Any,
    spec: PartitionSpec,
    mesh: MeshInfo,
    who: str,
    spelled: str = "",
) -> None:
    """Raise unless a spec names data axes only and divides the dims of an array."""
    check_spec(path, spec, mesh, who)
    check_rank(path, x, spec, who)
    for dim, axes in enumerate(axes_of(spec)):
        count = int(np.prod([mesh.mesh.shape[a] for a in axes])) if axes else 1
        if x.shape[dim] % count:
            raise ValueError(
                f"{who}: {path} has size {x.shape[dim]} on dim {dim}, which does not "
                f"divide over {count} devices (mesh axes {axes}). Pad or trim it"
                + (f", or replicate it: {spelled}." if spelled else ".")
            )


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the arguments of a call are placed.

    Attributes:
        specs: one per array in `(args, kwargs)`, in the order of `_functional.take`.
        whole: one per NNX object: whether a spec says that all its values are whole.
    """

    specs: list[PartitionSpec]
    whole: list[bool]


def place_arguments(
    f: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    in_specs: Any,
    mesh: MeshInfo,
    who: str,
    num_slices: int = 1,
) -> Placement:
    """Find out how every array in the arguments of a call is cut.

    Raises:
        TypeError: specs that are none; an array in an object that JAX does not look
            into.
        ValueError: specs that do not fit, or a size that does not divide.
    """
    labelled = _labelled(f, args, kwargs, in_specs, who)
    found, rows = Placement([], []), set[int]()
    for argument, asked in labelled:
        name, arg = str(argument), argument.value
        leaves = jax.tree_util.tree_leaves_with_path(arg, is_leaf=_functional.is_node)
        asked_leaves = broadcast_specs(asked, arg, name, who)
        for (keys, leaf), spec in zip(leaves, asked_leaves, strict=True):
            path = name + jax.tree_util.keystr(keys)
            if _functional.is_node(leaf):
                if leaf is arg and spec is not None and spec != PartitionSpec():
                    raise ValueError(
                        f"{who}: in_specs gives {spec} for {name}, but the Variables "
                        f"of a {type(arg).__name__} are whole on every device, except "
                        "for caches. Leave it out."
                    )
                found.whole.append(spec == PartitionSpec())
                continue
            if not _functional.is_array(leaf):
                if spec != PartitionSpec():
                    _opaque.check(who, path, leaf, _spelled(argument, keys))
                continue
            if spec is None:
                spec = default_spec(path, leaf, mesh, who, _spelled(argument, keys))
            else:
                check_divides(path, leaf, spec, mesh, who, _spelled(argument, keys))
            if (dim := cut_dim(spec)) is not None:
                per_device = leaf.shape[dim] // mesh.size(axes_of(spec)[dim])
                if per_device % num_slices:
                    raise ValueError(
                        f"{who}: {path} has {per_device} rows per device, which do not "
                        f"divide into num_microbatches={num_slices}. Pad or trim it, "
                        "or take another number."
                    )
                rows.add(leaf.shape[dim])
            found.specs.append(spec)
    for argument, asked in labelled:
        if asked is None and mesh.num_devices > 1:
            spelled = _spelled(argument, ())
            _opaque.check_nodes(who, str(argument), argument.value, rows, spelled)
    return found


def _spelled(argument: Argument, keys: Any) -> str:
    """How a user says of a part of an argument that it is whole."""
    if not argument.name:
        return "in_specs (PartitionSpec())"
    part = argument.index is not None or keys
    entry = "..." if part else "PartitionSpec()"
    told = ", with PartitionSpec() in its place" if part else ""
    return f"in_specs={{{argument.name!r}: {entry}}}{told}"


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


def _labelled(
    f: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_specs: Any,
    who: str,
) -> list[tuple[Argument, Any]]:
    """All arguments and the specs given for them; None means the default."""
    positional = arguments_of(f, args)
    by_key = [Argument(k, None, v) for k, v in sorted(kwargs.items())]
    if isinstance(in_specs, Mapping):
        given = _by_name(f, positional, by_key, in_specs, who)
        return [(a, given.get((a.name, a.index))) for a in [*positional, *by_key]]
    for_all = in_specs if isinstance(in_specs, PartitionSpec) else None
    of_keys = [
        (a, None if a.name == CACHES or _functional.is_node(a.value) else for_all)
        for a in by_key
    ]
    return [*zip(positional, _in_order(args, in_specs, who)), *of_keys]


def _by_name(
    f: Callable,
    positional: Sequence[Argument],
    by_key: Sequence[Argument],
    in_specs: Mapping[str, Any],
    who: str,
) -> dict[tuple[str, int | None], Any]:
    """The specs that `in_specs` gives by name, by name and index.

    Raises:
        ValueError: there is no such argument.
    """
    taken = _parameters(f)
    known = [n for n, p in taken.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    known += [a.name for a in by_key if a.name not in (*known, CACHES)]
    found: dict[tuple[str, int | None], Any] = {}
    for name, asked in in_specs.items():
        if name not in known:
            raise ValueError(
                f"{who}: in_specs names the argument {name!r}, but the arguments are "
                f"{known}."
            )
        several = [a for a in positional if a.name == name and a.index is not None]
        if not several:
            found[name, None] = asked
            continue
        entries = [asked] * len(several) if is_spec(asked) else asked
        if not isinstance(entries, (tuple, list)) or len(entries) != len(several):
            raise ValueError(
                f"{who}: in_specs {asked!r} does not fit argument {name!r}, which "
                f"takes {len(several)} values. Give one PartitionSpec, or one entry "
                "for each of them."
            )
        found.update({(name, i): spec for i, spec in enumerate(entries)})
    return found


def _in_order(args: Sequence[Any], in_specs: Any, who: str) -> list[Any]:
    """Spread `in_specs` over the positional arguments."""
    others = [i for i, a in enumerate(args) if not _functional.is_node(a)]
    given: list[Any] = [None] * len(args)
    if in_specs is None:
        return given
    if isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,) * len(others)
    if not isinstance(in_specs, (tuple, list)):
        raise TypeError(
            f"{who}: in_specs must be a PartitionSpec or a tuple with one entry per "
            "argument after the model, or a dict by the names of arguments, got "
            f"{type(in_specs).__name__}."
        )
    if len(in_specs) == len(others):
        places = others
    elif len(in_specs) == len(args):
        places = list(range(len(args)))
    else:
        raise ValueError(
            f"{who}: in_specs has {len(in_specs)} entries for {len(others)} arguments "
            "besides the model. Give one per positional argument (None keeps the "
            "default), or a dict by the names of arguments."
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
