"""The user's loss: what it may be, its global value, and what backward starts from.

What must not live here: running the function that returns it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from fsdp_jax import _collectives, _functional, _means
from fsdp_jax._join import Request
from fsdp_jax._mesh import MeshInfo

Array = jax.Array

_NAME = "loss"  # of its sum over devices, in profiles


def split_loss(request: Request, output: Any) -> tuple[Any, Any]:
    """The loss and the aux of the user's output, checked.

    Returns:
        The loss, a pair of it and its weight for `"weighted"`; and the aux.
    """
    aux = None
    if request.has_aux:
        if not isinstance(output, tuple) or len(output) != 2:
            raise TypeError(
                f"{request.who}: with has_aux=True f must return a pair (loss, aux), "
                f"got {type(output).__name__}."
            )
        output, aux = output
    weighted = request.reduction == "weighted"
    parts: Any = output if weighted else (output,)
    if weighted and (not isinstance(parts, tuple) or len(parts) != 2):
        raise TypeError(
            f"{request.who}: with reduction='weighted' f must return a pair "
            f"(loss_sum, weight), got {type(output).__name__}."
        )
    loss = _scalar(request, parts[0])
    if not weighted:
        return loss, aux
    return (loss, _scalar(request, parts[1], jnp.number)), aux


def _scalar(request: Request, x: Any, kind: Any = jnp.floating) -> Array:
    """The user's loss or weight, as an array of shape ()."""
    found = type(x).__name__
    if _functional.is_array(x) or isinstance(x, (int, float)):
        x = jnp.asarray(x)
        if x.shape == () and jnp.issubdtype(x.dtype, kind):
            return x
        found = f"shape {x.shape}, {x.dtype}"
    raise TypeError(
        f"{request.who}: f must return a floating scalar, got {found}. If it returns a "
        "pair, pass has_aux=True."
    )


def widened(loss: Any) -> Any:
    """In floats of 32 bits or more: sums keep their digits, and counts do not wrap."""

    def widen(x: Array) -> Array:
        own = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else float
        return x.astype(jnp.promote_types(jnp.result_type(own), jnp.float32))

    return jax.tree.map(widen, loss)


def start(
    request: Request, mesh: MeshInfo, sums: Any, num_slices: int = 1
) -> tuple[Array, Any]:
    """The global value, and what the loss of each device and slice counts in it.

    Args:
        request: what the user asked for.
        mesh: mesh and the roles of its axes.
        sums: this device's widened loss, as `split_loss` returns it, added up over its
            slices.
        num_slices: into which the device's rows are cut.
    """
    if request.reduction == "mean":
        count = mesh.num_devices * num_slices
        value = _means.mean_over_devices(sums, mesh, _NAME, count=count)
        return value, jnp.ones((), value.dtype)
    totals = _collectives.sum_over_devices(sums, mesh, _NAME)
    if request.reduction == "weighted":
        total, weight = totals
        value, one = total / weight, 1 / weight.astype(total.dtype)
        return value, (one, -value * one)
    return totals, jnp.ones((), totals.dtype)


def value_of(request: Request, mesh: MeshInfo, loss: Any) -> Array:
    """The global value of a loss that is differentiated where `f` runs.

    Its cotangent goes on to this device's loss as `start` says.
    """
    dtype = jax.tree.leaves(loss)[0].dtype

    def forward(loss: Any) -> tuple[Array, Any]:
        value, counts = start(request, mesh, widened(loss))
        kinds = jax.tree.map(lambda x: jnp.zeros((), x.dtype), loss)
        return value.astype(dtype), (kinds, counts)

    def backward(residuals: Any, ct: Array) -> tuple[Any]:
        loss, counts = residuals
        return (cotangent(loss, jax.tree.map(lambda c: c * ct, counts)),)

    value = jax.custom_vjp(lambda loss: forward(loss)[0])
    value.defvjp(forward, backward)
    return value(loss)


def is_sum_of_losses(eqn: JaxprEqn) -> bool:
    """Whether an equation of a traced program adds up the devices' losses."""
    totals: list[Any] = [v.aval for v in eqn.outvars]
    summed = eqn.primitive.name.startswith("psum") and not totals[0].shape
    return summed and f"fsdp:all_reduce:{_NAME}" in str(eqn.source_info.name_stack)


def slices_in(request: Request, num_slices: int) -> int:
    """What the sum of the gradients of a device's slices is divided by."""
    return num_slices if request.reduction == "mean" else 1


def cotangent(loss: Any, counts: Any) -> Any:
    """What backward starts from: `counts` in the dtypes of the loss."""

    def cast(x: Array, count: Array) -> Any:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return count.astype(x.dtype)
        return np.zeros((), jax.dtypes.float0)

    return jax.tree.map(cast, loss, counts)
