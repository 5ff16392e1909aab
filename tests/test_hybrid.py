"""Meshes with replicating axes: shards in several copies, batches over all devices."""

import copy
import functools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import fsdp_jax
from fsdp_jax import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    Shard,
    fully_shard,
    local_shape,
)
from tests import helpers

GROUPS = 3  # of the MLP; the root's own is empty


def mesh_of(sizes: tuple[int, ...], names: str = "rs", kind: str = "Auto") -> Mesh:
    """A mesh over all devices whose axes have names of one letter."""
    if kind == "make_mesh":
        return jax.make_mesh(sizes, tuple(names))
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[:count]).reshape(sizes)
    types = (AxisType[kind],) * len(sizes)
    return Mesh(devices, tuple(names), axis_types=types)


def dims(shard: str = "", replicate: str = "") -> DataParallelMeshDims:
    """Roles of axes by their letters."""
    return DataParallelMeshDims(tuple(shard) or None, tuple(replicate) or None)


def plan(*mesh: Any, shard: str = "", replicate: str = "") -> dict[str, Any]:
    """The mesh arguments of `fully_shard`."""
    roles = dims(shard, replicate) if shard or replicate else None
    return {"mesh": mesh_of(*mesh), "dp_mesh_dims": roles}


HYBRID = plan((2, 4))
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "1x8": (plan((1, 8)), 8),
    "2x4": (plan((2, 4), "rs", "make_mesh"), 4),
    "4x2": (plan((4, 2)), 2),
    "8x1": (plan((8, 1)), 1),
    "by name": (plan((4, 2), "sr", "make_mesh", shard="s", replicate="r"), 4),
    "two shard": (plan((2, 2, 2), "abc", shard="ca", replicate="b"), 4),
    "two replicate": (plan((2, 2, 2), "abc", "Explicit", shard="b", replicate="ca"), 2),
    "replicate only": (plan((2, 2, 2), "abc", replicate="bca"), 1),
    "one axis replicates": (plan((8,), "r", "make_mesh", replicate="r"), 1),
}


def mlp(**kwargs: Any) -> Any:
    """The MLP, a group per layer; unsharded without arguments."""
    model = helpers.MLP(nnx.Rngs(0))
    return helpers.shard_blocks(model, **kwargs) if kwargs else model


@functools.cache
def trained() -> tuple[list[float], Any]:
    """Losses of five unsharded steps, and the model after them."""
    model, batch = mlp(), helpers.regression_batch()
    losses = helpers.train(
        model,
        nnx.value_and_grad,
        helpers.mean_square,
        batch,
        make_optimizer=helpers.clipped_adamw,
    )
    return losses, model


def assert_replicas_agree(model: Any) -> None:
    """All devices that hold a piece of a parameter hold the same one."""
    for name, x in model.state_dict().items():
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        pieces: dict[str, list[np.ndarray]] = {}
        for shard in x.addressable_shards:
            pieces.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for same in pieces.values():
            for piece in same[1:]:
                np.testing.assert_array_equal(piece, same[0], err_msg=name)


# --- parity with the unsharded model --------------------------------------------------


# Of layouts that are the same to a step, one trains.
TRAINED = ["8x1", "by name", "two shard", "two replicate"]


@pytest.mark.parametrize("layout", TRAINED)
def test_training_equals_the_unsharded_model(layout):
    where, num_shards = LAYOUTS[layout]
    model = mlp(**where)
    kernel = model.layers[0].kernel
    assert local_shape(kernel) == (16 // num_shards, 32)
    assert set(kernel[...].devices()) == set(jax.devices())
    optimizer = helpers.clipped_adamw(model)
    losses = helpers.train(
        model,
        fsdp_jax.value_and_grad,
        helpers.mean_square,
        fsdp_jax.shard_batch(helpers.regression_batch(), model),
        make_optimizer=lambda model: optimizer,
    )
    np.testing.assert_allclose(losses, trained()[0], rtol=1e-5)
    helpers.assert_trees_close(model, trained()[1])
    assert local_shape(kernel) == (16 // num_shards, 32)
    assert_replicas_agree(model)
    shardings = [p.sharding for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    moments = nnx.state(optimizer, nnx.optimizer.OptState)
    found = [x for x in jax.tree.leaves(moments) if x.ndim]
    for x, sharding in zip(found, [*shardings, *shardings], strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


@pytest.mark.slow
def test_a_transformer_has_the_unsharded_gradients():
    twin, model = (helpers.Transformer(nnx.Rngs(0), num_blocks=1) for _ in range(2))
    helpers.shard_blocks(model, **LAYOUTS["two shard"][0])
    ids, loss = helpers.token_batch(8, 4), helpers.next_token_loss
    got = nnx.jit(fsdp_jax.value_and_grad(loss))(model, ids)
    helpers.assert_trees_close(got, nnx.jit(nnx.value_and_grad(loss))(twin, ids))


@nnx.jit
def output_and_gradients(model: Any, x: jax.Array, y: jax.Array) -> Any:
    return model(x), nnx.value_and_grad(helpers.mean_square)(model, x, y)


@pytest.mark.parametrize("layout", ["4x2", "replicate only"])
def test_the_global_view_is_the_unsharded_model(layout):
    model, batch = mlp(**LAYOUTS[layout][0]), helpers.regression_batch()
    got = output_and_gradients(model, *fsdp_jax.shard_batch(batch, model))
    helpers.assert_trees_close(got, output_and_gradients(mlp(), *batch))
    gradient = got[1][1]["layers"][0]["kernel"].get_raw_value()
    assert gradient.sharding.is_equivalent_to(model.layers[0].kernel.sharding, 2)


@pytest.mark.parametrize("jit", [False, True])
def test_the_global_view_of_explicit_axes_is_the_unsharded_model(jit):
    where = plan((2, 4), "rs", "make_mesh")
    model, x = mlp(**where), helpers.regression_batch()[0]
    with jax.set_mesh(where["mesh"]):
        run = nnx.jit(lambda model, x: model(x)) if jit else type(model).__call__
        got = run(model, x)
    np.testing.assert_allclose(got, mlp()(x), rtol=1e-5, atol=1e-6)


# --- arguments, results and reductions ------------------------------------------------


class Affine(nnx.Module):
    """`x * scale + bias`."""

    def __init__(self, size: int = 8) -> None:
        self.scale = nnx.Param(jnp.arange(1.0, size + 1))
        self.bias = nnx.Param(jnp.ones(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...] + self.bias[...]


def affine(**where: Any) -> Any:
    return fully_shard(Affine(), **(where or HYBRID))


def rows(count: int = 16) -> jax.Array:
    return jax.random.normal(jax.random.key(5), (count, 8))


@pytest.mark.parametrize(
    ("sizes", "replicates"),
    [((2, 2), False), ((4, 1), False), ((1, 4), False), ((2, 2), True)],
)
def test_gradients_are_the_mean_over_both_axes(sizes, replicates):
    """Four devices with losses of gradient 1, 2, 3 and 4."""
    where = plan(sizes, "rs", replicate="rs") if replicates else plan(sizes)
    model = affine(**where)
    num_shards = 1 if replicates else sizes[1]
    assert local_shape(model.scale) == (8 // num_shards,)
    x = jnp.broadcast_to(jnp.arange(1.0, 5.0)[:, None], (4, 8))

    def loss(model, x):
        return jnp.sum(model(x))

    value, grads = fsdp_jax.value_and_grad(loss)(model, x)
    np.testing.assert_allclose(grads["scale"].get_raw_value(), np.full(8, 2.5))
    np.testing.assert_allclose(grads["bias"].get_raw_value(), np.ones(8))
    np.testing.assert_allclose(value, 8 + 2.5 * np.arange(1, 9).sum())
    summed = fsdp_jax.grad(loss, reduction="sum")(model, x)
    np.testing.assert_allclose(summed["scale"].get_raw_value(), np.full(8, 10.0))
    model.set_gradient_divide_factor(5.0)
    divided = fsdp_jax.grad(loss)(model, x)
    np.testing.assert_allclose(divided["scale"].get_raw_value(), np.full(8, 2.0))


@pytest.mark.parametrize("layout", ["2x4", "two replicate"])
def test_weighted_losses_and_aux_are_those_of_the_whole_batch(layout):
    model, x = affine(**LAYOUTS[layout][0]), rows()
    weights = jnp.arange(16.0)

    def loss(model, x, weights):
        error = (model(x) ** 2).sum(-1)
        return (error @ weights, weights.sum()), (error, error.mean())

    def whole(model, x, weights):
        (total, weight), aux = loss(model, x, weights)
        return total / weight, aux

    how: dict[str, Any] = {"has_aux": True}
    got = fsdp_jax.value_and_grad(loss, reduction="weighted", **how)(model, x, weights)
    expected = nnx.jit(nnx.value_and_grad(whole, **how))(Affine(), x, weights)
    helpers.assert_trees_close(got, expected)


@pytest.mark.parametrize(("reduction", "shard_axes"), [("mean", "s"), ("sum", "ts")])
def test_arguments_may_be_cut_over_some_of_the_data_axes(reduction, shard_axes):
    where = plan((2, 2, 2), "rst", shard="st", replicate="r")
    if shard_axes == "s":
        where = plan((2, 4), "rs", shard="s", replicate="r")
    model, x = affine(**where), rows()
    by_replica = jnp.linspace(1.0, 2.0, 16).reshape(2, 8)
    by_shard = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
    spec = P(None, tuple(where["dp_mesh_dims"].shard_names))
    step = fsdp_jax.value_and_grad(
        lambda m, x, a, b: jnp.mean((m(x) * a * b[:, 0]) ** 2),
        argnums=(0, 2, 3),
        reduction=reduction,
        in_specs=(None, P("r"), spec),
    )

    def whole(model, x, by_replica, by_shard):
        pieces = (model(x)).reshape(2, 4, 2, 8)  # replica, shard, row, feature
        cut = by_replica[:, None, None] * by_shard.T[None, :, None]
        each = jnp.mean((pieces * cut) ** 2, axis=(2, 3))
        return each.mean() if reduction == "mean" else each.sum()

    args = x, by_replica, by_shard
    expected = nnx.jit(nnx.value_and_grad(whole, argnums=(0, 2, 3)))(Affine(), *args)
    value, grads = nnx.jit(step)(model, *args)
    helpers.assert_trees_close((value, grads), expected)
    assert local_shape(grads[1]) == (1, 8)
    assert local_shape(grads[2]) == (8, 1)


def test_the_axes_of_a_spec_must_be_data_axes():
    step = fsdp_jax.value_and_grad(
        lambda m, x: jnp.mean(m(x)), in_specs=(P(("r", "tp")),)
    )
    with pytest.raises(ValueError, match=r"'tp'; the data axes.*\('r', 's'\)"):
        step(affine(), rows())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_and_results_are_cut_over_all_data_devices(layout):
    model, x = affine(**LAYOUTS[layout][0]), rows(8)
    placed = fsdp_jax.shard_batch({"x": x}, model)["x"]
    assert local_shape(placed) == (1, 8)
    assert len({str(s.index) for s in placed.addressable_shards}) == 8
    sizes = []

    def evaluate(model, x):
        sizes.append(x.shape)
        return model(x), model(x).mean()

    output, mean = fsdp_jax.shard_map(evaluate)(model, placed)
    assert set(sizes) == {(1, 8)}
    np.testing.assert_allclose(output, Affine()(x), rtol=1e-6)
    np.testing.assert_allclose(mean, Affine()(x).mean(), rtol=1e-5)
    with pytest.raises(ValueError, match=r"12 .*8 devices"):
        fsdp_jax.shard_map(evaluate)(model, rows(12))


def test_a_sum_over_some_axes_differs_along_the_others():
    """So that the float is averaged, and the integer refused."""
    model, x = affine(), rows(8)
    sums = fsdp_jax.shard_map(lambda m, x: jax.lax.psum(x.sum(), "s"))(model, x)
    np.testing.assert_allclose(sums, x.sum() / 2, rtol=1e-4)
    count = fsdp_jax.shard_map(lambda m, x: jax.lax.psum((x > 0).sum(), "s"))
    with pytest.raises(TypeError, match=r"differs between devices.*\('r', 's'\)"):
        count(model, x)
    count = fsdp_jax.shard_map(lambda m, x: jax.lax.psum((x > 0).sum(), ("s", "r")))
    assert int(count(model, x)) == int((x > 0).sum())


def test_results_may_be_cut_over_some_of_the_data_axes():
    model, x = affine(), rows(8)

    def evaluate(model, x):
        replica = jax.lax.axis_index("r")
        return model(x), jnp.full((3,), replica), jax.lax.psum(x.sum(), ("r", "s"))

    specs = P("s"), P("r"), P()
    run = fsdp_jax.shard_map(evaluate, in_specs=(P("s"),), out_specs=specs)
    output, replicas, total = run(model, x)
    np.testing.assert_allclose(output, Affine()(x), rtol=1e-6)
    assert local_shape(output) == (2, 8)
    np.testing.assert_array_equal(replicas, [0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(total, 2 * x.sum(), rtol=1e-4)


# --- other state ----------------------------------------------------------------------


class Stateful(nnx.Module):
    """Linear, BatchNorm, Dropout; a parameter that no number of devices divides."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.linear = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.gain = nnx.Param(jnp.full((3,), 2.0, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x))) * self.gain[...].sum()


@pytest.mark.parametrize("layout", ["two shard", "replicate only"])
def test_statistics_are_averaged_over_all_data_devices(layout):
    model = fully_shard(Stateful(nnx.Rngs(0)), **LAYOUTS[layout][0])
    assert local_shape(model.gain) == (3,)
    x, reference = rows(), Stateful(nnx.Rngs(0))
    step = fsdp_jax.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))
    _, grads = nnx.jit(step)(model, x)
    output = np.asarray(reference.linear(x))
    mean, pieces = output.mean(0), output.reshape(8, 2, 16)
    np.testing.assert_allclose(model.norm.mean[...], 0.5 * mean, 1e-5, 1e-6)
    variance = 0.5 + 0.5 * pieces.var(1).mean(0)
    np.testing.assert_allclose(model.norm.var[...], variance, 1e-5, 1e-6)
    assert_replicas_agree(model)
    assert grads["gain"].get_raw_value().sharding.is_fully_replicated

    outputs = np.concatenate([reference.norm(p) for p in np.split(output, 8)])
    grad = jax.jit(jax.grad(lambda gain: jnp.mean((outputs * gain.sum()) ** 2)))
    wanted = grad(reference.gain[...])
    np.testing.assert_allclose(grads["gain"].get_raw_value(), wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("layout", ["2x4", "two replicate"])
def test_masks_differ_on_all_devices_and_counters_advance_alike(layout):
    model: Any = Stateful(nnx.Rngs(0), rate=0.5)
    fully_shard(model, **LAYOUTS[layout][0])
    model.norm.use_running_average = True
    output = fsdp_jax.shard_map(lambda m, x: m(x))(model, rows(8))
    masks = {np.asarray(row == 0).tobytes() for row in np.asarray(output)}
    assert len(masks) == 8
    assert int(model.dropout.rngs.count[...]) == 1
    assert model.dropout.rngs.count.get_raw_value().sharding.is_fully_replicated
    assert_replicas_agree(model)


@pytest.mark.parametrize(
    ("layout", "reshard_after_forward"),
    [("2x4", True), ("two shard", False), ("replicate only", True)],
)
def test_ignored_and_whole_parameters_are_averaged(layout, reshard_after_forward):
    where = LAYOUTS[layout][0]

    def make() -> Any:
        model = helpers.MLP(nnx.Rngs(0))
        model.layers[2] = nnx.Linear(16, 7, use_bias=False, rngs=nnx.Rngs(3))
        return model

    def loss(model, x, y):
        return jnp.mean((model(x) - y[:, :7]) ** 2)

    model, reference = make(), make()
    kernel = model.layers[2].kernel
    helpers.shard_blocks(
        model,
        **where,
        ignored_params=[model.layers[1].kernel],
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda p: Shard(0),
    )
    assert local_shape(model.layers[1].kernel) == (32, 16)
    assert local_shape(kernel)[0] == local_shape(model.layers[1].bias)[0]
    batch = helpers.regression_batch()
    value, grads = nnx.jit(fsdp_jax.value_and_grad(loss))(model, *batch)
    expected = nnx.jit(nnx.value_and_grad(loss))(reference, *batch)
    helpers.assert_trees_close((value, grads), expected)


# --- what modules can do --------------------------------------------------------------


def test_state_passes_between_kinds_of_meshes():
    models = [mlp(**where) for where, _ in LAYOUTS.values()]
    first = models[0].state_dict()
    for i, model in enumerate(models[1:], 1):
        changed = {name: x + i for name, x in first.items()}
        before = {name: x.sharding for name, x in model.state_dict().items()}
        model.load_state_dict(changed)
        after = model.state_dict()
        assert {name: x.sharding for name, x in after.items()} == before
        for name, x in changed.items():
            np.testing.assert_array_equal(after[name], x)
        assert_replicas_agree(model)
        model.load_state_dict({n: np.asarray(x) for n, x in first.items()})
        np.testing.assert_array_equal(after["layers.0.bias"], changed["layers.0.bias"])
        assert_replicas_agree(model)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("by name", "pickle"),
        ("two replicate", "clone"),
        ("replicate only", "split and merge"),
    ],
)
def test_copies_are_sharded_alike(layout, how):
    model = mlp(**LAYOUTS[layout][0])
    again = {
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "clone": lambda: nnx.clone(model),
        "split and merge": lambda: nnx.merge(*nnx.split(model)),
    }[how]()
    for a, b in zip(
        again.state_dict().values(), model.state_dict().values(), strict=True
    ):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    step = nnx.jit(fsdp_jax.value_and_grad(helpers.mean_square))
    batch = helpers.regression_batch()
    helpers.assert_trees_close(step(again, *batch), step(model, *batch))
    with pytest.raises(Exception, match="deepcopy"):
        copy.deepcopy(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_description_counts_bytes_of_one_device_and_copies(layout):
    where, num_shards = LAYOUTS[layout]
    model = mlp(**where)
    description = fsdp_jax.describe(model)
    parameters = 16 * 32 + 32 + 32 * 16 + 16 + 16 * 8 + 8
    assert description.num_shards == num_shards
    assert description.num_replicas == 8 // num_shards
    assert description.total_bytes == 4 * parameters
    assert description.bytes_per_device == 4 * parameters // num_shards
    assert description.largest_group_bytes == 4 * (16 * 32 + 32)
    title = f"parameters over {num_shards} devices"
    if num_shards < 8:
        title += f", {8 // num_shards} copies of each shard"
    assert title in str(description)
    assert ("no axis of the mesh shards" in str(description)) == (
        "replicate" in layout and num_shards == 1
    )
    for row in description.rows:
        assert row.local_shape[0] == row.shape[0] // num_shards
    found = [local_shape(v) for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert [row.local_shape for row in description.rows] == found


@pytest.mark.parametrize("layout", ["8x1", "two shard", "two replicate"])
def test_unshard_and_reshard_in_and_outside_of_programs(layout):
    where, num_shards = LAYOUTS[layout]
    layer: Any = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model, x = fully_shard(layer, **where), rows(8)
    kernel = np.asarray(model.kernel[...])
    handle = model.unshard(async_op=True)
    handle.wait()
    assert local_shape(model.kernel) == (8, 8)
    np.testing.assert_array_equal(model.kernel[...], kernel)
    model.kernel[...] = model.kernel[...] * 2
    model.reshard()
    assert local_shape(model.kernel) == (8 // num_shards, 8)
    np.testing.assert_array_equal(model.kernel[...], 2 * kernel)
    assert_replicas_agree(model)

    def loss(model, x):
        model.unshard()
        assert local_shape(model.kernel) == (8, 8)
        product = x @ model.kernel[...]
        model.reshard()
        assert local_shape(model.kernel) == (8 // num_shards, 8)
        return jnp.mean((model(x) + product) ** 2)

    def whole(kernel):
        return jnp.mean((2 * x @ kernel) ** 2)

    value, grads = nnx.jit(fsdp_jax.value_and_grad(loss))(model, x)
    want = jax.value_and_grad(whole)(2 * kernel)
    helpers.assert_trees_close((value, grads["kernel"].get_raw_value()), want)


@pytest.mark.parametrize("how", ["scan", "remat", "scan_layers", "scan_layers remat"])
def test_stacked_layers_in_a_loop(how):
    where, _ = LAYOUTS["two shard" if "remat" in how else "by name"]
    model, batch = helpers.Stack(how), helpers.regression_batch()
    fully_shard(model.layers, **where, shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, **where)
    assert local_shape(model.layers.up.kernel) == (3, 4, 32)
    step = nnx.jit(fsdp_jax.value_and_grad(helpers.mean_square))
    helpers.assert_trees_close(step(model, *batch), helpers.gradients_of_stack())


def test_two_models_over_meshes_with_other_roles_do_not_mix():
    pair = [
        fully_shard(Affine(), **plan((2, 4), "rs", shard=s, replicate=r))
        for s, r in ("sr", "rs")
    ]
    with pytest.raises(ValueError, match="2 different meshes"):
        fsdp_jax.shard_map(lambda a, b, x: a(x) + b(x))(*pair, rows())


# --- what is communicated -------------------------------------------------------------


def all_reduced(text: str) -> list[int]:
    """Sizes of the arrays that StableHLO text all-reduces, sorted."""
    found = re.findall(
        r"stablehlo\.all_reduce.*?\}\) : \(tensor<([\dx]*)f32>\)", text, re.DOTALL
    )
    sizes = [[int(d) for d in dims.split("x") if d] for dims in found]
    return sorted(int(np.prod(size)) for size in sizes)


def step_text(model: Any, reduction: str = "mean") -> str:
    step = fsdp_jax.value_and_grad(helpers.mean_square, reduction=reduction)
    return helpers.lowered_text(step, model, *helpers.regression_batch())


GROUP_SIZES = [16 * 8 + 8, 32 * 16 + 16, 16 * 32 + 32]


@pytest.mark.parametrize(
    ("layout", "reshard_after_forward"),
    [*[(layout, False) for layout in LAYOUTS], ("2x4", True), ("two shard", True)],
)
def test_a_group_is_scattered_and_its_shard_all_reduced(layout, reshard_after_forward):
    where, num_shards = LAYOUTS[layout]
    text = step_text(mlp(**where, reshard_after_forward=reshard_after_forward))
    counts = helpers.count_collectives(text)
    axes = 2 if layout == "two shard" else int(num_shards > 1)
    again = GROUPS - 1 if reshard_after_forward else 0  # the first kernel is not read
    replicas = GROUPS if num_shards < 8 else 0
    assert counts == {
        "all_gather": axes * (GROUPS + again),
        "reduce_scatter": axes * GROUPS,
        "all_reduce": replicas + 1,  # the loss
        "all_to_all": 0,
    }
    shards = [size // num_shards for size in GROUP_SIZES] if replicas else []
    assert all_reduced(text) == [1, *shards]


@pytest.mark.parametrize("layout", ["2x4", "two replicate", "replicate only"])
def test_large_parameters_travel_alone(layout):
    where, num_shards = LAYOUTS[layout]
    model = mlp(**where)
    model.set_packing_threshold_bytes(0)
    text = step_text(model)
    shards = [s // num_shards for s in (8, 16, 32, 128, 512, 512)]
    assert all_reduced(text) == [1, *shards]
    scattered = helpers.count_collectives(text)["reduce_scatter"]
    assert scattered == (2 * GROUPS if num_shards > 1 else 0)


@pytest.mark.parametrize("layout", ["2x4", "8x1"])
def test_offloaded_groups_communicate_alike(layout):
    where, num_shards = LAYOUTS[layout]
    model = mlp(**where, offload_policy=CPUOffloadPolicy())
    text = step_text(model)
    assert all_reduced(text) == [1, *[size // num_shards for size in GROUP_SIZES]]
    scattered = helpers.count_collectives(text)["reduce_scatter"]
    assert scattered == (GROUPS if num_shards > 1 else 0)


def test_whole_and_ignored_parameters_cost_one_all_reduce_each():
    model = Stateful(nnx.Rngs(0))
    fully_shard(model, **HYBRID, ignored_params=[model.linear.bias])

    def step(model, x):
        return fsdp_jax.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)

    model.norm.use_running_average = True
    text = helpers.lowered_text(step, model, rows())
    group = 8 * 16 + 16 + 16
    assert all_reduced(text) == sorted([1, 3, 16, group // 4])


def test_evaluation_communicates_over_the_sharding_axes_alone():
    run = fsdp_jax.shard_map(lambda m, x: m(x))
    x = helpers.regression_batch()[0]
    text = helpers.lowered_text(run, mlp(**HYBRID), x)
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert len(gathers) == GROUPS
    for line in gathers:  # jax 0.12 names the axes, 0.10 lists the devices along them
        named = re.findall(r'axis_ref<name = "(\w+)">', line)
        assert named == ["s"] or "[[0, 1, 2, 3], [4, 5, 6, 7]]" in line, line
    assert helpers.count_collectives(text)["all_reduce"] == 0
    for layout in ("8x1", "replicate only"):
        text = helpers.lowered_text(run, mlp(**LAYOUTS[layout][0]), x)
        assert set(helpers.count_collectives(text).values()) == {0}
