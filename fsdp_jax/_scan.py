"""`scan_layers`: a stack of layers in one loop, gathered one layer ahead.

What must not live here: the loop itself (`_layers`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax import _functional, _gather, _layers, _ordering
from fsdp_jax._call import Body, cast_carry, noting_hidden_tracers
from fsdp_jax._param_group import ParamGroup
from fsdp_jax._spec import dotted
from fsdp_jax._state import comm_of, group_of, is_sharded, state_of

# Whatever Flax's default is: modules carry what layers change.
_GRAPH: dict[str, Any] = {"graph": True, "graph_updates": True}


def scan_layers(
    layers: Any, carry: Any, *args: Any, remat: bool = False, **kwargs: Any
) -> Any:
    """Run stacked layers one after another, gathering one ahead.

    The same as `nnx.scan` over `layers`, each called as `layer(carry, *args, **kwargs)`
    and returning the next carry. In a per-device program, when `layers` is sharded and
    frees its parameters, layer `k + 1` is gathered while layer `k` computes, in forward
    and in backward; that keeps one more layer's full parameters alive and makes one
    more gather per step. Numbers do not change.

    Args:
        layers: a module whose Variables all have a leading layer dim, as made by
            `nnx.vmap`; sharded with `fully_shard` or not.
        carry: pytree of arrays; every layer returns the same structure.
        *args: further arguments, the same for every layer.
        remat: keep only each layer's input and compute the rest again in backward, as
            `nnx.remat` around the layer does.
        **kwargs: further keyword arguments, the same for every layer.

    Returns:
        What the last layer returns.

    Raises:
        TypeError: `layers` is not a module, an argument holds one, or a layer returns
            another structure, shape or dtype than it was given.
        ValueError: the leading dims differ, a parameter is cut along its layers, or a
            layer changes its own structure.

    Source: README, "Layers in a scan".
    """
    if not isinstance(layers, nnx.Module):
        raise TypeError(
            f"scan_layers: layers must be an nnx.Module, got {type(layers).__name__}."
        )

    if is_sharded(layers):  # what a layer returns is what the next one is given
        carry = cast_carry(state_of(layers), carry)

    def one(layer, carry, *args, **kwargs):
        # By closure: nnx.remat takes no keywords, and only arrays.
        def run(layer, carry):
            return layer(carry, *args, **kwargs)

        return (nnx.remat(run, **_GRAPH) if remat else run)(layer, carry)

    if not _looks_ahead(layers):
        loop = nnx.scan(
            lambda layer, carry: one(layer, carry, *args, **kwargs),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            **_GRAPH,
        )
        return loop(layers, carry)
    return _look_ahead(layers, one, carry, args, kwargs)


def _looks_ahead(layers: Any) -> bool:
    """Whether the layers are gathered and freed one by one where this runs."""
    if not is_sharded(layers):
        return False
    state, group = state_of(layers), group_of(layers)
    if state.window or not state.mesh.per_device() or group.full or not group.variables:
        return False
    if any(f is not None for f in group.local("full")):
        return False
    free = state.reshard_after_forward
    return bool(state.inside if free is None else free) and int(free or 1) == 1


def _check_layers(layers: Any) -> None:
    """Raise unless every Variable has the same number of layers in front."""
    sizes: dict[str, Any] = {}
    for path, node in _functional.walk(layers):
        if isinstance(node, nnx.Variable):
            for leaf in jax.tree.leaves(node.get_raw_value()):
                shape = jnp.shape(leaf)
                sizes[dotted(path)] = shape[0] if shape else None
    if len(set(sizes.values())) > 1 or None in sizes.values():
        raise ValueError(
            "scan_layers: every Variable of the layers needs the same leading dim, the "
            f"number of layers; found {sizes}. Make the layers with nnx.vmap, random "
            "streams included (nnx.split_rngs)."
        )


def _check_dims(group: ParamGroup) -> None:
    """Raise if a parameter is cut along its layers."""
    for variable, spec in zip(group.variables, group.specs):
        if spec.dim is None or not spec.cut:
            continue
        if variable.get_raw_value().ndim == -spec.dim:
            raise ValueError(
                f"scan_layers: parameter {spec.path!r} is cut along its {spec.size} "
                "layers. Cut another dim: fully_shard(layers, "
                "shard_placement_fn=lambda p: Shard(1))."
            )


def _look_ahead(layers: Any, one: Any, carry: Any, args: tuple, kwargs: dict) -> Any:
    group = group_of(layers)
    _check_dims(group)
    _check_layers(layers)
    group.check_shards()
    carry = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, (int, float, complex)) else x,
        carry,
        is_leaf=_functional.is_node,
    )
    taken_carry, carry_nodes, carry_arrays = _functional.take(carry)
    taken = _functional.take(((carry, *args), kwargs))
    if taken[1] or carry_nodes:
        raise TypeError(
            "scan_layers: the carry and the arguments must hold arrays, found a "
            f"{type(taken[1][0]).__name__}. Pass its arrays, or use nnx.scan."
        )
    comm = comm_of(layers, group)
    with nnx.update_context(_functional.TAG), _ordering.log() as program_log:
        log = program_log.of(state_of(layers).comm_context)
        body = Body(layers, group, one, taken)
        num_carry = len(carry_arrays)
        arrays = [jnp.asarray(x) for x in body.arrays]
        wanted = [(x.shape, x.dtype) for x in arrays[:num_carry]]

        def checked(full, others):
            results = body(full, others)
            got = [(x.shape, x.dtype) for x in results[len(results) - num_carry :]]
            if body.restructures:
                raise ValueError(
                    "scan_layers: a layer made or removed Variables, or returned a "
                    "module. Every layer must keep its structure."
                )
            if body.output != taken_carry or got != wanted:
                raise TypeError(
                    "scan_layers: a layer must return what it is given. Given "
                    f"{_told(wanted)} in {taken_carry.treedef}, returned {_told(got)} "
                    f"in {body.output.treedef}."
                )
            return results

        with noting_hidden_tracers():
            results = _layers.run_layers(
                checked,
                _gather.refuse_inner(group.values(), comm),
                [jnp.asarray(x) for x in body.state],
                arrays[:num_carry],
                arrays[num_carry:],
                comm,
                log,
                group.local("sink"),
            )
        return body.finish(results, body.state)


def _told(arrays: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in arrays) or "no arrays"
