"""What cotangents stand for in a per-device program, and where 1/n enters.

The calculus, of which every gradient here follows. Take what every device holds for a
variable of its own, and let L be what is differentiated in the end. Then

- the cotangent of any array of a device, a *full* (gathered) parameter too, is the
  derivative of L by what this device holds. Devices do not share it: a gather turns
  into a sum over devices of what each of them has (`psum_scatter`), that sum into a
  gather, `psum` into `psum`. This is what JAX makes of collectives by itself, and of
  what enters and leaves `jax.shard_map`: a result that all n devices hold alike gets
  1/n of its cotangent on each, an argument that all hold gets the sum.
- the cotangent of a *shard* is the same: the sum over the devices that gathered it.
  Replicas hold equal shards, and what counts is the sum of their cotangents; each gets
  the mean (`all_reduce` and 1 / replicas), so that they stay equal.

All rules are linear and there is no n in them. So they hold to any order, for whoever
differentiates: a program of this library from inside, or all of it from outside.

`value_and_grad` of a loss that is a mean over n devices starts with 1, not with 1/n, as
PyTorch does: L is then the sum of the devices' losses, also for rules that do not
depend linearly on what arrives. **1/n enters once**, where gradients leave the program
(`gradient`): there a group's sum is divided by its divide factor, n by default.

In a user's own `jax.shard_map` nobody sees gradients leave. There alone a gather
divides at once if it is differentiated from inside: full arrays then have n times the
cotangents above and shards the true ones, so a reduction that is differentiated again
must not divide a second time (`leave_full`). From outside all is as above.

What must not live here: moving anything (`_collectives`), or deciding when.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from fsdp_jax._collectives import scatter_group
from fsdp_jax._comm import GroupComm
from fsdp_jax._compiled import traced_for, traces

Array = jax.Array

# Who is at work in the trace that is going on: "f", the user's function in a program of
# this library; "program", the program itself, differentiating; None, anybody else. Part
# of the keys of JAX's own caches: what was differentiated in one is never used in
# another.
_AT_WORK = jax.make_user_context(None)


def running_f() -> contextlib.AbstractContextManager[Any]:
    """The user's function runs in a program of this library."""
    return _AT_WORK("f")


def differentiating() -> contextlib.AbstractContextManager[Any]:
    """A program of this library differentiates what it runs."""
    return _AT_WORK("program")


def in_f() -> bool:
    """Whether the user's function runs in a program of this library."""
    return _AT_WORK.value == "f"


def from_outside() -> bool:
    """Whether whoever differentiates is no program of this library."""
    return _AT_WORK.value is None


class InnerGradientError(RuntimeError):
    """`f` differentiates by parameters and does not say over which devices."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"f itself differentiates with respect to {what}, by nnx.grad, jax.grad or "
            "jax.vjp, and each device sees its own rows only. Say which gradient is "
            "meant. Of the mean over all devices: fsdp_jax.grad or "
            "fsdp_jax.value_and_grad, in f too (fsdp_jax.linen.grad for Linen). Of "
            "this device's own rows: nnx.grad or jax.grad with respect to an unsharded "
            "model, which is fsdp_jax.unsharded(model) in f (model.module.apply in "
            "place of model.apply for Linen)."
        )


def to_shards(
    grads: Sequence[Array | None], dtypes: Sequence[Any], comm: GroupComm
) -> list[Array | None]:
    """From cotangents of full arrays to those of shards: backward of a gather.

    Args:
        grads: as `scatter_group` takes them.
        dtypes: likewise.
        comm: how the group travels.
    """
    if not (comm.user_program and from_outside() and _from_inside(comm)):
        return scatter_group(grads, dtypes, comm.undivided())
    shards = scatter_group(grads, dtypes, comm)
    return [
        g if g is None or dim is None else leave_full(g, comm)
        for g, dim in zip(shards, comm.dims, strict=True)
    ]


# By id, the arrays that modules hold gathered while they run.
_GATHERED: ContextVar[dict[int, Array]] = ContextVar("fsdp_jax_gathered", default={})  # noqa: B039


@contextlib.contextmanager
def holding(arrays: Sequence[Array]) -> Iterator[None]:
    """Know the gathered arrays that a module holds within the block."""
    token = _GATHERED.set({**_GATHERED.get(), **{id(x): x for x in arrays}})
    try:
        yield
    finally:
        _GATHERED.reset(token)


def is_gathered(x: Array) -> bool:
    """Whether a module holds the very array since it gathered it."""
    return _GATHERED.get().get(id(x)) is x


def guarded(full: Array, name: str) -> Array:
    """A whole parameter that is no longer the one that `f` was given.

    Args:
        full: the array; returned as it is, but not differentiated by `f` itself.
        name: of the parameter.
    """

    def backward(_: Any, ct: Array) -> tuple[Array]:
        if in_f():
            raise InnerGradientError(f"parameter {name!r}")
        return (ct,)

    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (same(x), None), backward)
    return same(full)


def leave_full(shard: Array, comm: GroupComm) -> Array:
    """A shard that was made of full arrays: their cotangents are those of its calculus.

    Args:
        shard: any shard; returned as it is.
        comm: how the group travels.
    """
    if not comm.user_program:
        return shard

    def backward(_: Any, ct: Array) -> tuple[Array]:
        return (ct * comm.exit_divisor if _from_inside(comm) else ct,)

    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (same(x), None), backward)
    return same(shard)


def gradient(ct: Array, divisor: float, dtype: Any) -> Array:
    """The gradient that leaves a program, of what arrived at a shard.

    Args:
        ct: of the shard.
        divisor: of the group: `GroupComm.exit_divisor`.
        dtype: that it gets.
    """
    return (ct / divisor if divisor != 1 else ct).astype(dtype)


# --- a user's own program ---------------------------------------------------------

_PROGRAM, _EAGER = "shard_map", "ShardMapTrace"
# Traces of bodies of `jax.shard_map` in which modules themselves were called.
_CALLED: weakref.WeakSet[Any] = weakref.WeakSet()


def _body() -> Any:
    """The trace of the innermost body of a `jax.shard_map` that is going on, or None.

    Traces say what they were made for under private names; eagerly a body has a kind of
    trace to itself. tests/test_cotangents.py pins both.
    """
    for trace in traces():
        if type(trace).__name__ == _EAGER or traced_for(trace) == _PROGRAM:
            return trace
    return None


def enter_user_program() -> bool:
    """Note that a module is called in a program that is none of this library's.

    Returns:
        Whether it is called in another program inside of that, which JAX traces once
        and may use again in programs that do not come by here; or where that is not
        known.
    """
    body = _body()
    if body is None:
        return True
    _CALLED.add(body)
    frames = (t for t in traces() if getattr(t, "frame", None) is not None)
    return next(frames, body) is not body


def _from_inside(comm: GroupComm) -> bool:
    """Whether a user's own program differentiates a module that it called itself.

    Raises:
        RuntimeError: that is not known.
    """
    body = _body()
    if body is not None and body in _CALLED:
        return True
    if comm.nested:
        raise RuntimeError(
            f"module {comm.name or 'the root'!r} is differentiated in a jax.shard_map "
            "of your own, which calls it in another program inside (jax.jit, nnx.jit, "
            "jax.checkpoint, a scan) that JAX traced before. Whether its gradients are "
            "averaged inside or taken from outside is not known there. Call the module "
            "in the program itself, or use fsdp_jax.value_and_grad, grad or shard_map."
        )
    return False
