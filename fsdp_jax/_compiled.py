"""Programs that the library compiles itself, and which of them it finds again.

What must not live here: what the programs compute.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, get_opaque_trace_state

from fsdp_jax._callees import equations_inside
from fsdp_jax._culprit import bad_kind
from fsdp_jax._threads import LOCK


def compiled(f: Callable, **options: Any) -> Callable:
    """`jax.jit(f, **options)`, compiled under `jax.disable_jit` too.

    What it is made for, a sharding of the result or the arithmetic of many devices, is
    not to be had operation by operation; and nothing in it is for a user to step into.
    """
    jitted = jax.jit(f, **options)

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        with jax.disable_jit(False):
            return jitted(*args)

    return run


def traces() -> Iterator[Any]:
    """The traces that are going on, the innermost first.

    JAX has no public way to ask. Without its private names there are none.
    """
    trace = getattr(get_opaque_trace_state(), "_trace_ref", lambda: None)()
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def in_one(f: Callable) -> Callable:
    """A function as part of the program that will be compiled; else as its own.

    Eagerly JAX differentiates no shard_map, and in one no `custom_vjp` that is told
    what is not differentiated. What is traced for something else than compilation
    (`checkify`, `jax.checkpoint`) may be evaluated so.
    """
    return f if any(traced_for(t) == "jit" for t in traces()) else compiled(f)


def traced_for(trace: Any) -> str | None:
    """What a trace was made for, as JAX calls it under private names; None if eager."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return getattr(info, "traced_for", None)


_SUB_BYTE = re.compile(r"u?int[124]$|float[46]_")
_KEPT: OrderedDict[Hashable, Any] = OrderedDict()
_MAX_KEPT = 128

# Their lowering refers to Python objects, which a later program with the same text need
# not have: those of effects are found by the effect.
_OF_PYTHON = ("pure_callback", "custom_partitioning", "ffi_call")
_CALLS_PYTHON = re.compile(r"custom_call @\w*(callback|CustomSPMDPartitioning)")


def run_kept(
    f: Callable,
    inputs: list[Any],
    key: Hashable,
    on_bad: Callable[[str], None] = lambda kind: None,
) -> Any:
    """Trace a function of arrays, and run it; compiled only if it was not before.

    It is traced anew in every call, because it may read values that are not arguments.
    Found again is what has the same StableHLO, under the same settings of JAX. Where
    the text does not hold all that runs, such as a callback, nothing is kept.

    Args:
        f: function of a list of concrete arrays.
        inputs: the arrays.
        key: what besides the text tells programs apart.
        on_bad: called where `jax_debug_nans` or `jax_debug_infs` asks for it, with what
            the results hold: `"nan"` or `"inf"`.
    """
    with jax.disable_jit(False):
        # keep_unused: programs that differ in what they ignore must not look alike.
        jitted = jax.jit(f, keep_unused=True)
        if any(_SUB_BYTE.match(str(x.dtype)) for x in inputs):
            return jitted(inputs)  # JAX (0.12) compiles their layouts wrong ahead
        traced = jitted.trace(inputs)
        if len(traced.jaxpr.in_avals) != len(inputs):  # a tracer that has escaped
            return jitted(inputs)  # which JAX refuses
        lowered = traced.lower()
        key = _full_key(traced.jaxpr, lowered, inputs, key)
        with LOCK:
            program = _KEPT.get(key)
        program = program or lowered.compile()
        if key is not None:
            with LOCK:
                _KEPT[key] = program
                _KEPT.move_to_end(key)
                if len(_KEPT) > _MAX_KEPT:
                    _KEPT.popitem(last=False)
        with jax.debug_nans(False), jax.debug_infs(False):  # its error is internal
            results = jax.tree.leaves(program(inputs))
    if kind := bad_kind(results):
        on_bad(kind)
    return jax.tree.unflatten(lowered.out_tree, results)


def _full_key(
    closed: ClosedJaxpr, lowered: Any, inputs: list[Any], key: Hashable
) -> Hashable:
    """What a compiled program is found by; None if it is not to be kept."""
    text = lowered.as_text()
    if closed.effects or _CALLS_PYTHON.search(text):
        return None
    if any(e.primitive.name in _OF_PYTHON for e in equations_inside(closed)):
        return None
    constants = []
    if getattr(jax.config, "jax_use_simplified_jaxpr_constants", True):
        # Then constants are not in the text, but arguments of what was compiled.
        for constant in _constants(closed):
            if not getattr(constant, "is_fully_addressable", True):
                return None
            constants.append(_contents(constant))
    types = tuple(
        (x.shape, x.dtype, getattr(x, "weak_type", False))
        for x in (*map(jax.typeof, inputs), *closed.out_avals)
    )
    settings = tuple(sorted((k, repr(v)) for k, v in jax.config.values.items()))
    return key, text, types, settings, tuple(constants)


def _constants(programs: Any) -> Iterator[Any]:
    """The arrays that are written into the traced programs in a tree."""
    kinds = (ClosedJaxpr, Jaxpr)
    for found in jax.tree.leaves(programs, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(found, ClosedJaxpr):
            yield from found.consts
            found = found.jaxpr
        if isinstance(found, Jaxpr):
            atoms = [*found.outvars, *(v for e in found.eqns for v in e.invars)]
            yield from (v.val for v in atoms if isinstance(v, Literal))
            yield from _constants([list(e.params.values()) for e in found.eqns])


def _contents(constant: Any) -> Hashable:
    sharding = getattr(constant, "sharding", None)
    dtype = getattr(constant, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    array = np.asarray(constant)
    digest = hashlib.sha256(array.tobytes()).digest()
    return str(dtype or array.dtype), array.shape, digest, sharding
