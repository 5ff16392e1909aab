"""Branches and loops in which some devices would wait for ever for the others.

What lives here: finding them in a traced per-device program. What must not: anything
that knows of shards, groups or meshes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from fsdp_jax._dependence import depends_on, equations_inside

_COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant "
    "reduce_scatter ppermute pgather all_to_all ragged_all_to_all".split()
)
_MOST_NAMED = 3

Decide = Callable[[JaxprEqn], bool | None]


def refuse_divergence(
    who: str, axes: Sequence[str], decide: Decide
) -> Callable[[JaxprEqn, Sequence[bool]], None]:
    """Make the `look` of a `depends_on` whose marks say what differs between devices.

    XLA runs a branch, or an iteration, only on the devices whose condition says so. A
    collective there waits for all of them.

    Args:
        who: name of the public function, for the error text.
        axes: mesh axes over which the devices of the program lie.
        decide: as for `depends_on`.

    Raises (from `look`):
        ValueError: the condition of a branch or loop that holds collectives may differ
            between devices.
    """

    def refuse(eqn: JaxprEqn, inside: Sequence[JaxprEqn]) -> None:
        what, run = {
            "cond": ("cond or switch", "a branch"),
            "while": ("while loop", "an iteration"),
        }[eqn.primitive.name]
        raise ValueError(
            f"{who}: the condition of a {what} may differ between devices, and {run} "
            f"holds collectives ({_names(inside)}), in which the devices that do not "
            "run it would be missing for ever. It is at "
            f"{source_info_util.summarize(eqn.source_info)}. Make the condition the "
            f"same on every device (jax.lax.pmax(condition.astype(int), {axes}) > 0), "
            "or gather before it (module.unshard(), for each module that it calls), or "
            "compute both results and choose with jnp.where."
        )

    def look(eqn: JaxprEqn, ins: Sequence[bool]) -> None:
        name = eqn.primitive.name
        if name not in ("cond", "while"):
            return
        found = equations_inside(eqn.params)
        inside = [e for e in found if e.primitive.name in _COLLECTIVES]
        if not inside:
            return
        if name == "cond":
            if ins[0]:
                refuse(eqn, inside)
            for branch in eqn.params["branches"]:
                depends_on(branch, ins[1:], decide, into_loops=True, look=look)
            return
        condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        own, consts, carry = ins[:first], ins[first:last], list(ins[last:])
        while True:
            outs = depends_on(body, [*consts, *carry], decide, into_loops=True)
            now = [a or b for a, b in zip(carry, outs, strict=True)]
            if now == carry:
                break
            carry = now
        if any(depends_on(condition, [*own, *carry], decide, into_loops=True)):
            refuse(eqn, inside)
        depends_on(body, [*consts, *carry], decide, into_loops=True, look=look)

    return look


def _names(collectives: Sequence[JaxprEqn]) -> str:
    """What collectives are called: `fsdp:gather:blocks.3`, or else by the primitive."""
    found = []
    for eqn in collectives:
        named = re.findall(r"fsdp:\w+:[\w.()]*", str(eqn.source_info.name_stack))
        name = named[-1] if named else eqn.primitive.name
        name += "(root)" if name.endswith(":") else ""
        if name not in found:
            found.append(name)
    more = len(found) - _MOST_NAMED
    return ", ".join(found[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
