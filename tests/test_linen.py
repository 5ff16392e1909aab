"""Flax Linen models on sharded parameters against the same models on one device."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, nnx
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import CPUOffloadPolicy, MixedPrecisionPolicy, Shard, linen
from tests import helpers

WIDTH = 16
KEY = jax.random.key(0)
X, Y = (jax.random.normal(k, (24, WIDTH)) for k in jax.random.split(KEY))


class Block(nn.Module):
    """Two layers around a skip connection, named by Linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x)))


class Stack(nn.Module):
    """Two blocks and a head, named in setup."""

    def setup(self) -> None:
        self.blocks = [Block() for _ in range(2)]
        self.head = nn.Dense(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.encode(x))

    def encode(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return scale * x


STACK = Stack()
VARIABLES: Any = jax.jit(STACK.init)(KEY, X)


def variables_of(module: nn.Module, x: jax.Array = X) -> Any:
    """Variables as `init` shapes them, with values for which nothing is compiled."""
    rng = np.random.default_rng(0)

    def first(leaf: Any) -> jax.Array:
        return jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(first, jax.eval_shape(module.init, KEY, x))


def loss_with(apply: Callable) -> Callable:
    """Mean squared error of `apply`, a function of the parameters."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((apply({"params": params}, x) - y) ** 2)

    return loss


def close(actual: Any, expected: Any, **tolerance: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    helpers.assert_trees_close(actual, expected, **tolerance)


def assert_trains(
    module: nn.Module, make_loss: Callable = loss_with, **kwargs: Any
) -> tuple[Any, Any]:
    """Compare value and gradients with those of the module on one device.

    Returns:
        The model and its variables.
    """
    variables = variables_of(module)
    model, placed = linen.fully_shard(module, variables, **kwargs)
    step = jax.jit(linen.value_and_grad(make_loss(model.apply), model))
    got = step(placed["params"], X, Y)
    twin = jax.jit(jax.value_and_grad(make_loss(module.apply)))
    close(got, twin(variables["params"], X, Y))
    return model, placed


@functools.cache
def twin_gradients() -> Any:
    return jax.jit(jax.grad(loss_with(STACK.apply)))(VARIABLES["params"], X, Y)


def counts_of(f: Callable, *args: Any) -> dict[str, int]:
    counts = helpers.count_collectives(jax.jit(f).lower(*args).as_text())
    assert counts.pop("all_to_all") == 0
    return counts


# --- training ---------------------------------------------------------------------


def train(apply: Callable, params: Any, value_and_grad: Any, tx: Any) -> Any:
    """Three steps of a `TrainState`: parameters, losses, optimizer state."""
    state: Any = TrainState.create(apply_fn=apply, params=params, tx=tx)
    state = state.replace(step=state.opt_state[1][0].count)  # not a Python number

    @jax.jit
    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss = loss_with(state.apply_fn)
        value, grads = value_and_grad(loss)(state.params, x, y)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(3):
        state, value = step(state, X, Y)
        losses.append(value)
    assert step._cache_size() == 1  # pyright: ignore
    return state.params, losses, state.opt_state


TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))


@functools.cache
def trained_twin() -> Any:
    return train(STACK.apply, VARIABLES["params"], jax.value_and_grad, TX)


def train_sharded(**kwargs: Any) -> Any:
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*", **kwargs)
    tx = linen.optimizer(TX, model)
    step = functools.partial(linen.value_and_grad, model=model)
    params, losses, state = train(model.apply, placed["params"], step, tx)
    close((params, losses), trained_twin()[:2])
    kernels = [tree["head"]["kernel"] for tree in (params, state[1][0].mu)]
    for kernel in kernels:
        assert kernel.sharding == placed["params"]["head"]["kernel"].sharding
    return kernels[0]


@pytest.mark.parametrize("num_devices", [8, 3])
def test_a_train_state_trains_as_on_one_device(num_devices):
    kernel = train_sharded(mesh=helpers.mesh_of(num_devices))
    if num_devices == 8:
        assert fsdp_jax.local_shape(kernel) == (WIDTH // 8, WIDTH)


def test_parameters_in_host_memory_train():
    kernel = train_sharded(offload_policy=CPUOffloadPolicy())
    assert kernel.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_one_gather_and_one_scatter_per_group(reshard_after_forward):
    model, placed = linen.fully_shard(
        STACK,
        VARIABLES,
        modules="blocks_*",
        reshard_after_forward=reshard_after_forward,
    )
    again = {None: 2, True: 3, False: 0}[reshard_after_forward]
    step = linen.value_and_grad(loss_with(model.apply), model)
    counts = counts_of(step, placed["params"], X, Y)
    assert counts == {"all_gather": 3 + again, "reduce_scatter": 3, "all_reduce": 1}


def test_large_parameters_travel_alone():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    alone = model.with_groups(lambda g: g.set_packing_threshold_bytes(200))
    step = linen.value_and_grad(loss_with(alone.apply), alone)
    counts = counts_of(step, placed["params"], X, Y)
    groups = 2 * (2 + 1) + 1 + 1  # two kernels or one, and what is small together
    assert counts["reduce_scatter"] == groups
    packed = linen.value_and_grad(loss_with(model.apply), model)
    assert counts_of(packed, placed["params"], X, Y)["reduce_scatter"] == 3


def test_global_arrays_compute_the_same():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    want = jax.jit(STACK.apply)(VARIABLES, X)
    close(model.apply(VARIABLES, X), want)  # wherever the parameters are
    got = jax.jit(jax.grad(loss_with(model.apply)))(placed["params"], X, Y)
    close(got, twin_gradients())


def test_many_parameters_of_one_shape_keep_their_places():
    class Many(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for i in range(12):
                x = x + self.param(f"p{i}", nn.initializers.normal(), (WIDTH,)) * x**i
            return x

    variables = variables_of(Many())
    model, placed = linen.fully_shard(Many(), variables)
    close(model.apply(placed, X), jax.jit(Many().apply)(variables, X))


def test_methods_and_keyword_arguments():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    plain = jax.jit(functools.partial(STACK.apply, scale=2.0, method="encode"))
    want = plain(VARIABLES, X)
    for method in ("encode", Stack.encode, lambda m, x, scale: m.encode(x, scale)):
        got = model.apply(placed, X, scale=2.0, method=method)
        close(got, want)

    def encode(params: Any, x: jax.Array) -> jax.Array:
        return model.apply({"params": params}, x, scale=2.0, method="encode")

    close(linen.shard_map(encode, model)(placed["params"], X), want)


# --- groups -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "modules",
    ["blocks_*", ("blocks_0", "blocks_1"), Block, lambda path, m: "blocks_" in path],
    ids=["pattern", "names", "class", "predicate"],
)
def test_groups_are_found_by_name_class_and_predicate(modules):
    if callable(modules) and not isinstance(modules, type):
        inner = modules
        modules = lambda path, m: inner(path, m) and path.count("/") == 0  # noqa: E731
    model, _ = linen.fully_shard(STACK, VARIABLES, modules=modules, inputs=(X,))
    rows = {row.path: row.group for row in fsdp_jax.describe(model).rows}
    assert rows["blocks_0.Dense_0.kernel"] == "blocks_0 (Unit)"
    assert rows["blocks_1.Dense_1.bias"] == "blocks_1 (Unit)"
    assert rows["head.kernel"] == "Unit"


def test_a_group_may_have_arguments_of_its_own():
    policy = MixedPrecisionPolicy(jnp.bfloat16, output_dtype=jnp.float32)
    model, placed = linen.fully_shard(
        STACK,
        VARIABLES,
        modules={"blocks_0": {"mp_policy": policy}, "blocks_1": {}},
        reshard_after_forward=False,
    )
    step = linen.value_and_grad(loss_with(model.apply), model)
    text = jax.jit(step).lower(placed["params"], X, Y).as_text()
    gathers = re.findall(r"all_gather.*-> tensor<.*>", text)
    assert len(gathers) == 3
    assert sum("bf16" in line for line in gathers) == 1


def test_groups_within_groups():
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(WIDTH)(Block(name="inner")(x))

    class Pairs(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Pair(name="b")(Pair(name="a")(x))

    model, placed = assert_trains(Pairs(), modules=("?", "?/inner"))
    step = linen.value_and_grad(loss_with(model.apply), model)
    counts = counts_of(step, placed["params"], X, Y)
    assert counts["reduce_scatter"] == 4


def test_ignored_parameters_stay_whole_and_are_averaged():
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=kinds)
    _, placed = assert_trains(
        STACK,
        modules="blocks_*",
        mesh=mesh,
        ignored_params=lambda path, p: path[-1] == "bias",
    )
    assert placed["params"]["head"]["bias"].sharding.is_fully_replicated
    kernel = placed["params"]["head"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec("fsdp")


# --- Linen's transforms -----------------------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return Block(name="block")(x), None


def scanned(layer: Any, axis: int = 0) -> nn.Module:
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layers = nn.scan(
                layer,
                variable_axes={"params": axis},
                split_rngs={"params": True},
                length=8,
            )
            return nn.Dense(WIDTH)(layers(name="layers")(x, None)[0])

    return Scanned()


NOT_LAYERS = {"shard_placement_fn": lambda p: Shard(1) if p.name[:2] == "la" else None}


@pytest.mark.parametrize(
    ("layer", "axis", "name"),
    [(Layer, 1, "layers"), (nn.remat(Layer), 0, "layers/block")],
    ids=["plain", "remat"],
)
def test_a_scan_gathers_one_layer_at_a_time(layer, axis, name):
    cut = NOT_LAYERS if axis == 0 else {}
    model, placed = assert_trains(scanned(layer, axis), modules=name, **cut)
    step = linen.value_and_grad(loss_with(model.apply), model)
    text = jax.jit(step).lower(placed["params"], X, Y).as_text()
    shapes = re.findall(r"all_gather.*-> tensor<([\dx]+)xf32>", text)
    sizes = [math.prod(map(int, shape.split("x"))) for shape in shapes]
    layer_size = sum(p.size for p in jax.tree.leaves(placed["params"]["layers"])) // 8
    # Twice one layer, forward and backward, and the root's layer once.
    assert sorted(sizes) == [WIDTH * (WIDTH + 1), layer_size, layer_size]


def test_a_stack_that_is_cut_along_its_layers_is_refused():
    with pytest.raises(ValueError, match=r"'layers/block/.* is cut on dim 0, along"):
        assert_trains(scanned(Layer), modules="layers")


class Transformed(nn.Module):
    def setup(self) -> None:
        self.unit_0, self.unit_1 = Block(), Block()
        self.unit_2, self.unit_3 = nn.remat(Block)(), nn.jit(Block)()
        self.unit_4 = nn.vmap(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(None,),  # pyright: ignore
            axis_size=3,
        )()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.unit_4(self.unit_3(self.unit_2(x))).mean(0)
        if self.is_initializing():
            return self.unit_0(self.unit_1(x))
        yes = jnp.asarray(True)
        return nn.cond(yes, lambda m, x: m.unit_0(x), lambda m, x: m.unit_1(x), self, x)


class Around(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH)(self.inner(x))


class Shared(nn.Module):
    def setup(self) -> None:
        self.unit_0 = Block()
        self.unit_1, self.unit_2 = Around(self.unit_0), Around(self.unit_0)
        self.unit_3 = nn.Embed(WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.unit_3(jnp.argmax(x, -1))
        h = self.unit_0(self.unit_2(self.unit_1(x)))
        return self.unit_3.attend(h) + jnp.einsum("bd,vd->bv", h, self.unit_3.embedding)


class Doubled(nn.Module):
    """A block whose parameters get twice their gradient."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def forward(block: Block, x: jax.Array) -> Any:
            return nn.vjp(lambda m, x: m(x), block, x)

        def backward(pull_back: Any, gradient: jax.Array) -> Any:
            params, inputs = pull_back(gradient)
            return jax.tree.map(lambda g: 2 * g, params), inputs

        call = nn.custom_vjp(lambda m, x: m(x), forward, backward)
        return call(Block(name="unit_0"), x)


@pytest.mark.parametrize(
    "module", [Transformed(), Shared(), Doubled()], ids=["lifted", "shared", "own_vjp"]
)
def test_groups_run_under_transforms_and_shared(module):
    assert_trains(module, modules="unit_*")


def test_an_unread_parameter_of_setup_is_not_gathered_twice():
    class Embedding(nn.Module):
        def setup(self) -> None:
            self.unit_0 = nn.Embed(WIDTH, WIDTH)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.unit_0(jnp.argmax(x, -1))

    variables = variables_of(Embedding())
    model, placed = linen.fully_shard(Embedding(), variables, modules="unit_*")
    step = linen.shard_map(lambda p, x: model.apply({"params": p}, x), model)
    assert counts_of(step, placed["params"], X)["all_gather"] == 1


class Normed(nn.Module):
    mapped: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.mapped:
            return nn.WeightNorm(nn.Dense(WIDTH, name="layer"))(x)

        def halve(variables: Any) -> Any:
            return jax.tree.map(lambda p: p / jnp.sqrt(1 + jnp.sum(p**2)), variables)

        layer = nn.map_variables(
            nn.Dense, "params", halve, init=self.is_initializing()
        )(WIDTH, name="layer")
        return layer(x)


@pytest.mark.parametrize("mapped", [False, True])
def test_parameters_that_are_changed_before_they_run_belong_to_who_changes(mapped):
    if not mapped:
        assert_trains(Normed(mapped))
    with pytest.raises(ValueError, match="'layer' is a group of its own, but some"):
        assert_trains(Normed(mapped), modules="layer")


# --- collections and random streams -----------------------------------------------


class Noisy(nn.Module):
    """Dropout and BatchNorm in a group, and an intermediate that is sown."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        for i in range(2):
            x = NoisyBlock(name=f"block_{i}")(x, train)
        return nn.Dropout(0.5, deterministic=not train)(x)


class NoisyBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        h = nn.Dropout(0.3, deterministic=not train)(nn.Dense(WIDTH)(x))
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(h)
        self.sow("intermediates", "h", h)
        return x + nn.Dropout(0.3, deterministic=not train)(nn.Dense(WIDTH)(h))


NOISY = Noisy()
NOISY_VARIABLES: Any = jax.jit(lambda: NOISY.init(KEY, X, False))()
ROWS = jax.random.normal(KEY, (64, WIDTH))


def noisy_loss(apply: Callable, key: jax.Array) -> Callable:
    def loss(params: Any, stats: Any, x: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": stats}
        y, updates = apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean(y**2), updates

    return loss


@functools.cache
def noisy_twin(num_devices: int, num_slices: int) -> Any:
    """What the devices compute, one after the other, on their rows."""
    params, rows = NOISY_VARIABLES["params"], 64 // num_devices
    values, grads, stats = [], [], []
    loss = jax.jit(
        lambda key, *args: jax.value_and_grad(
            noisy_loss(NOISY.apply, key), has_aux=True
        )(*args)
    )
    for i in range(num_devices):
        key = jax.random.fold_in(KEY, i) if num_devices > 1 else KEY
        own = NOISY_VARIABLES["batch_stats"]
        for x in np.split(np.asarray(ROWS)[i * rows : (i + 1) * rows], num_slices):
            (value, updates), grad = loss(key, params, own, x)
            own = updates["batch_stats"]
            values, grads = [*values, value], [*grads, grad]
        stats.append(own)

    def mean(trees: list[Any]) -> Any:
        return jax.tree.map(lambda *xs: np.mean(xs, axis=0), *trees)

    return (mean(values), {"batch_stats": mean(stats)}), mean(grads)


def test_applying_changes_collections_and_draws_masks_as_plain_linen():
    model, placed = linen.fully_shard(NOISY, NOISY_VARIABLES, modules="b*")
    sets: list[dict[str, Any]] = [
        {"mutable": ["batch_stats", "intermediates"], "capture_intermediates": True},
        {"mutable": True},
    ]
    for options in sets:
        options["rngs"] = {"dropout": KEY}
        plain = jax.jit(functools.partial(NOISY.apply, **options))
        want = plain(NOISY_VARIABLES, X)
        close(model.apply(placed, X, **options), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "num_slices", "keep"),
    [(1, 1, True), (8, 1, False), (8, 2, None)],
)
def test_statistics_are_averaged_and_masks_differ(num_devices, num_slices, keep):
    mesh = helpers.mesh_of(num_devices)
    model, placed = linen.fully_shard(
        NOISY, NOISY_VARIABLES, modules="b*", mesh=mesh, reshard_after_forward=keep
    )
    loss = noisy_loss(model.apply, KEY)
    step = jax.jit(
        linen.value_and_grad(loss, model, has_aux=True, num_microbatches=num_slices)
    )
    got = step(placed["params"], placed["batch_stats"], ROWS)
    close(got, noisy_twin(num_devices, num_slices), rtol=1e-4)
    statistics = jax.tree.leaves(got[0][1])
    assert all(s.sharding.is_fully_replicated for s in statistics)


def test_masks_in_a_scan_are_those_of_plain_linen():
    class NoisyLayer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(x)), None

    class NoisyScan(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layers = nn.scan(
                NoisyLayer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return layers(name="layers")(x, None)[0]

    def loss(apply: Callable) -> Callable:
        rngs = {"dropout": KEY}
        return lambda p, x, y: jnp.mean(apply({"params": p}, x, rngs=rngs) ** 2)

    mesh = helpers.mesh_of(1)
    assert_trains(
        NoisyScan(), loss, modules="layers", mesh=mesh, reshard_after_forward=True
    )


@pytest.mark.slow
def test_all_variables_may_be_the_first_argument():
    model, placed = linen.fully_shard(
        NOISY, NOISY_VARIABLES, modules="b*", reshard_after_forward=True
    )
    loss = noisy_loss(model.apply, KEY)

    def of_all(variables: Any, x: jax.Array) -> Any:
        return loss(variables["params"], variables["batch_stats"], x)

    def by_closure(params: Any, x: jax.Array) -> Any:
        return loss(params, placed["batch_stats"], x)

    want = noisy_twin(8, 1)
    got = jax.jit(linen.value_and_grad(of_all, model, has_aux=True))(placed, ROWS)
    close(got, (want[0], {"params": want[1]}), rtol=1e-4)
    step = jax.jit(linen.value_and_grad(by_closure, model, has_aux=True))
    close(step(placed["params"], ROWS), want, rtol=1e-4)
    step = linen.grad(by_closure, model, has_aux=True, num_microbatches=2)
    with pytest.raises(ValueError, match="carry it from slice to slice. Pass it as"):
        step(placed["params"], ROWS)


def test_another_collection_must_be_the_same_everywhere():
    class Counting(nn.Module):
        differ: bool = False

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            seen = self.variable("seen", "rows", jnp.zeros, (2,))
            seen.value += x[:2, 0] if self.differ else 1.0
            return nn.Dense(WIDTH)(x)

    def update(model: Any) -> Callable:
        def run(variables: Any, x: jax.Array) -> Any:
            return model.apply(variables, x, mutable=["seen"])[1]

        return run

    variables = jax.jit(Counting().init)(KEY, X)
    model, placed = linen.fully_shard(Counting(), variables)
    got = linen.shard_map(update(model), model)(placed, X)
    np.testing.assert_array_equal(got["seen"]["rows"], 2.0)
    model, placed = linen.fully_shard(Counting(True), variables)
    with pytest.raises(ValueError, match="'other variables.seen/rows' to values that"):
        linen.shard_map(update(model), model)(placed, X)


@pytest.mark.slow
def test_a_cache_is_cut_with_the_batch():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            attention = nn.MultiHeadDotProductAttention(2, decode=True, name="a")
            return nn.Dense(8)(attention(x, x))

    def decode(apply: Callable) -> Callable:
        def run(variables: Any, x: jax.Array) -> Any:
            outputs = []
            for i in range(2):
                y, updates = apply(variables, x[:, i : i + 1], mutable=["cache"])
                variables = {**variables, **updates}
                outputs.append(y)
            return jnp.concatenate(outputs, 1), variables["cache"]

        return run

    x = jax.random.normal(KEY, (16, 2, 8))
    variables = jax.jit(Decoder().init)(KEY, x)
    model, placed = linen.fully_shard(Decoder(), variables, modules="a")
    got = jax.jit(linen.shard_map(decode(model.apply), model))(placed, x)
    close(got, jax.jit(decode(Decoder().apply))(variables, x))
    beside = {**placed, "starts": {"at": jnp.zeros(16, int)}}
    with pytest.raises(
        ValueError, match=r"'.*at' of shape \(16,\) .* collection 'cache'"
    ):
        linen.shard_map(decode(model.apply), model)(beside, x)


# --- functions of parameters ------------------------------------------------------


def penalty(params: Any) -> Any:
    arrays = [p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)]
    return sum(jnp.sum(jnp.square(p)) for p in arrays if p.ndim > 1)


def anything(apply: Callable) -> Callable:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def step(total: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return total + jax.checkpoint(plain)(params, x, y), None

        plain = loss_with(apply)
        frozen = jax.lax.stop_gradient(params["blocks_0"])
        total = plain({**params, "blocks_0": frozen}, x, y)
        total, _ = jax.lax.scan(step, total, length=2)
        return total + 0.1 * penalty(params)

    return loss


def test_a_loss_may_do_anything_with_the_parameters():
    assert_trains(STACK, anything, modules="blocks_*")


@pytest.mark.slow
def test_a_teacher_and_parameters_in_the_results():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    teacher = jax.tree.map(lambda p: p + 0.1, placed["params"])

    def distill(apply: Callable) -> Callable:
        def loss(params: Any, teacher: Any, x: jax.Array) -> Any:
            target = apply({"params": teacher}, x)
            return jnp.mean((apply({"params": params}, x) - target) ** 2), params

        return loss

    step = jax.jit(linen.value_and_grad(distill(model.apply), model, has_aux=True))
    got = step(placed["params"], teacher, X)
    twin = jax.jit(jax.value_and_grad(distill(STACK.apply), has_aux=True))
    close(got, twin(VARIABLES["params"], jax.device_get(teacher), X))


def test_the_plain_module_works_too():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    step = jax.jit(linen.grad(loss_with(STACK.apply), model))
    close(step(placed["params"], X, Y), twin_gradients())


def test_shard_map_of_the_users_own():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    specs = jax.tree.map(lambda p: p.sharding.spec, placed["params"])
    rows = PartitionSpec("fsdp")
    step = jax.shard_map(
        jax.grad(loss_with(model.apply)),
        mesh=model.mesh.mesh,
        in_specs=(specs, rows, rows),
        out_specs=specs,
        check_vma=False,
    )
    close(jax.jit(step)(placed["params"], X, Y), twin_gradients())


def test_pending_gradients_are_added():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    off = model.with_groups(lambda g: g.set_requires_gradient_sync(False))
    _, pending = linen.value_and_grad(loss_with(off.apply), off)(placed["params"], X, Y)
    assert isinstance(pending, fsdp_jax.PendingGradients)
    step = linen.value_and_grad(loss_with(model.apply), model)
    _, got = step(placed["params"], X, Y, pending=pending)
    close(got, jax.tree.map(lambda g: 2 * g, twin_gradients()))


def test_a_batch_in_a_closure_is_warned_of():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    step = linen.value_and_grad(lambda p: loss_with(model.apply)(p, X, Y), model)
    with pytest.warns(UserWarning, match="every device computes all of the batch"):
        got = step(placed["params"])
    close(got[1], twin_gradients())


# --- policies and placement -------------------------------------------------------


@pytest.mark.slow
def test_bfloat16_is_gathered_and_float32_comes_back():
    policy = MixedPrecisionPolicy(jnp.bfloat16, jnp.float32)
    model, placed = linen.fully_shard(
        NOISY, NOISY_VARIABLES, modules="b*", mp_policy=policy
    )
    loss = noisy_loss(model.apply, KEY)
    step = jax.jit(linen.value_and_grad(loss, model, has_aux=True))
    lowered = step.lower(placed["params"], placed["batch_stats"], ROWS)
    gathers = re.findall(r"all_gather.*", lowered.as_text())
    assert gathers and all("bf16" in line for line in gathers)
    (_, updates), grads = step(placed["params"], placed["batch_stats"], ROWS)
    assert {x.dtype for x in jax.tree.leaves((updates, grads))} == {
        jnp.dtype(jnp.float32)
    }
    want = noisy_twin(8, 1)
    close(updates, want[0][1], rtol=0.1, atol=0.05)


def test_variables_are_born_sharded():
    shapes = jax.eval_shape(lambda: NOISY.init(KEY, X, False))
    model, places = linen.fully_shard(NOISY, shapes, modules="b*")
    variables = model.init(KEY, X, train=False)
    close(variables, NOISY_VARIABLES)
    for x, place in zip(*map(jax.tree.leaves, (variables, places)), strict=True):
        assert x.sharding == place.sharding
    kernel = variables["params"]["block_0"]["Dense_0"]["kernel"]
    assert kernel.sharding == NamedSharding(model.mesh.mesh, PartitionSpec("fsdp"))
    inside = jax.jit(lambda key: model.init(key, X, train=False))(KEY)
    close(inside, NOISY_VARIABLES)


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_partitioning(nn.initializers.normal(), ("embed", "mlp"))
        x = jnp.tanh(nn.Dense(WIDTH, kernel_init=init, name="unit_0")(x))
        return nn.Dense(WIDTH, kernel_init=init)(x)


def test_partitioned_boxes_stay_and_their_axes_need_not_exist():
    mesh = helpers.mesh_of(8)
    model, placed = assert_trains(Annotated(), modules="unit_0", mesh=mesh)
    kernel: Any = placed["params"]["unit_0"]["kernel"]
    assert nn.get_partition_spec(kernel) == PartitionSpec("embed", "mlp")
    assert kernel.value.sharding.spec == PartitionSpec("fsdp")
    tx = linen.optimizer(optax.adam(1e-2), model)
    state: Any = tx.init(placed["params"])
    moment = state[0].mu["unit_0"]["kernel"]
    assert moment.value.sharding == kernel.value.sharding
    keep = optax.GradientTransformation(lambda params: params, optax.identity().update)
    held: Any = linen.optimizer(keep, model).init(placed["params"])
    kept = held["unit_0"]["kernel"]
    pieces = [x.value.addressable_data(0) for x in (kernel, kept)]
    assert len({x.unsafe_buffer_pointer() for x in pieces}) == 2  # may be donated
    want = jax.jit(Annotated().apply)(jax.device_get(placed), X)
    with jax.set_mesh(mesh):
        close(model.apply(placed, X), want)
        born = model.init(KEY, X)
    close(born, jax.jit(Annotated().init)(KEY, X))


def test_frozen_dicts_stay_frozen():
    frozen = core.freeze(VARIABLES)
    model, placed = linen.fully_shard(STACK, frozen, modules="blocks_*")
    assert jax.tree.structure(placed) == jax.tree.structure(frozen)
    got = jax.eval_shape(
        linen.grad(loss_with(model.apply), model), placed["params"], X, Y
    )
    assert jax.tree.structure(got) == jax.tree.structure(frozen["params"])


def test_the_report_names_submodules():
    model, placed = linen.fully_shard(STACK, VARIABLES, modules="blocks_*")
    batch = fsdp_jax.shard_batch((X, Y), model)
    assert fsdp_jax.local_shape(batch[0]) == (3, WIDTH)
    loss = loss_with(model.apply)

    @jax.jit
    def step(variables: Any, x: jax.Array, y: jax.Array) -> Any:
        return linen.grad(loss, model)(variables["params"], x, y)

    report = fsdp_jax.comm_report(step, placed, *batch, compiled=False)
    groups = {row.group for row in report.rows if row.direction == "reduce-scatter"}
    assert groups == {"blocks_0", "blocks_1", "(root)"}
    share = sum(x.nbytes for x in jax.tree.leaves(VARIABLES)) // 8
    assert report.memory.parameter_bytes == share


# --- errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"modules": "layer_*"}, "names 'layer_\\*', but no submodule .* blocks_0"),
        ({"modules": Block}, "means by Block .* Give inputs=\\(x, ...\\)"),
        ({"modules": 3}, "takes paths such as 'blocks_\\*', .*got 3"),
        ({"modules": ("head", nn.Conv), "inputs": (X,)}, "names Conv, but no"),
        ({"modules": ("blocks_0", "blocks_0/*")}, "'blocks_0', whose parameters are"),
        ({"modules": {"head": {"nonsense": 1}}}, "gives \\['nonsense'\\] for 'head'"),
        ({"offload_policy": CPUOffloadPolicy(False)}, "Use CPUOffloadPolicy\\(\\)"),
        ({"ignored_params": "head"}, "ignored_params is a str"),
    ],
    ids=lambda value: None,
)
def test_arguments_that_cannot_be(kwargs, text):
    with pytest.raises((TypeError, ValueError), match=text):
        linen.fully_shard(STACK, VARIABLES, **kwargs)


def test_modules_and_variables_that_cannot_be():
    def refuse(kind: type, text: str, *args: Any) -> None:
        with pytest.raises(kind, match=text):
            linen.fully_shard(*args)

    model, placed = linen.fully_shard(STACK, VARIABLES)
    refuse(RuntimeError, "fully_shard has already been applied", model, placed)
    refuse(TypeError, "expected a Linen module, got MLP", helpers.MLP(nnx.Rngs(0)), {})
    refuse(ValueError, "is bound to variables", STACK.bind(VARIABLES), VARIABLES)
    refuse(ValueError, "what module.init returns", STACK, VARIABLES["params"])
    named = {"params": {"reshard": {"kernel": X}}}
    refuse(ValueError, "has a part called 'reshard'", STACK, named)
    with pytest.raises(TypeError, match="model must be the ShardedModule"):
        linen.value_and_grad(loss_with(model.apply), STACK)  # pyright: ignore
    step = linen.value_and_grad(loss_with(model.apply), model)
    params = placed["params"]
    with pytest.raises(ValueError, match="the parameters lack 'blocks_0/"):
        step({"head": params["head"]}, X, Y)
    with pytest.raises(ValueError, match="'other' is no parameter of the sharded"):
        step({**params, "other": X}, X, Y)
    with pytest.raises(ValueError, match=r"has shape \(2,\), but the .* \(16,\)"):
        step({**params, "head": jax.tree.map(lambda p: p[:2], params["head"])}, X, Y)
    with pytest.raises(ValueError, match="argument 'x' has size 3 on dim 0"):
        step(params, X[:3], Y[:3])


def test_sizes_that_do_not_divide_are_padded():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(5)(nn.tanh(nn.Dense(13, name="inner")(x)))

    def loss(apply: Any) -> Any:
        return lambda params, x: jnp.mean(apply({"params": params}, x) ** 2)

    x = jax.random.normal(jax.random.key(1), (12, 9))
    variables = variables_of(Odd(), x)
    model, placed = linen.fully_shard(
        Odd(), variables, modules="inner", mesh=helpers.mesh_of(3), uneven="pad"
    )
    assert placed["params"]["Dense_0"]["kernel"].shape == (15, 5)
    tx = optax.adamw(1e-2, eps=1e-3)
    plain = TrainState.create(apply_fn=Odd().apply, params=variables["params"], tx=tx)
    state = TrainState.create(
        apply_fn=model.apply, params=placed["params"], tx=linen.optimizer(tx, model)
    )

    @jax.jit
    def plain_step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss(state.apply_fn))(state.params, x)
        return state.apply_gradients(grads=grads), value

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        value, grads = linen.value_and_grad(loss(model.apply), model)(state.params, x)
        return state.apply_gradients(grads=grads), value

    for _ in range(3):
        plain, want = plain_step(plain, x)
        state, got = step(state, x)
        np.testing.assert_allclose(got, want, 1e-5)
    want: Any = jax.jit(Odd().apply)({"params": plain.params}, x)
    np.testing.assert_allclose(model.apply({"params": state.params}, x), want, 1e-4)


@pytest.mark.parametrize("uneven", ["pad", "auto"])
def test_other_groups_parameters_are_read_by_methods_and_as_arrays(uneven):
    class Tied(nn.Module):
        def setup(self):
            self.embed, self.out = nn.Embed(7, 6), nn.Dense(6)

        def __call__(self, ids: jax.Array) -> jax.Array:
            x = self.out(self.embed(ids))
            own = self.out.variables["params"]
            x = x @ own["kernel"] + own["bias"] ** 2
            return self.embed.attend(x * (1 + own["kernel"].mean()) / own["kernel"][0])

    def loss(apply: Any) -> Any:
        return lambda params, ids: jnp.mean(apply({"params": params}, ids) ** 2)

    ids = jnp.arange(12) % 7
    params = Tied().init(jax.random.key(0), ids)["params"]
    model, placed = linen.fully_shard(
        Tied(),
        {"params": params},
        modules=("embed", "out"),
        mesh=helpers.mesh_of(4),
        uneven=uneven,
    )
    want = jax.jit(jax.value_and_grad(loss(Tied().apply)))(params, ids)
    value, grads = linen.value_and_grad(loss(model.apply), model)(placed["params"], ids)
    np.testing.assert_allclose(value, want[0], 1e-5)
    np.testing.assert_allclose(loss(model.apply)(placed["params"], ids), want[0], 1e-5)
    rows = lambda g, w: g[: w.shape[0]]  # noqa: E731  (padding has no gradient)
    helpers.assert_trees_close(jax.tree.map(rows, grads, want[1]), want[1])


def test_another_configuration_of_a_module_runs_on_padded_parameters():
    class Net(nn.Module):
        decode: bool = False

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(5)(nn.tanh(nn.Dense(13, name="inner")(x)))
            if self.decode:
                calls = self.variable("cache", "last", jnp.zeros, x.shape)
                x = calls.value = x + calls.value
            return x

    x = jax.random.normal(jax.random.key(1), (12, 9))
    variables, decode = variables_of(Net(), x), Net(decode=True)
    shapes = {"modules": "inner", "mesh": helpers.mesh_of(4), "uneven": "pad"}
    model, placed = linen.fully_shard(Net(), variables, **shapes)
    cache = {"cache": {"last": jnp.ones((12, 5))}}
    other = model.with_module(decode, jax.eval_shape(decode.init, KEY, x))

    def run(apply: Any) -> Any:
        return lambda given, x: apply(given, x, mutable=["cache"])

    want = jax.jit(run(decode.apply))({**variables, **cache}, x)
    found = other.apply({**placed, **cache}, x, mutable=["cache"])
    close(found, want)
    found = linen.shard_map(run(other.apply), other)({**placed, **cache}, x)
    close(found, want)
    again, _ = linen.fully_shard(decode, placed, **shapes)
    with pytest.raises(ValueError, match=r"\(9, 13\).*\(12, 13\).*with_module"):
        again.apply({**placed, **cache}, x)
    with pytest.raises(TypeError, match="with_module: expected a Linen module"):
        model.with_module(nnx.Linear)  # type: ignore[arg-type]
