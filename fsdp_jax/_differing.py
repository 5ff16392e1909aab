"""What differs between the devices that run one program, found in its trace.

What must not live here: what becomes of results that differ (`_join`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from fsdp_jax import _arguments
from fsdp_jax._dependence import Look, depends_on
from fsdp_jax._divergence import find_divergence
from fsdp_jax._join import Request
from fsdp_jax._loss import is_sum_of_losses
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._raw_reads import ELEMENTWISE, axes_of_collective

Shape = tuple[int, ...]

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
    rows: Collection[int],
) -> tuple[list[bool], dict[int, str]]:
    """Whether each output of the program of one device differs between devices.

    One axis at a time: what is gathered along one of them differs along it no more,
    however many there are.

    Args:
        request: what the user asked for.
        mesh: mesh and the roles of its axes.
        closed: the program.
        specs: how its inputs are cut.
        rows: how many rows the arguments have that are cut over all devices.

    Returns:
        One mark per output, and what `find_divergence` found.

    Raises:
        ValueError: some devices would wait for ever, see `find_divergence`; or the
            devices' losses are added up along an axis along which they are the same;
            or the one row of a device meets as many as the whole batch has.
    """
    consts = [None if _of_the_caller(x) else x for x in closed.consts]
    closed = ClosedJaxpr(closed.jaxpr, consts)
    divergent: dict[int, str] = {}
    count = mesh.num_devices * request.num_microbatches
    alone = {n for n in rows if n == count > 1}  # one row in each call of f
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
        met: dict[int, tuple[JaxprEqn, list[bool]]] = {}
        noting = _noting(met, look)
        along = depends_on(closed, marks, decide, into_loops=True, look=noting)
        found = [a or b for a, b in zip(found, along)]
        for eqn, differ in met.values():
            if request.reduction == "sum" and is_sum_of_losses(eqn):
                if axis in axes_of_collective(eqn) and not any(differ):
                    raise ValueError(_of_equal_losses(request, axis, mesh))
            if alone and (shapes := _broadcast(eqn, differ, alone)):
                raise ValueError(_of_one_row(request, eqn, *shapes))
    return found, divergent


def _of_the_caller(x: Any) -> bool:
    """Whether a traced array comes from around the program: all devices hold all."""
    mesh = getattr(getattr(getattr(x, "aval", None), "sharding", None), "mesh", None)
    return isinstance(x, Tracer) and not getattr(mesh, "manual_axes", ())


def _noting(met: dict[int, tuple[JaxprEqn, list[bool]]], look: Look) -> Look:
    """Make a `look` that also notes equations, and which of their inputs differ.

    In a loop one is met several times; the last time with the most marks.
    """

    def both(eqn: JaxprEqn, ins: Sequence[bool], inside: bool = False) -> None:
        look(eqn, ins, inside)
        if eqn.primitive.name in ELEMENTWISE or is_sum_of_losses(eqn):
            _, before = met.get(id(eqn), (eqn, ins))
            met[id(eqn)] = eqn, [a or b for a, b in zip(before, ins, strict=True)]

    return both


def _of_equal_losses(request: Request, axis: str, mesh: MeshInfo) -> str:
    times = mesh.size((axis,))
    return (
        f"{request.who}: the loss is the same on every device along mesh axis "
        f"{axis!r}, and reduction='sum' would add it up {times} times: nothing that it "
        "depends on is cut over the devices. An array that f reads from outside (a "
        "closure, a global) is whole on every device, as is a list of numbers: pass "
        "the batch as arguments of f. A loss that is the same everywhere is that of "
        "reduction='mean'."
    )


def _broadcast(
    eqn: JaxprEqn, differ: Sequence[bool], rows: Collection[int]
) -> tuple[Shape, Shape] | None:
    """The shapes of a device's one row, and of what may be all rows, if they meet."""
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
    own = [s for s, d in zip(shapes, differ) if d and s[:1] == (1,)]
    whole = [s for s, d in zip(shapes, differ) if not d and s and s[0] in rows]
    pairs = ((a, b) for a in own for b in whole if len(a) == len(b))
    return next(pairs, None)


def _of_one_row(request: Request, eqn: JaxprEqn, own: Shape, whole: Shape) -> str:
    where = source_info_util.summarize(eqn.source_info)
    return (
        f"{request.who}: an array of shape {whole}, whole on every device, meets this "
        f"device's one row {own} of the {whole[0]} rows of the batch, and would be "
        f"broadcast: {eqn.primitive.name} at {where}. What f reads from outside (a "
        "closure, a global), and what in_specs says is whole, is not cut with the "
        "batch: pass it as an argument, without a spec. Where broadcasting is meant, "
        "say so: jnp.broadcast_to."
    )
