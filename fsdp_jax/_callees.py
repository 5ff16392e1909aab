"""Programs inside of the equations of a traced program.

What must not live here: what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# Calls that are no more than their body: an einsum, or a user's jitted helper, mixes
# parameters and activations behind one equation.
_PLAIN = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
# Calls that say how their body is differentiated.
_RULED = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "eval_jaxpr": "call_jaxpr",  # a loop in a checkpoint (jax 0.12)
}


# With jax_custom_vjp3 and jax_remat3 custom_vjp and checkpoint are one primitive that
# holds the program in an object.
_HIGHER = "_prim"


def _of_higher(primitive: Any) -> Any:
    traced = getattr(primitive, "traced", None)  # of custom_vjp
    return getattr(primitive if traced is None else traced, "jaxpr", None)


def closed_of(program: Any) -> ClosedJaxpr:
    """A program with its constants, whether it was held with them or has none.

    Since jax 0.12 both are one class.
    """
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


def callee_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that a call-like equation runs, None for any other equation."""
    key = (_PLAIN | _RULED).get(eqn.primitive.name)
    if key is not None:
        callee = eqn.params[key]
    elif _HIGHER in eqn.params:
        callee = _of_higher(eqn.params[_HIGHER])
    else:
        return None
    callee = None if callee is None else closed_of(callee)
    known = callee is not None and len(callee.jaxpr.invars) == len(eqn.invars)
    return callee if known or key is not None else None


def is_plain(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call that can be replaced by what it calls."""
    return eqn.primitive.name in _PLAIN


def has_rule(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call with derivatives of its own."""
    if _HIGHER in eqn.params:
        return getattr(eqn.params[_HIGHER], "traced", None) is not None
    return eqn.primitive.name.startswith("custom_") and eqn.primitive.name in _RULED


def equations_inside(params: Any) -> Iterator[JaxprEqn]:
    """Every equation of the programs in a tree, such as an equation's parameters."""

    def is_program(x: Any) -> bool:
        return isinstance(x, (ClosedJaxpr, Jaxpr))

    if isinstance(params, Mapping) and _HIGHER in params:
        params = _of_higher(params[_HIGHER])
    for found in jax.tree.leaves(params, is_leaf=is_program):
        if is_program(found):
            program = found.jaxpr if isinstance(found, ClosedJaxpr) else found
            for eqn in program.eqns:
                yield eqn
                yield from equations_inside(eqn.params)
