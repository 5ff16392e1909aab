"""State that holds the rows of a batch, and the dim that has them.

What must not live here: cutting and joining it (`_join`, `_program`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from fsdp_jax._arguments import axes_of
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._spec import Path

Shape = tuple[int, ...]


def batch_rows(
    shapes: Iterable[Shape], specs: Iterable[PartitionSpec], mesh: MeshInfo
) -> frozenset[int]:
    """How many rows the arguments have that are cut over all data devices."""
    return frozenset(
        shape[dim]
        for shape, spec in zip(shapes, specs, strict=True)
        for dim, axes in enumerate(axes_of(spec))
        if axes == mesh.data_axes and shape[dim]
    )


def stacked_dims(params: Iterable[tuple[Path, int]]) -> dict[Path, int]:
    """Over how many leading dims a node is a stack: what all its parameters are.

    Args:
        params: path of each managed parameter, and how many of its dims count layers.

    Returns:
        The number by the path of the node. Nodes without parameters are left out.
    """
    found: dict[Path, int] = {}
    for path, layers in params:
        for depth in range(len(path)):
            node = path[:depth]
            found[node] = min(found.get(node, layers), layers)
    return found


def first_dim(path: Path, stacks: Mapping[Path, int]) -> int:
    """The first dim of a Variable that counts no layers."""
    return max((stacks.get(path[:depth], 0) for depth in range(len(path))), default=0)


def rows_dim(
    path: Path,
    shape: Sequence[int],
    stacks: Mapping[Path, int],
    rows: Collection[int],
) -> int | None:
    """The first dim, after those of the layers, with as many rows as the batch."""
    dims = range(first_dim(path, stacks), len(shape))
    return next((d for d in dims if shape[d] in rows), None)
