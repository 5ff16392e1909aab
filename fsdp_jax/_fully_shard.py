"""The entry: validate everything, then change anything.

What lives here: `fully_shard`, what its arguments may be, and which parameter goes
where. What must not: what happens when the module is called.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from fsdp_jax import _functional, _layout
from fsdp_jax._managed import spec_of
from fsdp_jax._mesh import MeshInfo, resolve_mesh
from fsdp_jax._module import (
    FSDPModule,
    check_convertible,
    check_own_names,
    convert,
    revert,
)
from fsdp_jax._param import manage, release, replicate
from fsdp_jax._placement import PlacementFn, check_placement, rest_of
from fsdp_jax._policies import (
    PINNED_HOST,
    UNPINNED_HOST,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fsdp_jax._precision import warn_of_layer_dtypes
from fsdp_jax._spec import ParamSpec, Path, dotted
from fsdp_jax._stacks import layer_dims
from fsdp_jax._state import FSDPState, check_variables, is_sharded

M = TypeVar("M")


def fully_shard(
    module: M,
    *,
    mesh: jax.sharding.Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Any = None,
    dp_mesh_dims: Any = None,
    uneven: Literal["auto", "pad", "error"] = "auto",
) -> M:
    """Shard a module's parameters over a mesh, in place, as one communication group.

    The group is every parameter (`nnx.Param` and subclasses) below `module` that no
    earlier call on a submodule took: call it on the layers first, on the root last.
    Each rests as its shard along dim 0, or the first one that does not count layers;
    `uneven` says what happens if that dim does not divide by the number of devices.
    Scalars stay whole. `describe(module)` reports all that. The parameters are gathered
    when the module is called and freed after. All other Variables are placed whole on
    every device of the mesh.

    Args:
        module: an NNX module, or a list or tuple of modules that become one group each.
        mesh: with one axis, over which parameters are cut; with two, the first one
            copies the shards and the second one cuts. None: the one set by
            `jax.set_mesh`, else an axis `fsdp` over all devices.
        reshard_after_forward: True: free after forward and gather again in backward.
            False: keep until backward. An int k >= 1: keep for k forwards. None: True,
            but False for whichever sharded module is outermost in a call.
        shard_placement_fn: given a parameter's Variable, returns `Shard(dim)` to cut
            another dim, or None for the default; such as `largest_dim`.
        mp_policy: dtypes of gathered parameters, reductions, inputs and outputs.
        offload_policy: `CPUOffloadPolicy()` lets shards rest in host memory.
        ignored_params: parameters to leave whole: a list or tuple of Variables, or an
            NNX filter. Their gradients are averaged over devices.
        dp_mesh_dims: which axes of `mesh` cut and which copy, by name. With axes left
            over, such as a tensor parallel one, every parameter must be on the mesh
            already, cut over none but those; it is then cut within its pieces.
        uneven: for dims that do not divide. `"auto"`: cut the largest dim that does; if
            none does the parameter stays whole. `"pad"`: cut that dim all the same, at
            rest with rows of zeros at its end, which a Variable does not show.
            `"error"`: raise.

    Returns:
        The object that was given.

    Raises:
        RuntimeError: a module was sharded before, is listed twice, or lies in a module
            that was.
        ValueError: a container without a call, a parameter without an array, a
            parameter tied across two groups, a bad integer, mesh, placement or
            `uneven`; a dim that does not divide, with `uneven="error"`.
        TypeError: an argument of the wrong type; a module whose class also derives from
            a built-in one, such as `dict`; Variables made with `hijax` or `ref`.
        NotImplementedError: an argument that is not supported yet; `Shard(d)` with
            d > 0 on a dim that does not divide, unless padded; padding a dim that other
            axes cut too.
        In every case nothing has been changed.

    Warns:
        UserWarning: layers were made with a `dtype` other than the policy's
            `param_dtype`, in which they then compute.

    Source: specification, "The user contract" and "Communication grouping"; PyTorch
    `fully_shard`. A list makes one group each, and an int counts forwards, as in the
    specification.
    """
    modules = _check_modules(module)
    for m in modules:
        check_variables(m, "fully_shard")
    _check_reshard(reshard_after_forward, dp_mesh_dims)
    _check_policies(mp_policy, offload_policy)
    check_placement("fully_shard", shard_placement_fn, uneven)
    ignored = _ignored_predicate(ignored_params)
    info = resolve_mesh(mesh, dp_mesh_dims)
    _check_memory(offload_policy, info)
    state = FSDPState(
        mesh=info,
        reshard_after_forward=_plain(reshard_after_forward),
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        threshold_bytes=_layout.PACKING_THRESHOLD_BYTES,
    )
    place = functools.partial(
        rest_of,
        info=info,
        placement_fn=shard_placement_fn,
        memory_kind=offload_policy.memory_kind,
        uneven=uneven,
    )
    plans = _plan(modules, ignored, place)
    for m in modules:
        check_convertible(m)
    managed = [variable for plan in plans for variable, _ in plan.managed]
    warn_of_layer_dtypes(modules, managed, mp_policy, stacklevel=2)
    _apply(plans, state)
    return module


@dataclasses.dataclass
class _Plan:
    """What one module's call will do: its parameters, and what else is placed."""

    module: Any
    managed: list[tuple[nnx.Variable, ParamSpec]]
    replicated: list[nnx.Variable]
    ignored: list[Path]


def _check_modules(module: Any) -> list[Any]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty.")
    seen: set[int] = set()
    for i, m in enumerate(modules):
        what = (
            f"module {i} of the list" if isinstance(module, (list, tuple)) else "module"
        )
        if not isinstance(m, nnx.Module):
            raise TypeError(
                f"fully_shard: {what} must be an nnx.Module, got {type(m).__name__}."
            )
        if isinstance(m, FSDPModule):
            raise RuntimeError(
                f"fully_shard has already been applied to {what}, a "
                f"{type(m).__name__}. Apply it once per module."
            )
        if id(m) in seen:
            raise RuntimeError(
                f"fully_shard has already been applied to {what}: the list names it "
                "twice. Name each module once."
            )
        seen.add(id(m))
        if isinstance(m, (nnx.List, nnx.Dict)) and not callable(m):
            raise ValueError(
                f"fully_shard: {what} is an nnx.{type(m).__name__}, a container that "
                "is never called, so there is no moment at which to gather. Shard "
                "each item: for m in container: fully_shard(m)."
            )
        check_own_names(m, what)
    return modules


def _plain(value: Any) -> bool | int | None:
    return value if value is None or isinstance(value, bool) else int(value)


def _check_reshard(value: Any, dp_mesh_dims: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            "fully_shard: reshard_after_forward must be None, a bool, or a number of "
            f"forwards >= 1 to stay unsharded for, got {value!r}."
        )
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "fully_shard: an integer reshard_after_forward together with dp_mesh_dims "
            "is not supported. Use a bool or None."
        )


def _check_policies(mp_policy: Any, offload_policy: Any) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            "fully_shard: mp_policy must be a MixedPrecisionPolicy, got "
            f"{type(mp_policy).__name__}."
        )
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            "fully_shard: offload_policy must be an OffloadPolicy, got "
            f"{type(offload_policy).__name__}."
        )


def _check_memory(policy: OffloadPolicy, info: MeshInfo) -> None:
    """Raise unless the devices can compute from the memory that a policy names.

    Raises:
        ValueError: they cannot.
    """
    kind, found = policy.memory_kind, info.memory_kinds
    if kind is None:
        return
    usable = [k for k in (PINNED_HOST, UNPINNED_HOST) if k in found]
    if info.platform != "cpu":
        # XLA:TPU refuses programs that read it (jax 0.10.2, libtpu 0.0.42).
        usable = [k for k in usable if k != UNPINNED_HOST]
    if kind not in usable:
        pins = [f"CPUOffloadPolicy(pin_memory={k == PINNED_HOST})" for k in usable]
        raise ValueError(
            f"fully_shard: {policy!r} needs memory of kind {kind!r}, from which "
            f"programs on {info.platform} devices cannot compute here (they have "
            f"{found}). Use one of {[*pins, 'OffloadPolicy()']}."
        )


def _ignored_predicate(ignored: Any) -> Callable[[tuple, Any], bool]:
    if ignored is None:
        return lambda path, v: False
    if isinstance(ignored, nnx.Variable):
        ignored = [ignored]
    if isinstance(ignored, (list, tuple)):
        bad = [v for v in ignored if not isinstance(v, nnx.Variable)]
        if not bad:
            ids = {id(v) for v in ignored}
            return lambda path, v: id(v) in ids
        never = (str, jax.Array, np.ndarray, nnx.Module)
        if isinstance(bad[0], never) or len(bad) < len(ignored):
            raise TypeError(
                "fully_shard: ignored_params lists a "
                f"{type(bad[0]).__name__}. List the Variables themselves, such as "
                "[model.head.kernel], or give an nnx filter, such as "
                "nnx.PathContains('head')."
            )
    elif isinstance(ignored, (str, dict, set, frozenset, nnx.Module)):
        raise TypeError(
            f"fully_shard: ignored_params is a {type(ignored).__name__}. Give a list "
            "of Variables, or an nnx filter such as nnx.LoRAParam or "
            "nnx.PathContains('head')."
        )
    try:
        return nnx.filterlib.to_predicate(ignored)
    except (TypeError, ValueError):
        raise TypeError(
            f"fully_shard: ignored_params={ignored!r} is neither a list of Variables "
            "nor an nnx filter."
        ) from None


def _plan(modules, ignored, place) -> list[_Plan]:
    """Decide everything, inner modules first, without changing anything."""
    below = {id(m): {id(x) for _, x in _functional.walk(m)} for m in modules}
    order = sorted(modules, key=lambda m: len(below[id(m)]))
    plans: list[_Plan] = []
    taken: dict[int, str] = {}
    for module in order:
        inner = {
            id(m) for m in modules if m is not module and id(m) in below[id(module)]
        }
        plans.append(_plan_one(module, inner, ignored, place, taken))
    return plans


def _plan_one(module, inner, ignored, place, taken) -> _Plan:
    managed, replicated, left = [], [], []
    layers = layer_dims(module)
    own = list(_own(module, inner))
    _check_not_taken(module, own, taken)
    for path, variable in own:
        if not isinstance(variable, nnx.Param) or ignored(path, variable):
            replicated.append(variable)
            if isinstance(variable, nnx.Param):
                left.append(path)
            continue
        name = dotted(path)
        taken[id(variable)] = name
        count = layers.get(id(variable), 0)
        managed.append((variable, place(name, variable, layers=count)))
    return _Plan(module, managed, replicated, left)


def _own(module, inner: set[int]):
    """Variables below a module, less those below sharded modules and those to be."""

    def stop(node):
        return is_sharded(node) or id(node) in inner

    for path, value in _functional.walk(module, stop=stop):
        if isinstance(value, nnx.Variable):
            yield path, value


def _check_not_taken(module, own, taken: dict[int, str]) -> None:
    """Refuse parameters that another group has: tied ones, and calls top-down."""
    pairs = []
    for path, variable in own:
        spec = spec_of(variable)
        other = spec.path if spec else taken.get(id(variable))
        if other is not None:
            pairs.append((dotted(path), other))
    if not pairs:
        return
    here, there = pairs[0]
    cls = type(module).__name__
    prefixes = {t[: -len(h)] for h, t in pairs if t.endswith("." + h)}
    if len(prefixes) == 1 and all(t.endswith("." + h) for h, t in pairs):
        raise RuntimeError(
            f"fully_shard: parameter {here!r} of this {cls} is {there!r} in the group "
            "of an enclosing module that was sharded before. Call fully_shard "
            "bottom-up: on the inner modules first, on the root last."
        )
    inner = {
        id(v): f"{dotted(p)}.{spec.path}"
        for p, m in _functional.walk(module, stop=is_sharded)
        if isinstance(m, FSDPModule)
        for _, v in _functional.walk(m)
        if (spec := spec_of(v)) is not None
    }
    paths = {id(v): dotted(p) for p, v in own}
    for key, path in paths.items():
        if key in inner:
            here, there = path, inner[key]
    raise ValueError(
        f"fully_shard: parameter {here!r} of this {cls} is tied to {there!r}, which is "
        "in the group of an earlier call. A parameter travels in one group: shard "
        "only a module that contains both, or untie them."
    )


def _apply(plans: list[_Plan], state: FSDPState) -> None:
    """Carry the plans out; on any failure bring everything back."""
    with ExitStack() as on_error:
        for plan in plans:
            for variable, spec in plan.managed:
                on_error.callback(undo(variable))
                manage(variable, spec)
            for variable in plan.replicated:
                on_error.callback(undo(variable))
                replicate(variable, state.mesh)
            on_error.callback(revert, plan.module)
            ignored = tuple(plan.ignored)
            convert(plan.module, dataclasses.replace(state, ignored=ignored))
        on_error.pop_all()


def undo(variable: nnx.Variable) -> Callable[[], None]:
    """How to give a Variable back what it has now, without keeping it alive.

    In several processes it is kept: shards cannot be put on one device again there.
    """
    value, metadata = variable.get_raw_value(), dict(variable._var_metadata)
    concrete = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    if concrete and jax.process_count() == 1:
        sharding = value.sharding
        return lambda: release(variable, None, sharding, metadata)
    return lambda: release(variable, value, None, metadata)
