"""The program that one device runs, and what of it is differentiated.

What must not live here: arguments as the user gives them (`_batch`, `_transforms`), the
call of the user's function (`_user`), which result is averaged or concatenated
(`_join`), and gathering parameters, which the modules do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from fsdp_jax import (
    _blocks,
    _collectives,
    _forward_mode,
    _loss,
    _means,
    _microbatch,
    _ordering,
)
from fsdp_jax._call import noting_hidden_tracers
from fsdp_jax._comm import Defer, Static
from fsdp_jax._divergence import run_agreed
from fsdp_jax._join import as_spec, differ_between_devices
from fsdp_jax._local import Local
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._metrics import start_metrics
from fsdp_jax._spec import ParamSpec
from fsdp_jax._stages import (
    PARTIAL,
    REDUCED,
    UNREDUCED,
    Entry,
    Reduction,
    Stages,
    added,
)
from fsdp_jax._streams import fold_keys, kept_keys, specs_with_keys
from fsdp_jax._user import Call, Outcome, call_user

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Diff:
    """One differentiated array.

    Attributes:
        at: its position among the arrays.
        entry: its gradient.
        of_state: whether it is a Variable's value, not an argument.
        defer: what backward leaves out of the reduction of its group.
        sum_dtype: dtype of its gradient before it is reduced.
    """

    at: int
    entry: Entry
    of_state: bool
    defer: Defer
    sum_dtype: Any

    @property
    def cut(self) -> bool:
        """Whether it is a parameter that the devices hold pieces of."""
        return self.entry.param is not None and self.entry.param.cut

    @property
    def stage(self) -> int:
        """The stage in which backward leaves its gradient."""
        if not self.cut:
            return UNREDUCED if self.of_state else REDUCED
        return {"": REDUCED, "all_reduce": PARTIAL, "all": UNREDUCED}[self.defer]

    @property
    def has_sink(self) -> bool:
        """Whether something else than the shard receives the gradient.

        An offloaded shard does not: its gradient would have to be in host memory.
        """
        away = self.entry.param is not None and self.entry.param.memory_kind is not None
        return self.cut and (self.stage != REDUCED or away)

    def sink(self, shard: Array, mesh: MeshInfo) -> Array:
        """What receives the gradient in place of this device's shard."""
        shape, param = list(shard.shape), self.entry.param
        if self.stage == UNREDUCED and param is not None and param.dim is not None:
            shape[param.dim] = param.size
        reduced = self.stage == REDUCED
        return jnp.zeros(shape, shard.dtype if reduced else self.sum_dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """All that is static in one call.

    Attributes:
        call: the call of the user's function.
        in_specs: one per array: those of the state, of the arguments, of `pending`.
        params: how each of them rests, if it is a managed parameter.
        diff: what is differentiated.
        reductions: of the gradients, one per group.
        pending: stage and name of each pending gradient.
        kept: per reduction, the members that stay gathered from one micro-batch to the
            next: their positions in the group, and among the arrays.
        slices: the micro-batches; None for one.
        out_kinds: the specs that results can have.
    """

    call: Call
    in_specs: tuple[PartitionSpec, ...]
    params: tuple[ParamSpec | None, ...]
    diff: tuple[Diff, ...]
    reductions: tuple[Reduction, ...]
    pending: tuple[tuple[int, str], ...]
    kept: tuple[tuple[tuple[int, int], ...], ...]
    slices: _microbatch.Slices | None
    out_kinds: tuple[PartitionSpec, ...]

    @property
    def mesh(self) -> MeshInfo:
        """Mesh and the roles of its axes."""
        return self.call.mesh


@dataclasses.dataclass
class Note:
    """What a trace of the program found out, next to the arrays it returns.

    Attributes:
        outcome: of the user's function.
        stages: stage and name of each gradient.
        order: per result: which kind, and which position in it.
    """

    outcome: Outcome
    stages: list[tuple[int, str]]
    order: list[tuple[int, int]]

    def collect(self, results: Sequence[Sequence[Any]]):
        """The results in their own order."""
        return iter([results[kind][at] for kind, at in self.order])


def _sharded(program: Program, inputs: list[Any]) -> Any:
    mesh = program.mesh
    mapped = jax.shard_map(
        functools.partial(_device_program, program),
        mesh=mesh.mesh,
        in_specs=(list(program.in_specs),),
        out_specs=(program.out_kinds, PartitionSpec()),
        axis_names=set(mesh.data_axes),
        check_vma=False,
    )
    entered = [
        _blocks.enter_program(x, p) for x, p in zip(inputs, program.params, strict=True)
    ]
    results, static = mapped(entered)
    return _at_rest(program, static.value, results), static


def _at_rest(program: Program, note: Note, results: Any) -> Any:
    """Give results that are like parameters the order and place of the parameters."""
    entries = {d.entry.name: d.entry for d in program.diff}
    state = [
        program.call.variables[at].param if at is not None else None
        for at in note.outcome.updates
    ]
    done = [list(r) for r in results]
    for (kind, at), param in zip(note.order, state):
        done[kind][at] = _blocks.leave_program(done[kind][at], param)
    last = note.order[len(note.order) - len(note.stages) :]
    for (kind, at), (stage, name) in zip(last, note.stages, strict=True):
        done[kind][at] = entries[name].leave(done[kind][at], stage, program.mesh)
    return tuple(done)


_COMPILED: OrderedDict[Any, Any] = OrderedDict()
_MAX_COMPILED = 128


def execute(program: Program, inputs: list[Any]) -> Any:
    """Run a program: as part of the trace that is going on, or compiled.

    Eagerly it is traced anew in every call, because the user's function may read values
    that are not arguments; what has been compiled is found again by its StableHLO.
    """
    if any(isinstance(x, Tracer) for x in inputs):
        return _sharded(program, inputs)
    # keep_unused: two programs that differ in what they ignore must not look alike.
    jitted = jax.jit(functools.partial(_sharded, program), keep_unused=True)
    with noting_hidden_tracers():
        if getattr(jax.config, "jax_use_simplified_jaxpr_constants", True):
            return jitted(inputs)  # constants are not in the text then, but arguments
        traced = jitted.trace(inputs)
        if len(traced.jaxpr.in_avals) != len(inputs):  # a tracer that has escaped
            return jitted(inputs)  # which JAX refuses
        lowered = traced.lower()
    types = [(x.shape, x.dtype) for x in (*inputs, *jax.tree.leaves(lowered.out_info))]
    key = (program.mesh, lowered.as_text(), tuple(types))
    compiled = _COMPILED.pop(key, None)
    if compiled is None:
        compiled = lowered.compile()
    _COMPILED[key] = compiled
    if len(_COMPILED) > _MAX_COMPILED:
        _COMPILED.popitem(last=False)
    results = jax.tree.leaves(compiled(inputs))
    return jax.tree.unflatten(lowered.out_tree, results)


def _device_program(program: Program, inputs: list[Array]) -> Any:
    """Trace the local program, see what differs between devices, join accordingly."""
    found: list[tuple[Outcome, list[tuple[int, str]]]] = []
    given, inputs = inputs, fold_keys(program.call, inputs)

    def local(inputs):
        with _ordering.log():  # inside: it lets go of its arrays before the trace ends
            results, outcome, stages = _local_program(program, inputs)
        found.append((outcome, stages))
        return results

    with _forward_mode.refused():
        closed = jax.make_jaxpr(local)(inputs)
    _forward_mode.check(closed)
    outcome, stages = found[-1]
    # An output that is a constant comes out of the jaxpr as a Python number.
    held = start_metrics(program.call, outcome, closed, inputs)
    kept = kept_keys(program.call, outcome, closed)
    differs, divergent = differ_between_devices(
        program.call.request,
        program.mesh,
        closed,
        specs_with_keys(program.call, program.in_specs),
    )
    if divergent:
        flat = run_agreed(closed, held, divergent, program.mesh)
    else:
        flat = [jnp.asarray(x) for x in jaxpr_as_fun(closed)(*held)]
    for place, at in kept.items():
        flat[place] = given[at]
    buckets: list[list[Any]] = [[] for _ in program.out_kinds]
    order = []
    entries = {d.entry.name: d.entry for d in program.diff}
    rules = list(outcome.rules)
    if program.call.request.argnums is not None:
        rules.insert(outcome.value_at, as_spec(PartitionSpec()))
    for stage, name in stages:
        rules.append(as_spec(entries[name].stage_spec(stage, program.mesh)))
    for value, differ, rule in zip(flat, differs, rules, strict=True):
        value, spec = rule(value, differ)
        kind = program.out_kinds.index(spec)
        order.append((kind, len(buckets[kind])))
        buckets[kind].append(value)
    return tuple(buckets), Static(Note(outcome, stages, order))


def _local_program(
    program: Program, inputs: list[Array]
) -> tuple[list[Any], Outcome, list[tuple[int, str]]]:
    """Run the user's function on one device's arrays, and differentiate it.

    Returns:
        All results, the value in its place and the gradients last; what the user's
        function left; stage and name of each gradient.
    """
    call, mesh = program.call, program.mesh
    num_arrays = len(inputs) - len(program.pending)
    arrays, pending = inputs[:num_arrays], inputs[num_arrays:]
    arrays = [_usable(x, p) for x, p in zip(arrays, program.params)]
    outcomes: list[Outcome] = []
    if call.request.argnums is None:
        held = [_guarded(x, p) for x, p in zip(arrays, program.params)]
        _, rest, outcome = call_user(call, held, ())
        return rest, outcome, []
    defers: list[Defer] = [r.comm.defer for r in program.reductions[: call.num_modules]]
    full = _gather_kept_groups(program, arrays)

    def one(diff_arrays, arrays, counts=None):
        def run(diff_arrays):
            held = [_guarded(x, p) for x, p in zip(arrays, program.params)]
            for at, x in full.items():
                held[at] = Local(arrays[at], None, x)
            for d, x in zip(program.diff, diff_arrays, strict=True):
                if d.has_sink:
                    held[d.at] = Local(arrays[d.at], x, full.get(d.at))
                elif d.at in full:
                    held[d.at] = Local(x, None, full[d.at])
                else:
                    held[d.at] = x
            loss, rest, outcome = call_user(call, held, defers)
            outcomes.append(outcome)
            return loss, rest

        loss, vjp, rest = jax.vjp(run, diff_arrays, has_aux=True)
        value: Any = jax.tree.leaves(loss)
        if counts is None:
            dtype = value[0].dtype
            value, counts = _loss.start(call.request, mesh, _loss.widened(loss))
            value = value.astype(dtype)
        (grads,) = vjp(_loss.cotangent(loss, counts))
        return value, grads, rest

    diff_arrays = [
        d.sink(arrays[d.at], mesh) if d.has_sink else arrays[d.at] for d in program.diff
    ]
    if program.slices is None:
        value, grads, rest = one(diff_arrays, arrays)
    else:
        value, grads, rest = _microbatch.over_slices(
            one, call, program.slices, diff_arrays, arrays, lambda: outcomes[-1]
        )
    outcome = outcomes[-1]
    stages: Stages = [{}, {}, {}]
    entries = {d.entry.name: d.entry for d in program.diff}
    for (stage, name), x in zip(program.pending, pending, strict=True):
        stages[stage][name] = entries[name].of_device(x, stage)
    for d, g in zip(program.diff, grads, strict=True):
        if not d.of_state:
            g = _argument_gradient(program, d, g)
        elif d.stage == UNREDUCED:
            g = g.astype(d.sum_dtype)
        stages[d.stage] = added(stages[d.stage], {d.entry.name: g})
    for reduction in program.reductions:
        reduction.finish(stages)
    keys = [(stage, name) for stage, grads in enumerate(stages) for name in grads]
    finished = [
        stages[stage][name] if stage == REDUCED else stages[stage][name][None]
        for stage, name in keys
    ]
    rest.insert(outcome.value_at, value)
    return [*rest, *finished], outcome, keys


def _usable(x: Array, param: ParamSpec | None) -> Array:
    """An array to be computed with as it is: on the device, if it is not gathered."""
    if param is None or param.memory_kind is None or param.cut:
        return x
    return jax.device_put(x, jax.memory.Space.Device)


def _guarded(x: Array, param: ParamSpec | None) -> Any:
    """What a Variable holds: on one device a host shard looks like a full array."""
    away = param is not None and param.cut and param.memory_kind is not None
    return Local(x) if away else x


def _argument_gradient(program: Program, d: Diff, grad: Array) -> Array:
    """The gradient of an argument, which no group reduces."""
    mesh, spec = program.mesh, d.entry.spec
    named = {a for axes in spec for a in (axes if isinstance(axes, tuple) else (axes,))}
    missing = [a for a in mesh.data_axes if a not in named]
    averages = program.call.request.reduction == "mean"
    count = mesh.num_devices if averages else 1
    return _means.mean_over_devices(grad, mesh, d.entry.name, missing, count)


def _gather_kept_groups(program: Program, arrays: list[Array]) -> dict[int, Array]:
    """Gather the groups that stay gathered for all micro-batches."""
    full: dict[int, Array] = {}
    for reduction, members in zip(program.reductions, program.kept):
        if members:
            comm = reduction.comm.only([i for i, _ in members])
            gathered = _collectives.gather_group(
                [arrays[at] for _, at in members], comm
            )
            full.update(zip([at for _, at in members], gathered, strict=True))
    return full
