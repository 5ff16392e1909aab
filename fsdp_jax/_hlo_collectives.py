"""Which instruction of a compiled program is which part of which collective.

What lives here: the forms that compilers give a collective (plain, start and done,
fused beside a matrix multiplication, inside a callee), what it moves, and whose it is.
What must not: positions in a schedule (`_hlo_schedule`).
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque

from fsdp_jax._hlo import Computation, Instruction, Leaf, Module

GATHER, REGATHER = "forward gather", "backward re-gather"
REDUCE_SCATTER, ALL_REDUCE, OTHER = "reduce-scatter", "all-reduce", "other"
DIRECTIONS = (GATHER, REGATHER, REDUCE_SCATTER, ALL_REDUCE, OTHER)

ROOT = "(root)"
USER = "(user code)"
PARTITIONER = "(partitioner)"
UNNAMED = "(unnamed)"

OPS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
_SCOPE = re.compile(r"fsdp:(gather|regather|reduce_scatter|all_reduce):([^/()\"]*)")
_DIRECTION = {
    "gather": GATHER,
    "regather": REGATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
}
# What jax.lax calls its collectives: the last word of an operation's name.
_PRIMITIVE = re.compile(
    r"(?:^|/)(?:psum|pmax|pmin|pmean|ppermute|pshuffle|pbroadcast|all_gather|"
    r"reduce_scatter|psum_scatter|all_to_all|ragged_all_to_all|unreduced_\w+)"
    r"(?:_invariant|2|_reduced)?\)*$"
)
_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)")
_SEARCHED = 60  # instructions looked at for the name of a collective that lost its own


def ring_bytes(op: str, full_bytes: int, num_devices: int) -> int:
    """Bytes that each device sends, by the ring algorithm.

    Args:
        op: as HLO spells it.
        full_bytes: the gathered array, or the array before it is scattered or reduced.
        num_devices: devices of one replica group.

    Returns:
        `(n-1)/n` of it to gather, scatter or exchange, twice that to all-reduce, and
        all of it for a permutation.
    """
    if op in ("collective-permute", "collective-broadcast"):
        return full_bytes
    bytes_sent = full_bytes * (num_devices - 1) // max(num_devices, 1)
    return 2 * bytes_sent if op == "all-reduce" else bytes_sent


def scopes_of(op_name: str) -> list[tuple[str, str]]:
    """Groups and directions that the library wrote into an operation's name.

    Several where a compiler joined operations, and with them their names.
    """
    again = "rematted_computation" in op_name  # a gather of a recomputed forward
    found = []
    for kind, path in _SCOPE.findall(op_name):
        direction = _DIRECTION[kind]
        direction = REGATHER if again and direction == GATHER else direction
        found.append((path or ROOT, direction))
    return list(dict.fromkeys(found))


def direction_of(op: str, op_name: str) -> str:
    """Direction of a collective that the library did not name."""
    if op == "all-gather":
        return REGATHER if "transpose(" in op_name else GATHER
    return {"reduce-scatter": REDUCE_SCATTER, "all-reduce": ALL_REDUCE}.get(op, OTHER)


def is_written(op_name: str) -> bool:
    """Whether a collective was written by somebody, not put in by the partitioner."""
    return bool(_PRIMITIVE.search(op_name))


def is_outside(op_name: str) -> bool:
    """Whether a name says that its operation is of no per-device program."""
    return bool(op_name) and not re.search(r"\bshard_map\b", op_name)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one instruction does of a collective.

    Attributes:
        stage: `sync`, `start`, `done`, or `step`, which computes while it carries one
            that is in flight.
        form: how the compiler wrote it, in words; empty for the plain form.
        op: kind of collective, as HLO spells it.
        inner: the collective itself, wherever it stands.
        pieces: the full arrays: gathered, or before they are scattered or reduced.
    """

    stage: str
    form: str
    op: str
    inner: Instruction
    pieces: tuple[Leaf, ...]


def part_of(
    module: Module, computation: Computation, instruction: Instruction
) -> Part | None:
    """What an instruction does of a collective; None if nothing."""
    op = instruction.op
    base, _, stage = op.rpartition("-")
    if op in OPS:
        return _part("sync", "", op, module, computation, instruction)
    if base in OPS and stage == "done":
        return Part("done", "", base, instruction, ())
    if base in OPS and stage == "start":
        sync = re.search(r'"?is_sync"?:true', instruction.attributes)
        stage = "start, sync" if sync else "start"
        return _part(stage, "", base, module, computation, instruction)
    if op in ("call-done", "async-done"):
        return Part("done", "", op, instruction, ())
    if op not in ("fusion", "call-start", "async-start"):
        return None
    inside = list(module.inside(instruction))
    targets = {i.target for i in inside if i.op == "custom-call"}
    if "AsyncCollectiveDone" in targets:
        return Part("done", "fused", "all-gather", instruction, ())
    collective = next((i for i in inside if i.op in OPS), None)
    if collective is None:
        return None
    at = next(
        c
        for c in map(module.computations.get, _callees(module, instruction))
        if c is not None and collective.name in c.by_name
    )
    if op != "fusion":
        thread = re.search(r'async_execution_thread="(\w+)"', instruction.attributes)
        form = "sparsecore" if thread and thread.group(1) == "sparsecore" else ""
        return _part("start", form, collective.op, module, at, collective)
    if "AsyncCollectiveStart" in targets:
        return _part("start", "fused", collective.op, module, at, collective)
    if collective.op == "all-reduce" and any(i.op == "dynamic-slice" for i in inside):
        pieces = tuple(
            leaf
            for name in instruction.operands[:1]
            for leaf in computation.by_name[name].leaves
        )
        return Part("sync", "fused", "reduce-scatter", collective, pieces)
    stage = "step" if "async_collective" in "".join(instruction.called) else "sync"
    return _part(stage, "fused", collective.op, module, at, collective)


def _callees(module: Module, instruction: Instruction) -> list[str]:
    names = list(instruction.called)
    for inner in module.inside(instruction):
        names += inner.called
    return names


def _part(stage, form, op, module, computation, instruction) -> Part:
    """Read the arrays that a collective moves off its shape."""
    elements = instruction.elements
    starts = instruction.op.endswith("-start") and not op.startswith("all-reduce")
    leaves = elements[1] if starts and len(elements) > 1 else instruction.leaves
    if op == "reduce-scatter":
        n = module.group_size(instruction)
        dim = re.search(r"\bdimensions=\{(\d+)\}", instruction.attributes)
        leaves = tuple(
            dataclasses.replace(
                leaf,
                size_bytes=leaf.size_bytes * n,
                dims=tuple(
                    size * n if dim and i == int(dim.group(1)) else size
                    for i, size in enumerate(leaf.dims)
                ),
            )
            for leaf in leaves
        )
    return Part(stage, form, op, instruction, leaves)


class Names:
    """Finds the group of collectives that lost their own name to the compiler.

    Args:
        module: the program.
        computation: the part of it to look around in.
    """

    def __init__(self, module: Module, computation: Computation) -> None:
        self.module, self.computation = module, computation
        self.users: dict[str, list[Instruction]] = {}
        for instruction in computation.instructions:
            for name in instruction.operands:
                self.users.setdefault(name, []).append(instruction)

    def groups(
        self, instruction: Instruction, part: Part
    ) -> tuple[tuple[str, ...], str, str]:
        """Whose a collective is.

        Args:
            instruction: where it stands in the computation.
            part: what it does.

        Returns:
            Its groups (several if the compiler joined their collectives), its
            direction, and a name for orientation.
        """
        op_name = part.inner.op_name or instruction.op_name
        windowed = _WINDOWED.search(self.computation.name)
        if windowed:
            op = {"ag": "all-gather", "rs": "reduce-scatter"}[windowed.group(1)]
            return (PARTITIONER,), direction_of(op, op_name), op_name
        named = scopes_of(op_name)
        if len(part.pieces) == 1:
            named = named[-1:]
        if not named and not is_written(op_name) and not is_outside(op_name):
            readers = [instruction]
            for _ in range(2 if part.stage == "start" else 1):
                if len(part.pieces) > 1:
                    readers = [u for r in readers for u in self.users.get(r.name, ())]
            named = [near for r in readers if (near := self._near(r)) is not None]
        if named:
            groups = tuple(dict.fromkeys(group for group, _ in named))
            return groups, named[-1][1], op_name
        direction = direction_of(part.op, op_name)
        if is_written(op_name):
            return (USER,), direction, op_name
        return ((PARTITIONER if op_name else UNNAMED),), direction, op_name

    def partitioner_bytes(self, instruction: Instruction, part: Part) -> int:
        """Bytes of the pieces that the partitioner put in, of a joined collective.

        By what reads each piece, which keeps the name that the piece had.
        """
        readers = self.users.get(instruction.name, [])
        if part.stage == "start":
            readers = [u for r in readers for u in self.users.get(r.name, ())]
        names: dict[int, str] = {}
        for reader in readers:
            found = re.search(r"\bindex=(\d+)", reader.attributes)
            if reader.op == "get-tuple-element" and found:
                names[int(found.group(1))] = reader.op_name
        return sum(
            leaf.size_bytes
            for i, leaf in enumerate(part.pieces)
            if is_outside(name := names.get(i, ""))
            and not (scopes_of(name) or is_written(name))
        )

    def _near(self, start: Instruction) -> tuple[str, str] | None:
        """The nearest reduction scope among what reads a value, directly or not."""
        queue, seen = deque([start]), {start.name}
        while queue and len(seen) < _SEARCHED:
            at = queue.popleft()
            for name in (at.op_name, *(i.op_name for i in self.module.inside(at))):
                for scope in scopes_of(name):
                    if scope[1] in (REDUCE_SCATTER, ALL_REDUCE):
                        return scope
            for user in self.users.get(at.name, ()):
                if user.name not in seen and user.op not in ("while", "tuple"):
                    seen.add(user.name)
                    queue.append(user)
        return None
