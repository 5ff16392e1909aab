"""`check`: a function sharded against the same unsharded, once before a long job.

What lives here: the public function and its arguments. What must not: running
(`_check_run`), finding rules (`_check_rules`), wording (`_check_findings`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import nnx

from fsdp_jax import _check_listing, _transforms
from fsdp_jax._check_host import Tolerance
from fsdp_jax._check_report import CheckReport
from fsdp_jax._check_rules import Judge, told_of_knobs
from fsdp_jax._check_run import Lab, Run, run_sharded
from fsdp_jax._check_subject import WHO, subject_of
from fsdp_jax._join import Request
from fsdp_jax._linen_model import ShardedModule
from fsdp_jax._linen_program import Adapter


def check(
    model: Any,
    f: Callable,
    *args: Any,
    reduction: str | None = "mean",
    in_specs: Any = None,
    has_aux: bool = False,
    num_microbatches: int = 1,
    wrt: Any = nnx.Param,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    unsharded: Any = None,
    **kwargs: Any,
) -> CheckReport:
    """Run `f` sharded and unsharded, and explain every number that differs.

    Call it once before a long job, outside of jit, with a small model and batch. It
    runs `f` as `fsdp_jax.value_and_grad` would, and on an unsharded copy of the model
    with the whole batch on one device; compares loss, gradients, Variables and outputs;
    and finds out which documented rule is behind a difference: it takes the rules back
    one after the other, in runs of the unsharded copy on each device's rows.

    Every process must call it, with the arguments that `value_and_grad` would get; all
    get the same report. Model and arguments stay as they are. `f` runs several times.
    Each device holds the whole model meanwhile.

    Args:
        model: a sharded NNX module, or the model of `fsdp_jax.linen.fully_shard`; or a
            function without arguments that makes one.
        f: `f(model, *args)` as `value_and_grad` takes it; for Linen
            `f(variables, *args)` or `f(params, *args)`.
        *args: what `f` takes besides the model. For Linen the sharded variables or
            parameters come first.
        reduction: as in `value_and_grad`. None: `f` returns no loss, and runs as in
            `fsdp_jax.shard_map`.
        in_specs: as in `value_and_grad`.
        has_aux: as in `value_and_grad`.
        num_microbatches: as in `value_and_grad`.
        wrt: as in `value_and_grad`; NNX only.
        argnums: as in `value_and_grad`, the model being argument 0; NNX only.
        rtol: arrays are equal if no number differs by more than `atol`, and `rtol`
            times the largest number of the unsharded array. Give more for models that
            compute in bfloat16.
        atol: see `rtol`.
        unsharded: the NNX model before `fully_shard`, or a function that makes it, to
            be compared with in place of a copy.
        **kwargs: keyword arguments of `f`.

    Returns:
        The report: `print(report)`; `report.ok` is False where no documented rule
        explains a difference, or the sharded run fails.

    Raises:
        TypeError: an argument of the wrong type, or called while tracing.
        ValueError: no sharded model, an unknown reduction, or an unsharded loss that is
            not finite.
        And what `f` itself raises on the unsharded model.

    Source: README, "Before a long job".
    """
    _check_tolerances(rtol, atol)
    kinds = (nnx.Module, ShardedModule)
    model = model if isinstance(model, kinds) or not callable(model) else model()
    if not isinstance(model, kinds):
        raise TypeError(
            f"{WHO}: model must be a sharded NNX module, what fsdp_jax.linen."
            "fully_shard returned first, or a function without arguments that makes "
            f"one; got {type(model).__name__}."
        )
    if not callable(f):
        raise TypeError(f"{WHO}: f must be callable, got {type(f).__name__}.")
    linen: ShardedModule | None = model if isinstance(model, ShardedModule) else None
    if linen and (unsharded is not None or wrt is not nnx.Param or argnums != 0):
        raise TypeError(
            f"{WHO}: unsharded, wrt and argnums are for NNX models. Of a Linen model "
            "the parameters are differentiated, and the module itself is compared with."
        )
    if linen and not args:
        raise TypeError(f"{WHO}: pass the sharded variables after f.")
    if callable(unsharded) and not isinstance(unsharded, nnx.Module):
        unsharded = unsharded()
    tolerance = Tolerance(rtol, atol)

    def run(f: Callable, *args: Any, **kwargs: Any) -> CheckReport:
        request = _transforms.request_of(
            WHO,
            f,
            argnums,
            has_aux,
            wrt,
            "mean" if reduction is None else reduction,
            num_microbatches,
            in_specs,
        )
        if reduction is None:
            request = _without_loss(request)
        subject = subject_of(request, args, kwargs, unsharded, linen)
        return _report(Lab(subject), tolerance)

    if linen is None:
        return run(f, model, *args, **kwargs)
    first, *others = args
    joins, slices = has_aux or reduction is None, num_microbatches > 1
    adapter = Adapter(f, first, linen, WHO, joins, slices)
    call = functools.partial(run, adapter.function())
    return adapter.call(call, tuple(others), kwargs)


def _check_tolerances(rtol: Any, atol: Any) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{WHO}: {name} must be a number, got {value!r}.")
        if not value >= 0:
            raise ValueError(f"{WHO}: {name} must not be negative, got {value!r}.")


def _without_loss(request: Request) -> Request:
    if request.has_aux or request.num_microbatches != 1:
        raise ValueError(
            f"{WHO}: has_aux and num_microbatches belong to a loss, and with "
            "reduction=None there is none."
        )
    return dataclasses.replace(request, argnums=None, wrt=())


def _is_finite(x: np.ndarray) -> bool:
    return not np.issubdtype(x.dtype, np.inexact) or bool(np.isfinite(x).all())


def _check_finite(whole: Run) -> None:
    """Raise if the unsharded loss is no number: all others are as wrong."""
    loss = whole.get(("loss", ""))
    if loss is not None and not _is_finite(loss):
        raise ValueError(
            f"{WHO}: the loss of the unsharded model on the whole batch is {loss}, so "
            "there is nothing to compare with. Give a batch with rows, and numbers for "
            "which it is finite (jax.debug_nans(True) finds the first that is not)."
        )


def _report(lab: Lab, tolerance: Tolerance) -> CheckReport:
    """Run, compare, explain."""
    subject, judge = lab.subject, Judge(lab, tolerance)
    try:
        whole = judge.whole(judge.how)
    except Exception as error:
        error.add_note(f"{WHO}: f failed on the unsharded model, on the whole batch.")
        raise
    _check_finite(whole)
    treated = [*_check_listing.arguments(subject), *_check_listing.outside(subject)]
    count = subject.mesh.num_devices
    try:
        sharded = run_sharded(subject)
    except Exception as error:
        row = judge.of_error(error)
        return CheckReport((row,), {}, tuple(treated), (), count)
    replay = judge.run_replay()
    rows, notes = judge.judge(sharded, whole), told_of_knobs(subject) + judge.notes
    if replay is not None:
        treated += _check_listing.results(subject, replay)
        if not any(row.what in ("loss", "gradient") for row in rows):
            notes += judge.probe(whole)
    different = {(row.what, row.path) for row in rows}
    unknown = {k for k, x in whole.items() if not _is_finite(x)} - different
    if unknown:
        names = sorted(f"{what} {path}".strip() for what, path in unknown)
        notes.append(
            f"not finite, sharded and unsharded, so that nothing is told by it: "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )
    different |= unknown
    equal: dict[str, int] = {}
    for key in whole:
        equal[key[0]] = equal.get(key[0], 0) + (key not in different)
    return CheckReport(tuple(rows), equal, tuple(treated), tuple(notes), count)
