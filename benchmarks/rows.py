"""One row of the tables: what was measured of one program, and how it is shown.

What must not live here: measuring.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import fsdp_jax

_MIB = 1 << 20
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-plugin")


@dataclasses.dataclass
class Row:
    """What was measured of one program. None: not measured, or it failed.

    Attributes:
        config: name of the model's size.
        platform: `tpu`, `gpu` or `cpu`.
        topology: the devices, such as `v5e:4x4` or `cpu:8`.
        program: as `programs.parse` reads it.
        num_blocks: depth of the model.
        peak_mib: most memory of one device at one time.
        peak_vs_auto: that, over the peak of automatic partitioning in the same run.
        gather_bytes: sent by each device to gather parameters, in both directions.
        wire_bytes: sent by each device, by all collectives.
        async_share: share of gather bytes in flight beside a matrix multiplication.
        hidden_share: share of gather bytes that compute covers.
        groups_before_first_matmul: groups gathered before the first multiplication.
        groups_after_last_matmul: groups whose gradients are reduced after the last one.
        compile_s: time that the compiler took.
        step_ms: median time of a step.
        step_vs_auto: that, over automatic partitioning's in the same process.
        step_vs_unsharded: that, over the step of one device that has the whole batch.
        loss: of the last step.
        losses_equal: whether all losses equal those of the first program to 4 decimals.
        schedule: what the compiler made of the order, in the signs of
            `fsdp_jax.comm_report`.
        warnings: what the report warns of.
        error: why there are no figures, in one line.
        made: date and versions.
    """

    config: str
    platform: str
    topology: str
    program: str
    num_blocks: int
    peak_mib: float | None = None
    peak_vs_auto: float | None = None
    gather_bytes: int | None = None
    wire_bytes: int | None = None
    async_share: float | None = None
    hidden_share: float | None = None
    groups_before_first_matmul: int | None = None
    groups_after_last_matmul: int | None = None
    compile_s: float | None = None
    step_ms: float | None = None
    step_vs_auto: float | None = None
    step_vs_unsharded: float | None = None
    loss: float | None = None
    losses_equal: bool | None = None
    schedule: str | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None
    made: str = dataclasses.field(default_factory=lambda: _made())

    def fill(self, report: fsdp_jax.CommReport, compile_s: float) -> None:
        """Take over the figures of a report."""
        self.peak_mib = round((report.peak_bytes or 0) / _MIB, 1)
        self.gather_bytes = report.wire_bytes("forward gather") + report.wire_bytes(
            "backward re-gather"
        )
        self.wire_bytes = report.wire_bytes()
        self.compile_s = round(compile_s, 1)
        self.warnings = report.warnings
        if report.schedule is not None:
            self.async_share = round(report.schedule.async_share, 4)
            self.hidden_share = round(report.schedule.hidden_share, 4)
            self.schedule = report.schedule.notation
            self.groups_before_first_matmul = report.schedule.groups_before_first_matmul
            self.groups_after_last_matmul = report.schedule.groups_after_last_matmul

    def json(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))


@functools.cache
def _made() -> str:
    """Today, and the versions that figures depend on."""
    versions = [f"Python {'.'.join(map(str, sys.version_info[:3]))}"]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return f"{datetime.date.today()}, {', '.join(versions)}"


def read(lines: Iterable[str]) -> list[list[Row]]:
    """Rows from their JSON, in one list for each model and topology.

    Of two rows for the same the later one counts. Ratios are taken anew.

    Raises:
        ValueError: a line that is no row.
    """
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for line in filter(str.strip, lines):
        try:
            row = Row(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"no row of this benchmark: {line[:60]!r}") from error
        key = (row.config, row.topology, row.num_blocks)
        found.setdefault(key, {})[row.program] = row
    tables = [list(rows.values()) for rows in found.values()]
    for rows in tables:
        compare(rows)
    return tables


def compare(rows: Sequence[Row]) -> None:
    """Fill in the ratios of rows that differ in their program alone."""
    by_program = {row.program: row for row in rows}
    for row in rows:
        row.peak_vs_auto = _ratio(by_program.get("auto"), row, "peak_mib")
        row.step_vs_auto = _ratio(by_program.get("auto"), row, "step_ms")
        row.step_vs_unsharded = _ratio(by_program.get("unsharded"), row, "step_ms")


def _ratio(base: Row | None, row: Row, name: str) -> float | None:
    whole, part = getattr(base, name, None), getattr(row, name)
    return round(part / whole, 3) if whole and part is not None else None


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f}"


_COMPILED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("peak MiB", "peak_mib", "{:,.0f}".format),
    ("of auto", "peak_vs_auto", "{:.2f}".format),
    ("gather MiB", "gather_bytes", _mib),
    ("wire MiB", "wire_bytes", _mib),
    ("async", "async_share", _percent),
    ("hidden", "hidden_share", _percent),
    ("before", "groups_before_first_matmul", str),
    ("after", "groups_after_last_matmul", str),
    ("compile s", "compile_s", "{:.0f}".format),
)
_TIMED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step ms", "step_ms", "{:,.0f}".format),
    ("of auto", "step_vs_auto", "{:.2f}".format),
    ("of unsharded", "step_vs_unsharded", "{:.2f}".format),
    ("losses equal", "losses_equal", lambda equal: "yes" if equal else "NO"),
    ("gather MiB", "gather_bytes", _mib),
    ("wire MiB", "wire_bytes", _mib),
    ("compile s", "compile_s", "{:.0f}".format),
)


def markdown(rows: Sequence[Row]) -> str:
    """Rows of one model on one topology as a Markdown table, errors below it."""
    first = rows[0]
    columns = _TIMED if first.platform == "cpu" else _COMPILED
    cells = [["program", *[name for name, _, _ in columns]]]
    for row in rows:
        values = [(getattr(row, field), show) for _, field, show in columns]
        cells.append([row.program, *["" if v is None else f(v) for v, f in values]])
    lines = [f"**{first.config}, {first.num_blocks} blocks, {first.topology}**"]
    lines += ["", *_aligned(cells), ""]
    lines += [f"{made}" for made in dict.fromkeys(row.made for row in rows)]
    failed = [f"- {row.program} failed: {row.error}" for row in rows if row.error]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _aligned(cells: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for number, row in enumerate(cells):
        texts = [row[0].ljust(widths[0])]
        texts += [text.rjust(width) for text, width in zip(row[1:], widths[1:])]
        yield f"| {' | '.join(texts)} |"
        if number == 0:
            rules = ["-" * widths[0], *[f"{'-' * (w - 1)}:" for w in widths[1:]]]
            yield f"| {' | '.join(rules)} |"
