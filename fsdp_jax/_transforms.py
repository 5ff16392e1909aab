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
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fsdp_jax import _batch, _functional
from fsdp_jax._join import REDUCTIONS, Request, slots_of
from fsdp_jax._param import dotted, move, with_value
from fsdp_jax._program import Note, Program, execute
from fsdp_jax._state import check_concrete, sharded_modules


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
    counters advance alike.

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
        num_microbatches: only 1 is supported yet.
        in_specs: one PartitionSpec (or prefix of specs) per argument besides the model;
            None keeps the default for that argument.

    Returns:
        A function with the arguments of `f`, returning what `nnx.value_and_grad` would:
        `(value, grads)`, or `((value, aux), grads)`. `grads` has the parameters' shapes
        and shardings, in the parameters' dtypes.

    Raises:
        TypeError: an argument of the wrong type, here or in the call.
        ValueError: an unknown reduction, no sharded model, or a batch that does not
            divide; the text names the argument.
        NotImplementedError: `num_microbatches` above 1.
        RuntimeError: called inside a per-device program.

    Source: specification, "After backward, ..."; README, "The contract".
    """
    request = _request(
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
    def value_and_grad_f(*args: Any, **kwargs: Any) -> Any:
        return _run(request, args, kwargs)

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
    request = _request(
        "grad", f, argnums, has_aux, wrt, reduction, num_microbatches, in_specs
    )

    @functools.wraps(f)
    def grad_f(*args: Any, **kwargs: Any) -> Any:
        value, grads = _run(request, args, kwargs)
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
        in_specs=_batch.FrozenSpecs.of(in_specs),
        out_specs=_batch.FrozenSpecs.of(out_specs),
    )

    @functools.wraps(f)
    def shard_map_f(*args: Any, **kwargs: Any) -> Any:
        return _run(request, args, kwargs)

    return shard_map_f


def _check_callable(who: str, f: Any) -> None:
    if not callable(f):
        raise TypeError(f"{who}: f must be callable, got {type(f).__name__}.")


def _request(
    who, f, argnums, has_aux, wrt, reduction, num_microbatches, in_specs
) -> Request:
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
    if num_microbatches != 1:
        raise NotImplementedError(
            f"{who}: num_microbatches={num_microbatches} is not supported yet. Leave "
            "it at 1 and add up the gradients of several calls."
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
        _batch.FrozenSpecs.of(in_specs),
    )


def _run(request: Request, args: tuple, kwargs: dict) -> Any:
    who = request.who
    taken, nodes, arrays = _functional.take((args, kwargs))
    mesh = _batch.mesh_of(nodes, who)
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise RuntimeError(
            f"{who}: called inside a per-device program. Call it outside of shard_map; "
            "inside, use nnx.value_and_grad: the modules reduce their own gradients."
        )
    _functional.check_writable(nodes)
    _batch.check_context(mesh, who)
    for spec in request.out_specs.leaves:
        _batch.check_spec("out_specs", spec, mesh, who)
    names = _batch.argument_names(request.f, args)
    arg_specs = _batch.resolve_specs(
        args, kwargs, names, request.in_specs.tree(), mesh, who
    )
    for module in (m for node in nodes for m in sharded_modules(node)):
        check_concrete(module, who)
    with nnx.update_context(_functional.TAG):
        graphdef, state = _functional.split_outer(nodes)
        taken_state, state_arrays = _functional.take_arrays(state)
        slots = slots_of(state, mesh)
        in_specs = (*(s.spec for s in slots), *arg_specs)
        diff, grad_layout = _differentiated(request, args, nodes, slots, names)
        kinds = {PartitionSpec(), _batch.data_spec(mesh), *in_specs}
        kinds.update(s for s in request.out_specs.leaves if s is not None)
        program = Program(
            request,
            mesh,
            taken,
            graphdef,
            taken_state,
            slots,
            in_specs,
            diff,
            tuple(sorted(kinds, key=str)),
        )
        inputs = [
            _placed(x, NamedSharding(mesh.mesh, spec))
            for x, spec in zip([*state_arrays, *arrays], in_specs, strict=True)
        ]
        results, static = execute(program, inputs)
        note: Note = static.value
        flat = note.collect(results)
        state_out = [
            state_arrays[source] if source is not None else next(flat)
            for source in note.state_sources
        ]
        _, out_nodes = _functional.merge_outer(
            note.graphdef, note.state.put((), state_out)
        )
        outputs = note.output.put(
            out_nodes, [next(flat) for _ in range(note.num_output)]
        )
        grads = [next(flat) for _ in diff]
    if request.argnums is None:
        return outputs
    assert grad_layout is not None
    return outputs, grad_layout(grads)


def _placed(x: Any, target: NamedSharding) -> Any:
    """Bring an argument to the mesh; of traced ones only those on Explicit axes."""
    if isinstance(x, Tracer) and AxisType.Explicit not in target.mesh.axis_types:
        return x
    return move(x, target)


def _differentiated(request, args, nodes, slots, names):
    """Which arrays are differentiated, and how their gradients are laid out."""
    if request.argnums is None:
        return (), None
    positions = {slot.path: i for i, slot in reversed(list(enumerate(slots)))}
    slot_of: dict[int, int] = {}
    for root, node in enumerate(nodes):
        for path, variable in _functional.walk(node):
            if (root, *path) in positions:
                slot_of.setdefault(id(variable), positions[(root, *path)])
    num_args = len(args)
    all_trees = [_functional.take(a) for a in args]
    offsets = [len(slots)]
    for _, _, arrays in all_trees:
        offsets.append(offsets[-1] + len(arrays))
    diff: list[int] = []
    layouts = []
    for number, wrt in zip(request.argnums, request.wrt):
        if not -num_args <= number < num_args:
            raise ValueError(
                f"{request.who}: argnums names argument {number}, but the call has "
                f"{num_args} positional arguments."
            )
        number %= num_args
        tree, arg_nodes, arrays = all_trees[number]
        predicate = nnx.filterlib.to_predicate(wrt)
        for slot in tree.slots:
            if isinstance(slot, tuple):
                raise TypeError(
                    f"{request.who}: {names[number]} holds {slot[0]!r}, which is "
                    "static and so cannot be differentiated. Pass it as an array "
                    "(jnp.asarray), or leave it out of argnums."
                )
        node_entries = []
        for node in arg_nodes:
            entries = []
            for path, variable in _functional.walk(node):
                if not isinstance(variable, nnx.Variable):
                    continue
                if not predicate(path, variable):
                    continue
                i = slot_of.get(id(variable))
                if i is None:
                    if variable.get_raw_value() is None:
                        continue  # an absent bias, say
                    raise TypeError(
                        f"{request.who}: {dotted(path)!r} holds a "
                        f"{type(variable.get_raw_value()).__name__}, not an array, so "
                        "it cannot be differentiated. Make it a jnp array, or narrow "
                        "wrt."
                    )
                _check_float(request, dotted(path), variable.dtype)
                if i in diff:
                    raise ValueError(
                        f"{request.who}: {dotted(path)!r} of {names[number]} is "
                        "already differentiated as part of another argument in "
                        "argnums. Name one of the two."
                    )
                entries.append((path, variable, len(diff)))
                diff.append(i)
            node_entries.append(entries)
        if arg_nodes and not any(node_entries) and not arrays:
            raise ValueError(
                f"{request.who}: wrt={wrt!r} selects no Variable of {names[number]}, "
                "so there is nothing to differentiate. Give a Variable type such as "
                "nnx.Param, or a filter such as nnx.PathContains('head'); a str is an "
                "nnx tag."
            )
        array_entries = []
        for k, x in enumerate(arrays):
            _check_float(request, names[number], x.dtype)
            array_entries.append(len(diff))
            diff.append(offsets[number] + k)
        layouts.append((tree, node_entries, array_entries))

    def layout(grads: list[Any]) -> Any:
        results = []
        for tree, node_entries, array_entries in layouts:
            states = [_grad_state(entries, grads) for entries in node_entries]
            results.append(tree.put(states, [grads[i] for i in array_entries]))
        return results[0] if request.single else tuple(results)

    return tuple(diff), layout


def _check_float(request: Request, name: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{request.who}: {name!r} has dtype {dtype}, which cannot be "
            "differentiated. Narrow wrt (or argnums) to floating values."
        )


def _grad_state(entries, grads) -> Any:
    made = {path: with_value(v, grads[i]) for path, v, i in entries}
    return made[()] if () in made else nnx.from_flat_state(made)
