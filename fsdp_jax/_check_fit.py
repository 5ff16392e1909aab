"""How the devices' losses add up to that of the whole batch, if they do.

What must not live here: running anything.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.sharding import PartitionSpec

from fsdp_jax._check_host import Tolerance, wide
from fsdp_jax._check_join import WEIGHTED, assembled
from fsdp_jax._check_run import Replay, Run
from fsdp_jax._check_subject import Subject


@dataclasses.dataclass(frozen=True)
class Fit:
    """Numbers by which each device's loss counts in that of the whole batch.

    Attributes:
        weights: one per device.
        kind: "sum", "mean" or "weighted"; "other" for any others.
    """

    weights: np.ndarray
    kind: str


def fit(
    subject: Subject, replay: Replay, whole: Run, tolerance: Tolerance
) -> Fit | None:
    """Find the one set of numbers that fits the loss and all gradients.

    Returns:
        None if there is none: then the loss of the whole batch is not made of those of
        the devices. Also where there are too few gradients to tell.
    """
    if subject.request.reduction == WEIGHTED or ("loss", "") not in whole:
        return None
    entries = zip(subject.entries, subject.positions)
    names = [e.name for e, at in entries if at < len(subject.state)]
    keys = [("loss", ""), *[("gradient", n) for n in names]]
    columns, target = [], []
    for key in keys:
        each = wide(replay.arrays[key]).mean(axis=1)
        scale = float(np.abs(whole[key]).max(initial=0.0)) or 1.0
        columns.append(each.reshape(len(each), -1) / scale)
        target.append(np.ravel(wide(whole[key])) / scale)
    matrix, wanted = np.concatenate(columns, axis=1).T, np.concatenate(target)
    count = matrix.shape[1]
    if not np.isfinite(matrix).all() or not np.isfinite(wanted).all():
        return None
    for kind, weights in (("sum", np.ones(count)), ("mean", np.ones(count) / count)):
        if _fits(replay, whole, keys, weights, tolerance):
            return Fit(weights, kind)
    if len(wanted) < 4 * count:
        return None
    weights = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    if not _fits(replay, whole, keys, weights, tolerance):
        return None
    of_rows = abs(weights.sum() - 1) < 1e-3 and (weights > -1e-3).all()
    of_rows = of_rows and weights.max() < 1 - 1e-3  # else a maximum, say, picks one
    return Fit(weights, "weighted" if of_rows else "other")


def _fits(replay, whole, keys, weights, tolerance) -> bool:
    for key in keys:
        each = wide(replay.arrays[key]).mean(axis=1)
        scaled = each * weights.reshape(-1, *[1] * (each.ndim - 1))
        total = assembled(scaled, PartitionSpec(), replay.mesh)
        if not tolerance.equal(total, whole[key]):
            return False
    return True
