"""What an output of a traced program depends on, and evaluating part of one.

What lives here: analysis and partial evaluation of jaxprs. What must not: anything
that knows of shards, groups or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Call-like primitives whose body is looked into: an einsum, or a user's jitted helper,
# mixes parameters and activations behind one equation.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def _callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    key = _CALLS.get(eqn.primitive.name)
    if key is None:
        return None
    callee = eqn.params[key]
    return ClosedJaxpr(callee, ()) if isinstance(callee, Jaxpr) else callee


def depends_on(
    closed: ClosedJaxpr,
    inputs: Sequence[bool],
    decide: Callable[[JaxprEqn], bool | None] = lambda eqn: None,
) -> list[bool]:
    """Tell which outputs depend on the marked inputs.

    Errs on the side of True: an equation that is not looked into (a loop, a branch)
    passes any dependence on to all its outputs, and so does one with a side effect.

    Args:
        closed: the traced program. Constants that are tracers count as marked.
        inputs: one mark per input.
        decide: says of an equation that its outputs are marked (True), are not,
            whatever goes in (False), or follow from its inputs (None).

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
        if callee := _callee(eqn):
            outs = depends_on(callee, ins, decide)
        else:
            hit = decide(eqn)
            if hit is None:
                hit = any(ins) or bool(eqn.effects)
            outs = [hit] * len(eqn.outvars)
        marked.update(v for v, mark in zip(eqn.outvars, outs, strict=True) if mark)
    return [isinstance(v, Var) and v in marked for v in jaxpr.outvars]


def _slice(
    jaxpr: Jaxpr, wanted: Sequence[bool]
) -> tuple[list[tuple[JaxprEqn, list[bool]]], set[Var]]:
    """The equations that the wanted outputs need, in order, and the variables read."""
    outputs = zip(jaxpr.outvars, wanted, strict=True)
    needed = {v for v, w in outputs if w and isinstance(v, Var)}
    chosen = []
    for eqn in reversed(jaxpr.eqns):
        outs = [v in needed for v in eqn.outvars]
        if not any(outs):
            continue
        reads = [True] * len(eqn.invars)
        if callee := _callee(eqn):
            _, inner = _slice(callee.jaxpr, outs)
            reads = [v in inner for v in callee.jaxpr.invars]
        needed.update(v for v, r in zip(eqn.invars, reads) if r and isinstance(v, Var))
        chosen.append((eqn, outs))
    return chosen[::-1], needed


def evaluate(
    closed: ClosedJaxpr, args: Sequence[Any], wanted: Sequence[bool]
) -> list[Any]:
    """Evaluate only the wanted outputs of a traced program.

    Args:
        closed: the traced program.
        args: its inputs; None for those that no wanted output depends on.
        wanted: one mark per output.

    Returns:
        The wanted outputs, in order.
    """
    jaxpr = closed.jaxpr
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env.get(var)

    for eqn, outs in _slice(jaxpr, wanted)[0]:
        values = [read(v) for v in eqn.invars]
        if callee := _callee(eqn):
            results = evaluate(callee, values, outs)
            env.update(zip([v for v, o in zip(eqn.outvars, outs) if o], results))
            continue
        params = eqn.primitive.get_bind_params(eqn.params)
        with eqn.ctx.manager:
            result = eqn.primitive.bind(*values, **params)
        results = result if eqn.primitive.multiple_results else [result]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v, w in zip(jaxpr.outvars, wanted) if w]
