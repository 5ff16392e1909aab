"""Running a function for `check`: sharded, and as each device would unsharded.

One program serves twice. On the model's mesh it is the replay: every device runs the
function on an unsharded twin of the model and on its own rows, with its own keys, and
nothing is reduced, so that all rules of joining can be tried on its results. On a mesh
of one device it is the unsharded run on the whole batch. What must not live here:
joining and judging results (`_check_join`, `_check_rules`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from fsdp_jax import _collectives, _functional, _transforms
from fsdp_jax._arguments import cut_dim
from fsdp_jax._check_host import Held, agreed, as_data, automatic, one_device, to_host
from fsdp_jax._check_subject import Subject, Variation, as_varied, copied
from fsdp_jax._join import Request, owners
from fsdp_jax._loss import split_loss
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._nested import standing_in
from fsdp_jax._policies import MixedPrecisionPolicy
from fsdp_jax._spec import dotted
from fsdp_jax._state import set_state, sharded_modules
from fsdp_jax._state_dict import at_rest

Key = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of what a run gives.

    Attributes:
        what: "loss", "weight", "gradient", "gradient of weight", "state" or "output".
        path: its name; empty for the loss.
        kind: class of its Variable; None for other arrays.
        owner: class of the metric that it is in; None for none.
        at: position among the arrays of the state before; None for what is new.
    """

    what: str
    path: str
    kind: type | None = None
    owner: type | None = None
    at: int | None = None

    @property
    def key(self) -> Key:
        """What names it in a run."""
        return self.what, self.path


Run = dict[Key, np.ndarray]


@dataclasses.dataclass
class Replay:
    """What the devices gave.

    Attributes:
        leaves: of each device, by key.
        arrays: `(devices, slices, ...)` each, where there is one per slice; else
            `(devices, 1, ...)`.
        mesh: of the devices.
        specs: how the arguments were cut.
    """

    leaves: dict[Key, Leaf]
    arrays: Run
    mesh: MeshInfo
    specs: list[PartitionSpec]


# --- sharded ----------------------------------------------------------------------


def run_sharded(subject: Subject, policies: bool = True) -> Run:
    """Run the function as the library does, on copies.

    Args:
        subject: what is checked.
        policies: whether mixed precision policies hold.
    """
    request = subject.request
    nodes = copied(subject.nodes)
    changes: dict[str, Any] = {
        "requires_gradient_sync": True,
        "requires_all_reduce": True,
    }
    if not policies:
        changes["mp_policy"] = MixedPrecisionPolicy()
    for node in nodes:
        for module in sharded_modules(node):
            set_state(module, **changes)
    args, kwargs = subject.taken.put(nodes, subject.given)
    in_specs = request.in_specs.tree()
    with subject.sharded_apply(policies):
        if request.argnums is None:
            run = _transforms.shard_map(request.f, in_specs=in_specs)
            value, output, grads = None, run(*args, **kwargs), ()
        else:
            run = _transforms.value_and_grad(
                request.f,
                argnums=[
                    nnx.DiffState(number, wrt)
                    for number, wrt in zip(request.argnums, request.wrt)
                ],
                has_aux=request.has_aux,
                reduction=request.reduction,
                num_microbatches=request.num_microbatches,
                in_specs=in_specs,
            )
            value, grads = run(*args, **kwargs)
            value, output = value if request.has_aux else (value, None)
    found = [] if value is None else [(Leaf("loss", ""), value)]
    found += [(Leaf("gradient", n), x) for n, x in _gradients(subject, grads)]
    found += _collected(subject, nodes, output)
    return {leaf.key: to_host(x).data for leaf, x in found}


def _gradients(subject: Subject, grads: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Gradients by name, as `_wrt.select` names them."""

    def is_state(x: Any) -> bool:
        return isinstance(x, (nnx.State, nnx.Variable))

    names = {entry.name for entry in subject.entries}
    for number, tree in zip(subject.request.argnums or (), grads):
        leaves = jax.tree.leaves(tree, is_leaf=is_state)
        number %= subject.num_args
        states = [x for x in leaves if is_state(x)]
        for k, state in enumerate(states):
            flat = [((), state)]
            if not isinstance(state, nnx.Variable):
                flat = nnx.to_flat_state(state)
            for path, variable in flat:
                name = dotted(path)
                full = f"{number}.{k}:{name}"
                yield full if full in names else name, at_rest(variable)
        for k, x in enumerate(x for x in leaves if not is_state(x)):
            yield f"{number}[{k}]", x


def _collected(
    subject: Subject, nodes: Sequence[Any], output: Any
) -> list[tuple[Leaf, Any]]:
    """Every array of the nodes and of the output, with what it is."""
    owner, known = owners(nodes), set()
    found: list[tuple[Leaf, Any]] = []
    for i, node in enumerate(nodes):
        for path, variable in _functional.walk(node):
            if isinstance(variable, nnx.Variable) and id(variable) not in known:
                known.add(id(variable))
                found += _of_variable(
                    "state",
                    subject.state_name(i, path),
                    variable,
                    owner.get((i, *path)),
                    subject.places.get((i, *path), ()),
                )
    leaves = jax.tree_util.tree_leaves_with_path(output, is_leaf=_functional.is_node)
    for keys, leaf in leaves:
        name = jax.tree_util.keystr(keys)
        if _functional.is_node(leaf):
            for path, variable in _functional.walk(leaf):
                if isinstance(variable, nnx.Variable) and id(variable) not in known:
                    path = name + "." + dotted(path) if path else name
                    found += _of_variable("output", path, variable, None, ())
        elif _functional.is_array(leaf) or isinstance(leaf, (bool, int, float)):
            found.append((Leaf("output", name), leaf))
    return found


def _of_variable(
    what: str, name: str, variable: Any, owner: Any, places: Sequence[int]
) -> list[tuple[Leaf, Any]]:
    leaves = jax.tree.leaves(at_rest(variable))
    arrays = [
        x for x in leaves if _functional.is_array(x) or isinstance(x, (int, float))
    ]
    suffixes = [f"[{i}]" for i in range(len(arrays))] if len(arrays) > 1 else [""]
    return [
        (Leaf(what, name + s, type(variable), owner, at), x)
        for s, x, at in zip(suffixes, arrays, [*places, *[None] * len(arrays)])
    ]


# --- unsharded --------------------------------------------------------------------


class Lab:
    """Runs of the twin, each program compiled once.

    Args:
        subject: what is checked.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.meshes = {
            True: one_device(subject.mesh),
            False: automatic(subject.mesh),
        }
        self._compiled: dict[Any, tuple[Callable, list[Leaf]]] = {}

    def whole(self, how: Variation, arrays: Sequence[Held] | None = None) -> Replay:
        """The whole batch on one device, the same in every process.

        Args:
            how: what is done otherwise.
            arrays: arguments in place of those that were given.
        """
        how = dataclasses.replace(how, specs=None, num_slices=1, batch_norm=False)
        run = self._run(True, how, arrays)
        run.arrays = dict(zip(run.arrays, agreed(list(run.arrays.values()))))
        return run

    def replay(self, how: Variation, arrays: Sequence[Held] | None = None) -> Replay:
        """Each device on its rows; arguments as in `whole`."""
        return self._run(False, how, arrays)

    def _run(self, alone: bool, how: Variation, arrays: Any) -> Replay:
        subject, mesh = self.subject, self.meshes[alone]
        arrays = subject.arrays if arrays is None else arrays
        specs = [*subject.state_specs, *subject.specs_under(how)]
        if alone:
            specs = [PartitionSpec()] * len(specs)
        held = [*subject.state, *arrays]
        if (alone, how) not in self._compiled:
            leaves: list[Leaf] = []
            program = functools.partial(_device_program, subject, mesh, how, leaves)
            mapped = jax.shard_map(
                program,
                mesh=mesh.mesh,
                in_specs=(specs,),
                out_specs=mesh.data_spec(),
                axis_names=set(mesh.data_axes),
                check_vma=False,
            )
            self._compiled[alone, how] = jax.jit(mapped), leaves
        run, leaves = self._compiled[alone, how]
        context = contextlib.nullcontext()
        if not jax.sharding.get_abstract_mesh().empty:
            context = jax.set_mesh(mesh.mesh)
        with context:
            placed = [h.placed(mesh, s) for h, s in zip(held, specs, strict=True)]
            results = run(placed)
            found = [to_host(x).data for x in results]
        by_key = {leaf.key: leaf for leaf in leaves}
        arrays = dict(zip(by_key, found, strict=True))
        return Replay(by_key, arrays, mesh, specs[len(subject.state) :])


def _device_program(
    subject: Subject,
    mesh: MeshInfo,
    how: Variation,
    leaves: list[Leaf],
    inputs: list[jax.Array],
) -> list[jax.Array]:
    """What one device does: results with a dim for devices and one for slices."""
    request, num_state = subject.request, len(subject.state)
    used = [h.used(x) for h, x in zip(subject.held, inputs, strict=True)]
    state = _of_this_device(subject, mesh, used[:num_state])
    count = how.num_slices or request.num_microbatches
    count = 1 if mesh.num_devices == 1 and how.num_slices == 1 else count
    dims = [cut_dim(s) for s in subject.specs_under(how)]
    runs: list[tuple[list[Leaf], list[Any]]] = []
    for i in range(count):
        found: list[list[Leaf]] = []

        def run(diff: list[Any], i=i, state=state, found=found):
            held = [*state, *used[num_state:]]
            for at, x in zip(subject.positions, diff, strict=True):
                held[at] = x
            given = [_slice(x, d, i, count) for x, d in zip(held[num_state:], dims)]
            nodes = nnx.merge(
                subject.graphdef, subject.static.put((), held[:num_state])
            )
            as_varied(nodes, how, mesh)
            args, kwargs = subject.taken.put(nodes, given)
            with subject.plain_apply(how, mesh), standing_in(mesh):
                output = request.f(*args, **kwargs)
            loss, output = _split(request, output)
            collected = _collected(subject, nodes, output)
            weights = [(Leaf("weight", ""), w) for w in loss[1:]]
            found.append([leaf for leaf, _ in [*weights, *collected]])
            diffable = [x for x in loss if jnp.issubdtype(x.dtype, jnp.inexact)]
            rest = [jnp.asarray(x) for _, x in [*weights, *collected]]
            return diffable, rest

        diff = [[*state, *used[num_state:]][at] for at in subject.positions]
        loss, vjp, rest = jax.vjp(run, diff, has_aux=True)
        of_run, values = list(found[-1]), list(rest)
        for j, (what, of) in enumerate((("loss", ""), ("", " of weight"))):
            if j < len(loss):
                pulled = [jnp.ones_like(x) * (k == j) for k, x in enumerate(loss)]
                (grads,) = vjp(pulled)
                of_run += [
                    Leaf("gradient" + of, entry.name) for entry in subject.entries
                ]
                values += grads
                if what:
                    of_run.append(Leaf(what, ""))
                    values.append(loss[j])
        runs.append((of_run, values))
        state = list(state)
        for leaf, x in zip(of_run, values):
            if leaf.at is not None and not _is_key_state(leaf):
                state[leaf.at] = x
    leaves[:] = runs[-1][0]
    joined = []
    for place, leaf in enumerate(leaves):
        values = [as_data(run[1][place]) for run in runs]
        if leaf.what.startswith("gradient"):
            values = [functools.reduce(jnp.add, values)]
        elif leaf.at is not None:
            values = values[-1:]
        joined.append(jnp.stack(values)[None])
    return joined


def _split(request: Request, output: Any) -> tuple[list[Any], Any]:
    """The loss, with its weight if there is one, and the rest of the output."""
    if request.argnums is None:
        return [], output
    loss, aux = split_loss(request, output)
    return list(loss) if isinstance(loss, tuple) else [loss], aux


def _is_key_state(leaf: Leaf) -> bool:
    return leaf.kind is not None and issubclass(leaf.kind, nnx.RngKey)


def _of_this_device(
    subject: Subject, mesh: MeshInfo, state: list[Any]
) -> list[jax.Array]:
    """The state as a device has it: keys of its own, sums that begin with nothing."""
    if mesh.num_devices == 1:
        return state
    index, held = _collectives.device_index(mesh), list(state)
    for i, slot in enumerate(subject.slots):
        if issubclass(slot.kind, nnx.RngKey):
            fold = functools.partial(jax.random.fold_in, data=index)
            for _ in range(held[i].ndim):
                fold = jax.vmap(fold)
            held[i] = fold(held[i])
        elif i in subject.sums:
            held[i] = jnp.where(index == 0, held[i], jnp.zeros_like(held[i]))
    return held


def _slice(x: Any, dim: int | None, i: int, count: int) -> Any:
    if dim is None or count == 1:
        return x
    rows = x.shape[dim] // count
    return jax.lax.slice_in_dim(x, i * rows, (i + 1) * rows, axis=dim)
