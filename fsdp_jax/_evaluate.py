"""Evaluating a traced program once more.

What lives here: the one interpreter of jaxprs. What must not: what an output depends
on (`_dependence`), and anything that knows of shards, groups or devices.

A program is evaluated as it was traced: every equation, in order, with its effects, its
names and its line of code. What an equation calls is not looked into, so that a
`jax.checkpoint` stays one, and a function keeps the derivative that it was given. Only
what a caller asks for in so many words departs from that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fsdp_jax._callees import callee_of, is_plain


class _Values:
    """What the variables of a program stand for while it is evaluated.

    Args:
        closed: the program.
        args: its inputs.
    """

    def __init__(self, closed: ClosedJaxpr, args: Sequence[Any]):
        self._closed = closed
        self._values: dict[Var, Any] = {}
        self.write(closed.jaxpr.constvars, closed.consts)
        self.write(closed.jaxpr.invars, args)

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        self._values.update(zip(variables, values, strict=True))

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """Values; None for variables that nothing was written to."""
        return [a.val if isinstance(a, Literal) else self._values.get(a) for a in atoms]

    def outputs(self, wanted: Sequence[bool] | None = None) -> list[Any]:
        """The outputs of the program, constant ones as arrays like all others."""
        outputs = self._closed.jaxpr.outvars
        if wanted is not None:
            outputs = [v for v, w in zip(outputs, wanted, strict=True) if w]
        return list(map(_as_array, outputs, self.read(outputs)))


def _as_array(atom: Any, value: Any) -> Any:
    """A constant as an array; NNX, among others, takes a bare number for no state."""
    dtype = getattr(atom.aval, "dtype", None)
    if isinstance(value, jax.Array) or dtype in (None, jax.dtypes.float0):
        return value
    if atom.aval.weak_type and not atom.aval.shape:
        weak = jnp.asarray(np.asarray(value).item())
        if weak.dtype == dtype:
            return weak
    return jnp.asarray(value, dtype)


def _slice(
    jaxpr: Jaxpr, wanted: Sequence[bool], known: Container[Var] = ()
) -> tuple[list[tuple[JaxprEqn, list[bool]]], set[Var]]:
    """The equations that the wanted outputs need, in order, and the variables read."""
    outputs = zip(jaxpr.outvars, wanted, strict=True)
    needed = {v for v, w in outputs if w and isinstance(v, Var)}
    chosen = []
    for eqn in reversed(jaxpr.eqns):
        outs = [v in needed and v not in known for v in eqn.outvars]
        if not any(outs):
            continue
        reads = [True] * len(eqn.invars)
        callee = callee_of(eqn)
        if callee and is_plain(eqn):
            _, inner = _slice(callee.jaxpr, outs)
            reads = [v in inner for v in callee.jaxpr.invars]
        needed.update(v for v, r in zip(eqn.invars, reads) if r and isinstance(v, Var))
        chosen.append((eqn, outs))
    return chosen[::-1], needed


def evaluate(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    wanted: Sequence[bool] | None = None,
    known: Mapping[Var, Any] = MappingProxyType({}),
    into: Callable[[JaxprEqn], bool] = lambda eqn: False,
    apply: Callable[[JaxprEqn, list[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Evaluate a traced program, as it is or part of it.

    Args:
        closed: the traced program.
        args: its inputs; None for those that no wanted output depends on.
        wanted: one mark per output, to evaluate only what these need. Effects that
            nothing wanted needs are left out, and plain calls are looked into. None:
            all outputs and all effects.
        known: with `wanted`: values of variables on the way, not computed again.
        into: says of a call whether to evaluate what it calls in its place. Then a rule
            for its derivative is lost, and a checkpoint undone.
        apply: applies an equation to its inputs, in place of `bind`. Not asked of calls
            that are looked into.

    Returns:
        The outputs, or the wanted ones, in order.
    """
    values = _Values(closed, args)
    steps: Sequence[tuple[JaxprEqn, list[bool] | None]]
    if wanted is None:
        steps = [(eqn, None) for eqn in closed.jaxpr.eqns]
    else:
        values.write([*known], [*known.values()])
        steps, _ = _slice(closed.jaxpr, wanted, known)
    for eqn, outs in steps:
        inputs, callee = values.read(eqn.invars), callee_of(eqn)
        sliced = outs is not None and is_plain(eqn)
        if callee and (sliced or into(eqn)):
            outs = outs if sliced else None
            with _named(eqn):
                results = evaluate(callee, inputs, outs, into=into, apply=apply)
            outputs = zip(eqn.outvars, outs or [True] * len(eqn.outvars))
            values.write([v for v, o in outputs if o], results)
        else:
            values.write(eqn.outvars, (apply or bind)(eqn, inputs))
    return values.outputs(wanted)


def with_outputs(closed: ClosedJaxpr, outputs: Sequence[Var]) -> ClosedJaxpr:
    """The same program with other variables of it as its outputs."""
    names = closed.jaxpr.debug_info._replace(result_paths=None)  # of the old outputs
    jaxpr = closed.jaxpr.replace(outvars=list(outputs), debug_info=names)
    return ClosedJaxpr(jaxpr, closed.consts)


@contextlib.contextmanager
def _named(eqn: JaxprEqn) -> Iterator[None]:
    """Keep the scopes and the line of code that an equation was traced under."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names):
        yield


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply one equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    if eqn.primitive.name == "pvary":  # values may vary already that did not before
        varying = jax.typeof(values[0]).mat.varying
        axes = tuple(a for a in params["axes"] if a not in varying)
        if not axes:
            return list(values)
        params = {**params, "axes": axes}
    with _named(eqn), eqn.ctx.manager:
        result = eqn.primitive.bind(*values, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


@dataclasses.dataclass(frozen=True)
class _Step:
    """An equation of a program that asks for inputs, or None for its outputs.

    Attributes:
        eqn: the equation.
        before: those that had waited for it.
        asks: inputs that nothing before it needed.
        besides: what else it reads.
    """

    eqn: JaxprEqn | None
    before: list[JaxprEqn]
    asks: list[Var]
    besides: list[Var]


class Asking:
    """A traced program that asks for some of its inputs only when it needs them.

    Equations keep their order, but what follows from those inputs alone (a cast, a
    transpose) waits until the first equation that needs it.

    Args:
        closed: the traced program.
        asked: positions of the inputs to ask for.

    Attributes:
        order: those of `asked` that are read, in that order.
    """

    def __init__(self, closed: ClosedJaxpr, asked: Sequence[int]):
        jaxpr = closed.jaxpr
        self._closed = closed
        self._asked = {jaxpr.invars[i]: i for i in asked}
        self._steps: list[_Step] = []
        self.order: list[int] = []
        # What follows from the asked inputs alone, and the equation that it waits for.
        waiting: dict[Var, JaxprEqn | None] = dict.fromkeys(self._asked)

        def need(reads: list[Var], step: _Step) -> None:
            stack: list[Var | JaxprEqn] = [*reads[::-1]]
            while stack:
                top = stack.pop()
                if not isinstance(top, Var):  # all that it reads is there
                    step.before.append(top)
                    continue
                if top in self._asked and self._asked[top] not in self.order:
                    self.order.append(self._asked[top])
                    step.asks.append(top)
                if (eqn := waiting.get(top)) is not None:
                    waiting.update(dict.fromkeys(eqn.outvars))
                    stack += [eqn, *_variables(eqn.invars)[::-1]]

        for eqn in [*jaxpr.eqns, None]:
            reads = _variables(jaxpr.outvars if eqn is None else eqn.invars)
            follows = bool(reads) and all(v in waiting for v in reads)
            if eqn is not None and follows and not eqn.effects:
                waiting.update(dict.fromkeys(eqn.outvars, eqn))
                continue
            step = _Step(eqn, [], [], [v for v in reads if v not in waiting])
            need(reads, step)
            self._steps.append(step)

    def __call__(
        self,
        args: Sequence[Any],
        ask: Callable[[int, list[Any]], tuple[Any, list[Any]]],
        done: Callable[[int, list[Any]], list[Any]],
    ) -> list[Any]:
        """Evaluate the program.

        Args:
            args: its inputs; anything in the places to ask for.
            ask: from a position and what else is read together with that input, to the
                input, and what to use in place of the others from here on. Called once
                for each of `order`.
            done: from the same position and what was computed of the input, to what to
                use in place of the latter.

        Returns:
            All outputs.
        """
        values = _Values(self._closed, args)
        for step in self._steps:
            for v in step.asks:
                arrived, besides = ask(self._asked[v], values.read(step.besides))
                values.write([v, *step.besides], [arrived, *besides])
            for eqn in step.before:
                values.write(eqn.outvars, bind(eqn, values.read(eqn.invars)))
            if step.eqn is not None:
                results = bind(step.eqn, values.read(step.eqn.invars))
                for v in step.asks:
                    results = done(self._asked[v], results)
                values.write(step.eqn.outvars, results)
        return values.outputs()


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return list(dict.fromkeys(a for a in atoms if isinstance(a, Var)))
