"""What a per-device program may hold of a parameter besides its shard.

What must not live here: anything that makes or uses it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "sink", "full"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Local:
    """A parameter in a per-device program that needs more of it than its shard.

    Attributes:
        shard: this device's piece.
        sink: zeros whose gradient is the parameter's gradient before it is reduced, or
            before all of it is; None to reduce it at once.
        full: the gathered array, if it was gathered before; else None.
    """

    shard: jax.Array
    sink: jax.Array | None = None
    full: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the shard, and so are the other two."""
        return self.shard.shape

    @property
    def ndim(self) -> int:
        return self.shard.ndim

    @property
    def dtype(self) -> Any:
        return self.shard.dtype


def shard_in(value: Any) -> Any:
    """The array in a raw value."""
    return value.shard if isinstance(value, Local) else value
