"""Random streams in a per-device program: a key of its own on each device.

What must not live here: what becomes of other state (`_join`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from fsdp_jax import _collectives
from fsdp_jax._spec import dotted
from fsdp_jax._unchanged import unchanged
from fsdp_jax._user import Call, Outcome


def key_positions(call: Call) -> list[int]:
    """The positions of keys among the arrays, where devices have their own."""
    if call.mesh.num_devices == 1:
        return []
    slots = enumerate(call.variables)
    return [i for i, slot in slots if issubclass(slot.kind, nnx.RngKey)]


def fold_keys(call: Call, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a program with the device's index folded into each key."""
    held = list(inputs)
    for i in key_positions(call):
        index = _collectives.device_index(call.mesh)
        fold = functools.partial(jax.random.fold_in, data=index)
        for _ in range(held[i].ndim):
            fold = jax.vmap(fold)
        held[i] = fold(held[i])
    return held


def specs_with_keys(
    call: Call, specs: Sequence[PartitionSpec]
) -> tuple[PartitionSpec, ...]:
    """How the inputs differ between devices, with these keys."""
    keys = {*key_positions(call)}
    own = call.mesh.data_spec()
    return tuple(own if i in keys else spec for i, spec in enumerate(specs))


def kept_keys(call: Call, outcome: Outcome, closed: ClosedJaxpr) -> dict[int, int]:
    """The results of a program that are keys as they were, and which of its inputs.

    Args:
        call: of the user's function.
        outcome: what the call left.
        closed: the program of one device; the state that changed comes out first.

    Raises:
        ValueError: `f` wrote another key.
    """
    keys = {*key_positions(call)}
    places = [(p, at) for p, at in enumerate(outcome.updates) if at in keys]
    if not places:
        return {}
    found = unchanged(closed)
    for place, at in places:
        if found[place] != at:
            path = dotted(call.variables[at].path[1:])
            raise ValueError(
                f"{call.request.who}: f writes the random key {path!r}, which has to "
                "differ between devices: each has folded its index into the key that "
                "the model came with. Reseed before the call (nnx.reseed(model, "
                "...)), or draw from a key that is an argument."
            )
    return {place: at for place, at in places if at is not None}
