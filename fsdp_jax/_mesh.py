"""Which mesh axes shard, and whether code runs per device or on global arrays.

What lives here: the mesh of a group. What must not: anything that knows of modules,
parameters or their shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fsdp_jax._policies import DataParallelMeshDims

DEFAULT_AXIS = "fsdp"
SLICE_AXIS = "slice"


@dataclasses.dataclass(frozen=True)
class MeshInfo:
    """A mesh and the axes of it that shard parameters.

    Attributes:
        mesh: devices by axis.
        shard_axes: axes over which parameters are cut, major to minor.
    """

    mesh: Mesh
    shard_axes: tuple[str, ...]

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Devices along each sharding axis."""
        return tuple(self.mesh.shape[axis] for axis in self.shard_axes)

    @property
    def num_shards(self) -> int:
        """Into how many pieces a parameter is cut."""
        return int(np.prod(self.axis_sizes))

    @property
    def platform(self) -> str:
        """What the devices are: "cpu", "gpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform

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
        """Partition spec of an array of `ndim` dims cut along `dim`, None for whole."""
        if dim is None:
            return PartitionSpec()
        axes = self.shard_axes[0] if len(self.shard_axes) == 1 else self.shard_axes
        return PartitionSpec(*([None] * (dim % ndim)), axes)

    def sharding(self, ndim: int, dim: int | None) -> NamedSharding:
        """The sharding that `spec` describes, on this mesh."""
        return NamedSharding(self.mesh, self.spec(ndim, dim))

    def per_device(self) -> bool:
        """Whether the code being traced is the program of one device of this mesh.

        Raises:
            ValueError: it is, but of a mesh whose axes have other sizes.
        """
        context = jax.sharding.get_abstract_mesh()
        manual = set(context.manual_axes)
        if not manual.issuperset(self.shard_axes):
            return False
        sizes = tuple(context.shape[axis] for axis in self.shard_axes)
        if sizes != self.axis_sizes:
            raise ValueError(
                f"the module is sharded over axes {self.shard_axes} of sizes "
                f"{self.axis_sizes}, but this per-device program runs over sizes "
                f"{sizes}. Use the mesh that was given to fully_shard."
            )
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        ids = [device.id for device in self.mesh.devices.flat]
        types = tuple(t.name for t in self.mesh.axis_types)
        shape, names = self.mesh.devices.shape, self.mesh.axis_names
        return _rebuild_mesh_info, (ids, shape, names, types, self.shard_axes)


def _rebuild_mesh_info(ids, shape, names, types, shard_axes) -> MeshInfo:
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
    return MeshInfo(Mesh(devices, names, axis_types=axis_types), shard_axes)


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
        NotImplementedError: replicating axes, or axes without a role.
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
    ndim = len(mesh.axis_names)
    if ndim == 2:
        raise NotImplementedError(
            f"fully_shard: {source} has two axes {mesh.axis_names}, the first of which "
            "would replicate; that is not supported yet. To shard over both, pass "
            f"dp_mesh_dims=DataParallelMeshDims(shard={mesh.axis_names})."
        )
    if ndim != 1:
        raise ValueError(
            f"fully_shard: {source} has {ndim} axes {mesh.axis_names}. Say which ones "
            "shard with dp_mesh_dims=DataParallelMeshDims(shard=...), or pass "
            "mesh=Mesh(devices, ('fsdp',))."
        )
    return MeshInfo(mesh, tuple(mesh.axis_names))


def _with_dims(mesh: Mesh, dims: DataParallelMeshDims, source: str) -> MeshInfo:
    """The mesh with the roles of its axes as the user gave them."""
    for axis in (*dims.shard_names, *dims.replicate_names):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"fully_shard: dp_mesh_dims names the axis {axis!r}, but {source} has "
                f"the axes {mesh.axis_names}."
            )
    if dims.replicate_names:
        raise NotImplementedError(
            f"fully_shard: dp_mesh_dims={dims} replicates; that is not supported yet. "
            "Name every axis of the mesh in shard."
        )
    shard_axes = dims.shard_names
    others = [a for a in mesh.axis_names if a not in shard_axes and mesh.shape[a] > 1]
    if others:
        raise NotImplementedError(
            f"fully_shard: {source} has axes {others} that dp_mesh_dims gives no role; "
            "that is not supported yet. Name every axis of the mesh in shard."
        )
    return MeshInfo(mesh, shard_axes)
