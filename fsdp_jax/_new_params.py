"""Parameters that come into a model after it was sharded.

What must not live here: noticing them (`_state`), and `fully_shard` itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal, TypeVar

from flax import nnx

from fsdp_jax import _functional
from fsdp_jax._fully_shard import undo
from fsdp_jax._param import manage
from fsdp_jax._placement import PlacementFn, check_placement, rest_of
from fsdp_jax._spec import ParamSpec, dotted
from fsdp_jax._stacks import layer_dims
from fsdp_jax._state import (
    check_variables,
    is_sharded,
    new_params,
    place_replicated,
    state_of,
)
from fsdp_jax._threads import LOCK
from fsdp_jax._unshard import reshard_now

M = TypeVar("M")


def shard_new_params(
    model: M,
    *,
    shard_placement_fn: PlacementFn | None = None,
    uneven: Literal["auto", "pad", "error"] = "auto",
) -> M:
    """Let parameters that were put into a model after `fully_shard` join their groups.

    Such as a resized embedding, or a new head. Each joins the group of the innermost
    sharded module around it, with that module's mesh and policies. Until then it is
    whole on every device. Optimizers know nothing of it: make a new one.

    Args:
        model: a sharded module, or one that contains some.
        shard_placement_fn: as in `fully_shard`, for the new parameters.
        uneven: as in `fully_shard`, for the new parameters.

    Returns:
        The object that was given. Nothing changes if there is nothing new.

    Raises:
        TypeError: the model is no NNX object, or as `fully_shard`.
        ValueError: no sharded module in `model`, a new parameter that two groups share,
            or as `fully_shard`.
        In every case nothing has been changed.

    Source: README, "The contract"; PyTorch has parameters join no group later.
    """
    who = "shard_new_params"
    check_placement(who, shard_placement_fn, uneven)
    if not isinstance(model, nnx.Pytree):
        raise TypeError(f"{who}: expected an nnx.Module, got {type(model).__name__}.")
    check_variables(model, who)
    modules = [pair for pair in _functional.walk(model) if is_sharded(pair[1])]
    if not modules:
        raise ValueError(
            f"{who}: the model is, or contains, no module that fully_shard was applied "
            "to."
        )
    plans: list[tuple[nnx.Variable, ParamSpec]] = []
    names: dict[int, str] = {}
    grown = []
    for at, module in modules:
        state, found = state_of(module), new_params(module)
        layers = layer_dims(module) if found else {}
        for path, variable in found:
            name = dotted((*at, *path))
            if (other := names.setdefault(id(variable), name)) != name:
                raise ValueError(
                    f"{who}: parameter {name!r} is tied to {other!r}, which is in the "
                    "group of another module. A parameter travels in one group: untie "
                    "them."
                )
            spec = rest_of(
                dotted(path),
                variable,
                state.mesh,
                shard_placement_fn,
                state.offload_policy.memory_kind,
                uneven,
                layers.get(id(variable), 0),
            )
            plans.append((variable, spec))
        if found:
            grown.append(module)
    with LOCK, ExitStack() as on_error:
        for module in grown:
            reshard_now(module)
        for variable, spec in plans:
            on_error.callback(undo(variable))
            manage(variable, spec)
        for module in grown:
            place_replicated(module)
        on_error.pop_all()
    return model
