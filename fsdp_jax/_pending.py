"""Gradients that are not reduced yet, as users hold them.

What lives here: `PendingGradients`, checking it, and `synchronize_gradients`. What must
not: how they are reduced (`_stages`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from fsdp_jax import _functional
from fsdp_jax._compiled import compiled
from fsdp_jax._managed import spec_of
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import place
from fsdp_jax._param import with_value
from fsdp_jax._spec import by_name
from fsdp_jax._stages import REDUCED, STAGES, Entry, Stages, added, reductions_of
from fsdp_jax._state import sharded_modules, state_of

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=list(STAGES),
    meta_fields=["reduction"],
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PendingGradients:
    """Gradients of one or several calls that are not, or not wholly, reduced.

    `value_and_grad` returns it in place of the gradients while a group's gradient sync
    or all-reduce is off. It is a pytree: it passes through `jax.jit` and can be saved.
    `p + q` adds up two of them. `value_and_grad(...)(..., pending=p)` with sync on adds
    them to the new gradients before the one reduction, and
    `model.synchronize_gradients(p)` reduces them alone. An optimizer does not take it.

    Attributes:
        unreduced: by the parameter's dotted name, each device's own gradient, `(data
            devices, *shape)`, not divided by anything; in `reduce_dtype` if the policy
            has one, else in the dtype that was computed in.
        partial: of groups whose all-reduce is off, each replica's gradient, `(replicas,
            *shape)`, summed over the sharding axes and, where the loss is a mean,
            divided by their size, or by the group's own divide factor; in the same
            dtypes.
        reduced: finished gradients, as they are without pending ones.
        reduction: of the calls that they come from.

    Source: README, "Gradient accumulation"; PyTorch keeps the same out of sight.
    """

    unreduced: dict[str, Array]
    partial: dict[str, Array]
    reduced: dict[str, Array]
    reduction: str

    @property
    def stages(self) -> Stages:
        """The three dicts."""
        return [self.unreduced, self.partial, self.reduced]

    def __add__(self, other: Any) -> PendingGradients:
        if not isinstance(other, PendingGradients):
            return NotImplemented
        if other.reduction != self.reduction:
            raise ValueError(
                f"PendingGradients: those of reduction={self.reduction!r} and of "
                f"reduction={other.reduction!r} are divided differently. Reduce one of "
                "them first (model.synchronize_gradients)."
            )
        for mine, others in zip(self.stages, other.stages):
            for name in mine.keys() & others.keys():
                if mine[name].shape != others[name].shape:
                    raise ValueError(
                        f"PendingGradients: those of {name!r} have the shapes "
                        f"{tuple(mine[name].shape)} and {tuple(others[name].shape)}. "
                        "Add gradients of the same model on the same mesh."
                    )
        sums = [added(a, b) for a, b in zip(self.stages, other.stages)]
        return PendingGradients(*sums, reduction=self.reduction)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(s)} {n}" for s, n in zip(self.stages, STAGES))
        return (
            f"PendingGradients({counts}; not for an optimizer: reduce them with "
            "value_and_grad(...)(..., pending=p) or model.synchronize_gradients(p))"
        )


def check_pending(
    who: str,
    pending: Any,
    reduction: str | None,
    entries: Mapping[str, Entry],
    mesh: MeshInfo,
) -> PendingGradients:
    """Pending gradients of these arrays, on this mesh.

    Raises:
        TypeError: it is no `PendingGradients`.
        ValueError: they are of another reduction, of unknown names, or other shapes.
    """
    if not isinstance(pending, PendingGradients):
        raise TypeError(
            f"{who}: pending must be a PendingGradients, as value_and_grad returns it "
            f"while gradient sync is off, got {type(pending).__name__}."
        )
    if reduction is not None and pending.reduction != reduction:
        raise ValueError(
            f"{who}: the pending gradients are of reduction={pending.reduction!r}, and "
            f"this call is of reduction={reduction!r}. Use the same for both."
        )
    for stage, grads in enumerate(pending.stages):
        for name, x in grads.items():
            if name not in entries:
                raise ValueError(
                    f"{who}: there is a pending gradient of {name!r}, which is not "
                    "differentiated here. Use the model, and the wrt and argnums, that "
                    "it was made with."
                )
            wanted = entries[name].stage_shape(stage, mesh)
            if tuple(x.shape) != wanted:
                raise ValueError(
                    f"{who}: the pending gradient of {name!r} has shape "
                    f"{tuple(x.shape)}, and {wanted} would fit {mesh.num_devices} "
                    "devices. Use the model and the mesh that it was made with."
                )
    stages = [
        {n: place(x, entries[n].rest(stage, mesh)) for n, x in grads.items()}
        for stage, grads in enumerate(pending.stages)
    ]
    return PendingGradients(*stages, reduction=pending.reduction)


def synchronize_gradients(model: Any, pending: PendingGradients) -> Any:
    """Reduce gradients that `value_and_grad` returned while sync was off.

    What each `set_requires_...` says at present does not matter.

    Args:
        model: what was differentiated: a sharded module, or one that contains some.
        pending: its gradients.

    Returns:
        What `value_and_grad` returns with sync on: gradients with the parameters'
        shapes, shardings and dtypes.

    Raises:
        TypeError: not a `PendingGradients`.
        ValueError: gradients of something else, or no sharded module in `model`.
        RuntimeError: called inside a per-device program.

    Source: README, "Gradient accumulation".
    """
    who, modules = "synchronize_gradients", sharded_modules(model)
    if not modules:
        raise ValueError(
            f"{who}: the model is, or contains, no module that fully_shard was applied "
            "to."
        )
    mesh = state_of(modules[0]).mesh
    if mesh.per_device():
        raise RuntimeError(f"{who}: called inside a per-device program. Call it after.")
    walked = _functional.walk(model)
    variables = by_name(
        (
            (path, v)
            for path, v in walked
            if isinstance(v, nnx.Variable) and _functional.is_array(v.get_raw_value())
        ),
        who,
    )
    entries = {}
    for name, (_, v) in variables.items():
        param = spec_of(v)
        spec = mesh.spec(v.ndim, param.dim) if param and param.cut else PartitionSpec()
        entries[name] = Entry(name, tuple(v.shape), spec, param)
    pending = check_pending(who, pending, None, entries, mesh)
    names = [n for n in variables if any(n in stage for stage in pending.stages)]
    by_id = {id(variables[n][1]): n for n in names}
    averages = pending.reduction == "mean"
    keys = tuple((i, n) for i, s in enumerate(pending.stages) for n in s)
    run = _synchronizer(
        mesh,
        reductions_of([model], by_id, averages, pending.stages, complete=True),
        tuple((i, entries[n]) for i, n in keys),
        tuple(entries[n] for n in names),
    )
    grads = run([pending.stages[i][n] for i, n in keys])
    flat = {
        variables[n][0]: with_value(variables[n][1], g) for n, g in zip(names, grads)
    }
    return nnx.from_flat_state(flat)


@functools.lru_cache(maxsize=64)
def _synchronizer(mesh, reductions, given, wanted):
    """A compiled function of the arrays of `given` that returns those of `wanted`."""

    def program(arrays):
        stages: Stages = [{}, {}, {}]
        for (stage, entry), x in zip(given, arrays, strict=True):
            stages[stage][entry.name] = entry.of_device(x, stage)
        for reduction in reductions:
            reduction.finish(stages)
        return [stages[REDUCED][entry.name] for entry in wanted]

    def synchronize(arrays):
        mapped = jax.shard_map(
            program,
            mesh=mesh.mesh,
            in_specs=([entry.stage_spec(stage, mesh) for stage, entry in given],),
            out_specs=[entry.spec for entry in wanted],
            axis_names=set(mesh.data_axes),
            check_vma=False,
        )
        entered = [e.enter(x, stage) for (stage, e), x in zip(given, arrays)]
        done = mapped(entered)
        return [e.leave(x, REDUCED, mesh) for e, x in zip(wanted, done, strict=True)]

    return compiled(synchronize)
