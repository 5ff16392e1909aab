"""State with one entry per row beside caches that are cut with the rows of the batch.

What must not live here: which caches are cut, and how (`_join`, `_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fsdp_jax import _functional
from fsdp_jax._join import Slot, stacks_of
from fsdp_jax._rows import first_dim
from fsdp_jax._spec import dotted

# What they hold after a call has a rule of its own.
_OTHER_KINDS = (
    nnx.Param,
    nnx.BatchStat,
    nnx.Cache,
    nnx.Intermediate,
    nnx.OptState,
    nnx.RngState,
    nnx.metrics.MetricState,
)


def check_beside_caches(
    who: str,
    slots: Sequence[Slot],
    arrays: Sequence[Any],
    collections: Any,
    whole: Sequence[bool],
) -> None:
    """Raise if other state may hold the rows of a cache that is cut.

    It is whole on every device, and beside a cache of one row it would be broadcast.

    Args:
        who: name of the public function.
        slots: of the state.
        arrays: of the state.
        collections: those of a Linen model that are cut on their first dim.
        whole: of each NNX object, whether the user says that its state is whole.

    Raises:
        ValueError: a dim has as many entries as a cut cache has rows: for integers any,
            for others the first one, or that of a cache.
    """
    cut = {
        (s.shape[s.rows], s.rows): f"{s.kind.__name__} {dotted(s.path[1:])!r}"
        for s in slots
        if s.rows is not None
    }
    for keys, x in jax.tree_util.tree_leaves_with_path(collections):
        if jnp.ndim(x):
            path = dotted(tuple(_functional.plain_key(k) for k in keys))
            cut.setdefault((x.shape[0], 0), f"collection's {path!r}")
    if not cut:
        return
    stacks = stacks_of(slots)
    for slot, x in zip(slots, arrays, strict=True):
        if slot.managed or issubclass(slot.kind, _OTHER_KINDS) or whole[slot.path[0]]:
            continue
        start = first_dim(slot.path, stacks)
        dims = [d for d in range(start, len(slot.shape)) if slot.shape[d] != 1]
        exact = not jnp.issubdtype(x.dtype, jnp.inexact)
        for (rows, at), cache in cut.items():
            found = [
                d
                for d in dims
                if slot.shape[d] == rows and (exact or d in (dims[0], at))
            ]
            kind = "array" if slot.kind is jax.Array else slot.kind.__name__
            if found:
                raise ValueError(
                    f"{who}: the {kind} {dotted(slot.path[1:])!r} of "
                    f"shape {slot.shape} is whole on every device, but dim {found[0]} "
                    f"has as many entries as the {cache}, which is cut over the "
                    f"devices, has rows ({rows}). If these are the rows of the batch, "
                    "make it an nnx.Cache (in Linen, put it into the collection "
                    "'cache'), or pass its array as an argument. If not, say that the "
                    "state of that argument is whole: in_specs={NAME: PartitionSpec()}."
                )
