"""The records of a communication report.

What lives here: frozen dataclasses, with what every figure means. What must not: how
they are filled (`report`) or shown (`_report_table`, `_timeline`).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CommRow:
    """Collectives of one group that go the same way, per device and step.

    Attributes:
        group: path of the module whose group it is, `(root)` for the outermost one;
            `(user code)` for collectives that you wrote, `(partitioner)` for those that
            XLA's automatic partitioning put in.
        direction: `forward gather`, `backward re-gather`, `reduce-scatter`,
            `all-reduce` or `other`.
        op: kind of collective, as HLO spells it.
        dtype: on the wire.
        count: collectives. One gather counts once per mesh axis that it is staged over.
        full_bytes: arrays that they move, gathered or before they are reduced; with
            staged gathers the partly gathered arrays too.
        wire_bytes: sent by each device, by the ring algorithm: `(n-1)/n` of the full
            array to gather or reduce-scatter, twice that to all-reduce. The stages of a
            staged gather add up to the same.
        num_devices: devices that take part, over all stages.
        per_iteration: whether this is for one iteration of a loop whose length the
            program does not tell.
        op_name: name of the traced operation, for orientation.
    """

    group: str
    direction: str
    op: str
    dtype: str
    count: int
    full_bytes: int
    wire_bytes: int
    num_devices: int
    per_iteration: bool = False
    op_name: str = ""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device. None: not known without a compiled program.

    Attributes:
        parameter_bytes: `nnx.Param` Variables among the arguments, at rest.
        moment_bytes: optimizer state among the arguments.
        other_argument_bytes: the other arguments.
        host_parameter_bytes: of parameters that rest in host memory, this device's
            share there; they do not count in `parameter_bytes`.
        host_moment_bytes: the same of optimizer state.
        host_other_argument_bytes: the same of the other arguments.
        host_temporary_bytes: what a step needs of the host besides, by the compiler:
            gradients, and results whose arguments were not donated.
        argument_bytes: all arguments, by the compiler.
        output_bytes: all results, by the compiler.
        alias_bytes: results that take the memory of donated arguments, on the host
            too.
        temporary_bytes: everything in between, by the compiler.
        peak_bytes: most memory at one time: the compiler's `peak_memory_in_bytes`, or,
            where it gives none that counts everything (CPU), arguments + results -
            aliases + temporaries, which is too high. The compiler counts host memory
            too: arguments that rest there are taken off, other values (gradients on
            the way) are not, so that this is too high where there are some.
        live_peak_bytes: the same, estimated from live ranges in the compiled text.
        gathered_peak_bytes: most bytes of gathered parameters alive at one time, by the
            same estimate: results of gathers and copies of them in another layout.
        gradient_peak_bytes: most bytes of gradients alive that are still to be reduced.
    """

    parameter_bytes: int
    moment_bytes: int
    other_argument_bytes: int
    host_parameter_bytes: int = 0
    host_moment_bytes: int = 0
    host_other_argument_bytes: int = 0
    host_temporary_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    live_peak_bytes: int | None = None
    gathered_peak_bytes: int | None = None
    gradient_peak_bytes: int | None = None

    @property
    def host_argument_bytes(self) -> int:
        """This device's share of all arguments in host memory."""
        return (
            self.host_parameter_bytes
            + self.host_moment_bytes
            + self.host_other_argument_bytes
        )


@dataclasses.dataclass(frozen=True)
class GatherTiming:
    """One gather of a compiled schedule.

    Attributes:
        group: module path; several joined by commas if the compiler joined gathers.
        direction: `forward gather` or `backward re-gather`.
        form: `fused` into compute, `sparsecore`, or empty for a plain one.
        dtype: on the wire, after compilation: XLA for CPU widens bfloat16.
        wire_bytes: sent by each device.
        times: how often it runs; None in a loop of unknown length.
        is_async: whether it starts before its result is waited for.
        matmuls: matrix multiplications between start and end.
        cycles: the compiler's estimate of the compute in between; 0 if it gives none.
        hidden_share: share of its time on the wire that this compute covers.
    """

    group: str
    direction: str
    form: str
    dtype: str
    wire_bytes: int
    times: int | None
    is_async: bool
    matmuls: int
    cycles: int
    hidden_share: float


@dataclasses.dataclass(frozen=True)
class ScheduleReport:
    """What the compiler made of the order. Prints as one line of signs.

    Attributes:
        notation: G is a synchronous gather, `(` and `)` start and end of an
            asynchronous one, `~` compute fused with a gather in flight, d a matrix
            multiplication, R a reduce-scatter, A an all-reduce, P a permutation, X
            another collective, `<` and `>` start and end of an asynchronous one that is
            no gather, and `{...}x4` a loop of four iterations.
        gathers: every gather in order of start.
        async_share: share of gather bytes that are asynchronous with a matrix
            multiplication between start and end.
        hidden_share: share of gather bytes that compute covers, by `hidden_basis`.
        hidden_basis: how `hidden_share` was determined.
        gathers_before_first_matmul: gathers that start before the first one.
        groups_before_first_matmul: groups of these gathers.
        reductions_after_last_matmul: reduce-scatters that end after the last one.
        groups_after_last_matmul: groups of these reductions.
        num_matmuls: matrix multiplications, loop bodies once.
        platform: kind of device, such as `TPU v5 lite` or `cpu`; empty if unknown.
        is_scheduled: whether the text says that its order is the order of execution.
    """

    notation: str
    gathers: tuple[GatherTiming, ...]
    async_share: float
    hidden_share: float
    hidden_basis: str
    gathers_before_first_matmul: int
    groups_before_first_matmul: int
    reductions_after_last_matmul: int
    groups_after_last_matmul: int
    num_matmuls: int
    platform: str
    is_scheduled: bool

    def __str__(self) -> str:
        return self.notation
