"""The collectives of a lowered program, before any compiler has touched them.

What lives here: a walk over the StableHLO of a lowered function: kind, dtype, bytes,
devices, group and count of each collective. What must not: compiled text (`_hlo`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from fsdp_jax._hlo import itemsize_bits
from fsdp_jax._hlo_collectives import (
    OPS,
    USER,
    direction_of,
    ring_bytes,
    scopes_of,
)

_OPS = {f"stablehlo.{op.replace('-', '_')}": op for op in OPS}
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>,]+)")
_LOCATION = re.compile(r'"([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Written:
    """One collective of the lowered program, or its part in one dtype.

    Attributes:
        op: as HLO spells it.
        group: module path, or `(user code)`.
        direction: one of `_hlo_collectives.DIRECTIONS`.
        op_name: name of the traced operation.
        dtype: on the wire.
        shapes: of the full arrays: gathered, or before they are scattered or reduced.
        full_bytes: bytes of them.
        wire_bytes: sent by each device, by the ring algorithm.
        num_devices: devices of one replica group.
        replicas: the replica groups as the program writes them.
        times: how often it runs; None: once per iteration of a loop of unknown length.
    """

    op: str
    group: str
    direction: str
    op_name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    full_bytes: int
    wire_bytes: int
    num_devices: int
    replicas: str
    times: int | None


def read_collectives(module: Any) -> list[Written]:
    """Find every collective of a lowered program, once for each time it is called.

    Args:
        module: MLIR module, as `lowered.compiler_ir("stablehlo")` gives it.

    Returns:
        The collectives in program order.
    """
    meshes = {}
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            sizes = re.findall(r'"([^"]+)"=(\d+)', str(op.attributes["mesh"]))
            meshes[_symbol(op)] = {axis: int(size) for axis, size in sizes}
    functions = functions_of(module)
    walk = _Walk(functions, meshes)
    main = functions.get("main")
    return list(walk.operations(main, "", 1, ())) if main is not None else []


def functions_of(module: Any) -> dict[str, Any]:
    """The functions of an MLIR module, by name."""
    return {
        _symbol(op): op
        for op in module.body.operations
        if "sym_name" in op.attributes and op.operation.name != "sdy.mesh"
    }


def _symbol(op: Any) -> str:
    return str(op.attributes["sym_name"]).strip('"')


class _Walk:
    def __init__(
        self, functions: dict[str, Any], meshes: dict[str, dict[str, int]]
    ) -> None:
        self.functions, self.meshes = functions, meshes
        self.busy: dict[str, bool] = {}

    def operations(
        self, owner: Any, prefix: str, times: int | None, stack: tuple[str, ...]
    ) -> Iterator[Written]:
        for region in owner.regions:
            for block in region.blocks:
                for op in block.operations:
                    yield from self.operation(op, prefix, times, stack)

    def operation(self, op, prefix, times, stack) -> Iterator[Written]:
        name = op.operation.name
        if name in _OPS:
            yield from self.read(op.operation, _OPS[name], prefix, times)
        elif name in ("func.call", "call"):
            callee = str(op.attributes["callee"]).strip("@").strip('"')
            if callee in self.functions and callee not in stack and self.has(callee):
                inner = f"{prefix}/{name_of(op)}"
                yield from self.operations(
                    self.functions[callee], inner, times, (*stack, callee)
                )
        elif name == "stablehlo.while":
            trips = _trip_count(op.operation)
            inner = times * trips if times is not None and trips is not None else None
            yield from self.operations(op, f"{prefix}/{name_of(op)}", inner, stack)
        elif len(op.operation.regions):
            yield from self.operations(op, f"{prefix}/{name_of(op)}", times, stack)

    def read(self, op, kind, prefix, times) -> Iterator[Written]:
        name = f"{prefix}/{name_of(op)}".strip("/")
        scope = scopes_of(name)[-1:]
        group, direction = scope[0] if scope else (USER, direction_of(kind, name))
        n = _group_size(op, self.meshes)
        values = op.operands if kind in ("reduce-scatter", "all-reduce") else op.results
        tensors: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        for value in values:
            dtype, shape, size = tensor_of(value.type)
            tensors.setdefault(dtype, []).append((shape, size))
        replicas = op.attributes
        for dtype, found in tensors.items():
            size = sum(size for _, size in found)
            yield Written(
                op=kind,
                group=group,
                direction=direction,
                op_name=name,
                dtype=dtype,
                shapes=tuple(shape for shape, _ in found),
                full_bytes=size,
                wire_bytes=ring_bytes(kind, size, n),
                num_devices=n,
                replicas=str(replicas["replica_groups"])
                if "replica_groups" in replicas
                else "",
                times=times,
            )

    def has(self, function: str) -> bool:
        """Whether a function communicates, so that its calls are worth walking."""
        if function not in self.busy:
            self.busy[function] = False
            found = self.operations(self.functions[function], "", 1, (function,))
            self.busy[function] = next(found, None) is not None
        return self.busy[function]


def name_of(op: Any) -> str:
    """Name of the traced operation of an MLIR operation; empty if it has none."""
    for text in _LOCATION.findall(str(op.location)):
        if text and not re.search(r"\.\w+$", text.split(":")[0]):
            return text
        if "fsdp:" in text:
            return text
    return ""


def tensor_of(kind: Any) -> tuple[str, tuple[int, ...], int]:
    """Element type as HLO spells it, sizes and bytes of an MLIR tensor type."""
    found = _TENSOR.match(str(kind))
    if not found:
        return "token", (), 0
    dims = tuple(int(d) for d in found.group(1).split("x") if d)
    dtype = {"i1": "pred"}.get(found.group(2), found.group(2))
    dtype = re.sub(r"^ui(?=\d)", "u", re.sub(r"^i(?=\d)", "s", dtype)).lower()
    return dtype, dims, -(-math.prod(dims) * itemsize_bits(dtype) // 8)


def _group_size(op: Any, meshes: dict[str, dict[str, int]]) -> int:
    """Devices in one replica group: of a list of groups, or of axes of a mesh."""
    for name in ("replica_groups", "source_target_pairs"):
        if name in op.attributes:
            text = str(op.attributes[name])
            if mesh := re.search(r'mesh = @"?([^",>]+)', text):
                return _axes_size(text, meshes[mesh.group(1)])
            found = re.search(r"tensor<(\d+)x(\d+)xi64>", text)
            if found:
                index = 2 if name == "replica_groups" else 1
                return int(found.group(index))
            if found := re.search(r"dense<\[\[([\d, ]*)\]", text):
                return len(found.group(1).split(","))
    return 1


def _axes_size(text: str, sizes: dict[str, int]) -> int:
    """Devices along the axes, or parts of axes, that a replica group names."""
    n = 1
    for ref in text.split("axis_ref<")[1:]:
        name = re.search(r'name = "([^"]+)"', ref)
        part = re.search(r"pre_size = \d+, size = (\d+)|\(\d+\)(\d+)", ref)
        if part:
            n *= int(part.group(1) or part.group(2))
        elif name:
            n *= sizes[name.group(1)]
    return n


def _trip_count(loop: Any) -> int | None:
    """How often a `while` runs: a counter from a constant to a constant by ones."""
    condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    compare = condition.operations[len(condition.operations) - 1].operands[0].owner
    if getattr(compare, "name", "") != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    counter, bound = compare.operands
    index = _position(condition, counter)
    limit = _constant(bound)
    if index is None:
        return None
    if limit is None and (at := _position(condition, bound)) is not None:
        returned = body.operations[len(body.operations) - 1].operands[at]
        if _position(body, returned) == at:  # the loop leaves it alone
            limit = _constant(loop.operands[at])
    start = _constant(loop.operands[index])
    add = body.operations[len(body.operations) - 1].operands[index].owner
    if start is None or limit is None or getattr(add, "name", "") != "stablehlo.add":
        return None
    steps = [_constant(value) for value in add.operands]
    if not any(_position(body, value) == index for value in add.operands):
        return None
    step = next((s for s in steps if s is not None), None)
    return -(-max(limit - start, 0) // step) if step and step > 0 else None


def _position(block: Any, value: Any) -> int | None:
    """Which argument of a block a value is."""
    for i, argument in enumerate(block.arguments):
        if argument == value:
            return i
    return None


def _constant(value: Any) -> int | None:
    """An integer known from the program text."""
    owner = value.owner
    if getattr(owner, "name", "") != "stablehlo.constant":
        return None
    found = re.search(r"dense<(-?\d+)>", str(owner.attributes["value"]))
    return int(found.group(1)) if found else None
