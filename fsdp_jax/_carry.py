"""Loops and branches whose types a group's casts make unequal: said with advice.

What must not live here: the casts (`_precision`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

import jax.numpy as jnp

from fsdp_jax._policies import MixedPrecisionPolicy

_Calls = list[tuple[str, MixedPrecisionPolicy]]
_CALLS: ContextVar[_Calls | None] = ContextVar("calls", default=None)
_UNEQUAL = re.compile(r"^(scan|while_loop|cond|switch)\b.* must have equal ")
_TYPES = re.compile(r"has type (\w+)\[.*?has type (\w+)\[", re.DOTALL)


@contextlib.contextmanager
def refused(who: str) -> Iterator[None]:
    """Say it in our words if a group that was called in a loop changed its types.

    Args:
        who: what runs, for the error.

    Raises:
        TypeError: JAX did, and the call of a group inside casts to one of the types.
    """
    outer, calls = _CALLS.get(), []
    token = _CALLS.set(calls)
    try:
        yield
    except TypeError as error:
        text = _advice(who, str(error), calls)
        if text is None:
            raise
        raise TypeError(text) from error
    finally:
        _CALLS.reset(token)
        if outer is not None:
            outer += calls


def note_call(name: str, policy: MixedPrecisionPolicy) -> None:
    """Note that the module of a group was called."""
    calls = _CALLS.get()
    if calls is not None and _cast_to(policy) is not None:
        calls.append((name, policy))


def _cast_to(policy: MixedPrecisionPolicy) -> str | None:
    """The dtype of what a call returns because of its policy."""
    casts_in = policy.param_dtype is not None and policy.cast_forward_inputs
    dtype = policy.output_dtype or (policy.param_dtype if casts_in else None)
    return None if dtype is None else jnp.dtype(dtype).name


def _advice(who: str, text: str, calls: _Calls) -> str | None:
    what, types = _UNEQUAL.match(text), _TYPES.search(text)
    if what is None or types is None:
        return None
    # The loop has been traced just now: the last call that can be to blame is.
    for name, policy in reversed(calls):
        dtype = _cast_to(policy)
        if dtype in types.groups():
            first, second = types.groups()
            other = second if first == dtype else first
            return (
                f"{who}: a {what[1]} calls the module {name!r}, whose "
                f"MixedPrecisionPolicy makes its outputs {dtype}, and needs {other} "
                "there: a carry keeps its type, and all branches have one. Give that "
                f"policy output_dtype=jnp.{other} or cast_forward_inputs=False, or "
                f"start with {dtype}."
            )
    return None
