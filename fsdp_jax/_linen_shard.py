"""Sharding the parameters of a Linen model, group by group.

What must not live here: running the model (`_linen_model`), and deciding how one
parameter rests, which the NNX side does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import core, nnx
from flax import linen as nn

from fsdp_jax import _functional
from fsdp_jax._fully_shard import fully_shard as _fully_shard
from fsdp_jax._linen_model import (
    ShardedModule,
    check_module,
    places_of,
    structures,
)
from fsdp_jax._linen_names import Path, find_units, is_inside, joined, named
from fsdp_jax._linen_program import infos_of
from fsdp_jax._linen_units import Level, Unit
from fsdp_jax._managed import install
from fsdp_jax._module import FSDPModule
from fsdp_jax._move import move
from fsdp_jax._policies import UNPINNED_HOST, MixedPrecisionPolicy, OffloadPolicy
from fsdp_jax._state import state_of


def fully_shard(
    module: nn.Module,
    variables: Mapping[str, Any],
    *,
    modules: Any = (),
    inputs: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Any = None,
    dp_mesh_dims: Any = None,
    uneven: str = "auto",
) -> tuple[ShardedModule, Any]:
    """Shard the parameters of a Linen model over a mesh, group by group.

    Each submodule that `modules` names is one group, without what inner ones of them
    have; what is left is the root's. A group is gathered when a method of its submodule
    is called. The parameters come back in a tree like before, cut as
    `fsdp_jax.fully_shard` cuts them; all other collections are whole on every device.

    Args:
        module: a Linen module, not bound.
        variables: its variables, as `module.init` returns them; or their shapes
            (`jax.eval_shape(module.init, ...)`), to make them with `init` of the model.
        modules: the submodules: paths such as `"encoder/layer_1"` (`"blocks_*"` for
            many), Linen classes, predicates of `(path, module)`; or a mapping of these
            to arguments of `fully_shard` that are other than here (`mp_policy`,
            `reshard_after_forward`, ...).
        inputs: arguments of `module.apply` after the variables, arrays or shapes; a
            mapping for keyword arguments. Only used with classes and predicates.
        mesh: as in `fsdp_jax.fully_shard`, as are the others.
        reshard_after_forward: free after forward and gather again in backward.
        shard_placement_fn: given an `nnx.Param` with the parameter, whose `name` is its
            path; `Shard(1)` for the layers of a stack that `nn.scan` runs over.
        mp_policy: dtypes.
        offload_policy: where shards rest.
        ignored_params: parameters to leave whole: an NNX filter, such as
            `nnx.PathContains("head")`, or a function of `(path, param)`.
        dp_mesh_dims: roles of the axes of the mesh.
        uneven: what is done with sizes that do not divide; the arrays in the tree have
            the padding of `"pad"`.

    Returns:
        The model, with `apply` and `init`, and the variables.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: the module was sharded before.
        ValueError: no parameters, an entry of `modules` that finds nothing or has no
            parameters of its own, and as `fsdp_jax.fully_shard`.

    Source: README, "Flax Linen"; PyTorch `fully_shard`.
    """
    if isinstance(module, ShardedModule):
        raise RuntimeError(
            "fully_shard has already been applied to this module. Name all submodules "
            "in one call (modules=)."
        )
    check_module("fully_shard", module)
    if getattr(offload_policy, "memory_kind", None) == UNPINNED_HOST:
        raise ValueError(
            "fully_shard: compiled programs return arrays of unpinned host memory in "
            "device memory, where parameters that are no NNX Variables would stay. Use "
            "CPUOffloadPolicy()."
        )
    if isinstance(variables, Mapping) and any(n.startswith("FSDP") for n in variables):
        raise ValueError(
            f"fully_shard: the collections are {sorted(variables)}: there is a "
            "nnx.bridge.ToLinen of a module that is sharded already. Give ToLinen the "
            "plain class."
        )
    if not isinstance(variables, Mapping) or not variables.get("params"):
        raise ValueError(
            "fully_shard: variables must be what module.init returns, a dict with "
            "'params' in it."
        )
    common = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "dp_mesh_dims": dp_mesh_dims,
        "uneven": uneven,
    }
    options: dict[Path, dict[str, Any]] = {}
    per_entry = modules.items() if isinstance(modules, Mapping) else [(modules, {})]
    for entry, other in per_entry:
        if unknown := set(other) - set(common):
            raise TypeError(
                f"fully_shard: modules gives {sorted(unknown)} for {entry!r}, which "
                "are no arguments of fully_shard."
            )
        for path in find_units(module, variables, entry, inputs):
            options.setdefault(path, {}).update(other)
    holder = _holder(named(variables["params"]), options)
    for path in sorted(options, key=len, reverse=True):
        _fully_shard(_at(holder, path), **{**common, **options[path]})
    _fully_shard(holder, **common)
    return _finished(module, variables, holder)


def _holder(params: Mapping[Path, Any], units: Mapping[Path, Any]) -> Any:
    """A module that holds the parameters under their names."""
    holder = Unit()
    taken = set(dir(FSDPModule)) - set(dir(nnx.Module))
    for unit in units:
        inner = [u for u in units if u != unit and is_inside(u, unit)]
        own = [p for p in params if is_inside(p, unit)]
        if all(any(is_inside(p, u) for u in inner) for p in own):
            raise ValueError(
                f"fully_shard: modules names {joined(unit)!r}, whose parameters are "
                "all in groups of inner submodules. Leave it out."
            )
    for path, value in params.items():
        node = holder
        for depth, name in enumerate(path, 1):
            if name in taken:
                raise ValueError(
                    f"fully_shard: {joined(path)!r} has a part called {name!r}, like a "
                    "method of FSDPModule. Rename it."
                )
            if depth == len(path):
                param = nnx.Param(value, name=joined(path), hijax=False, ref=False)
                setattr(node, name, param)
            elif not hasattr(node, name) or name not in vars(node):
                setattr(node, name, Unit() if path[:depth] in units else Level())
            node = vars(node)[name]
    return holder


def _at(holder: Any, path: Path) -> Any:
    return functools.reduce(getattr, path, holder)


def _finished(
    module: nn.Module, variables: Mapping[str, Any], holder: Any
) -> tuple[ShardedModule, Any]:
    """The model and its variables, from the module that holds sharded parameters."""
    values = {
        path: v for path, v in _functional.walk(holder) if isinstance(v, nnx.Variable)
    }
    params = iter([values[p].get_raw_value() for p in named(variables["params"])])
    targets = places_of(variables, infos_of(holder), state_of(holder).mesh)
    placed = {
        name: jax.tree.map(
            (lambda x, _: next(params)) if name == "params" else _place, tree, target
        )
        for (name, tree), target in zip(variables.items(), targets.values())
    }
    for variable in values.values():
        x = variable.get_raw_value()
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        install(variable, shape)  # the model holds no arrays
    if isinstance(variables, core.FrozenDict):
        placed = core.freeze(placed)
    return ShardedModule(module, holder, structures(variables)), placed


def _place(x: Any, target: Any) -> Any:
    known = _functional.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    return move(x, target) if known else x
