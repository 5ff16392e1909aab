"""What an output of a traced program depends on.

What lives here: analysis of jaxprs. What must not: evaluating them (`_evaluate`), and
anything that knows of shards, groups or devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from fsdp_jax._callees import callee_of, closed_of, is_plain

Look = Callable[..., None]


def depends_on(
    closed: ClosedJaxpr,
    inputs: Sequence[bool],
    decide: Callable[[JaxprEqn], bool | None] = lambda eqn: bool(eqn.effects) or None,
    into_loops: bool = False,
    look: Look = lambda eqn, ins, inside=False: None,
) -> list[bool]:
    """Tell which outputs depend on the marked inputs.

    Errs on the side of True: an equation that is not looked into (a branch, a loop)
    passes any dependence on to all its outputs.

    Args:
        closed: the traced program. Constants that are tracers count as marked.
        inputs: one mark per input.
        decide: says of an equation that its outputs are marked (True), are not,
            whatever goes in (False), or follow from its inputs (None). By default a
            side effect marks them.
        into_loops: whether to look into all that `evaluate` binds whole: `scan`,
            `shard_map`, barriers, checkpoints, and calls with derivatives of their own.
        look: called with every equation that is met and the marks of its inputs; in a
            loop with `inside=True`, and maybe more than once, with more marks.

    Returns:
        One mark per output.
    """
    jaxpr = closed.jaxpr
    marked: set[Var] = set()
    for var, const in zip(jaxpr.constvars, closed.consts):
        if isinstance(const, Tracer):
            marked.add(var)
    marked.update(v for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark)
    for eqn in jaxpr.eqns:
        ins = [isinstance(v, Var) and v in marked for v in eqn.invars]
        look(eqn, ins)
        callee = callee_of(eqn)
        if callee and (into_loops or is_plain(eqn)):
            outs = depends_on(callee, ins, decide, into_loops, look)
        elif into_loops and eqn.primitive.name == "scan":
            outs = _loop_depends_on(eqn, ins, decide, look)
        elif into_loops and eqn.primitive.name == "optimization_barrier":
            outs = ins
        elif into_loops and eqn.primitive.name == "shard_map":
            within = functools.partial(look, inside=True)
            inner = closed_of(eqn.params["jaxpr"])
            outs = depends_on(inner, ins, decide, into_loops, within)
        else:
            hit = decide(eqn)
            if hit is None:
                hit = any(ins)
            outs = [hit] * len(eqn.outvars)
        marked.update(v for v, mark in zip(eqn.outvars, outs, strict=True) if mark)
    return [isinstance(v, Var) and v in marked for v in jaxpr.outvars]


def _same_rank(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) == len(inside.aval.shape)


def _loop_depends_on(
    eqn: JaxprEqn, ins: list[bool], decide: Any, look: Look
) -> list[bool]:
    """The same for a scan: its carry is marked if any iteration marks it."""
    body, carry = eqn.params["jaxpr"], carry_of(eqn)
    look = functools.partial(look, inside=True)
    while True:
        outs = depends_on(body, ins, decide, True, look)
        now = [a or b for a, b in zip(ins[carry], outs)]
        if now == ins[carry]:
            return [*now, *outs[len(now) :]]
        ins = [*ins[: carry.start], *now, *ins[carry.stop :]]


def carry_of(eqn: JaxprEqn) -> slice:
    """The inputs of a scan that are its carry; its constants come before."""
    body = eqn.params["jaxpr"]
    # By shapes, as the names of the parameters changed (jax 0.12): what is sliced or
    # stacked has one dim less inside of the loop.
    num_carry = sum(map(_same_rank, eqn.outvars, body.jaxpr.outvars))
    num_sliced = len(eqn.invars) - sum(map(_same_rank, eqn.invars, body.jaxpr.invars))
    num_consts = len(eqn.invars) - num_sliced - num_carry
    return slice(num_consts, num_consts + num_carry)


FREE, ADDED, OTHER = range(3)
_SAME_VALUE = ("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape")


def added_to(closed: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
    """Tell which outputs are an input with something added that is free of it.

    Args:
        closed: the traced program.
        inputs: ADDED for the input in question, FREE for others.

    Returns:
        Per output FREE of the input, ADDED to it, or OTHER: anything else.
    """
    jaxpr = closed.jaxpr
    found: dict[Var, int] = {
        v: OTHER
        for v, const in zip(jaxpr.constvars, closed.consts)
        if isinstance(const, Tracer)
    }
    found.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms: Sequence[Any]) -> list[int]:
        return [found.get(v, FREE) if isinstance(v, Var) else FREE for v in atoms]

    for eqn in jaxpr.eqns:
        ins = read(eqn.invars)
        outs = _added_by(eqn, ins) if any(ins) else [FREE] * len(eqn.outvars)
        found.update(zip(eqn.outvars, outs, strict=True))
    return read(jaxpr.outvars)


def _added_by(eqn: JaxprEqn, ins: list[int]) -> list[int]:
    """The same for one equation that reads something that is not FREE."""
    name = eqn.primitive.name
    if callee := callee_of(eqn):
        return added_to(callee, ins)
    if name == "scan":
        return _added_in_loop(eqn, ins)
    if name == "cond" and ins[0] == FREE:
        branches = [added_to(branch, ins[1:]) for branch in eqn.params["branches"]]
        return [each[0] if len({*each}) == 1 else OTHER for each in zip(*branches)]
    if name in ("optimization_barrier", "device_put"):
        return ins
    if name in ("add", "add_any") and sorted(ins) == [FREE, ADDED]:
        return [ADDED]
    if name == "sub" and ins == [ADDED, FREE]:
        return [ADDED]
    before: Any = eqn.invars[0].aval
    after: Any = eqn.outvars[0].aval
    if name in _SAME_VALUE and before.update(weak_type=after.weak_type) == after:
        return ins[:1]
    return [OTHER] * len(eqn.outvars)


def _added_in_loop(eqn: JaxprEqn, ins: list[int]) -> list[int]:
    """The same for a scan: what every iteration adds to is added to."""
    body, carry = eqn.params["jaxpr"], carry_of(eqn)
    ins = [*ins[: carry.stop], *[OTHER if i else FREE for i in ins[carry.stop :]]]
    while True:
        outs = added_to(body, ins)
        now = [a if a == b else OTHER for a, b in zip(ins[carry], outs)]
        if now == ins[carry]:
            return [*now, *[OTHER if mark else FREE for mark in outs[len(now) :]]]
        ins = [*ins[: carry.start], *now, *ins[carry.stop :]]
