"""Figures of a schedule: what is asynchronous, what is hidden, what comes in a row.

What lives here: arithmetic on a `HloSchedule`. What must not: reading program text, and
words for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fsdp_jax._hlo_collectives import (
    OTHER,
    PARTITIONER,
    REDUCE_SCATTER,
    UNNAMED,
    USER,
    is_outside,
)
from fsdp_jax._hlo_schedule import HloSchedule, Transfer
from fsdp_jax._stablehlo import Written

# By start of `device_kind`: cycles per second of a core, and bytes per second that one
# ring along one torus dimension moves through a chip, both directions together. From
# the vendor's published figures (matrix throughput over matrix units; bandwidth of one
# link, each way), rounded; none of them was measured here.
CHIPS = {
    "TPU v4": (1.05e9, 0.9e11),
    "TPU v5 lite": (1.5e9, 0.9e11),
    "TPU v5": (1.75e9, 1.8e11),
    "TPU v6 lite": (1.75e9, 1.8e11),
}
_SHOWN = 4  # of equal signs in a row


def share(transfers: Iterable[Transfer], part) -> float:
    """Share of the bytes of transfers, each weighed by `part(transfer)`."""
    whole = [(t.total_bytes, part(t)) for t in transfers]
    total = sum(size for size, _ in whole)
    return sum(size * weight for size, weight in whole) / total if total else 0.0


def overlaps(transfer: Transfer) -> bool:
    """Whether a matrix multiplication runs while a transfer is in flight."""
    return transfer.is_async and transfer.matmuls > 0


def hide(schedule: HloSchedule, device_kind: str) -> str:
    """Fill in what share of each transfer compute covers.

    Time on the wire is `wire_bytes` over the bandwidth of one ring, time of compute the
    compiler's `estimated_cycles` over the clock. Compute covers the transfer in flight
    that started first; only what that leaves over covers the next one.

    Args:
        schedule: its transfers are written to.
        device_kind: as JAX spells it.

    Returns:
        How it was determined, in words.
    """
    chip = next((v for k, v in CHIPS.items() if device_kind.startswith(k)), None)
    if chip is None or not any(step.cycles for step in schedule.steps):
        for transfer in schedule.transfers:
            transfer.hidden_share = float(overlaps(transfer))
        return (
            "no cycle estimates here: an asynchronous gather with a matmul between its "
            "start and its end counts as hidden"
        )
    clock, bandwidth = chip
    for transfer in schedule.transfers:
        transfer.wire_cycles = transfer.wire_bytes / bandwidth * clock
    flying: list[Transfer] = []
    left: dict[int, float] = {}
    for step in schedule.steps:
        for transfer in (schedule.transfers[n] for n in step.transfers):
            if step.kind == "start":
                flying.append(transfer)
                left[id(transfer)] = transfer.wire_cycles
            elif step.kind == "done" and transfer in flying:
                flying.remove(transfer)
                whole, rest = transfer.wire_cycles, left[id(transfer)]
                transfer.hidden_share = 1 - rest / whole if whole else 1.0
        cycles = float(step.cycles)
        for transfer in flying if step.kind in ("matmul", "compute") else ():
            used = min(cycles, left[id(transfer)])
            left[id(transfer)] -= used
            cycles -= used
    return (
        f"wire time at {bandwidth / 1e9:.0f} GB/s, one ring of a {device_kind}, "
        f"against the compiler's estimated cycles at {clock / 1e9:.2f} GHz"
    )


def name_by_shape(transfers: Sequence[Transfer], written: Sequence[Written]) -> None:
    """Name reductions that lost their names to the compiler by what they move.

    One that moves arrays of the shapes of reduce-scatters which no other transfer
    accounts for is theirs.

    Args:
        transfers: written to.
        written: the collectives of the lowered program.
    """
    open_groups: dict[tuple[int, ...], list[str]] = {}
    for w in written:
        for shape in w.shapes if w.direction == REDUCE_SCATTER else ():
            open_groups.setdefault(shape, []).append(w.group)
    nameless = [t for t in transfers if t.groups == (UNNAMED,)]
    for t in transfers:
        if t.direction == REDUCE_SCATTER and t not in nameless:
            for shape, group in zip(t.shapes, t.groups * len(t.shapes)):
                if group in open_groups.get(shape, ()):
                    open_groups[shape].remove(group)
    for t in nameless:
        found = [open_groups[s].pop(0) for s in t.shapes if open_groups.get(s)]
        if found:
            t.groups, t.direction = tuple(dict.fromkeys(found)), REDUCE_SCATTER
        elif not written:
            t.groups, t.partitioner_bytes = (PARTITIONER,), t.full_bytes


def tell_apart(transfers: Sequence[Transfer], written: Sequence[Written]) -> None:
    """Have no gather of the partitioner outside of per-device programs count as theirs.

    In a program that has the library's it brings no parameters together for a forward.

    Args:
        transfers: written to.
        written: the collectives of the lowered program.
    """
    if any(w.group != USER for w in written):
        for t in transfers:
            if t.groups == (PARTITIONER,) and t.is_gather and is_outside(t.op_name):
                t.direction = OTHER


def count_groups(transfers: Iterable[Transfer]) -> int:
    """Groups of transfers; a transfer without a module counts for itself."""
    named, nameless = set(), 0
    for transfer in transfers:
        if transfer.groups[0] in (USER, PARTITIONER, UNNAMED):
            nameless += 1
        named |= set(transfer.groups) - {USER, PARTITIONER, UNNAMED}
    return len(named) + nameless


def gathers_before_matmul(schedule: HloSchedule) -> list[Transfer]:
    """Gathers that start before the first matrix multiplication."""
    first = _matmuls(schedule)[:1]
    if not first:
        return []
    return [t for t in schedule.transfers if t.is_gather and t.start < first[0]]


def reductions_after_matmul(schedule: HloSchedule) -> list[Transfer]:
    """Reduce-scatters, in whatever form, that end after the last one."""
    last = _matmuls(schedule)[-1:]
    if not last:
        return []
    reductions = [t for t in schedule.transfers if t.direction == REDUCE_SCATTER]
    return [t for t in reductions if t.done > last[0] and t.form != "fix-up"]


def _matmuls(schedule: HloSchedule) -> list[int]:
    return [i for i, step in enumerate(schedule.steps) if step.kind == "matmul"]


def notation(schedule: HloSchedule) -> str:
    """The schedule as one line.

    The signs are those of `ScheduleReport.notation`; five and more in a row are
    counted.
    """
    signs: list[str] = []
    for step in schedule.steps:
        signs.append(_sign(schedule, step))
    return _shorten("".join(signs))


def _sign(schedule: HloSchedule, step) -> str:
    if step.kind == "enter":
        return "{"
    if step.kind == "leave":
        return "}x" + ("?" if step.times is None else str(step.times)) + " "
    if step.kind in ("matmul", "compute"):
        plain = "d" if step.kind == "matmul" else ""
        return "~" if step.transfers else plain
    transfer = schedule.transfers[step.transfers[0]]
    if transfer.form == "fix-up":
        return ""
    if step.kind != "sync":
        brackets = "()" if transfer.is_gather else "<>"
        return brackets[step.kind == "done"]
    if transfer.op == "all-gather":
        return "G"
    letters = {"reduce-scatter": "R", "all-reduce": "A", "collective-permute": "P"}
    return letters.get(transfer.op, "X")


def _shorten(text: str) -> str:
    def cut(found: re.Match) -> str:
        sign = found.group(1)
        times = len(found.group()) // len(sign)
        return sign * _SHOWN + f"...({times})" if times > _SHOWN + 1 else found.group()

    # Loops without a collective or a multiplication say nothing.
    while (shorter := re.sub(r"\{\}x(?:\d+|\?) ", "", text)) != text:
        text = shorter
    text = re.sub(r"([GdRAPX~])\1{4,}", cut, text)
    text = re.sub(r"(\(\)|<>)\1{4,}", cut, text)
    # The same loop again and again, as a matmul that is cut into windows makes them.
    return re.sub(r"(\{[^{}]*\}x(?:\d+|\?) )\1{4,}", cut, text).strip()
