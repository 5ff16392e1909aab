"""Caches that hold the rows of a batch, and the dim that has them.

What must not live here: cutting and joining them (`_join`, `_program`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from fsdp_jax._batch import axes_of
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


def layer_dims(
    arrays: Iterable[tuple[Path, Shape, int | None]],
) -> dict[Path, int]:
    """Over how many leading dims a node is a stack of layers.

    That is what the shapes of all its arrays begin with, unless a parameter is cut
    there: a stack is never cut along its layers. Nodes without parameters are left out,
    since nothing tells their layers from their rows.

    Args:
        arrays: path and shape of each array of a state; of managed parameters also the
            dim that is cut, counted from the start, or the number of dims for none.

    Returns:
        The number by the path of the node.
    """
    common: dict[Path, Shape] = {}
    with_params: set[Path] = set()
    for path, shape, dim in arrays:
        shape = shape[:dim]
        for depth in range(len(path)):
            node = path[:depth]
            before = common.get(node, shape)
            pairs = list(zip(before, shape))
            same = [a == b for a, b in pairs]
            count = same.index(False) if False in same else len(same)
            common[node] = shape[:count]
            if dim is not None:
                with_params.add(node)
    return {node: len(common[node]) for node in with_params}


def rows_dim(
    path: Path,
    shape: Sequence[int],
    layers: Mapping[Path, int],
    rows: Collection[int],
) -> int | None:
    """The first dim, after those of the layers, with as many rows as the batch."""
    start = max((layers.get(path[:depth], 0) for depth in range(len(path))), default=0)
    return next((d for d in range(start, len(shape)) if shape[d] in rows), None)
