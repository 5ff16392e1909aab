"""What a call of a sharded module does: cast, gather, run, free, cast.

One function per kind of call: eager on global arrays, traced on global arrays, and in a
per-device program with parameters kept or freed. What must not live here: the module
class, and how values move (`_param_group`, `_schedule`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from fsdp_jax import _carry, _functional, _gather, _ordering, _precision, _schedule
from fsdp_jax._bridge import as_linen_expects
from fsdp_jax._comm import cast_floating
from fsdp_jax._local import Local
from fsdp_jax._managed import ShardReadError
from fsdp_jax._param_group import ParamGroup
from fsdp_jax._private import private_copy
from fsdp_jax._state import (
    FSDPState,
    check_concrete,
    class_name,
    comm_of,
    group_of,
    named_sharded_modules,
    ordering_of,
    set_state,
    sharded_modules,
    state_of,
    warn_of_knobs_without_effect,
    warn_of_new_params,
)
from fsdp_jax._unshard import reshard_now, take_started


def cast_carry(state: FSDPState, carry: Any) -> Any:
    """Cast the input of a first layer to what every layer returns."""
    policy = state.mp_policy
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    return _precision.cast_outputs(carry, policy.output_dtype or dtype)


def call(module: Any, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a method of a sharded module on its gathered parameters."""
    state = state_of(module)
    name = state.path or class_name(module)
    _carry.note_call(name, state.mp_policy)
    with (
        _carry.refused(name),
        _precision.cast_inputs(state.mp_policy, args, kwargs) as (args, kwargs),
    ):
        if state.window:
            output = function(module, *args, **kwargs)
        else:
            check_concrete(module, f"{class_name(module)} was called")
            if not state.inside and not state.mesh.per_device():
                warn_of_new_params(module, stacklevel=3)
            with _naming_bad_numbers(state.path):
                output = _run(module, function, args, kwargs)
    return _precision.cast_outputs(output, state.mp_policy.output_dtype)


def _run(module: Any, function: Callable, args: tuple, kwargs: dict) -> Any:
    state = state_of(module)
    if state.mesh.per_device():
        return _call_per_device(module, function, args, kwargs)
    if state.inside:  # the copy of an enclosing call
        return _call_global(module, function, args, kwargs)
    with private_copy(module) as private:
        given = private.inward((args, kwargs))
        return private.outward(_call_global(private.module, function, *given))


@contextmanager
def _naming_bad_numbers(path: str) -> Iterator[None]:
    """Say in the error of jax_debug_nans which module it is about."""
    try:
        yield
    except FloatingPointError as error:
        if ", in module " not in str(error):
            error.args = (f"{error}, in module {path or 'the root'!r}",)
        raise


@contextmanager
def _window(module: Any, group: ParamGroup, full: list[Any]) -> Iterator[None]:
    """Hold full parameters for one call; on the way out all is as it was."""
    own = state_of(module).path
    inner = [pair for pair in named_sharded_modules(module) if pair[1] is not module]
    before = [(state_of(m).inside, state_of(m).path) for _, m in inner]
    with group.holding(full):
        set_state(module, window=True)
        for path, m in inner:
            set_state(m, inside=True, path=f"{own}.{path}" if own else path)
        try:
            with as_linen_expects(module), jax.named_scope(f"module:{own or '(root)'}"):
                yield
        finally:
            set_state(module, window=False)
            for (_, m), (inside, path) in zip(inner, before, strict=True):
                set_state(m, inside=inside, path=path)


def _call_global(module, function, args, kwargs) -> Any:
    group = group_of(module)
    run = _call_traced if group.is_traced() else _call_eager
    return run(module, group, function, args, kwargs)


def _cast_values(group: ParamGroup, dtype: Any) -> list[Any]:
    return [cast_floating(v, dtype) for v in group.values()]


def _call_traced(module, group, function, args, kwargs) -> Any:
    """Global arrays under a trace: the module leaves as it came in."""
    state = state_of(module)
    dtype = state.mp_policy.param_dtype
    warn = functools.partial(warn_of_knobs_without_effect, state)
    gathered = group.full
    full = _cast_values(group, dtype) if gathered else group.gather_global(dtype, warn)
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


def _call_per_device(module, function, args, kwargs) -> Any:
    """The program of one device: gather, run, and reduce-scatter in backward."""
    state, group = state_of(module), group_of(module)
    if group.full:
        full = _cast_values(group, state.mp_policy.param_dtype)
        with _window(module, group, full):
            return function(module, *args, **kwargs)
    group.check_shards()
    free = state.reshard_after_forward
    if free is None:
        free = state.inside
    # A recomputation gathers anyway, and what it gathers lives no longer than needed.
    free = free and int(free) == 1 and not _ordering.in_checkpoint()
    gathered = group.local("full")
    free = free and all(f is None for f in gathered)
    taken = _functional.take(_precision.open_dataclasses((args, kwargs)))
    with _ordering.log() as program_log:
        log = program_log.of(state.comm_context)
        schedule = schedule_of(state, log)
        anchors = schedule.begin_forward([x for x in taken[2] if isinstance(x, Tracer)])
        if free and group.variables:
            return _call_regathered(module, group, function, taken, schedule, anchors)
        comm = comm_of(module, group)
        full = _gather.gather_kept(
            _gather.refuse_inner(group.values(), comm),
            comm,
            log,
            anchors,
            sinks=group.local("sink"),
            full=gathered,
        )
        with _window(module, group, full):
            return function(module, *args, **kwargs)


def schedule_of(state: FSDPState, log: _ordering.Log) -> _schedule.Schedule:
    """What one call of a module waits for."""
    return _schedule.Schedule(
        ordering_of(state),
        log,
        state.key,
        state.forward_prefetch,
        state.backward_prefetch,
    )


def _call_regathered(module, group, function, taken, schedule, anchors) -> Any:
    """Run the call as a function of arrays whose gathered parameters are freed."""
    with nnx.update_context(_functional.TAG):
        body = Body(module, group, function, taken)
        others = [jnp.asarray(x) for x in (*body.state, *body.arrays)]
        comm = comm_of(module, group)
        shards = _gather.refuse_inner(group.values(), comm)
        with noting_hidden_tracers():
            results = _schedule.run_regathered(
                body, shards, others, comm, schedule, anchors, group.local("sink")
            )
        return body.finish(results, body.state)


def _first(path: Any, _: Any) -> bool:
    return path[0] == 0


class Body:
    """A method of a module as a function of arrays: the body of a call.

    To be used inside `nnx.update_context(TAG)`, in which it is made.

    Attributes:
        state: arrays of everything below the module and the arguments that is no
            parameter of the group.
        arrays: array arguments.
    """

    def __init__(self, module: Any, group: ParamGroup, function: Callable, taken: Any):
        self._module, self._group, self._function = module, group, function
        self._taken, self._nodes, self.arrays = taken
        self._graphdef, params, rest = _functional.split_outer(
            (group.variables, module, self._nodes, []), _first, ...
        )
        self._taken_rest, self.state = _functional.take_arrays(rest)
        self._params_tree = jax.tree.structure(
            params, is_leaf=lambda x: isinstance(x, Local)
        )
        self._notes: dict[str, Any] = {}

    def __call__(self, full: list[Any], others: list[Any]) -> list[Any]:
        """Run it.

        Args:
            full: parameters of the group, gathered.
            others: arrays in the places of `state` and `arrays`.

        Returns:
            The arrays of the state that changed, then those of the output.
        """
        notes, num_state = self._notes, len(self.state)
        tracked = not notes
        variables, copy, copies, _ = _functional.merge_inner(
            self._graphdef,
            jax.tree.unflatten(self._params_tree, full),
            self._taken_rest.put((), others[:num_state]),
            tracked=tracked,
        )
        given = self._taken.put(copies, others[num_state:])
        (args, kwargs), copied = _precision.close_dataclasses(given)
        try:
            with _window(copy, ParamGroup(variables, self._group.mesh), full):
                output = self._function(copy, *args, **kwargs)
        except ShardReadError as error:
            if (path := _functional.find(copy, error.variable)) is not None:
                error.variable = dict(_functional.walk(self._module))[path]
            raise
        written = [c.written() for c in copied]
        if returns_written := any(written):
            output = output, written
        output = _precision.open_dataclasses(output)
        taken_out, out_nodes, out_arrays = _functional.take(output)
        graphdef, params, rest = _functional.split_inner(
            (variables, copy, copies, out_nodes), _first, ..., tracked=tracked
        )
        taken_state, state = _functional.take_arrays(rest)
        if tracked:
            inputs = {id(x): i for i, x in enumerate(others[:num_state])}
            notes.update(
                graphdef=graphdef,
                params=jax.tree.structure(params),
                state=taken_state,
                sources=[inputs.get(id(x)) for x in state],
                output=taken_out,
                copied=[c.original for c in copied] if returns_written else None,
                returns_nodes=bool(out_nodes),
            )
        changed = [x for x, s in zip(state, notes["sources"]) if s is None]
        return [jnp.asarray(x) for x in (*changed, *out_arrays)]

    @property
    def output(self) -> _functional.Taken:
        """The output without its arrays, once the body has run."""
        return self._notes["output"]

    @property
    def restructures(self) -> bool:
        """Whether the body returned nodes or made the module another graph."""
        before, after = self._graphdef, self._notes["graphdef"]
        same = after.with_no_outer_index() == before.with_no_outer_index()
        return self._notes["returns_nodes"] or not same

    def finish(self, results: list[Any], state: list[Any]) -> Any:
        """Write what changed into the module and the arguments.

        Args:
            results: as the body returned them.
            state: what the arrays of the state were.

        Returns:
            The output.
        """
        notes, rest = self._notes, iter(results)
        sources = notes["sources"]
        state = [next(rest) if s is None else state[s] for s in sources]
        out_nodes: list[Any] = []
        if None in sources or self.restructures:
            # Only then: inside a loop over a module from outside of it, NNX refuses any
            # write, and rightly so if there is something to carry out.
            _functional.check_writable((self._module, self._nodes))
            *_, out_nodes = _functional.merge_outer(
                notes["graphdef"],
                jax.tree.unflatten(notes["params"], self._group.raw_values()),
                notes["state"].put((), state),
            )
        output, _ = _precision.close_dataclasses(notes["output"].put(out_nodes, rest))
        if notes["copied"] is not None:
            output, written = output
            _precision.write_back(notes["copied"], written)
        return output


@contextmanager
def noting_hidden_tracers() -> Iterator[None]:
    """Say in JAX's error on a leaked tracer where it may have come from."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        error.add_note(_HIDDEN_TRACER)
        raise


_HIDDEN_TRACER = (
    "fsdp_jax: the module may have read a traced array that did not reach it as an "
    "argument: through a closure, or inside an object that is no pytree. Pass it as an "
    "argument, or register the object with jax.tree_util, or set "
    "reshard_after_forward=False for this module."
)
