"""Which mesh axes shard, which replicate, and whether code runs per device.

What lives here: the mesh of a group. What must not: anything that knows of modules,
parameters or their shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fsdp_jax._policies import DataParallelMeshDims

DEFAULT_AXIS = "fsdp"
SLICE_AXIS = "slice"
Others = tuple[tuple[int, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True)
class MeshInfo:
    """A mesh and the roles of its axes.

    Attributes:
        mesh: devices by axis.
        shard_axes: axes over which parameters are cut, major to minor.
        replicate_axes: axes over which the shards are copied, major to minor.
    """

    mesh: Mesh
    shard_axes: tuple[str, ...]
    replicate_axes: tuple[str, ...] = ()

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which a batch is cut, major to minor."""
        return (*self.replicate_axes, *self.shard_axes)

    @property
    def other_axes(self) -> tuple[str, ...]:
        """The axes of the mesh without a role here, such as tensor parallel ones."""
        return tuple(a for a in self.mesh.axis_names if a not in self.data_axes)

    def size(self, axes: Sequence[str]) -> int:
        """Devices along some axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Devices along each sharding axis."""
        return tuple(self.mesh.shape[axis] for axis in self.shard_axes)

    @property
    def num_shards(self) -> int:
        """Into how many pieces a parameter is cut."""
        return self.size(self.shard_axes)

    @property
    def num_replicas(self) -> int:
        """How many copies of each shard there are."""
        return self.size(self.replicate_axes)

    @property
    def num_devices(self) -> int:
        """Over how many devices a batch is cut."""
        return self.size(self.data_axes)

    def places_here(self) -> int:
        """Over how many of the places on the data axes this process has devices."""
        mine = [d.process_index == jax.process_index() for d in self.mesh.devices.flat]
        places = np.argwhere(np.reshape(mine, self.mesh.devices.shape))
        data = [self.mesh.axis_names.index(axis) for axis in self.data_axes]
        return len(np.unique(places[:, data], axis=0))

    @property
    def platform(self) -> str:
        """What the devices are: "cpu", "gpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def memory_kinds(self) -> list[str]:
        """The kinds of memory that a device can address."""
        device = self.mesh.devices.flat[0]
        return [memory.kind for memory in device.addressable_memories()]

    @property
    def gather_stages(self) -> tuple[tuple[str, ...], ...]:
        """The axes that each collective of a gather runs over, in their order.

        Minor axes first. One axis at a time keeps each collective on its own ring. Only
        on TPU v5e one gather runs over both: of two, XLA hides just the second behind
        compute there, and over two axes it is still a gather (unlike a reduction, which
        would become an all-reduce).
        """
        kind = self.mesh.devices.flat[0].device_kind
        stages: list[tuple[str, ...]] = []
        for axis in reversed(self.shard_axes):
            if self.mesh.shape[axis] == 1:
                continue
            before = stages[-1] if stages else ()
            in_slice = not any(map(self._leaves_slice, (axis, *before)))
            if kind == "TPU v5 lite" and len(before) == 1 and in_slice:
                stages[-1] = (axis, *before)
            else:
                stages.append((axis,))
        return tuple(stages)

    def _leaves_slice(self, axis: str) -> bool:
        """Whether devices along an axis lie in different TPU slices."""
        along = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(axis), 0)
        row = along.reshape(len(along), -1)[:, 0]
        return len({getattr(device, "slice_index", None) for device in row}) > 1

    @property
    def explicit(self) -> bool:
        """Whether arrays on this mesh carry their sharding in their type."""
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def compile_only(self) -> bool:
        """Whether the devices can only be compiled for (`fsdp_jax.plan`), not used."""
        client = type(self.mesh.devices.flat[0].client)
        return client.__name__ == "CompileOnlyPyClient"

    def spec(self, ndim: int, dim: int | None) -> PartitionSpec:
        """Spec, over the sharding axes, of an array cut along `dim`; None for whole."""
        if dim is None:
            return PartitionSpec()
        return PartitionSpec(*([None] * (dim % ndim)), _entry(self.shard_axes))

    def data_spec(self, dim: int = 0) -> PartitionSpec:
        """The spec that cuts a dim, counted from the start, over all data devices."""
        return PartitionSpec(*[None] * dim, _entry(self.data_axes))

    def replica_spec(self, ndim: int, dim: int | None) -> PartitionSpec:
        """Spec of one array per replica, stacked on a new dim 0; each as in `spec`."""
        rest = self.spec(ndim, dim)
        return PartitionSpec(_entry(self.replicate_axes), *rest)

    def sharding(
        self,
        ndim: int,
        dim: int | None,
        others: Others = (),
        memory_kind: str | None = None,
    ) -> NamedSharding:
        """Sharding of an array cut along `dim`, and over other axes within that.

        Args:
            ndim: of the array.
            dim: cut over the sharding axes; None for none.
            others: dims, from the end, and the other axes that they are cut over.
            memory_kind: where it rests; None for device memory.
        """
        entries: list[tuple[str, ...]] = [()] * ndim
        for at, axes in others:
            entries[at] = axes
        if dim is not None:
            entries[dim] = (*entries[dim], *self.shard_axes)
        return NamedSharding(self.mesh, _spec(entries), memory_kind=memory_kind)

    def whole_like(self, x: Any, rows: int | None = None) -> NamedSharding:
        """Sharding of an array over no data axis, and over others as it is now.

        Args:
            x: the array.
            rows: a dim to cut over all data axes after all; None for none.
        """
        found = getattr(x, "sharding", None)
        entries: list[tuple[str, ...]] = [()] * x.ndim
        if isinstance(found, NamedSharding) and found.mesh == self.mesh:
            for dim, entry in enumerate(found.spec):
                axes = entry if isinstance(entry, tuple) else (entry,)
                entries[dim] = tuple(a for a in axes if a in self.other_axes)
        if rows is not None:
            entries[rows] = (*self.data_axes, *entries[rows])
        return NamedSharding(self.mesh, _spec(entries))

    def per_device(self) -> bool:
        """Whether the code being traced is the program of one device of this mesh.

        Raises:
            ValueError: it is, but of a mesh whose axes have other sizes, or over some
                of the data axes only.
        """
        context = jax.sharding.get_abstract_mesh()
        manual = [axis for axis in self.data_axes if axis in context.manual_axes]
        if not manual:
            return False
        sizes = tuple(context.shape[axis] for axis in manual)
        own = tuple(self.mesh.shape[axis] for axis in self.data_axes)
        if len(manual) < len(self.data_axes) or sizes != own:
            raise ValueError(
                f"the module is sharded over axes {self.data_axes} of sizes {own}, but "
                f"this per-device program runs over {tuple(manual)} of sizes {sizes}. "
                "Use the mesh that was given to fully_shard, with all of these axes."
            )
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        ids = [device.id for device in self.mesh.devices.flat]
        types = tuple(t.name for t in self.mesh.axis_types)
        shape, names = self.mesh.devices.shape, self.mesh.axis_names
        roles = self.shard_axes, self.replicate_axes
        return _rebuild_mesh_info, (ids, shape, names, types, *roles)


def _entry(axes: tuple[str, ...]) -> Any:
    """An entry of a spec: one axis by its name, several as a tuple."""
    return axes[0] if len(axes) == 1 else (axes or None)


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """A spec from the axes of each dim, without entries for whole dims at its end."""
    last = max((dim + 1 for dim, axes in enumerate(entries) if axes), default=0)
    return PartitionSpec(*[_entry(axes) for axes in entries[:last]])


def _rebuild_mesh_info(ids, shape, names, types, shard, replicate) -> MeshInfo:
    """Lay the pickled mesh out on the devices of this process by their ids."""
    by_id = {device.id: device for device in jax.devices()}
    missing = [i for i in ids if i not in by_id]
    if missing:
        raise RuntimeError(
            f"unpickling a sharded module: it was sharded over {len(ids)} devices, but "
            f"devices {missing} do not exist here ({len(by_id)} do). Pickle "
            "model.state_dict() instead and load it into a model sharded on this mesh."
        )
    devices = np.array([by_id[i] for i in ids]).reshape(shape)
    axis_types = tuple(AxisType[name] for name in types)
    return MeshInfo(Mesh(devices, names, axis_types=axis_types), shard, replicate)


def make_mesh(
    devices: Sequence[Any] | np.ndarray | None = None,
) -> tuple[Mesh, DataParallelMeshDims]:
    """Lay devices out for sharding: one mesh axis per dimension of a TPU's torus.

    A collective along one such axis stays on one ring of links. Over a flat axis that
    covers a 2-D or 3-D slice XLA:TPU replaces every reduce-scatter by an all-reduce.
    Several slices get one more axis. Anything but TPUs gets one axis.

    Args:
        devices: all devices of the job by default; also those of an absent topology.

    Returns:
        The mesh and the roles of its axes, as `fully_shard(mesh=, dp_mesh_dims=)` takes
        them.

    Raises:
        TypeError: something that is no device.
        ValueError: no devices.

    Source: README, "The schedule"; `jax.make_mesh`, which has no names for a torus.
    """
    given = jax.devices() if devices is None else devices
    devices = list(given.flat if isinstance(given, np.ndarray) else given)
    if not devices:
        raise ValueError("make_mesh: no devices were given.")
    if wrong := [d for d in devices if not hasattr(d, "device_kind")]:
        raise TypeError(
            f"make_mesh: expected devices such as those of jax.devices(), got "
            f"{wrong[0]!r}."
        )
    layout, names = _torus(devices)
    if layout.ndim < 2:
        names = (DEFAULT_AXIS,)
    # Slices come last: a gradient crosses the slow network between them when the rings
    # of each slice have scattered it, and a gather before they have filled it.
    order = tuple(sorted(names, key=lambda name: name == SLICE_AXIS))
    return Mesh(layout, names), DataParallelMeshDims(shard=order)


def _torus(devices: list[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """TPU devices by their places in the box that they fill, and names of its dims.

    Dims of one device are left out. Flat, in the order given and without names, if they
    are no TPUs or fill no box. `mesh_utils.create_device_mesh` (jax 0.10.2) is no help:
    it puts an axis of 4 over two physical dims of 2, so refuses 2x2x4, and
    winds 2x4 chips into a ring.
    """
    places = [
        (
            getattr(d, "slice_index", 0) or 0,
            *getattr(d, "coords", (0, 0, 0)),
            getattr(d, "core_on_chip", 0),
        )
        for d in devices
    ]
    used = [sorted(set(along)) for along in zip(*places)]
    sizes = [len(along) for along in used]
    full = np.prod(sizes) == len(devices) == len(set(places))
    if devices[0].platform != "tpu" or not full:
        return np.array(devices), ()
    box = np.empty(sizes, object)
    for device, place in zip(devices, places):
        box[tuple(along.index(at) for along, at in zip(used, place))] = device
    names = (SLICE_AXIS, *[f"{DEFAULT_AXIS}_{dim}" for dim in ("x", "y", "z", "core")])
    long = [(size, name) for size, name in zip(sizes, names) if size > 1]
    shape = [size for size, _ in long] or [1]
    return box.reshape(shape), tuple(name for _, name in long)


def _default_mesh() -> tuple[Mesh, DataParallelMeshDims | None]:
    if jax.sharding.get_abstract_mesh().empty:
        return make_mesh()
    try:
        return jax.sharding.get_mesh(), None
    except ValueError:
        raise ValueError(
            "fully_shard: inside jit the mesh set by jax.set_mesh is not available as "
            "devices. Pass mesh= explicitly."
        ) from None


def resolve_mesh(mesh: Any, dp_mesh_dims: Any) -> MeshInfo:
    """Validate the mesh arguments of `fully_shard` and fill in the default.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a mesh with no axis or more than two and no `dp_mesh_dims`, an axis
            that the mesh does not have, or a mesh inside a per-device program.
        NotImplementedError: axes without a data role that are Explicit.
    """
    if dp_mesh_dims is not None and not isinstance(dp_mesh_dims, DataParallelMeshDims):
        raise TypeError(
            "fully_shard: dp_mesh_dims must be a DataParallelMeshDims, got "
            f"{type(dp_mesh_dims).__name__}."
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"fully_shard: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}."
        )
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "fully_shard: called inside a per-device program (shard_map). Shard the "
            "module before, outside of it."
        )
    source = "mesh" if mesh is not None else "the mesh set by jax.set_mesh"
    if mesh is None:
        mesh, default_dims = _default_mesh()
        dp_mesh_dims = dp_mesh_dims or default_dims
    if dp_mesh_dims is not None:
        return _with_dims(mesh, dp_mesh_dims, source)
    names = tuple(mesh.axis_names)
    if len(names) not in (1, 2):
        raise ValueError(
            f"fully_shard: {source} has {len(names)} axes {names}. Give their roles "
            "with dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...), or pass "
            "mesh=Mesh(devices, ('fsdp',))."
        )
    return MeshInfo(mesh, names[-1:], names[:-1])


def _with_dims(mesh: Mesh, dims: DataParallelMeshDims, source: str) -> MeshInfo:
    """The mesh with the roles of its axes as the user gave them."""
    for axis in (*dims.shard_names, *dims.replicate_names):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"fully_shard: dp_mesh_dims names the axis {axis!r}, which is not "
                f"found in {source}: it has the axes {mesh.axis_names}."
            )
    info = MeshInfo(mesh, dims.shard_names, dims.replicate_names)
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    if explicit := [a for a in info.other_axes if types[a] == AxisType.Explicit]:
        raise NotImplementedError(
            f"fully_shard: the axes {explicit} of {source} have no data role and are "
            "Explicit, so the model would have to be written for them. Make them "
            "Auto: jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * ndim)."
        )
    return info
