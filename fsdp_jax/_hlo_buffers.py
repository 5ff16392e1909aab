"""The memory of a compiled program's values: which buffer each is, and how long.

What lives here: buffers, the values that share them, and bytes alive by position. What
must not: what instructions mean (`_hlo_schedule`). The result is an estimate: the
compiler may reuse memory in ways that its text does not tell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from fsdp_jax._hlo import Computation, Instruction, Leaf, Module

_SAME_VALUES = ("copy", "copy-start", "transpose", "convert", "reshape", "fusion")


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory of one array, from its first position to the last that reads it."""

    leaf: Leaf
    birth: int
    last: int
    gathered: bool = False
    gradient: bool = False
    held: bool = True
    transfer: int | None = None


Value = tuple[Buffer, ...]


class Buffers:
    """All buffers of one program.

    Args:
        module: the program.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.made: list[Buffer] = []

    def curve(
        self, counts: Callable[[Buffer], bool], num_steps: int
    ) -> tuple[int, ...]:
        """Bytes of the buffers that count, by position."""
        change = [0] * (num_steps + 2)
        for buffer in filter(counts, self.made):
            change[buffer.birth] += buffer.leaf.held_bytes
            change[buffer.last + 1] -= buffer.leaf.held_bytes
        level, levels = 0, []
        for step in change[:num_steps]:
            level += step
            levels.append(level)
        return tuple(levels)

    def new(self, leaves: Sequence[Leaf], at: int) -> Value:
        """New memory, from position `at` on."""
        made = tuple(Buffer(leaf, at, at) for leaf in leaves)
        self.made += made
        return made

    def result(
        self,
        computation: Computation,
        instruction: Instruction,
        values: Sequence[Value],
        at: int,
    ) -> Value:
        """Buffers of a result: new ones, and those of operands that it shares."""
        op, elements = instruction.op, instruction.elements
        if op.endswith("-done") and instruction.operands:
            start = computation.by_name[instruction.operands[0]]
            index = 0 if op == "copy-done" else 1
            if len(start.elements) > 1 and not op.startswith("all-reduce"):
                value = element_of(values[0], start.elements, index)
            else:
                value = values[0]
            if len(value) == len(instruction.leaves):
                return value
        shared = [
            (_flat(elements, r), values[o], sum(i))
            for r, o, i in instruction.aliases
            if o < len(values)
        ]
        if op.endswith("-start") and len(elements) > 1 and op != "all-reduce-start":
            index = 1 if op == "copy-start" else 0
            operands = all_buffers(values)
            first = sum(map(len, elements[:index]))
            shared += [
                (first + i, (b,), 0)
                for i, b in enumerate(operands[: len(elements[index])])
            ]
        elif (written := self.updated(instruction)) is not None:
            shared.append((0, values[written], 0))
        kept = {r: value[i] for r, value, i in shared if i < len(value)}
        leaves = [x for r, x in enumerate(instruction.leaves) if r not in kept]
        made = iter(self.new(leaves, at))
        return tuple(
            kept[r] if r in kept else next(made) for r in range(len(instruction.leaves))
        )

    def updated(self, instruction: Instruction) -> int | None:
        """The operand that a dynamic-update-slice writes in place, alone or fused."""
        if instruction.op == "dynamic-update-slice":
            return 0
        if instruction.op != "fusion" or len(instruction.leaves) != 1:
            return None
        body = self.module.computations.get("".join(instruction.called[:1]))
        at = body.root if body else None
        while body and at and at.op == "bitcast":
            at = body.by_name[at.operands[0]]
        if not body or not at or at.op != "dynamic-update-slice":
            return None
        at = body.by_name[at.operands[0]]
        while at.op == "bitcast":
            at = body.by_name[at.operands[0]]
        return int(at.arguments) if at.op == "parameter" else None

    def mark_copies(
        self, instruction: Instruction, values: Sequence[Value], result: Value
    ) -> None:
        """Count a copy of a gathered array, in another layout or dtype, as gathered."""
        if instruction.op not in _SAME_VALUES or not result:
            return
        sources = [b for b in all_buffers(values) if math.prod(b.leaf.dims) > 1]
        if len(sources) == 1 and sources[0].gathered:
            for buffer in result:
                same = math.prod(buffer.leaf.dims) == math.prod(sources[0].leaf.dims)
                buffer.gathered = buffer.gathered or same


def all_buffers(values: Iterable[Value]) -> list[Buffer]:
    """The buffers of several values, in order."""
    return [buffer for value in values for buffer in value]


def element_of(value: Value, elements, index: int) -> Value:
    """The buffers of one element of a tuple."""
    first = sum(map(len, elements[:index]))
    return value[first : first + len(elements[index])]


def _flat(elements, index: tuple[int, ...]) -> int:
    return sum(map(len, elements[: index[0]])) + sum(index[1:]) if index else 0
