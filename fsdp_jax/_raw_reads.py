"""What a program computes with raw shards, as if they were the parameters.

In a per-device program a raw value of the model (`nnx.state`, `jax.tree.leaves`) is one
device's piece of a parameter. With pieces a program may do what it would do with the
parameter as well: combine them element by element with one another and with numbers
that are the same on every device, put them into a module, which gathers them, and
return them where pieces are known to be. All else, a sum, a product with activations,
noise of a piece's shape, rows that change places, would give another number than the
whole parameter: it is found in the traced program and refused.

What must not live here: how results of the program are joined (`_join`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from fsdp_jax._callees import callee_of, closed_of, equations_inside
from fsdp_jax._dependence import carry_of
from fsdp_jax._unchanged import unchanged

# What makes every element of the elements in the same place.
ELEMENTWISE = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type copy "
    "cos div eq erf exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p "
    "logistic lt max min mul ne neg not or pow real rem round rsqrt select_n sign sin "
    "sqrt square stop_gradient sub tanh xor".split()
)

# Scopes of what the library itself does with shards, and of norms of them.
SCOPE, NORM = "fsdp_shards", "fsdp_norm"
_OURS = re.compile(
    rf"(?:^|[/(])(?:{SCOPE}|{NORM}|fsdp:(?:gather|regather|reduce_scatter|all_reduce):)"
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a value in the program of one device has of a parameter.

    Attributes:
        source: which input of the program, or which collective, it comes from.
        axes: mesh axes over which it is still cut.
        dim: that is cut, from the end; None if that is not known.
        misused: where it was first used as only a whole parameter may be; "" if not.
        partial: whether it is a sum over pieces, to be summed over devices: what the
            norm of pieces comes to where it is differentiated.
    """

    source: int | str
    axes: frozenset[str]
    dim: int | None = None
    misused: str = ""
    partial: bool = False


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value in the program of one device.

    Attributes:
        piece: what it has of a parameter; None for nothing.
        same: whether it is the same on every device.
        uniform: whether all its elements are the same.
    """

    piece: Piece | None = None
    same: bool = False
    uniform: bool = False


_CONSTANT = Value(same=True)
_NUMBER = Value(same=True, uniform=True)

_KEEPS = frozenset(
    "optimization_barrier device_put copy copy_p sharding_constraint reshard pvary "
    "reduce_precision convert_element_type".split()
)
# What devices wait in for one another.
COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant "
    "reduce_scatter ppermute pgather all_to_all ragged_all_to_all".split()
)
_GATHERS = ("all_gather", "all_gather_invariant")
_SUMS = ("psum", "psum_invariant", "psum2", "pmax", "pmin")


@dataclasses.dataclass(frozen=True)
class RawReads:
    """Finds what a program of one device computes with pieces.

    Attributes:
        shard_axes: mesh axes over which parameters are cut.
        data_axes: mesh axes over which the devices of the program lie.
        refuse: makes the error for a piece that was misused, and for what took it if
            that is no gather.
    """

    shard_axes: frozenset[str]
    data_axes: frozenset[str]
    refuse: Callable[..., Exception]

    def run(
        self, closed: ClosedJaxpr, inputs: Sequence[Value], ours: bool = False
    ) -> list[Value]:
        """What is known of the outputs of a program.

        Args:
            closed: the program.
            inputs: what is known of each input.
            ours: whether it is a part of what the library does.
        """
        jaxpr = closed.jaxpr
        known: dict[Var, Value] = dict.fromkeys(jaxpr.constvars, _CONSTANT)
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            value = _CONSTANT if isinstance(atom, Literal) else known.get(atom, Value())
            if not _ndim(atom) and not value.uniform:
                value = dataclasses.replace(value, uniform=True)
            return value

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars], ours)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Value], ours: bool) -> list[Value]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        pieces = [v.piece for v in ins if v.piece is not None]
        callee = callee_of(eqn)
        inner = callee is not None or any(equations_inside(eqn.params))
        if pieces or inner or name == "reduce_scatter":
            ours = ours or bool(_OURS.search(str(eqn.source_info.name_stack)))
        if callee is not None or name == "shard_map":
            return self.run(callee or closed_of(eqn.params["jaxpr"]), ins, ours)
        if name == "scan":
            return self._scan(eqn, ins, ours)
        if name == "while":
            return self._while(eqn, ins, ours)
        if name == "cond":
            branches = [
                self.run(closed_of(b), ins[1:], ours) for b in eqn.params["branches"]
            ]
            outs = [_joined(each) for each in zip(*branches, strict=True)]
            handed = zip(*[unchanged(b) for b in eqn.params["branches"]], strict=True)
            return [
                ins[1 + at[0]]
                if at[0] is not None and len({*at}) == 1  # whatever is chosen
                else self._chosen(ins[0], value, eqn)
                for at, value in zip(handed, outs, strict=True)
            ]
        if name == "optimization_barrier":
            return ins
        if not pieces:
            return [self._whole(eqn, ins)] * count
        piece = _first(pieces)
        if not count and piece.misused:  # pieces as they are may be shown
            raise self.refuse(piece, "a callback (jax.debug.print)")
        axes = piece.axes - axes_of_collective(eqn)
        if name in _GATHERS:
            if piece.misused and ours:
                raise self.refuse(piece)
            whole = not axes and not piece.misused
            left = None if whole else dataclasses.replace(piece, axes=axes)
            return [Value(left)]
        if ours:
            norm = NORM in str(eqn.source_info.name_stack)
            fine = not piece.misused or piece.partial
            if name in _SUMS and norm and fine and not axes:
                return [_NUMBER] * count
            return [Value(piece)] * count
        # The lifted loops of Flax bring the dim of the layers to the front and back.
        where = source_info_util.summarize(eqn.source_info)
        in_place = name == "transpose" and "/flax/" in where.replace("\\", "/")
        # Only differentiation adds like that: cotangents of one piece.
        fine = (
            in_place
            or name == "add_any"
            or ((name in _KEEPS or name in ELEMENTWISE) and _alike(eqn, ins))
        )
        if not fine:
            partial = _adds_up(eqn, ins)
            piece = dataclasses.replace(_misused(piece, eqn), partial=partial)
        return [Value(piece)] * count

    def _whole(self, eqn: JaxprEqn, ins: list[Value]) -> Value:
        """What comes out of an equation that reads no piece."""
        name = eqn.primitive.name
        if name == "reduce_scatter":
            stack, axes = str(eqn.source_info.name_stack), axes_of_collective(eqn)
            if "fsdp:reduce_scatter:" in stack and axes & self.shard_axes:
                source = stack.split("fsdp:reduce_scatter:")[-1].split("/")[0]
                return Value(Piece(source, self.shard_axes))
        joins = name in _SUMS or name in _GATHERS
        if joins and self.data_axes <= axes_of_collective(eqn):
            return _CONSTANT
        own = eqn.effects or name == "axis_index" or "callback" in name
        same = not own and all(v.same for v in ins)
        spread = name == "broadcast_in_dim" or name in ELEMENTWISE
        return Value(None, same, spread and all(v.uniform for v in ins))

    def _chosen(self, by: Value, value: Value, eqn: JaxprEqn) -> Value:
        """A value that another one chooses."""
        if by.piece is not None:
            return Value(_misused(by.piece, eqn))
        held = equations_inside(eqn.params)
        agreed = any(e.primitive.name in COLLECTIVES for e in held)  # see _divergence
        if by.same or agreed or value.piece is None:
            return dataclasses.replace(value, same=value.same and by.same)
        return Value(_misused(value.piece, eqn))

    def _scan(self, eqn: JaxprEqn, ins: list[Value], ours: bool) -> list[Value]:
        body, carry = closed_of(eqn.params["jaxpr"]), carry_of(eqn)
        while True:
            outs = self.run(body, ins, ours)
            now = [_joined(pair) for pair in zip(ins[carry], outs)]
            if now == ins[carry]:
                return outs
            ins = [*ins[: carry.start], *now, *ins[carry.stop :]]

    def _while(self, eqn: JaxprEqn, ins: list[Value], ours: bool) -> list[Value]:
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        own, consts, carry = ins[:first], ins[first:last], ins[last:]
        body = closed_of(eqn.params["body_jaxpr"])
        while True:
            outs = self.run(body, [*consts, *carry], ours)
            now = [_joined(pair) for pair in zip(carry, outs, strict=True)]
            if now == carry:
                break
            carry = now
        (stops,) = self.run(closed_of(eqn.params["cond_jaxpr"]), [*own, *carry], ours)
        return [self._chosen(stops, value, eqn) for value in carry]


def _alike(eqn: JaxprEqn, ins: Sequence[Value]) -> bool:
    """Whether pieces meet only what has the same element for the whole parameter."""
    dims = {v.piece.dim for v in ins if v.piece is not None} - {None}
    shaped = all(
        _ndim(atom) > 0 if v.piece is not None else v.same and v.uniform
        for atom, v in zip(eqn.invars, ins, strict=True)
    )
    return shaped and len(dims) < 2


def _adds_up(eqn: JaxprEqn, ins: Sequence[Value]) -> bool:
    """Whether the sum over devices of what comes out is that of the whole parameter."""
    name, pieces = eqn.primitive.name, [v.piece for v in ins if v.piece is not None]
    if name == "reduce_sum":
        return not pieces[0].misused and not _ndim(eqn.outvars[0])
    if not all(p.partial for p in pieces):
        return False
    if name in ("add", "sub", "add_any"):  # the last one only in cotangents
        return name == "add_any" or len(pieces) == len(ins)
    kept = name in ("mul", "neg", "convert_element_type", "broadcast_in_dim", "reshape")
    kept = kept or (name == "div" and ins[0].piece is not None)
    return kept and len(pieces) == 1 and all(v.same for v in ins if v.piece is None)


def _misused(piece: Piece, eqn: JaxprEqn) -> Piece:
    if piece.misused:
        return piece
    where = source_info_util.summarize(eqn.source_info)
    return dataclasses.replace(piece, misused=f"{eqn.primitive.name} at {where}")


def _first(pieces: Sequence[Piece]) -> Piece:
    """One of several pieces: misused, and cut over an axis, if any of them is."""
    axes = frozenset().union(*[p.axes for p in pieces])
    first = next((p for p in pieces if p.misused), pieces[0])
    dim = first.dim if first.dim is not None else pieces[-1].dim
    return dataclasses.replace(first, axes=axes, dim=dim)


def _joined(values: Sequence[Value]) -> Value:
    """What is known of a value that may be any of these."""
    pieces = [v.piece for v in values if v.piece is not None]
    piece = _first(pieces) if pieces else None
    return Value(piece, all(v.same for v in values), all(v.uniform for v in values))


def _ndim(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def axes_of_collective(eqn: JaxprEqn) -> frozenset[str]:
    """The mesh axes over which a collective runs."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(named if isinstance(named, (tuple, list)) else (named,))
