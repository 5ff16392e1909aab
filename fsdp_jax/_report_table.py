"""A communication report as text for a terminal.

What lives here: layout and wording. What must not: figures that are not in the report.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_jax._hlo_collectives import (
    ALL_REDUCE,
    DIRECTIONS,
    GATHER,
    REDUCE_SCATTER,
    REGATHER,
)
from fsdp_jax._report_data import CommRow

_WIDTH = 100  # where there is no terminal
_PLAIN = {
    GATHER: "all-gather",
    REGATHER: "all-gather",
    REDUCE_SCATTER: "reduce-scatter",
    ALL_REDUCE: "all-reduce",
}


def human(size: float | None, digits: int = 1) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    if size is None:
        return "unknown"
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:,.{0 if units[0] == 'B' else digits}f} {units[0]}"


def print_report(report: Any, file: IO[str] | None) -> None:
    """Print collectives, memory, schedule and warnings.

    Args:
        report: a `CommReport`.
        file: where to; standard output by default.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH

    def say(text: str = "", style: str = "") -> None:
        lines = textwrap.wrap(text, console.width, subsequent_indent="    ") or [""]
        for line in lines:
            # As Text: a path may hold what rich would read as markup.
            console.print(Text(line, style=style), overflow="ignore", crop=False)

    console.print(_collectives(report))
    say(
        "sent: bytes that each device sends in a step, by the ring algorithm; ideal: "
        "what a device lacks of the parameters, moved once",
        "dim",
    )
    say()
    for line in _memory(report):
        say(line)
    say()
    for line in _schedule(report):
        say(line)
    for warning in report.warnings:
        say(f"! {warning}", "bold")


def _collectives(report: Any) -> Table:
    table = Table(title="collectives of one step, per device", title_justify="left")
    for name in ("direction", "group", "dtype", "devices", "count", "sent"):
        number = name in ("devices", "count", "sent")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for direction in DIRECTIONS:
        rows = [row for row in report.rows if row.direction == direction]
        if not rows:
            continue
        table.add_section()
        for same in _alike(rows):
            row = same[0]
            count = str(sum(r.count for r in same))
            cells = (
                direction if row.op == _PLAIN.get(direction) else _with_op(row),
                _groups(same),
                row.dtype,
                str(row.num_devices),
                count + " per iteration" * row.per_iteration,
                human(sum(r.wire_bytes for r in same)),
            )
            table.add_row(*(Text(cell) for cell in cells))
        count, sent = report.count(direction), report.wire_bytes(direction)
        cells = ("total", _against(report, direction, sent), "", "", str(count))
        table.add_row(*cells, human(sent), style="bold")
    if not report.rows:
        table.add_row("none", "", "", "", "0", "0 B")
    return table


def _with_op(row: CommRow) -> str:
    return row.op if row.direction == "other" else f"{row.direction} ({row.op})"


def _alike(rows: Sequence[CommRow]) -> list[list[CommRow]]:
    """Rows that differ in nothing but the group, together."""
    met: dict[tuple, list[CommRow]] = {}
    for row in rows:
        key = dataclasses.astuple(dataclasses.replace(row, group="", op_name=""))
        met.setdefault(key, []).append(row)
    return list(met.values())


def _groups(rows: Sequence[CommRow]) -> str:
    names = [row.group for row in rows]
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)} groups)"


def _against(report: Any, direction: str, sent: int) -> str:
    """Bytes against the ideal, for the directions that have one."""
    ideal = None
    if direction in (GATHER, REGATHER):
        ideal = report.ideal_gather_bytes
    elif direction == REDUCE_SCATTER:
        ideal = report.ideal_reduce_bytes
    if not ideal:
        return ""
    if direction == REGATHER:
        return f"{sent / ideal:.0%} of ideal, again"
    return f"{sent / ideal:.2f} x ideal"


def _memory(report: Any) -> list[str]:
    m = report.memory
    lines = [
        "memory per device",
        f"  at rest    parameters {human(m.parameter_bytes)}, optimizer state "
        f"{human(m.moment_bytes)}, other arguments {human(m.other_argument_bytes)}",
    ]
    if m.host_argument_bytes:
        lines.append(
            f"  on host    parameters {human(m.host_parameter_bytes)}, optimizer state "
            f"{human(m.host_moment_bytes)}, other arguments "
            f"{human(m.host_other_argument_bytes)}"
        )
    if m.peak_bytes is None:
        return [*lines, "  in a step  unknown: not compiled"]
    return [
        *lines,
        f"  in a step  peak {human(m.peak_bytes)}; temporaries "
        f"{human(m.temporary_bytes)}",
        f"  estimated  at most {human(m.gathered_peak_bytes)} gathered parameters and "
        f"{human(m.gradient_peak_bytes)} gradients not yet reduced at one time, in any "
        "memory of the device",
    ]


def _schedule(report: Any) -> list[str]:
    s = report.schedule
    if s is None:
        return ["schedule", "  unknown: not compiled"]
    lines = ["schedule" + (f" ({s.platform})" if s.platform else "")]
    if s.gathers:
        flying = sum(g.is_async and g.matmuls > 0 for g in s.gathers)
        lines += [
            f"  {flying} of {len(s.gathers)} gathers ({s.async_share:.0%} of the "
            "bytes) are in flight while a matmul runs",
            f"  compute hides {s.hidden_share:.0%} of the bytes gathered",
            f"  ({s.hidden_basis})",
        ]
    lines += [
        f"  before the first of {s.num_matmuls} matmuls: "
        f"{s.gathers_before_first_matmul} gathers of {s.groups_before_first_matmul} "
        f"groups; after the last: {s.reductions_after_last_matmul} reductions of "
        f"{s.groups_after_last_matmul} groups",
        f"  in order: {s.notation}",
        "  (G gather, ( ) asynchronous gather, d matmul, ~ compute fused with one, R",
        "  reduce-scatter, A all-reduce, < > asynchronous other, P permute, { } loop)",
    ]
    if s.platform == "cpu":
        lines.append(
            "  XLA for CPU runs every collective alone, merges gathers and widens "
            "bfloat16: compile for the device you train on to judge order and memory"
        )
    return lines
