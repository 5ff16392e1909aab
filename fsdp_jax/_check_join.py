"""The documented rules of joining, in plain numpy, on what a replay gave.

Written from the README, apart from the code that they describe (`_join`, `_program`),
so that a fault there is not repeated here. What must not live here: running anything,
and judging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from fsdp_jax._arguments import axes_of
from fsdp_jax._check_host import wide
from fsdp_jax._check_run import Key, Leaf, Replay, Run
from fsdp_jax._check_subject import Subject
from fsdp_jax._functional import walk
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._state import is_sharded, state_of

MEAN, SUM, WEIGHTED = "mean", "sum", "weighted"


def join(subject: Subject, replay: Replay, like: Run, factors: bool = True) -> Run:
    """What the library would return.

    Args:
        subject: what is checked.
        replay: what each device gave; one device alone has nothing to join.
        like: a run whose shapes tell whether arrays were joined or the same everywhere.
        factors: whether groups divide by what `set_gradient_divide_factor` says.
    """
    reduction = subject.request.reduction
    joined: Run = {}
    loss = replay.arrays.get(("loss", ""))
    weight = replay.arrays.get(("weight", ""))
    value = None
    if loss is not None:
        value = joined["loss", ""] = _value(loss, weight, reduction)
    divided = _divide_factors(subject) if factors else {}
    if replay.mesh.num_devices == 1:
        divided = {}
    gradients = _gradients(subject, replay, divided, value)
    for key, leaf in replay.leaves.items():
        found = replay.arrays[key]
        if leaf.what == "gradient":
            joined[key] = gradients[key]
        elif leaf.what == "state":
            joined[key] = _of_state(subject, leaf, replay, like.get(key))
        elif leaf.what == "output":
            joined[key] = _of_output(found)
    return joined


def _value(loss: np.ndarray, weight: np.ndarray | None, reduction: str) -> np.ndarray:
    loss = wide(loss)
    if reduction == SUM:
        return loss.sum()
    if reduction == WEIGHTED:
        assert weight is not None
        return loss.sum() / wide(weight).sum()
    return loss.mean()


def _gradients(
    subject: Subject, replay: Replay, factors: dict[str, float], value: Any
) -> dict[Key, np.ndarray]:
    """Gradients of the reduced loss."""
    found: dict[Key, np.ndarray] = {}
    reduction = subject.request.reduction
    count = (replay.arrays[("loss", "")] if value is not None else np.ones(1)).size
    for entry, at in zip(subject.entries, subject.positions):
        key = ("gradient", entry.name)
        each = wide(replay.arrays[key][:, 0])
        num_slices = count // len(each)
        divisor: Any = 1.0
        if reduction == WEIGHTED:
            divisor = wide(replay.arrays["weight", ""]).sum()
            of_weight = replay.arrays.get(("gradient of weight", entry.name))
            if of_weight is not None:
                each = each - value * wide(of_weight[:, 0])
        elif reduction == MEAN:
            divisor = count
            if entry.name in factors:
                divisor = num_slices
        given = [*[PartitionSpec()] * len(subject.state), *replay.specs]
        whole = assembled(each, given[at], replay.mesh)
        found[key] = whole / divisor / factors.get(entry.name, 1.0)
    return found


def _divide_factors(subject: Subject) -> dict[str, float]:
    """By the name of a gradient, what its group divides the sum by, if that is set."""
    found: dict[int, float] = {}
    for node in subject.nodes:
        for _, module in walk(node):
            if is_sharded(module):
                factor = state_of(module).gradient_divide_factor
                for _, variable in walk(module):
                    # Inner groups come later, and overwrite.
                    if factor is None:
                        found.pop(id(variable), None)
                    else:
                        found[id(variable)] = factor
    by_path = {
        (i, *path): found[id(v)]
        for i, node in enumerate(subject.nodes)
        for path, v in walk(node)
        if id(v) in found
    }
    return {
        entry.name: by_path[subject.slots[at].path]
        for entry, at in zip(subject.entries, subject.positions)
        if at < len(subject.slots) and subject.slots[at].path in by_path
    }


def assembled(each: np.ndarray, spec: PartitionSpec, mesh: MeshInfo) -> np.ndarray:
    """One array of pieces `(devices, ...)`: joined along what is cut, else added up."""
    axes = list(mesh.data_axes)
    x = each.reshape([mesh.size((a,)) for a in axes] + list(each.shape[1:]))
    dims = axes_of(spec)
    unnamed = [a for a in axes if not any(a in names for names in dims)]
    for axis in unnamed:
        x = x.sum(axis=axes.index(axis))
        axes.remove(axis)
    for dim, names in enumerate(dims):
        for axis in reversed(names):  # the last one cuts within the others
            at = axes.index(axis)
            x = np.moveaxis(x, at, len(axes) - 1 + dim)
            axes.pop(at)
            place = len(axes) + dim
            shape = x.shape
            merged = shape[place] * shape[place + 1]
            x = x.reshape(*shape[:place], merged, *shape[place + 2 :])
    return x


def rows(found: np.ndarray) -> np.ndarray:
    """`(devices, slices, rows, ...)` in the order of the batch."""
    return found.reshape(-1, *found.shape[3:])


def alike(found: np.ndarray) -> bool:
    """Whether all devices and slices gave the same."""
    return bool((found == found[:1, :1]).all() or np.isnan(found).all())


def is_floating(x: np.ndarray) -> bool:
    """Whether numbers are averaged where they differ."""
    return x.dtype.kind not in "biu"


def _of_output(found: np.ndarray) -> np.ndarray:
    if found.ndim > 2:
        return rows(found)
    if is_floating(found):
        return wide(found).mean()
    return found[0, 0]


def _of_state(
    subject: Subject, leaf: Leaf, replay: Replay, like: np.ndarray | None
) -> np.ndarray:
    """A Variable after the call: README, "State that is not parameters"."""
    kind, found = leaf.kind or object, replay.arrays[leaf.key]
    if issubclass(kind, nnx.RngKey) and leaf.at is not None:
        return subject.state[leaf.at].data
    if leaf.at is not None and leaf.at in subject.sums:
        return found[:, 0].sum(axis=0, dtype=found.dtype)
    if leaf.at is not None and subject.slots[leaf.at].rows is not None:
        spec = subject.slots[leaf.at].spec
        return assembled(found[:, 0], spec, replay.mesh)
    if issubclass(kind, nnx.BatchStat) and is_floating(found):
        return wide(found).mean(axis=(0, 1))
    if leaf.at is not None:
        return found[0, 0]
    each = found[0, 0]
    if each.ndim:
        shapes: Sequence[np.ndarray] = (each, rows(found[:1]), rows(found))
        same = [x for x in shapes if like is not None and x.shape == like.shape]
        return (same or shapes[-1:])[0]
    return wide(found).mean() if is_floating(found) else each
