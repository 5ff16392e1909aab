"""Rows of a batch that JAX does not see as rows, and so cannot be cut.

Arrays in objects that it does not look into, or whose leaves are no rows, and lists of
numbers. What lives here: finding them, and the error that names them. What must not:
opening such objects, which a policy's casts do (`_precision`).
"""

from __future__ import annotations

import array
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, ValuesView
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, Sharding

from fsdp_jax import _functional

_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_WORDS = (type(None), bool, int, float, complex, str, bytes, types.ModuleType)
_PLAIN = (*_WORDS, Mesh, Sharding, jax.ShapeDtypeStruct)
_NO_NUMBERS = ("O", "S", "U")  # objects and texts, as numpy calls them
_ROWS = (list, tuple, set, frozenset, deque, ValuesView)
_BUFFERS = (array.array, memoryview, bytearray)
_KEYS_ONLY = (dict, list, tuple, type(None))  # what their treedefs hold are no values
_SPARSE = "jax.experimental.sparse"


def check(who: str, path: str, leaf: Any, spelled: str = "") -> None:
    """Raise if a leaf of the arguments holds an array that has rows.

    Args:
        who: name of the public function.
        path: of the leaf.
        leaf: a leaf of JAX's that is no array of JAX or numpy.
        spelled: how the user says that it is whole; empty if that cannot be said.

    Raises:
        TypeError: it does.
    """
    found = find_array(leaf)
    if found is None:
        return
    where, x = found
    shape, whole = _shape(x), f", or say that it is whole: {spelled}"
    if not where:
        raise TypeError(
            f"{who}: {path} has type {_name(x)} and shape {shape}, and is no array of "
            "JAX or numpy, so it would not be cut. Pass jnp.asarray of it"
            f"{whole if spelled else ''}."
        )
    raise TypeError(
        f"{who}: {path}{where} is an array of shape {shape} in a {_name(leaf)}, which "
        f"JAX does not look into, so it would not be cut. {_remedy(leaf)}"
        f"{whole if spelled else ''}."
    )


def check_nodes(
    who: str, name: str, tree: Any, rows: Collection[int], spelled: str
) -> None:
    """Raise if a tree has rows that are none for JAX.

    Args:
        who: name of the public function.
        name: of the argument.
        tree: its value.
        rows: how many rows other arguments have that are cut.
        spelled: how the user says that it is whole.

    Raises:
        TypeError: it does: an array in what a pytree calls static, a sparse matrix, or
            a list of as many numbers, or of lists of numbers, as there are rows.
    """
    for keys, node in _nodes(tree):
        path, whole = (
            name + jax.tree_util.keystr(keys),
            f"say that it is whole: {spelled}",
        )
        if type(node).__module__.startswith(_SPARSE):
            raise TypeError(
                f"{who}: {path} is a {_name(node)}, whose arrays hold entries, not "
                f"rows, so that it cannot be cut. Pass a dense array, or {whole}."
            )
        if isinstance(node, list) and len(node) in rows and _are_numbers(node):
            raise TypeError(
                f"{who}: {path} is a list of {len(node)} entries, as many as the batch "
                "has rows, and JAX sees a tree of numbers in it, which would be whole "
                f"on every device. Pass jnp.asarray of it, or {whole}."
            )
        if isinstance(node, _KEYS_ONLY):
            continue
        static = _flatten_one(node)[1].node_data()
        found = find_array(static[1]) if static else None
        if found is not None:
            raise TypeError(
                f"{who}: {path} is a {_name(node)} that is registered with JAX with an "
                f"array of shape {_shape(found[1])} in what is static, so it would not "
                f"be cut. Register its field as data, or {whole}."
            )


def _flatten_one(node: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(node, is_leaf=lambda x: x is not node)


def _nodes(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """All that JAX looks into in a tree, with its path; no NNX objects."""
    if _functional.is_node(tree):
        return
    entered, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    if jax.tree_util.treedef_is_leaf(treedef) and treedef.num_leaves:
        return
    yield keys, tree
    for at, child in entered:
        yield from _nodes(child, (*keys, *at))


def _are_numbers(node: Any) -> bool:
    if isinstance(node, (list, tuple)):
        return bool(node) and all(map(_are_numbers, node))
    traced = _functional.is_array(node) and not node.ndim  # as numbers enter jax.jit
    return traced or isinstance(node, (int, float, complex))


def check_output(who: str, path: str, leaf: Any) -> None:
    """Raise if a leaf of what a function returned holds an array that is traced.

    Raises:
        TypeError: it does.
    """
    found = find_array(leaf, wanted=lambda shape: True)
    if found is not None and isinstance(found[1], Tracer):
        raise TypeError(
            f"{who}: f returned an array in a {_name(leaf)} (output{path}{found[0]}), "
            f"which JAX does not look into. {_remedy(leaf)}."
        )


_MOST = 10_000  # objects looked at in one leaf


def find_array(
    root: Any, wanted: Callable[[tuple[int, ...]], bool] = bool
) -> tuple[str, Any] | None:
    """The first array in what is no pytree: where it is, and the array.

    Attributes and slots are looked into, containers, and what a function has in its
    closure, its defaults, or bound.

    Args:
        root: a leaf of JAX's.
        wanted: whether an array of this shape is meant; one with dims by default.
    """
    queue: deque[tuple[str, Any]] = deque([("", root)])
    seen: dict[int, Any] = {}
    for _ in range(_MOST):
        if not queue:
            break
        where, x = queue.popleft()
        if isinstance(x, _PLAIN) or id(x) in seen:
            continue
        seen[id(x)] = x  # kept, so that no other object gets its id
        if isinstance(x, nnx.Variable):
            queue.append((where, x.get_raw_value()))
        elif _is_array_like(x):
            if wanted(_shape(x)):
                return where, x
        else:
            queue.extend((where + at, child) for at, child in _children(x))
    return None


def _is_array_like(x: Any) -> bool:
    """Whether `x` is an array of numbers, of whatever library."""
    if _functional.is_array(x):
        return getattr(x.dtype, "kind", "") not in _NO_NUMBERS
    known = hasattr(type(x), "__array__") or hasattr(type(x), "__jax_array__")
    return known or isinstance(x, _BUFFERS)


def _shape(x: Any) -> tuple[int, ...]:
    if hasattr(type(x), "__jax_array__") and not hasattr(x, "shape"):
        x = x.__jax_array__()
    return tuple(x.shape if hasattr(x, "shape") else np.shape(x))


def _children(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, (dict, types.MappingProxyType)):
        yield from ((f"[{k!r}]", v) for k, v in x.items())
    elif isinstance(x, _ROWS):
        yield from ((f"[{i}]", v) for i, v in enumerate(x))
    elif isinstance(x, functools.partial):
        yield ".func", x.func
        yield from ((f".args[{i}]", v) for i, v in enumerate(x.args))
        yield from ((f".keywords[{k!r}]", v) for k, v in x.keywords.items())
    elif isinstance(x, _METHODS):
        yield ".__self__", x.__self__
        yield ".__func__", getattr(x, "__func__", None)
    elif isinstance(x, types.FunctionType):
        names = x.__code__.co_freevars
        for name, cell in zip(names, x.__closure__ or ()):
            try:
                yield f" ({name!r} in its closure)", cell.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
        taken = x.__code__.co_varnames[: x.__code__.co_argcount]
        defaults = zip(reversed(taken), reversed(x.__defaults__ or ()))
        given = [*defaults, *(x.__kwdefaults__ or {}).items()]
        yield from ((f" (default {name!r})", v) for name, v in given)
    classes = (x if isinstance(x, type) else type(x)).__mro__
    for name, value in [pair for cls in classes for pair in vars(cls).items()]:
        if _is_array_like(value):
            yield f".{name}", value
    if isinstance(x, type):
        return
    for name, value in getattr(x, "__dict__", {}).items():
        yield f".{name}", value
    for cls in classes:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            member = cls.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(x)
                except AttributeError:  # a slot that is not set
                    continue


def _name(x: Any) -> str:
    return x.__name__ if isinstance(x, type) else type(x).__name__


def _remedy(leaf: Any) -> str:
    if callable(leaf) and not isinstance(leaf, type):
        return "Pass the array as an argument of its own"
    return (
        f"Register {_name(leaf)} with JAX (jax.tree_util.register_dataclass, or "
        "register_pytree_node), or pass the arrays themselves"
    )
