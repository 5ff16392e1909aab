"""Running a program: traced once, checked, then run on every device, and joined.

What must not live here: what the program computes (`_program`), and what is checked
(`_divergence`, `_raw_reads`, `_streams`, `_annotations`, `_carry`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from fsdp_jax import (
    _annotations,
    _blocks,
    _carry,
    _forward_mode,
    _ordering,
)
from fsdp_jax._call import noting_hidden_tracers
from fsdp_jax._comm import Static
from fsdp_jax._compiled import compiled, in_one, run_kept
from fsdp_jax._culprit import looks_for_bad, raise_found, watched
from fsdp_jax._differing import differ_between_devices
from fsdp_jax._divergence import run_agreed
from fsdp_jax._evaluate import evaluate
from fsdp_jax._join import as_spec
from fsdp_jax._metrics import start_metrics
from fsdp_jax._program import Program, run_local
from fsdp_jax._streams import fold_keys, kept_keys, specs_with_keys
from fsdp_jax._user import Outcome, check_raw_reads

Array = jax.Array


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
    run = functools.partial(_device_program, program)
    specs = program.out_kinds, PartitionSpec()
    results, static = _mapped(program, run, specs)(inputs)
    return _at_rest(program, static.value, results), static


def _mapped(program: Program, run: Callable, out_specs: Any) -> Callable:
    """A function of one device's arrays as one of the program's inputs."""
    mesh = program.mesh
    mapped = jax.shard_map(
        run,
        mesh=mesh.mesh,
        in_specs=(list(program.in_specs),),
        out_specs=out_specs,
        axis_names=set(mesh.data_axes),
        check_vma=False,
    )
    return lambda inputs: mapped(
        [
            _blocks.enter_program(x, p)
            for x, p in zip(inputs, program.params, strict=True)
        ]
    )


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


def execute(program: Program, inputs: list[Any]) -> Any:
    """Run a program: as part of the trace that is going on, or compiled."""
    run = functools.partial(_sharded, program)
    if not any(isinstance(x, Tracer) for x in inputs):
        with noting_hidden_tracers():
            refuse = functools.partial(_refuse, program, inputs)
            return run_kept(run, inputs, program.mesh, refuse)
    if looks_for_bad():
        # What JAX does eagerly about a bad number ends in an error of another kind.
        values = [jax.lax.stop_gradient(x) for x in inputs]
        if not any(isinstance(x, Tracer) for x in values):
            execute(program, values)
    with _forward_mode.refused():
        return in_one(run)(inputs)


def _refuse(program: Program, inputs: list[Array], kind: str) -> None:
    """Raise for bad numbers, and say where they come from."""

    def find(kind: str) -> str | None:
        places: list[str] = []

        def watch(inputs: list[Array]) -> Array:
            closed, held, divergent, *_ = _traced(program, inputs)
            if divergent:
                return jnp.zeros((1, 0), bool)
            places[:], flags = watched(closed, held, kind)
            return flags[None]

        def run(inputs: list[Array]) -> Array:
            return _mapped(program, watch, program.mesh.data_spec())(inputs)

        if jax.process_count() > 1:  # others may have found nothing
            return None
        with jax.debug_nans(False), jax.debug_infs(False):
            flags = np.any(np.asarray(compiled(run)(inputs)), axis=0).tolist()
        return next((p for p, bad in zip(places, flags) if bad), None)

    raise_found(program.call.request.who, kind, find)


def _traced(program: Program, inputs: list[Array]) -> Any:
    """Trace the local program, and see what differs between devices.

    Returns:
        The traced program; its inputs; the conditions that devices have to agree on;
        which results differ, and which are keys as they were; outcome, and stages of
        the gradients.
    """
    found: list[tuple[Outcome, list[tuple[int, str]]]] = []
    inputs = fold_keys(program.call, inputs)

    def local(inputs):
        with _ordering.log():  # inside: it lets go of its arrays before the trace ends
            results, outcome, stages = run_local(program, inputs)
        found.append((outcome, stages))
        return results

    who, axes = program.call.request.who, program.mesh.data_axes
    with _forward_mode.refused(), _annotations.refused(who, axes), _carry.refused(who):
        closed = jax.make_jaxpr(local)(inputs)
    _forward_mode.check(closed)
    _annotations.check(closed, who, axes)
    outcome, stages = found[-1]
    held = start_metrics(program.call, outcome, closed, inputs)
    own = specs_with_keys(program.call, program.in_specs)
    check_raw_reads(program.call, outcome, closed, program.params, own)
    kept = kept_keys(program.call, outcome, closed)
    differs, divergent = differ_between_devices(
        program.call.request, program.mesh, closed, own, program.params
    )
    return closed, held, divergent, differs, kept, outcome, stages


def _device_program(program: Program, inputs: list[Array]) -> Any:
    """Run the local program, and join its results accordingly."""
    found = _traced(program, inputs)
    closed, held, divergent, differs, kept, outcome, stages = found
    if divergent:
        flat = run_agreed(closed, held, divergent, program.mesh)
    else:
        flat = evaluate(closed, held)
    for place, at in kept.items():
        flat[place] = inputs[at]
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
