"""`describe`: how every parameter of a model rests, and why one is whole.

What lives here: the report of a sharded model, from shapes alone. What must not:
anything that reads a value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jax.core import Tracer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_jax import _functional, _layout
from fsdp_jax._batch import mesh_of
from fsdp_jax._generated import original_class
from fsdp_jax._managed import spec_of
from fsdp_jax._spec import ParamSpec, dotted
from fsdp_jax._state import is_sharded


@dataclasses.dataclass(frozen=True)
class ParamRow:
    """One parameter of a report.

    Attributes:
        path: dotted name.
        shape: full shape.
        local_shape: shape of one device's piece.
        dim: dim that is cut, None if it is whole.
        padding: rows of zeros at the end of that dim.
        dtype: dtype at rest.
        group: path and class of the module whose group it travels in; `-` if none.
        bytes_per_device: bytes of one device's piece.
        reason: why it is whole; empty if it is cut.
    """

    path: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dim: int | None
    dtype: str
    group: str
    bytes_per_device: int
    reason: str
    padding: int = 0


@dataclasses.dataclass(frozen=True)
class Description:
    """A report of a sharded model; prints as a table, and renders in rich.

    Attributes:
        rows: one per parameter, in the order of `nnx.state`.
        num_shards: devices that parameters are cut over.
        num_replicas: how many copies of each shard there are.
        bytes_per_device: parameter bytes of one device at rest.
        total_bytes: bytes of the parameters themselves.
        largest_group_bytes: bytes, on one device, of the largest group while it is
            gathered.
    """

    rows: tuple[ParamRow, ...]
    num_shards: int
    bytes_per_device: int
    total_bytes: int
    largest_group_bytes: int
    num_replicas: int = 1

    def table(self) -> Table:
        """The report as a `rich.table.Table`, totals last."""
        title = f"parameters over {self.num_shards} devices"
        if self.num_replicas > 1:
            title += f", {self.num_replicas} copies of each shard"
        table = Table(title=title)
        columns = ["path", "shape", "shard", "dim", "dtype", "group", "bytes/device"]
        if any(row.reason for row in self.rows):
            columns.append("why whole")
        for name in columns:
            side = "right" if name == "bytes/device" else "left"
            table.add_column(
                name, justify=side, overflow="fold", no_wrap=name == "path"
            )

        def add(*cells: str) -> None:
            # As Text: a path may hold what rich would read as markup.
            table.add_row(*(Text(cell) for cell in cells[: len(columns)]))

        for row in self.rows:
            dim = "whole" if row.dim is None else str(row.dim)
            dim += f" (+{row.padding})" if row.padding else ""
            add(
                row.path,
                str(row.shape),
                str(row.local_shape),
                dim,
                row.dtype,
                row.group,
                f"{row.bytes_per_device:,}",
                row.reason,
            )
        table.add_section()
        add(
            f"total ({len(self.rows)})",
            f"{self.total_bytes:,} bytes",
            "",
            "",
            "",
            f"largest gathered {self.largest_group_bytes:,}",
            f"{self.bytes_per_device:,}",
            "",
        )
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        console = Console(
            width=160, color_system=None, force_terminal=False, highlight=False
        )
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def describe(model: Any) -> Description:
    """Report how each parameter of a sharded model rests.

    Only shapes are read, so this is cheap and works in every process, and inside jit.

    Args:
        model: a sharded module, or one that contains some; also a Linen one.

    Returns:
        The report; print it, or read its `rows`.

    Raises:
        ValueError: no sharded module in `model`.

    Source: README, "The contract".
    """
    nodes = _functional.model_nodes(model)
    mesh, model = mesh_of(nodes, "describe"), nodes[0]
    owners = _owners(model)
    rows, gathered = [], {}
    for path, variable in _functional.walk(model):
        if not isinstance(variable, nnx.Param):
            continue
        value, spec = variable.get_raw_value(), spec_of(variable)
        if not hasattr(value, "shape"):
            continue
        group, dim = owners.get(id(variable), "-"), None
        shape, local, reason = _shapes(value, spec)
        if spec is not None:
            dim = None if spec.dim is None else spec.dim + len(shape)
            piece = spec.whole(len(shape)).shard_shape(shape)
            size = _layout.size_bytes(piece, value.dtype)
            gathered[group] = gathered.get(group, 0) + size
        size = _layout.size_bytes(local, value.dtype)
        padding = spec.padding if spec is not None and not spec.full else 0
        rows.append(
            ParamRow(
                dotted(path),
                shape,
                local,
                dim,
                str(value.dtype),
                group,
                size,
                reason,
                padding,
            )
        )
    return Description(
        rows=tuple(rows),
        num_shards=mesh.num_shards,
        bytes_per_device=sum(r.bytes_per_device for r in rows),
        total_bytes=sum(_layout.size_bytes(r.shape, r.dtype) for r in rows),
        largest_group_bytes=max(gathered.values(), default=0),
        num_replicas=mesh.num_replicas,
    )


def _owners(model: Any) -> dict[int, str]:
    """Name of the group of each managed Variable, by identity."""
    owners: dict[int, str] = {}
    for path, module in _functional.walk(model):
        if is_sharded(module):
            name = original_class(type(module)).__name__
            label = f"{dotted(path)} ({name})" if path else name
            for _, variable in _functional.walk(module, stop=is_sharded):
                if spec_of(variable) is not None:
                    owners[id(variable)] = label
    return owners


def _shapes(value: Any, spec: ParamSpec | None):
    """Full shape, shape of one device's piece, and why they are the same."""
    shape = tuple(value.shape)
    if spec is None:
        return shape, shape, "not managed: ignored, or outside every group"
    shape = spec.shape(value)
    if spec.full and spec.dim is not None and spec.mesh.num_shards > 1:
        whole = spec.whole(len(shape)).shard_shape(shape)
        return shape, whole, "unsharded at present"
    rest = spec.rest_shape(shape)
    return shape, spec.sharding(len(shape)).shard_shape(rest), spec.reason


def local_shape(param: Any) -> tuple[int, ...]:
    """Shape of one device's piece of a parameter or array, such as `(4, 8)`.

    Inside a per-device program that is the shape of the array itself. It includes
    padding: `(3, 4)` on every device for 9 rows over 4, though the last one has none.

    Args:
        param: an `nnx.Variable`, an array, or a `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: none of these.

    Source: specification, "The user contract" (its local shapes).
    """
    value = param.get_raw_value() if hasattr(param, "get_raw_value") else param
    if is_sharded(param) or not hasattr(value, "shape"):
        raise TypeError(
            f"local_shape: expected a Variable or an array, got {type(param).__name__}."
        )
    spec, sharding = spec_of(param), getattr(value, "sharding", None)
    if isinstance(value, Tracer) or sharding is None:
        sharding = None
        if spec is not None and not spec.is_shard(value):
            sharding = spec.present(value.ndim)
    return tuple(sharding.shard_shape(value.shape) if sharding else value.shape)
