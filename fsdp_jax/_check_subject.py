"""What `check` looks at: a call, its unsharded twin, and what can be done otherwise.

What must not live here: running anything (`_check_run`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

from fsdp_jax import _arguments, _batch, _collectives, _functional
from fsdp_jax._check_host import Held, to_host
from fsdp_jax._join import Request, Slot, owners, slots_of
from fsdp_jax._linen_model import ShardedModule, standing_in
from fsdp_jax._managed import METADATA, WRITTEN, ManagedVariable
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._module import revert
from fsdp_jax._param import release
from fsdp_jax._policies import MixedPrecisionPolicy
from fsdp_jax._rows import batch_rows
from fsdp_jax._spec import dotted
from fsdp_jax._stages import Entry
from fsdp_jax._state import (
    check_concrete,
    check_variables,
    is_sharded,
    set_state,
    sharded_modules,
    state_of,
)
from fsdp_jax._state_dict import at_rest
from fsdp_jax._wrt import select

WHO = "check"
_HELD = "other variables."  # what the module that holds Linen parameters calls the rest


@dataclasses.dataclass(frozen=True)
class Variation:
    """What a run of the twin does otherwise than the library.

    Attributes:
        dropout: whether masks are drawn.
        specs: how each array of the arguments is cut; None: as the library cuts it.
        batch_norm: whether BatchNorm takes the statistics of all devices.
        num_slices: micro-batches; None: as many as were asked for.
    """

    dropout: bool = True
    specs: tuple[PartitionSpec, ...] | None = None
    batch_norm: bool = False
    num_slices: int | None = None


@dataclasses.dataclass
class Subject:
    """A call of the user's function, and the same of an unsharded twin.

    Attributes:
        request: what the user asked for.
        mesh: mesh and the roles of its axes.
        linen: the Linen model that the function calls; None for NNX.
        num_args: number of positional arguments.
        taken: `(args, kwargs)` without nodes and arrays.
        nodes: the user's own nodes.
        given: the user's own arrays.
        labels: name of each array.
        node_names: name of each node; empty for the model.
        specs: how the library cuts each array of the arguments; None: it refuses.
        graphdef: structure of the twin's nodes.
        static: their state without arrays.
        state: arrays of the twin.
        arrays: those of the arguments.
        slots: one per array of the state.
        positions: of what is differentiated, among state and arguments.
        entries: names and specs of the same.
        sums: arrays of the state that devices add to.
    """

    request: Request
    mesh: MeshInfo
    linen: ShardedModule | None
    num_args: int
    taken: _functional.Taken
    nodes: tuple[Any, ...]
    given: list[Any]
    labels: list[str]
    node_names: list[str]
    specs: list[PartitionSpec] | None
    graphdef: Any
    static: _functional.Taken
    state: list[Held]
    arrays: list[Held]
    slots: tuple[Slot, ...]
    positions: list[int]
    entries: list[Entry]
    sums: frozenset[int]

    @property
    def plain_arguments(self) -> bool:
        """Whether every argument besides the model is one array, by position."""
        args, kwargs = self.taken.slots_tree()
        return not kwargs and all(x == "array" for x in args[1:])

    @property
    def held(self) -> list[Held]:
        """Arrays of the state, then of the arguments."""
        return [*self.state, *self.arrays]

    @property
    def state_specs(self) -> list[PartitionSpec]:
        """How a device has the state: only caches are cut."""
        whole = PartitionSpec()
        return [s.spec if s.rows is not None else whole for s in self.slots]

    @property
    def places(self) -> dict[tuple[Any, ...], list[int]]:
        """By the path of a Variable its arrays among those of the state."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for i, slot in enumerate(self.slots):
            found.setdefault(slot.path, []).append(i)
        return found

    def specs_under(self, how: Variation) -> list[PartitionSpec]:
        """How the arguments are cut in a run."""
        if how.specs is not None:
            return list(how.specs)
        return self.specs or [PartitionSpec()] * len(self.arrays)

    def state_name(self, node: int, path: tuple[Any, ...]) -> str:
        """What a Variable of the state is called."""
        name = dotted(path).removeprefix(_HELD)
        return ".".join(part for part in (self.node_names[node], name) if part)

    @property
    def modules(self) -> list[Any]:
        """The sharded modules."""
        return [m for node in self.nodes for m in sharded_modules(node)]

    def has_policies(self) -> bool:
        """Whether a module computes in another precision than the twin."""
        default = MixedPrecisionPolicy()
        return any(state_of(m).mp_policy != default for m in self.modules)

    @contextlib.contextmanager
    def sharded_apply(self, policies: bool) -> Iterator[None]:
        """Let Linen models run sharded, with or without their policies."""
        if self.linen is None or policies:
            yield
            return

        def drop(groups: Any) -> None:
            for module in sharded_modules(groups):
                set_state(module, mp_policy=MixedPrecisionPolicy())

        with standing_in(lambda model: model.with_groups(drop).apply):
            yield

    @contextlib.contextmanager
    def plain_apply(self, how: Variation, mesh: MeshInfo) -> Iterator[None]:
        """Let Linen models run unsharded, with keys as their per-device rule has it."""
        if self.linen is None:
            yield
            return

        def plain(model: ShardedModule) -> Callable:
            def apply(variables: Any, *args: Any, rngs: Any = None, **kwargs: Any):
                if rngs is not None and mesh.num_devices > 1:
                    index = _collectives.device_index(mesh)
                    rngs = jax.tree.map(lambda k: jax.random.fold_in(k, index), rngs)
                return model.module.apply(variables, *args, rngs=rngs, **kwargs)

            return apply

        with standing_in(plain), nn.intercept_methods(_linen_varied(how, mesh)):
            yield


def subject_of(
    request: Request,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unsharded: Any,
    linen: ShardedModule | None,
) -> Subject:
    """Take a call apart and make its twin.

    Raises:
        TypeError: an argument is traced, or what is selected is not differentiable.
        ValueError: no sharded module, or another model as `unsharded`.
    """
    taken, found, given = _functional.take((args, kwargs))
    nodes = tuple(found)
    mesh = _batch.mesh_of(nodes, WHO)
    for node in nodes:
        check_variables(node, WHO)
    for module in (m for node in nodes for m in sharded_modules(node)):
        check_concrete(module, WHO)
    names = [str(a) for a in _arguments.arguments_of(request.f, args)]
    labels, node_names = _labels(args, kwargs, names)
    in_specs, count = request.in_specs.tree(), request.num_microbatches
    specs = None
    with contextlib.suppress(ValueError):  # the sharded run will say it
        specs = _arguments.place_arguments(
            request.f, args, kwargs, in_specs, mesh, WHO, count
        ).specs
    asked = specs or [PartitionSpec()] * len(given)
    rows = batch_rows([x.shape for x in given], asked, mesh)
    _, own_state = nnx.split(nodes)
    slots = slots_of(own_state, mesh, rows)
    positions, entries = [], []
    if request.argnums is not None:
        chosen = select(request, args, nodes, slots, asked, names)
        positions, entries = chosen.positions, chosen.entries
    twin = _twin_of(nodes)
    if unsharded is not None:
        twin = (_checked(unsharded, twin[0], mesh), *twin[1:])
    graphdef, state = nnx.split(twin)
    static, arrays = _functional.take_arrays(state)
    assert len(arrays) == len(slots)
    owner = owners(nodes)
    sums = frozenset(
        i
        for i, slot in enumerate(slots)
        if issubclass(owner.get(slot.path, object), nnx.metrics.Average)
        and issubclass(slot.kind, nnx.metrics.MetricState)
    )
    return Subject(
        request,
        mesh,
        linen,
        len(args),
        taken,
        nodes,
        given,
        labels,
        node_names,
        specs,
        graphdef,
        static,
        [to_host(x) for x in arrays],
        [to_host(x) for x in given],
        slots,
        positions,
        entries,
        sums,
    )


def _checked(unsharded: Any, copy: Any, mesh: MeshInfo) -> Any:
    """A model to compare with: one that has the Variables of the copy."""
    if not isinstance(unsharded, nnx.Module) or sharded_modules(unsharded):
        raise TypeError(
            f"{WHO}: unsharded must be an NNX module that fully_shard was not applied "
            f"to, or a function that makes one, got {type(unsharded).__name__}."
        )
    own, expected = (
        [(s.path, s.shape) for s in slots_of(nnx.state(x), mesh)]
        for x in (unsharded, copy)
    )
    for (path, shape), (other, needed) in zip(own, expected):
        if (path, shape) != (other, needed):
            raise ValueError(
                f"{WHO}: unsharded has {dotted(path)!r} of shape {shape} where the "
                f"sharded model has {dotted(other)!r} of {needed}. Pass the same "
                "model before fully_shard was applied to it, or leave it out."
            )
    if len(own) != len(expected):
        raise ValueError(
            f"{WHO}: unsharded has {len(own)} arrays, the sharded model has "
            f"{len(expected)}. Pass the same model, or leave it out."
        )
    (own_copy,) = copied((unsharded,))
    return own_copy


def _labels(args: Any, kwargs: Any, names: Sequence[str]) -> tuple[list[str], list]:
    """Names of the arrays and of the nodes of the arguments, as in error texts."""
    labels, nodes = [], []
    named = [
        *zip(names, args),
        *((f"argument {k!r}", kwargs[k]) for k in sorted(kwargs)),
    ]
    for at, (name, arg) in enumerate(named):
        leaves = jax.tree_util.tree_leaves_with_path(arg, is_leaf=_functional.is_node)
        for keys, leaf in leaves:
            label = name + jax.tree_util.keystr(keys)
            if _functional.is_node(leaf):
                plain = label.removeprefix("argument ").replace("'", "")
                nodes.append(plain if at else "")
            elif _functional.is_array(leaf):
                labels.append(label)
    return labels, nodes


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """What `unshard` and `reshard` are, and return, on the twin."""

    def __call__(self, async_op: bool = False) -> _Nothing:
        return self

    def wait(self) -> None:
        """Wait for nothing."""


_NOTHING = _Nothing()


def copied(nodes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Nodes with Variables of their own, which hold the same arrays."""
    graphdef, state = nnx.split(nodes)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x, state))


def _twin_of(nodes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies in the original classes, with whole values without padding."""
    copies = copied(nodes)
    for root in copies:
        for _, node in list(_functional.walk(root)):
            if is_sharded(node):
                revert(node)
                for name in ("unshard", "reshard"):  # which f may call
                    if not hasattr(node, name):
                        setattr(node, name, _NOTHING)
            elif isinstance(node, ManagedVariable):
                own = (METADATA, WRITTEN, "eager_sharding")
                metadata = {k: v for k, v in node._var_metadata.items() if k not in own}
                release(node, at_rest(node), None, metadata)
    return copies


# --- what is done otherwise -------------------------------------------------------


def as_varied(nodes: Sequence[Any], how: Variation, mesh: MeshInfo) -> None:
    """Set modules of the twin, in place, for a run."""
    for root in nodes:
        for _, node in list(_functional.walk(root)):
            if not isinstance(node, nnx.Module):
                continue
            if not how.dropout:
                for name, off in (("deterministic", True), ("dropout_rate", 0.0)):
                    if isinstance(vars(node).get(name), (bool, float)):
                        setattr(node, name, off)
                if isinstance(node, nnx.Dropout):
                    node.rate = 0.0
            if how.batch_norm and isinstance(node, nnx.BatchNorm):
                node.axis_name = _axes(node.axis_name, mesh)


def _axes(own: Any, mesh: MeshInfo) -> Any:
    return own or mesh.data_spec()[0]


def _linen_varied(how: Variation, mesh: MeshInfo) -> Callable:
    """The same for Linen modules, which are made anew in every call."""

    def call(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if not how.dropout and isinstance(module, nn.Dropout):
            return args[0] if args else kwargs["inputs"]
        if not how.batch_norm or not isinstance(module, nn.BatchNorm):
            return next_fun(*args, **kwargs)
        own = module.axis_name
        object.__setattr__(module, "axis_name", _axes(own, mesh))
        try:
            return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", own)

    return call
