"""What differs between the devices that run one program, found in its trace.

What must not live here: what becomes of results that differ (`_join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from fsdp_jax import _arguments
from fsdp_jax._dependence import Look, depends_on
from fsdp_jax._divergence import find_divergence
from fsdp_jax._join import Request
from fsdp_jax._loss import is_sum_of_losses
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._raw_reads import axes_of_collective

_ALIKE = (
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
)


def differ_between_devices(
    request: Request,
    mesh: MeshInfo,
    closed: ClosedJaxpr,
    specs: Sequence[PartitionSpec],
) -> tuple[list[bool], dict[int, str]]:
    """Whether each output of the program of one device differs between devices.

    One axis at a time: what is gathered along one of them differs along it no more,
    however many there are.

    Args:
        request: what the user asked for.
        mesh: mesh and the roles of its axes.
        closed: the program.
        specs: how its inputs are cut.

    Returns:
        One mark per output, and what `find_divergence` found.

    Raises:
        ValueError: some devices would wait for ever, see `find_divergence`; or the
            devices' losses are added up along an axis along which they are the same.
    """
    consts = [None if _of_the_caller(x) else x for x in closed.consts]
    closed = ClosedJaxpr(closed.jaxpr, consts)
    divergent: dict[int, str] = {}
    found = [False] * len(closed.jaxpr.outvars)
    for axis in (a for a in mesh.data_axes if mesh.size((a,)) > 1):

        def decide(eqn: Any, axis: str = axis) -> bool | None:
            if axis in axes_of_collective(eqn):
                whole = eqn.params.get("axis_index_groups") is None
                return not (whole and eqn.primitive.name in _ALIKE)
            # The use of an axis is an effect with its name, inside of loops too.
            along = [getattr(e, "name", axis) == axis for e in eqn.effects]
            return any(along) or None

        marks = [
            any(axis in axes for axes in _arguments.axes_of(spec)) for spec in specs
        ]
        look = find_divergence(request.who, mesh.data_axes, decide, divergent)
        sums: dict[int, bool] = {}
        noting = _noting_losses(axis, sums, look)
        along = depends_on(closed, marks, decide, into_loops=True, look=noting)
        found = [a or b for a, b in zip(found, along)]
        if request.reduction == "sum" and not all(sums.values()):
            raise ValueError(
                f"{request.who}: the loss is the same on every device along mesh axis "
                f"{axis!r}, and reduction='sum' would add it up {mesh.size((axis,))} "
                "times: nothing that it depends on is cut over the devices. An array "
                "that f reads from outside (a closure, a global) is whole on every "
                "device, as is a list of numbers: pass the batch as arguments of f. A "
                "loss that is the same everywhere is that of reduction='mean'."
            )
    return found, divergent


def _of_the_caller(x: Any) -> bool:
    """Whether a traced array comes from around the program: all devices hold all."""
    mesh = getattr(getattr(getattr(x, "aval", None), "sharding", None), "mesh", None)
    return isinstance(x, Tracer) and not getattr(mesh, "manual_axes", ())


def _noting_losses(axis: str, found: dict[int, bool], look: Look) -> Look:
    """Make a `look` that also notes, of each sum of losses, whether they differ."""

    def both(eqn: JaxprEqn, ins: Sequence[bool], inside: bool = False) -> None:
        look(eqn, ins, inside)
        if is_sum_of_losses(eqn) and axis in axes_of_collective(eqn):
            found[id(eqn)] = any(ins) or found.get(id(eqn), False)

    return both
