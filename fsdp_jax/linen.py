"""Flax Linen models: `fully_shard`, and transforms of functions of their variables.

A Linen model stays a module and a tree of variables. Its parameters rest as shards, in
a tree like before, and a `ShardedModule` takes the place of the module: its `apply`
gathers where a submodule that is a group runs. What must not live here: gathering and
differentiating, which are done as for NNX.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import core, nnx
from flax import linen as nn

from fsdp_jax import _functional, _transforms
from fsdp_jax._fully_shard import fully_shard as _fully_shard
from fsdp_jax._host_update import on_host
from fsdp_jax._linen_model import ShardedModule, places_of
from fsdp_jax._linen_names import Path, canonical, find_units, is_inside, joined, named
from fsdp_jax._linen_program import Adapter, infos_of
from fsdp_jax._linen_units import Level, Unit
from fsdp_jax._module import FSDPModule
from fsdp_jax._move import move
from fsdp_jax._optimizer import _elsewhere as init_elsewhere
from fsdp_jax._param import install
from fsdp_jax._pending import PendingGradients
from fsdp_jax._policies import (
    PINNED_HOST,
    UNPINNED_HOST,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
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
        uneven: what is done with sizes that do not divide.

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
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard: expected a Linen module, got {type(module).__name__}. For "
            "NNX modules there is fsdp_jax.fully_shard."
        )
    if module.scope is not None:
        raise ValueError(
            "fully_shard: the module is bound to variables. Pass the unbound one, and "
            "the variables next to it."
        )
    if getattr(offload_policy, "memory_kind", None) == UNPINNED_HOST:
        raise ValueError(
            "fully_shard: compiled programs return arrays of unpinned host memory in "
            "device memory, where parameters that are no NNX Variables would stay. Use "
            "CPUOffloadPolicy()."
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
    }
    if uneven != "auto":
        common["uneven"] = uneven
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
                setattr(node, name, nnx.Param(value, name=joined(path)))
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
    known = {
        name: jax.tree.structure(canonical(tree))
        for name, tree in variables.items()
        if name != "params"
    }
    if isinstance(variables, core.FrozenDict):
        placed = core.freeze(placed)
    return ShardedModule(module, holder, known), placed


def _place(x: Any, target: Any) -> Any:
    known = _functional.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    return move(x, target) if known else x


def value_and_grad(
    f: Callable,
    model: ShardedModule,
    *,
    has_aux: bool = False,
    reduction: str = "mean",
    num_microbatches: int = 1,
    in_specs: Any = None,
) -> Callable:
    """Make a function that returns the value and the gradients of `f`, fully sharded.

    In the place of `jax.value_and_grad`, for `f(params, *args)` or
    `f(variables, *args)`: it runs once per device, on that device's rows of the batch,
    as `fsdp_jax.value_and_grad` does for NNX. Every array in the other arguments is cut
    on dim 0; give the batch as an argument, because an array in a closure is whole on
    every device. Collections of the model, such as batch_stats, are whole on each
    device, in the variables or among the arguments; only "cache" is cut like the batch.

    What `f` reads of the parameters, for a penalty, say, is gathered where it does.

    Args:
        f: returns a floating scalar, or `(scalar, aux)` with `has_aux`; for
            `"weighted"` the scalar is a pair `(loss_sum, weight)`.
        model: whose `apply` `f` calls.
        has_aux: whether `f` returns a pair. Collections of the model in aux come back
            whole: batch_stats as the mean over devices, others must be the same on
            each. Other floating scalars are averaged, arrays concatenated on dim 0.
        reduction: as in `fsdp_jax.value_and_grad`, as are the others.
        num_microbatches: slices of each device's rows.
        in_specs: one PartitionSpec (or prefix of specs) per argument after the first.

    Returns:
        A function with the arguments of `f` that returns `(value, grads)`, or
        `((value, aux), grads)`. `grads` is a tree like the parameters (under "params",
        if the first argument is the variables), each cut like its parameter.

    Raises:
        TypeError: `model` is no `ShardedModule`.
        ValueError: parameters of another model.
        And as `fsdp_jax.value_and_grad`.

    Warns:
        UserWarning: there is no array among the other arguments.

    Source: README, "Flax Linen".
    """
    options = {
        "has_aux": has_aux,
        "reduction": reduction,
        "num_microbatches": num_microbatches,
        "in_specs": in_specs,
    }
    _check_model("value_and_grad", f, model)

    @functools.wraps(f)
    def value_and_grad_f(first: Any, /, *args: Any, pending: Any = None, **kwargs: Any):
        _warn_without_batch((args, kwargs), model)
        slices = num_microbatches > 1
        adapter = Adapter(f, first, model, "value_and_grad", has_aux, slices)
        transform = _transforms.value_and_grad(adapter.function(), **options)
        value, grads = adapter.call(transform, args, kwargs, pending=pending)
        if has_aux:
            value = value[0], adapter.open(value[1])
        if not isinstance(grads, PendingGradients):
            grads = adapter.gradients(grads)
        return value, grads

    return value_and_grad_f


def grad(f: Callable, model: ShardedModule, **options: Any) -> Callable:
    """Make a function that returns the gradients of `f`; else as `value_and_grad`.

    Returns:
        A function returning `grads`, or `(grads, aux)` with `has_aux`.
    """
    run = value_and_grad(f, model, **options)

    @functools.wraps(f)
    def grad_f(*args: Any, **kwargs: Any) -> Any:
        value, grads = run(*args, **kwargs)
        return (grads, value[1]) if options.get("has_aux") else grads

    return grad_f


def shard_map(
    f: Callable, model: ShardedModule, *, in_specs: Any = None, out_specs: Any = None
) -> Callable:
    """Make a function that runs `f` once per device, without gradient.

    For evaluation and generation; `f` and its arguments as in `value_and_grad`.

    Args:
        f: function of parameters or variables, and other arguments.
        model: whose `apply` it calls.
        in_specs: as in `value_and_grad`.
        out_specs: PartitionSpec, or prefix of specs, for the result. None: collections
            of the model as in `value_and_grad`, other arrays concatenated on dim 0,
            floating scalars averaged.

    Returns:
        A function with the arguments of `f` that returns global arrays.

    Raises:
        As `value_and_grad`.

    Source: README, "Flax Linen".
    """
    _check_model("shard_map", f, model)

    @functools.wraps(f)
    def shard_map_f(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        adapter = Adapter(f, first, model, "shard_map", out_specs is None, False)
        run = _transforms.shard_map(
            adapter.function(), in_specs=in_specs, out_specs=out_specs
        )
        return adapter.open(adapter.call(run, args, kwargs))

    return shard_map_f


def _warn_without_batch(args: Any, model: ShardedModule) -> None:
    arrays = [x for x in jax.tree.leaves(args) if _functional.is_array(x) and x.ndim]
    if not arrays and model.mesh.num_devices > 1:
        warnings.warn(
            "value_and_grad: f has no array argument besides the parameters, so every "
            "device computes all of the batch that f may have in its closure. Pass the "
            "batch as an argument: value_and_grad(f, model)(params, batch).",
            UserWarning,
            stacklevel=3,
        )


def _check_model(who: str, f: Any, model: Any) -> None:
    if not callable(f):
        raise TypeError(f"{who}: f must be callable, got {type(f).__name__}.")
    if not isinstance(model, ShardedModule):
        raise TypeError(
            f"{who}: model must be the ShardedModule that fsdp_jax.linen.fully_shard "
            f"returned, got {type(model).__name__}."
        )


def optimizer(
    tx: optax.GradientTransformation, model: ShardedModule
) -> optax.GradientTransformation:
    """Make an optax transformation whose state rests where the parameters do.

    For `TrainState.create(..., tx=optimizer(tx, model))`. Moments are cut as their
    parameters, counters are on the model's mesh from the first step on. Needed where
    parameters rest in host memory: then the update runs there.

    Args:
        tx: an optax gradient transformation.
        model: the model that it trains.

    Returns:
        The transformation.

    Source: README, "Flax Linen"; `fsdp_jax.Optimizer`.
    """
    infos = infos_of(model.groups)
    kinds = {info.spec.memory_kind for info in infos.values()}

    def settle(path: Any, x: Any) -> Any:
        if not _functional.is_array(x) and not isinstance(x, jax.ShapeDtypeStruct):
            return x
        names = tuple(str(_functional.plain_key(key)) for key in path)
        names = names[:-1] if names[-1:] == ("value",) else names  # of a box
        for i in range(len(names)):
            info = infos.get(names[i:])
            if info is not None and x.ndim and info.spec.fits(x):
                return move(x, info.spec.sharding(x.ndim))
        return move(x, model.mesh.whole_like(x))

    def init(params: Any) -> Any:
        state = init_elsewhere(tx).init(params)
        return jax.tree_util.tree_map_with_path(settle, state)

    update = on_host(tx).update if PINNED_HOST in kinds else tx.update
    return optax.GradientTransformationExtraArgs(init, update)
