"""What a call of a sharded module does: cast, gather, run, free, cast.

One function per kind of call: eager on global arrays, traced on global arrays, and in a
per-device program with parameters kept or freed. What must not live here: the module
class, and how values move (`_param_group`, `_schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax import _collectives, _functional, _schedule
from fsdp_jax._param import ShardReadError
from fsdp_jax._param_group import ParamGroup
from fsdp_jax._state import (
    check_concrete,
    class_name,
    comm_of,
    group_of,
    set_state,
    sharded_modules,
    state_of,
)
from fsdp_jax._unshard import reshard_now, take_started


def _cast_tree(tree: Any, dtype: Any) -> Any:
    """Cast the floating arrays of a tree; NNX objects in it are left alone."""

    def cast(x: Any) -> Any:
        if not _functional.is_array(x):
            return x
        return _collectives.cast_floating(x, dtype)

    return jax.tree.map(cast, tree, is_leaf=_functional.is_node)


def call(module: Any, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a method of a sharded module on its gathered parameters."""
    state = state_of(module)
    policy = state.mp_policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = _cast_tree((args, kwargs), policy.param_dtype)
    if state.window:
        output = function(module, *args, **kwargs)
    else:
        group = group_of(module)
        check_concrete(module, f"{class_name(module)} was called")
        if state.mesh.per_device():
            run = _call_per_device
        elif group.is_traced():
            run = _call_traced
        else:
            run = _call_eager
        output = run(module, group, function, args, kwargs)
    if policy.output_dtype is not None:
        output = _cast_tree(output, policy.output_dtype)
    return output


@contextmanager
def _window(module: Any, group: ParamGroup, full: list[Any]) -> Iterator[None]:
    """Hold full parameters for one call; on the way out all is as it was."""
    inner = [m for m in sharded_modules(module) if m is not module]
    before = [state_of(m).inside for m in inner]
    with group.holding(full):
        set_state(module, window=True)
        for m in inner:
            set_state(m, inside=True)
        try:
            yield
        finally:
            set_state(module, window=False)
            for m, inside in zip(inner, before, strict=True):
                set_state(m, inside=inside)


def _cast_values(group: ParamGroup, dtype: Any) -> list[Any]:
    return [_collectives.cast_floating(v, dtype) for v in group.values()]


def _call_traced(module, group, function, args, kwargs) -> Any:
    """Global arrays under a trace: the module leaves as it came in."""
    dtype = state_of(module).mp_policy.param_dtype
    full = _cast_values(group, dtype) if group.full else group.gather_global(dtype)
    with _window(module, group, full):
        return function(module, *args, **kwargs)


def _reshard_all(module: Any) -> None:
    for m in sharded_modules(module):
        reshard_now(m)


def _call_eager(module, group, function, args, kwargs) -> Any:
    """Concrete global arrays: afterwards free or keep, by `reshard_after_forward`."""
    if handle := take_started(module):
        handle.wait()
    state = state_of(module)
    dtype, keep_for = state.mp_policy.param_dtype, state.num_forwards
    with ExitStack() as on_error:
        on_error.callback(_reshard_all, module)
        if not group.full and keep_for == 1:
            with _window(module, group, group.gather_global(dtype)):
                output = function(module, *args, **kwargs)
            on_error.pop_all()
            return output
        if not group.full:
            group.set_values(group.gather_global(), full=True)
            set_state(module, forwards_left=keep_for)
        with _window(module, group, _cast_values(group, dtype)):
            output = function(module, *args, **kwargs)
        on_error.pop_all()
    left = (state_of(module).forwards_left or keep_for) - 1
    if keep_for and left <= 0:
        reshard_now(module)
    elif keep_for:
        set_state(module, forwards_left=left)
    return output


def _call_per_device(module, group, function, args, kwargs) -> Any:
    """The program of one device: gather, run, and reduce-scatter in backward."""
    state = state_of(module)
    if group.full:
        full = _cast_values(group, state.mp_policy.param_dtype)
        with _window(module, group, full):
            return function(module, *args, **kwargs)
    group.check_shards()
    comm = comm_of(module, group)
    free = state.reshard_after_forward
    if free is None:
        free = state.inside
    if free and int(free) == 1 and group.variables:
        return _call_regathered(module, group, comm, function, args, kwargs)
    with _window(module, group, _schedule.gather_kept(group.values(), comm)):
        return function(module, *args, **kwargs)


def _call_regathered(module, group, comm, function, args, kwargs) -> Any:
    """Run the call as a function of arrays whose gathered parameters are freed."""

    def own(path, _):
        return path[0] == 0

    taken, nodes, arrays = _functional.take((args, kwargs))
    notes: dict[str, Any] = {}
    with nnx.update_context(_functional.TAG):
        graphdef, params, rest = _functional.split_outer(
            (group.variables, module, nodes, []), own, ...
        )
        taken_rest, rest_arrays = _functional.take_arrays(rest)
        num_rest, params_tree = len(rest_arrays), jax.tree.structure(params)

        def body(full, others):
            tracked = not notes
            variables, copy, copies, _ = _functional.merge_inner(
                graphdef,
                jax.tree.unflatten(params_tree, full),
                taken_rest.put((), others[:num_rest]),
                tracked=tracked,
            )
            in_args, in_kwargs = taken.put(copies, others[num_rest:])
            try:
                with _window(copy, ParamGroup(variables, group.mesh), full):
                    output = function(copy, *in_args, **in_kwargs)
            except ShardReadError as error:
                if (path := _functional.find(copy, error.variable)) is not None:
                    error.variable = dict(_functional.walk(module))[path]
                raise
            taken_out, out_nodes, out_arrays = _functional.take(output)
            graphdef_out, params_out, rest_out = _functional.split_inner(
                (variables, copy, copies, out_nodes), own, ..., tracked=tracked
            )
            taken_state, state_arrays = _functional.take_arrays(rest_out)
            if tracked:
                inputs = {id(x): i for i, x in enumerate(others[:num_rest])}
                notes.update(
                    graphdef=graphdef_out,
                    params=jax.tree.structure(params_out),
                    state=taken_state,
                    sources=[inputs.get(id(x)) for x in state_arrays],
                    output=taken_out,
                    returns_nodes=bool(out_nodes),
                )
            changed = [x for x, s in zip(state_arrays, notes["sources"]) if s is None]
            return [jnp.asarray(x) for x in (*changed, *out_arrays)]

        shards = group.values()
        others = [jnp.asarray(x) for x in (*rest_arrays, *arrays)]
        try:
            results = iter(_schedule.run_regathered(body, shards, others, comm))
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(_HIDDEN_TRACER)
            raise
        sources, graphdef_out = notes["sources"], notes["graphdef"]
        state = [next(results) if s is None else rest_arrays[s] for s in sources]
        out_nodes: list[Any] = []
        if (
            None in sources
            or notes["returns_nodes"]
            or graphdef_out.with_no_outer_index() != graphdef.with_no_outer_index()
        ):
            # Only then: inside a loop over a module from outside of it, NNX refuses any
            # write, and rightly so if there is something to carry out.
            _functional.check_writable((module, nodes))
            *_, out_nodes = _functional.merge_outer(
                graphdef_out,
                jax.tree.unflatten(notes["params"], shards),
                notes["state"].put((), state),
            )
        return notes["output"].put(out_nodes, results)


_HIDDEN_TRACER = (
    "fsdp_jax: the module may have read a traced array that did not reach it as an "
    "argument: through a closure, or inside an object that is no pytree. Pass it as an "
    "argument, or register the object with jax.tree_util, or set "
    "reshard_after_forward=False for this module."
)
