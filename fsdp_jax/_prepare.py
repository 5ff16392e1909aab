"""Putting a program together: what is differentiated, reduced, added, sliced.

What must not live here: running it (`_program`), and finding what the user's arguments
hold (`_batch`, `_wrt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fsdp_jax import _arguments
from fsdp_jax._microbatch import Slices
from fsdp_jax._pending import check_pending
from fsdp_jax._program import Diff, Program
from fsdp_jax._stages import Reduction, reductions_of
from fsdp_jax._state import group_of, sharded_modules, state_of
from fsdp_jax._user import Call
from fsdp_jax._wrt import Selection, slots_by_variable


def plan_program(
    call: Call,
    nodes: Sequence[Any],
    arg_specs: Sequence[PartitionSpec],
    chosen: Selection | None,
    pending: Any,
) -> tuple[Program, list[jax.Array]]:
    """Make the program of a call.

    Args:
        call: of the user's function.
        nodes: all nodes in its arguments.
        arg_specs: one per array of the arguments.
        chosen: what is differentiated; None if nothing is.
        pending: gradients to add, or None.

    Returns:
        The program, and the pending gradients in the order in which it takes them.

    Raises:
        As `check_pending`.
    """
    mesh, request, variables = call.mesh, call.request, call.variables
    specs = [*[slot.spec for slot in variables], *arg_specs]
    params = [*[slot.param for slot in variables], *[None] * len(arg_specs)]
    kinds = {PartitionSpec(), mesh.data_spec(), *specs}
    kinds.update(s for s in request.out_specs.leaves if s is not None)
    if chosen is None:
        program = Program(
            call, tuple(specs), tuple(params), (), (), (), (), None, _sorted(kinds)
        )
        return program, []
    entries = {entry.name: entry for entry in chosen.entries}
    if pending is not None:
        pending = check_pending(request.who, pending, request.reduction, entries, mesh)
    num_slices = request.num_microbatches
    averages = request.reduction == "mean"
    stages = pending.stages if pending is not None else [{}, {}, {}]
    reductions = reductions_of(
        nodes, chosen.variables, averages, stages, complete=num_slices > 1
    )
    diff = _diffs(chosen, reductions, len(variables))
    keys = tuple((stage, n) for stage, grads in enumerate(stages) for n in grads)
    dims = [
        (len(variables) + i, _arguments.cut_dim(s)) for i, s in enumerate(arg_specs)
    ]
    of_args = [(at, dim) for at, dim in dims if dim is not None]
    if num_slices > 1 and not of_args:
        raise ValueError(
            f"{request.who}: num_microbatches={num_slices}, but no argument is cut "
            "over the devices, so there is nothing to slice. Pass the batch as an "
            "argument."
        )
    of_caches = [(i, s.rows) for i, s in enumerate(variables) if s.rows is not None]
    sliced = (*of_caches, *of_args)
    slices = Slices(num_slices, sliced, tuple(d.at for d in diff))
    kinds.update(e.stage_spec(i, mesh) for e in entries.values() for i in range(3))
    program = Program(
        call,
        (*specs, *[entries[n].stage_spec(stage, mesh) for stage, n in keys]),
        (*params, *[entries[n].param if stage else None for stage, n in keys]),
        diff,
        reductions,
        keys,
        _kept(call, nodes, len(reductions)) if num_slices > 1 else (),
        slices if num_slices > 1 else None,
        _sorted(kinds),
    )
    return program, [stages[stage][n] for stage, n in keys]


def _sorted(kinds: set[PartitionSpec]) -> tuple[PartitionSpec, ...]:
    return tuple(sorted(kinds, key=str))


def _diffs(
    chosen: Selection, reductions: Sequence[Reduction], num_state: int
) -> tuple[Diff, ...]:
    """What is differentiated, and where its gradient goes."""
    groups = {
        name: (reduction, i)
        for reduction in reductions
        for i, name in enumerate(reduction.names)
    }
    found = []
    for at, entry in zip(chosen.positions, chosen.entries, strict=True):
        if at >= num_state:  # an argument, which no group reduces
            found.append(Diff(at, entry, False, "", None, None, (1.0, 1.0, 1.0)))
            continue
        reduction, i = groups[entry.name]
        comm, dtype = reduction.comm, reduction.dtypes[i]
        divisors = (1.0, comm.divisors[0], comm.exit_divisor)
        wide = comm.sum_dtype(dtype)
        found.append(Diff(at, entry, True, comm.defer, wide, dtype, divisors))
    return tuple(found)


def _kept(
    call: Call, nodes: Sequence[Any], num_reductions: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per reduction, the members to keep gathered."""
    slot_of = slots_by_variable(nodes, call.variables)
    kept = []
    for module in (m for node in nodes for m in sharded_modules(node)):
        group = group_of(module)
        pairs = [
            (i, slot_of[id(v)])
            for i, (v, spec) in enumerate(zip(group.variables, group.specs))
            if spec.cut and not state_of(module).reshard_after_backward
        ]
        kept.append(tuple(pairs))
    return (*kept, *[()] * (num_reductions - len(kept)))
