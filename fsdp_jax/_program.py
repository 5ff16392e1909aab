"""The program that one device runs, and joining what the devices return.

What lives here: the user's function on local arrays, and what is differentiated. What
must not: arguments as the user gives them (`_batch`, `_transforms`), which result is
averaged or concatenated (`_join`), and gathering parameters, which the modules do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from fsdp_jax import _collectives, _functional, _ordering
from fsdp_jax._collectives import Static
from fsdp_jax._dependence import depends_on
from fsdp_jax._join import (
    Request,
    Slot,
    as_spec,
    differs_between_devices,
    output_rules,
    slots_of,
    state_rule,
)
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._param import ShardReadError, dotted
from fsdp_jax._state import group_of, named_sharded_modules, set_state, state_of


@dataclasses.dataclass(frozen=True)
class Program:
    """All that is static in one call.

    Attributes:
        request: what the user asked for.
        mesh: mesh and data axes.
        taken: `(args, kwargs)` without nodes and arrays.
        graphdef: structure of the nodes.
        state: their state without arrays.
        variables: per array of the state: its path, its kind, its spec at rest.
        in_specs: one per array: those of the state, then those of the arguments.
        diff: positions among all arrays that are differentiated.
        out_kinds: the specs that results can have.
    """

    request: Request
    mesh: MeshInfo
    taken: _functional.Taken
    graphdef: Any
    state: _functional.Taken
    variables: tuple[Slot, ...]
    in_specs: tuple[PartitionSpec, ...]
    diff: tuple[int, ...]
    out_kinds: tuple[PartitionSpec, ...]


@dataclasses.dataclass
class Note:
    """What a trace of the program found out, next to the arrays it returns.

    Attributes:
        graphdef: structure of `(nodes, new nodes)` afterwards.
        state: their state without arrays.
        state_sources: per array of it: the input it still is, or None for a result.
        output: the user's output without nodes and arrays.
        num_output: how many arrays that has.
        order: per result: which kind, and which position in it.
    """

    graphdef: Any
    state: _functional.Taken
    state_sources: list[int | None]
    output: _functional.Taken
    num_output: int
    order: list[tuple[int, int]]

    def collect(self, results: Sequence[Sequence[Any]]):
        """The results in their own order."""
        return iter([results[kind][at] for kind, at in self.order])


def _sharded(program: Program, inputs: list[Any]) -> Any:
    mapped = jax.shard_map(
        functools.partial(_device_program, program),
        mesh=program.mesh.mesh,
        in_specs=(list(program.in_specs),),
        out_specs=(program.out_kinds, PartitionSpec()),
        axis_names=set(program.mesh.shard_axes),
        check_vma=False,
    )
    return mapped(inputs)


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
    if getattr(jax.config, "jax_use_simplified_jaxpr_constants", True):
        return jitted(inputs)  # constants are not in the text then, but arguments
    lowered = jitted.lower(inputs)
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


def _device_program(program: Program, inputs: list[jax.Array]) -> Any:
    """Trace the local program, see what differs between devices, join accordingly."""
    found: dict[str, Any] = {}

    def local(inputs):
        with _ordering.log():  # inside: it lets go of its arrays before the trace ends
            return _local_program(program, found, inputs)

    closed = jax.make_jaxpr(local)(inputs)
    # An output that is a constant comes out of the jaxpr as a Python number.
    flat = [jnp.asarray(x) for x in jaxpr_as_fun(closed)(*inputs)]
    marks = [spec != PartitionSpec() for spec in program.in_specs]
    differs = depends_on(
        closed, marks, functools.partial(differs_between_devices, program.mesh)
    )
    if program.mesh.num_shards == 1:
        differs = [False] * len(flat)
    buckets: list[list[Any]] = [[] for _ in program.out_kinds]
    order = []
    for value, differ, rule in zip(flat, differs, found["rules"], strict=True):
        value, spec = rule(value, differ)
        kind = program.out_kinds.index(spec)
        order.append((kind, len(buckets[kind])))
        buckets[kind].append(value)
    note = Note(order=order, **found["note"])
    return tuple(buckets), Static(note)


def _local_program(program: Program, found: dict, inputs: list[jax.Array]) -> list[Any]:
    """Run the user's function on one device's arrays.

    Leaves in `found` a rule per returned array that makes it global, and the note.
    """
    request, mesh = program.request, program.mesh
    diff_set = list(program.diff)

    def call(diff_arrays):
        arrays = list(inputs)
        for i, x in zip(diff_set, diff_arrays):
            arrays[i] = x
        return _call_user(program, found, arrays)

    diff_arrays = [inputs[i] for i in diff_set]
    if request.argnums is None:
        _, rest = call(diff_arrays)
        return rest
    loss, vjp, rest = jax.vjp(call, diff_arrays, has_aux=True)
    value, cotangent = _reduced_loss(request, mesh, loss)
    (grads,) = vjp(cotangent)
    finished = []
    for i, g in zip(diff_set, grads):
        slot = program.variables[i] if i < len(program.variables) else None
        cut = program.in_specs[i] != PartitionSpec()
        scale = mesh.num_shards if request.reduction == "mean" else 1
        if not cut:
            name = dotted(slot.path[1:]) if slot else "gradient"
            g = _collectives.sum_over_devices(g, mesh, name)
        if not (cut and slot is not None and slot.managed) and scale != 1:
            g = g / scale
        finished.append(g)
        found["rules"].append(as_spec(program.in_specs[i]))
    rest.insert(found["value_at"], value)
    return [*rest, *finished]


def _reduced_loss(request: Request, mesh: MeshInfo, loss: Any) -> tuple[Any, Any]:
    """The global value, and the cotangent of this device's loss."""
    if request.reduction == "weighted":
        loss, weight = loss
        wide = (_widened(loss), _widened(weight))
        total, weight_sum = _collectives.sum_over_devices(wide, mesh, "loss")
        value, one = total / weight_sum, 1 / weight_sum.astype(total.dtype)
        if jnp.issubdtype(weight.dtype, jnp.inexact):
            weight_cotangent = (-value * one).astype(weight.dtype)
        else:
            weight_cotangent = np.zeros((), jax.dtypes.float0)
        return value.astype(loss.dtype), (one.astype(loss.dtype), weight_cotangent)
    value = _collectives.sum_over_devices(_widened(loss), mesh, "loss")
    if request.reduction == "mean" and mesh.num_shards > 1:
        value = value / mesh.num_shards
    return value.astype(loss.dtype), jnp.ones_like(loss)


def _widened(x: jax.Array) -> jax.Array:
    """At least 32 bits, so that a sum of losses or of token counts keeps its digits."""
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    return x.astype(jnp.promote_types(x.dtype, wide))


def _call_user(program: Program, found: dict, arrays: list[Any]) -> tuple[Any, list]:
    """Merge, call, split. Returns the loss and every other array to carry out."""
    request, mesh = program.request, program.mesh
    num_state = len(program.variables)
    held = _fold_keys(program, arrays[:num_state])
    nodes = _functional.merge_inner(
        program.graphdef, program.state.put((), held), tracked=True
    )
    named = [pair for node in nodes for pair in named_sharded_modules(node)]
    modules = [m for _, m in named]
    states = [state_of(m) for m in modules]
    at_rest = dict(window=False, inside=False, forwards_left=0)
    divisor = None if request.reduction == "mean" else 1.0
    groups = [group_of(m) for m in modules]
    full = [group.full for group in groups]
    for (path, module), group in zip(named, groups):
        group.mark(False)
        set_state(module, divisor=divisor, path=path, **at_rest)
    args, kwargs = program.taken.put(nodes, arrays[num_state:])
    try:
        output = request.f(*args, **kwargs)
    except ShardReadError as error:
        for node in nodes:
            if (path := _functional.find(node, error.variable)) is not None:
                error.path = dotted(path)
        raise
    for module, state, group, was_full in zip(modules, states, groups, full):
        module.reshard()
        group.mark(was_full)
        before_call = {name: getattr(state, name) for name in at_rest}
        set_state(module, divisor=state.divisor, path=state.path, **before_call)
    loss = None
    if request.argnums is not None:
        loss, output = _split_loss(request, output)
    taken, out_nodes, out_arrays = _functional.take(output)
    out_arrays = [jnp.asarray(x) for x in out_arrays]
    graphdef, state = _functional.split_inner((nodes, out_nodes), tracked=True)
    taken_state, state_arrays = _functional.take_arrays(state)
    before: dict[tuple, list[int]] = {}
    for i, slot in enumerate(program.variables):
        before.setdefault((0, *slot.path), []).append(i)
    rest, rules, sources = [], [], []
    for slot, x in zip(slots_of(state, mesh), state_arrays, strict=True):
        source = before[slot.path].pop(0) if before.get(slot.path) else None
        same = source is not None and (
            x is held[source] or issubclass(slot.kind, nnx.RngKey)
        )
        sources.append(source if same else None)
        if not same:
            rest.append(jnp.asarray(x))
            rules.append(state_rule(request, mesh, slot, source is None))
    found["value_at"] = len(rest)
    out_rules = output_rules(request, mesh, taken, output, out_arrays)
    if loss is not None:
        taken = _with_value(request, taken)
        out_rules.insert(0, as_spec(PartitionSpec()))
    rest += out_arrays
    found["rules"] = rules + out_rules
    found["note"] = {
        "graphdef": graphdef,
        "state": taken_state,
        "state_sources": sources,
        "output": taken,
        "num_output": len(out_rules),
    }
    return loss, rest


def _fold_keys(program: Program, arrays: list[Any]) -> list[Any]:
    """Give each random stream a key of its own on each device."""
    if program.mesh.num_shards == 1:
        return list(arrays)
    held = list(arrays)
    for i, slot in enumerate(program.variables):
        if issubclass(slot.kind, nnx.RngKey):
            fold = functools.partial(
                jax.random.fold_in, data=_collectives.device_index(program.mesh)
            )
            for _ in range(held[i].ndim):
                fold = jax.vmap(fold)
            held[i] = fold(held[i])
    return held


def _split_loss(request: Request, output: Any) -> tuple[Any, Any]:
    """The loss and the aux of the user's output, checked."""
    aux = None
    if request.has_aux:
        if not isinstance(output, tuple) or len(output) != 2:
            raise TypeError(
                f"{request.who}: with has_aux=True f must return a pair (loss, aux), "
                f"got {type(output).__name__}."
            )
        output, aux = output
    weighted = request.reduction == "weighted"
    parts: Any = output if weighted else (output,)
    if weighted and (not isinstance(parts, tuple) or len(parts) != 2):
        raise TypeError(
            f"{request.who}: with reduction='weighted' f must return a pair "
            f"(loss_sum, weight), got {type(output).__name__}."
        )
    loss = _scalar(request, parts[0])
    if not weighted:
        return loss, aux
    return (loss, _scalar(request, parts[1], jnp.number)), aux


def _scalar(request: Request, x: Any, kind: Any = jnp.floating) -> jax.Array:
    """The user's loss or weight, as an array of shape ()."""
    found = type(x).__name__
    if _functional.is_array(x) or isinstance(x, (int, float)):
        x = jnp.asarray(x)
        if x.shape == () and jnp.issubdtype(x.dtype, kind):
            return x
        found = f"shape {x.shape}, {x.dtype}"
    raise TypeError(
        f"{request.who}: f must return a floating scalar, got {found}. If it returns a "
        "pair, pass has_aux=True."
    )


def _with_value(request: Request, taken: _functional.Taken) -> _functional.Taken:
    """Put the value where `nnx.value_and_grad` returns it: before the aux."""
    inner = jax.tree.unflatten(taken.treedef, list(range(len(taken.slots))))
    whole = ("value", inner) if request.has_aux else "value"
    leaves, treedef = jax.tree.flatten(whole)
    slots = tuple("array" if x == "value" else taken.slots[x] for x in leaves)
    return _functional.Taken(treedef, slots)
