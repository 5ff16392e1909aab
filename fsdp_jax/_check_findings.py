"""The documented rules by name: what was found, and what to do where it is not meant.

What must not live here: finding it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from fsdp_jax._arguments import axes_of
from fsdp_jax._check_batch import Placing
from fsdp_jax._check_fit import Fit
from fsdp_jax._check_host import Tolerance, wide
from fsdp_jax._check_join import is_floating
from fsdp_jax._check_report import Finding
from fsdp_jax._check_run import Leaf
from fsdp_jax._check_subject import Subject
from fsdp_jax._mesh import MeshInfo

MEANT = "Nothing, if that is meant."


def mixed_precision() -> Finding:
    """A policy's rounding."""
    return Finding(
        "mixed precision",
        "a MixedPrecisionPolicy computes or reduces in fewer digits. The difference is "
        "of that size, and without the policies it is gone.",
        MEANT,
    )


def random_streams(outcome: str) -> Finding:
    """Dropout masks; `outcome` is what the difference is without them."""
    return Finding(
        "random streams",
        "each device draws masks of its own for its rows: the index of the device is "
        "folded into the keys. An unsharded run of each device's rows with such keys "
        f"draws the same, and without dropout the difference is {outcome}.",
        MEANT + " For comparisons of your own switch dropout off.",
    )


def draws(name: str) -> Finding:
    """Random streams that cannot be switched off."""
    return Finding(
        "random streams",
        f"the function draws from a random stream ({name}) on each device, with the "
        "index of the device folded into the key, and no module has a switch for it. "
        "An unsharded run of each device's rows with such keys draws the same.",
        "Check once more without the drawing: it may hide other differences.",
    )


def key_argument(label: str) -> Finding:
    """A key that is the same on every device."""
    return Finding(
        "key argument",
        f"the numbers depend on the key {label}, which is the same on every device: "
        "all devices draw alike, each for its own rows.",
        "Where rows must differ, draw from an nnx.Rngs (its keys differ between "
        "devices), or pass one key per row.",
    )


def cut_argument(
    subject: Subject, placing: Placing, outcome: str, by_rows: bool = True
) -> Finding:
    """An argument that is cut and is no batch, or has its rows elsewhere.

    Args:
        subject: what is checked.
        placing: how it should be cut.
        outcome: what becomes of the difference then; a sentence without its end.
        by_rows: whether that was found by changing the places of rows.
    """
    mesh, label = subject.mesh, subject.labels[placing.at]
    shape = subject.arrays[placing.at].shape
    assert subject.specs is not None
    own = how_cut(subject.specs[placing.at], mesh)
    if placing.dim is None:
        rule = "cut argument"
        why = "like a batch, and is none"
        if by_rows:
            why += ": loss and gradients of the unsharded model stay as they are when "
            why += "the other arguments' rows change places alone"
        why += "."
    else:
        rule = "wrong dim"
        why = f"and has its rows on dim {placing.dim}: pieces along that dim may change"
        why += " places together, those along the other may not."
    return Finding(
        rule,
        f"{label} {shape} was {own} {why}",
        f"{_in_specs(subject, placing)}: {outcome} then.",
    )


def _repr(spec: PartitionSpec) -> str:
    return f"PartitionSpec({', '.join(repr(e) for e in spec)})"


def _in_specs(subject: Subject, placing: Placing) -> str:
    """The argument to write, where every argument is one array; else its name."""
    asked = subject.specs or []
    flat = len(asked) == subject.num_args - 1 and subject.plain_arguments
    if not flat:
        spec, label = _repr(placing.final[placing.at]), subject.labels[placing.at]
        name = label.removeprefix("argument ")
        if name == repr(name[1:-1]):  # all of an argument
            return f"Pass in_specs={{{name}: {spec}}}"
        return f"Let in_specs give {label} the spec {spec}"
    entries = [
        _repr(new) if new != default_of(x.shape, subject.mesh) else "None"
        for new, x in zip(placing.final, subject.arrays)
    ]
    comma = "," if len(entries) == 1 else ""
    return f"Pass in_specs=({', '.join(entries)}{comma})"


def default_of(shape: Sequence[int], mesh: MeshInfo) -> PartitionSpec:
    """How an argument is cut where nothing else is asked for."""
    return mesh.data_spec() if shape else PartitionSpec()


def batch_norm(axes: Sequence[str], outcome: str) -> Finding:
    """Statistics of one device's rows; `outcome` as in `random_streams`."""
    name = repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
    return Finding(
        "batch norm",
        "BatchNorm takes the statistics of one device's rows, and the running ones are "
        "the mean over devices. With those of all devices the difference is "
        f"{outcome}.",
        f"For the statistics of the whole batch make it with axis_name={name}.",
    )


def micro_batches(outcome: str) -> Finding:
    """Slices of a device's rows; `outcome` as in `random_streams`."""
    return Finding(
        "micro-batches",
        "each slice of a device's rows is computed on its own. With one slice the "
        f"difference is {outcome}: the function mixes rows, or counts calls.",
        "Take num_microbatches=1, or see to it that the slices add up: a mean over "
        "rows for 'mean', a sum for 'sum', both parts for 'weighted'.",
    )


def divide_factor(outcome: str) -> Finding:
    """A factor that was set; `outcome` as in `random_streams`."""
    return Finding(
        "divide factor",
        "set_gradient_divide_factor divides the sum over devices by another number "
        f"than how many they are. Without it the difference is {outcome}.",
        MEANT,
    )


def loss(subject: Subject, fitted: Fit | None) -> Finding:
    """A loss that is not the reduction of the devices' losses."""
    reduction = subject.request.reduction
    if fitted is not None and fitted.kind in ("sum", "mean"):
        how = {"sum": "the sum", "mean": "the mean"}
        return Finding(
            "reduction",
            f"the loss of the whole batch is {how[fitted.kind]} of the devices' "
            f"losses, and reduction={reduction!r} takes {how[reduction]}.",
            f"reduction={fitted.kind!r} makes the numbers equal.",
        )
    if fitted is not None and fitted.kind == "weighted":
        shown = ", ".join(f"{w:.3g}" for w in fitted.weights[:8])
        more = ", ..." if len(fitted.weights) > 8 else ""
        return Finding(
            "uneven weights",
            "the devices' losses count differently in the loss of the whole batch, "
            f"{shown}{more}: it is a mean over what devices hold different numbers "
            "of, such as valid tokens.",
            "Return the pair (sum of losses, weight), the number of tokens, and pass "
            "reduction='weighted'.",
        )
    return Finding(
        "mixed rows",
        "the function of the whole batch is not made of its values for each device's "
        "rows: it mixes rows, as a contrastive loss does, and on a device it sees the "
        f"rows of that one only. No reduction gives the number ({reduction!r} was "
        "asked for).",
        "Gather what is mixed within f (jax.lax.all_gather, tiled=True, over "
        f"{subject.mesh.data_axes}), or return it by fsdp_jax.shard_map and take the "
        "loss of that, outside.",
    )


def joined(
    subject: Subject,
    leaf: Leaf,
    found: np.ndarray,
    whole: np.ndarray,
    tolerance: Tolerance,
    fitted: Fit | None,
) -> Finding:
    """An output, or a Variable, whose pieces do not make what the whole batch does.

    Args:
        subject: what is checked.
        leaf: what it is.
        found: of each device and slice.
        whole: of the whole batch.
        tolerance: what counts as equal.
        fitted: how the devices' losses count in that of the whole batch.
    """
    axes = subject.mesh.data_axes
    kind: Any = leaf.kind or object
    if leaf.at is not None and leaf.at in subject.sums:
        return Finding(
            "counted per device",
            "a metric adds up what each device counts: a scalar counts once per "
            "device, and a mean over rows is one of a device's rows.",
            "Give it one entry per row.",
        )
    if issubclass(kind, nnx.BatchStat):
        return Finding(
            "averaged",
            "a BatchStat is the mean over the devices of what each makes of its rows.",
            f"Compute it from all rows: jax.lax.pmean over {axes}.",
        )
    if leaf.at is not None or (whole.ndim == 0 and not is_floating(whole)):
        return Finding(
            "counted per device",
            "every device comes to the same value, from the shapes of its own rows, "
            "say; the whole batch gives another one.",
            f"Count all rows: jax.lax.psum over {axes}.",
        )
    if whole.ndim == 0:
        each, tell = wide(found), "the mean of those of the devices"
        if tolerance.equal(each.sum(), whole):
            tell += "; that of the whole batch is their sum"
        elif fitted is not None:
            total = (each.mean(axis=1) * fitted.weights).sum()
            if tolerance.equal(total, whole):
                tell += ", which count alike; in the whole batch they do not"
        return Finding(
            "averaged",
            f"a floating scalar is {tell}.",
            f"Return jax.lax.psum over {axes} of a sum or count (and of what it is to "
            "be divided by), or one entry per row.",
        )
    pieces = found.shape[0] * found.shape[1]
    each = tuple(found.shape[2:])
    if each == whole.shape:
        return Finding(
            "concatenated",
            f"arrays are concatenated on dim 0, as if they had rows: {pieces} of "
            f"{each}. The whole batch gives one of {whole.shape}.",
            "Return it with the rows of the batch first; or sum it over devices, "
            f"jax.lax.psum over {axes}, and take the first of the equal pieces.",
        )
    if (pieces * each[0], *each[1:]) != whole.shape:
        return Finding(
            "concatenated",
            f"arrays are concatenated on dim 0: {pieces} of {each}. The whole batch "
            f"gives {whole.shape}: its rows are along another dim.",
            "Return it with the rows of the batch on dim 0, or say where they are with "
            "out_specs of fsdp_jax.shard_map.",
        )
    return Finding(
        "mixed rows",
        "the function sees the rows of one device: what it makes of a row depends on "
        "which others are there, or its rows are not in the order of the batch.",
        f"Gather what is mixed within f: jax.lax.all_gather, tiled=True, over {axes}.",
    )


def how_cut(spec: PartitionSpec, mesh: MeshInfo) -> str:
    """How an argument is cut, in words."""
    parts = [
        f"dim {dim} over {mesh.size(axes)} devices"
        for dim, axes in enumerate(axes_of(spec))
        if axes
    ]
    return "cut on " + " and ".join(parts) if parts else "whole on every device"
