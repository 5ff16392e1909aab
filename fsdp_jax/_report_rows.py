"""The rows of a communication report, and what they are held against.

What lives here: sums over collectives. What must not: reading program text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fsdp_jax._argument_bytes import ArgumentBytes, ShapeAndBytes
from fsdp_jax._hlo import itemsize_bits
from fsdp_jax._hlo_collectives import DIRECTIONS, PARTITIONER, USER, ring_bytes
from fsdp_jax._hlo_schedule import Transfer
from fsdp_jax._report_data import CommRow
from fsdp_jax._stablehlo import Written


def rows_of_written(written: Sequence[Written]) -> list[CommRow]:
    """Rows of the lowered program, gathers first."""
    met: dict[tuple, list[Written]] = {}
    for w in written:
        key = (DIRECTIONS.index(w.direction), w.group, w.op, w.dtype, w.times is None)
        met.setdefault(key, []).append(w)
    rows = []
    for key in sorted(met, key=lambda key: key[0]):
        found = met[key]
        sizes = {w.replicas: w.num_devices for w in found}
        staged = math.prod(sizes.values())
        rows.append(
            CommRow(
                group=found[0].group,
                direction=found[0].direction,
                op=found[0].op,
                dtype=found[0].dtype,
                count=sum(w.times or 1 for w in found),
                full_bytes=sum(w.full_bytes * (w.times or 1) for w in found),
                wire_bytes=sum(w.wire_bytes * (w.times or 1) for w in found),
                num_devices=max(sizes.values()) if found[0].group == USER else staged,
                per_iteration=found[0].times is None,
                op_name=found[0].op_name,
            )
        )
    return rows


def rows_of_partitioner(transfers: Sequence[Transfer]) -> list[CommRow]:
    """Rows of what only the compiled program has."""
    met: dict[tuple, list[Transfer]] = {}
    for t in transfers:
        if t.partitioner_bytes:
            key = (DIRECTIONS.index(t.direction), t.op, t.dtype, t.times is None)
            met.setdefault(key, []).append(t)
    return [
        CommRow(
            group=PARTITIONER,
            direction=found[0].direction,
            op=found[0].op,
            dtype=found[0].dtype,
            count=sum(t.times or 1 for t in found),
            full_bytes=sum(t.partitioner_bytes * (t.times or 1) for t in found),
            wire_bytes=sum(_sent(t) * (t.times or 1) for t in found),
            num_devices=max(t.num_devices for t in found),
            per_iteration=found[0].times is None,
            op_name=found[0].op_name,
        )
        for _, found in sorted(met.items(), key=lambda item: item[0][0])
    ]


def _sent(t: Transfer) -> int:
    return ring_bytes(t.op, t.partitioner_bytes, t.num_devices)


def ideal_bytes(
    arguments: ArgumentBytes,
    gathered: Mapping[ShapeAndBytes, int] | None,
    rows: Iterable[CommRow],
    directions: tuple[str, ...],
) -> int | None:
    """Bytes of what a device lacks of the parameters, in the dtype on the wire.

    Args:
        arguments: of the step.
        gathered: see `ArgumentBytes.lacking`.
        rows: of the report.
        directions: of the rows whose dtype counts.
    """
    if not arguments.parameter_elements:
        return None
    missing, missing_bytes = arguments.lacking(gathered)
    large = [r for r in rows if r.direction in directions and r.full_bytes > 8]
    bits = [(r.full_bytes, itemsize_bits(r.dtype)) for r in large]
    elements = sum(size * 8 / bit for size, bit in bits if bit)
    if not elements:
        return missing_bytes
    itemsize = sum(size for size, bit in bits if bit) / elements
    return round(missing * itemsize)
