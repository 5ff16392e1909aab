"""Which mesh axes shard, and whether code runs per device or on global arrays.

What lives here: the mesh of a group. What must not: anything that knows of modules,
parameters or their shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fsdp_jax._policies import DataParallelMeshDims

DEFAULT_AXIS = "fsdp"


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
    def explicit(self) -> bool:
        """Whether arrays on this mesh carry their sharding in their type."""
        return AxisType.Explicit in self.mesh.axis_types

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


def _default_mesh() -> Mesh:
    if jax.sharding.get_abstract_mesh().empty:
        return Mesh(np.array(jax.devices()), (DEFAULT_AXIS,))
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        raise ValueError(
            "fully_shard: inside jit the mesh set by jax.set_mesh is not available as "
            "devices. Pass mesh= explicitly."
        ) from None


def resolve_mesh(mesh: Any, dp_mesh_dims: Any) -> MeshInfo:
    """Validate the mesh arguments of `fully_shard` and fill in the default.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a mesh with no axis or more than two, or one inside a per-device
            program.
        NotImplementedError: `dp_mesh_dims`, or a 2-D mesh.
    """
    if dp_mesh_dims is not None:
        if not isinstance(dp_mesh_dims, DataParallelMeshDims):
            raise TypeError(
                "fully_shard: dp_mesh_dims must be a DataParallelMeshDims, got "
                f"{type(dp_mesh_dims).__name__}."
            )
        raise NotImplementedError(
            "fully_shard: dp_mesh_dims is not supported yet. Shard over a 1-D mesh."
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
    mesh = _default_mesh() if mesh is None else mesh
    ndim = len(mesh.axis_names)
    if ndim == 2:
        raise NotImplementedError(
            f"fully_shard: {source} has two axes {mesh.axis_names}; 2-D meshes are not "
            "supported yet. Pass a mesh with one axis."
        )
    if ndim != 1:
        raise ValueError(
            f"fully_shard: {source} has {ndim} axes {mesh.axis_names}; one axis is "
            "needed, to shard over. Pass mesh=Mesh(devices, ('fsdp',))."
        )
    return MeshInfo(mesh, tuple(mesh.axis_names))
