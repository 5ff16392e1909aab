"""`comm_report`: what a jitted step communicates, when, and what memory it takes.

Nothing is executed and no array is read: counts, dtypes and groups come from the
lowered program (StableHLO), order and memory from the compiled one. What lives here:
the entry and the report. What must not: reading program text (`_stablehlo`,
`_hlo_schedule`), and layout of tables and pictures.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from typing import IO, Any

import jax

from fsdp_jax import _figures, _report_table, _timeline
from fsdp_jax._argument_bytes import (
    ArgumentBytes,
    device_kind_of,
    measure_arguments,
)
from fsdp_jax._hlo_collectives import (
    ALL_REDUCE,
    DIRECTIONS,
    GATHER,
    PARTITIONER,
    REDUCE_SCATTER,
    REGATHER,
    USER,
)
from fsdp_jax._hlo_schedule import HloSchedule, Transfer, read_schedule
from fsdp_jax._report_data import CommRow, GatherTiming, Memory, ScheduleReport
from fsdp_jax._report_rows import ideal_bytes, rows_of_partitioner, rows_of_written
from fsdp_jax._stablehlo import Written, read_collectives
from fsdp_jax._stablehlo_origins import gathered_arguments

_LARGE = 64 * 1024  # bytes of an array that is no statistic, norm or bias
_BUNCHED = 2  # groups; more in a row are worth a warning


@dataclasses.dataclass(frozen=True)
class CommReport:
    """What a step communicates, per device. Made by `comm_report`.

    Attributes:
        rows: collectives by group, direction, kind and dtype, in program order.
        ideal_gather_bytes: what each device must receive to hold every parameter of the
            arguments that the step gathers once, in the dtype that gathers have; None
            without parameters.
        ideal_reduce_bytes: the same in the dtype that reduce-scatters have.
        memory: bytes by kind.
        schedule: what the compiler made of the order; None with `compiled=False`.
        warnings: what looks wrong, in words.

    Source: README, "What a step communicates".
    """

    rows: tuple[CommRow, ...]
    ideal_gather_bytes: int | None
    ideal_reduce_bytes: int | None
    memory: Memory
    schedule: ScheduleReport | None
    warnings: tuple[str, ...]
    _schedule: HloSchedule | None = dataclasses.field(default=None, repr=False)

    @property
    def async_share(self) -> float | None:
        """Share of gather bytes in flight beside a matmul; None if not compiled."""
        return self.schedule.async_share if self.schedule else None

    @property
    def hidden_share(self) -> float | None:
        """Share of gather bytes that compute covers; None if not compiled."""
        return self.schedule.hidden_share if self.schedule else None

    @property
    def peak_bytes(self) -> int | None:
        """Most memory at one time; None if not compiled."""
        return self.memory.peak_bytes

    def wire_bytes(self, direction: str | None = None) -> int:
        """Bytes that each device sends, in all or in one direction."""
        return sum(
            row.wire_bytes for row in self.rows if direction in (None, row.direction)
        )

    def count(self, direction: str | None = None) -> int:
        """Collectives, in all or in one direction."""
        return sum(row.count for row in self.rows if direction in (None, row.direction))

    def __str__(self) -> str:
        text = io.StringIO()
        self.table(text)
        return text.getvalue()

    def table(self, file: IO[str] | None = None) -> None:
        """Print the report: collectives, memory, schedule, and what looks wrong.

        Args:
            file: where to; standard output by default.
        """
        _report_table.print_report(self, file)

    def to_json(self) -> str:
        """All figures as JSON: the attributes of the report and of what is in it."""
        fields = {f.name for f in dataclasses.fields(self)} - {"_schedule"}
        figures = {name: getattr(self, name) for name in sorted(fields)}
        figures["totals"] = {
            direction: {
                "count": self.count(direction),
                "wire_bytes": self.wire_bytes(direction),
            }
            for direction in DIRECTIONS
        }
        return json.dumps(figures, default=dataclasses.asdict, indent=2)

    def timeline(self, path: Any) -> None:
        """Draw the schedule as an SVG file.

        Gathers in flight, compute and reductions over schedule position, and the bytes
        alive there. Position is weighted by the compiler's cycle estimates where it
        gives them, by instruction elsewhere; a loop body is drawn once.

        Args:
            path: of the file to write.

        Raises:
            ValueError: the report was made with `compiled=False`.
        """
        if self._schedule is None:
            raise ValueError(
                "CommReport.timeline: there is no schedule, because the report was "
                "made with compiled=False. Leave it out, or pass a compiled step."
            )
        _timeline.write(self._schedule, path)


def comm_report(
    step: Any, *args: Any, compiled: Any = None, **kwargs: Any
) -> CommReport:
    """Report every collective of a jitted step, its memory and its schedule.

    The step is lowered and compiled, never run, and no array is read; so this works for
    devices that are not there, and in every process of a job. A loop counts as often as
    it runs, where the program tells how often; every branch of a condition counts.

    Args:
        step: what `jax.jit` or `nnx.jit` made.
        args: arguments of the step, concrete or `ShapeDtypeStruct` with shardings.
        compiled: None: compile here. A compiled step, such as
            `step.lower(*args).compile(compiler_options)` returns: use it. False: do not
            compile; order and memory stay unknown.
        kwargs: keyword arguments of the step.

    Returns:
        The report.

    Raises:
        TypeError: `step` was not jitted, or `compiled` is something else.

    Source: README, "What a step communicates".
    """
    lower = getattr(step, "lower", None)
    if not callable(lower):
        raise TypeError(
            "comm_report: step must be a jitted function, got "
            f"{getattr(step, '__name__', type(step).__name__)!r}. Wrap it first: "
            "comm_report(nnx.jit(step), model, optimizer, batch)."
        )
    if compiled is not None and compiled is not False:
        if not hasattr(compiled, "as_text") or not hasattr(compiled, "memory_analysis"):
            raise TypeError(
                "comm_report: compiled must be None, False, or what "
                f"step.lower(...).compile() returns, got {type(compiled).__name__}."
            )
    lowered: Any = lower(*args, **kwargs)
    lowered = getattr(lowered, "lowered", lowered)  # NNX wraps JAX's
    module = lowered.compiler_ir("stablehlo")
    written, gathered = read_collectives(module), gathered_arguments(module)
    arguments = measure_arguments((args, kwargs))
    if compiled is None:
        compiled = lowered.compile()
    return _assemble(written, gathered, arguments, compiled)


def _assemble(
    written: list[Written], gathered: Any, arguments: ArgumentBytes, compiled: Any
) -> CommReport:
    """Put a report together from what was read."""
    rows = rows_of_written(written)
    schedule = figures = None
    memory = Memory(
        arguments.parameter_bytes,
        arguments.moment_bytes,
        arguments.other_bytes,
        arguments.host_parameter_bytes,
        arguments.host_moment_bytes,
        arguments.host_other_bytes,
    )
    if compiled is not False:
        schedule = read_schedule(compiled.as_text())
        _figures.name_by_shape(schedule.transfers, written)
        _figures.tell_apart(schedule.transfers, written)
        kind = _device_kind(compiled) or arguments.device_kind
        figures = _schedule_report(schedule, kind)
        memory = _memory(memory, schedule, compiled.memory_analysis(), kind)
        rows += rows_of_partitioner(schedule.transfers)
    report = CommReport(
        rows=tuple(rows),
        ideal_gather_bytes=ideal_bytes(arguments, gathered, rows, (GATHER, REGATHER)),
        ideal_reduce_bytes=ideal_bytes(
            arguments, gathered, rows, (REDUCE_SCATTER, ALL_REDUCE)
        ),
        memory=memory,
        schedule=figures,
        warnings=(),
        _schedule=schedule,
    )
    warnings = tuple(_warnings(report, schedule.transfers if schedule else ()))
    return dataclasses.replace(report, warnings=warnings)


def _device_kind(compiled: Any) -> str:
    """Kind of the devices that a program was compiled for; empty if unknown."""
    shardings = jax.tree.leaves(getattr(compiled, "input_shardings", ()))
    return next(filter(None, map(device_kind_of, shardings)), "")


def _memory(
    memory: Memory, schedule: HloSchedule, stats: Any, device_kind: str
) -> Memory:
    """Add what the compiler and the live ranges say."""

    def read(name: str) -> int | None:
        return getattr(stats, name, None)

    arguments, outputs = read("argument_size_in_bytes"), read("output_size_in_bytes")
    aliases, temporaries = read("alias_size_in_bytes"), read("temp_size_in_bytes")
    peak = read("peak_memory_in_bytes")
    if arguments is not None:
        held = arguments + (outputs or 0) - (aliases or 0)
        # XLA for CPU (jax 0.10 to 0.12) gives a peak that leaves temporaries out.
        if not peak or device_kind == "cpu":
            peak = held + (temporaries or 0)
        else:
            peak -= read("host_argument_size_in_bytes") or 0
    on_host = _sum(
        read("host_temp_size_in_bytes"),
        read("host_output_size_in_bytes"),
        -(read("host_alias_size_in_bytes") or 0),
    )
    return dataclasses.replace(
        memory,
        argument_bytes=arguments,
        output_bytes=outputs,
        alias_bytes=_sum(aliases, read("host_alias_size_in_bytes")),
        temporary_bytes=temporaries,
        host_temporary_bytes=on_host,
        peak_bytes=peak,
        live_peak_bytes=max(schedule.live_bytes, default=0),
        gathered_peak_bytes=max(schedule.gathered_bytes, default=0),
        gradient_peak_bytes=max(schedule.gradient_bytes, default=0),
    )


def _sum(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _schedule_report(schedule: HloSchedule, device_kind: str) -> ScheduleReport:
    basis = _figures.hide(schedule, device_kind)
    gathers = [t for t in schedule.transfers if t.is_gather]
    first = _figures.gathers_before_matmul(schedule)
    last = _figures.reductions_after_matmul(schedule)
    return ScheduleReport(
        notation=_figures.notation(schedule),
        gathers=tuple(
            GatherTiming(
                group=", ".join(t.groups),
                direction=t.direction,
                form=t.form,
                dtype=t.dtype,
                wire_bytes=t.wire_bytes,
                times=t.times,
                is_async=t.is_async,
                matmuls=t.matmuls,
                cycles=t.cycles,
                hidden_share=t.hidden_share,
            )
            for t in gathers
        ),
        async_share=_figures.share(gathers, _figures.overlaps),
        hidden_share=_figures.share(gathers, lambda t: t.hidden_share),
        hidden_basis=basis,
        gathers_before_first_matmul=len(first),
        groups_before_first_matmul=_figures.count_groups(first),
        reductions_after_last_matmul=len(last),
        groups_after_last_matmul=_figures.count_groups(last),
        num_matmuls=sum(step.kind == "matmul" for step in schedule.steps),
        platform=device_kind,
        is_scheduled=schedule.is_scheduled,
    )


def _warnings(report: CommReport, transfers: Sequence[Transfer]) -> Iterable[str]:
    """What looks wrong, one sentence each."""
    mebibytes = 1 << 20
    large = [t for t in transfers if t.op == "all-reduce" and t.full_bytes >= _LARGE]
    own = any(r.group not in (USER, PARTITIONER) for r in report.rows)
    torus = "On TPU, give the mesh one axis per torus dimension: fsdp_jax.make_mesh()"
    for direction, what in (
        (REDUCE_SCATTER, f"the compiler replaced a reduce-scatter. {torus}"),
        (
            ALL_REDUCE,
            "gradients are reduced whole on every device. fsdp_jax.describe(model) "
            "lists what is not cut, and why",
        ),
        (GATHER, f"the compiler replaced a gather. {torus}"),
        (REGATHER, f"the compiler replaced a gather. {torus}"),
    ):
        found = [t for t in large if t.direction == direction and t.groups != (USER,)]
        found = [t for t in found if not own or t.partitioner_bytes < t.full_bytes]
        if found:
            size = sum(t.full_bytes for t in found) / mebibytes
            groups = sorted({g for t in found for g in t.groups})
            yield (
                f"parameter-sized all-reduce ({len(found)} of {size:.1f} MiB together, "
                f"{_some(groups)}), at twice the traffic: {what}"
            )
    schedule = report.schedule
    if schedule and schedule.platform != "cpu":
        before, after = (
            schedule.groups_before_first_matmul,
            schedule.groups_after_last_matmul,
        )
        if before > _BUNCHED:
            yield (
                f"gathers of {before} groups run before the first matmul: nothing "
                "hides them, and all are held at once"
            )
        if after > _BUNCHED:
            yield (
                f"reductions of {after} groups end after the last matmul: full "
                "gradients of all of them are held until then"
            )
        if not schedule.is_scheduled:
            yield (
                "the compiled text is not scheduled: its order says little about the "
                "order of execution"
            )
    named = [r for r in report.rows if not r.group.startswith("(user")]
    reduced = {r.group for r in named if r.direction in (REDUCE_SCATTER, ALL_REDUCE)}
    gathered = dict.fromkeys(r.group for r in named if r.direction == GATHER)
    never = [g for g in gathered if g not in reduced and g != PARTITIONER]
    if reduced - {PARTITIONER} and never:
        yield (
            f"the gradient of {_some(never)} is never reduced: frozen, or the loss "
            "does not depend on it"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
