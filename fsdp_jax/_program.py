"""The program that one device runs, and what of it is differentiated.

What must not live here: arguments as the user gives them (`_arguments`, `_transforms`),
running the program (`_execute`), the call of the user's function (`_user`), which
result is averaged or concatenated (`_join`), and gathering parameters, which the
modules do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fsdp_jax import (
    _collectives,
    _cotangents,
    _loss,
    _means,
    _microbatch,
)
from fsdp_jax._comm import Defer
from fsdp_jax._local import Local
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._spec import ParamSpec
from fsdp_jax._stages import (
    PARTIAL,
    REDUCED,
    UNREDUCED,
    Entry,
    Reduction,
    Stages,
    added,
)
from fsdp_jax._user import Call, Outcome, call_user

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Diff:
    """One differentiated array.

    Attributes:
        at: its position among the arrays.
        entry: its gradient.
        of_state: whether it is a Variable's value, not an argument.
        defer: what backward leaves out of the reduction of its group.
        sum_dtype: dtype of its gradient before it is reduced.
        dtype: of the array itself.
        divisors: by stage, what its gradient is divided by where it leaves backward.
    """

    at: int
    entry: Entry
    of_state: bool
    defer: Defer
    sum_dtype: Any
    dtype: Any
    divisors: tuple[float, float, float]

    @property
    def cut(self) -> bool:
        """Whether it is a parameter that the devices hold pieces of."""
        return self.entry.param is not None and self.entry.param.cut

    @property
    def stage(self) -> int:
        """The stage in which backward leaves its gradient."""
        if not self.cut:
            return UNREDUCED if self.of_state else REDUCED
        return {"": REDUCED, "all_reduce": PARTIAL, "all": UNREDUCED}[self.defer]

    @property
    def has_sink(self) -> bool:
        """Whether something else than the shard receives the gradient.

        An offloaded shard does not: its gradient would have to be in host memory. Nor
        does one of float16: before it is divided the sum over devices may overflow.
        """
        away = self.entry.param is not None and self.entry.param.memory_kind is not None
        return self.cut and (self.stage != REDUCED or away or self.dtype == jnp.float16)

    def gradient(self, ct: Array) -> Array:
        """The gradient of a Variable as it leaves backward, of what arrives there."""
        dtype = self.dtype if self.stage == REDUCED else self.sum_dtype
        return _cotangents.gradient(ct, self.divisors[self.stage], dtype)

    def sink(self, shard: Array, mesh: MeshInfo) -> Array:
        """What receives the gradient in place of this device's shard."""
        shape, param = list(shard.shape), self.entry.param
        if self.stage == UNREDUCED and param is not None and param.dim is not None:
            shape[param.dim] = param.size
        dtype = shard.dtype if self.stage == REDUCED else self.sum_dtype
        if self.stage != UNREDUCED and dtype == jnp.float16:
            dtype = jnp.float32
        return jnp.zeros(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """All that is static in one call.

    Attributes:
        call: the call of the user's function.
        in_specs: one per array: those of the state, of the arguments, of `pending`.
        params: how each of them rests, if it is a managed parameter.
        diff: what is differentiated.
        reductions: of the gradients, one per group.
        pending: stage and name of each pending gradient.
        kept: per reduction, the members that stay gathered from one micro-batch to the
            next: their positions in the group, and among the arrays.
        slices: the micro-batches; None for one.
        out_kinds: the specs that results can have.
    """

    call: Call
    in_specs: tuple[PartitionSpec, ...]
    params: tuple[ParamSpec | None, ...]
    diff: tuple[Diff, ...]
    reductions: tuple[Reduction, ...]
    pending: tuple[tuple[int, str], ...]
    kept: tuple[tuple[tuple[int, int], ...], ...]
    slices: _microbatch.Slices | None
    out_kinds: tuple[PartitionSpec, ...]

    @property
    def mesh(self) -> MeshInfo:
        """Mesh and the roles of its axes."""
        return self.call.mesh


def run_local(
    program: Program, inputs: list[Array]
) -> tuple[list[Any], Outcome, list[tuple[int, str]]]:
    """Run the user's function on one device's arrays, and differentiate it.

    Returns:
        All results, the value in its place and the gradients last; what the user's
        function left; stage and name of each gradient.
    """
    call, mesh = program.call, program.mesh
    num_arrays = len(inputs) - len(program.pending)
    arrays, pending = inputs[:num_arrays], inputs[num_arrays:]
    outcomes: list[Outcome] = []
    if call.request.argnums is None:
        held = [_guarded(x, p) for x, p in zip(arrays, program.params)]
        _, rest, outcome = call_user(call, held, ())
        return rest, outcome, []
    defers: list[Defer] = [r.comm.defer for r in program.reductions[: call.num_modules]]
    full = _gather_kept_groups(program, arrays)

    def one(diff_arrays, arrays, counts=None):
        def run(diff_arrays):
            held = [_guarded(x, p) for x, p in zip(arrays, program.params)]
            for at, x in full.items():
                held[at] = Local(arrays[at], None, x)
            for d, x in zip(program.diff, diff_arrays, strict=True):
                if d.has_sink:
                    held[d.at] = Local(arrays[d.at], x, full.get(d.at))
                elif d.at in full:
                    held[d.at] = Local(x, None, full[d.at])
                else:
                    held[d.at] = x
            loss, rest, outcome = call_user(call, held, defers)
            outcomes.append(outcome)
            return loss, rest

        loss, vjp, rest = jax.vjp(run, diff_arrays, has_aux=True)
        value: Any = jax.tree.leaves(loss)
        if counts is None:
            dtype = value[0].dtype
            value, counts = _loss.start(call.request, mesh, _loss.widened(loss))
            value = value.astype(dtype)
        with _cotangents.differentiating():
            (grads,) = vjp(_loss.cotangent(loss, counts))
        return value, grads, rest

    diff_arrays = [
        d.sink(arrays[d.at], mesh) if d.has_sink else arrays[d.at] for d in program.diff
    ]
    if program.slices is None:
        value, grads, rest = one(diff_arrays, arrays)
    else:
        value, grads, rest = _microbatch.over_slices(
            one, call, program.slices, diff_arrays, arrays, lambda: outcomes[-1]
        )
    outcome = outcomes[-1]
    stages: Stages = [{}, {}, {}]
    entries = {d.entry.name: d.entry for d in program.diff}
    for (stage, name), x in zip(program.pending, pending, strict=True):
        stages[stage][name] = entries[name].of_device(x, stage)
    for d, g in zip(program.diff, grads, strict=True):
        g = d.gradient(g) if d.of_state else _argument_gradient(program, d, g)
        stages[d.stage] = added(stages[d.stage], {d.entry.name: g})
    for reduction in program.reductions:
        reduction.finish(stages)
    keys = [(stage, name) for stage, grads in enumerate(stages) for name in grads]
    finished = [
        stages[stage][name] if stage == REDUCED else stages[stage][name][None]
        for stage, name in keys
    ]
    rest.insert(outcome.value_at, value)
    return [*rest, *finished], outcome, keys


def _guarded(x: Array, param: ParamSpec | None) -> Any:
    """What a Variable holds: on one device a host shard looks like a full array."""
    away = param is not None and param.cut and param.memory_kind is not None
    return Local(x) if away else x


def _argument_gradient(program: Program, d: Diff, grad: Array) -> Array:
    """The gradient of an argument, which no group reduces."""
    mesh, spec = program.mesh, d.entry.spec
    named = {a for axes in spec for a in (axes if isinstance(axes, tuple) else (axes,))}
    missing = [a for a in mesh.data_axes if a not in named]
    averages = program.call.request.reduction == "mean"
    count = mesh.num_devices if averages else 1
    return _means.mean_over_devices(grad, mesh, d.entry.name, missing, count)


def _gather_kept_groups(program: Program, arrays: list[Array]) -> dict[int, Array]:
    """Gather the groups that stay gathered for all micro-batches."""
    full: dict[int, Array] = {}
    for reduction, members in zip(program.reductions, program.kept):
        if members:
            comm = reduction.comm.only([i for i, _ in members])
            gathered = _collectives.gather_group(
                [arrays[at] for _, at in members], comm
            )
            full.update(zip([at for _, at in members], gathered, strict=True))
    return full
