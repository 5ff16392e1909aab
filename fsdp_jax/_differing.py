"""What differs between the devices that run one program, found in its trace.

What must not live here: what becomes of results that differ (`_join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from fsdp_jax import _arguments
from fsdp_jax._dependence import Look, depends_on
from fsdp_jax._divergence import find_divergence
from fsdp_jax._join import Request
from fsdp_jax._loss import is_sum_of_losses
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._one_row import Meeting, OneRow, Row
from fsdp_jax._raw_reads import axes_of_collective
from fsdp_jax._spec import ParamSpec

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
    params: Sequence[ParamSpec | None],
) -> tuple[list[bool], dict[int, str]]:
    """Whether each output of the program of one device differs between devices.

    One axis at a time: what is gathered along one of them differs along it no more,
    however many there are.

    Args:
        request: what the user asked for.
        mesh: mesh and the roles of its axes.
        closed: the program.
        specs: how its inputs are cut.
        params: how each of them rests, if it is a managed parameter.

    Returns:
        One mark per output, and what `find_divergence` found.

    Raises:
        ValueError: some devices would wait for ever, see `find_divergence`; or the
            devices' losses are added up along an axis along which they are the same;
            or the one row of a device meets as many as the whole batch has.
    """
    per_device = request.num_microbatches  # if f sees one row in each call
    rows = [per_device * mesh.num_devices]
    dims = [
        _arguments.cut_dim(spec) if param is None and len(spec) else None
        for spec, param in zip(specs, params, strict=True)
    ]
    consts = [None if _of_the_caller(x) else x for x in closed.consts]
    closed = ClosedJaxpr(closed.jaxpr, consts)
    divergent: dict[int, str] = {}
    alone = [
        Row(dim) if dim is not None and aval.shape[dim:][:1] == (per_device,) else None
        for dim, aval in zip(dims, closed.in_avals, strict=True)
    ]
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
        for eqn, differ in met.values() if request.reduction == "sum" else ():
            summed = is_sum_of_losses(eqn) and axis in axes_of_collective(eqn)
            if summed and not any(differ) and not _is_zero(eqn.invars[0]):
                raise ValueError(_of_equal_losses(request, axis, mesh))
        if any(row is not None for row in alone):
            followed = OneRow(rows, {k: differ for k, (_, differ) in met.items()})
            followed.run(closed, alone)
            if followed.met:
                raise ValueError(_of_one_row(request, followed.met[0]))
    return found, divergent


def _of_the_caller(x: Any) -> bool:
    """Whether a traced array comes from around the program: all devices hold all."""
    mesh = getattr(getattr(getattr(x, "aval", None), "sharding", None), "mesh", None)
    return isinstance(x, Tracer) and not getattr(mesh, "manual_axes", ())


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and not atom.val


def _noting(met: dict[int, tuple[JaxprEqn, list[bool]]], look: Look) -> Look:
    """Make a `look` that also notes equations, and which of their inputs differ.

    In a loop one is met several times; the last time with the most marks.
    """

    def both(eqn: JaxprEqn, ins: Sequence[bool], inside: bool = False) -> None:
        look(eqn, ins, inside)
        _, before = met.get(id(eqn), (eqn, ins))
        met[id(eqn)] = eqn, [a or b for a, b in zip(before, ins, strict=True)]

    return both


def _of_equal_losses(request: Request, axis: str, mesh: MeshInfo) -> str:
    times = mesh.size((axis,))
    return (
        f"{request.who}: the loss is the same on every device along mesh axis "
        f"{axis!r}, and reduction='sum' would add it up {times} times: nothing that it "
        "depends on is cut over the devices. An array that f reads from outside (a "
        "closure, a global) is whole on every device, as are Variables, NNX objects "
        "and lists of numbers: pass the batch as arrays, arguments of f. A loss that "
        "is the same everywhere is that of reduction='mean'."
    )


def _of_one_row(request: Request, met: Meeting) -> str:
    return (
        f"{request.who}: an array of shape {met.whole}, whole on every device, with an "
        f"entry for each row of the batch, meets this device's only row {met.own} in "
        f"{met.where}. For the whole batch row would meet row; here the one row would "
        "be broadcast. What f reads from outside (a closure, a global), Variables, and "
        "what in_specs says is whole are not cut with the batch: pass it as an array, "
        "an argument of f without a spec (state with rows: an nnx.Cache). Where one "
        "row is meant to meet them all, take it by itself: x[0]."
    )
