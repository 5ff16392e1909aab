"""Meshes with further axes: parameters that a tensor parallel axis cuts already."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fsdp_jax
from fsdp_jax import DataParallelMeshDims, Shard, fully_shard, local_shape
from tests import helpers

GROUPS = 3  # of the MLP; the root's own is empty
Place = Callable[[tuple[Any, ...], Any], P]

DIMS = {
    "both": DataParallelMeshDims("s", "r"),
    "shard": DataParallelMeshDims(("r", "s")),
    "replicate": DataParallelMeshDims(replicate=("r", "s")),
}


def mesh_of(names: str = "r s tp") -> Mesh:
    """Two devices along each of three axes."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return Mesh(devices, tuple(names.split()))


def rows(path: tuple[Any, ...], x: Any) -> P:
    """tp cuts dim 0, as the sharding axes do."""
    return P("tp")


def columns(path: tuple[Any, ...], x: Any) -> P:
    """tp cuts another dim than the sharding axes do."""
    return P(None, "tp") if x.ndim > 1 else P()


def in_turn(path: tuple[Any, ...], x: Any) -> P:
    """Columns then rows, as a pair of layers is usually cut."""
    if path[1] % 2:
        return P("tp") if x.ndim > 1 else P()
    return P(None, "tp") if x.ndim > 1 else P("tp")


PLACES: dict[str, Place] = {"rows": rows, "columns": columns, "in turn": in_turn}


def distribute(model: Any, mesh: Mesh, place: Place) -> Any:
    """Put every parameter on the mesh, cut as told."""
    for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = x.get_raw_value()
        spec = place(path, value)
        x.set_raw_value(jax.device_put(np.asarray(value), NamedSharding(mesh, spec)))
        nnx.update(model, nnx.from_flat_state({path: x}))
    return model


def sharded(
    place: Place = rows, names: str = "r s tp", dims: str = "both", **kwargs: Any
) -> Any:
    """The MLP, tensor parallel, a group per layer."""
    mesh = mesh_of(names)
    model = distribute(helpers.MLP(nnx.Rngs(0)), mesh, place)
    return helpers.shard_blocks(model, mesh=mesh, dp_mesh_dims=DIMS[dims], **kwargs)


def linear(place: Place = rows, dims: str = "both") -> Any:
    """A Linear(8, 16), tensor parallel and sharded."""
    model = distribute(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), mesh_of(), place)
    return fully_shard(model, mesh=mesh_of(), dp_mesh_dims=DIMS[dims])


def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
    vg = nnx.value_and_grad
    if isinstance(model, fsdp_jax.FSDPModule):
        vg = fsdp_jax.value_and_grad
    value, grads = vg(helpers.mean_square)(model, x, y)
    optimizer.update(model, grads)
    return value, grads


@functools.cache
def expected() -> tuple[list[Any], Any]:
    """Losses and gradients of five unsharded steps, and the model after them."""
    model = helpers.MLP(nnx.Rngs(0))
    return five_steps(model, helpers.clipped_adamw(model)), model


def five_steps(model: Any, optimizer: Any) -> list[Any]:
    batch, jitted = helpers.regression_batch(), nnx.jit(step)
    return [jitted(model, optimizer, *batch) for _ in range(5)]


def spec_of(x: jax.Array) -> P:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec


def shardings(tree: Any) -> list[NamedSharding]:
    arrays = jax.tree.leaves(nnx.as_pure(tree))
    return [x.sharding for x in arrays if x.ndim]


def gradients(model: Any, **kwargs: Any) -> Any:
    """Of one call, on a model that has not been trained."""
    run = nnx.jit(fsdp_jax.value_and_grad(helpers.mean_square, **kwargs))
    return run(model, *helpers.regression_batch())


# --- how parameters rest --------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "place", "kernel", "bias"),
    [
        ("both", rows, P(("tp", "s")), P(("tp", "s"))),
        ("both", columns, P("s", "tp"), P("s")),
        ("shard", rows, P(("tp", "r", "s")), P(("tp", "r", "s"))),
        ("shard", columns, P(("r", "s"), "tp"), P(("r", "s"))),
        ("replicate", rows, P("tp"), P("tp")),
        ("replicate", columns, P(None, "tp"), P()),
    ],
)
def test_parameters_are_cut_within_their_pieces(dims, place, kernel, bias):
    model = linear(place, dims)
    assert model.kernel[...].sharding == NamedSharding(mesh_of(), kernel)
    assert model.bias[...].sharding == NamedSharding(mesh_of(), bias)
    full = np.asarray(nnx.Linear(8, 16, rngs=nnx.Rngs(0)).kernel[...])
    for shard in model.kernel[...].addressable_shards:
        np.testing.assert_array_equal(shard.data, full[shard.index])


def test_devices_hold_the_rows_of_their_piece():
    """Of 8 rows, tp cuts halves, each of which the sharding axis cuts again."""
    kernel = linear(rows).kernel
    assert local_shape(kernel) == (2, 16)
    starts = {
        s.device.id: s.index[0].start or 0 for s in kernel[...].addressable_shards
    }
    coordinates = np.ndindex(2, 2, 2)  # r, s, tp
    assert list(starts.values()) == [4 * tp + 2 * s for _, s, tp in coordinates]


def test_a_dim_must_divide_within_the_pieces():
    """12 rows divide by 4, but the 6 of a piece do not."""
    mesh = mesh_of()
    model = distribute(nnx.Linear(12, 8, rngs=nnx.Rngs(0)), mesh, rows)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DIMS["shard"])
    assert model.kernel[...].sharding.spec == P("tp", ("r", "s"))
    model = distribute(nnx.Linear(12, 6, rngs=nnx.Rngs(0)), mesh, rows)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DIMS["shard"])
    assert model.kernel[...].sharding.spec == P("tp")
    text = str(fsdp_jax.describe(model))
    assert "no dim of (12, 6) divides by 4 within its (2, 1) pieces" in text
    model = distribute(nnx.Linear(8, 12, rngs=nnx.Rngs(0)), mesh, columns)
    with pytest.raises(NotImplementedError, match=r"4 devices in each of 2 pieces"):
        fully_shard(
            model,
            mesh=mesh,
            dp_mesh_dims=DIMS["shard"],
            shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None,
        )
    assert type(model) is nnx.Linear


def test_a_description_counts_the_bytes_of_one_device():
    model = linear(rows)
    description = fsdp_jax.describe(model)
    assert [r.local_shape for r in description.rows] == [(4,), (2, 16)]
    assert description.total_bytes == 4 * (128 + 16)
    assert description.bytes_per_device == 128 + 16
    assert description.largest_group_bytes == 2 * (128 + 16)
    assert (description.num_shards, description.num_replicas) == (2, 2)
    model.unshard()
    whole = fsdp_jax.describe(model)
    assert [r.local_shape for r in whole.rows] == [(8,), (4, 16)]
    assert whole.bytes_per_device == 2 * (128 + 16)
    model.reshard()
    described = []

    def see(model: Any, x: jax.Array) -> jax.Array:
        described.append(fsdp_jax.describe(model))
        return x

    fsdp_jax.shard_map(see)(model, jnp.ones(8))
    assert described[-1].rows == description.rows == fsdp_jax.describe(model).rows


# --- parity with the unsharded model --------------------------------------------------


@pytest.mark.parametrize(
    ("names", "dims", "place"),
    [
        ("s tp r", "both", "in turn"),
        ("r tp s", "shard", "columns"),
        ("r s tp", "replicate", "rows"),
    ],
)
def test_training_equals_the_unsharded_model(names, dims, place):
    model = sharded(PLACES[place], names, dims)
    rest = shardings(nnx.state(model, nnx.Param))
    optimizer = helpers.clipped_adamw(model)
    steps, (wanted, reference) = five_steps(model, optimizer), expected()
    helpers.assert_trees_close(steps, wanted)
    helpers.assert_trees_close(model, reference)
    assert shardings(nnx.state(model, nnx.Param)) == rest
    for _, grads in steps:
        assert shardings(grads) == rest
    assert shardings(nnx.state(optimizer, nnx.optimizer.OptState)) == [*rest, *rest]
    x = helpers.regression_batch()[0]
    output = fsdp_jax.shard_map(lambda model, x: model(x))(model, x)
    np.testing.assert_allclose(output, reference(x), rtol=1e-5, atol=1e-6)
    norm = fsdp_jax.global_norm(model)
    np.testing.assert_allclose(norm, fsdp_jax.global_norm(reference), rtol=1e-5)


@pytest.mark.parametrize(
    ("place", "dims"), [(in_turn, "both"), (rows, "shard"), (columns, "replicate")]
)
def test_the_global_view_is_the_unsharded_model(place, dims):
    model, batch = sharded(place, dims=dims), helpers.regression_batch()

    @nnx.jit
    def run(model, x, y):
        return model(x), nnx.value_and_grad(helpers.mean_square)(model, x, y)

    # Of rows that are not cut XLA warns that it moves gradients inefficiently.
    placed = fsdp_jax.shard_batch(batch, model)
    got, wanted = run(model, *placed), run(helpers.MLP(nnx.Rngs(0)), *batch)
    helpers.assert_trees_close(got, wanted)
    if dims == "shard":
        helpers.assert_trees_close(model(placed[0]), wanted[0])
    for a, b in zip(shardings(got[1][1]), shardings(nnx.state(model)), strict=True):
        assert a.is_equivalent_to(b, 2 if len(b.spec) > 1 else 1)


def test_groups_that_are_kept_and_parameters_that_are_frozen():
    model = sharded(in_turn, reshard_after_forward=False)
    batch = helpers.regression_batch()
    helpers.assert_trees_close(gradients(model)[1], expected()[0][0][1])
    biases = nnx.All(nnx.Param, nnx.PathContains("bias"))
    some = nnx.jit(fsdp_jax.grad(helpers.mean_square, wrt=biases))(model, *batch)
    wanted = nnx.filter_state(expected()[0][0][1], nnx.PathContains("bias"))
    helpers.assert_trees_close(some, wanted)


@pytest.mark.parametrize(
    ("place", "dims", "sync"), [(rows, "both", True), (in_turn, "shard", False)]
)
def test_micro_batches_add_up(place, dims, sync):
    model = sharded(place, dims=dims)
    model.set_requires_gradient_sync(sync)
    grads = gradients(model, num_microbatches=2)
    helpers.assert_trees_close(grads, expected()[0][0])
    assert shardings(grads[1]) == shardings(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("place", "dims", "all_reduce"),
    [
        (rows, "both", False),
        (rows, "both", True),
        (in_turn, "shard", False),
        (in_turn, "replicate", False),
    ],
)
def test_accumulated_gradients_are_reduced_to_the_pieces(place, dims, all_reduce):
    model, wanted = sharded(place, dims=dims), expected()[0][0]
    if all_reduce:
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    value, pending = gradients(model)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    assert isinstance(pending, fsdp_jax.PendingGradients)
    assert bool(pending.partial) == all_reduce
    for x in pending.partial.values():  # the pieces of each replica, by replica
        assert spec_of(x) == P("r", ("tp", "s"))
    model.set_requires_gradient_sync(True)
    alone = model.synchronize_gradients(pending)
    helpers.assert_trees_close(alone, wanted[1])
    run = nnx.jit(fsdp_jax.grad(helpers.mean_square))
    both = run(model, *helpers.regression_batch(), pending=pending)
    doubled = jax.tree.map(lambda x: 2 * np.asarray(x), nnx.as_pure(wanted[1]))
    helpers.assert_trees_close(both, doubled)
    for grads in (alone, both):
        assert shardings(grads) == shardings(nnx.state(model, nnx.Param))


# --- what a model can do --------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "dims"),
    [(columns, "both"), (rows, "shard")],
)
def test_unshard_and_reshard_in_and_outside_of_programs(place, dims):
    model, x = linear(place, dims), helpers.regression_batch(8)[0][:, :8]
    kernel, rest = np.asarray(model.kernel[...]), model.kernel[...].sharding
    whole = NamedSharding(mesh_of(), P("tp") if place is rows else P(None, "tp"))
    model.unshard()
    assert model.kernel[...].sharding == whole
    np.testing.assert_array_equal(model.kernel[...], kernel)
    model.kernel[...] = 2 * model.kernel[...]
    model.reshard()
    assert model.kernel[...].sharding == rest
    np.testing.assert_array_equal(model.kernel[...], 2 * kernel)

    def loss(model, x):
        model.unshard()
        product = x @ model.kernel[...]
        model.reshard()
        return jnp.mean((model(x) + product) ** 2)

    def of_kernel(kernel):
        return jnp.mean((2 * x @ kernel) ** 2)

    value, grads = nnx.jit(fsdp_jax.value_and_grad(loss))(model, x)
    wanted = jax.value_and_grad(of_kernel)(2 * kernel)
    helpers.assert_trees_close((value, grads["kernel"].get_raw_value()), wanted)
    assert shardings(grads) == shardings(nnx.state(model))


def test_state_dicts_pass_between_placements():
    first = sharded(rows).state_dict()
    for place, dims in ((columns, "both"), (in_turn, "shard"), (rows, "replicate")):
        model = sharded(place, dims=dims)
        rest = shardings(nnx.state(model))
        model.load_state_dict({name: x + 1 for name, x in first.items()})
        for name, x in model.state_dict().items():
            np.testing.assert_array_equal(x, first[name] + 1)
        model.load_state_dict({name: np.asarray(x) for name, x in first.items()})
        for name, x in model.state_dict().items():
            np.testing.assert_array_equal(x, first[name])
        assert shardings(nnx.state(model)) == shardings(nnx.clone(model)) == rest


def test_a_batch_is_cut_over_the_data_devices_alone():
    model = linear()
    placed = fsdp_jax.shard_batch(jnp.ones((4, 8)), model)
    assert local_shape(placed) == (1, 8)
    assert len(placed.addressable_shards) == 8
    with pytest.raises(ValueError, match=r"6 rows, which do not divide over the 4"):
        fsdp_jax.shard_batch(jnp.ones((6, 8)), model)
    with pytest.raises(ValueError, match=r"names axis 'tp'; the data axes"):
        fsdp_jax.shard_map(lambda m, x: m(x), in_specs=P("tp"))(model, placed)


class Annotated(nnx.Module):
    """Layers whose initializers say how tp cuts them; one kernel has three dims."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        lecun, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        self.up = nnx.Linear(
            16,
            32,
            kernel_init=nnx.with_partitioning(lecun, (None, "tp")),
            bias_init=nnx.with_partitioning(zeros, ("tp",)),
            rngs=rngs,
        )
        self.heads = nnx.LinearGeneral(
            32,
            (4, 8),
            kernel_init=nnx.with_partitioning(lecun, (None, "tp", None)),
            bias_init=nnx.with_partitioning(zeros, ("tp", None)),
            rngs=rngs,
        )
        self.down = nnx.LinearGeneral(
            (4, 8),
            8,
            axis=(-2, -1),
            kernel_init=nnx.with_partitioning(lecun, ("tp", None, None)),
            bias_init=nnx.with_partitioning(zeros, (None,)),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.heads(jnp.tanh(self.up(x)))))


@functools.cache
def gradients_of_annotated() -> Any:
    """Loss and gradients without sharding over data axes."""
    with jax.set_mesh(mesh_of()):
        reference = Annotated(nnx.Rngs(0))
    step = nnx.jit(nnx.value_and_grad(helpers.mean_square))
    return step(reference, *helpers.regression_batch())


@pytest.mark.slow
@pytest.mark.parametrize("born_in_jit", [True, False])
def test_parameters_that_their_initializers_cut(born_in_jit):
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        make = nnx.jit(Annotated) if born_in_jit else Annotated
        model = make(nnx.Rngs(0))
    assert local_shape(model.heads.kernel) == (32, 2, 8)
    for layer in (model.up, model.heads, model.down):
        fully_shard(layer, mesh=mesh, dp_mesh_dims=DIMS["both"])
    fully_shard(model, mesh=mesh, dp_mesh_dims=DIMS["both"])
    kernels = [layer.kernel[...] for layer in (model.up, model.heads, model.down)]
    assert [spec_of(x) for x in kernels] == [P("s", "tp"), P("s", "tp"), P(("tp", "s"))]
    got = gradients(model)
    assert shardings(got[1]) == shardings(nnx.state(model))
    helpers.assert_trees_close(got, gradients_of_annotated())


@pytest.mark.parametrize("how", ["scan", "scan_layers"])
def test_stacked_layers_in_a_loop(how):
    """tp cuts the columns of `up` and the rows of `down`, which are dims 2 and 1."""

    def place(path: tuple[Any, ...], x: Any) -> P:
        if path[0] == "head" or x.ndim == 2 and path[1] == "down":
            return P()
        return (
            P(None, "tp") if path[1] == "down" or x.ndim == 2 else P(None, None, "tp")
        )

    where: dict[str, Any] = {"mesh": mesh_of(), "dp_mesh_dims": DIMS["both"]}
    model = distribute(helpers.Stack(how), mesh_of(), place)
    fully_shard(model.layers, shard_placement_fn=lambda _: Shard(1), **where)
    fully_shard(model, **where)
    assert model.layers.up.kernel[...].sharding.spec == P(None, "s", "tp")
    assert model.layers.up.bias[...].sharding.spec == P(None, ("tp", "s"))
    assert model.layers.down.kernel[...].sharding.spec == P(None, ("tp", "s"))
    got = gradients(model)
    helpers.assert_trees_close(got, helpers.gradients_of_stack())
    assert shardings(got[1]) == shardings(nnx.state(model))


# --- what is communicated -------------------------------------------------------------


def counts_of(text: str) -> dict[str, int]:
    counts = helpers.count_collectives(text)
    assert "collective_permute" not in text
    return counts


@pytest.mark.parametrize(
    ("place", "dims"),
    [*[("in turn", dims) for dims in DIMS], ("rows", "both"), ("columns", "both")],
)
def test_counts_are_those_of_a_mesh_without_further_axes(dims, place):
    model = sharded(PLACES[place], dims=dims)

    text = helpers.lowered_text(differentiate, model, *helpers.regression_batch())
    axes = {"both": 1, "shard": 2, "replicate": 0}[dims]
    assert counts_of(text) == {
        "all_gather": axes * (2 * GROUPS - 1),
        "reduce_scatter": axes * GROUPS,
        "all_reduce": 1 + (GROUPS if dims != "shard" else 0),
        "all_to_all": 0,
    }


def collectives_of(text: str) -> list[tuple[str, str, set[tuple[int, ...]]]]:
    """Kind, name and device groups of each collective of a compiled program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = []
    for line in text.splitlines():
        match = re.search(rf" ({kinds})(?:-start)?\(", line)
        if match is None or " = " not in line:
            continue
        name = re.search(r'op_name="([^"]*)"', line)
        found.append((match[1], name[1] if name else "", device_groups(line)))
    return found


def device_groups(line: str) -> set[tuple[int, ...]]:
    """Of one HLO instruction, in whichever way it writes them."""
    named = re.search(r"replica_groups=mesh\[(.*?)\] *\{(.*?)\}", line)
    if named is not None:  # the names and sizes of all axes, and those it runs over
        axes = re.findall(r"'(\w+)'=2", named[1])
        return along(mesh_of(" ".join(axes)), *re.findall(r"'(\w+)'", named[2]))
    listed = re.search(r"replica_groups=\{\{(.*?)\}\}", line)
    if listed is not None:
        groups = [group.split(",") for group in listed[1].split("},{")]
        return {tuple(sorted(map(int, group))) for group in groups}
    tiled = re.search(r"replica_groups=\[(.*?)\]<=\[(.*?)\](?:T\((.*?)\))?", line)
    assert tiled is not None, line
    shape, dims, order = (
        [int(n) for n in (g or "").split(",") if n] for g in tiled.groups()
    )
    devices = np.arange(np.prod(dims)).reshape(dims)
    devices = devices.transpose(order) if order else devices
    return {tuple(sorted(group)) for group in devices.reshape(shape).tolist()}


def along(mesh: Mesh, *axes: str) -> set[tuple[int, ...]]:
    """The groups of devices that differ in their places on these axes only."""
    at = [mesh.axis_names.index(axis) for axis in axes]
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    rows = np.moveaxis(ids, at, range(-len(at), 0)).reshape(-1, 2 ** len(at))
    return {tuple(sorted(row)) for row in rows.tolist()}


def compiled_text(f: Callable[..., Any], model: Any) -> str:
    batch = fsdp_jax.shard_batch(helpers.regression_batch(), model)
    return str(nnx.jit(f).lower(model, *batch).compile().as_text())


def evaluate(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return fsdp_jax.shard_map(lambda model, x: model(x))(model, x)


def differentiate(model: Any, x: jax.Array, y: jax.Array) -> Any:
    return fsdp_jax.value_and_grad(helpers.mean_square)(model, x, y)


@pytest.mark.parametrize(
    ("names", "place"),
    [
        ("tp s r", "rows"),
        ("s tp r", "columns"),
        ("r s tp", "in turn"),
    ],
)
def test_a_gather_runs_over_the_sharding_axes_alone(names, place):
    """Over tp nothing moves but activations, as the partitioner decides."""
    mesh = mesh_of(names)
    found = collectives_of(compiled_text(evaluate, sharded(PLACES[place], names)))
    own = [(kind, groups) for kind, name, groups in found if "fsdp:" in name]
    assert own == [("all-gather", along(mesh, "s"))] * GROUPS
    for kind, name, groups in found:
        assert kind in ("all-gather", "all-reduce"), name
        if "fsdp:" not in name:
            assert name.endswith(("dot_general", "tanh"))
            assert groups == along(mesh, "tp")


@pytest.mark.parametrize("dims", DIMS)
def test_a_step_moves_activations_over_tp_and_no_parameter(dims):
    """Columns then rows: tp sums an activation forward, one backward, and the loss."""
    mesh = mesh_of()
    found = collectives_of(compiled_text(differentiate, sharded(in_turn, dims=dims)))
    data = [along(mesh, *axes) for axes in (("s",), ("r",), ("r", "s"))]
    for kind, name, groups in found:
        if groups == along(mesh, "tp"):
            assert kind == "all-reduce"
            assert "fsdp:" not in name
            assert "dot_general" in name or "reduce_sum" in name
        else:
            assert kind in ("all-gather", "all-reduce", "reduce-scatter")
            assert "fsdp:" in name
            assert groups in data


# --- what is refused ------------------------------------------------------------------


def plain() -> Any:
    return nnx.Linear(8, 16, rngs=nnx.Rngs(0))


def on(mesh: Mesh, spec: P) -> Any:
    return distribute(plain(), mesh, lambda path, x: P(*spec[: x.ndim]))


def explicit() -> Mesh:
    return jax.make_mesh((2, 2, 2), ("r", "s", "tp"))


def other_order() -> Mesh:
    devices = np.array(jax.devices())[::-1].reshape(2, 2, 2)
    return Mesh(devices, ("r", "s", "tp"))


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "an unknown axis": (
        lambda: on(mesh_of(), P("tp")),
        {"dp_mesh_dims": DataParallelMeshDims("data")},
        ValueError,
        r"names the axis 'data', which is not found in mesh.*\('r', 's', 'tp'\)",
    ),
    "no roles": (
        lambda: on(mesh_of(), P("tp")),
        {"dp_mesh_dims": None},
        ValueError,
        r"mesh has 3 axes \('r', 's', 'tp'\)\. Give their roles with dp_mesh_dims",
    ),
    "a plain parameter": (
        plain,
        {},
        ValueError,
        r"'bias' is not distributed.*axes \('tp',\) have no data role.*device_put",
    ),
    "a host parameter": (
        lambda: nnx.Linear(
            8, 16, kernel_init=lambda *_: np.ones((8, 16), np.float32), rngs=nnx.Rngs(0)
        ),
        {},
        ValueError,
        r"is not distributed.*Put it there first",
    ),
    "a data axis that cuts already": (
        lambda: on(mesh_of(), P("s", "tp")),
        {},
        ValueError,
        r"'bias' is cut over the data axes \['s'\] already.*Expected Replicate\(\)",
    ),
    "a replicating axis that cuts already": (
        lambda: on(mesh_of(), P(("tp", "r"))),
        {},
        ValueError,
        r"'bias' is cut over the data axes \['r'\] already.*leaves \('r', 's'\) unused",
    ),
    "a mesh of other names": (
        lambda: on(mesh_of("a b tp"), P("tp")),
        {},
        ValueError,
        r"'bias' is distributed over Mesh\('a'.*not the same mesh as Mesh\('r'",
    ),
    "a mesh of other devices": (
        lambda: on(other_order(), P("tp")),
        {},
        ValueError,
        r"'bias'.*not the same mesh as",
    ),
    "a string": (
        lambda: on(mesh_of(), P("tp")),
        {"dp_mesh_dims": "s"},
        TypeError,
        "dp_mesh_dims must be a DataParallelMeshDims, got str",
    ),
    "a number of forwards": (
        lambda: on(mesh_of(), P("tp")),
        {"reshard_after_forward": 2},
        NotImplementedError,
        "integer reshard_after_forward together with dp_mesh_dims",
    ),
    "an explicit axis": (
        lambda: on(explicit(), P("tp")),
        {"mesh": explicit()},
        NotImplementedError,
        r"\['tp'\] of mesh have no data role and are Explicit.*AxisType\.Auto",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sharded_is_refused_and_left_alone(case):
    make, changes, error, text = REFUSED[case]
    model = make()
    variables: list[Any] = [model.kernel, model.bias]
    before = [(type(v), v.get_raw_value()) for v in variables]
    kwargs = {"mesh": mesh_of(), "dp_mesh_dims": DIMS["both"], **changes}
    with pytest.raises(error, match=text):
        fully_shard(model, **kwargs)
    assert type(model) is nnx.Linear
    for (kind, value), v in zip(before, variables, strict=True):
        assert type(v) is kind
        assert v.get_raw_value() is value
    distribute(model, mesh_of(), rows)
    fully_shard(model, mesh=mesh_of(), dp_mesh_dims=DIMS["both"])
    assert local_shape(model.kernel) == (2, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "at least one of shard and replicate must name a mesh axis"),
        ({"shard": "s", "replicate": "s"}, ValueError, "'s' is named in both"),
        (
            {"shard": ("r", "s"), "replicate": ("s",)},
            ValueError,
            "axis 's' is named in both shard and replicate",
        ),
        ({"shard": ()}, ValueError, "shard is an empty tuple"),
        ({"shard": "s", "replicate": ()}, ValueError, "replicate is an empty tuple"),
        ({"shard": ["s"]}, TypeError, "shard must be an axis name or a tuple"),
    ],
)
def test_roles_that_make_no_sense_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        DataParallelMeshDims(**arguments)


def test_a_users_own_program_cannot_bring_rows_into_order():
    """JAX cuts a dim over the axes of the program first, not within the pieces."""
    model, x = linear(rows), jnp.ones((8, 8))
    graphdef, state = nnx.split(model)

    def run(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    own = jax.shard_map(
        run,
        mesh=mesh_of(),
        in_specs=(P("s"), P(("r", "s"))),
        out_specs=P(("r", "s")),
        axis_names={"r", "s"},
        check_vma=False,
    )
    with pytest.raises(RuntimeError, match=r"'bias' is cut on one dim over \('s',\)"):
        jax.jit(own)(state, x)


def test_a_users_own_program_may_run_beside_a_tp_axis():
    model, x = linear(columns), helpers.regression_batch(8)[0][:, :8]
    graphdef, state = nnx.split(model)

    def run(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    own = jax.shard_map(
        run,
        mesh=mesh_of(),
        in_specs=(P("s"), P(("r", "s"))),
        out_specs=P(("r", "s")),
        axis_names={"r", "s"},
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(own)(state, x), plain()(x), 1e-5, 1e-6)


def test_an_ignored_parameter_stays_cut_over_the_other_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("r", "s", "tp"))
    model: Any = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    cut = NamedSharding(mesh, P(None, "tp"))
    whole = NamedSharding(mesh, P())
    model.kernel[...] = jax.device_put(model.kernel[...], cut)
    model.bias[...] = jax.device_put(model.bias[...], whole)
    dims = fsdp_jax.DataParallelMeshDims(shard="s", replicate="r")
    fully_shard(
        model, mesh=mesh, dp_mesh_dims=dims, ignored_params=nnx.PathContains("kernel")
    )
    assert model.kernel.sharding.spec == P(None, "tp")
    x = jnp.arange(64.0).reshape(8, 8) / 64
    grads = fsdp_jax.grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)
    plain = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    want = nnx.jit(nnx.grad(lambda m, x: jnp.mean(m(x) ** 2)))(plain, x)
    np.testing.assert_allclose(
        np.asarray(grads.kernel[...]), np.asarray(want.kernel[...]), rtol=1e-5
    )
    assert model.kernel.sharding.spec == P(None, "tp")
