"""How `check` tells what became of each argument, output and kind of Variable.

What must not live here: what differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from flax import nnx

from fsdp_jax import _functional
from fsdp_jax._check_findings import how_cut
from fsdp_jax._check_join import alike, is_floating
from fsdp_jax._check_run import Replay
from fsdp_jax._check_subject import Subject


def arguments(subject: Subject) -> Iterator[str]:
    """One line per array of the arguments."""
    for i, (label, held) in enumerate(zip(subject.labels, subject.arrays)):
        if subject.specs is not None:
            cut = how_cut(subject.specs[i], subject.mesh)
            yield f"{label} {held.shape}: {cut}"


def outside(subject: Subject) -> Iterator[str]:
    """One line per array that the function itself takes from around it."""
    f = inspect.unwrap(subject.request.f)
    if not inspect.isfunction(f):
        return
    found = inspect.getclosurevars(f)
    for name, value in {**found.globals, **found.nonlocals}.items():
        if _functional.is_array(value) and value.ndim:
            shape = tuple(value.shape)
            yield f"{name!r} {shape}, from outside of f: whole on every device"


def results(subject: Subject, replay: Replay) -> Iterator[str]:
    """One line per output, and per kind of Variable that is no parameter."""
    by_rule: dict[str, list[str]] = {}
    for key, leaf in replay.leaves.items():
        found = replay.arrays[key]
        if leaf.what == "output":
            shape = f"{tuple(found.shape[2:])} per device: "
            if found.ndim > 2:
                how = shape + "concatenated on dim 0"
            elif not is_floating(found) or alike(found):
                how = "the same on every device"
            else:
                how = "averaged over devices"
            yield f"output{leaf.path}: {how}"
        elif leaf.what == "state" and leaf.kind is not None:
            if leaf.at is None or not subject.slots[leaf.at].managed:
                rule = f"{leaf.kind.__name__}: {_rule(subject, replay, key)}"
                by_rule.setdefault(rule, []).append(leaf.path)
    for rule, paths in by_rule.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield f"state {paths[0]}{more}, {rule}"


def _rule(subject: Subject, replay: Replay, key: tuple[str, str]) -> str:
    leaf, found = replay.leaves[key], replay.arrays[key]
    kind = leaf.kind or object
    if issubclass(kind, nnx.RngKey):
        return "kept, with the index of the device folded in while f runs"
    if leaf.at is not None and leaf.at in subject.sums:
        return "the sum over devices"
    if leaf.at is not None and subject.slots[leaf.at].rows is not None:
        return f"cut over devices on dim {subject.slots[leaf.at].rows}"
    if issubclass(kind, nnx.BatchStat) and is_floating(found):
        return "averaged over devices"
    if leaf.at is not None or alike(found):
        return "the same on every device"
    return "concatenated on dim 0" if found.ndim > 2 else "averaged over devices"
