"""Branches and loops in which some devices would wait for ever for the others.

What lives here: finding them in a traced per-device program, and letting the devices
agree. What must not: anything that knows of shards or groups.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fsdp_jax._callees import callee_of, equations_inside, has_rule
from fsdp_jax._collectives import sum_over_devices
from fsdp_jax._dependence import Look, depends_on
from fsdp_jax._evaluate import bind, evaluate
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import is_away, to_rest, to_space
from fsdp_jax._policies import PINNED_HOST
from fsdp_jax._raw_reads import COLLECTIVES

_MOST_NAMED = 3

Decide = Callable[[JaxprEqn], bool | None]


def find_divergence(
    who: str, axes: Sequence[str], decide: Decide, found: dict[int, str]
) -> Look:
    """Make the `look` of a `depends_on` whose marks say what differs between devices.

    XLA runs a branch, or an iteration, only on the devices whose condition says so. A
    collective there waits for all of them.

    Args:
        who: name of the public function, for the error text.
        axes: mesh axes over which the devices of the program lie.
        decide: as for `depends_on`.
        found: receives, by the id of its equation, each `cond` or `switch` outside of
            loops and branches that holds collectives and whose condition may differ,
            and what there is to say about it.

    Raises (from `look`):
        ValueError: there is such a condition in a loop or a branch, or of a loop.
    """

    def text(eqn: JaxprEqn, collectives: Sequence[JaxprEqn]) -> str:
        what, run = {
            "cond": ("cond or switch", "a branch"),
            "while": ("while loop", "an iteration"),
        }[eqn.primitive.name]
        return (
            f"{who}: the condition of a {what} may differ between devices, and {run} "
            f"holds collectives ({_names(collectives)}), in which the devices that do "
            "not run it would be missing for ever. It is at "
            f"{source_info_util.summarize(eqn.source_info)}. Make the condition the "
            f"same on every device (jax.lax.pmax(condition.astype(int), {axes}) > 0), "
            "or gather before it (module.unshard(), for each module that it calls), or "
            "compute both results and choose with jnp.where."
        )

    def look(eqn: JaxprEqn, ins: Sequence[bool], inside: bool = False) -> None:
        name = eqn.primitive.name
        if name not in ("cond", "while"):
            return
        held = equations_inside(eqn.params)
        collectives = [e for e in held if e.primitive.name in COLLECTIVES]
        if not collectives:
            return
        if name == "cond":
            if ins[0] and inside:
                raise ValueError(text(eqn, collectives))
            if ins[0]:
                found[id(eqn)] = text(eqn, collectives)
            within = functools.partial(look, inside=True)
            for branch in eqn.params["branches"]:
                depends_on(branch, ins[1:], decide, into_loops=True, look=within)
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
            raise ValueError(text(eqn, collectives))
        within = functools.partial(look, inside=True)
        depends_on(body, [*consts, *carry], decide, into_loops=True, look=within)

    return look


def run_agreed(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    divergent: Mapping[int, str],
    mesh: MeshInfo,
) -> list[Any]:
    """Run the program of one device with conditions that all devices agree on.

    Where they do not, every floating result is NaN: no device can tell what the others
    would have computed.

    Args:
        closed: the program.
        args: its inputs.
        divergent: as `find_divergence` found it.
        mesh: mesh and the roles of its axes.

    Raises:
        ValueError: there is no floating result to say so, or such a condition is in a
            function with a derivative of its own, which it would lose.
    """
    if not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in closed.out_avals):
        raise ValueError(next(iter(divergent.values())))
    differ = []

    def agree(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        if id(eqn) not in divergent:
            return bind(eqn, values)
        own = jnp.asarray(values[0], jnp.int32)
        total = sum_over_devices(own, mesh, "condition")
        differ.append(own * mesh.num_devices != total)
        agreed = (total // mesh.num_devices).astype(jnp.asarray(values[0]).dtype)
        return bind(eqn, [agreed, *values[1:]])

    def into(eqn: JaxprEqn) -> bool:
        called: Any = callee_of(eqn)
        inside = equations_inside(called)
        found = next((divergent[id(e)] for e in inside if id(e) in divergent), None)
        if found is not None and has_rule(eqn) and not _is_own(called):
            raise ValueError(found)
        return found is not None

    results = evaluate(closed, args, into=into, apply=agree)
    some = functools.reduce(jnp.logical_or, differ, jnp.zeros((), bool))
    wrong = sum_over_devices(some.astype(jnp.int32), mesh, "condition") > 0

    def spoil(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        here = to_space(x, jax.memory.Space.Device) if is_away(x) else x
        spoilt = jnp.where(wrong, jnp.asarray(jnp.nan, here.dtype), here)
        return to_rest(spoilt, PINNED_HOST) if is_away(x) else spoilt

    return [spoil(x) for x in results]


def _is_own(called: ClosedJaxpr) -> bool:
    """Whether a function with a derivative of its own is one of this library.

    Their derivatives are those of what they compute, and only save memory.
    """
    source = called.jaxpr.debug_info.func_src_info
    return f" at {Path(__file__).parent}{os.sep}" in source


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
