"""`value_and_grad`, `grad` and `shard_map`: the JAX side of the contract.

What lives here: the public functions, their arguments, and one call of them from the
caller's objects to the caller's objects. What must not: the program of one device
(`_program`), and gathering parameters, which the modules do themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from fsdp_jax import _arguments, _batch, _functional
from fsdp_jax._beside_caches import check_beside_caches
from fsdp_jax._execute import Note, execute
from fsdp_jax._join import REDUCTIONS, Request, check_no_rows, slots_of
from fsdp_jax._move import place
from fsdp_jax._nested import run_nested
from fsdp_jax._pending import PendingGradients
from fsdp_jax._prepare import plan_program
from fsdp_jax._rows import batch_rows
from fsdp_jax._stages import REDUCED, Stages
from fsdp_jax._state import (
    check_concrete,
    check_variables,
    sharded_modules,
    warn_of_new_params,
)
from fsdp_jax._threads import LOCK
from fsdp_jax._update import whole_or_nothing
from fsdp_jax._user import Call
from fsdp_jax._wrt import select


def value_and_grad(
    f: Callable,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    reduction: str = "mean",
    num_microbatches: int = 1,
    in_specs: Any = None,
) -> Callable:
    """Make a function that returns the value and the gradients of `f`, fully sharded.

    A drop-in for `nnx.value_and_grad`: `f(model, *args)` runs once per device, on that
    device's rows of the batch, and gathers and reduces parameters as the modules'
    groups say. Works eagerly, in `nnx.jit` and in `jax.jit`.

    Called eagerly it traces `f` in every call and compiles what it has not compiled
    yet; a loop is faster in `nnx.jit`.

    Every array in the other arguments is cut on dim 0 over the devices; scalars, such
    as keys made by `jax.random.key`, are replicated. Changes that `f` makes to the
    model are carried out: BatchStat updates are averaged over devices; random streams
    have the device index folded into their key, so masks differ per device, while
    counters advance alike; an `nnx.Cache` is cut with the rows of the batch; what
    `nnx.metrics.Average` counts is summed. README, "State that is not parameters".

    Args:
        f: returns a floating scalar, or `(scalar, aux)` with `has_aux`; for
            `"weighted"` the scalar is a pair `(loss_sum, weight)`.
        argnums: arguments to differentiate, as in `nnx.value_and_grad`.
        has_aux: whether `f` returns a pair. Floating scalars in aux are averaged over
            devices, other arrays are concatenated on dim 0.
        wrt: which Variables of the model to differentiate; others are frozen: gathered,
            never reduced.
        reduction: `"mean"` of the devices' losses, their `"sum"`, or `"weighted"`:
            `sum(loss_sum) / sum(weight)` over the global batch.
        num_microbatches: into how many slices each device's rows are cut, one after the
            other. The result is that of the whole batch. While a group's gradient sync
            is on, each slice reduce-scatters and the shards add up; off, there is one
            reduction at the end. `set_reshard_after_backward(False)` keeps parameters
            gathered from slice to slice.
        in_specs: one PartitionSpec (or prefix of specs) per positional argument besides
            the model, or a dict of them by the names of arguments, also of keyword
            arguments; None keeps the default for that argument. One PartitionSpec is
            for all of them.

    Returns:
        A function with the arguments of `f`, returning what `nnx.value_and_grad` would:
        `(value, grads)`, or `((value, aux), grads)`. `grads` has the parameters' shapes
        and shardings, in the parameters' dtypes. While gradient sync or all-reduce is
        off for a group, and there is one micro-batch, `grads` is a `PendingGradients`.
        The function takes one more keyword, `pending`: a `PendingGradients` to add to
        the new gradients before they are reduced.

    Raises:
        TypeError: an argument of the wrong type, here or in the call.
        ValueError: an unknown reduction, no sharded model, a batch that does not
            divide; the text names the argument. Pending gradients of other names or
            shapes, or of another reduction. A `cond` or `while_loop` whose condition
            may differ between devices, around collectives: it would never end.
        RuntimeError: called in a `jax.shard_map` of your own; `f` takes a gradient with
            respect to sharded parameters without saying over which devices, or
            computes with raw pieces of them.

    Source: specification, "After backward, ..."; README, "The contract".
    """
    request = request_of(
        "value_and_grad",
        f,
        argnums,
        has_aux,
        wrt,
        reduction,
        num_microbatches,
        in_specs,
    )

    @functools.wraps(f)
    def value_and_grad_f(*args: Any, pending: Any = None, **kwargs: Any) -> Any:
        return _run(request, args, kwargs, pending)

    return value_and_grad_f


def grad(
    f: Callable,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    reduction: str = "mean",
    num_microbatches: int = 1,
    in_specs: Any = None,
) -> Callable:
    """Make a function that returns the gradients of `f`; else as `value_and_grad`.

    Returns:
        A function returning `grads`, or `(grads, aux)` with `has_aux`.
    """
    request = request_of(
        "grad", f, argnums, has_aux, wrt, reduction, num_microbatches, in_specs
    )

    @functools.wraps(f)
    def grad_f(*args: Any, pending: Any = None, **kwargs: Any) -> Any:
        value, grads = _run(request, args, kwargs, pending)
        return (grads, value[1]) if has_aux else grads

    return grad_f


def shard_map(f: Callable, *, in_specs: Any = None, out_specs: Any = None) -> Callable:
    """Make a function that runs `f(model, *args)` once per device, without gradient.

    For evaluation and generation. Arguments and changes to the model are treated as in
    `value_and_grad`.

    Args:
        f: function of a sharded model and other arguments.
        in_specs: as in `value_and_grad`.
        out_specs: PartitionSpec, or prefix of specs, for the result. None: arrays are
            concatenated on dim 0, floating scalars averaged. `PartitionSpec()` promises
            that the devices hold the same value.

    Returns:
        A function with the arguments of `f` that returns global arrays.

    Raises:
        As the function that `value_and_grad` returns; also TypeError for an integer
        scalar that differs between devices.

    Source: README, "`value_and_grad`, `grad`, `shard_map`".
    """
    _check_callable("shard_map", f)
    request = Request(
        "shard_map",
        f,
        in_specs=_arguments.FrozenSpecs.of(in_specs),
        out_specs=_arguments.FrozenSpecs.of(out_specs),
    )

    @functools.wraps(f)
    def shard_map_f(*args: Any, **kwargs: Any) -> Any:
        return _run(request, args, kwargs)

    return shard_map_f


def _check_callable(who: str, f: Any) -> None:
    if not callable(f):
        raise TypeError(f"{who}: f must be callable, got {type(f).__name__}.")


def request_of(
    who: str,
    f: Any,
    argnums: Any = 0,
    has_aux: Any = False,
    wrt: Any = nnx.Param,
    reduction: Any = "mean",
    num_microbatches: Any = 1,
    in_specs: Any = None,
) -> Request:
    """What a user asked for, checked.

    Raises:
        As `value_and_grad`.
    """
    _check_callable(who, f)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{who}: reduction must be one of {REDUCTIONS}, got {reduction!r}."
        )
    if not isinstance(has_aux, bool):
        raise TypeError(f"{who}: has_aux must be a bool, got {has_aux!r}.")
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise TypeError(
            f"{who}: num_microbatches must be an int, got {num_microbatches!r}."
        )
    if num_microbatches < 1:
        raise ValueError(
            f"{who}: num_microbatches must be >= 1, got {num_microbatches}."
        )
    if "pending" in _arguments.parameter_names(f):
        raise ValueError(
            f"{who}: f has a parameter named 'pending', which the function made "
            "here takes itself, for gradients to add. Rename it."
        )
    single = isinstance(argnums, (int, nnx.DiffState))
    listed = (argnums,) if single else tuple(argnums)
    numbers, filters = [], []
    for entry in listed:
        diff_state = isinstance(entry, nnx.DiffState)
        number = entry.argnum if diff_state else entry
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{who}: argnums must be ints, got {number!r}.")
        if number in numbers:
            raise ValueError(f"{who}: argnum {number} is repeated in argnums.")
        numbers.append(number)
        filters.append(entry.filter if diff_state else wrt)
        nnx.filterlib.to_predicate(filters[-1])  # its TypeError names a bad filter
    return Request(
        who,
        f,
        tuple(numbers),
        single,
        has_aux,
        tuple(filters),
        reduction,
        num_microbatches,
        _arguments.FrozenSpecs.of(in_specs),
    )


def _run(request: Request, args: tuple, kwargs: dict, pending: Any = None) -> Any:
    who = request.who
    if jax.sharding.get_abstract_mesh().manual_axes:
        return run_nested(request, args, kwargs, pending)
    taken, nodes, arrays = _functional.take((args, kwargs))
    mesh = _batch.mesh_of(nodes, who)
    for node in nodes:
        check_variables(node, who)
    _functional.check_writable(nodes)
    _batch.check_context(mesh, who)
    for spec in request.out_specs.leaves:
        _arguments.check_spec("out_specs", spec, mesh, who)
    placement = _arguments.place_arguments(
        request.f,
        args,
        kwargs,
        request.in_specs.tree(),
        mesh,
        who,
        request.num_microbatches,
    )
    arg_specs = placement.specs
    modules = [m for node in nodes for m in sharded_modules(node)]
    for module in modules:
        check_concrete(module, who)
    for node in nodes:
        warn_of_new_params(node, stacklevel=3)
    with nnx.update_context(_functional.TAG):
        with LOCK:
            graphdef, state = _functional.split_outer(nodes)
        taken_state, state_arrays = _functional.take_arrays(state)
        rows = batch_rows([x.shape for x in arrays], arg_specs, mesh)
        slots = slots_of(state, mesh, rows)
        if mesh.num_devices > 1:
            cut = kwargs.get(_arguments.CACHES, {})
            check_beside_caches(who, slots, state_arrays, cut, placement.whole)
        call = Call(
            request, mesh, taken, graphdef, taken_state, slots, len(modules), rows
        )
        chosen = None
        if request.argnums is not None:
            names = [str(a) for a in _arguments.arguments_of(request.f, args)]
            chosen = select(request, args, nodes, slots, arg_specs, names)
            check_no_rows(request, slots, chosen.positions)
        program, old = plan_program(call, nodes, arg_specs, chosen, pending)
        inputs = [slot.placed(x) for slot, x in zip(slots, state_arrays, strict=True)]
        inputs += [
            place(x, NamedSharding(mesh.mesh, spec))
            for x, spec in zip(arrays, arg_specs, strict=True)
        ]
        results, static = execute(program, [*inputs, *old])
        note: Note = static.value
        outcome, flat = note.outcome, note.collect(results)
        state_out = [
            state_arrays[source] if source is not None else next(flat)
            for source in outcome.state_sources
        ]
        new_state, out_nodes = outcome.state.put((), state_out), []
        with LOCK, whole_or_nothing(*nodes):
            if outcome.same:
                _functional.write_values(nodes, new_state)
            else:
                _, out_nodes = _functional.merge_outer(outcome.graphdef, new_state)
        outputs = outcome.output.put(
            out_nodes, [next(flat) for _ in range(outcome.num_output)]
        )
        stages: Stages = [{}, {}, {}]
        for stage, name in note.stages:
            stages[stage][name] = next(flat)
    if chosen is None:
        return outputs
    if any(r.target for r in program.reductions if any(r.names)):
        return outputs, PendingGradients(*stages, reduction=request.reduction)
    return outputs, chosen.layout(stages[REDUCED])
