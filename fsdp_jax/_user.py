"""One call of the user's function on the arrays of one device.

What lives here: merging the model, calling, splitting it again, and what changed. What
must not: differentiating the call (`_program`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from fsdp_jax import _cotangents, _functional, _opaque
from fsdp_jax._arguments import axes_of
from fsdp_jax._comm import Defer
from fsdp_jax._join import (
    Change,
    Request,
    Slot,
    output_rules,
    owners,
    slots_of,
    state_rule,
)
from fsdp_jax._local import shard_in
from fsdp_jax._loss import split_loss
from fsdp_jax._managed import ShardReadError
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._raw_reads import Piece, RawReads, Value
from fsdp_jax._spec import ParamSpec, dotted
from fsdp_jax._state import (
    check_variables,
    deferred,
    group_of,
    named_sharded_modules,
    set_state,
    state_of,
)

_DO_NOT_FIT = re.compile("incompatible shapes|inconsistent sizes|Incompatible shapes")


@dataclasses.dataclass(frozen=True)
class Call:
    """All that is static in a call of the user's function.

    Attributes:
        request: what the user asked for.
        mesh: mesh and the roles of its axes.
        taken: `(args, kwargs)` without nodes and arrays.
        graphdef: structure of the nodes.
        state: their state without arrays.
        variables: one slot per array of the state.
        num_modules: how many sharded modules there are.
        rows: how many rows the arguments have that are cut over all devices.
    """

    request: Request
    mesh: MeshInfo
    taken: _functional.Taken
    graphdef: Any
    state: _functional.Taken
    variables: tuple[Slot, ...]
    num_modules: int
    rows: frozenset[int]

    @property
    def rows_here(self) -> frozenset[int]:
        """How many of them one call of the user's function sees."""
        count = self.mesh.num_devices * self.request.num_microbatches
        return frozenset(rows // count for rows in self.rows)


@dataclasses.dataclass
class Outcome:
    """What a call left, next to the arrays that it returned.

    Attributes:
        graphdef: structure of `(nodes, new nodes)` afterwards.
        same: whether that is what it was, and only values in Variables changed.
        state: their state without arrays.
        state_sources: per array of it: the input it still is, or None for a result.
        updates: per result of the state: the input that it replaces, None if it is new.
        changes: per result of the state: what became of it.
        output: the user's output without nodes and arrays.
        num_output: how many arrays that has, the value included.
        value_at: where the value belongs among the results.
        rules: per result, without the value: how it becomes global.
        specified: per array of the output, without the value: whether `out_specs` says
            how it becomes global.
    """

    graphdef: Any
    same: bool
    state: _functional.Taken
    state_sources: list[int | None]
    updates: list[int | None]
    changes: list[Change]
    output: _functional.Taken
    num_output: int
    value_at: int
    rules: list[Callable]
    specified: list[bool]


def call_user(
    call: Call, arrays: list[Any], defers: Sequence[Defer]
) -> tuple[Any, list, Outcome]:
    """Merge, call, split.

    Args:
        call: what is static.
        arrays: those of the state, then those of the arguments.
        defers: per sharded module, which reductions backward leaves out; empty if
            nothing is differentiated.

    Returns:
        The loss, None without one; every other array to carry out; the rest.
    """
    request, mesh = call.request, call.mesh
    num_state = len(call.variables)
    held = list(arrays[:num_state])
    nodes = _functional.merge_inner(
        call.graphdef, call.state.put((), held), tracked=True
    )
    structure = nnx.graphdef((nodes, []))
    named = [pair for node in nodes for pair in named_sharded_modules(node)]
    modules = [m for _, m in named]
    states = [state_of(m) for m in modules]
    at_rest = dict(window=False, inside=False, forwards_left=0)
    averages = request.reduction == "mean"
    refused: Defer = "refuse"
    if not defers:
        defers = [refused if deferred(s) else "" for s in states]
    groups = [group_of(m) for m in modules]
    full = [group.full for group in groups]
    for (path, module), group, defer in zip(named, groups, defers, strict=True):
        group.mark(False)
        set_state(module, averages=averages, defer=defer, path=path, **at_rest)
    args, kwargs = call.taken.put(nodes, arrays[num_state:])
    try:
        with _cotangents.running_f():
            output = request.f(*args, **kwargs)
    except ShardReadError as error:
        for node in nodes:
            if (path := _functional.find(node, error.variable)) is not None:
                error.path = dotted(path)
        raise
    except (TypeError, ValueError) as error:
        _name_rows(call, error)
        raise
    for module, state, group, was_full in zip(modules, states, groups, full):
        module.reshard()
        group.set_values(group.values(), full=was_full)
        changed = ("averages", "defer", "path", *at_rest)
        set_state(module, **{name: getattr(state, name) for name in changed})
    loss = None
    if request.argnums is not None:
        loss, output = split_loss(request, output)
    taken, out_nodes, out_arrays = _functional.take(output)
    for node in (*nodes, *out_nodes):
        check_variables(node, f"{request.who}: f")
    out_arrays = [jnp.asarray(x) for x in out_arrays]
    graphdef, state = _functional.split_inner((nodes, out_nodes), tracked=True)
    taken_state, state_arrays = _functional.take_arrays(state)
    before: dict[tuple, list[int]] = {}
    for i, slot in enumerate(call.variables):
        before.setdefault((0, *slot.path), []).append(i)
    held_state = call.state.put((), held)
    numbers = {(0, *path): x for path, x in _numbers(held_state).items()}
    _check_numbers(request, numbers, state)
    metrics = {
        (k, *path): owner
        for k, group in enumerate((nodes, out_nodes))
        for path, owner in owners(group).items()
    }
    rest, rules, sources, updates, changes = [], [], [], [], []
    slots = slots_of(state, mesh, call.rows_here)
    for slot, x in zip(slots, state_arrays, strict=True):
        source = before[slot.path].pop(0) if before.get(slot.path) else None
        same = source is not None and x is shard_in(held[source])
        sources.append(source if same else None)
        if not same:
            rest.append(jnp.asarray(x))
            updates.append(source)
            old = call.variables[source] if source is not None else None
            new = old is None and slot.path not in numbers
            changes.append(Change(slot, old, new, metrics.get(slot.path)))
            _check_sliced(request, changes[-1])
            rules.append(state_rule(request, mesh, changes[-1]))
    value_at = len(rest)
    out_rules, specified = output_rules(request, mesh, taken, output, out_arrays)
    if loss is not None:
        taken = _with_value(request, taken)
    return (
        loss,
        [*rest, *out_arrays],
        Outcome(
            graphdef,
            graphdef.with_no_outer_index() == structure and _in_variables(state),
            taken_state,
            sources,
            updates,
            changes,
            taken,
            len(out_rules) + (loss is not None),
            value_at,
            [*rules, *out_rules],
            specified,
        ),
    )


def _name_rows(call: Call, error: Exception) -> None:
    """Raise for shapes that do not fit if there is state that has rows of the batch."""
    if not _DO_NOT_FIT.search(str(error)):
        return
    own = {n for n in call.rows if n not in call.rows_here}
    found = [
        f"{slot.kind.__name__} {dotted(slot.path[1:])!r} {slot.shape}"
        for slot in call.variables
        if not slot.managed and slot.rows is None and own & {*slot.shape[:1]}
    ]
    f = call.request.f
    if not found and not getattr(f, "__module__", "").startswith("fsdp_jax"):
        outside = _opaque.find_array(f, lambda shape: bool(own & {*shape[:1]}))
        found = [f"an array {outside[0].strip()}"] if outside else []
    if found:
        raise ValueError(
            f"{call.request.who}: shapes do not fit in f: {str(error).splitlines()[0]} "
            f"{', '.join(found)}: whole on every device, with as many entries as the "
            "batch has rows, of which each call of f sees a part. Pass what f reads "
            "from outside as an argument; state with rows is an nnx.Cache."
        ) from error


def _in_variables(state: Any) -> bool:
    """Whether all arrays of a state are those of Variables."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return all(isinstance(leaf, nnx.Variable) for leaf in leaves)


def _numbers(state: Any) -> dict[tuple[Any, ...], Any]:
    """The Python numbers that Variables of a state hold, by path."""
    found = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    values = {
        tuple(_functional.plain_key(k) for k in keys): leaf.get_raw_value()
        for keys, leaf in found
        if isinstance(leaf, nnx.Variable)
    }
    return {p: v for p, v in values.items() if isinstance(v, (int, float, complex))}


def _check_numbers(request: Request, numbers: dict, state: Any) -> None:
    """Raise if micro-batches change a Python number, which no loop can carry."""
    if request.num_microbatches == 1:
        return
    after = _numbers(state)
    for path, number in numbers.items():
        if after.get(path) is not number:
            raise ValueError(
                f"{request.who}: f changes {dotted(path[2:])!r}, which holds the "
                f"Python number {number!r}, so that the next micro-batch would not go "
                f"on with it. Make it an array: jnp.asarray({number!r})."
            )


def _check_sliced(request: Request, change: Change) -> None:
    """Raise if micro-batches change what they cannot hand on or join."""
    kind, name = change.slot.kind, dotted(change.slot.path[2:])
    if request.num_microbatches == 1:
        return
    if issubclass(kind, nnx.Cache) and change.before is not None:
        raise ValueError(
            f"{request.who}: f changes the {kind.__name__} {name!r}, and micro-batches "
            "cannot: each has rows of its own, and the next would go on from where the "
            "last one left it. Make the cache in f, or take num_microbatches=1."
        )
    if issubclass(kind, nnx.metrics.MetricState) and change.before is None:
        raise ValueError(
            f"{request.who}: f makes the {kind.__name__} {name!r}, a new one for every "
            "micro-batch. Make the metric before, and pass it as an argument."
        )


def _with_value(request: Request, taken: _functional.Taken) -> _functional.Taken:
    """Put the value where `nnx.value_and_grad` returns it: before the aux."""
    inner = jax.tree.unflatten(taken.treedef, list(range(len(taken.slots))))
    whole = ("value", inner) if request.has_aux else "value"
    leaves, treedef = jax.tree.flatten(whole)
    slots = tuple("array" if x == "value" else taken.slots[x] for x in leaves)
    return _functional.Taken(treedef, slots)


def check_raw_reads(
    call: Call,
    outcome: Outcome,
    closed: ClosedJaxpr,
    params: Sequence[ParamSpec | None],
    specs: Sequence[PartitionSpec],
) -> None:
    """Raise if `f` computes with a raw shard as if it were the parameter.

    Args:
        call: of the user's function.
        outcome: what the call left.
        closed: the program of one device; gradients come out last.
        params: how each of its inputs rests, if it is a managed parameter.
        specs: how each of them differs between devices.

    Raises:
        RuntimeError: it does.
    """
    mesh = call.mesh
    axes, data = (
        frozenset(axis for axis in some if mesh.size((axis,)) > 1)
        for some in (mesh.shard_axes, mesh.data_axes)
    )
    if not axes:
        return

    def refuse(piece: Piece, where: str = "a module") -> RuntimeError:
        name = f"a gradient of module {piece.source or 'the root'!r}"
        if isinstance(piece.source, int) and piece.source < len(call.variables):
            name = f"parameter {dotted(call.variables[piece.source].path[1:])!r}"
        how = f" ({piece.misused})" if piece.misused else ""
        return RuntimeError(
            f"{call.request.who}: {where} depends on {name} other than through a "
            f"gather{how}: each device holds a piece of it, and f computes with that "
            "as if it were all. Raw values of a model (nnx.state, nnx.split, "
            "nnx.as_pure, jax.tree.leaves) are such pieces in f. For a norm use "
            "fsdp_jax.global_norm; for a weight penalty, weight decay in the "
            "optimizer; for anything else a method that register_fsdp_forward_method "
            "knows, which reads param[...], or fsdp_jax.unsharded(model)."
        )

    inputs = [
        Value(Piece(i, axes, param.dim))
        if param is not None and param.cut
        else Value(same=not any(axes_of(spec)))
        for i, (param, spec) in enumerate(zip(params, specs, strict=True))
    ]
    found = RawReads(axes, data, refuse).run(closed, inputs)
    places = [(repr(dotted(c.slot.path[2:])), c.slot.managed) for c in outcome.changes]
    places += [("the output", specified) for specified in outcome.specified]
    if call.request.argnums is not None:
        places.insert(outcome.value_at, ("the loss", False))
    # Gradients come last. What they follow from is looked at where it is made.
    for value, (where, pieces_allowed) in zip(found, places, strict=False):
        piece = value.piece
        if piece is not None and (piece.misused or not pieces_allowed):
            raise refuse(piece, where)
