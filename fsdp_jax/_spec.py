"""How one parameter rests: what is cut, over what, and how much is added to cut it.

What must not live here: the Variable that holds the parameter (`_managed`), and the
choice of the dim (`_placement`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from jax.sharding import NamedSharding

from fsdp_jax import _layout
from fsdp_jax._mesh import MeshInfo, Others
from fsdp_jax._move import move, pad, unpad

Path = tuple[Any, ...]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False)
class ParamSpec:
    """How a managed parameter rests. Static metadata of its Variable.

    Attributes:
        path: dotted name, from the module of the `fully_shard` call.
        dim: dim that is cut, counted from the end and so negative; None for whole.
        size: full size of that dim; 0 for whole.
        mesh: mesh and the roles of its axes.
        reason: why it stays whole; empty if it is cut.
        full: whether the Variable holds the full array at present.
        others: dims, from the end, and the other axes that they are cut over.
        memory_kind: where it rests; None for device memory.
        padding: rows of zeros at the end of that dim while it rests.
        layers: how many of its leading dims are known to count layers.
    """

    path: str
    dim: int | None
    size: int
    mesh: MeshInfo
    reason: str = ""
    full: bool = False
    others: Others = ()
    memory_kind: str | None = None
    padding: int = 0
    layers: int = 0

    def __repr__(self) -> str:
        place = f"dim={self.dim}" if self.dim is not None else f"whole: {self.reason}"
        place += ", unsharded at present" if self.full else ""
        return f"ParamSpec({self.path!r}, {place}, over {self.mesh.num_shards})"

    def check_dims(self, value: Any) -> None:
        """Raise if a value of the parameter lacks the dim that is cut.

        Raises:
            ValueError: it does: it is a slice of a stack.
        """
        shape = tuple(getattr(value, "shape", ()))
        if self.dim is not None and self.cut and len(shape) < -self.dim:
            raise ValueError(
                f"parameter {self.path!r} is cut on dim {self.dim}, which it no longer "
                f"has (shape {shape}): a scan or vmap took the layer dim of a stack "
                "away. Cut another dim: fully_shard(..., shard_placement_fn=lambda p: "
                "Shard(1)); or let it run over param[...], the array."
            )

    @property
    def rest_size(self) -> int:
        """Size of the dim that is cut while the parameter rests."""
        return self.size + self.padding

    def _has(self, value: Any, size: int) -> bool:
        """Whether `value` has a size on the dim that is cut."""
        if self.dim is None:
            return True
        shape = getattr(value, "shape", ())
        return len(shape) >= -self.dim and shape[self.dim] == size

    def is_shard(self, value: Any) -> bool:
        """Whether `value` is one device's piece, as a per-device program sees it."""
        n = self.mesh.num_shards
        if self.dim is None or n == 1 or self.full:
            return False
        return self._has(value, self.rest_size // n)

    def fits(self, value: Any) -> bool:
        """Whether `value` has the full size on the dim that is cut."""
        return self._has(value, self.size)

    def rests(self, value: Any) -> bool:
        """Whether `value` has the size of the whole parameter at rest."""
        return self._has(value, self.rest_size)

    def holds(self, value: Any) -> bool:
        """Whether `value` has the size that the Variable's value has now."""
        return self.fits(value) if self.full else self.rests(value)

    def lacks_padding(self, value: Any) -> bool:
        """Whether rows are to be added to `value` for it to rest."""
        return bool(self.padding) and not self.full and self.fits(value)

    def pads(self, value: Any) -> bool:
        """Whether `value` is the parameter at rest with rows that are not its own."""
        return bool(self.padding) and not self.full and self.rests(value)

    def shape(self, value: Any) -> tuple[int, ...]:
        """Shape of the parameter of which `value` is a piece, or as which it rests."""
        shape = tuple(value.shape)
        if self.dim is None or not (self.is_shard(value) or self.pads(value)):
            return shape
        at = self.dim % len(shape)
        return (*shape[:at], self.size, *shape[at + 1 :])

    def rest_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape at rest of a parameter of a full shape."""
        return _layout.padded_shape(shape, self.dim, self.padding)

    def marked(self, full: bool) -> ParamSpec:
        """This spec, for a Variable that holds the full array or not."""
        return self if self.full == full else dataclasses.replace(self, full=full)

    @property
    def cut(self) -> bool:
        """Whether it must be gathered, or brought to the devices, to be used."""
        away = self.mesh.num_shards > 1 or self.memory_kind is not None
        return self.dim is not None and away

    @property
    def blocks(self) -> int:
        """Into how many pieces other axes cut the dim, each of which is cut again."""
        axes = [axes for dim, axes in self.others if dim == self.dim]
        return self.mesh.size(axes[0] if axes and self.cut else ())

    def sharding(self, ndim: int) -> NamedSharding:
        """The sharding at rest of a value with `ndim` dims."""
        return self.mesh.sharding(ndim, self.dim, self.others, self.memory_kind)

    def whole(self, ndim: int) -> NamedSharding:
        """The sharding of the full array, on the devices."""
        return self.mesh.sharding(ndim, None, self.others)

    def present(self, ndim: int) -> NamedSharding:
        """The sharding that the Variable's value has now: whole while it is full."""
        return self.whole(ndim) if self.full else self.sharding(ndim)

    def settled(self, value: Any) -> Any:
        """A value of the parameter as the Variable holds it now: padded at rest."""
        if self.dim is not None and self.lacks_padding(value):
            value = pad(value, self.dim, self.padding)
        return move(value, self.present(value.ndim))

    def unpadded(self, value: Any) -> Any:
        """A value of the parameter without the padding that it may rest with."""
        if self.dim is None or not self.pads(value):
            return value
        whole = self.whole(len(value.shape))
        return unpad(value, self.dim, self.padding, whole)

    def unpadded_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """A sharding of the parameter itself: on a dim that divides, else whole."""
        ndim, by_dim = len(shape), dict(self.others)
        blocks = [self.mesh.size(by_dim.get(d, ())) for d in range(-ndim, 0)]
        first = self.layers - ndim
        dim, _ = _layout.choose_dim(shape, self.mesh.num_shards, blocks, first)
        return self.mesh.sharding(ndim, dim, self.others)


def dotted(path: Path) -> str:
    """A path as users write it: `('blocks', 3, 'scale')` is `blocks.3.scale`."""
    return ".".join(str(part) for part in path)


def by_name(found: Iterable[tuple[Path, T]], who: str) -> dict[str, tuple[Path, T]]:
    """What lies at several paths, by dotted name, with the path.

    Raises:
        ValueError: two paths have the same name: a part has a dot in it, or one is a
            number and the other one spells it.
    """
    named: dict[str, tuple[Path, T]] = {}
    for path, value in found:
        name = dotted(path)
        if name in named and named[name][0] != path:
            raise ValueError(
                f"{who}: {name!r} names two things, at {named[name][0]} and at "
                f"{tuple(path)}. Give one of them another name: parts are joined by "
                "dots."
            )
        named[name] = tuple(path), value
    return named
