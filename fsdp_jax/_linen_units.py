"""A Linen submodule that is a group: what its parameters are, and calling it.

A group of a Linen model is an NNX module, `Unit`, that holds the group's parameters and
is sharded by `fully_shard` like any other; its call is a call of the Linen module on
the parameters that it has gathered. What must not live here: which submodules are
groups (`_linen_names`), and what is differentiated (`_linen_program`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from flax import nnx, struct
from flax.core import lift, meta
from flax.core.scope import DenyList
from flax.linen import module as linen_module
from flax.linen import transforms as linen_transforms

from fsdp_jax import _gather
from fsdp_jax._linen_names import Path, is_box, joined
from fsdp_jax._managed import METADATA, managed_class
from fsdp_jax._module import convert
from fsdp_jax._move import move
from fsdp_jax._policies import MixedPrecisionPolicy
from fsdp_jax._spec import ParamSpec
from fsdp_jax._state import FSDPState, comm_of, group_of


class Level(nnx.Module):
    """The parameters of a Linen module, and levels for its submodules, by name."""


class Unit(Level):
    """The parameters of a group."""

    def __call__(
        self, run: Callable, args: tuple, kwargs: dict, carried: Any
    ) -> tuple[Any, Any]:
        """Run something on the gathered parameters.

        Args:
            run: function of the gathered arrays and the other arguments.
            args: positional arguments, cast as the policy of the group says.
            kwargs: keyword arguments, likewise.
            carried: a tree of Variables, which are never cast.

        Returns:
            The output, and a tree of Variables.
        """
        return run(group_of(self).raw_values(), args, kwargs, carried)


def wrap(tree: Any) -> Any:
    """A tree with its leaves in Variables: nothing casts them."""
    return jax.tree.map(lambda x: nnx.Variable(x, hijax=False, ref=False), tree)


def unwrap(tree: Any) -> Any:
    """Undo `wrap`."""
    return jax.tree.map(
        lambda v: v.get_raw_value(),
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


@dataclasses.dataclass(frozen=True)
class Info:
    """What is static about one parameter of a group.

    Attributes:
        name: path of the parameter in the model.
        unit: path of the submodule whose group it is in.
        spec: how it rests.
        state: of the group.
    """

    name: Path
    unit: Path
    spec: ParamSpec
    state: FSDPState


def call_unit(
    pieces: Sequence[tuple[Any, Info]],
    state: FSDPState,
    run: Callable,
    args: tuple,
    kwargs: dict,
    carried: Any,
) -> tuple[Any, Any]:
    """Gather parameters of one group, run something on them, and free them.

    Args:
        pieces: what this program holds of each parameter, and what is known of it.
        state: of the group.
        run: as in `Unit.__call__`, as are the other arguments.
        args: positional arguments.
        kwargs: keyword arguments.
        carried: not cast.

    Returns:
        The output of `run`, and a tree of arrays.
    """
    unit = _unit(pieces, state)
    output, updates = unit(run, args, kwargs, wrap(carried))
    return output, unwrap(updates)


def _unit(pieces: Sequence[tuple[Any, Info]], state: FSDPState) -> Any:
    """The group of these parameters, in the trace that is going on."""
    unit = Unit()
    metadata = nnx.Param(0, hijax=False, ref=False).get_metadata()
    for i, (value, info) in enumerate(pieces):
        variable = managed_class(nnx.Param).from_metadata(
            value, {**metadata, METADATA: info.spec}
        )
        setattr(unit, f"param{i:06}", variable)  # NNX sorts names
    convert(unit, state)
    return unit


def read(pieces: Sequence[tuple[Any, Info]]) -> list[jax.Array]:
    """Gather parameters of one group for code outside of the group's module.

    In a per-device program; in their own dtype, and kept until backward. Nothing waits
    for that, and what nothing computes with, JAX leaves out when it lowers the program.
    """
    if not pieces:
        return []
    state = pieces[0][1].state
    policy = MixedPrecisionPolicy(reduce_dtype=state.mp_policy.reduce_dtype)
    unit = _unit(pieces, dataclasses.replace(state, mp_policy=policy))
    group = group_of(unit)
    group.check_shards()
    comm = comm_of(unit, group)
    shards = _gather.refuse_inner(group.values(), comm)
    sinks, full = group.local("sink"), group.local("full")
    return _gather.gather_kept(shards, comm, sinks=sinks, full=full)


class Reads(threading.local):
    """The parameters that a function of them was given gathered, in this thread.

    An `apply` that gets one of them takes its shard instead, and gathers when it is
    time. They are known by identity, so this holds them.
    """

    def __init__(self) -> None:
        self._known: list[dict[int, tuple[Any, tuple[Any, Info]]]] = []

    @contextmanager
    def of(self, arrays: Sequence[Any], pieces: Sequence[Any]) -> Iterator[None]:
        """Know these arrays within the block."""
        pairs = zip(arrays, pieces, strict=True)
        self._known.append({id(x): (x, piece) for x, piece in pairs})
        try:
            yield
        finally:
            self._known.pop()

    def piece(self, x: Any) -> tuple[Any, Info] | None:
        """The shard of a gathered parameter; None for any other array."""
        known = self._known[-1].get(id(x)) if self._known else None
        return known[1] if known is not None and known[0] is x else None


READS = Reads()


class Box(struct.PyTreeNode, meta.AxisMetadata):
    """A parameter of another group than the one that is running, in Linen's variables.

    It goes through the lifted transforms of Linen, which tell it of the dims that they
    take away, and is gathered where a module reads it.

    Attributes:
        value: what this program holds of it.
        info: what is known of it.
    """

    value: Any
    info: Info = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        spec, value = self.info.spec, self.value
        if spec.mesh.per_device():
            return read([(value, self.info)])[0]
        value = spec.unpadded(value)
        if spec.memory_kind is None:
            return value
        return move(value, spec.whole(value.ndim))

    def __jax_array__(self) -> Any:
        return self.unbox()  # module.variables["params"]["kernel"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.unbox(), name)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        raise NotImplementedError("a parameter of a group never gains a dim")

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        spec = self.info.spec
        if spec.dim is None:
            return self
        ndim = self.value.ndim
        taken = index % ndim - ndim
        if taken == spec.dim and spec.cut:
            raise ValueError(
                f"parameter {joined(self.info.name)!r} is cut on dim {index}, along "
                "the layers of a stack that nn.scan or nn.vmap runs over, so no "
                "device has a whole layer. Cut another dim: fully_shard(..., "
                "shard_placement_fn=lambda p: Shard(1))."
            )
        if taken < spec.dim:
            return self
        # Dims count from the end, and one behind the cut goes away.
        spec = dataclasses.replace(
            spec,
            dim=spec.dim + 1,
            others=tuple((d + 1 if d < taken else d, axes) for d, axes in spec.others),
        )
        return self.replace(info=dataclasses.replace(self.info, spec=spec))


def _operator(name: str) -> Callable:
    def apply(self: Box, *args: Any) -> Any:
        return getattr(self.unbox(), name)(*args)

    return apply


for _name in "add sub mul truediv matmul pow".split():
    for _side in ("", "r"):
        setattr(Box, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))
for _name in ("__neg__", "__getitem__", "__len__"):
    setattr(Box, _name, _operator(_name))


def intercept(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """Gather where a method of a submodule that is a group is called.

    A method under a class transform (nn.scan, nn.remat) is seen inside of it only: in a
    scan with the parameters of one layer.
    """
    module, method = context.module, context.orig_method.func
    if context.method_name == "setup" or module.scope is None or _is_lifted(method):
        return next_fun(*args, **kwargs)
    if isinstance(module, (nn.WeightNorm, nn.SpectralNorm)):
        _check_layer(module.layer_instance)
    path = module.scope.path
    params = module.scope.variables().get("params", {})
    if not any(_is_of(x, path) for x in jax.tree.leaves(params, is_leaf=is_box)):
        return next_fun(*args, **kwargs)
    if any(part.startswith("map_variables(") for part in module.scope.debug_path):
        _refuse_mapped(path)
    return _call_lifted(module, method, path, args, kwargs)


def _check_layer(layer: nn.Module) -> None:
    """Raise if a layer whose parameters are changed before it runs is not gathered."""
    params = layer.scope.variables().get("params", {}) if layer.scope else {}
    for x in jax.tree.leaves(params, is_leaf=is_box):
        if isinstance(x, Box):
            _refuse_mapped(x.info.unit)


def _refuse_mapped(path: Path) -> None:
    raise ValueError(
        f"module {joined(path)!r} is a group of its own, but something outside of it "
        "changes its parameters before it runs (nn.map_variables, nn.WeightNorm, "
        "nn.SpectralNorm), where each device has a piece of them only. Name a module "
        "that contains both in `modules`, or leave it to the root."
    )


def _is_lifted(method: Any) -> bool:
    """Whether a method is Linen's own, which runs others under a transform.

    `nn.custom_vjp` calls such; the gradients that it has to return are of parameters
    as they rest.
    """
    code = getattr(method, "__globals__", {})
    return code.get("__name__") == linen_transforms.__name__


def _is_of(x: Any, unit: Path) -> bool:
    return isinstance(x, Box) and x.info.unit == unit


def _call_lifted(
    module: nn.Module, method: Callable, path: Path, args: tuple, kwargs: dict
) -> Any:
    """Call a method as a lifted transform of Linen: as a function of its variables.

    As in `flax.linen.transforms`, but without calling interceptors once more, and
    without noting intermediates twice.
    """
    exported = module._state.export()
    scopes, args, kwargs = linen_transforms.get_module_scopes(module, args, kwargs)
    before = [_copied(scope.rng_counters) for scope in scopes]

    def on_scopes(inner: Any, args: tuple, kwargs: dict) -> Any:
        clone, args, kwargs = linen_transforms.set_module_scopes(
            module, args, kwargs, inner
        )
        object.__setattr__(clone, "_state", exported.export())
        clone._try_setup()
        stack = linen_module._context.module_stack
        stack.append(clone)
        try:
            output = method(clone, *args, **kwargs)
        finally:
            stack.pop()
        module._state.reimport(clone._state)
        return output

    def lifted(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
        params, others = variables
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_box)
        own = {i: x for i, x in enumerate(leaves) if _is_of(x, path)}
        pieces = [(x.value, x.info) for x in own.values()]

        def run(full, args, kwargs, carried):
            for scope, counters in zip(scopes, before, strict=True):
                _restore(scope.rng_counters, counters)
            rest, others, rngs = unwrap(carried)
            sources = iter(full), iter(rest)
            params = [next(sources[i not in own]) for i in range(len(leaves))]
            groups = jax.tree.unflatten(treedef, params), others
            inner = scope_fn(groups, rngs)
            output = on_scopes(inner, args, kwargs)
            return output, wrap(repack_fn(inner))

        rest = [x for i, x in enumerate(leaves) if i not in own]
        state = pieces[0][1].state
        return call_unit(pieces, state, run, args, kwargs, (rest, others, rngs))

    run_lifted = lift.pack(
        lifted, ("params", True), (DenyList("params"),), (True,), enable_kwargs=True
    )
    return run_lifted(scopes, *args, **kwargs)


def _copied(counters: dict[Any, Any]) -> dict[Any, Any]:
    """How often each random stream was asked, in a scope and below."""
    return {k: _copied(v) if isinstance(v, dict) else v for k, v in counters.items()}


def _restore(counters: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Set counters back, in place: a body is traced more than once, but runs once."""
    for key in [k for k in counters if k not in before]:
        del counters[key]
    for key, value in before.items():
        if isinstance(value, dict):
            _restore(counters[key], value)
        else:
            counters[key] = value
