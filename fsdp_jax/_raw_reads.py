"""What a program computes with raw shards, as if they were the parameters.

In a per-device program a raw value of the model (`nnx.state`, `jax.tree.leaves`) is one
device's piece of a parameter. With pieces a program may do what it would do with the
parameter as well: combine them element by element with one another and with scalars,
put them into a module, which gathers them, and return them where pieces are known to
be. All else, a sum, a product with activations, noise of a piece's shape, would give
another number than the whole parameter: it is found in the traced program and refused.

What must not live here: how results of the program are joined (`_join`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from fsdp_jax._dependence import carry_of

# What makes every element of the elements in the same place.
ELEMENTWISE = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type copy "
    "cos div eq erf exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p "
    "logistic lt max min mul ne neg not or pow real rem round rsqrt select_n sign sin "
    "sqrt square stop_gradient sub tanh xor".split()
)

# Part of the names of all that the library itself does with shards.
SCOPE = "fsdp_shards"
_NAMED = (SCOPE, "fsdp:")


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a value in the program of one device has of a parameter.

    Attributes:
        source: which input of the program, or which collective, it comes from.
        axes: mesh axes over which it is still cut.
        misused: where it was first used as only a whole parameter may be; "" if not.
    """

    source: int | str
    axes: frozenset[str]
    misused: str = ""


Found = Piece | None


def raw_reads(
    closed: ClosedJaxpr,
    inputs: Sequence[Found],
    shard_axes: frozenset[str],
    refuse: Callable[[Piece], Exception],
) -> list[Found]:
    """Tell which outputs of a program of one device are, or depend on, pieces.

    Args:
        closed: the program.
        inputs: the piece that each input is, None for whole arrays.
        shard_axes: mesh axes over which parameters are cut.
        refuse: makes the error for a piece that was misused before it is gathered.

    Returns:
        One per output.
    """
    return _Reader(shard_axes, refuse).run(closed, list(inputs), False)


_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
}
_SAME_VALUES = frozenset(
    "reshape squeeze expand_dims transpose optimization_barrier device_put copy copy_p "
    "sharding_constraint reshard pvary concatenate split reduce_precision "
    "convert_element_type".split()
)
_GATHERS = ("all_gather", "all_gather_invariant")
_SUMS = ("psum", "psum_invariant", "psum2", "pmax", "pmin")


class _Reader:
    def __init__(self, shard_axes: frozenset[str], refuse: Callable) -> None:
        self._axes, self._refuse = shard_axes, refuse

    def run(self, closed: ClosedJaxpr, inputs: list[Found], ours: bool) -> list[Found]:
        """The same as `raw_reads`, for any program in the program."""
        jaxpr = closed.jaxpr
        found: dict[Var, Piece] = {
            v: p for v, p in zip(jaxpr.invars, inputs, strict=True) if p is not None
        }
        uniform: set[Var] = set()  # arrays all of whose elements are the same

        def read(atom: Any) -> Found:
            return found.get(atom) if isinstance(atom, Var) else None

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if not any(ins):
                if _is_uniform(eqn, uniform):
                    uniform.update(eqn.outvars)
                piece = self._scattered(eqn)
                outs: list[Found] = [piece] * len(eqn.outvars)
                if piece is None and any(_programs(eqn)):
                    outs = self._outputs(eqn, ins, ours, uniform)
            else:
                outs = self._outputs(eqn, ins, ours, uniform)
            found.update((v, p) for v, p in zip(eqn.outvars, outs, strict=True) if p)
        return [read(v) for v in jaxpr.outvars]

    def _scattered(self, eqn: JaxprEqn) -> Found:
        """The piece that a reduction of this library makes of a whole gradient."""
        if eqn.primitive.name != "reduce_scatter":
            return None
        name = str(eqn.source_info.name_stack)
        axes = _axes_of(eqn) & self._axes
        if "fsdp:reduce_scatter:" not in name or not axes:
            return None
        return Piece(name.split("fsdp:reduce_scatter:")[-1].split("/")[0], self._axes)

    def _outputs(
        self, eqn: JaxprEqn, ins: list[Found], ours: bool, uniform: set[Var]
    ) -> list[Found]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        ours = ours or any(n in str(eqn.source_info.name_stack) for n in _NAMED)
        if name in _CALLS:
            callee = eqn.params[_CALLS[name]]
            return self.run(_closed(callee), ins, ours)
        if name == "scan":
            return self._scan(eqn, ins, ours)
        if name == "while":
            return self._while(eqn, ins, ours)
        if name == "cond":
            branches = [
                self.run(_closed(b), ins[1:], ours) for b in eqn.params["branches"]
            ]
            outs = [_joined(each) for each in zip(*branches, strict=True)]
            if ins[0] is not None:
                outs = [_joined([ins[0], p]) for p in outs]
                return [self._misused(p, eqn) for p in outs]
            return outs
        if name == "optimization_barrier":
            return ins
        piece = _joined(ins)
        if piece is None:
            return [None] * count
        if name in _GATHERS:
            if piece.misused and ours:
                raise self._refuse(piece)
            axes = piece.axes - _axes_of(eqn)
            whole = not axes and not piece.misused
            return [None if whole else dataclasses.replace(piece, axes=axes)]
        if ours:
            summed = name in _SUMS and not piece.axes - _axes_of(eqn)
            if summed and not piece.misused:  # a norm
                return [None] * count
            return [piece] * count
        if name in _SAME_VALUES and self._alone(eqn, ins, uniform):
            return [piece] * count
        if name == "slice" and len(eqn.params["limit_indices"]) == 1:
            return [piece]  # of what was laid end to end
        # Only differentiation adds like that: cotangents of one piece.
        if name == "add_any":
            return [piece]
        if name in ELEMENTWISE and self._alone(eqn, ins, uniform):
            return [piece] * count
        return [self._misused(piece, eqn)] * count

    def _alone(self, eqn: JaxprEqn, ins: list[Found], uniform: set[Var]) -> bool:
        """Whether pieces meet only pieces and what is the same in every place."""
        pairs = zip(eqn.invars, ins, strict=True)
        return all(p is not None or _is_same(v, uniform) for v, p in pairs)

    def _misused(self, piece: Found, eqn: JaxprEqn) -> Found:
        if piece is None or piece.misused:
            return piece
        where = source_info_util.summarize(eqn.source_info)
        return dataclasses.replace(piece, misused=f"{eqn.primitive.name} at {where}")

    def _scan(self, eqn: JaxprEqn, ins: list[Found], ours: bool) -> list[Found]:
        body = _closed(eqn.params["jaxpr"])
        carry = carry_of(eqn)
        while True:
            outs = self.run(body, ins, ours)
            now = [_joined(pair) for pair in zip(ins[carry], outs)]
            if now == ins[carry]:
                return outs
            ins = [*ins[: carry.start], *now, *ins[carry.stop :]]

    def _while(self, eqn: JaxprEqn, ins: list[Found], ours: bool) -> list[Found]:
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        own, consts, carry = ins[:first], ins[first:last], ins[last:]
        body = _closed(eqn.params["body_jaxpr"])
        while True:
            outs = self.run(body, [*consts, *carry], ours)
            now = [_joined(pair) for pair in zip(carry, outs, strict=True)]
            if now == carry:
                break
            carry = now
        (stops,) = self.run(_closed(eqn.params["cond_jaxpr"]), [*own, *carry], ours)
        if stops is None:
            return carry
        return [self._misused(_joined([stops, p]), eqn) for p in carry]


def _joined(pieces: Sequence[Found]) -> Found:
    """What a value is that may be, or depends on, any of these."""
    some = [p for p in pieces if p is not None]
    if not some:
        return None
    axes = frozenset().union(*[p.axes for p in some])
    first = next((p for p in some if p.misused), some[0])
    return dataclasses.replace(first, axes=axes)


def _closed(program: Any) -> ClosedJaxpr:
    return ClosedJaxpr(program, ()) if isinstance(program, Jaxpr) else program


def _programs(eqn: JaxprEqn) -> list[Any]:
    """The programs in an equation's parameters."""
    values = [
        x
        for value in eqn.params.values()
        for x in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    return [x for x in values if isinstance(x, (Jaxpr, ClosedJaxpr))]


def _is_uniform(eqn: JaxprEqn, uniform: set[Var]) -> bool:
    """Whether all elements of what an equation computes are the same."""
    name = eqn.primitive.name
    known = name == "broadcast_in_dim" or name in ELEMENTWISE
    return known and all(_is_same(v, uniform) for v in eqn.invars)


def _is_same(atom: Any, uniform: set[Var]) -> bool:
    """Whether all elements of a value are the same."""
    return not atom.aval.shape or (isinstance(atom, Var) and atom in uniform)


def _axes_of(eqn: JaxprEqn) -> frozenset[str]:
    """The mesh axes over which a collective runs."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(named if isinstance(named, (tuple, list)) else (named,))
