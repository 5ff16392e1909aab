"""Flax Linen models: `fully_shard`, and transforms of functions of their variables.

A Linen model stays a module and a tree of variables. Its parameters rest as shards, in
a tree like before, and a `ShardedModule` takes the place of the module: its `apply`
gathers where a submodule that is a group runs. What must not live here: gathering and
differentiating, which are done as for NNX.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax

from fsdp_jax import _functional, _transforms
from fsdp_jax._host_update import on_host
from fsdp_jax._linen_model import ShardedModule as ShardedModule
from fsdp_jax._linen_program import Adapter, infos_of, nested
from fsdp_jax._linen_shard import fully_shard as fully_shard
from fsdp_jax._moments import Memory
from fsdp_jax._move import move
from fsdp_jax._nested import called_in_f
from fsdp_jax._optimizer import init_elsewhere
from fsdp_jax._pending import PendingGradients
from fsdp_jax._policies import PINNED_HOST


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
        in_specs: one PartitionSpec (or prefix of specs) per positional argument after
            the first, or a dict by the names of arguments.

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
        if called_in_f():
            request = _transforms.request_of("value_and_grad", f, **options)
            return nested(request, model, first, args, kwargs, pending)
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
        state = jax.tree_util.tree_map_with_path(settle, state)
        return Memory(params).own(state)

    update = on_host(tx).update if PINNED_HOST in kinds else tx.update
    return optax.GradientTransformationExtraArgs(init, update)
