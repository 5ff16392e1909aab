"""What a sharded module knows about itself, and finding modules and their groups.

What lives here: the static state under its one attribute, and the walks that collect a
group. What must not: changing a module's class, and what happens when it is called.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from flax import nnx

from fsdp_jax import _cotangents, _functional, _layout
from fsdp_jax._comm import Defer, GroupComm
from fsdp_jax._managed import ManagedVariable, spec_of
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._ordering import Ordering, ordering_for
from fsdp_jax._param import is_abstract, replicate
from fsdp_jax._param_group import ParamGroup
from fsdp_jax._policies import MixedPrecisionPolicy, OffloadPolicy
from fsdp_jax._spec import ParamSpec, Path, dotted

SUFFIX = "FSDPModule"  # of the names of generated classes
STATE = "_pytree__fsdp"  # nnx.bridge.ToNNX skips names that start so


@dataclasses.dataclass(frozen=True)
class FSDPState:
    """All that a sharded module knows about itself. Static, so part of its graphdef.

    Attributes:
        mesh: mesh and sharding axes.
        reshard_after_forward: as given to `fully_shard`, or to the setter.
        mp_policy: dtypes.
        offload_policy: where shards rest.
        threshold_bytes: full parameters under this size share a buffer.
        forward_methods: names registered with `register_fsdp_forward_method`.
        forwards_left: forwards until an integer `reshard_after_forward` frees.
        window: whether a call of the module is running, with gathered parameters.
        inside: whether a call of an enclosing sharded module is running.
        requires_gradient_sync: whether backward reduces gradients at all.
        requires_all_reduce: whether it reduces them over replicas.
        gradient_divide_factor: what summed gradients are divided by; None: the number
            of data devices where the loss is a mean.
        reshard_after_backward: whether parameters are freed between micro-batches.
        averages: whether the loss of the running program is a mean over devices.
        defer: the reductions that the running program leaves out; None: it is none of
            this library's.
        path: of the module in the model that is running; "" for the model itself.
        ordering: what the group's collectives wait for; None: as is best measured.
        key: how other modules name this one in prefetch lists; None if none does.
        forward_prefetch: keys of the modules gathered with this one in forward.
        backward_prefetch: the same in backward.
        comm_context: which modules its collectives wait for, with all that have the
            same; None: all others of the program that have none.
        ignored: paths of the parameters that `fully_shard` was told to leave whole.
    """

    mesh: MeshInfo
    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    threshold_bytes: int
    forward_methods: tuple[str, ...] = ()
    forwards_left: int = 0
    window: bool = False
    inside: bool = False
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    gradient_divide_factor: float | None = None
    reshard_after_backward: bool = True
    averages: bool = True
    defer: Defer | None = None
    path: str = ""
    ordering: Ordering | None = None
    key: str | None = None
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()
    comm_context: str | None = None
    ignored: tuple[Path, ...] = ()

    @property
    def num_forwards(self) -> int:
        """Forwards that gathered parameters stay for: 0 without end, 1 free at once."""
        asked = self.reshard_after_forward
        return 1 if asked is None else (int(asked) if asked is not False else 0)


def is_sharded(node: Any) -> bool:
    """Whether `fully_shard` was applied to this very node."""
    return isinstance(node, nnx.Module) and STATE in vars(node)


def state_of(module: Any) -> FSDPState:
    """The state of a sharded module."""
    return vars(module)[STATE]


def set_state(module: Any, **changes: Any) -> None:
    """Replace fields of a module's state."""
    state = dataclasses.replace(state_of(module), **changes)
    object.__setattr__(module, STATE, state)


def group_of(module: Any) -> ParamGroup:
    """A module's group: managed parameters below it, less those of inner groups.

    Raises:
        ValueError: one was put there that another model has on another mesh.
    """
    mesh, variables = state_of(module).mesh, list[nnx.Variable]()
    for path, found in _functional.walk(module, stop=is_sharded):
        spec = spec_of(found)
        if spec is not None and spec.mesh.mesh != mesh.mesh:
            raise ValueError(
                f"parameter {dotted(path)!r} of a {class_name(module)} is that of a "
                f"model on another mesh ({spec.mesh.mesh}, the module is on "
                f"{mesh.mesh}). Put its value into the module's own: "
                "own.set_value(other.get_value()), or nnx.update."
            )
        if isinstance(found, ManagedVariable):
            variables.append(found)
    return ParamGroup(variables, mesh)


def class_name(module: Any) -> str:
    """Name of the class that a sharded module had before."""
    return type(module).__name__.removesuffix(SUFFIX)


def check_concrete(module: Any, asked: str) -> None:
    """Raise if a Variable below a module has no value yet, only a shape."""
    names = [
        dotted(path)
        for path, v in _functional.walk(module)
        if isinstance(v, nnx.Variable)
        and is_abstract(v)
        and not isinstance(v, nnx.RngState)  # evaluation does without
    ]
    if names:
        raise RuntimeError(
            f"{asked}: {names} are abstract (ShapeDtypeStruct). Give them values "
            "first, with nnx.update(model, state) or load_state_dict."
        )


def check_variables(root: Any, asked: str) -> None:
    """Raise if a Variable at or below `root` is of a kind that NNX is trying out.

    Raises:
        TypeError: it was made with `hijax=True` or `ref=True`.
    """
    for path, v in _functional.walk(root):
        if not isinstance(v, nnx.Variable):
            continue
        plain = nnx.Variable in type(v).__mro__  # to isinstance every kind is one
        kinds = [k for k in ("hijax", "ref") if plain and v._var_metadata.get(k)]
        if kinds or not plain:
            raise TypeError(
                f"{asked}: the Variable {dotted(path) or 'itself'!r} was made with "
                f"{(kinds or ['hijax'])[0]}=True, a kind whose value others can change "
                "in place, which cannot be sharded. Make it under "
                "nnx.var_defaults(hijax=False, ref=False)."
            )


def sharded_modules(root: Any) -> list[Any]:
    """The sharded modules at and below `root`, outer ones first."""
    return [m for _, m in named_sharded_modules(root)]


def named_sharded_modules(root: Any) -> list[tuple[str, Any]]:
    """The sharded modules at and below `root` with their dotted paths from it."""
    return [(dotted(path), m) for path, m in _functional.walk(root) if is_sharded(m)]


def deferred(state: FSDPState) -> Defer:
    """The reductions that a group's gradients are to be left without."""
    if not state.requires_gradient_sync:
        return "all"
    here = state.requires_all_reduce or not state.mesh.replicate_axes
    return "" if here else "all_reduce"


def warn_of_knobs_without_effect(state: FSDPState) -> None:
    """Warn that gradients are being taken where some knobs mean nothing."""
    default = {field.name: field.default for field in dataclasses.fields(FSDPState)}
    setters = {
        "requires_gradient_sync": "set_requires_gradient_sync",
        "requires_all_reduce": "set_requires_all_reduce",
        "gradient_divide_factor": "set_gradient_divide_factor",
        "ordering": "set_ordering",
        "forward_prefetch": "set_modules_to_forward_prefetch",
        "backward_prefetch": "set_modules_to_backward_prefetch",
    }
    idle = [s for name, s in setters.items() if getattr(state, name) != default[name]]
    if state.mp_policy.reduce_dtype is not None:
        idle.append("MixedPrecisionPolicy(reduce_dtype=)")
    if idle:
        warnings.warn(
            f"gradients of a sharded module are taken on global arrays (plain nnx.grad "
            f"or jax.grad), where XLA reduces them and {', '.join(idle)} has no "
            "effect. Use fsdp_jax.value_and_grad.",
            UserWarning,
            stacklevel=2,
        )


def new_params(module: Any) -> list[tuple[Path, Any]]:
    """The parameters that were put below a sharded module after it was sharded.

    Less those of inner sharded modules, with their paths.
    """
    ignored = state_of(module).ignored
    return [
        (path, v)
        for path, v in _functional.walk(module, stop=is_sharded)
        if isinstance(v, nnx.Param)
        and not isinstance(v, ManagedVariable)
        and path not in ignored
        and hasattr(v.get_raw_value(), "shape")
    ]


def warn_of_new_params(root: Any, stacklevel: int) -> None:
    """Warn of parameters that no group has, though they could be cut."""
    names = [
        dotted((*at, *path))
        for at, module in _functional.walk(root)
        if is_sharded(module)
        for path, v in new_params(module)
        if _could_be_cut(v.shape, state_of(module).mesh)
    ]
    if names:
        warnings.warn(
            f"parameters {names} were put into the model after fully_shard, and are "
            "whole on every device, with their gradients and optimizer state. Cut them "
            "with fsdp_jax.shard_new_params(model), before the optimizer is made.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def _could_be_cut(shape: tuple[int, ...], mesh: MeshInfo) -> bool:
    n = mesh.num_shards
    return n > 1 and bool(shape) and _layout.choose_dim(shape, n)[0] is not None


def comm_for(
    state: FSDPState,
    specs: Sequence[ParamSpec],
    averages: bool,
    defer: Defer,
    name: str,
) -> GroupComm:
    """How parameters travel as the group of a module in this state."""
    mesh, factor = state.mesh, state.gradient_divide_factor
    means = (float(mesh.num_shards), float(mesh.num_replicas))
    divisors = means if averages else (1.0, 1.0)
    return GroupComm(
        mesh=mesh,
        dims=tuple(spec.dim if spec.cut else None for spec in specs),
        others=tuple(spec.others for spec in specs),
        paddings=tuple(spec.padding for spec in specs),
        param_dtype=state.mp_policy.param_dtype,
        reduce_dtype=state.mp_policy.reduce_dtype,
        divisors=divisors if factor is None else (factor, 1.0),
        threshold_bytes=state.threshold_bytes,
        name=name,
        defer=defer,
        offloaded=any(spec.memory_kind is not None for spec in specs),
    )


def comm_of(module: Any, group: ParamGroup) -> GroupComm:
    """How the group of a module travels in the per-device program that is running."""
    state, specs = state_of(module), group.specs
    defer = state.defer
    user_program = defer is None and not _cotangents.in_f()
    nested = False
    if user_program and state.mesh.per_device():
        nested = _cotangents.enter_user_program()
    if defer is None:
        blocked = next((spec for spec in specs if spec.blocks > 1), None)
        if blocked is not None and state.mesh.per_device():
            raise RuntimeError(
                f"parameter {blocked.path!r} is cut on one dim over "
                f"{state.mesh.shard_axes} and other axes, and only fsdp_jax.shard_map, "
                "value_and_grad and grad bring its rows into the right order. Use them "
                "instead of jax.shard_map."
            )
        defer = "refuse" if deferred(state) else ""
    elif defer != "refuse" and all(sink is None for sink in group.local("sink")):
        defer = ""
    comm = comm_for(state, specs, state.averages, defer, state.path)
    return dataclasses.replace(comm, user_program=user_program, nested=nested)


def ordering_of(state: FSDPState) -> Ordering:
    """What the collectives of a group wait for."""
    return state.ordering or ordering_for(state.mesh.platform)


def place_replicated(module: Any) -> None:
    """Put everything below a module that no group manages whole on its mesh."""
    mesh = state_of(module).mesh
    for _, variable in _functional.walk(module):
        if isinstance(variable, nnx.Variable) and spec_of(variable) is None:
            replicate(variable, mesh)
