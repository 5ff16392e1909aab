"""A schedule as an SVG picture, with nothing but strings.

What lives here: lanes, labels and curves. What must not: figures that the schedule does
not hold.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from fsdp_jax._hlo_schedule import HloSchedule, Transfer
from fsdp_jax._report_table import human

# Mid tones on a transparent ground: they stand out on a light page and on a dark one.
_INK = "#808890"
_COLORS = {
    "forward gather": "#3d8fd6",
    "backward re-gather": "#2aa198",
    "matmul": "#7d8a97",
    "other compute": "#b9c1c9",
    "reduce-scatter": "#9b6fd0",
    "all-reduce, other": "#d9822b",
    "no matmul beside it": "#e0525c",
    "live": "#7d8a97",
    "gathered": "#3d8fd6",
}
_ALONE = "no matmul beside it"
_WIDTH, _LEFT, _RIGHT = 1200, 96, 24
_ROW, _FONT = 12, 11
_MAX_ROWS = 6  # of bars that overlap
_CHART = 190


class _Canvas:
    """Grows downwards."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x, y, text, *, anchor="start", size=_FONT, color=_INK, bold=False):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def box(self, x, y, width, height, color, title="", outline=""):
        edge = f' stroke="{outline}" stroke-width="1.5"' if outline else ""
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
            f'fill="{color}"{edge}>'
            + (f"<title>{escape(title)}</title>" if title else "")
            + "</rect>"
        )

    def line(self, x1, y1, x2, y2, color="", dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        dashes += "" if color else ' stroke-opacity="0.35"'
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{color or _INK}"{dashes}/>'
        )

    def done(self, height: float) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} '
            f'{height:.0f}" width="{_WIDTH}" height="{height:.0f}" '
            'font-family="Helvetica, Arial, sans-serif">\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def _weights(schedule: HloSchedule) -> tuple[list[float], str]:
    """Width of each position, and what it stands for."""
    transfers = schedule.transfers
    if any(step.cycles for step in schedule.steps):
        typical = max(step.cycles for step in schedule.steps) / 40
        widths = []
        for step in schedule.steps:
            width = float(step.cycles)
            if step.kind == "sync":
                width = transfers[step.transfers[0]].wire_cycles or typical
            widths.append(width)
        known = any(t.wire_cycles for t in transfers)
        what = "wire time of" if known else "a fixed width for"
        return widths, (
            "schedule position, in the compiler's estimated cycles of compute and "
            f"{what} collectives that nothing overlaps"
        )
    sizes = {"matmul": 1.0, "sync": 1.0, "start": 0.3, "done": 0.3, "compute": 0.2}
    widths = [sizes.get(step.kind, 0.0) for step in schedule.steps]
    return widths, "schedule position, by instruction (the compiler estimates no times)"


def draw(schedule: HloSchedule) -> str:
    """The picture as text.

    Args:
        schedule: what `read_schedule` found.

    Returns:
        An SVG document.
    """
    widths, meaning = _weights(schedule)
    whole = sum(widths) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / whole
    xs = [float(_LEFT)]
    for width in widths:
        xs.append(xs[-1] + width * scale)
    canvas = _Canvas()
    y = _legend(canvas)
    top = y
    gathers = [t for t in schedule.transfers if t.is_gather]
    others = [t for t in schedule.transfers if not t.is_gather and t.form != "fix-up"]
    y = _bars(canvas, y, "gathers", gathers, xs)
    y = _compute(canvas, y, schedule, xs)
    y = _bars(canvas, y, "reductions", others, xs)
    y = _loops(canvas, y, top, schedule, xs)
    y = _chart(canvas, y, schedule, xs)
    canvas.text((_LEFT + _WIDTH - _RIGHT) / 2, y + 16, meaning, anchor="middle")
    return canvas.done(y + 28)


def write(schedule: HloSchedule, path: Any) -> None:
    """Write the picture of a schedule to a file."""
    pathlib.Path(path).write_text(draw(schedule), encoding="utf-8")


def _legend(canvas: _Canvas) -> float:
    canvas.text(_LEFT, 20, "one step in the order of execution", size=14, bold=True)
    x = float(_LEFT)
    for name, color in list(_COLORS.items())[:7]:
        outlined = name == _ALONE
        canvas.box(
            x, 31, 12, 10, "none" if outlined else color, outline=color * outlined
        )
        canvas.text(x + 17, 40, name)
        x += 17 + _text_width(name) + 22
    return 56


def _text_width(text: str, size: int = _FONT) -> float:
    return 0.56 * size * len(text)


def _color(transfer: Transfer) -> str:
    name = transfer.direction
    if transfer.op == "all-reduce" or name not in _COLORS:
        name = "all-reduce, other"
    return _COLORS[name]


def _bars(
    canvas: _Canvas,
    y: float,
    title: str,
    transfers: Sequence[Transfer],
    xs: Sequence[float],
) -> float:
    """Transfers in flight, one row for each that overlaps, names above."""
    y = _names(canvas, y, transfers, xs)
    ends: list[float] = []
    for transfer in transfers:
        x1, x2 = xs[transfer.start], xs[transfer.done + 1]
        free = (r for r, end in enumerate(ends) if end <= x1 + 0.01)
        row = next(free, len(ends))
        if row == len(ends) and row < _MAX_ROWS:
            ends.append(x2)
        row = min(row, _MAX_ROWS - 1)
        ends[row] = max(ends[row], x2)
        alone = not (transfer.is_async and transfer.matmuls)
        wide = x2 - x1 > 4
        inset = 0.75 if alone and wide else 0.0
        canvas.box(
            x1 + max(inset, 0.3),
            y + row * _ROW + inset,
            max(x2 - x1 - 2 * max(inset, 0.3), 0.8),
            _ROW - 3 - 2 * inset,
            _color(transfer) if wide or not alone else _COLORS[_ALONE],
            title=_describe(transfer),
            outline=_COLORS[_ALONE] if inset else "",
        )
    height = max(len(ends), 1) * _ROW
    _lane(canvas, y, height, title)
    return y + height + 14


def _describe(transfer: Transfer) -> str:
    """What a pointer that rests on a bar is told."""
    covered = f", {transfer.hidden_share:.0%} hidden" if transfer.is_async else ""
    return (
        f"{', '.join(transfer.groups)}: {transfer.direction} ({transfer.op}) of "
        f"{human(transfer.full_bytes)} {transfer.dtype} over {transfer.num_devices} "
        f"devices; {transfer.matmuls} matmuls beside it{covered}"
    )


def _names(
    canvas: _Canvas, y: float, transfers: Sequence[Transfer], xs: Sequence[float]
) -> float:
    """Module paths over their bars, each run once, on as many lines as they need."""
    runs: list[tuple[str, float, float]] = []
    for transfer in transfers:
        name = ", ".join(transfer.groups[:2]) + " ..." * (len(transfer.groups) > 2)
        x1, x2 = xs[transfer.start], xs[transfer.done + 1]
        last = next((r for r in reversed(runs[-3:]) if r[0] == name), None)
        if last and x1 - last[2] < 40:
            runs[runs.index(last)] = (name, last[1], max(last[2], x2))
        else:
            runs.append((name, x1, x2))
    ends: list[float] = []
    placed = []
    for name, x1, x2 in sorted(runs, key=lambda run: run[1] + run[2]):
        half = _text_width(name, 9) / 2 + 3
        middle = min(max((x1 + x2) / 2, _LEFT + half), _WIDTH - _RIGHT - half)
        row = next((r for r, e in enumerate(ends) if e <= middle - half), len(ends))
        if row == 3:
            continue  # no room: the bar still tells it to a pointer
        if row == len(ends):
            ends.append(0.0)
        ends[row] = middle + half
        placed.append((name, middle, row))
    for name, middle, row in placed:
        at = y + 8 + (len(ends) - 1 - row) * 10
        canvas.text(middle, at, name, anchor="middle", size=9)
    return y + 10 * len(ends) + 3


def _lane(canvas: _Canvas, y: float, height: float, title: str) -> None:
    canvas.text(_LEFT - 10, y + height / 2 + 3, title, anchor="end")
    canvas.line(_LEFT, y + height, _WIDTH - _RIGHT, y + height)


def _compute(
    canvas: _Canvas, y: float, schedule: HloSchedule, xs: Sequence[float]
) -> float:
    height = 20
    at = 0
    steps = schedule.steps
    while at < len(steps):
        kind, end = steps[at].kind, at + 1
        if kind in ("matmul", "compute"):
            while end < len(steps) and steps[end].kind == kind:
                end += 1
            name = "matmul" if kind == "matmul" else "other compute"
            if xs[end] - xs[at] > 0.05:
                count = f"{end - at} x {name}"
                canvas.box(xs[at], y, xs[end] - xs[at], height, _COLORS[name], count)
        at = end
    _lane(canvas, y, height, "compute")
    return y + height + 14


def _loops(
    canvas: _Canvas, y: float, top: float, schedule: HloSchedule, xs: Sequence[float]
) -> float:
    """Dashed lines around loop bodies, which are drawn once."""
    open_at: list[int] = []
    found = False
    for i, step in enumerate(schedule.steps):
        if step.kind == "enter":
            open_at.append(i)
        elif step.kind == "leave":
            x1, x2 = xs[open_at.pop()], xs[i]
            if x2 - x1 < 12:
                continue
            for x in (x1, x2):
                canvas.line(x, top, x, y + _CHART + 16, _INK, "4 3")
            times = "each iteration" if step.times is None else f"x {step.times}"
            canvas.text((x1 + x2) / 2, y + 2, f"loop {times}", anchor="middle")
            found = True
    return y + 12 if found else y


def _chart(
    canvas: _Canvas, y: float, schedule: HloSchedule, xs: Sequence[float]
) -> float:
    """Bytes alive over position."""
    curves = {"live": schedule.live_bytes, "gathered": schedule.gathered_bytes}
    most = max((max(c, default=0) for c in curves.values()), default=0) or 1
    unit = _nice(most / 4)
    top = math.ceil(most * 1.08 / unit) * unit
    base = y + 14 + _CHART

    def height(size: float) -> float:
        return base - size / top * _CHART

    for i in range(round(top / unit) + 1):
        canvas.line(_LEFT, height(i * unit), _WIDTH - _RIGHT, height(i * unit))
        canvas.text(
            _LEFT - 8,
            height(i * unit) + 4,
            human(i * unit).replace(".0 ", " "),
            anchor="end",
        )
    for name, curve in curves.items():
        points = _outline(curve, xs, height)
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        canvas.parts.append(
            f'<polygon points="{_LEFT},{base:.1f} {path} {xs[-1]:.1f},{base:.1f}" '
            f'fill="{_COLORS[name]}" fill-opacity="0.35" stroke="{_COLORS[name]}"/>'
        )
    labels = []
    for name, curve, words in (
        ("live", curves["live"], "alive in main memory"),
        ("gathered", curves["gathered"], "gathered parameters in any memory"),
    ):
        if any(curve):
            at = max(range(len(curve)), key=curve.__getitem__)
            labels.append((name, xs[at], height(curve[at]), curve[at], words))
    taken: list[float] = []
    for name, x, py, size, words in labels:
        text = f"{words}: at most {human(size)}"
        while any(abs(py - other) < 14 for other in taken):
            py += 14
        taken.append(py)
        left = x + _text_width(text) + 12 > _WIDTH - _RIGHT
        canvas.line(x, height(size), x, base, _COLORS[name], "3 3")
        canvas.parts.append(
            f'<circle cx="{x:.1f}" cy="{height(size):.1f}" r="3.5" '
            f'fill="{_COLORS[name]}"/>'
        )
        canvas.text(
            x - 7 if left else x + 7,
            py - 5,
            text,
            anchor="end" if left else "start",
            bold=True,
        )
    return base


def _outline(
    curve: Sequence[int], xs: Sequence[float], height: Any
) -> Iterable[tuple[float, float]]:
    """Corners of a staircase; of what falls into half a pixel, the highest."""
    points: list[tuple[float, float]] = []
    for i, size in enumerate(curve):
        y = height(size)
        if points and xs[i] - points[-2][0] < 0.5:
            y = min(y, points[-1][1])
            points[-2:] = [(points[-2][0], y), (xs[i + 1], y)]
        else:
            points += [(xs[i], y), (xs[i + 1], y)]
    return points


def _nice(size: float) -> float:
    """The next round number of bytes: 1, 2, 4, ... times a unit of 1024."""
    return float(2 ** math.ceil(math.log2(max(size, 1))))
