"""Which outputs of a traced program are inputs of it, unchanged.

What must not live here: anything that knows of shards, groups or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

_SAME = ("convert_element_type", "copy", "copy_p", "device_put", "optimization_barrier")


def unchanged(program: ClosedJaxpr | Jaxpr) -> list[int | None]:
    """Per output the input that it is, None for anything else.

    Args:
        program: traced; calls, branches and loops in it are looked into.
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    found: dict[Var, int] = {v: i for i, v in enumerate(jaxpr.invars)}

    def read(atoms: Sequence[Any]) -> list[int | None]:
        return [found.get(v) if isinstance(v, Var) else None for v in atoms]

    for eqn in jaxpr.eqns:
        ins = read(eqn.invars)
        if any(i is not None for i in ins):
            outs = zip(eqn.outvars, _through(eqn), strict=True)
            found.update(
                {v: at for v, i in outs if i is not None and (at := ins[i]) is not None}
            )
    return read(jaxpr.outvars)


def _through(eqn: JaxprEqn) -> list[int | None]:
    """The same for one equation."""
    name, params = eqn.primitive.name, eqn.params
    nothing: list[int | None] = [None] * len(eqn.outvars)
    if name in _SAME:
        pairs = zip(eqn.invars, eqn.outvars)
        alike = [_type(a) == _type(b) for a, b in pairs]
        return [i if same else None for i, same in enumerate(alike)]
    if name == "cond":
        branches = [unchanged(branch) for branch in params["branches"]]
        alike = [each[0] if len({*each}) == 1 else None for each in zip(*branches)]
        return [None if i is None else i + 1 for i in alike]
    if name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        body = unchanged(params["body_jaxpr"])
        inner = params["body_nconsts"]
        return [first + k if i == inner + k else None for k, i in enumerate(body)]
    inner = [p for p in params.values() if isinstance(p, (ClosedJaxpr, Jaxpr))]
    if len(inner) != 1 or name == "shard_map":
        return nothing
    callee = inner[0].jaxpr if isinstance(inner[0], ClosedJaxpr) else inner[0]
    sizes = len(callee.invars), len(callee.outvars)
    if sizes != (len(eqn.invars), len(eqn.outvars)):
        return nothing
    outs = unchanged(callee)
    if name != "scan":
        return outs
    # A carry is the one it was; what the loop stacks is what it took apart. Then the
    # types agree outside of the loop as they do inside.
    carry = sum(map(_is_carried, eqn.outvars, callee.outvars))
    sliced = sum(not _is_carried(a, b) for a, b in zip(eqn.invars, callee.invars))
    first, last = len(eqn.invars) - sliced - carry, len(eqn.invars) - sliced
    return [
        i if i is not None and (i == first + k if k < carry else i >= last) else None
        for k, i in enumerate(outs)
    ]


def _is_carried(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) == len(inside.aval.shape)


def _type(atom: Any) -> tuple[Any, Any]:
    return atom.aval.shape, atom.aval.dtype
