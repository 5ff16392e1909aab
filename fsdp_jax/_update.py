"""`nnx.update` on sharded models: a whole state, on the mesh of the model, or nothing.

NNX writes one Variable after the other, and none of them knows of the others, so the
function itself is wrapped. What must not live here: what one Variable takes
(`_managed`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from fsdp_jax import _functional
from fsdp_jax._managed import (
    METADATA,
    OUT_SHARDING,
    any_managed,
    install,
    spec_of,
)
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import move
from fsdp_jax._spec import ParamSpec
from fsdp_jax._state import is_sharded, state_of
from fsdp_jax._threads import LOCK, current


@contextmanager
def whole_or_nothing(*trees: Any) -> Iterator[dict[int, tuple[Any, dict[str, Any]]]]:
    """If the block fails, the nodes and Variables in these trees are as they were.

    Yields:
        By the id of each Variable, what it held and its metadata.
    """
    nodes, variables = [], []
    for found in _below(trees):
        if isinstance(found, nnx.Variable):
            metadata = dict(found._var_metadata)
            variables.append((found, found.get_raw_value(), metadata))
        else:
            nodes.append((found, dict(vars(found))))
    try:
        yield {id(v): (raw, metadata) for v, raw, metadata in variables}
    except BaseException:
        for variable, raw, metadata in variables:
            install(variable, raw)
            object.__setattr__(variable, "_var_metadata", metadata)
        for node, attributes in nodes:
            for name in set(vars(node)) - set(attributes):
                del vars(node)[name]
            vars(node).update(attributes)
        raise


def _below(tree: Any) -> Iterator[Any]:
    """Every node and Variable in a tree."""
    for root in jax.tree.leaves(tree, is_leaf=_functional.is_node):
        if _functional.is_node(root):
            yield from (found for _, found in _functional.walk(root))


def _variables(tree: Any) -> list[nnx.Variable]:
    return [found for found in _below(tree) if isinstance(found, nnx.Variable)]


def _specs(tree: Any) -> list[ParamSpec]:
    """Of parameters, and of the optimizer state that was made for them."""
    found = [v._var_metadata.get(METADATA) for v in _variables(tree)]
    return [spec for spec in found if isinstance(spec, ParamSpec)]


def _check_shape(variable: nnx.Variable, old: Any) -> None:
    """Raise if a parameter has another shape than before.

    Raises:
        ValueError: it has.
    """
    spec, new = spec_of(variable), variable.get_raw_value()
    if spec is None or not hasattr(old, "shape") or not hasattr(new, "shape"):
        return
    if (had := spec.shape(old)) != (given := spec.shape(new)):
        raise ValueError(
            f"parameter {spec.path!r} has shape {had} and was given a value of shape "
            f"{given}. Give it one of its own shape, or put a new nnx.Param in its "
            "place."
        )


def _place(
    tree: Any, before: dict[int, tuple[Any, dict[str, Any]]], meshes: set[Mesh]
) -> None:
    """Put what no group manages where it was, or on the mesh of its module."""
    homes: dict[int, MeshInfo] = {}
    for module in (m for m in _below(tree) if is_sharded(m)):
        homes |= {id(x): state_of(module).mesh for x in _below(module)}
    for variable in _variables(tree):
        old, metadata = before.get(id(variable), (None, {}))
        if spec_of(variable) is not None:
            continue
        if isinstance(metadata.get(METADATA), ParamSpec):  # not that of another model
            own = {n: metadata[n] for n in (METADATA, OUT_SHARDING) if n in metadata}
            variable._var_metadata.update(own)
        value, home = variable.get_raw_value(), homes.get(id(variable))
        at = _mesh_of(old)
        if at in meshes and _mesh_of(value) != at and _is_like(value, old):
            install(variable, move(value, old.sharding))
        elif home is not None and _mesh_of(value) != home.mesh:
            install(variable, jax.tree.map(functools.partial(_whole, home), value))


def _mesh_of(value: Any) -> Mesh | None:
    """The mesh on which a concrete array lies, None for anything else."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return None
    found = value.sharding
    return found.mesh if isinstance(found, NamedSharding) else None  # type: ignore


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer)


def _is_like(value: Any, old: Any) -> bool:
    return _is_array(value) and value.shape == old.shape


def _whole(mesh: MeshInfo, x: Any) -> Any:
    return move(x, mesh.whole_like(x)) if _is_array(x) else x


_MARK = "_fsdp_jax_wraps"


def _wrapped(flax_update: Any) -> Any:
    @functools.wraps(flax_update)
    def update(node: Any, state: Any, /, *states: Any) -> None:
        node = current(node)
        if not any_managed():
            flax_update(node, state, *states)
            return
        meshes = {spec.mesh.mesh for spec in _specs(node)}
        if not meshes:
            flax_update(node, state, *states)
            return
        with LOCK, whole_or_nothing(node) as before:
            flax_update(node, state, *states)
            for variable in _variables(node):
                _check_shape(variable, before.get(id(variable), (None, {}))[0])
            _place(node, before, meshes)

    setattr(update, _MARK, True)
    return update


if not hasattr(nnx.graphlib.update, _MARK):
    nnx.update = nnx.graphlib.update = _wrapped(nnx.graphlib.update)
