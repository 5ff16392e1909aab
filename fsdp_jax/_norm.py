"""`global_norm`: the norm of gradients or parameters as if nothing were sharded.

What must not live here: clipping, which is optax's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from fsdp_jax import _collectives, _functional
from fsdp_jax._compiled import compiled
from fsdp_jax._managed import spec_of
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import is_away, to_space
from fsdp_jax._pending import PendingGradients
from fsdp_jax._raw_reads import NORM

Array = jax.Array


def global_norm(tree: Any) -> Array:
    """The root of the sum of all squares in a tree of gradients or parameters.

    The same as `optax.global_norm` of the unsharded arrays: what several devices hold a
    copy of counts once. Of sharded gradients every device adds up its own pieces, and
    one all-reduce of a scalar follows. Arrays may rest in host memory.

    Args:
        tree: gradients as `value_and_grad` returns them, a state, a module, or any tree
            of floating arrays.

    Returns:
        A scalar, float32 or wider, in device memory.

    Raises:
        TypeError: gradients that are not reduced yet, or an array that is not floating.
        RuntimeError: called inside a per-device program on arrays that are in no
            Variables, and so may be pieces or not.

    Source: README, "Clipping"; PyTorch `clip_grad_norm_` on sharded gradients.
    """
    if isinstance(tree, PendingGradients):
        raise TypeError(
            "global_norm: the gradients are not reduced yet. Reduce them first, with "
            "value_and_grad(...)(..., pending=p) or model.synchronize_gradients(p)."
        )
    tree = nnx.state(tree, graph=True) if isinstance(tree, nnx.Module) else tree
    leaves = [
        (jax.tree_util.keystr(keys), leaf, x)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=_functional.is_node
        )
        for x in jax.tree.leaves(leaf)
    ]
    for path, _, x in leaves:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"global_norm: {path} has dtype {jnp.result_type(x)}. Select the "
                "floating values first, such as nnx.state(model, nnx.Param)."
            )
    if jax.sharding.get_abstract_mesh().manual_axes:
        return _norm_of_pieces(leaves)
    arrays, shardings, own = [], [], []
    for _, leaf, x in leaves:
        arrays.append(x)
        shardings.append(_sharding(leaf, x))
        spec = spec_of(leaf)
        own.append((spec.dim, spec.size) if spec and spec.pads(x) else None)
    if not arrays:
        return jnp.zeros(())
    meshes = {s.mesh for s in shardings if s is not None}
    mesh = meshes.pop() if len(meshes) == 1 else None
    known = tuple(
        s.spec if mesh is not None and s is not None else None for s in shardings
    )
    if any(isinstance(x, Tracer) for x in arrays):
        return _norm(arrays, tuple(own), known, mesh)
    return _compiled(arrays, tuple(own), known, mesh)


@jax.named_scope(NORM)
def _norm_of_pieces(leaves: Sequence[tuple[str, Any, Any]]) -> Array:
    """The norm of Variables in a per-device program: path, Variable and array each."""
    sums: dict[MeshInfo | None, Any] = {}
    for path, leaf, x in leaves:
        if not isinstance(leaf, nnx.Variable):
            raise RuntimeError(
                f"global_norm: {path} is a plain array, of which nobody knows in a "
                "per-device program (value_and_grad, shard_map) whether it is a piece "
                "or whole. Give Variables, such as nnx.state(model, nnx.Param) or the "
                "gradients as they come, or optax.global_norm of whole arrays."
            )
        spec = spec_of(leaf)
        mesh = None
        if spec is not None and spec.dim is not None and spec.is_shard(x):
            mesh = spec.mesh
            if spec.padding:
                dim, rows = spec.dim % x.ndim, x.shape[spec.dim]
                first = _collectives.device_index(mesh, mesh.shard_axes) * rows
                at = first + jax.lax.broadcasted_iota(int, x.shape, dim)
                x = jnp.where(at < spec.size, x, 0)
        here = to_space(x, jax.memory.Space.Device) if is_away(x) else x
        sums[mesh] = sums.get(mesh, jnp.zeros(())) + _square(here)
    total = sums.pop(None, jnp.zeros(()))
    for mesh, pieces in sums.items():
        assert mesh is not None
        axes = mesh.shard_axes
        total += _collectives.sum_over_devices(pieces, mesh, "norm", axes)
    return jnp.sqrt(total)


def _sharding(leaf: Any, x: Any) -> NamedSharding | None:
    """How an array is cut, as far as it is known."""
    found = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if isinstance(found, NamedSharding) and isinstance(found.mesh, Mesh):
        return found
    spec = spec_of(leaf)
    if spec is None or not isinstance(x, Tracer):
        return None
    if not spec.holds(x):
        return None
    return spec.present(jnp.ndim(x))


def _norm(
    arrays: Sequence[Array],
    own: Sequence[tuple[int, int] | None],
    specs: Sequence[Any],
    mesh: Mesh | None,
) -> Array:
    """The norm of arrays, of which the padded ones have their own rows in front."""
    here = [to_space(x, jax.memory.Space.Device) for x in arrays]
    for i, rows in enumerate(own):
        if rows is not None:  # zeros, unless something was added to raw values
            dim, size = rows
            at = jax.lax.broadcasted_iota(int, here[i].shape, dim % here[i].ndim)
            here[i] = jnp.where(at < size, here[i], 0)
    cut = [i for i, s in enumerate(specs) if s is not None]
    total = sum(_square(x) for x, s in zip(here, specs) if s is None)
    if mesh is not None and cut:
        total = total + _collectives.sum_of_pieces(
            _square, [here[i] for i in cut], [specs[i] for i in cut], mesh
        )
    return jnp.sqrt(total)


_compiled = compiled(_norm, static_argnums=(1, 2, 3))


def _square(x: Array) -> Array:
    wide = jnp.promote_types(jnp.finfo(x.dtype).dtype, jnp.float32)
    return jnp.sum(jnp.square(jnp.abs(x).astype(wide)))
