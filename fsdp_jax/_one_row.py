"""Where a device's only row of the batch meets something with a row for each of them.

An array that `f` reads from outside is whole on every device. Where the device has
several rows it does not fit beside them; beside a single row it would be broadcast, and
give another number than the whole batch. What lives here: following the dim of the rows
through a traced program. What must not: what differs between devices (`_differing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from fsdp_jax._annotations import place_of
from fsdp_jax._callees import callee_of, closed_of
from fsdp_jax._dependence import carry_of

Shape = tuple[int, ...]

# Functions of rows that take a single row by itself inside.
_BY_ROW = ("take_along_axis",)
_REDUCTIONS = ("reduce_", "argmax", "argmin")


@dataclasses.dataclass(frozen=True)
class Row:
    """The dim of an array along which it has the rows of one call of `f`: one.

    Attributes:
        dim: counted from the front.
        stretched: whether it was broadcast to as many as the batch has.
    """

    dim: int
    stretched: bool = False


@dataclasses.dataclass(frozen=True)
class Meeting:
    """An equation that reads a device's row, and as many as the batch has.

    Attributes:
        own: shape of what has the one row.
        whole: shape of what has them all.
        where: the equation, and its line.
    """

    own: Shape
    whole: Shape
    where: str


@dataclasses.dataclass
class OneRow:
    """Follows rows through a program of one device.

    Attributes:
        rows: how many rows the batch has.
        differ: by the id of an equation, which of its inputs differ between devices.
        met: what was found.
        caller: the line of the call that is followed.
    """

    rows: Collection[int]
    differ: Mapping[int, Sequence[bool]]
    met: list[Meeting] = dataclasses.field(default_factory=list)
    caller: str = ""

    def run(
        self, closed: ClosedJaxpr, inputs: Sequence[Row | None]
    ) -> list[Row | None]:
        """Where the outputs of a program have rows, if its inputs have them so."""
        jaxpr = closed.jaxpr
        known: dict[Var, Row | None] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Row | None:
            return known.get(atom) if isinstance(atom, Var) else None

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Row | None]) -> list[Row | None]:
        nothing: list[Row | None] = [None] * len(eqn.outvars)
        name = eqn.primitive.name
        if all(row is None for row in ins):
            return nothing
        if (callee := callee_of(eqn)) is not None:
            if eqn.params.get("name") in _BY_ROW:
                self._look(eqn, ins)
            outer, self.caller = self.caller, place_of(eqn) or self.caller
            outs = self.run(callee, ins)
            self.caller = outer
            return outs
        if name == "scan":
            return self._scan(eqn, ins)
        if name == "cond":
            found = [self.run(closed_of(b), ins[1:]) for b in eqn.params["branches"]]
            return [each[0] if len({*each}) == 1 else None for each in zip(*found)]
        if name == "optimization_barrier":
            return ins
        if name in ("while", "shard_map") or len(eqn.outvars) != 1:
            return nothing
        self._look(eqn, ins)
        return [self._kept(eqn, i, row) for i, row in enumerate(ins) if row][:1]

    def _scan(self, eqn: JaxprEqn, ins: list[Row | None]) -> list[Row | None]:
        body, carry = closed_of(eqn.params["jaxpr"]), carry_of(eqn)
        state = ins[carry]
        sliced = [
            _inside(row, _shape(v))
            for row, v in zip(ins[carry.stop :], eqn.invars[carry.stop :])
        ]
        while True:
            outs = self.run(body, [*ins[: carry.start], *state, *sliced])
            now = [a if a == b else None for a, b in zip(state, outs)]
            if now == state:
                break
            state = now
        stacked = [
            dataclasses.replace(row, dim=row.dim + 1) if row else None
            for row in outs[len(state) :]
        ]
        return [*state, *stacked]

    def _look(self, eqn: JaxprEqn, ins: list[Row | None]) -> None:
        """Note an equation in which one row meets the rows of the whole batch.

        Not of backward, whose cotangents may be the same on every device.
        """
        if "transpose(" in str(eqn.source_info.name_stack):
            return
        differ = self.differ.get(id(eqn), [True] * len(ins))
        shapes = [_shape(v) for v in eqn.invars]
        whole = [
            (i, shape)
            for i, shape in enumerate(shapes)
            if isinstance(eqn.invars[i], Var) and not differ[i] and ins[i] is None
        ]
        rows = [(i, row) for i, row in enumerate(ins) if row is not None]
        for i, row in rows:
            for k, other in whole:
                at = self._partner(eqn, i, k, row)
                if at is not None and len(other) > at and other[at] in self.rows:
                    own = shapes[i]
                    own = (*own[: row.dim], 1, *own[row.dim + 1 :])
                    where = f"{eqn.primitive.name} at {place_of(eqn) or self.caller}"
                    self.met.append(Meeting(own, other, where))

    def _partner(self, eqn: JaxprEqn, i: int, k: int, row: Row) -> int | None:
        """The dim of input `k` that goes with the rows of input `i`, None for none."""
        name, result = eqn.primitive.name, _shape(eqn.outvars[0])
        if name == "dot_general":
            _, batch = eqn.params["dimension_numbers"]
            own, other = batch if i == 0 else batch[::-1]
            return other[own.index(row.dim)] if row.dim in own else None
        if name == "gather":  # indices, of rows that are not there
            return (
                0
                if (i, row.dim) == (0, 0) and result[:1] == _shape(eqn.invars[k])[:1]
                else None
            )
        alike = len(_shape(eqn.invars[k])) == len(_shape(eqn.invars[i])) == len(result)
        return row.dim if alike and name != "concatenate" else None

    def _kept(self, eqn: JaxprEqn, i: int, row: Row) -> Row | None:
        """Where the output of an equation has the rows of one of its inputs."""
        name, params, dim = eqn.primitive.name, eqn.params, row.dim
        before, after = _shape(eqn.invars[i]), _shape(eqn.outvars[0])
        if name == "broadcast_in_dim":
            dim = params["broadcast_dimensions"][dim]
            grown = before[row.dim] == 1 and after[dim] in self.rows
            return Row(dim, True) if grown else dataclasses.replace(row, dim=dim)
        if name == "transpose":
            return dataclasses.replace(row, dim=params["permutation"].index(dim))
        if name == "squeeze":
            gone = [d % len(before) for d in params["dimensions"]]
            return None if dim in gone else _without(row, gone)
        if name.startswith(_REDUCTIONS) and "axes" in params:
            return None if dim in params["axes"] else _without(row, params["axes"])
        if name == "dot_general":
            return _of_product(row, i, params["dimension_numbers"], eqn)
        if name == "reshape":
            same = before[: dim + 1] == after[: dim + 1]
            return row if same or (dim == 0 and after[:1] == (1,)) else None
        if name == "conv_general_dilated":
            numbers = params["dimension_numbers"]
            own = i == 0 and numbers.lhs_spec[0] == dim
            return dataclasses.replace(row, dim=numbers.out_spec[0]) if own else None
        if name == "concatenate" and params["dimension"] == dim:
            return None
        if name == "gather" and (i != 0 or dim != 0):
            return None
        same = len(after) > dim and (name == "gather" or len(after) == len(before))
        return row if same and after[dim] in (1, before[dim]) else None


def _shape(atom: Any) -> Shape:
    return tuple(getattr(atom.aval, "shape", ()))


def _inside(row: Row | None, shape: Shape) -> Row | None:
    """Where an array that a loop takes apart has its rows within it."""
    if row is None:
        return None
    if row.dim > 0:
        return dataclasses.replace(row, dim=row.dim - 1)
    one_each = len(shape) > 1 and shape[0] > 1 and shape[1] == 1  # micro-batches
    return Row(0) if one_each else None


def _without(row: Row, gone: Collection[int]) -> Row:
    return dataclasses.replace(row, dim=row.dim - sum(d < row.dim for d in gone))


def _of_product(row: Row, i: int, numbers: Any, eqn: JaxprEqn) -> Row | None:
    """The same for a product of matrices: batch dims, then free ones of each side."""
    contracted, batch = numbers
    if row.dim in batch[i]:
        return dataclasses.replace(row, dim=list(batch[i]).index(row.dim))
    if row.dim in contracted[i]:
        return None
    used = [[*c, *b] for c, b in zip(contracted, batch)]
    free = [d for d in range(len(_shape(eqn.invars[i]))) if d not in used[i]]
    start = len(batch[0])
    if i == 1:
        start += len(_shape(eqn.invars[0])) - len(used[0])
    return dataclasses.replace(row, dim=start + free.index(row.dim))
