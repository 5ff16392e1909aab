"""What an output of a traced program depends on, and evaluating part of one.

What lives here: analysis and partial evaluation of jaxprs. What must not: anything
that knows of shards, groups or devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Look = Callable[..., None]

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


def equations_inside(params: Any) -> Iterator[JaxprEqn]:
    """Every equation of the programs in a tree, such as an equation's parameters."""

    def is_program(x: Any) -> bool:
        return isinstance(x, (ClosedJaxpr, Jaxpr))

    for found in jax.tree.leaves(params, is_leaf=is_program):
        if is_program(found):
            program = found.jaxpr if isinstance(found, ClosedJaxpr) else found
            for eqn in program.eqns:
                yield eqn
                yield from equations_inside(list(eqn.params.values()))


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
        into_loops: whether to look into `scan`, `shard_map` and barriers. No use to
            `evaluate`, which evaluates these as a whole.
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
        if callee := _callee(eqn):
            outs = depends_on(callee, ins, decide, into_loops, look)
        elif into_loops and eqn.primitive.name == "scan":
            outs = _loop_depends_on(eqn, ins, decide, look)
        elif into_loops and eqn.primitive.name == "optimization_barrier":
            outs = ins
        elif into_loops and eqn.primitive.name == "shard_map":
            inner = ClosedJaxpr(eqn.params["jaxpr"], ())
            within = functools.partial(look, inside=True)
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
    if callee := _callee(eqn):
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
        if callee := _callee(eqn):
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
    before: Callable[[JaxprEqn, list[Any]], list[Any]] = lambda eqn, values: values,
) -> list[Any]:
    """Evaluate only the wanted outputs of a traced program.

    Args:
        closed: the traced program.
        args: its inputs; None for those that no wanted output depends on.
        wanted: one mark per output; None for all.
        known: values of variables on the way, which are not computed again.
        before: given an equation and its inputs, returns inputs to apply it to.

    Returns:
        The wanted outputs, in order.
    """
    jaxpr = closed.jaxpr
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts))
    env.update(zip(jaxpr.invars, args, strict=True))
    env.update(known)
    wanted = [True] * len(jaxpr.outvars) if wanted is None else wanted

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env.get(var)

    for eqn, outs in _slice(jaxpr, wanted, known)[0]:
        values = [read(v) for v in eqn.invars]
        if callee := _callee(eqn):
            with _named(eqn):
                results = evaluate(callee, values, outs, before=before)
            env.update(zip([v for v, o in zip(eqn.outvars, outs) if o], results))
            continue
        results = _bind(eqn, before(eqn, values))
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v, w in zip(jaxpr.outvars, wanted) if w]


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


def _bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply one equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
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
        jaxpr = self._closed.jaxpr
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, self._closed.consts))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(eqn: JaxprEqn) -> list[Any]:
            return [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]

        for step in self._steps:
            for v in step.asks:
                env[v], besides = ask(self._asked[v], [env[b] for b in step.besides])
                env.update(zip(step.besides, besides, strict=True))
            for eqn in step.before:
                env.update(zip(eqn.outvars, _bind(eqn, read(eqn)), strict=True))
            if step.eqn is not None:
                results = _bind(step.eqn, read(step.eqn))
                for v in step.asks:
                    results = done(self._asked[v], results)
                env.update(zip(step.eqn.outvars, results, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return list(dict.fromkeys(a for a in atoms if isinstance(a, Var)))
