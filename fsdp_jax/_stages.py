"""The stages of a gradient: each device's own, summed over shards, finished.

What lives here: what is known of one gradient in each of them, and how those of one
group get from one to the next. What must not: where they come from (`_program`), and
how users hold them (`_pending`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax import _blocks, _collectives, _functional
from fsdp_jax._comm import Defer, GroupComm
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import to_space
from fsdp_jax._spec import ParamSpec, dotted
from fsdp_jax._state import (
    comm_for,
    deferred,
    group_of,
    is_sharded,
    state_of,
)

Array = jax.Array
Stages = list[dict[str, Array]]
STAGES = ("unreduced", "partial", "reduced")
UNREDUCED, PARTIAL, REDUCED = range(3)


def added(old: Mapping[str, Array], new: Mapping[str, Array]) -> dict[str, Array]:
    """The sum of two dicts of arrays; a name may be in one of them only."""
    total = dict(old)
    for name, x in new.items():
        total[name] = total[name] + x.astype(total[name].dtype) if name in old else x
    return total


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the gradients of one group are reduced, from where to where.

    Attributes:
        comm: how the group travels; its `defer` is what backward leaves out.
        names: of the differentiated members, `""` for the others.
        dtypes: of the members at rest.
        target: what is left out in the end.
    """

    comm: GroupComm
    names: tuple[str, ...]
    dtypes: tuple[Any, ...]
    target: Defer = ""

    def finish(self, stages: Stages) -> None:
        """Bring what one device has of the group's gradients as far as the target says.

        Args:
            stages: unreduced, full gradients, of members that are kept whole too;
                partial and reduced ones, each shaped as the shard. Changed.
        """
        if self.target == "all":
            return
        unreduced, partial, _ = stages
        whole = [d is None for d in self.comm.dims]
        cut = [i for i in self._in(unreduced) if not whole[i]]
        if cut:
            partly = bool(self.target or self._in(partial))
            comm = self.comm.only(cut)
            comm = dataclasses.replace(comm, defer="all_reduce" if partly else "")
            dtypes = [self._dtype(i, at_rest=not partly) for i in cut]
            grads = [unreduced.pop(self.names[i]) for i in cut]
            done = _collectives.scatter_group(grads, dtypes, comm)
            self._add(stages, PARTIAL if partly else REDUCED, cut, done)
        if not self.target:
            mesh = self.comm.mesh
            kept = [i for i in self._in(unreduced) if whole[i]]
            self._all_reduce(stages, UNREDUCED, kept, mesh.data_axes)
            self._all_reduce(stages, PARTIAL, self._in(partial), mesh.replicate_axes)

    def _in(self, stage: Mapping[str, Array]) -> list[int]:
        return [i for i, n in enumerate(self.names) if n and n in stage]

    def _dtype(self, member: int, at_rest: bool) -> Any:
        own = self.dtypes[member]
        return own if at_rest else self.comm.sum_dtype(own)

    def _add(self, stages: Stages, stage: int, members: list[int], grads) -> None:
        new = {self.names[i]: g for i, g in zip(members, grads, strict=True)}
        stages[stage] = added(stages[stage], new)

    def _all_reduce(self, stages: Stages, stage: int, members: list[int], axes) -> None:
        if members:
            grads = [stages[stage].pop(self.names[i]) for i in members]
            dtypes = [self._dtype(i, at_rest=True) for i in members]
            comm = self.comm.only(members)
            done = _collectives.all_reduce_group(grads, dtypes, comm, axes)
            self._add(stages, REDUCED, members, done)


def reductions_of(
    nodes: Sequence[Any],
    names: Mapping[int, str],
    averages: bool,
    old: Stages,
    complete: bool,
) -> tuple[Reduction, ...]:
    """One reduction per sharded module, then one per unmanaged parameter.

    Args:
        nodes: what holds the modules.
        names: by the id of its Variable, the name of each differentiated parameter.
        averages: whether the loss is a mean over devices.
        old: gradients that are to be added.
        complete: whether everything is reduced in the end, whatever the modules say.
    """
    found, taken = [], set()
    found_at = [
        [(path, m) for path, m in _functional.walk(node) if is_sharded(m)]
        for node in nodes
    ]
    for path, module in (pair for pairs in found_at for pair in pairs):
        group, wanted = group_of(module), deferred(state_of(module))
        members = tuple(names.get(id(v), "") for v in group.variables)
        taken.update(id(v) for v in group.variables)
        defer = wanted
        if any(n in old[PARTIAL] for n in members if n):
            defer = defer or "all_reduce"
        if any(n in old[UNREDUCED] for n in members if n):
            defer = "all"
        comm = comm_for(state_of(module), group.specs, averages, defer, dotted(path))
        dtypes = tuple(v.dtype for v in group.variables)
        found.append(Reduction(comm, members, dtypes, "" if complete else wanted))
    mesh = state_of(next(m for pairs in found_at for _, m in pairs)).mesh
    for node, modules in zip(nodes, found_at, strict=True):
        for path, v in _functional.walk(node):
            if id(v) not in names or id(v) in taken:
                continue
            taken.add(id(v))
            owners = [m for p, m in modules if path[: len(p)] == p]
            wanted = deferred(state_of(owners[-1])) if owners else ""
            comm = _whole_comm(mesh, averages, dotted(path))
            target = "" if complete else wanted
            found.append(Reduction(comm, (names[id(v)],), (v.dtype,), target))
    return tuple(found)


def _whole_comm(mesh: MeshInfo, averages: bool, name: str) -> GroupComm:
    """How the gradient of an array that no group manages travels."""
    divisor = float(mesh.num_devices) if averages else 1.0
    return GroupComm(mesh, (None,), ((),), (0,), None, None, (divisor, 1.0), 0, name)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A differentiated array.

    Attributes:
        name: of its gradient.
        shape: of the whole array.
        spec: how the per-device program cuts it.
        param: how it rests, if it is a managed parameter.
    """

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    param: ParamSpec | None

    def stage_shape(self, stage: int, mesh: MeshInfo) -> tuple[int, ...]:
        """Global shape of its gradient in a stage."""
        lead = [(mesh.num_devices,), (mesh.num_replicas,), ()][stage]
        if self.param is None or stage == UNREDUCED:
            return (*lead, *self.shape)
        return (*lead, *self.param.rest_shape(self.shape))

    def stage_spec(self, stage: int, mesh: MeshInfo) -> PartitionSpec:
        """How the per-device program cuts its gradient in a stage."""
        dim = self.param.dim if self.param and self.param.cut else None
        partial = mesh.replica_spec(len(self.shape), dim)
        return (mesh.data_spec(), partial, self.spec)[stage]

    def rest(self, stage: int, mesh: MeshInfo) -> NamedSharding:
        """Sharding of its gradient in a stage, outside of the program."""
        ndim, param = len(self.shape), self.param
        if stage == REDUCED:
            plain = NamedSharding(mesh.mesh, self.spec)
            return plain if param is None else param.sharding(ndim)
        dim = param.dim if param and param.cut and stage == PARTIAL else None
        inner = mesh.sharding(ndim, dim, param.others if param else ())
        lead = self.stage_spec(stage, mesh)[0]
        return NamedSharding(mesh.mesh, PartitionSpec(lead, *inner.spec))

    def enter(self, x: Array, stage: int) -> Array:
        """A global gradient as the program takes it."""
        return x if stage == UNREDUCED else _blocks.enter_program(x, self.param)

    def of_device(self, x: Array, stage: int) -> Array:
        """What one device has of it, to be computed with."""
        if stage != REDUCED:
            return x[0]
        away = self.param is not None and self.param.memory_kind is not None
        return to_space(x, jax.memory.Space.Device) if away else x

    def leave(self, x: Array, stage: int, mesh: MeshInfo) -> Array:
        """A gradient of the program as a global one."""
        lead = mesh.replicate_axes if stage == PARTIAL else ()
        return x if stage == UNREDUCED else _blocks.leave_program(x, self.param, lead)
