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
from fsdp_jax._state import comm_of, group_of, set_state, sharded_modules, state_of
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
        group.check_concrete(f"{type(module).__bases__[1].__name__} was called")
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
    state = state_of(module)
    dtype = state.mp_policy.param_dtype
    full = _cast_values(group, dtype) if state.unsharded else group.gather_global(dtype)
    with _window(module, group, full):
        return function(module, *args, **kwargs)


def _call_eager(module, group, function, args, kwargs) -> Any:
    """Concrete global arrays: afterwards free or keep, by `reshard_after_forward`."""
    if handle := take_started(module):
        handle.wait()
    state = state_of(module)
    dtype, keep_for = state.mp_policy.param_dtype, state.num_forwards
    with ExitStack() as on_error:
        on_error.callback(lambda: state_of(module).unsharded and reshard_now(module))
        if not state.unsharded and keep_for == 1:
            with _window(module, group, group.gather_global(dtype)):
                return function(module, *args, **kwargs)
        if not state.unsharded:
            group.set_values(group.gather_global())
            set_state(module, unsharded=True, forwards_left=keep_for)
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
    if state.unsharded:
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
            (group.variables, module, nodes), own, ...
        )
        taken_rest, rest_arrays = _functional.take_arrays(rest)
        params_tree = jax.tree.structure(params)

        def body(full, others):
            tracked = not notes
            states = (
                jax.tree.unflatten(params_tree, full),
                taken_rest.put((), others[: len(rest_arrays)]),
            )
            variables, copy, copies = _functional.merge_inner(
                graphdef, *states, tracked=tracked
            )
            in_args, in_kwargs = taken.put(copies, others[len(rest_arrays) :])
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
                notes.update(
                    graphdef=graphdef_out,
                    params=jax.tree.structure(params_out),
                    state=taken_state,
                    num_state=len(state_arrays),
                    output=taken_out,
                )
            return [jnp.asarray(a) for a in (*state_arrays, *out_arrays)]

        shards = group.values()
        others = [jnp.asarray(a) for a in (*rest_arrays, *arrays)]
        results = _schedule.run_regathered(body, shards, others, comm)
        num_state = notes["num_state"]
        *_, out_nodes = _functional.merge_outer(
            notes["graphdef"],
            jax.tree.unflatten(notes["params"], shards),
            notes["state"].put((), results[:num_state]),
        )
        return notes["output"].put(out_nodes, results[num_state:])
