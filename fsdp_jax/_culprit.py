"""Where a number that is none comes from: `jax_debug_nans` in a per-device program.

What lives here: running a program once more with a check after every equation. What
must not: running it in earnest (`_compiled`), and what it computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fsdp_jax._dependence import carry_of
from fsdp_jax._evaluate import bind, evaluate

Array = jax.Array
_PATH = re.compile(r"(?:module|fsdp:\w+):([^/()\s]+|\(root\))")


_TESTS = {"nan": np.isnan, "inf": np.isinf}


def looks_for_bad() -> list[str]:
    """What `jax_debug_nans` and `jax_debug_infs` ask to look for."""
    return [kind for kind in _TESTS if getattr(jax.config, f"jax_debug_{kind}s")]


def is_bad(x: Any, kind: str) -> Any:
    """Whether an array holds a number that is none: `"nan"` or `"inf"`."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros((), bool)
    test = jnp.isnan if kind == "nan" else jnp.isinf
    return test(jax.device_put(x, jax.memory.Space.Device)).any()


def bad_kind(results: Any) -> str | None:
    """What JAX is to look for and the results hold: `"nan"`, `"inf"`, or None."""
    asked = looks_for_bad()
    for leaf in jax.tree.leaves(results) if asked else ():
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            for shard in leaf.addressable_shards:
                values = np.asarray(shard.data)
                for kind in asked:
                    if _TESTS[kind](values).any():
                        return kind
    return None


def watched(
    closed: ClosedJaxpr, args: Sequence[Any], kind: str
) -> tuple[list[str], Array]:
    """Run a program and see after which equations there are bad numbers.

    Every call and every `scan` is looked into; of an iteration, the first bad one.

    Args:
        closed: the program.
        args: its inputs.
        kind: as for `is_bad`.

    Returns:
        What to call each equation, in order; and whether its results are bad, as an
        array of one bool each.
    """
    places, flags, _ = _watched(closed, args, kind, "")
    return places, flags


def _watched(closed: ClosedJaxpr, args: Sequence[Any], kind: str, outside: str) -> Any:
    places: list[str] = []
    flags: list[Array] = [jnp.zeros(0, bool)]

    def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        if eqn.effects and not eqn.outvars:
            return []  # it happened before
        names = f"{outside}/{source_info_util.current_name_stack()}"
        names = f"{names}/{eqn.source_info.name_stack}"
        if eqn.primitive.name == "scan":
            results, inner, bad = _watched_loop(eqn, values, kind, names)
            places.extend(inner)
            flags.append(bad)
            return results
        results = bind(eqn, values)
        places.append(_place(eqn, names))
        arrays = [x for x in results if hasattr(x, "dtype")]
        flags.append(
            jnp.stack([is_bad(x, kind) for x in arrays] or [False]).any()[None]
        )
        return results

    results = evaluate(closed, args, into=lambda eqn: True, apply=apply)
    return places, jnp.concatenate(flags), results


def _watched_loop(eqn: JaxprEqn, values: list[Any], kind: str, outside: str) -> Any:
    body, carry = eqn.params["jaxpr"], carry_of(eqn)
    places: list[str] = []

    def step(state: Any, xs: Any) -> Any:
        inputs = [*values[: carry.start], *state, *xs]
        places[:], flags, results = _watched(body, inputs, kind, outside)
        num_carry = carry.stop - carry.start
        return results[:num_carry], (results[num_carry:], flags)

    state, (stacked, flags) = jax.lax.scan(
        step,
        values[carry],
        values[carry.stop :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    flags = flags[::-1] if eqn.params["reverse"] else flags
    first = flags[jnp.argmax(flags.any(1))] if flags.size else flags.any(0)
    return [*state, *stacked], places, first


def _place(eqn: JaxprEqn, names: str) -> str:
    """What an equation is called in an error."""
    found = _PATH.findall(names)
    way = "the backward" if "transpose(" in names else "the forward"
    module = f" of module {found[-1]!r}" if found else ""
    line = source_info_util.summarize(eqn.source_info)
    return f"{eqn.primitive.name}, in {way}{module}, at {line}"


def raise_found(who: str, kind: str, find: Callable[[str], str | None]) -> None:
    """Raise for bad results.

    Args:
        who: name of the public function.
        kind: as `bad_kind` says.
        find: runs the program once more for it; returns a place, None if nothing is
            found that way.

    Raises:
        FloatingPointError: always.
    """
    place = find(kind)
    place = f"in {place}" if place else "in the results"
    raise FloatingPointError(f"{who}: invalid value ({kind}) encountered {place}.")
