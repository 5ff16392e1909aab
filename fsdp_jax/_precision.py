"""What a mixed precision policy casts on the way into and out of a call.

Arrays are found in every pytree, in dataclasses that JAX takes for leaves, and in plain
NNX objects; modules and Variables are left alone. Also the warning that a layer's own
dtype contradicts the policy. What must not live here: casts of parameters and gradients
(`_collectives`, `_param_group`).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from fsdp_jax import _functional
from fsdp_jax._comm import Static, cast_floating
from fsdp_jax._policies import MixedPrecisionPolicy
from fsdp_jax._spec import dotted
from fsdp_jax._state import is_sharded

# --- dataclasses that are no pytrees ----------------------------------------------


@jax.tree_util.register_pytree_node_class
class _Open:
    """A dataclass that JAX takes for a leaf, as the tree of its attributes."""

    def __init__(self, original: Any, values: dict[str, Any]) -> None:
        self.original, self.values = original, values

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.values,), Static(self.original)

    @classmethod
    def tree_unflatten(cls, original: Any, values: Any) -> _Open:
        return cls(original.value, *values)


@dataclasses.dataclass(frozen=True)
class Copied:
    """A dataclass that a call gets in place of the caller's.

    Attributes:
        original: the caller's.
        copy: what the call gets.
        given: leaves and structure of every attribute, as the call gets them.
    """

    original: Any
    copy: Any
    given: dict[str, tuple[list[Any], Any]]

    def written(self) -> dict[str, Any]:
        """The attributes that the call has set or changed."""
        return {
            name: value
            for name, value in _attributes(self.copy).items()
            if name not in self.given or not _is_same(_flatten(value), self.given[name])
        }


def open_dataclasses(tree: Any, _above: tuple[Any, ...] = ()) -> Any:
    """Make trees of the dataclasses in a tree that JAX takes for leaves.

    Those without arrays and nodes stay as they are.
    """

    def opened(x: Any) -> Any:
        if _functional.is_node(x) or not dataclasses.is_dataclass(x):
            return x
        if isinstance(x, type) or any(x is a for a in _above):
            return x
        values = open_dataclasses(_attributes(x), (*_above, x))
        leaves = jax.tree.leaves(values, is_leaf=_functional.is_node)
        if any(_functional.is_array(v) or _functional.is_node(v) for v in leaves):
            return _Open(x, values)
        return x

    return jax.tree.map(opened, tree, is_leaf=_functional.is_node)


def close_dataclasses(tree: Any) -> tuple[Any, list[Copied]]:
    """Undo `open_dataclasses`, into copies.

    Returns:
        The tree with copies in the place of the dataclasses that were opened, and the
        copies in order.
    """
    copies: list[Copied] = []

    def closed(x: Any) -> Any:
        if not isinstance(x, _Open):
            return x
        values = jax.tree.map(closed, x.values, is_leaf=_is_open_or_node)
        made = copy.copy(x.original)  # not replace(): nothing is to be checked again
        _write(made, values)
        given = {name: _flatten(value) for name, value in values.items()}
        copies.append(Copied(x.original, made, given))
        return made

    return jax.tree.map(closed, tree, is_leaf=_is_open_or_node), copies


def write_back(originals: Sequence[Any], written: Sequence[dict[str, Any]]) -> None:
    """Set in the caller's dataclasses what a call set in its copies."""
    for original, values in zip(originals, written, strict=True):
        _write(original, values)


def _attributes(x: Any) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(x) if hasattr(x, f.name)]
    return {name: getattr(x, name) for name in (*names, *getattr(x, "__dict__", ()))}


def _write(x: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(x, name, value)  # frozen ones too


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=_functional.is_node)


def _is_same(a: tuple[list[Any], Any], b: tuple[list[Any], Any]) -> bool:
    return a[1] == b[1] and all(x is y for x, y in zip(a[0], b[0], strict=True))


def _is_open_or_node(x: Any) -> bool:
    return isinstance(x, _Open) or _functional.is_node(x)


# --- casts ------------------------------------------------------------------------


@contextmanager
def cast_inputs(
    policy: MixedPrecisionPolicy, args: tuple, kwargs: dict
) -> Iterator[tuple[tuple, dict]]:
    """Yield the arguments, floating arrays in them cast as the policy asks.

    What the block writes into a dataclass or NNX object among them reaches the
    caller's.
    """
    dtype = policy.param_dtype
    if dtype is None or not policy.cast_forward_inputs:
        yield args, kwargs
        return
    opened = open_dataclasses((args, kwargs))
    given, copies = close_dataclasses(_cast(opened, dtype))
    with ExitStack() as restore:
        for leaf in jax.tree.leaves(opened, is_leaf=_functional.is_node):
            restore.enter_context(_holding_cast(leaf, dtype))
        yield given
    write_back([c.original for c in copies], [c.written() for c in copies])


def cast_outputs(output: Any, dtype: Any) -> Any:
    """Cast the floating arrays of what a call returns; None leaves them."""
    if dtype is None:
        return output
    copies: dict[int, Any] = {}

    def cast_node(x: Any) -> Any:
        return _cast_copy(x, dtype, copies) if any(_casts(x, dtype)) else x

    return close_dataclasses(_cast(open_dataclasses(output), dtype, cast_node))[0]


def _cast_copy(x: Any, dtype: Any, copies: dict[int, Any]) -> Any:
    """Copy an NNX object with its floating arrays cast; Variables are shared."""
    if not _is_data_node(x):
        return x
    if id(x) not in copies:
        made = copies[id(x)] = copy.copy(x)
        changed = {name: new for node, name, new in _casts(x, dtype) if node is x}
        for name, value in _data_of(x):
            vars(made)[name] = jax.tree.map(
                lambda leaf: _cast_copy(leaf, dtype, copies),
                changed.get(name, value),
                is_leaf=_functional.is_node,
            )
    return copies[id(x)]


def _cast(tree: Any, dtype: Any, cast_node: Callable[[Any], Any] | None = None) -> Any:
    """Cast the floating arrays of a tree; NNX objects are left to `cast_node`.

    Dataclasses in which nothing changes close again.
    """

    def cast(x: Any) -> Any:
        if isinstance(x, _Open):
            values = _cast(x.values, dtype, cast_node)
            same = _is_same(_flatten(values), _flatten(x.values))
            return x.original if same else _Open(x.original, values)
        if _functional.is_node(x):
            return cast_node(x) if cast_node else x
        return cast_floating(x, dtype) if _functional.is_array(x) else x

    return jax.tree.map(cast, tree, is_leaf=_is_open_or_node)


def _is_data_node(x: Any) -> bool:
    """Whether `x` is an NNX object that holds data, as opposed to a module."""
    if not isinstance(x, nnx.Pytree):
        return False
    return isinstance(x, (nnx.List, nnx.Dict)) or not isinstance(x, nnx.Module)


def _casts(root: Any, dtype: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield what casting changes at and below an NNX object: node, attribute, value.

    Modules and Variables below it are not entered.
    """
    if not _is_data_node(root):
        return
    for _, node in _functional.walk(root, stop=lambda n: not _is_data_node(n)):
        for name, value in _data_of(node) if _is_data_node(node) else []:
            new = _cast(value, dtype)
            if not _is_same(_flatten(new), _flatten(value)):
                yield node, name, new


def _data_of(node: Any) -> list[tuple[str, Any]]:
    """The attributes of an NNX object that hold data."""
    return [
        (name, value)
        for name, value in vars(node).items()
        if not name.startswith("_pytree__")
        # A tracer counts as static unless it is declared data.
        and (
            node._pytree__nodes.get(name)
            or isinstance(value, Tracer)
            or not node._pytree__is_pytree
        )
    ]


@contextmanager
def _holding_cast(root: Any, dtype: Any) -> Iterator[None]:
    """Hold cast arrays in an NNX object; afterwards its own, or what was written."""
    held = [(n, name, vars(n)[name], new) for n, name, new in _casts(root, dtype)]
    for node, name, _, new in held:
        vars(node)[name] = new
    try:
        yield
    finally:
        for node, name, old, new in held:
            if name in vars(node) and _is_same(
                _flatten(vars(node)[name]), _flatten(new)
            ):
                vars(node)[name] = old


# --- layers with a dtype of their own ---------------------------------------------

_MOST_NAMED = 3


def warn_of_layer_dtypes(
    modules: Sequence[Any],
    managed: Sequence[nnx.Variable],
    policy: MixedPrecisionPolicy,
    *,
    stacklevel: int,
) -> None:
    """Warn once if layers compute in another dtype than the policy gathers in.

    Args:
        modules: those of one `fully_shard` call; none is sharded yet.
        managed: the parameters of their groups.
        policy: theirs.
        stacklevel: of the caller of this function, for the warning.

    Warns:
        UserWarning: names the first layers, both dtypes and what to do.
    """
    if policy.param_dtype is None:
        return
    layers = [
        f"{_layer_name(i, path, len(modules))} ({type(node).__name__}, dtype {own})"
        for i, module in enumerate(modules)
        for path, node, own in _layers_apart(module, modules, managed, policy)
    ]
    if not layers:
        return
    more = len(layers) - _MOST_NAMED
    named = ", ".join(layers[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    warnings.warn(
        f"fully_shard: mp_policy has param_dtype={policy.param_dtype}, but these "
        f"layers compute in a dtype of their own: {named}. Each casts its gathered "
        "parameters and its inputs once more. Leave the dtype of a layer at None (for "
        f"nnx.Embed, which then takes its table's, set {policy.param_dtype}), or give "
        "the layer its own fully_shard call with its dtype as the param_dtype.",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def _layer_name(index: int, path: Any, count: int) -> str:
    parts = ([f"[{index}]"] if count > 1 else []) + ([dotted(path)] if path else [])
    return repr(".".join(parts)) if parts else "the module itself"


def _layers_apart(
    module: Any,
    modules: Sequence[Any],
    managed: Sequence[nnx.Variable],
    policy: MixedPrecisionPolicy,
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield path, layer and dtype of the layers that do not compute in `param_dtype`.

    Those whose parameters are all ignored do not belong to the group.
    """
    roots, members = {id(m) for m in modules}, {id(v) for v in managed}

    def stop(node: Any) -> bool:
        return is_sharded(node) or id(node) in roots

    for path, node in _functional.walk(module, stop=stop):
        if not isinstance(node, nnx.Module) or (path and stop(node)):
            continue
        own = _layer_dtype(node)
        if own is None or own == policy.param_dtype:
            continue
        params = [
            id(v) for _, v in _functional.walk(node, stop) if isinstance(v, nnx.Param)
        ]
        if not params or members.intersection(params):
            yield path, node, own


def _layer_dtype(layer: Any) -> Any:
    """The floating dtype that a layer was told to compute in, None without one."""
    value = inspect.getattr_static(layer, "dtype", None)
    if value is None:  # which numpy takes for float64
        return None
    try:
        dtype = jax.dtypes.canonicalize_dtype(value)
    except (TypeError, ValueError):
        return None
    return dtype if jnp.issubdtype(dtype, jnp.floating) else None
