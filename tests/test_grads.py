"""`value_and_grad` and `grad`: the value and the gradients of the unsharded model."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

STEPS = 5
TX = optax.adamw(1e-2, eps=1e-3)


class Zoo(nnx.Module):
    """One of each: Embed, Conv, attention, LayerNorm, Linear; token ids to logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(helpers.VOCABULARY, 16, rngs=rngs)
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, decode=False, rngs=rngs
        )
        self.head = nnx.Linear(16, helpers.VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + self.conv(x)
        x = x + self.attention(self.norm(x))
        return self.head(x)


class Normalized(nnx.Module):
    """Linear, BatchNorm, Linear."""

    def __init__(self, rngs: nnx.Rngs, axis_name: str | None) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, axis_name=axis_name, rngs=rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))


class Affine(nnx.Module):
    """`x * scale + bias`: gradients that can be worked out by hand."""

    def __init__(self, size: int = 8) -> None:
        self.scale = nnx.Param(jnp.arange(1.0, size + 1))
        self.bias = nnx.Param(jnp.ones(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...] + self.bias[...]


class Parent(nnx.Module):
    """Not sharded itself: two children, and a parameter of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.left = nnx.Linear(8, 16, rngs=rngs)
        self.right = nnx.Linear(16, 8, rngs=rngs)
        self.gain = nnx.Param(jnp.full((3,), 2.0, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.right(jnp.tanh(self.left(x))) * self.gain[...].sum()


def square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def rows(count: int = 16, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, 8))


def affine(num_devices: int = 8, **kwargs: Any) -> Any:
    return fully_shard(Affine(), mesh=helpers.mesh_of(num_devices), **kwargs)


def training_step(value_and_grad: Callable[..., Any], loss: Callable[..., Any]) -> Any:
    """A step that returns loss and gradients after it has updated the model."""

    def step(model, optimizer, *batch):
        value, grads = value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return value, grads

    return step


def run_steps(
    step: Callable[..., Any],
    model: Any,
    *batch: Any,
    make_optimizer: Callable[..., Any] = fsdp_jax.Optimizer,
) -> list[Any]:
    """Loss and gradients of each of five steps."""
    optimizer = make_optimizer(model, TX, wrt=nnx.Param)
    return [step(model, optimizer, *batch) for _ in range(STEPS)]


def pure_step(value_and_grad: Callable[..., Any], loss: Callable[..., Any]) -> Any:
    """The same step through `jax.jit`, split and merge."""

    @functools.partial(jax.jit, static_argnums=0)
    def pure(graphdef, state, *batch):
        model, optimizer = nnx.merge(graphdef, state)
        value, grads = value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return value, grads, nnx.state((model, optimizer))

    def step(model, optimizer, *batch):
        graphdef, state = nnx.split((model, optimizer))
        value, grads, state = pure(graphdef, state, *batch)
        nnx.update((model, optimizer), state)
        return value, grads

    return step


@functools.cache
def unsharded(name: str) -> tuple[list[Any], Any]:
    """Five steps of the unsharded model, and the model after them."""
    make, loss, batch = MODELS[name]
    model = make()
    step = nnx.jit(training_step(nnx.value_and_grad, loss))
    steps = run_steps(step, model, *batch(), make_optimizer=nnx.Optimizer)
    return steps, model


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "mlp": (
        lambda: helpers.MLP(nnx.Rngs(0)),
        helpers.mean_square,
        helpers.regression_batch,
    ),
    "zoo": (
        lambda: Zoo(nnx.Rngs(0)),
        helpers.next_token_loss,
        lambda: (helpers.token_batch(8),),
    ),
}


def assert_sharded_alike(grads: Any, model: Any, wrt: Any = nnx.Param) -> None:
    """Gradients have the parameters' paths, shapes, dtypes and shardings."""
    got, params = (dict(nnx.to_flat_state(s)) for s in (grads, nnx.state(model, wrt)))
    assert list(got) == list(params)
    for path, param in params.items():
        grad = got[path]
        assert (grad.shape, grad.dtype) == (param.shape, param.dtype), path
        assert grad.sharding.is_equivalent_to(param.sharding, param.ndim), path


def assert_same_training(steps: list[Any], model: Any, name: str) -> None:
    """Every loss, every gradient, and every parameter after the last step."""
    expected_steps, reference = unsharded(name)
    for (value, grads), (expected, expected_grads) in zip(
        steps, expected_steps, strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        helpers.assert_trees_close(grads, expected_grads)
        assert_sharded_alike(grads, model)
    helpers.assert_trees_close(model, reference)


# --- parity with the unsharded model --------------------------------------------------


def test_training_equals_the_unsharded_model(mesh8):
    make, loss, batch = MODELS["zoo"]
    model = make()
    fully_shard([model.conv, model.attention], mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    step = nnx.jit(training_step(fsdp_jax.value_and_grad, loss))
    assert_same_training(run_steps(step, model, *batch()), model, "zoo")


@pytest.mark.parametrize(
    ("mode", "reshard_after_forward"),
    [
        ("nnx.jit", True),
        ("eager", False),
        ("jax.jit", False),
        ("global view", True),
    ],
)
def test_every_way_to_run_a_step_is_the_same(mode, reshard_after_forward):
    make, loss, batch = MODELS["mlp"]
    model = helpers.shard_blocks(
        make(), mesh=helpers.mesh_of(4), reshard_after_forward=reshard_after_forward
    )
    step = {
        "nnx.jit": lambda: nnx.jit(training_step(fsdp_jax.value_and_grad, loss)),
        "jax.jit": lambda: pure_step(fsdp_jax.value_and_grad, loss),
        "eager": lambda: training_step(fsdp_jax.value_and_grad, loss),
        "global view": lambda: nnx.jit(training_step(nnx.value_and_grad, loss)),
    }[mode]()
    plain = nnx.Optimizer if mode == "global view" else fsdp_jax.Optimizer
    steps = run_steps(step, model, *batch(), make_optimizer=plain)
    assert_same_training(steps, model, "mlp")


def test_an_explicit_mesh_trains_alike():
    make, loss, batch = MODELS["mlp"]
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    model = helpers.shard_blocks(make(), mesh=mesh)
    step = nnx.jit(training_step(fsdp_jax.value_and_grad, loss))
    assert_same_training(run_steps(step, model, *batch()), model, "mlp")


@pytest.mark.parametrize("num_devices", [1, 4])
def test_synchronised_batch_norm_equals_the_full_batch(num_devices):
    reference = Normalized(nnx.Rngs(0), None)
    model = Normalized(nnx.Rngs(0), "fsdp")
    mesh = helpers.mesh_of(num_devices)
    fully_shard(model.norm, mesh=mesh)
    fully_shard(model, mesh=mesh)
    one_device = nnx.jit(nnx.value_and_grad(square))
    for seed in range(2):
        got = fsdp_jax.value_and_grad(square)(model, rows(seed=seed))
        expected = one_device(reference, rows(seed=seed))
        helpers.assert_trees_close(got, expected)
        helpers.assert_trees_close(model, reference)


def test_local_batch_norm_averages_the_statistics_of_the_devices():
    num_devices = 4
    model = Normalized(nnx.Rngs(0), None)
    mesh = helpers.mesh_of(num_devices)
    fully_shard(model.norm, mesh=mesh)
    fully_shard(model, mesh=mesh)
    reference = Normalized(nnx.Rngs(0), None)
    one_device = nnx.jit(nnx.value_and_grad(square))
    for seed in range(2):
        copies = [nnx.clone(reference) for _ in range(num_devices)]
        parts = jnp.split(rows(seed=seed), num_devices)
        results = [one_device(copy, part) for copy, part in zip(copies, parts)]
        states = [nnx.state(copy, nnx.BatchStat) for copy in copies]
        expected, statistics = jax.tree.map(
            lambda *leaves: sum(leaves) / num_devices, *zip(results, states)
        )
        nnx.update(reference, statistics)
        got = fsdp_jax.value_and_grad(square)(model, rows(seed=seed))
        helpers.assert_trees_close(got, expected)
        helpers.assert_trees_close(model, reference)


# --- what is differentiated -----------------------------------------------------------


def test_argnums_choose_the_arguments():
    model, x, shift = affine(), rows(8), jnp.ones((8, 8))
    reference = Affine()

    def loss(model, x, shift):
        return jnp.mean((model(x) + shift) ** 2)

    scales = nnx.DiffState(0, nnx.PathContains("scale"))
    for argnums in (0, -1, (0,), (2, 0), scales, (1, scales)):
        got = fsdp_jax.value_and_grad(loss, argnums=argnums)(model, x, shift)
        expected = nnx.jit(nnx.value_and_grad(loss, argnums=argnums))(
            reference, x, shift
        )
        assert type(got[1]) is type(expected[1])
        helpers.assert_trees_close(got, expected)
    only = fsdp_jax.grad(loss, argnums=(1, scales))(model, x, shift)
    helpers.assert_trees_close(only, expected[1])
    cut = NamedSharding(helpers.mesh_of(8), PartitionSpec("fsdp"))
    assert only[0].sharding.is_equivalent_to(cut, 2)


def test_the_gradient_of_a_replicated_argument_is_reduced():
    model, x = affine(), rows(8)

    def loss(model, x, gain, tree):
        return jnp.mean((model(x) * gain + tree["shift"]) ** 2)

    arguments = (x, jnp.float32(2), {"shift": jnp.ones(8)})
    specs = (None, None, {"shift": PartitionSpec()})
    expected = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 2, 3)))(
        Affine(), *arguments
    )
    for reduction, factor in (("mean", 1), ("sum", 8)):
        got = fsdp_jax.value_and_grad(
            loss, argnums=(0, 2, 3), in_specs=specs, reduction=reduction
        )(model, *arguments)
        scaled = jax.tree.map(lambda a, by=factor: a * by, expected)
        helpers.assert_trees_close(got, scaled)


def test_wrt_selects_and_the_rest_is_frozen():
    make, loss, batch = MODELS["mlp"]
    model, reference = make(), make()
    helpers.shard_blocks(model, mesh=helpers.mesh_of(4))
    kernels = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    before = {p: np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(model))}

    def train(model, value_and_grad):
        optimizer = nnx.Optimizer(model, TX, wrt=kernels)

        @nnx.jit
        def step(model, optimizer, *batch):
            value, grads = value_and_grad(model, *batch)
            optimizer.update(model, grads)
            return value, grads

        return [step(model, optimizer, *batch()) for _ in range(3)]

    got = train(model, fsdp_jax.value_and_grad(loss, wrt=kernels))
    diff_state = nnx.DiffState(0, kernels)
    expected = train(reference, nnx.value_and_grad(loss, argnums=diff_state))
    helpers.assert_trees_close(got, expected)
    helpers.assert_trees_close(model, reference)
    assert_sharded_alike(got[-1][1], model, kernels)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        changed = not np.array_equal(variable[...], before[path])
        assert changed == (path[-1] == "kernel"), path


def test_a_module_that_is_not_called_has_zero_gradients():
    model = fully_shard(helpers.MLP(nnx.Rngs(0)).layers[0], mesh=helpers.mesh_of(8))
    value, grads = fsdp_jax.value_and_grad(lambda model, x: x.mean())(model, rows(8))
    np.testing.assert_allclose(value, rows(8).mean(), rtol=1e-5)
    assert_sharded_alike(grads, model)
    assert all(not np.any(g) for g in jax.tree.leaves(grads))


def test_an_unused_sibling_has_zero_gradients_and_the_others_are_right():
    reference, model = helpers.MLP(nnx.Rngs(0)), helpers.MLP(nnx.Rngs(0))
    helpers.shard_blocks(model, mesh=helpers.mesh_of(2))
    x = helpers.regression_batch()[0]

    def loss(model, x):
        return jnp.mean(model.layers[0](x) ** 2)

    got = fsdp_jax.value_and_grad(loss)(model, x)
    helpers.assert_trees_close(got, nnx.jit(nnx.value_and_grad(loss))(reference, x))
    assert not np.any(got[1]["layers"][2]["kernel"][...])


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_two_calls_of_one_module_add_their_gradients(reshard_after_forward):
    model = affine(4, reshard_after_forward=reshard_after_forward)

    def loss(model, x):
        return jnp.mean(model(model(x)) ** 2) + jnp.mean(model(x + 1))

    got = fsdp_jax.value_and_grad(loss)(model, rows(8))
    helpers.assert_trees_close(got, nnx.value_and_grad(loss)(Affine(), rows(8)))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_gradients_of_gradients_are_those_of_the_unsharded_model(reshard_after_forward):
    model = affine(4, reshard_after_forward=reshard_after_forward)

    def penalty(model, x):
        slope = jax.grad(lambda x: jnp.sum(model(x) ** 2))(x)
        return jnp.mean(slope**2) + jnp.mean(model(x))

    got = fsdp_jax.value_and_grad(penalty)(model, rows(8))
    expected = nnx.jit(nnx.value_and_grad(penalty))(Affine(), rows(8))
    helpers.assert_trees_close(got, expected)


def test_several_roots_under_a_plain_parent():
    reference, model = Parent(nnx.Rngs(0)), Parent(nnx.Rngs(0))
    for child in (model.left, model.right):
        fully_shard(child, mesh=helpers.mesh_of(4))
    got = fsdp_jax.value_and_grad(square)(model, rows())
    expected = nnx.jit(nnx.value_and_grad(square))(reference, rows())
    helpers.assert_trees_close(got, expected)
    assert_sharded_alike(got[1]["left"], model.left)
    assert_sharded_alike(got[1]["right"], model.right)
    assert model.left.kernel.sharding.spec == PartitionSpec("fsdp")
    assert got[1]["gain"].sharding.is_fully_replicated


def test_two_models_are_differentiated_together():
    teacher, student = affine(4), affine(4)

    def loss(student, teacher, x):
        return jnp.mean((student(x) - 2 * teacher(x)) ** 2)

    got = fsdp_jax.value_and_grad(loss, argnums=(0, 1))(student, teacher, rows(8))
    expected = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(
        Affine(), Affine(), rows(8)
    )
    helpers.assert_trees_close(got, expected)


def test_ignored_and_whole_parameters_have_averaged_gradients():
    class Mixed(nnx.Module):
        def __init__(self):
            self.cut = nnx.Param(jnp.ones(8))
            self.whole = nnx.Param(jnp.ones((3, 5)))  # no dim divides by 4
            self.ignored = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            weights = self.cut[...] * self.ignored[...]
            return x * weights + self.whole[...].sum()

    model = Mixed()
    fully_shard(model, mesh=helpers.mesh_of(4), ignored_params=[model.ignored])
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    update = nnx.jit(lambda optimizer, *args: optimizer.update(*args))
    for seed in range(2):
        expected = nnx.jit(nnx.value_and_grad(square))(Mixed(), rows(8, seed))
        got = fsdp_jax.value_and_grad(square)(model, rows(8, seed))
        if seed == 0:
            helpers.assert_trees_close(got, expected)
            assert_sharded_alike(got[1], model)
        update(optimizer, model, got[1])
    for name in ("whole", "ignored"):
        value = getattr(model, name)[...]
        assert value.sharding.is_fully_replicated
        copies = [np.asarray(shard.data) for shard in value.addressable_shards]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)


# --- reductions, aux, arguments -------------------------------------------------------


@pytest.mark.parametrize("free", [True, False])
def test_mean_and_sum_reduce_the_losses_of_the_devices(free):
    model, x = affine(4, reshard_after_forward=free), rows(8)

    def total(model, x):
        return jnp.sum(model(x) ** 2)

    expected, expected_grads = nnx.jit(nnx.value_and_grad(total))(Affine(), x)
    for reduction, divisor in (("sum", 1), ("mean", 4)):
        value, grads = fsdp_jax.value_and_grad(total, reduction=reduction)(model, x)
        np.testing.assert_allclose(value, expected / divisor, rtol=1e-5)
        scaled = jax.tree.map(lambda g, d=divisor: g / d, expected_grads)
        helpers.assert_trees_close(grads, scaled)


@pytest.mark.parametrize("free", [True, False])
def test_weighted_is_the_sum_of_losses_over_the_sum_of_weights(free):
    """Token counts differ by device; the model is whole, cut and frozen in part."""
    model = helpers.MLP(nnx.Rngs(0))
    layers = list(model.layers)
    fully_shard(layers[0], mesh=helpers.mesh_of(4), reshard_after_forward=free)
    fully_shard(layers[1], mesh=helpers.mesh_of(4), reshard_after_forward=free)
    x, y = helpers.regression_batch(8)
    counts = jnp.array([[3, 5], [0, 0], [7, 1], [0, 2]]).reshape(8, 1)

    def loss(model, x, y, mask):
        return jnp.sum(mask * (model(x) - y) ** 2), mask.sum()

    def global_loss(model, x, y, mask):
        total, weight = loss(model, x, y, mask)
        return total / weight

    step = nnx.jit(fsdp_jax.value_and_grad(loss, reduction="weighted"))
    reference_step = nnx.jit(nnx.value_and_grad(global_loss))
    got = step(model, x, y, counts)
    expected = reference_step(helpers.MLP(nnx.Rngs(0)), x, y, counts)
    helpers.assert_trees_close(got, expected)


@pytest.mark.parametrize(
    ("dtype", "weight"), [(jnp.bfloat16, 257), (jnp.float16, 40000)]
)
def test_a_low_precision_loss_leaves_the_token_count_exact(dtype, weight):
    model = affine(4)

    def loss(model, x):
        total = jnp.sum(model(x) * 0 + 1).astype(dtype)
        return total, jnp.int32(weight)

    f = fsdp_jax.value_and_grad(loss, reduction="weighted")
    value, _ = f(model, jnp.ones((4, 8)))
    np.testing.assert_allclose(
        np.float32(value), np.float32(jnp.asarray(8 / weight, dtype)), rtol=1e-3
    )


def test_the_gradient_flows_through_the_weight():
    model, x = affine(4), rows(8)

    def loss(model, x):
        y = model(x)
        return jnp.sum(y**2), jnp.sum(jnp.abs(y)) + 1

    def global_loss(model, x):
        y = model(x)
        return jnp.sum(y**2) / (jnp.sum(jnp.abs(y)) + 4)

    got = fsdp_jax.value_and_grad(loss, reduction="weighted")(model, x)
    helpers.assert_trees_close(got, nnx.value_and_grad(global_loss)(Affine(), x))


def test_aux_is_averaged_concatenated_or_refused():
    model, x = affine(4), rows(8)

    def loss(model, x):
        y = model(x)
        aux = {
            "largest": y.max(),
            "rows": (y, y.sum(1)),
            "constant": jnp.int32(7),
            "count": jax.lax.psum((y > 0).sum(), "fsdp"),
            "text": "unchanged",
            "none": None,
        }
        return jnp.mean(y**2), aux

    (value, aux), grads = fsdp_jax.value_and_grad(loss, has_aux=True)(model, x)
    y = Affine()(x)
    np.testing.assert_allclose(value, jnp.mean(y**2), rtol=1e-5)
    np.testing.assert_allclose(
        aux["largest"], np.mean([p.max() for p in jnp.split(y, 4)]), rtol=1e-5
    )
    np.testing.assert_allclose(aux["rows"][0], y, rtol=1e-5)
    np.testing.assert_allclose(aux["rows"][1], y.sum(1), rtol=1e-5)
    assert aux["constant"] == 7
    assert aux["count"] == (y > 0).sum()
    assert aux["text"] == "unchanged" and aux["none"] is None
    helpers.assert_trees_close(grads, nnx.grad(square)(Affine(), x))
    only_grads, only_aux = fsdp_jax.grad(loss, has_aux=True)(model, x)
    helpers.assert_trees_close(only_grads, grads)
    assert only_aux["count"] == aux["count"]

    def different(model, x):
        y = model(x)
        return jnp.mean(y**2), {"positive": (y > 0).sum()}

    with pytest.raises(TypeError, match=r"int32 scalar.*differs between devices"):
        fsdp_jax.value_and_grad(different, has_aux=True)(model, x)


def test_weighted_with_aux():
    model, x = affine(4), rows(8)

    def loss(model, x):
        y = model(x)
        return (jnp.sum(y**2), x.shape[0]), y

    (value, aux), _ = fsdp_jax.value_and_grad(loss, has_aux=True, reduction="weighted")(
        model, x
    )
    y = Affine()(x)
    np.testing.assert_allclose(value, jnp.sum(y**2) / 8, rtol=1e-5)
    np.testing.assert_allclose(aux, y, rtol=1e-5)


def test_in_specs_take_every_form():
    model, x, table = affine(4), rows(8), jnp.arange(6.0).reshape(3, 2)
    cut, whole = PartitionSpec("fsdp"), PartitionSpec()

    def loss(model, x, extra):
        seen.append((x.shape, jax.tree.map(jnp.shape, extra)))
        first = jax.tree.leaves(extra)[0]
        return jnp.mean(model(x) ** 2) * first.sum()

    def shapes_with(in_specs, extra):
        seen.clear()
        f = nnx.jit(fsdp_jax.value_and_grad(loss, in_specs=in_specs))
        f.lower(model, x, extra)
        assert len(set(map(str, seen))) == 1
        return seen[0]

    seen: list[Any] = []
    assert shapes_with((None, whole), table) == ((2, 8), (3, 2))
    assert shapes_with([cut, whole], table) == ((2, 8), (3, 2))
    assert shapes_with((None, None, whole), table) == ((2, 8), (3, 2))
    assert shapes_with(whole, table) == ((8, 8), (3, 2))
    assert shapes_with(cut, x) == ((2, 8), (2, 8))
    assert shapes_with(None, {"a": x, "b": 3.0}) == ((2, 8), {"a": (2, 8), "b": ()})
    tree = {"a": table, "b": (x, x)}
    expected = ((2, 8), {"a": (3, 2), "b": ((2, 8), (8, 8))})
    assert shapes_with((None, {"a": whole, "b": (None, whole)}), tree) == expected
    expected = ((2, 8), {"a": (3, 2), "b": ((8, 8), (8, 8))})
    assert shapes_with((None, whole), tree) == expected
    columns = PartitionSpec(None, "fsdp")
    assert shapes_with((None, columns), x) == ((2, 8), (8, 2))


def test_keyword_arguments_are_cut_like_the_others():
    model, x = affine(4), rows(8)

    def loss(model, *, x, gain):
        assert x.shape == (2, 8)
        return gain * jnp.mean(model(x) ** 2)

    value = fsdp_jax.value_and_grad(loss)(model, x=x, gain=jnp.float32(3))[0]
    np.testing.assert_allclose(value, 3 * square(Affine(), x), rtol=1e-5)


def test_host_arrays_and_numbers_are_arguments_too():
    model, x = affine(4), np.asarray(rows(8))

    def loss(model, batch, gain, flag):
        assert flag is True or flag == "yes"
        return gain * square(model, batch["x"])

    expected = 2 * square(Affine(), jnp.asarray(x))
    for gain, flag in ((2, True), (np.float32(2), "yes")):
        value = fsdp_jax.value_and_grad(loss)(model, {"x": x}, gain, flag)[0]
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_a_batch_that_does_not_divide_names_argument_size_and_count():
    model = affine(8)

    def loss(model, batch, scale=1.0):
        return square(model, batch["inputs"][0])

    f = fsdp_jax.value_and_grad(loss)
    batch = {"inputs": (rows(19),)}
    pattern = r"argument 'batch'\['inputs'\]\[0\].*size 19 .*8 devices"
    with pytest.raises(ValueError, match=pattern):
        f(model, batch)
    with pytest.raises(ValueError, match=pattern):
        nnx.jit(f).lower(model, batch)
    with pytest.raises(ValueError, match=r"argument 'scale'.*size 3 .*8 devices"):
        f(model, {"inputs": (rows(16),)}, scale=jnp.ones(3))
    with pytest.raises(ValueError, match=r"argument 'batch'.*dim 1.*8 devices"):
        fsdp_jax.value_and_grad(
            lambda model, batch: square(model, batch),
            in_specs=PartitionSpec(None, "fsdp"),
        )(model, jnp.ones((8, 9)))
    f(model, {"inputs": (rows(16),)})  # nothing was broken


def test_bad_arguments_are_named():
    model, x = affine(2), rows(8)
    with pytest.raises(ValueError, match="reduction"):
        fsdp_jax.value_and_grad(square, reduction="max")
    with pytest.raises(ValueError, match="num_microbatches"):
        fsdp_jax.value_and_grad(square, num_microbatches=0)
    with pytest.raises(TypeError, match="floating scalar"):
        fsdp_jax.value_and_grad(lambda model, x: model(x))(model, x)
    with pytest.raises(TypeError, match="pair"):
        fsdp_jax.value_and_grad(square, has_aux=True)(model, x)
    with pytest.raises(TypeError, match="pair"):
        fsdp_jax.value_and_grad(square, reduction="weighted")(model, x)
    with pytest.raises(ValueError, match="argument 3"):
        fsdp_jax.value_and_grad(square, argnums=3)(model, x)
    with pytest.raises(TypeError, match="'x'.*int32"):
        fsdp_jax.value_and_grad(square, argnums=1)(model, x.astype(int))
    with pytest.raises(ValueError, match="fully_shard"):
        fsdp_jax.value_and_grad(square)(Affine(), x)
    with pytest.raises(ValueError, match="in_specs"):
        fsdp_jax.value_and_grad(square, in_specs=(None, None, None))(model, x)
    with pytest.raises(ValueError, match="'tp'"):
        fsdp_jax.value_and_grad(square, in_specs=PartitionSpec("tp"))(model, x)


# --- a per-device program of the user's own -------------------------------------------


def own_program(
    model: Any, x: jax.Array, wrt: Any = nnx.Param, **kwargs: Any
) -> tuple[Any, Any]:
    """Loss and gradients through `jax.shard_map` and `jax.value_and_grad`."""
    graphdef, diff, rest = nnx.split(model, wrt, ...)

    def specs(state):
        return jax.tree.map(lambda leaf: leaf.sharding.spec, state)

    def one_device(diff, rest, x):
        def loss(diff):
            return square(nnx.merge(graphdef, diff, rest), x)

        value, grads = jax.value_and_grad(loss)(diff)
        return jax.lax.pmean(value, "fsdp"), grads

    mapped = jax.shard_map(
        one_device,
        mesh=helpers.mesh_of(4),
        in_specs=(specs(diff), specs(rest), PartitionSpec("fsdp")),
        out_specs=(PartitionSpec(), specs(diff)),
        **kwargs,
    )
    return jax.jit(mapped)(diff, rest, x)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_users_own_shard_map_gets_averaged_shards(check_vma, reshard_after_forward):
    model = affine(4, reshard_after_forward=reshard_after_forward)
    got = own_program(model, rows(8), check_vma=check_vma)
    helpers.assert_trees_close(got, nnx.value_and_grad(square)(Affine(), rows(8)))
    assert_sharded_alike(got[1], model)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_users_own_program_may_freeze_parameters(reshard_after_forward):
    model = affine(4, reshard_after_forward=reshard_after_forward)
    scales = nnx.All(nnx.Param, nnx.PathContains("scale"))
    got = own_program(model, rows(8), scales, check_vma=False)
    expected = nnx.jit(nnx.value_and_grad(square, argnums=nnx.DiffState(0, scales)))(
        Affine(), rows(8)
    )
    helpers.assert_trees_close(got, expected)


def test_models_on_two_meshes_are_refused():
    def loss(left, right, x):
        return square(left, x) + square(right, x)

    other = Mesh(np.array(jax.devices()[4:]), ("fsdp",))
    with pytest.raises(ValueError, match="2 different meshes"):
        fsdp_jax.value_and_grad(loss)(
            affine(4), fully_shard(Affine(), mesh=other), rows(8)
        )


def test_what_cannot_be_differentiated_is_named():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = fsdp_jax.fully_shard(layer, mesh=helpers.mesh_of(2))
    x = jnp.ones((4, 8))
    scaled = fsdp_jax.value_and_grad(lambda m, x, s: jnp.sum(m(x)) * s, argnums=2)
    with pytest.raises(TypeError, match="'s' holds 2.0, which is static"):
        scaled(model, x, 2.0)
    nothing = fsdp_jax.grad(lambda m, x: jnp.sum(m(x)), wrt="head")
    with pytest.raises(ValueError, match="wrt='head' selects no Variable of .*'m'"):
        nothing(model, x)
