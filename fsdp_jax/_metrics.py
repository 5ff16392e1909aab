"""Metrics that every device adds to: they start on one device and end as a sum.

What must not live here: how other Variables become global (`_join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from fsdp_jax import _collectives
from fsdp_jax._dependence import ADDED, FREE, OTHER, added_to
from fsdp_jax._spec import dotted
from fsdp_jax._user import Call, Outcome


def start_metrics(
    call: Call, outcome: Outcome, closed: ClosedJaxpr, inputs: Sequence[Any]
) -> list[Any]:
    """Inputs of the program such that sums over devices count what was there once.

    Args:
        call: of the user's function.
        outcome: what the call left.
        closed: the program of one device; the state that changed comes out first.
        inputs: of it.

    Returns:
        The inputs. Of metrics that the devices add to, all devices but the first hold
        zeros.

    Raises:
        ValueError: the program reads such a metric otherwise than to add to it.
    """
    held = list(inputs)
    if call.mesh.num_devices == 1:
        return held
    first = _collectives.device_index(call.mesh) == 0
    for place, at in enumerate(outcome.updates):
        if not outcome.changes[place].summed or at is None:
            continue
        marks = [ADDED if i == at else FREE for i in range(len(held))]
        found = added_to(closed, marks)
        if found[place] == OTHER or any(found[:place]) or any(found[place + 1 :]):
            slot = call.variables[at]
            owner = outcome.changes[place].owner
            raise ValueError(
                f"{call.request.who}: f updates the {slot.kind.__name__} "
                f"{dotted(slot.path[1:])!r} of {owner.__name__ if owner else ''} and "
                "uses its value too (in compute, say), but a device has counted its "
                "own rows only. In f only update it, or reset it in every case, and "
                "compute after the call."
            )
        held[at] = jnp.where(first, held[at], jnp.zeros_like(held[at]))
    return held
