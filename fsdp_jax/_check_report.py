"""What `check` found, as data and as a table of 80 columns.

What must not live here: finding it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any

_WIDTH = 80
_NAMES = {
    "loss": "loss",
    "gradient": "gradient",
    "output": "output",
    "state": "Variable",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A documented rule by which numbers differ from those of the unsharded model.

    Attributes:
        rule: its name, such as "cut argument".
        reason: what was found, and by which experiment.
        advice: what to do where that is not meant.
    """

    rule: str
    reason: str
    advice: str


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """One array that differs, or an error.

    Attributes:
        what: "loss", "gradient", "state", "output" or "error".
        path: dotted name in the model, or key in the output; empty for the loss.
        difference: the largest absolute one; infinite where shapes differ.
        relative: the same over the largest number of the unsharded array.
        findings: the rules that explain it together; empty if none does.
        found: the shapes, if they differ, or the text of the error.
    """

    what: str
    path: str
    difference: float
    relative: float
    findings: tuple[Finding, ...] = ()
    found: str = ""

    @property
    def rule(self) -> str | None:
        """Names of the rules that explain it; None if none does."""
        return " + ".join(f.rule for f in self.findings) or None

    @property
    def advice(self) -> str:
        """What to do."""
        return " ".join(f.advice for f in self.findings)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """How a function differs, sharded, from itself unsharded. Made by `check`.

    Attributes:
        rows: every array that differs, and errors.
        equal: by "loss", "gradient", "state" and "output", how many arrays are equal.
        treated: how each argument, output and Variable was treated, one line each.
        notes: what may differ with other numbers, one sentence each.
        num_devices: over how many devices the batch was cut.

    Source: README, "Before a long job".
    """

    rows: tuple[CheckRow, ...]
    equal: dict[str, int]
    treated: tuple[str, ...]
    notes: tuple[str, ...]
    num_devices: int

    @property
    def ok(self) -> bool:
        """Whether a documented rule explains every difference, and there is no error.

        That a rule explains it does not say that it is meant: read the table.
        """
        return all(row.rule and row.what != "error" for row in self.rows)

    def raise_if_different(self, allow: Collection[str] = ()) -> None:
        """Raise unless all numbers are equal, but for rules that are meant.

        Args:
            allow: names of rules, such as "random streams".

        Raises:
            RuntimeError: another difference; the text is the table.
        """
        for row in self.rows:
            rules = [f.rule for f in row.findings]
            if row.what == "error" or not rules or set(rules) - set(allow):
                raise RuntimeError(
                    "check: sharded and unsharded numbers differ.\n" + self.table()
                )

    def to_json(self) -> str:
        """All of it as JSON; infinite differences as null."""
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            cells: dict[str, Any] = dataclasses.asdict(row) | {"rule": row.rule}
            for name in ("difference", "relative"):
                cells[name] = cells[name] if math.isfinite(cells[name]) else None
            rows.append(cells)
        whole = dataclasses.asdict(self) | {"ok": self.ok, "rows": rows}
        return json.dumps(whole, indent=2)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The report as text, at most 80 columns wide."""
        lines = [
            f"check: {self.num_devices} device{'s' * (self.num_devices != 1)} against "
            "one, unsharded",
            "",
            *self._rows(),
        ]
        findings = self._findings()
        for number, finding in enumerate(findings, 1):
            head = f"[{number}] "
            lines += ["", *_wrapped(f"{head}{finding.rule}: {finding.reason}", 4)]
            lines += _wrapped("    " + finding.advice, 4)
        unexplained = [r for r in self.rows if not r.findings and r.what != "error"]
        if unexplained:
            lines += ["", *_wrapped(UNEXPLAINED, 4)]
        for row in self.rows:
            if row.what == "error":
                lines += ["", *_wrapped(f"! the sharded run fails: {row.found}", 4)]
        for note in self.notes:
            lines += ["", *_wrapped(f"note: {note}", 4)]
        if self.treated:
            lines += ["", "treated:"]
            for line in self.treated:
                lines += _wrapped("  " + line, 6)
        return "\n".join(lines)

    def _findings(self) -> list[Finding]:
        return list(dict.fromkeys(f for row in self.rows for f in row.findings))

    def _rows(self) -> Iterator[str]:
        numbers = {finding: i for i, finding in enumerate(self._findings(), 1)}
        cells = [("what", "where", "difference", "relative", "because of")]
        for row in self.rows:
            why = ", ".join(f"{f.rule} [{numbers[f]}]" for f in row.findings)
            where = row.path
            if row.found and row.what != "error":
                where = f"{where} {row.found}".strip()
            cells.append(
                (
                    row.what,
                    where,
                    "" if row.what == "error" else _number(row.difference, "shape"),
                    "" if row.what == "error" else _number(row.relative, "-"),
                    why or ("" if row.what == "error" else "NOT EXPLAINED"),
                )
            )
        if self.rows:
            yield from _aligned(cells)
        counts = [
            f"{n} {name}{'s' * (n != 1)}" if what != "loss" else name
            for what, name in _NAMES.items()
            if (n := self.equal.get(what, 0))
        ]
        if counts:
            yield ("equal: " if self.rows else "all equal: ") + ", ".join(counts)


UNEXPLAINED = (
    "! NOT EXPLAINED: no documented rule makes these numbers: running the function on "
    "each device's rows unsharded, and joining by the rules, gives others. That is a "
    "fault of fsdp_jax, or rounding that is more than rtol and atol allow, or the "
    "function depends on what is not an argument."
)


def _number(x: float, infinite: str) -> str:
    return f"{x:.2g}" if math.isfinite(x) else infinite


def _wrapped(text: str, indent: int) -> list[str]:
    lines: list[str] = []
    for part in text.splitlines():
        lines += textwrap.wrap(
            part,
            _WIDTH,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
    return lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows as columns: the two names take what room the others leave, and wrap."""
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    gaps = 2 * 4
    room = _WIDTH - gaps - widths[0] - widths[2] - widths[3]
    if widths[1] + widths[4] > room:
        widths[4] = min(widths[4], max(room // 2, room - widths[1]))
        widths[1] = room - widths[4]
    for row in rows:
        parts = [textwrap.wrap(c, w) or [""] for c, w in zip(row, widths)]
        for i in range(max(len(p) for p in parts)):
            cells = [p[i] if i < len(p) else "" for p in parts]
            texts = [
                c.rjust(w) if k in (2, 3) else c.ljust(w)
                for k, (c, w) in enumerate(zip(cells, widths))
            ]
            yield "  ".join(texts).rstrip()
