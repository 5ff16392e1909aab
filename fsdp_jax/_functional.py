"""Calls on NNX graph nodes as functions of arrays, and writing the updates back.

What lives here: taking nodes and arrays out of argument trees, and the split and merge
that carries a change inside a trace (a BatchStat, a counter, a sown value) back to the
caller's own objects. What must not: anything that knows of shards or meshes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

TAG = "fsdp_jax"


def is_node(x: Any) -> bool:
    """Whether `x` is a module, another NNX object, or a Variable."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def model_nodes(model: Any) -> list[Any]:
    """The node that a model is, or has under `groups`; none for anything else."""
    node = model if is_node(model) else getattr(model, "groups", None)
    return [node] if is_node(node) else []


def is_array(x: Any) -> bool:
    """Whether `x` is an array of JAX or numpy, a numpy scalar, or traced."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


@dataclasses.dataclass(frozen=True)
class Taken:
    """A tree whose nodes and arrays were taken out. Hashable if the rest is.

    Attributes:
        treedef: structure of the tree.
        slots: per leaf `"node"`, `"array"`, or a tuple of the leaf itself and its type,
            so that 1, 1.0 and True are not taken for the same.
    """

    treedef: Any
    slots: tuple[Any, ...]

    def put(self, nodes: Iterable[Any], arrays: Iterable[Any]) -> Any:
        """Build the tree again with these nodes and arrays."""
        sources = {"node": iter(nodes), "array": iter(arrays)}
        leaves = [
            slot[0] if isinstance(slot, tuple) else next(sources[slot])
            for slot in self.slots
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def slots_tree(self) -> Any:
        """The tree again with the slots as its leaves."""
        return jax.tree.unflatten(self.treedef, self.slots)


def take(tree: Any) -> tuple[Taken, list[Any], list[Any]]:
    """Take nodes and arrays out of a tree.

    Returns:
        The tree without them, the nodes, the arrays; each in order.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_node)
    slots: list[Any] = []
    nodes, arrays = [], []
    for leaf in leaves:
        if is_node(leaf):
            slots.append("node")
            nodes.append(leaf)
        elif is_array(leaf):
            slots.append("array")
            arrays.append(leaf)
        else:
            slots.append((leaf, type(leaf)))
    return Taken(treedef, tuple(slots)), nodes, arrays


def take_arrays(state: Any) -> tuple[Taken, list[Any]]:
    """Take the arrays out of an NNX state, looking into its Variables."""
    leaves, treedef = jax.tree.flatten(state)
    slots = tuple("array" if is_array(leaf) else (leaf, type(leaf)) for leaf in leaves)
    return Taken(treedef, slots), [leaf for leaf in leaves if is_array(leaf)]


def split_outer(nodes: Any, *filters: Any) -> tuple[Any, ...]:
    """Split the caller's nodes, inside `nnx.update_context(TAG)`."""
    _declare_tracers(nodes)
    with nnx.split_context(TAG) as ctx:
        return ctx.split(nodes, *filters)


def merge_inner(graphdef: Any, *states: Any, tracked: bool) -> Any:
    """Make copies of the nodes that hold other arrays.

    Args:
        graphdef: from `split_outer`.
        *states: states with the arrays to hold.
        tracked: whether changes are to be carried back: True once per context.
    """
    if not tracked:
        return nnx.merge(graphdef.with_no_outer_index(), *states)
    with nnx.merge_context(TAG, inner=True) as ctx:
        return ctx.merge(graphdef, *states)


def split_inner(nodes: Any, *filters: Any, tracked: bool) -> tuple[Any, ...]:
    """Split the copies after use."""
    _declare_tracers(nodes)
    if not tracked:
        return nnx.split(nodes, *filters, graph=True)
    with nnx.split_context(TAG) as ctx:
        return ctx.split(nodes, *filters)


def _declare_tracers(nodes: Any) -> None:
    """Have NNX take traced arrays in plain attributes for data, as concrete ones are.

    NNX (0.12) takes them for static, unless they came through `nnx.data`, and then they
    would enter and leave the function unseen.
    """
    for root in jax.tree.leaves(nodes, is_leaf=is_node):
        for _, node in walk(root) if isinstance(root, nnx.Pytree) else ():
            if not isinstance(node, nnx.Pytree) or not node._pytree__is_pytree:
                continue
            declared = node._pytree__nodes
            hidden = {
                name: True
                for name, value in vars(node).items()
                if isinstance(value, Tracer) and not declared.get(name)
            }
            if hidden:  # around NNX's check of the trace level: no value changes
                object.__setattr__(node, "_pytree__nodes", declared.update(hidden))


def check_writable(nodes: Any) -> None:
    """Raise NNX's own error if a node belongs to another trace, so cannot be written.

    `merge_outer` would notice too, but only after it has emptied the nodes.
    """
    for node in jax.tree.leaves(nodes, is_leaf=is_node):
        for _, found in walk(node):
            if isinstance(found, nnx.Variable):
                found._check_can_update()
            else:
                found._check_valid_context(lambda: _OTHER_TRACE)


_OTHER_TRACE = (
    "Cannot mutate a module from a different trace level: it was captured by closure. "
    "Pass it to the transformed function as an argument."
)


def merge_outer(graphdef: Any, *states: Any) -> Any:
    """Write what changed into the caller's nodes; returns them and the new ones.

    Call `check_writable` on the nodes first.
    """
    with nnx.merge_context(TAG, inner=False) as ctx:
        return ctx.merge(graphdef, *states)


def write_values(nodes: Sequence[Any], state: Any) -> None:
    """Write the values of a state of `(nodes, ...)` into the caller's Variables.

    For nodes whose structure is what it was: `merge_outer` would empty them first, for
    other threads to see.
    """
    variables = {
        (0, k, *path): found
        for k, node in enumerate(nodes)
        for path, found in walk(node)
        if isinstance(found, nnx.Variable)
    }
    leaves = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for keys, new in leaves:
        variable = variables[tuple(map(plain_key, keys))]
        if variable.get_raw_value() is not new.get_raw_value():
            variable.update_from_state(new)


def walk(
    root: Any, stop: Callable[[Any], bool] | None = None
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every NNX object and Variable below `root` once, with its path.

    Args:
        root: where to start; itself yielded first, with an empty path.
        stop: objects below the root for which this holds are yielded, not entered.
    """
    seen: set[int] = set()

    def visit(path, node):
        if id(node) in seen:
            return
        seen.add(id(node))
        yield path, node
        if isinstance(node, nnx.Variable):
            return
        if stop is not None and path and stop(node):
            return
        for key, child in _children(node):
            yield from visit((*path, *key), child)

    yield from visit((), root)


def find(root: Any, node: Any) -> tuple[Any, ...] | None:
    """The path of a node below `root`, None if it is not there."""
    return next((path for path, found in walk(root) if found is node), None)


def _children(node: nnx.Pytree) -> Iterator[tuple[tuple[Any, ...], Any]]:
    integers = node._pytree__has_int_keys
    named = [
        (int(k) if integers and k.isdigit() else k, v)
        for k, v in vars(node).items()
        if not k.startswith("_pytree__") and is_data(node, k)
    ]
    for key, value in sorted(named, key=lambda kv: (isinstance(kv[0], str), kv[0])):
        if is_node(value):
            yield (key,), value
        elif not isinstance(value, (str, int, float, jax.Array, np.ndarray)):
            leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_node)
            for keys, leaf in leaves:
                if is_node(leaf):
                    yield (key, *[plain_key(k) for k in keys]), leaf


def is_data(node: nnx.Pytree, name: str) -> bool:
    """Whether NNX looks into an attribute; what it calls static may be anything."""
    return not node._pytree__is_pytree or node._pytree__nodes.get(name, False)


def plain_key(key: Any) -> Any:
    """What a key of a pytree path is called in an NNX path."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)
