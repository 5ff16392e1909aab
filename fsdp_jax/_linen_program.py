"""A function of Linen variables as a function of the NNX module that holds them.

What lives here: which argument of a call is whose, and how what the function returns
gets back into Linen's form. What must not: gathering (`_linen_units`), and running and
differentiating the function, which is done as for NNX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
from flax import nnx

from fsdp_jax import _cotangents, _functional, _loss, _means
from fsdp_jax._arguments import CACHES
from fsdp_jax._join import Request
from fsdp_jax._linen_names import Path, canonical, joined, named
from fsdp_jax._linen_units import READS, Info, Level, read
from fsdp_jax._managed import install, spec_of
from fsdp_jax._nested import check_nested, mesh_in_f
from fsdp_jax._state import FSDPState, is_sharded, state_of

# Cut over the devices as the batch is; all other collections are whole on each.
CUT = "cache"
_HELD = "other variables"  # a name that no submodule has


@dataclasses.dataclass(frozen=True)
class Collection:
    """The place of a collection in arguments or results.

    Attributes:
        name: of the collection.
        treedef: of its tree there.
    """

    name: str
    treedef: Any


@dataclasses.dataclass(frozen=True)
class Unchanged:
    """The place of a parameter in results.

    Attributes:
        name: of the parameter.
    """

    name: Path


def program_state(module: Any, path: Path) -> FSDPState:
    """The state of a group for the time that an `apply` runs."""
    changes = {"inside": bool(path), "path": ".".join(path)}
    return dataclasses.replace(state_of(module), **changes)


def infos_of(holder: Any) -> dict[Path, Info]:
    """What is known of each managed parameter of the module that holds all."""
    found = {}
    for path, module in _functional.walk(holder):
        if not is_sharded(module):
            continue
        state = program_state(module, path)
        for name, variable in _functional.walk(module, stop=is_sharded):
            if (spec := spec_of(variable)) is not None:
                found[(*path, *name)] = Info((*path, *name), path, spec, state)
    return found


def fill(holder: Any, params: Mapping[Path, Any], who: str) -> None:
    """Let the module that holds all hold these parameters.

    Raises:
        ValueError: other names or shapes than it was made with.
    """
    variables = {
        path: v for path, v in _functional.walk(holder) if isinstance(v, nnx.Variable)
    }
    if missing := [p for p in variables if p not in params]:
        raise ValueError(
            f"{who}: the parameters lack {joined(missing[0])!r}, with which the model "
            "was sharded. Pass all of them."
        )
    for path, value in params.items():
        if path not in variables:
            raise ValueError(
                f"{who}: {joined(path)!r} is no parameter of the sharded model."
            )
        shape = tuple(variables[path].get_raw_value().shape)
        if tuple(getattr(value, "shape", ())) != shape:
            raise ValueError(
                f"{who}: parameter {joined(path)!r} has shape "
                f"{tuple(getattr(value, 'shape', ()))}, but the model was sharded "
                f"with {shape}."
            )
        install(variables[path], value)


def _gathered(
    holder: Any, names: Container[Path]
) -> tuple[dict[Path, Any], list[Any], list[Any]]:
    """The parameters as a function gets them.

    Returns:
        All by their names, those of groups gathered; the gathered ones alone, and the
        piece of each.
    """
    found = {p: v.get_raw_value() for p, v in _functional.walk(holder) if p in names}
    groups: dict[Path, list[tuple[Any, Info]]] = {}
    for path, info in infos_of(holder).items():
        groups.setdefault(info.unit, []).append((found[path], info))
    arrays, pieces = [], []
    for group in groups.values():
        arrays += read(group)
        pieces += group
    for (_, info), x in zip(pieces, arrays, strict=True):
        found[info.name] = x
    return found, arrays, pieces


def _kind(collection: str) -> type[nnx.Variable]:
    """The class of Variables that is joined over devices as a collection is to be."""
    return nnx.BatchStat if collection == "batch_stats" else nnx.Variable


class Adapter:
    """One call of a function of Linen variables.

    Args:
        f: function of parameters or variables, and other arguments.
        first: the parameters or variables.
        model: whose variables they are.
        who: the caller, for error texts.
        joins: whether collections among the results are told from other results.
        slices: whether there is more than one micro-batch.

    """

    def __init__(
        self,
        f: Callable,
        first: Any,
        model: Any,
        who: str,
        joins: bool,
        slices: bool,
    ) -> None:
        self._f, self._who, self._joins, self._slices = f, who, joins, slices
        self._known = dict(model.collections)
        self._holder = holder = model.groups
        self._whole = isinstance(first, Mapping) and "params" in first
        params = first["params"] if self._whole else first
        self._params, self._params_tree = named(params), jax.tree.structure(params)
        fill(holder, self._params, who)
        self._held: dict[str, dict[Path, nnx.Variable]] = {}
        self._structure: dict[str, Any] = {}
        setattr(holder, _HELD, Level())
        others = (
            {k: v for k, v in first.items() if k != "params"} if self._whole else {}
        )
        self._cut = {k: v for k, v in others.items() if k == CUT}
        for name, tree in others.items():
            if name not in self._cut:
                self._hold(name, tree)
                self._structure[name] = jax.tree.structure(tree)

    def _hold(self, name: str, tree: Any) -> None:
        """Let the module hold a collection: whole on each device, and carried on."""
        self._known.setdefault(name, jax.tree.structure(canonical(tree)))
        held = {path: _kind(name)(x) for path, x in named(tree).items()}
        self._held[name] = held
        for path, variable in held.items():
            setattr(getattr(self._holder, _HELD), joined((name, *path)), variable)

    def call(self, transform: Callable, args: Any, kwargs: Any, **options: Any) -> Any:
        """Call a transform of `function` with the arguments of a call of `f`."""
        args, kwargs = self._taken((args, kwargs))
        if self._cut:
            kwargs = {**kwargs, CACHES: self._cut}
        return transform(self._holder, *args, **kwargs, **options)

    def _taken(self, args: Any) -> Any:
        """Other arguments with `Collection`s in place of those of the model."""

        def taken(name: str, tree: Any) -> Any:
            if name not in self._held:
                self._hold(name, tree)
            elif not self._is_held(name, tree):
                raise ValueError(
                    f"{self._who}: the collection {name!r} comes in two arguments "
                    "with different values. Pass it once."
                )
            return Collection(name, jax.tree.structure(tree))

        return self._replaced(args, taken)

    def _is_held(self, name: str, tree: Any) -> bool:
        held = [v.get_raw_value() for v in self._held[name].values()]
        return all(x is y for x, y in zip(held, jax.tree.leaves(tree), strict=True))

    def _replaced(self, tree: Any, replace: Callable[[str, Any], Any]) -> Any:
        """A tree with something in place of what has a collection's structure."""

        def one(keys: Any, x: Any) -> Any:
            names = self._named(x)
            if names is None:
                return x
            key = str(_functional.plain_key(keys[-1])) if keys else ""
            if len(names) > 1 and key not in names:
                raise ValueError(
                    f"{self._who}: a dict among the arguments or results may be any of "
                    f"the collections {names}, which look alike. Put it into a dict "
                    f"under its name, such as {{{names[0]!r}: ...}}."
                )
            return replace(key if key in names else names[0], x)

        return jax.tree_util.tree_map_with_path(
            one,
            tree,
            is_leaf=lambda x: self._named(x) is not None or _functional.is_node(x),
        )

    def _named(self, x: Any) -> list[str] | None:
        """The collections, but those that are cut, that a tree looks like."""
        if not isinstance(x, Mapping) or not x:
            return None
        structure = jax.tree.structure(canonical(x))
        names = [n for n, known in self._known.items() if known == structure]
        return [n for n in names if n != CUT] or None

    def function(self) -> Callable:
        """The function for the NNX side: of the module and the other arguments."""

        @functools.wraps(self._f)
        def run(holder: Any, *args: Any, **kwargs: Any) -> Any:
            held, cut = getattr(holder, _HELD), kwargs.pop(CACHES, {})
            given, arrays, pieces = _gathered(holder, self._params)
            params = jax.tree.unflatten(
                self._params_tree, [given[name] for name in self._params]
            )

            def collection(name: str, treedef: Any) -> Any:
                return jax.tree.unflatten(
                    treedef,
                    [
                        getattr(held, joined((name, *path))).get_value()
                        for path in self._held[name]
                    ],
                )

            first = params
            if self._whole:
                others = {n: collection(n, t) for n, t in self._structure.items()}
                first = {"params": params, **others, **cut}
            args, kwargs = jax.tree.map(
                lambda x: (
                    collection(x.name, x.treedef) if isinstance(x, Collection) else x
                ),
                (args, kwargs),
                is_leaf=_functional.is_node,
            )
            with READS.of(arrays, pieces):
                output = self._f(first, *args, **kwargs)
            names = {id(x): name for name, x in given.items()}
            return self._sealed(output, held, names)

        return run

    def _sealed(self, output: Any, held: Any, params: dict[int, Path]) -> Any:
        """Results with parameters and collections put away."""
        written: dict[str, list[Any]] = {}

        def put_away(name: str, tree: Any) -> Any:
            leaves = jax.tree.leaves(tree)
            if name in self._held and name not in written:
                for path, x in zip(self._held[name], leaves, strict=True):
                    getattr(held, joined((name, *path))).set_value(x)
                written[name] = leaves
            same = name in written and all(
                x is y for x, y in zip(written[name], leaves, strict=True)
            )
            if same:
                return Collection(name, jax.tree.structure(tree))
            if not self._slices:
                return jax.tree.map(_kind(name), tree)
            if name == "batch_stats":
                raise ValueError(
                    f"{self._who}: f returns {name!r}, but num_microbatches cannot "
                    "carry it from slice to slice. Pass it as an argument, and return "
                    "it once."
                )
            return tree

        if self._joins:
            output = self._replaced(output, put_away)
        return jax.tree.map(
            lambda x: Unchanged(params[id(x)]) if id(x) in params else x,
            output,
            is_leaf=_functional.is_node,
        )

    def open(self, results: Any) -> Any:
        """Results with everything in its place, after the call."""

        def opened(x: Any) -> Any:
            if isinstance(x, nnx.Variable):
                return x.get_raw_value()
            if isinstance(x, Unchanged):
                return self._params[x.name]
            if isinstance(x, Collection):
                held = self._held[x.name].values()
                arrays = [v.get_raw_value() for v in held]
                return jax.tree.unflatten(x.treedef, arrays)
            return x

        return jax.tree.map(opened, results, is_leaf=_functional.is_node)

    def gradients(self, grads: Any) -> Any:
        """Gradients in the form of the parameters."""
        found = {path: v.get_raw_value() for path, v in nnx.to_flat_state(grads)}
        leaves = [found[name] for name in self._params]
        params = jax.tree.unflatten(self._params_tree, leaves)
        return {"params": params} if self._whole else params


def nested(
    request: Request, model: Any, first: Any, args: Any, kwargs: Any, pending: Any
) -> tuple[Any, Any]:
    """Value and gradients of a function over all devices, called in another's.

    Args:
        request: what the user asked for, with the function.
        model: whose variables the function takes.
        first: the parameters, whole, or the variables with them.
        args: the other arguments.
        kwargs: likewise.
        pending: as it was given.

    Raises:
        ValueError: options that have no meaning here.
    """
    check_nested(request, pending)
    mesh = mesh_in_f(lambda: model.mesh)
    whole = isinstance(first, Mapping) and "params" in first

    def run(params: Any) -> Any:
        given = {**first, "params": params} if whole else params
        with _cotangents.running_f():
            output = request.f(given, *args, **kwargs)
            loss, aux = _loss.split_loss(request, output)
        return _loss.value_of(request, mesh, loss), aux

    params = first["params"] if whole else first
    with _cotangents.differentiating():
        (value, aux), grads = jax.value_and_grad(run, has_aux=True)(params)
    by = float(mesh.num_devices) if request.reduction == "mean" else 1.0
    grads = jax.tree.map(lambda g: _means.divided_sum(g, mesh, "inner", by), grads)
    value = (value, aux) if request.has_aux else value
    return value, {"params": grads} if whole else grads
