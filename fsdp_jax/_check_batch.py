"""Telling a batch from an array that is none, by an experiment on the unsharded twin.

The pieces that devices would get are put into another order, in all arguments that are
a batch together: loss and gradients of the whole batch do not notice. They do if one of
the arguments is no batch, or has its rows along another dim. What must not live here:
anything that depends on how the library runs a function.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from jax.sharding import PartitionSpec

from fsdp_jax._arguments import cut_dim
from fsdp_jax._check_host import Held, Tolerance
from fsdp_jax._check_run import Run
from fsdp_jax._check_subject import Subject

_MAX_TRIED = 64


@dataclasses.dataclass(frozen=True)
class Placing:
    """How one argument should be cut.

    Attributes:
        at: its position among the arrays of the arguments.
        dim: the dim with the rows; None if it is no batch.
        specs: of all arguments, with this one and those before it put right.
        final: of all arguments, put right.
    """

    at: int
    dim: int | None
    specs: tuple[PartitionSpec, ...]
    final: tuple[PartitionSpec, ...]


def find_batch(
    subject: Subject, run: Callable[[list[Held]], Run], tolerance: Tolerance
) -> list[Placing]:
    """Arguments that are cut and should not be, or along another dim.

    Args:
        subject: what is checked.
        run: the unsharded function, of these arrays.
        tolerance: what counts as equal.

    Returns:
        None if the experiment finds all right, or finds nothing.
    """
    specs, mesh = subject.specs or [], subject.mesh
    cut = [i for i, s in enumerate(specs) if cut_dim(s) is not None]
    if not cut or mesh.num_devices == 1 or subject.request.argnums is None:
        return []
    before, count = run(subject.arrays), mesh.num_devices
    told = [k for k in before if k[0] == "loss" or _of_parameter(subject, k)]

    def unnoticed(arrays: list[Held]) -> bool:
        after = run(arrays)
        return all(tolerance.equal(after[k], before[k]) for k in told)

    @functools.cache
    def matters(i: int, dim: int) -> bool:
        arrays = list(subject.arrays)
        arrays[i] = _repeated(arrays[i], dim, count)
        return not unnoticed(arrays)

    options = []
    for i in cut:
        own, shape = cut_dim(specs[i]), subject.arrays[i].shape
        others = [d for d, n in enumerate(shape) if n and n % count == 0]
        options.append([own, None, *[d for d in others if d != own]])
    choices = sorted(
        itertools.product(*[enumerate(o) for o in options]),
        key=lambda choice: (sum(i > 0 for i, _ in choice), choice[0][0] == 1),
    )
    for choice in choices[:_MAX_TRIED]:
        arrays, moved = list(subject.arrays), []
        for i, (_, dim) in zip(cut, choice):
            if dim is not None:
                arrays[i] = _reordered(arrays[i], dim, count)
                moved.append((i, dim))
        # What nothing depends on, or is the same in all pieces, proves nothing.
        if unnoticed(arrays) and any(matters(i, dim) for i, dim in moved):
            break
    else:
        return []
    final, found = list(specs), []
    for i, (place, dim) in zip(cut, choice):
        if place:
            final[i] = PartitionSpec() if dim is None else mesh.data_spec(dim)
    now = list(specs)
    for i, (place, dim) in zip(cut, choice):
        if place:
            now[i] = final[i]
            found.append(Placing(i, dim, tuple(now), tuple(final)))
    return found


def replicated(subject: Subject) -> Iterator[Placing]:
    """Each argument that is cut, whole on every device instead."""
    specs = subject.specs or []
    for i, spec in enumerate(specs):
        if cut_dim(spec) is not None:
            changed = (*specs[:i], PartitionSpec(), *specs[i + 1 :])
            yield Placing(i, None, changed, changed)


def _of_parameter(subject: Subject, key: tuple[str, str]) -> bool:
    what, path = key
    entries = zip(subject.entries, subject.positions)
    of_state = {e.name for e, at in entries if at < len(subject.state)}
    return what == "gradient" and path in of_state


def _repeated(held: Held, dim: int, count: int) -> Held:
    """With its first piece in all places."""
    first = np.split(held.data, count, axis=dim)[0]
    data = np.concatenate([first] * count, axis=dim)
    return dataclasses.replace(held, data=data)


def _reordered(held: Held, dim: int, count: int) -> Held:
    """With its pieces in another order."""
    order = np.random.default_rng(1).permutation(count)
    if (order == np.arange(count)).all():
        order = order[::-1]
    pieces = np.split(held.data, count, axis=dim)
    data = np.concatenate([pieces[i] for i in order], axis=dim)
    return dataclasses.replace(held, data=data)
