"""The schedule of a compiled program: what runs when, beside what, and holding what.

What lives here: the walk over scheduled HLO, whose text order is the order of
execution, with live ranges of buffers. What must not: reading text (`_hlo`), and words
for people (`report`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from fsdp_jax._hlo import Computation, Module
from fsdp_jax._hlo_buffers import Buffer, Buffers, Value, all_buffers, element_of
from fsdp_jax._hlo_collectives import (
    ALL_REDUCE,
    GATHER,
    PARTITIONER,
    REDUCE_SCATTER,
    REGATHER,
    USER,
    Names,
    Part,
    part_of,
    ring_bytes,
)

_ALIASES = ("bitcast", "opt-barrier", "optimization-barrier", "domain")
_FREE = ("constant", "iota", "partition-id", "replica-id", "after-all")


@dataclasses.dataclass(eq=False)
class Transfer:
    """One collective of the schedule.

    Attributes:
        op: as HLO spells it.
        form: `fused` into compute, `sparsecore`, `fix-up` for a permutation that the
            compiler added to another collective, or empty for a plain one.
        groups: module paths; several if the compiler joined their collectives.
        direction: one of `_hlo_collectives.DIRECTIONS`.
        op_name: name of the traced operation.
        dtype: on the wire.
        shapes: of the arrays that it moves, gathered or before they are scattered.
        full_bytes: the arrays, gathered or before they are scattered or reduced.
        partitioner_bytes: those of them that the partitioner put in.
        wire_bytes: sent by each device, by the ring algorithm.
        num_devices: devices of one replica group.
        times: how often it runs; None: once per iteration of a loop of unknown length.
        start: position at which it starts.
        done: position at which its result is there.
        matmuls: matrix multiplications in between.
        cycles: the compiler's estimate of the compute in between; 0 if it gives none.
        wire_cycles: its own time on the wire in the same unit; 0 if it is not known.
        hidden_share: share of its time on the wire that this compute covers.
    """

    op: str
    form: str
    groups: tuple[str, ...]
    direction: str
    op_name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    full_bytes: int
    wire_bytes: int
    num_devices: int
    times: int | None
    start: int
    done: int
    matmuls: int = 0
    cycles: int = 0
    wire_cycles: float = 0.0
    hidden_share: float = 0.0
    partitioner_bytes: int = 0

    @property
    def is_gather(self) -> bool:
        """Whether it brings parameters together."""
        return self.direction in (GATHER, REGATHER)

    @property
    def is_async(self) -> bool:
        """Whether it starts before it is waited for."""
        return self.done > self.start

    @property
    def total_bytes(self) -> int:
        """Sent by each device, over all iterations that are known of."""
        return self.wire_bytes * (self.times or 1)


@dataclasses.dataclass(frozen=True)
class Step:
    """One position of the schedule.

    Attributes:
        kind: `matmul`, `compute`, `sync`, `start`, `done`; `enter` and `leave` of a
            loop.
        name: of the instruction.
        cycles: the compiler's estimate; 0 if it gives none.
        transfers: numbers of the transfers that it starts, ends or carries.
        times: how often it runs.
    """

    kind: str
    name: str
    cycles: int = 0
    transfers: tuple[int, ...] = ()
    times: int | None = 1


@dataclasses.dataclass(frozen=True)
class HloSchedule:
    """A whole program in execution order.

    Attributes:
        steps: by position.
        transfers: every collective, in order of start.
        live_bytes: by position: main memory of all arrays alive, a live-range estimate.
        gathered_bytes: by position: arrays that gathers made, and copies of them, in
            any memory of the device.
        gradient_bytes: by position: arrays that are still to be reduced.
        is_scheduled: whether the text says that its order is the order of execution.
    """

    steps: tuple[Step, ...]
    transfers: tuple[Transfer, ...]
    live_bytes: tuple[int, ...]
    gathered_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    is_scheduled: bool


class _Walk:
    """One pass over a module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.steps: list[Step] = []
        self.transfers: list[Transfer] = []
        self.buffers = Buffers(module)
        self.busy: dict[str, bool] = {}
        self.flying: list[Transfer] = []

    def run(self) -> HloSchedule:
        entry = self.module.entry
        arguments = [self.buffers.new(p.leaves, 0) for p in entry.parameters]
        root = self.computation(entry, arguments, 1)
        end = len(self.steps)
        for buffer in all_buffers(arguments):
            buffer.last = end
        taken = {id(b) for b in all_buffers(arguments)}
        for i, buffer in enumerate(root):
            buffer.last = end
            if i in self.module.output_aliases and id(buffer) not in taken:
                buffer.held = False  # it takes the memory of a donated argument
        return HloSchedule(
            tuple(self.steps),
            tuple(self.transfers),
            self.buffers.curve(lambda b: b.held and not b.leaf.space, end),
            self.buffers.curve(lambda b: b.gathered, end),
            self.buffers.curve(lambda b: b.gradient, end),
            self.module.is_scheduled,
        )

    def is_busy(self, name: str) -> bool:
        """Whether a computation communicates, itself or inside."""
        if name not in self.busy:
            self.busy[name] = False
            computation = self.module.computations.get(name)
            self.busy[name] = computation is not None and any(
                part_of(self.module, computation, i) or any(map(self.is_busy, i.called))
                for i in computation.instructions
            )
        return self.busy[name]

    def computation(
        self, computation: Computation, arguments: Sequence[Value], times: int | None
    ) -> Value:
        """Walk one computation; the value of its root."""
        env: dict[str, Value] = {
            p.name: value for p, value in zip(computation.parameters, arguments)
        }
        names = Names(self.module, computation)
        for instruction in computation.instructions:
            if instruction.op != "parameter":
                env[instruction.name] = self.instruction(
                    computation, instruction, env, names, times
                )
        return env[computation.root.name]

    def instruction(self, computation, instruction, env, names, times) -> Value:
        op, operands = instruction.op, instruction.operands
        values = [env.get(name, ()) for name in operands]
        if op == "get-tuple-element":
            found = re.search(r"\bindex=(\d+)", instruction.attributes)
            elements = computation.by_name[operands[0]].elements
            assert found
            return element_of(values[0], elements, int(found.group(1)))
        if op == "tuple":
            return tuple(all_buffers(values))
        if op in _ALIASES:
            return values[0]
        if op in _FREE:
            return tuple(Buffer(leaf, 0, 0) for leaf in instruction.leaves)
        if op == "while":
            return self.loop(instruction, values[0], times)
        if op in ("call", "conditional") and any(map(self.is_busy, instruction.called)):
            return self.calls(instruction, values, times)
        part = part_of(self.module, computation, instruction)
        at = len(self.steps)
        for buffer in all_buffers(values):
            buffer.last = max(buffer.last, at)
        if op.endswith("-done") or (part and part.stage == "done"):
            return self.done(computation, instruction, values, times)
        result = self.buffers.result(computation, instruction, values, len(self.steps))
        if part and part.stage == "step":
            self.step("matmul", instruction, times, self.in_flight(values))
        elif part:
            self.begin(instruction, part, names, times, values, result)
        elif self.module.is_matmul(instruction):
            self.step("matmul", instruction, times)
        else:
            self.step("compute", instruction, times)
            self.buffers.mark_copies(instruction, values, result)
        return result

    def step(self, kind, instruction, times, transfers=()) -> None:
        if kind == "matmul" and not self.module.is_matmul(instruction):
            kind = "compute"
        if kind in ("matmul", "compute"):
            for transfer in self.flying:
                transfer.matmuls += kind == "matmul"
                transfer.cycles += instruction.cycles
        self.steps.append(
            Step(kind, instruction.name, instruction.cycles, tuple(transfers), times)
        )

    def begin(self, instruction, part: Part, names: Names, times, values, result):
        """A collective starts here, and ends here too if it is synchronous."""
        at, starts = len(self.steps), part.stage == "start"
        groups, direction, op_name = names.groups(instruction, part)
        n = self.module.group_size(part.inner)
        full = sum(leaf.size_bytes for leaf in part.pieces)
        number = len(self.transfers)
        put_in = full if groups == (PARTITIONER,) else 0
        if not put_in and len(part.pieces) > 1:
            put_in = names.partitioner_bytes(instruction, part)
            groups = (*groups, PARTITIONER) if put_in else groups
        is_fix_up = part.op == "collective-permute" and not op_name
        transfer = Transfer(
            op=part.op,
            form="fix-up" if is_fix_up else part.form,
            groups=groups,
            direction=direction,
            op_name=op_name,
            dtype=max(part.pieces, key=lambda x: x.size_bytes).dtype,
            shapes=tuple(leaf.dims for leaf in part.pieces),
            full_bytes=full,
            wire_bytes=ring_bytes(part.op, full, n),
            num_devices=n,
            times=times,
            start=at,
            done=at,
            partitioner_bytes=put_in,
        )
        self.transfers.append(transfer)
        if starts:
            self.flying.append(transfer)
        known = {id(b) for b in all_buffers(values)}
        for buffer in result:
            if id(buffer) not in known:
                buffer.transfer = number if starts else None
                buffer.gathered = transfer.is_gather and bool(buffer.leaf.dims)
        if direction in (REDUCE_SCATTER, ALL_REDUCE) and groups != (USER,):
            for buffer in all_buffers(values):
                buffer.gradient = True
        self.step("start" if starts else "sync", instruction, times, (number,))

    def done(self, computation, instruction, values, times) -> Value:
        """The result of a start is there; of a copy, or of a collective."""
        for number in self.in_flight(values)[:1]:
            self.transfers[number].done = len(self.steps)
            self.flying.remove(self.transfers[number])
            self.step("done", instruction, times, (number,))
        return self.buffers.result(computation, instruction, values, len(self.steps))

    def in_flight(self, values: Sequence[Value]) -> tuple[int, ...]:
        """Transfers whose state is among the buffers, most often met first."""
        met: dict[int, int] = {}
        for number in (buffer.transfer for buffer in all_buffers(values)):
            if number is not None and self.transfers[number] in self.flying:
                met[number] = met.get(number, 0) + 1
        return tuple(sorted(met, key=lambda number: -met[number]))

    def loop(self, instruction, value: Value, times) -> Value:
        """A `while`, once; its state stays in the memory of its operand."""
        trips = self.module.trip_count(instruction)
        inner = times * trips if times is not None and trips is not None else None
        self.step("enter", instruction, inner)
        for name in instruction.called:
            if re.search(rf"\bbody=%?{re.escape(name)}\b", instruction.attributes):
                root = self.computation(self.module.computations[name], [value], inner)
                for buffer in root:
                    buffer.last = max(buffer.last, len(self.steps))
        for buffer in value:
            buffer.last = max(buffer.last, len(self.steps))
        self.step("leave", instruction, inner)
        return value

    def calls(self, instruction, values: list[Value], times) -> Value:
        """A `call` or the branches of a `conditional`, one after the other."""
        result: Value = ()
        arguments = values[1:] if instruction.op == "conditional" else values
        for i, name in enumerate(instruction.called):
            given = arguments[i : i + 1] if instruction.op != "call" else arguments
            result = self.computation(self.module.computations[name], given, times)
        for buffer in all_buffers(values):
            buffer.last = max(buffer.last, len(self.steps))
        return result


def read_schedule(text: str) -> HloSchedule:
    """Walk a compiled program in the order in which it runs.

    Args:
        text: what `compiled.as_text()` gives.

    Returns:
        Its schedule.
    """
    return _Walk(Module(text)).run()
