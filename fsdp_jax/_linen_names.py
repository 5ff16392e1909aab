"""Names in a Linen model: of parameters, and of the submodules that become groups.

What must not live here: modules that run, and anything sharded.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import core
from flax import linen as nn
from flax.core import meta

from fsdp_jax import _functional

Path = tuple[str, ...]


def is_box(x: Any) -> bool:
    """Whether `x` is metadata of Linen around a value, such as `nn.Partitioned`."""
    return isinstance(x, meta.AxisMetadata)


def canonical(tree: Any) -> Any:
    """A tree without frozen dicts, and without boxes.

    Boxes are opened by hand: `nn.unbox` would ask for the sharding that they name.
    """
    opened = jax.tree.map(
        lambda x: jax.tree.leaves(x)[0] if is_box(x) else x, tree, is_leaf=is_box
    )
    return core.unfreeze(opened)


def named(tree: Any) -> dict[Path, Any]:
    """The leaves of a tree by their names, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(canonical(tree))
    found = {
        tuple(str(_functional.plain_key(key)) for key in keys): leaf
        for keys, leaf in leaves
    }
    first: dict[str, Path] = {}
    for path in found:
        if (other := first.setdefault(joined(path), path)) != path:
            raise ValueError(
                f"fsdp_jax.linen: {joined(path)!r} names two things, at {other} and at "
                f"{path}. Give one of them another name: parts are joined by slashes."
            )
    return found


def joined(path: Path) -> str:
    """A path as Linen users write it: `encoder/layer_1`."""
    return "/".join(path)


def is_inside(path: Path, other: Path) -> bool:
    """Whether a path is at or below another one."""
    return path[: len(other)] == other


def find_units(
    module: nn.Module, variables: Any, modules: Any, inputs: Any
) -> tuple[Path, ...]:
    """Find the submodules that are to be groups of their own, outer ones first.

    Args:
        module: the whole model.
        variables: all of its variables.
        modules: as the user gave it.
        inputs: arguments to run the model with; None for none.

    Raises:
        TypeError: an entry that is neither a name, nor a class, nor a predicate.
        ValueError: an entry that finds nothing, or that needs `inputs`.
    """
    listed = isinstance(modules, Sequence) and not isinstance(modules, str)
    entries = tuple(modules) if listed else (modules,)
    params = list(named(variables["params"]))
    below = {path[:i] for path in params for i in range(1, len(path))}
    traced: dict[int, set[Path]] = {}
    if any(not isinstance(entry, str) for entry in entries):
        traced = _matches(module, variables, entries, inputs)
    found: set[Path] = set()
    for i, entry in enumerate(entries):
        if isinstance(entry, str):
            matched = {path for path in below if _fits(path, entry)}
        else:
            matched = {path for path in traced[i] if path in below}
        if not matched:
            known = ", ".join(sorted({joined(p) for p in below})[:12])
            raise ValueError(
                f"fully_shard: modules names {_told(entry)}, but no submodule with "
                f"parameters is that. There are {known or 'none'}."
            )
        found |= matched
    return tuple(sorted(found, key=lambda path: (len(path), path)))


def _fits(path: Path, pattern: str) -> bool:
    """Whether a path fits a pattern, part by part."""
    parts = pattern.split("/")
    return len(parts) == len(path) and all(map(fnmatch.fnmatchcase, path, parts))


def _told(entry: Any) -> str:
    return entry.__name__ if inspect.isclass(entry) else repr(entry)


def _matches(
    module: nn.Module, variables: Any, entries: Sequence[Any], inputs: Any
) -> dict[int, set[Path]]:
    """Per entry that is no name, the paths of the modules that it selects.

    The model runs on shapes for that.
    """
    tests: dict[int, Callable[[Path, nn.Module], bool]] = {}
    for i, entry in enumerate(entries):
        if inspect.isclass(entry) and issubclass(entry, nn.Module):
            tests[i] = lambda path, m, cls=entry: isinstance(m, cls)
        elif callable(entry) and not inspect.isclass(entry):
            tests[i] = lambda path, m, f=entry: bool(f(joined(path), m))
        elif not isinstance(entry, str):
            raise TypeError(
                "fully_shard: modules takes paths such as 'blocks_*', Linen classes "
                f"and predicates of (path, module), got {entry!r}."
            )
    if inputs is None:
        entry = next(e for e in entries if not isinstance(e, str))
        raise ValueError(
            f"fully_shard: to find the submodules that modules means by {_told(entry)} "
            "the model has to be run on shapes. Give inputs=(x, ...), the arguments "
            "of module.apply after the variables (a dict for keywords), or name the "
            "submodules, such as modules='blocks_*'."
        )
    found: dict[int, set[Path]] = {i: set() for i in tests}

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.scope is not None and context.method_name != "setup":
            path = context.module.scope.path
            for i, test in tests.items():
                if path and test(path, context.module):
                    found[i].add(path)
        return next_fun(*args, **kwargs)

    keywords = isinstance(inputs, Mapping)
    leaves, treedef = jax.tree.flatten(({}, inputs) if keywords else (inputs, {}))
    places = [i for i, x in enumerate(leaves) if hasattr(x, "shape")]

    def run(variables: Any, arrays: list[Any]) -> Any:
        given = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            given[i] = x
        args, kwargs = jax.tree.unflatten(treedef, given)
        with nn.intercept_methods(note):
            return module.apply(
                variables,
                *args,
                rngs={"params": jax.random.key(0)},
                mutable=True,
                **kwargs,
            )

    opened = {name: canonical(tree) for name, tree in variables.items()}
    jax.eval_shape(run, opened, [leaves[i] for i in places])
    return found
