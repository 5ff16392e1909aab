"""Which mesh a module is sharded over, and which meshes are refused."""

import itertools
import pickle
import random
import re
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fsdp_jax
from fsdp_jax import (
    DataParallelMeshDims,
    Shard,
    _collectives,
    _mesh,
    fully_shard,
    local_shape,
)
from fsdp_jax._mesh import MeshInfo, resolve_mesh
from tests import helpers

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def linear() -> Any:
    return nnx.Linear(16, 8, rngs=nnx.Rngs(0))


def make_mesh(kind: AxisType, name: str = "data", count: int = 8) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), (name,), axis_types=(kind,))


def mesh_under(module: Any) -> Mesh:
    """The mesh that a sharded module's parameters lie on."""
    sharding = module.kernel[...].sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def test_without_a_mesh_all_devices_form_one_axis_named_fsdp():
    module = fully_shard(linear())
    assert mesh_under(module) == Mesh(np.array(jax.devices()), ("fsdp",))
    assert local_shape(module.kernel) == (2, 8)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
def test_the_ambient_mesh_is_the_default(kind):
    mesh, module = make_mesh(kind, count=4), linear()
    with jax.set_mesh(mesh):
        fully_shard(module)
    assert mesh_under(module) == mesh
    assert local_shape(module.kernel) == (4, 8)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
def test_the_mesh_argument_goes_before_the_ambient_mesh(kind):
    mesh, module = make_mesh(kind, "mine", 2), linear()
    with jax.set_mesh(make_mesh(kind)):
        fully_shard(module, mesh=mesh)
    assert mesh_under(module) == mesh


@pytest.mark.parametrize(
    ("count", "kind"), [(1, AUTO), (1, EXPLICIT), (4, AUTO), (8, EXPLICIT)]
)
def test_a_module_lies_on_the_devices_of_its_mesh_and_computes_alike(count, kind):
    x = helpers.regression_batch()[0]
    expected = linear()(x)
    mesh = make_mesh(kind, count=count)
    module = fully_shard(linear(), mesh=mesh)
    assert local_shape(module.kernel) == (16 // count, 8)
    assert local_shape(module.bias) == (8 // count,)
    assert module.kernel.shape == (16, 8)
    assert set(module.kernel[...].devices()) == set(jax.devices()[:count])
    np.testing.assert_allclose(module(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
@pytest.mark.parametrize("ambient", [False, True], ids=["argument", "ambient"])
def test_a_module_computes_alike_under_jit_on_either_kind_of_axis(kind, ambient):
    x = helpers.regression_batch()[0]
    expected = linear()(x)
    mesh, module = make_mesh(kind), linear()
    with jax.set_mesh(mesh) if ambient else nullcontext():
        fully_shard(module, mesh=None if ambient else mesh)
        found = nnx.jit(lambda m, x: m(x))(module, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert module.kernel[...].sharding.spec == P("data")


def test_the_order_of_devices_on_the_mesh_is_kept():
    mesh = Mesh(np.array(jax.devices()[::-1]), ("fsdp",))
    module = fully_shard(linear(), mesh=mesh)
    full = np.asarray(linear().kernel[...])
    for shard in module.kernel[...].addressable_shards:
        row = 2 * (7 - shard.device.id)
        np.testing.assert_array_equal(shard.data, full[row : row + 2])


def test_on_one_device_every_shard_is_the_whole_parameter():
    module = fully_shard(linear(), mesh=helpers.mesh_of(1))
    assert local_shape(module.kernel) == module.kernel.shape
    assert type(module).__name__ == "LinearFSDPModule"
    module.unshard()
    module.reshard()
    assert local_shape(module.kernel) == module.kernel.shape


def two_axes() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("replicate", "shard"))


def three_axes() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("mesh", "error", "text"),
    [
        (three_axes, ValueError, r"mesh has 3 axes.*'a', 'b', 'c'"),
        (lambda: Mesh(np.array(jax.devices()[0]), ()), ValueError, "mesh has 0 axes"),
        (lambda: two_axes().abstract_mesh, TypeError, "mesh must be .*AbstractMesh"),
        (jax.devices, TypeError, "mesh must be a jax.sharding.Mesh, got list"),
        (lambda: "fsdp", TypeError, "mesh must be a jax.sharding.Mesh, got str"),
        (lambda: 8, TypeError, "mesh must be a jax.sharding.Mesh, got int"),
    ],
)
def test_a_mesh_that_cannot_be_used_is_refused(mesh, error, text):
    module = linear()
    with pytest.raises(error, match=text):
        fully_shard(module, mesh=mesh())
    assert type(module) is nnx.Linear
    assert local_shape(fully_shard(module).kernel) == (2, 8)


def test_an_ambient_mesh_that_cannot_be_used_is_refused_as_such():
    module = linear()
    with jax.set_mesh(three_axes()):
        with pytest.raises(ValueError, match=r"set by jax\.set_mesh"):
            fully_shard(module)
    assert type(module) is nnx.Linear


@pytest.mark.parametrize("ambient", [False, True], ids=["argument", "ambient"])
def test_of_two_axes_the_first_replicates_and_the_second_cuts(ambient):
    mesh, module = two_axes(), linear()
    with jax.set_mesh(mesh) if ambient else nullcontext():
        fully_shard(module, mesh=None if ambient else mesh)
    assert mesh_under(module) == mesh
    assert module.kernel[...].sharding.spec == P("shard")
    assert local_shape(module.kernel) == (4, 8)


@pytest.mark.parametrize(
    ("dims", "spec", "rows"),
    [
        (DataParallelMeshDims("shard", "replicate"), P("shard"), 4),
        (DataParallelMeshDims("replicate", "shard"), P("replicate"), 8),
        (DataParallelMeshDims(("shard", "replicate")), P(("shard", "replicate")), 2),
        (DataParallelMeshDims(replicate=("shard", "replicate")), P(), 16),
    ],
)
def test_the_dims_say_which_axes_cut_and_which_replicate(dims, spec, rows):
    module = fully_shard(linear(), mesh=two_axes(), dp_mesh_dims=dims)
    assert module.kernel[...].sharding == NamedSharding(two_axes(), spec)
    assert local_shape(module.kernel) == (rows, 8)


@pytest.mark.parametrize(
    ("dims", "error", "text"),
    [
        ("shard", TypeError, "dp_mesh_dims must be.*got str"),
        (
            DataParallelMeshDims("fsdp"),
            ValueError,
            r"'fsdp', which is not found in mesh: it has the axes.*replicate",
        ),
        (DataParallelMeshDims(("shard", "z")), ValueError, "names the axis 'z'"),
        (DataParallelMeshDims("shard", "z"), ValueError, "names the axis 'z'"),
        (DataParallelMeshDims(replicate="z"), ValueError, "names the axis 'z'"),
        (
            DataParallelMeshDims("shard"),
            ValueError,
            r"'bias' is not distributed.*\('replicate',\) have no data role",
        ),
    ],
)
def test_dims_that_cannot_be_used_are_refused(dims, error, text):
    module = linear()
    with pytest.raises(error, match=text):
        fully_shard(module, mesh=two_axes(), dp_mesh_dims=dims)
    assert type(module) is nnx.Linear


def test_an_axis_of_one_device_needs_no_role():
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("fsdp", "other"))
    dims = DataParallelMeshDims("fsdp")
    module = fully_shard(linear(), mesh=mesh, dp_mesh_dims=dims)
    assert local_shape(module.kernel) == (2, 8)


# Several sharding axes.


def axes_of(*sizes: int, reverse: bool = False, **kwargs: Any) -> Any:
    """A mesh of these sizes, and the dims that shard over all of its axes."""
    names = ("x", "y", "z")[: len(sizes)]
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), names, **kwargs)
    return mesh, DataParallelMeshDims(names[::-1] if reverse else names)


def shard_over(model: Any, mesh: Mesh, dims: Any, **kwargs: Any) -> Any:
    return helpers.shard_blocks(model, mesh=mesh, dp_mesh_dims=dims, **kwargs)


def layout_of(module: Any) -> dict[int, np.ndarray]:
    shards = module.kernel[...].addressable_shards
    return {shard.device.id: np.asarray(shard.data) for shard in shards}


SIZES = [(2, 4), (4, 2), (2, 2, 2), (1, 8), (8, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_shards_over_several_axes_lie_as_over_one(sizes, mesh8):
    mesh, dims = axes_of(*sizes)
    found = layout_of(fully_shard(linear(), mesh=mesh, dp_mesh_dims=dims))
    wanted = layout_of(fully_shard(linear(), mesh=mesh8))
    assert list(found) == list(wanted)
    for device, shard in wanted.items():
        np.testing.assert_array_equal(found[device], shard)


def test_the_order_of_the_axes_is_the_order_of_the_shards():
    mesh, dims = axes_of(2, 4, reverse=True)
    found = layout_of(fully_shard(linear(), mesh=mesh, dp_mesh_dims=dims))
    full = np.asarray(linear().kernel[...])
    for device, shard in found.items():
        x, y = divmod(device, 4)
        row = 2 * (2 * y + x)
        np.testing.assert_array_equal(shard, full[row : row + 2])


def train_step(model: Any) -> Any:
    """Loss and gradients of a step, and what the model is after it."""
    optimizer = fsdp_jax.Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = fsdp_jax.value_and_grad(helpers.mean_square)(model, x, y)
        optimizer.update(model, grads)
        return loss, grads

    batch = fsdp_jax.shard_batch(helpers.regression_batch(), model)
    return step(model, optimizer, *batch), nnx.state(model)


@pytest.fixture(scope="module")
def over_one_axis() -> Any:
    """A training step over one axis of eight devices."""
    model = helpers.MLP(nnx.Rngs(0))
    return train_step(helpers.shard_blocks(model, mesh=helpers.mesh_of(8)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
def test_a_step_over_several_axes_is_a_step_over_one(sizes, reverse, over_one_axis):
    mesh, dims = axes_of(*sizes, reverse=reverse)
    model = shard_over(helpers.MLP(nnx.Rngs(0)), mesh, dims)
    helpers.assert_trees_close(train_step(model), over_one_axis)


def test_a_step_over_several_explicit_axes(over_one_axis):
    mesh, dims = axes_of(2, 4, axis_types=(EXPLICIT, EXPLICIT))
    model = shard_over(helpers.MLP(nnx.Rngs(0)), mesh, dims)
    helpers.assert_trees_close(train_step(model), over_one_axis)


def axes_used(model: Any, name: str) -> list[tuple[str, ...]]:
    """Mesh axes of each collective of a kind, in program order."""
    step = fsdp_jax.value_and_grad(helpers.mean_square)
    found = helpers.equations_of(step, model, *helpers.regression_batch())
    names = [e.params["axis_name"] for e in found if e.primitive.name == name]
    return [axes if isinstance(axes, tuple) else (axes,) for axes in names]


@pytest.mark.parametrize(
    ("sizes", "reverse", "gathers"),
    [
        # Minor axes first.
        ((2, 4), False, ["y", "x"]),
        ((4, 2), False, ["y", "x"]),
        ((2, 4), True, ["x", "y"]),
        ((2, 2, 2), False, ["z", "y", "x"]),
        ((2, 2, 2), True, ["x", "y", "z"]),
        ((1, 8), False, ["y"]),
        ((8, 1), False, ["x"]),
    ],
)
def test_one_collective_per_axis(sizes, reverse, gathers):
    mesh, dims = axes_of(*sizes, reverse=reverse)
    model: Any = fully_shard(linear(), mesh=mesh, dp_mesh_dims=dims)
    model.set_reshard_after_forward(False)
    assert axes_used(model, "all_gather") == [(axis,) for axis in gathers]
    assert axes_used(model, "reduce_scatter") == [(axis,) for axis in gathers[::-1]]


@pytest.mark.parametrize("free", [None, True, False])
def test_counts_are_those_of_one_axis_times_the_axes(free, mesh8):
    def counts(mesh, dims):
        model = helpers.MLP(nnx.Rngs(0))
        shard_over(model, mesh, dims, reshard_after_forward=free)
        step = fsdp_jax.value_and_grad(helpers.mean_square)
        text = helpers.lowered_text(step, model, *helpers.regression_batch())
        return helpers.count_collectives(text)

    one = counts(mesh8, None)
    three = counts(*axes_of(2, 2, 2))
    assert three["all_gather"] == 3 * one["all_gather"] > 0
    assert three["reduce_scatter"] == 3 * one["reduce_scatter"] > 0
    assert three["all_reduce"] == one["all_reduce"]


class Products(nnx.Module):
    """A product with each kernel of some shapes."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        draws = [jax.random.normal(k, shape) for k, shape in zip(keys, shapes)]
        self.kernels = nnx.List([nnx.Param(draw) for draw in draws])

    def __call__(self, x: jax.Array) -> jax.Array:
        products = [x[:, : k.shape[0]] @ k[...] for k in self.kernels]
        return jnp.concatenate([jnp.tanh(p) for p in products], axis=1)


@pytest.fixture
def any_length(monkeypatch):
    """Rows of any length count as long ones, so that small kernels do."""
    monkeypatch.setattr(_collectives, "_SHORT", 0)


# Rows of the second stage, of two and of sixteen: in tiles if they divide by 128.
TILED = [(16, 128), (16, 384), (128, 256)]
WHOLE = [(16, 130), (136, 128), (256, 128), (128, 100)]


def products(
    shapes: Any, mesh: Mesh, dims: DataParallelMeshDims | None = None, *, cut: int = 0
) -> Any:
    model: Any = fully_shard(
        Products(shapes),
        mesh=mesh,
        dp_mesh_dims=dims,
        shard_placement_fn=lambda _: Shard(cut),
    )
    model.set_packing_threshold_bytes(0)
    return model


def mean_of_squares(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def gradients_of_products(model: Any) -> Any:
    x = jax.random.normal(jax.random.key(1), (8, 256))
    return nnx.as_pure(nnx.jit(fsdp_jax.grad(mean_of_squares))(model, x))


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.usefixtures("any_length")
def test_few_rows_are_summed_as_over_one_axis(cut, mesh8):
    shapes = [(16, 1024)] if cut else [(16, 128), (16, 384), (16, 130)]
    found = gradients_of_products(products(shapes, *axes_of(2, 4), cut=cut))
    one = gradients_of_products(products(shapes, mesh8, cut=cut))
    helpers.assert_trees_close(found, one)


@pytest.mark.usefixtures("any_length")
def test_numbers_do_not_depend_on_tiles(monkeypatch):
    model = products([(16, 384)], *axes_of(2, 4))
    tiled = gradients_of_products(model)
    monkeypatch.setattr(_collectives, "_FEW_ROWS", 0)
    assert scattered(model) == [(16, 384), (8, 384)]
    whole = gradients_of_products(model)
    np.testing.assert_array_equal(*jax.tree.leaves((tiled, whole)))


def scattered(model: Any) -> list[tuple[int, ...]]:
    """Shapes of what the reduce-scatters of a gradient program are given."""
    x = np.ones((8, 256), np.float32)
    text = helpers.lowered_text(fsdp_jax.grad(mean_of_squares), model, x)
    operands = re.findall(
        r"stablehlo\.reduce_scatter.*?\}\) : \(tensor<([\dx]+)xf32>\)", text, re.DOTALL
    )
    return [tuple(int(size) for size in o.split("x")) for o in operands]


@pytest.mark.parametrize("shape", TILED)
@pytest.mark.usefixtures("any_length")
def test_few_rows_travel_as_tiles_after_the_first_axis(shape, mesh8):
    rows, width = shape
    tiles = (rows // 2, width // 128, 128)
    assert scattered(products([shape], *axes_of(2, 4))) == [shape, tiles]
    assert scattered(products([shape], mesh8)) == [shape]
    reverse = axes_of(2, 4, reverse=True)
    assert scattered(products([shape], *reverse)) == [shape, (rows // 4, *tiles[1:])]


@pytest.mark.parametrize("width", [14336, 14464])
def test_only_long_rows_travel_as_tiles(width):
    found = scattered(products([(16, width)], *axes_of(2, 4)))
    tiles = (8, width // 128, 128)
    assert found == [(16, width), tiles if width > 14336 else (8, width)]


@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.usefixtures("any_length")
def test_other_rows_travel_as_they_are(shape):
    rows, width = shape
    found = scattered(products([shape], *axes_of(2, 4)))
    assert found == [shape, (rows // 2, width)]


@pytest.mark.usefixtures("any_length")
def test_rows_of_a_buffer_travel_as_tiles():
    model = products([(16, 128), (16, 384)], *axes_of(2, 4))
    model.set_packing_threshold_bytes(10**6)
    assert scattered(model) == [(8, 1024), (4, 8, 128)]


@pytest.mark.usefixtures("any_length")
def test_another_cut_dim_travels_as_it_is():
    found = scattered(products([(16, 1024)], *axes_of(2, 4), cut=1))
    assert found == [(16, 1024), (16, 512)]


def test_other_entries_work_over_several_axes(over_one_axis):
    model: Any = helpers.MLP(nnx.Rngs(0))
    shard_over(model, *axes_of(2, 4))
    x, _ = fsdp_jax.shard_batch(helpers.regression_batch(), model)
    assert x.sharding.shard_shape(x.shape) == (2, 16)
    expected = helpers.MLP(nnx.Rngs(0))(x)
    forward = nnx.jit(fsdp_jax.shard_map(lambda model, x: model(x)))
    for found in (model(x), forward(model, x)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    model.unshard()
    assert local_shape(model.layers[0].kernel) == (2, 32)
    model.reshard()


def test_state_and_pickles_pass_between_kinds_of_meshes(mesh8):
    model: Any = shard_over(helpers.MLP(nnx.Rngs(0)), *axes_of(2, 4))
    again = pickle.loads(pickle.dumps(model))
    kernel = again.layers[0].kernel
    assert kernel[...].sharding.spec == P(("x", "y"))
    assert local_shape(kernel) == (2, 32)
    helpers.assert_trees_close(again, model)
    other: Any = helpers.MLP(nnx.Rngs(1))
    helpers.shard_blocks(other, mesh=mesh8)
    other.load_state_dict(model.state_dict())
    helpers.assert_trees_close(other, model)
    assert other.layers[0].kernel[...].sharding.spec == P("fsdp")
    back: Any = shard_over(helpers.MLP(nnx.Rngs(2)), *axes_of(2, 2, 2, reverse=True))
    back.load_state_dict(other.state_dict())
    helpers.assert_trees_close(back, model)
    assert back.layers[0].kernel[...].sharding.spec == P(("z", "y", "x"))


def test_a_dim_that_only_one_axis_divides_stays_whole():
    mesh, dims = axes_of(2, 4)
    module = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    assert local_shape(module.kernel) == (4, 2)


# `make_mesh`.


def test_make_mesh_on_anything_but_tpus_has_one_axis():
    mesh, dims = fsdp_jax.make_mesh()
    assert mesh == Mesh(np.array(jax.devices()), ("fsdp",))
    assert dims.shard_names == ("fsdp",)
    assert dims.replicate_names == ()
    mesh, dims = fsdp_jax.make_mesh(jax.devices()[5:2:-1])
    assert [d.id for d in mesh.devices] == [5, 4, 3]
    square = np.array(jax.devices()).reshape(2, 4)
    assert fsdp_jax.make_mesh(square)[0].devices.shape == (8,)
    with pytest.raises(ValueError, match="no devices"):
        fsdp_jax.make_mesh([])
    with pytest.raises(TypeError, match="expected devices such as .*'x'"):
        fsdp_jax.make_mesh("x")


class Chip:
    """What `make_mesh` looks at in a TPU device."""

    platform = "tpu"
    core_on_chip = 0
    process_index = 0

    def __init__(self, number: int, kind: str, coords: tuple[int, ...], piece: int):
        self.id, self.device_kind = number, kind
        self.coords, self.slice_index = coords, piece

    def __repr__(self) -> str:
        return f"Chip{(self.slice_index, *self.coords)}"


def chips(x: int, y: int, z: int = 1, slices: int = 1, kind: str = "TPU v5 lite"):
    places = itertools.product(range(slices), range(z), range(y), range(x))
    return [
        Chip(i, kind, (cx, cy, cz), piece)
        for i, (piece, cz, cy, cx) in enumerate(places)
    ]


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mesh that takes devices that are none."""

    class Layout:
        def __init__(self, devices, names):
            self.devices, self.axis_names = np.asarray(devices), names

    monkeypatch.setattr(_mesh, "Mesh", Layout)


TORI = [
    (chips(4, 4), (4, 4), ("fsdp_x", "fsdp_y")),
    (chips(2, 4), (2, 4), ("fsdp_x", "fsdp_y")),
    (chips(4, 2), (4, 2), ("fsdp_x", "fsdp_y")),
    (chips(2, 2, 4, kind="TPU v5"), (2, 2, 4), ("fsdp_x", "fsdp_y", "fsdp_z")),
    (chips(4, 1, 4, kind="TPU v5"), (4, 4), ("fsdp_x", "fsdp_z")),
    (chips(8, 1), (8,), ("fsdp",)),
    (chips(1, 8), (8,), ("fsdp",)),
    (chips(1, 1), (1,), ("fsdp",)),
    (chips(2, 4, slices=2), (2, 2, 4), ("slice", "fsdp_x", "fsdp_y")),
    (chips(8, 1, slices=2), (2, 8), ("slice", "fsdp_x")),
    (chips(1, 1, slices=4), (4,), ("fsdp",)),
]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("devices", "shape", "names"), TORI)
def test_make_mesh_has_an_axis_per_dim_of_the_torus(
    devices, shape, names, shuffled, layouts
):
    devices = list(devices)
    if shuffled:
        random.Random(0).shuffle(devices)
    mesh, dims = fsdp_jax.make_mesh(devices)
    assert mesh.devices.shape == shape
    assert mesh.axis_names == names
    last = [name for name in names if name == "slice"]  # after the rings
    assert dims.shard_names == (*[n for n in names if n not in last], *last)
    assert {d.id for d in mesh.devices.flat} == {d.id for d in devices}
    if len(names) == 1:
        return
    # Along an axis only its own coordinate changes.
    for axis, name in enumerate(names):
        line = np.moveaxis(mesh.devices, axis, 0).reshape(shape[axis], -1)[:, 0]
        places = [(d.slice_index, *d.coords) for d in line]
        changing = [i for i, along in enumerate(zip(*places)) if len(set(along)) > 1]
        assert changing == [["slice", "fsdp_x", "fsdp_y", "fsdp_z"].index(name)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_make_mesh_lays_devices_that_fill_no_box_out_flat(shuffled, layouts):
    devices = chips(4, 4)[:-1]
    if shuffled:
        random.Random(0).shuffle(devices)
    mesh, dims = fsdp_jax.make_mesh(devices)
    assert mesh.devices.shape == (15,)
    assert dims.shard_names == ("fsdp",)
    assert list(mesh.devices) == devices


def test_make_mesh_keeps_the_cores_of_a_chip_together(layouts):
    devices = chips(2, 2, kind="TPU7x") + chips(2, 2, kind="TPU7x")
    for core, device in enumerate(devices):
        device.id, device.core_on_chip = core, core // 4
    mesh, dims = fsdp_jax.make_mesh(devices)
    assert dims.shard_names == ("fsdp_x", "fsdp_y", "fsdp_core")
    assert all(a.coords == b.coords for a, b in mesh.devices.reshape(4, 2))


@pytest.mark.needs_tpu_compiler
@pytest.mark.parametrize(
    ("topology", "sizes"), [("v5e:2x4", (2, 4)), ("v5p:2x2x4", (2, 2, 4))]
)
def test_make_mesh_follows_the_torus_of_an_absent_slice(topology, sizes):
    def build(devices):
        mesh, dims = fsdp_jax.make_mesh(devices)
        assert mesh.devices.shape == sizes
        assert dims.shard_names == ("fsdp_x", "fsdp_y", "fsdp_z")[: len(sizes)]
        for place, device in np.ndenumerate(mesh.devices):
            assert tuple(device.coords)[: len(sizes)] == place
        spec = NamedSharding(mesh, P(dims.shard_names))
        x = jax.ShapeDtypeStruct((64, 8), np.float32, sharding=spec)
        return jax.jit(lambda x: x + 1), (x,)

    fsdp_jax.plan(build, topology)


def test_sharding_inside_a_per_device_program_is_refused(mesh8):
    module = linear()
    errors = []

    def body(x):
        with pytest.raises(ValueError, match="per-device program") as caught:
            fully_shard(module, mesh=mesh8)
        errors.append(caught.value)
        return x

    jax.shard_map(body, mesh=mesh8, in_specs=P("fsdp"), out_specs=P("fsdp"))(
        np.ones((8, 2), np.float32)
    )
    assert len(errors) > 0
    assert type(module) is nnx.Linear


def test_the_ambient_mesh_has_no_devices_inside_jit_and_the_error_says_what_to_do():
    with jax.set_mesh(make_mesh(AUTO)):

        @jax.jit
        def program(x):
            fully_shard(linear())
            return x

        with pytest.raises(ValueError, match="Pass mesh= explicitly"):
            program(1.0)


@pytest.mark.parametrize(
    ("ndim", "dim", "spec"),
    [
        (1, 0, P("fsdp")),
        (2, 0, P("fsdp")),
        (2, -1, P(None, "fsdp")),
        (3, -2, P(None, "fsdp")),
        (3, -3, P("fsdp")),
        (2, None, P()),
    ],
)
def test_the_spec_of_a_cut_dim(mesh8, ndim, dim, spec):
    info = MeshInfo(mesh8, ("fsdp",))
    assert info.spec(ndim, dim) == spec
    assert info.sharding(ndim, dim) == NamedSharding(mesh8, spec)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
def test_a_mesh_survives_pickling_with_its_devices_and_axis_types(kind):
    mesh = Mesh(np.array(jax.devices()[::-1][:4]), ("data",), axis_types=(kind,))
    info = resolve_mesh(mesh, None)
    again = pickle.loads(pickle.dumps(info))
    assert again == info
    assert again.mesh.axis_types == (kind,)
    assert again.num_shards == 4
    assert again.explicit == (kind is EXPLICIT)


def test_code_is_a_per_device_program_only_where_the_shard_axis_is_manual(mesh8):
    info = MeshInfo(mesh8, ("fsdp",))
    seen = []

    def body(x):
        seen.append(info.per_device())
        return x

    x = np.ones((8, 2), np.float32)
    assert not info.per_device()
    jax.jit(body)(x)
    jax.shard_map(body, mesh=mesh8, in_specs=P("fsdp"), out_specs=P("fsdp"))(x)
    assert seen[0] is False
    assert seen[-1] is True


def test_a_per_device_program_of_another_size_is_refused(mesh8):
    info = MeshInfo(mesh8, ("fsdp",))

    def body(x):
        info.per_device()
        return x

    program = jax.shard_map(
        body, mesh=helpers.mesh_of(4), in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    with pytest.raises(ValueError, match=r"sizes \(8,\).*sizes \(4,\)"):
        program(np.ones((8, 2), np.float32))
