"""Gradients that the user's function takes itself, inside of a program.

What lives here: `value_and_grad` and `grad` called in `f`, and `unsharded`, the model
of one device. What must not: what cotangents stand for (`_cotangents`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax import _arguments, _batch, _cotangents, _functional, _loss, _means
from fsdp_jax._join import Request
from fsdp_jax._local import Local, shard_in
from fsdp_jax._managed import COPY, ManagedVariable, spec_of
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._param import with_value
from fsdp_jax._spec import dotted
from fsdp_jax._state import comm_for, group_of, sharded_modules, state_of

# The mesh on which `f` runs with unsharded models in place of sharded ones, if it does.
_STANDING_IN: ContextVar[MeshInfo | None] = ContextVar("fsdp_standing_in", default=None)


@contextmanager
def standing_in(mesh: MeshInfo) -> Iterator[None]:
    """Let what `f` calls here take plain models of one device in place of sharded ones.

    Args:
        mesh: of the per-device program.
    """
    token = _STANDING_IN.set(mesh)
    try:
        yield
    finally:
        _STANDING_IN.reset(token)


def called_in_f() -> bool:
    """Whether a function of the user runs in a program."""
    return _cotangents.in_f() or _STANDING_IN.get() is not None


def mesh_in_f(mesh: Callable[[], MeshInfo]) -> MeshInfo:
    """The mesh of the program that runs `f`; of the models, unless others stand in."""
    return _STANDING_IN.get() or mesh()


def check_nested(request: Request, pending: Any) -> None:
    """Raise unless a program may be asked for in a per-device program.

    Raises:
        RuntimeError: not in a function that a program of this library runs, or without
            a gradient.
        ValueError: options that have no meaning here.
    """
    who = request.who
    if not called_in_f():
        raise RuntimeError(
            f"{who}: called inside a jax.shard_map of your own. Call it outside, or "
            "use nnx.value_and_grad inside: there the modules average their own "
            "gradients."
        )
    if request.argnums is None:
        raise RuntimeError(
            f"{who}: called inside a per-device program. Call the function itself: it "
            "runs on every device already."
        )
    idle = {
        "pending": pending is not None,
        "in_specs": any(spec is not None for spec in request.in_specs.leaves),
        "num_microbatches": request.num_microbatches > 1,
    }
    if asked := [name for name, given in idle.items() if given]:
        raise ValueError(
            f"{who}: called in the function of another program, where arguments are "
            f"this device's rows already: {', '.join(asked)} cannot be given. Give it "
            "to the outer call."
        )


def run_nested(request: Request, args: tuple, kwargs: dict, pending: Any) -> Any:
    """Value and gradients of `request.f` over all devices, on the rows of each.

    Raises:
        TypeError: arrays are to be differentiated.
        And as `check_nested`.
    """
    check_nested(request, pending)
    who = request.who
    _, nodes, _ = _functional.take((args, kwargs))
    mesh = mesh_in_f(lambda: _batch.mesh_of(nodes, who))
    names = [str(a) for a in _arguments.arguments_of(request.f, args)]
    diff: list[Any] = []
    for number, wrt in zip(request.argnums or (), request.wrt):
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"{who}: argnums names argument {number}, but the call has {len(args)} "
                "positional arguments."
            )
        number %= len(args)
        if _functional.take(args[number])[2]:
            raise TypeError(
                f"{who}: {names[number]} holds arrays, and they are this device's own "
                "in the function of another program. Differentiate with respect to "
                "arrays by jax.grad or nnx.grad there."
            )
        _check_at_hand(who, args[number], wrt)
        diff.append(nnx.DiffState(number, wrt))

    @functools.wraps(request.f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _cotangents.running_f():
            loss, aux = _loss.split_loss(request, request.f(*args, **kwargs))
        return _loss.value_of(request, mesh, loss), aux

    modes: Any = {"graph": True, "graph_updates": True}
    transform = nnx.value_and_grad(run, argnums=tuple(diff), has_aux=True, **modes)
    with _cotangents.differentiating():
        (value, aux), grads = transform(*args, **kwargs)
    averages = request.reduction == "mean"
    done = [
        _finished(args[d.argnum], g, mesh, averages)
        for d, g in zip(diff, grads, strict=True)
    ]
    value = (value, aux) if request.has_aux else value
    return value, done[0] if request.single else tuple(done)


def _check_at_hand(who: str, model: Any, wrt: Any) -> None:
    """Raise if what is to be differentiated is not in the Variables as it is.

    Raises:
        RuntimeError: its gradients are not to be reduced.
        NotImplementedError: it is elsewhere.
    """
    predicate = nnx.filterlib.to_predicate(wrt)
    for node in _functional.take(model)[1]:
        for path, v in _functional.walk(node):
            raw = v.get_raw_value() if isinstance(v, nnx.Variable) else None
            elsewhere = isinstance(raw, Local) and raw.sink is not None
            if not (elsewhere and predicate(path, v)):
                continue
            spec = spec_of(v)
            away = spec is not None and spec.memory_kind is not None
            if not away and v.dtype != jnp.float16:
                raise RuntimeError(
                    f"{who}: f differentiates with respect to parameter "
                    f"{dotted(path)!r} itself, while gradients of its module are not "
                    "reduced (set_requires_gradient_sync or set_requires_all_reduce is "
                    "False). Set gradient sync to True for this call."
                )
            raise NotImplementedError(
                f"{who}: parameter {dotted(path)!r} rests in host memory or in "
                "float16, and f can take no gradient over all devices by it. "
                "Differentiate the result outside of the program, or use "
                "fsdp_jax.unsharded(model) for this device's own gradient."
            )


def _finished(model: Any, grads: Any, mesh: MeshInfo, averages: bool) -> Any:
    """Gradients as they leave a program, of the cotangents that a device has.

    Args:
        model: the tree of nodes that was differentiated.
        grads: its gradients; of a shard summed over the devices, else the device's own.
        mesh: mesh and the roles of its axes.
        averages: whether the loss is a mean over devices.
    """
    by_node = []
    for node in _functional.take(model)[1]:
        comms = {
            id(v): comm_for(state_of(m), [s], averages, "", state_of(m).path)
            for m in sharded_modules(node)
            for v, s in zip(group_of(m).variables, group_of(m).specs, strict=True)
        }
        of_path = {path: comms.get(id(v)) for path, v in _functional.walk(node)}
        by_node.append(of_path)
    states, treedef = jax.tree.flatten(grads, is_leaf=_is_state)
    divisor = float(mesh.num_devices) if averages else 1.0

    def finish(path: Any, variable: nnx.Variable, comms: dict) -> nnx.Variable:
        ct, spec = shard_in(variable.get_raw_value()), spec_of(variable)
        comm = comms.get(path)
        if spec is not None and comm is not None and spec.cut and spec.is_shard(ct):
            done = _cotangents.gradient(ct, comm.exit_divisor, ct.dtype)
        else:
            by = divisor if comm is None else comm.divisor
            name = dotted(path)
            done = _means.divided_sum(ct, mesh, name, by)
        return with_value(variable, done, full=spec is not None and spec.full)

    finished = []
    for state, comms in zip(states, by_node, strict=True):
        if isinstance(state, nnx.Variable):
            finished.append(finish((), state, comms))
            continue
        flat = nnx.to_flat_state(state)
        finished.append(nnx.from_flat_state({p: finish(p, v, comms) for p, v in flat}))
    return jax.tree.unflatten(treedef, finished)


def _is_state(x: Any) -> bool:
    return isinstance(x, (nnx.State, nnx.Variable))


def unsharded(model: Any) -> Any:
    """Make a copy of a sharded model whose parameters are whole on every device.

    For what a device computes with a model of its own, in a function that
    `value_and_grad` or `shard_map` runs: an inner gradient step on its own task, the
    gradient of each example. On the copy plain `nnx.grad`, `jax.grad`, `jax.vmap` over
    `nnx.split(copy)` and the like see whole parameters, and their gradients are those
    of this device's rows alone; it may be changed. What is computed with it is
    differentiated like anything else. It takes the memory of the whole model until
    backward.

    Args:
        model: a sharded module, or one that contains some.

    Returns:
        The copy, in which every sharded module is unsharded. What happens to its other
        Variables does not reach the model.

    Raises:
        TypeError: not an NNX module.
        ValueError: no sharded module in `model`.
        RuntimeError: as `FSDPModule.unshard`.

    Source: README, "Gradients inside of `f`".
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"unsharded: model must be an nnx.Module, got {type(model).__name__}. The "
            "parameters that fsdp_jax.linen gives a function are whole already: use "
            "the Linen module itself, model.module.apply."
        )
    if _STANDING_IN.get() is not None:
        return nnx.clone(model, graph=True)
    if not sharded_modules(model):
        raise ValueError(
            "unsharded: the model is, or contains, no module that fully_shard was "
            "applied to."
        )
    copy = nnx.clone(model, graph=True)
    modules: Sequence[Any] = sharded_modules(copy)
    for module in modules:
        module.unshard()
    for _, variable in _functional.walk(copy):
        if isinstance(variable, ManagedVariable):
            variable._var_metadata[COPY] = True
    return copy
