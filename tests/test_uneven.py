"""Sizes that do not divide by the number of devices, and what padding hides."""

import functools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, Shard, fully_shard
from fsdp_jax._managed import spec_of
from tests import helpers


class Odd(nnx.Module):
    """Linear layers of odd widths, a scalar, and a parameter of one row."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            [nnx.Linear(9, 5, rngs=rngs), nnx.Linear(5, 13, rngs=rngs)]
        )
        self.head = nnx.Linear(13, 3, rngs=rngs)
        self.gain = nnx.Param(jnp.full((), 1.5, jnp.float32))
        self.row = nnx.Param(jnp.full((1, 3), 0.25, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x) * self.gain[...] + self.row[...]


def batch(devices: int, rows: int = 2) -> tuple[jax.Array, jax.Array]:
    rng, rows = np.random.default_rng(1), devices * rows
    x, y = rng.normal(size=(rows, 9)), rng.normal(size=(rows, 3))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


@functools.cache
def plain_gradients(devices: int, rows: int = 2) -> Any:
    """Those of the unsharded model for the `batch` of so many devices."""
    grad = nnx.jit(nnx.grad(helpers.mean_square))
    return own_values(grad(Odd(nnx.Rngs(0)), *batch(devices, rows)))


@nnx.jit
def forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def sharded(mesh: Mesh, model: Any = None, **kwargs: Any) -> Any:
    model = Odd(nnx.Rngs(0)) if model is None else model
    return helpers.shard_blocks(model, mesh=mesh, uneven="pad", **kwargs)


def tx() -> optax.GradientTransformation:
    clip = optax.clip_by_global_norm(0.5)
    return optax.chain(clip, optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))


def own_values(tree: Any) -> Any:
    """The values of the Variables of a tree, as their users see them."""
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    return jax.tree.map(
        lambda v: np.asarray(v[...]),
        tree,
        is_leaf=lambda v: isinstance(v, nnx.Variable),
    )


def assert_padding_is_zero(tree: Any) -> None:
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    for v in jax.tree.leaves(tree, is_leaf=lambda v: isinstance(v, nnx.Variable)):
        spec = spec_of(v)
        if spec is not None and spec.padding and spec.dim is not None:
            raw = np.moveaxis(np.asarray(v.get_raw_value()), spec.dim, 0)
            assert raw.shape[0] == spec.size + spec.padding
            assert not raw[spec.size :].any()


def trained(model: Any, value_and_grad: Any, data: Any, make: Any, steps: int = 3):
    losses = helpers.train(
        model,
        value_and_grad,
        helpers.mean_square,
        data,
        steps=steps,
        make_optimizer=make,
    )
    return np.array(losses), own_values(model)


@functools.cache
def twin(devices: int, make_tx: Any = tx, steps: int = 3):
    """What the unsharded model comes to with the `batch` of so many devices."""
    return trained(
        Odd(nnx.Rngs(0)),
        nnx.value_and_grad,
        batch(devices),
        lambda m: nnx.Optimizer(m, make_tx(), wrt=nnx.Param),
        steps,
    )


def assert_same(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got[0], want[0], 1e-5)
    helpers.assert_trees_close(got[1], want[1])


@pytest.mark.parametrize(
    ("devices", "reshard"),
    [(1, None), (3, True), (6, None), (8, False)],
)
def test_training_equals_the_twin(devices: int, reshard: bool | None) -> None:
    data = batch(devices)
    model = sharded(helpers.mesh_of(devices), reshard_after_forward=reshard)
    got = trained(
        model,
        fsdp_jax.value_and_grad,
        data,
        lambda m: fsdp_jax.Optimizer(m, tx()),
    )
    assert_same(got, twin(devices))
    assert_padding_is_zero(model)
    for row in fsdp_jax.describe(model).rows:
        assert row.dim == 0 or not row.shape or devices == 1, row


def test_nnx_optimizer_and_its_moments() -> None:
    mesh, data, made = helpers.mesh_of(3), batch(3), []

    def make(model: Any) -> nnx.Optimizer:
        made.append(nnx.Optimizer(model, tx(), wrt=nnx.Param))
        return made[0]

    model = sharded(mesh)
    got = trained(model, fsdp_jax.value_and_grad, data, make)
    assert_same(got, twin(3))
    adam = made[0].opt_state[1][0]
    for moments in (adam.mu, adam.nu):
        for (path, p), (_, m) in zip(
            nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(moments)
        ):
            assert m.get_raw_value().sharding == p.get_raw_value().sharding, path
            assert fsdp_jax.local_shape(m) == fsdp_jax.local_shape(p), path


def test_moments_of_our_optimizer_show_no_padding() -> None:
    model = sharded(helpers.mesh_of(3))
    optimizer = fsdp_jax.Optimizer(model, tx())
    mu = optimizer.opt_state[1][0].mu["layers"][1]["kernel"]
    assert mu.shape == (5, 13) and mu[...].shape == (5, 13)
    assert mu.get_raw_value().shape == (6, 13)
    assert mu.get_raw_value().sharding.spec == PartitionSpec("fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "lamb", "noise"])
def test_updates_that_are_not_elementwise_do_not_see_it(name: str) -> None:
    def make_tx() -> optax.GradientTransformation:
        if name == "adafactor":
            return optax.adafactor(1e-2, min_dim_size_to_factor=3)
        if name == "lamb":
            return optax.lamb(1e-2)
        return optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), tx())

    data = batch(3)
    model = sharded(helpers.mesh_of(3))
    got = trained(
        model,
        fsdp_jax.value_and_grad,
        data,
        lambda m: fsdp_jax.Optimizer(m, make_tx()),
    )
    assert_same(got, twin(3, make_tx))
    assert_padding_is_zero(model)


def test_the_update_moves_nothing() -> None:
    model = sharded(helpers.mesh_of(3))
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    grads = nnx.state(model)

    @nnx.jit
    def update(model: Any, optimizer: Any, grads: Any) -> None:
        optimizer.update(model, grads)

    lowered = update.lower(model, optimizer, grads)
    text = lowered.compile().as_text()
    assert text and not re.findall(
        r"all-gather|all-to-all|collective-permute|all-reduce", text
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicas", "two axes", "explicit"])
def test_other_meshes(layout: str) -> None:
    devices = np.array(jax.devices()[:6])
    if layout == "explicit":
        mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Explicit,))
    else:
        mesh = Mesh(devices.reshape(2, 3), ("a", "b"))
    dims = None
    if layout == "two axes":
        dims = fsdp_jax.DataParallelMeshDims(shard=("a", "b"))
    data = batch(6)
    got = trained(
        sharded(mesh, dp_mesh_dims=dims),
        fsdp_jax.value_and_grad,
        data,
        lambda m: fsdp_jax.Optimizer(m, tx()),
    )
    assert_same(got, twin(6))


def test_a_dim_that_another_axis_cuts_within_pieces() -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("fsdp", "tp"))
    dims = fsdp_jax.DataParallelMeshDims(shard="fsdp")

    def linear(spec: PartitionSpec) -> Any:
        layer = nnx.Linear(10, 4, use_bias=False, rngs=nnx.Rngs(0))
        placed = jax.device_put(layer.kernel[...], NamedSharding(mesh, spec))
        layer.kernel[...] = placed
        return layer

    with pytest.raises(NotImplementedError, match="'kernel'.*cannot pad within"):
        layer = linear(PartitionSpec("tp"))
        fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, uneven="pad")
    layer = linear(PartitionSpec(None, "tp"))
    fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, uneven="pad")
    assert layer.kernel.sharding.spec == PartitionSpec("fsdp", "tp")
    assert fsdp_jax.local_shape(layer.kernel) == (4, 2)
    x = jnp.ones((6, 10))
    grads = nnx.jit(fsdp_jax.grad(lambda m, x: jnp.mean(m(x) ** 2)))(layer, x)
    plain = linear(PartitionSpec())
    want = nnx.jit(nnx.grad(lambda m: jnp.mean(m(x) ** 2)))(plain)
    np.testing.assert_allclose(grads["kernel"][...], want["kernel"][...], 1e-5)


@pytest.mark.slow
def test_microbatches_pending_and_synchronize() -> None:
    data = batch(3, rows=4)
    model, want = sharded(helpers.mesh_of(3)), plain_gradients(3, rows=4)
    grad = nnx.jit(fsdp_jax.grad(helpers.mean_square, num_microbatches=2))
    helpers.assert_trees_close(own_values(grad(model, *data)), want)
    model.set_requires_gradient_sync(False)
    helpers.assert_trees_close(own_values(grad(model, *data)), want)
    pending = fsdp_jax.grad(helpers.mean_square)(model, *data)
    assert pending.unreduced["layers.1.kernel"].shape == (3, 5, 13)
    done = model.synchronize_gradients(pending)
    helpers.assert_trees_close(own_values(done), want)
    model.set_requires_gradient_sync(True)
    both = fsdp_jax.grad(helpers.mean_square)(model, *data, pending=pending)
    twice = jax.tree.map(lambda g: 2 * g, want)
    helpers.assert_trees_close(own_values(both), twice)
    assert_padding_is_zero(both)


def test_replicas_with_all_reduce_off() -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("replica", "fsdp"))
    data, model, want = batch(6), sharded(mesh), plain_gradients(6)
    model.set_requires_all_reduce(False)
    pending = fsdp_jax.grad(helpers.mean_square)(model, *data)
    assert pending.partial["layers.1.kernel"].shape == (2, 6, 13)
    done = model.synchronize_gradients(pending)
    helpers.assert_trees_close(own_values(done), want)


@pytest.mark.parametrize("policy", ["bfloat16", "offload"])
def test_policies(policy: str) -> None:
    data = batch(3)
    kwargs: dict[str, Any] = {"offload_policy": fsdp_jax.CPUOffloadPolicy()}
    if policy == "bfloat16":
        kwargs = {"mp_policy": MixedPrecisionPolicy(param_dtype=jnp.bfloat16)}
    model = sharded(helpers.mesh_of(3), **kwargs)
    got = trained(
        model,
        fsdp_jax.value_and_grad,
        data,
        lambda m: fsdp_jax.Optimizer(m, tx()),
    )
    want = twin(3)
    if policy == "offload":
        assert_same(got, want)
        assert model.head.kernel.sharding.memory_kind == "pinned_host"
        return
    np.testing.assert_allclose(got[0], want[0], 2e-2)
    assert model.head.kernel.dtype == jnp.float32


@pytest.mark.slow
def test_packing_and_gathering_alone_agree() -> None:
    data = batch(5)
    model = sharded(helpers.mesh_of(5))
    grad = nnx.jit(fsdp_jax.grad(helpers.mean_square))
    packed = own_values(grad(model, *data))
    for module in (*model.layers, model):
        module.set_packing_threshold_bytes(0)
    helpers.assert_trees_close(own_values(grad(model, *data)), packed, rtol=1e-6)


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_global_arrays(jit: Any) -> None:
    data = batch(3)
    want = forward(Odd(nnx.Rngs(0)), data[0])
    model = sharded(helpers.mesh_of(3))
    np.testing.assert_allclose(jit(lambda m, x: m(x))(model, data[0]), want, 1e-5)
    got = jit(nnx.grad(helpers.mean_square))(model, *data)
    helpers.assert_trees_close(own_values(got), plain_gradients(3))
    assert_padding_is_zero(got)


def test_a_loss_that_reads_parameters_on_global_arrays() -> None:
    def loss(model: Any, x: jax.Array) -> jax.Array:
        kernel = model.layers[1].kernel
        penalty = jnp.mean(kernel**2) + kernel.get_value().mean() + kernel.T.std()
        return jnp.mean(model(x)) + penalty + jnp.var(kernel) + len(kernel) / 7

    data, plain = batch(3), Odd(nnx.Rngs(0))
    model = sharded(helpers.mesh_of(3))
    want_value, want = nnx.jit(nnx.value_and_grad(loss))(plain, data[0])
    value, got = nnx.jit(nnx.value_and_grad(loss))(model, data[0])
    np.testing.assert_allclose(value, want_value, 1e-5)
    helpers.assert_trees_close(own_values(got), own_values(want))


def test_a_shard_that_is_read_in_a_program_of_one_device_raises() -> None:
    model = sharded(helpers.mesh_of(3))
    with pytest.raises(RuntimeError, match="'row' is read while it is sharded"):
        fsdp_jax.grad(lambda m, x: jnp.sum(m.row[...]))(model, batch(3)[0])
    with pytest.raises(RuntimeError, match="layers.1.kernel"):
        fsdp_jax.grad(lambda m, x: jnp.sum(m.layers[1].kernel.shape[0]))(
            model, batch(3)[0]
        )


def test_unsharded_inside_and_outside() -> None:
    data, model = batch(3), sharded(helpers.mesh_of(3))

    def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        model.unshard()
        row = model.row[...]
        model.reshard()
        return helpers.mean_square(model, x, y) + jnp.mean(row)

    def plain_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return helpers.mean_square(model, x, y) + jnp.mean(model.row[...])

    want = own_values(nnx.jit(nnx.grad(plain_loss))(Odd(nnx.Rngs(0)), *data))
    helpers.assert_trees_close(own_values(fsdp_jax.grad(loss)(model, *data)), want)
    model.unshard()
    assert model.row.get_raw_value().shape == (1, 3)
    got = fsdp_jax.grad(helpers.mean_square)(model, *data)
    helpers.assert_trees_close(own_values(got), plain_gradients(3))
    model.row[...] = jnp.full((1, 3), 3.0)
    model.reshard()
    assert model.row.get_raw_value().shape == (3, 3)
    np.testing.assert_array_equal(model.row[...], np.full((1, 3), 3.0))


def test_shard_map_and_registered_methods() -> None:
    model = sharded(helpers.mesh_of(3))
    x, plain = batch(3)[0], Odd(nnx.Rngs(0))
    got = fsdp_jax.shard_map(lambda m, x: m(x))(model, x)
    np.testing.assert_allclose(got, forward(plain, x), 1e-5)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stack_in_a_scan(ahead: bool) -> None:
    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(7, 7, rngs=rngs)

    class Stack(nnx.Module):
        def __init__(self, ahead: bool) -> None:
            self.layers, self.ahead = make(nnx.Rngs(0)), ahead

        def __call__(self, x: jax.Array) -> jax.Array:
            if self.ahead:
                return fsdp_jax.scan_layers(self.layers, x, remat=True)
            run = nnx.scan(
                nnx.remat(lambda layer, x: jnp.tanh(layer(x))),
                in_axes=(0, nnx.Carry),
                out_axes=nnx.Carry,
            )
            return run(self.layers, x)

    x = jax.random.normal(jax.random.key(0), (3, 7))
    want = nnx.jit(nnx.grad(lambda m, x: jnp.mean(m(x) ** 2)))(Stack(ahead), x)
    model = Stack(ahead)
    mesh = helpers.mesh_of(3)
    fully_shard(model.layers, mesh=mesh, uneven="pad")
    fully_shard(model, mesh=mesh, uneven="pad")
    assert model.layers.kernel.sharding.spec == PartitionSpec(None, "fsdp")
    bias: Any = model.layers.bias
    assert bias.sharding.spec == PartitionSpec(None, "fsdp")
    got = nnx.jit(fsdp_jax.grad(lambda m, x: jnp.mean(m(x) ** 2)))(model, x)
    helpers.assert_trees_close(own_values(got), own_values(want))


# --- what a Variable shows --------------------------------------------------------


def test_chunks_are_those_of_pytorch_and_end_in_zeros() -> None:
    linear = nnx.Linear(9, 4, rngs=nnx.Rngs(0))
    values = np.asarray(linear.kernel[...])
    fully_shard(linear, mesh=helpers.mesh_of(4), uneven="pad")
    pieces = [
        np.asarray(s.data) for s in linear.kernel.get_raw_value().addressable_shards
    ]
    for piece, rows in zip(pieces, [values[:3], values[3:6], values[6:9], values[9:]]):
        assert piece.shape == (3, 4)
        np.testing.assert_array_equal(piece[: len(rows)], rows)
        assert not piece[len(rows) :].any()


def test_what_a_padded_parameter_shows() -> None:
    linear = nnx.Linear(9, 4, rngs=nnx.Rngs(0))
    values = np.asarray(linear.kernel[...])
    fully_shard(linear, mesh=helpers.mesh_of(4), uneven="pad")
    kernel = linear.kernel
    assert kernel.shape == (9, 4) and kernel.ndim == 2 and kernel.size == 36
    assert kernel.sharding.spec == PartitionSpec("fsdp")
    assert fsdp_jax.local_shape(kernel) == (3, 4)
    assert kernel.get_raw_value().shape == (12, 4)
    assert kernel.addressable_shards[0].data.shape == (3, 4)
    for seen in (
        kernel[...],
        kernel.get_value(),
        jnp.asarray(kernel),
        kernel + 0,
        0 + kernel,
        kernel.T.T,
    ):
        np.testing.assert_array_equal(seen, values)
    assert kernel[8, 1] == values[8, 1] and kernel[-1, 1] == values[-1, 1]
    np.testing.assert_allclose(kernel.mean(), values.mean(), 1e-6)
    assert "# 36 (144 B)" in repr(kernel)
    row = fsdp_jax.describe(linear).rows[1]
    assert (row.shape, row.local_shape, row.padding) == ((9, 4), (3, 4), 3)
    assert "0 (+3)" in str(fsdp_jax.describe(linear))


def test_writing_to_a_padded_parameter() -> None:
    linear = fully_shard(
        nnx.Linear(9, 4, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4), uneven="pad"
    )
    rest = linear.kernel.get_raw_value().sharding
    new = np.arange(36, dtype=np.float32).reshape(9, 4)

    def check(value: np.ndarray) -> None:
        np.testing.assert_array_equal(linear.kernel[...], value)
        assert linear.kernel.get_raw_value().sharding == rest
        assert_padding_is_zero(linear)

    linear.kernel[...] = new
    check(new)
    linear.kernel[8] = 7.0
    new[8] = 7.0
    check(new)
    linear.kernel.set_value(jnp.asarray(2 * new))
    check(2 * new)
    nnx.update(linear, {"kernel": new})
    check(new)
    nnx.update(linear, nnx.state(fully_shard(nnx.Linear(9, 4, rngs=nnx.Rngs(3)))))
    check(np.asarray(nnx.Linear(9, 4, rngs=nnx.Rngs(3)).kernel[...]))

    @nnx.jit
    def double(m: Any) -> None:
        m.kernel[...] *= 2
        m.kernel[0] = 5.0

    new = 2 * np.asarray(linear.kernel[...])
    new[0] = 5.0
    double(linear)
    check(new)
    with pytest.raises(ValueError, match="ncompatible"):
        linear.kernel[...] = jnp.zeros((12, 4))
    check(new)


def test_state_dicts_go_between_numbers_of_devices() -> None:
    source = sharded(helpers.mesh_of(3))
    want = Odd(nnx.Rngs(0))
    state = source.state_dict()
    for path, v in nnx.to_flat_state(nnx.state(want)):
        np.testing.assert_array_equal(state[".".join(map(str, path))], v[...])
    target = sharded(helpers.mesh_of(7), Odd(nnx.Rngs(5)))
    target.load_state_dict(state)
    helpers.assert_trees_close(own_values(target), own_values(want), rtol=0, atol=0)
    assert_padding_is_zero(target)
    with pytest.raises(ValueError, match=r"needs the full shape \(5, 13\)"):
        target.load_state_dict({**state, "layers.1.kernel": np.zeros((6, 13))})


def test_norms_do_not_count_it() -> None:
    model, plain = sharded(helpers.mesh_of(5)), Odd(nnx.Rngs(0))
    values = [np.ravel(x) for x in jax.tree.leaves(own_values(plain))]
    want = np.linalg.norm(np.concatenate(values))
    np.testing.assert_allclose(fsdp_jax.global_norm(model), want, 1e-6)
    norm = nnx.jit(optax.tree.norm)
    np.testing.assert_allclose(norm(nnx.state(model)), want, 1e-6)
    np.testing.assert_allclose(
        nnx.jit(lambda m: fsdp_jax.global_norm(nnx.state(m)))(model), want, 1e-6
    )


@pytest.mark.slow
def test_clone_pickle_split_and_average() -> None:
    model, x = sharded(helpers.mesh_of(3)), batch(3)[0]
    want = forward(Odd(nnx.Rngs(0)), x)
    for copy in (
        nnx.clone(model),
        pickle.loads(pickle.dumps(model)),
        nnx.merge(*nnx.split(model)),
    ):
        np.testing.assert_allclose(copy(x), want, 1e-5)
        assert copy.row.get_raw_value().shape == (3, 3)
    average = nnx.clone(model)
    nnx.update(
        average,
        jax.tree.map(lambda a, b: (a + b) / 2, nnx.state(average), nnx.state(model)),
    )
    helpers.assert_trees_close(own_values(average), own_values(model))
    ema = nnx.EMA(model, 0.9, only=nnx.Param)
    nnx.jit(lambda ema, model: ema.update(model))(ema, model)
    helpers.assert_trees_close(
        own_values(ema.apply_to(model)), own_values(model), rtol=1e-5
    )


def test_abstract_models_and_birth_inside_jit() -> None:
    mesh = helpers.mesh_of(3)
    model = sharded(mesh, nnx.eval_shape(lambda: Odd(nnx.Rngs(0))))
    assert model.head.kernel.shape == (13, 3)
    assert model.head.kernel.get_raw_value().shape == (15, 3)
    nnx.update(model, nnx.state(Odd(nnx.Rngs(0))))
    helpers.assert_trees_close(own_values(model), own_values(Odd(nnx.Rngs(0))))
    born = nnx.jit(lambda: sharded(mesh))()
    helpers.assert_trees_close(own_values(born), own_values(Odd(nnx.Rngs(0))))
    assert fsdp_jax.local_shape(born.head.kernel) == (5, 3)


def test_eager_forwards_and_integers_of_reshard_after_forward() -> None:
    x = batch(3)[0]
    model = sharded(helpers.mesh_of(3), reshard_after_forward=2)
    want = forward(Odd(nnx.Rngs(0)), x)
    for full in (True, False):
        np.testing.assert_allclose(model(x), want, 1e-5)
        assert (model.row.get_raw_value().shape == (1, 3)) == full


# --- the other two words ----------------------------------------------------------


def test_auto_cuts_another_dim_or_none() -> None:
    model = Odd(nnx.Rngs(0))
    fully_shard(model, mesh=helpers.mesh_of(3))
    rows = {row.path: row for row in fsdp_jax.describe(model).rows}
    assert rows["layers.0.kernel"].dim == 0
    assert rows["row"].dim == 1
    assert rows["layers.1.kernel"].dim is None
    assert rows["layers.1.kernel"].reason == "no dim of (5, 13) divides by 3"
    assert rows["gain"].reason == "a scalar has no dim to cut"


def test_error_names_the_parameter_and_changes_nothing() -> None:
    model = Odd(nnx.Rngs(0))
    before = jax.tree.map(lambda x: x.sharding, nnx.state(model))
    with pytest.raises(ValueError) as error:
        fully_shard(model, mesh=helpers.mesh_of(3), uneven="error")
    assert "'head.kernel' of shape (13, 3)" in str(error.value)
    assert "13 does not divide over 3 devices" in str(error.value)
    assert "uneven='pad'" in str(error.value)
    assert type(model) is Odd
    assert jax.tree.map(lambda x: x.sharding, nnx.state(model)) == before
    fully_shard(nnx.Linear(9, 3, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(3))


def test_unknown_words_are_refused() -> None:
    zeros: Any = "zeros"
    with pytest.raises(ValueError, match="uneven must be one of .* got 'zeros'"):
        fully_shard(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), uneven=zeros)


def test_a_failed_call_gives_padded_parameters_back() -> None:
    class Broken(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(9, 5, rngs=nnx.Rngs(0))

    model = Broken()
    kernel = model.linear.kernel
    kernel.set_metadata(note="mine", out_sharding=None)
    metadata, value = kernel.get_metadata(), np.asarray(kernel[...])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_jax._fully_shard.convert", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fully_shard(model, mesh=helpers.mesh_of(4), uneven="pad")
    assert type(kernel) is nnx.Param and kernel.get_metadata() == metadata
    np.testing.assert_array_equal(kernel.get_raw_value(), value)


def test_asked_dims_are_padded_too() -> None:
    linear = nnx.Linear(4, 9, use_bias=False, rngs=nnx.Rngs(0))
    mesh = helpers.mesh_of(4)
    with pytest.raises(NotImplementedError, match="9 does not divide over 4"):
        fully_shard(linear, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    fully_shard(linear, mesh=mesh, shard_placement_fn=lambda _: Shard(1), uneven="pad")
    assert fsdp_jax.local_shape(linear.kernel) == (4, 3)
    x = jax.random.normal(jax.random.key(0), (4, 4))
    want = nnx.Linear(4, 9, use_bias=False, rngs=nnx.Rngs(0))(x)
    got = fsdp_jax.shard_map(lambda m, x: m(x))(linear, x)
    np.testing.assert_allclose(got, want, 1e-5)


@pytest.mark.parametrize("devices", [1, 3, 7])
def test_a_state_of_a_model_on_other_devices_is_taken_without_its_padding(
    devices: int,
) -> None:
    want = own_values(Odd(nnx.Rngs(5)))
    source = sharded(helpers.mesh_of(devices), Odd(nnx.Rngs(5)))
    target = sharded(helpers.mesh_of(5))
    nnx.update(target, nnx.state(source))
    helpers.assert_trees_close(own_values(target), want, rtol=0, atol=0)
    assert_padding_is_zero(target)
    expected = forward(Odd(nnx.Rngs(5)), batch(5)[0])
    np.testing.assert_allclose(target(batch(5)[0]), expected, 1e-5)


@pytest.mark.parametrize("shape", [(10, 4), (12, 4), (3, 4)])
def test_values_of_other_sizes_are_refused(shape: tuple[int, int]) -> None:
    linear: Any = nnx.Linear(9, 4, rngs=nnx.Rngs(0))
    want = np.asarray(linear.kernel[...])
    fully_shard(linear, mesh=helpers.mesh_of(4), uneven="pad")
    wrong = jnp.ones(shape)
    for write in (
        lambda: linear.kernel.set_value(wrong),
        lambda: nnx.update(linear, nnx.State({"kernel": nnx.Param(wrong)})),
        lambda: nnx.jit(lambda m: m.kernel.set_value(jnp.ones(shape)))(linear),
    ):
        with pytest.raises(ValueError, match="'kernel' has 9 rows on dim -2"):
            write()
        np.testing.assert_array_equal(linear.kernel[...], want)
    even: Any = fully_shard(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="'kernel' has 8 rows on dim -2"):
        even.kernel.set_value(jnp.ones((16, 4)))
    assert even.kernel.shape == (8, 4)


@pytest.mark.slow
def test_arguments_of_the_update_lose_their_padding_too() -> None:
    data = batch(3)

    def run(model: Any, make: Any, value_and_grad: Any) -> Any:
        optimizer = make(model, optax.lbfgs(linesearch=None, learning_rate=0.1))

        @nnx.jit
        def step(model: Any, optimizer: Any, *data: Any) -> jax.Array:
            value, grads = value_and_grad(helpers.mean_square)(model, *data)
            optimizer.update(
                model, grads, grad=grads, value=value, value_fn=lambda p: value
            )
            return value

        return [float(step(model, optimizer, *data)) for _ in range(2)]

    plain, model = Odd(nnx.Rngs(0)), sharded(helpers.mesh_of(3))
    want = run(
        plain, lambda m, tx: nnx.Optimizer(m, tx, wrt=nnx.Param), nnx.value_and_grad
    )
    got = run(model, fsdp_jax.Optimizer, fsdp_jax.value_and_grad)
    np.testing.assert_allclose(got, want, 1e-4)
    helpers.assert_trees_close(own_values(model), own_values(plain), rtol=1e-3)


def test_state_dicts_of_tensor_parallel_parameters() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    layer: Any = nnx.Linear(9, 4, use_bias=False, rngs=nnx.Rngs(0))
    want = np.asarray(layer.kernel[...])
    target = NamedSharding(mesh, PartitionSpec(None, "tp"))
    layer.kernel[...] = jax.device_put(layer.kernel[...], target)
    dims = fsdp_jax.DataParallelMeshDims(shard="fsdp")
    fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, uneven="pad")
    state = layer.state_dict()["kernel"]
    np.testing.assert_array_equal(state, want)
    assert state.sharding.spec == PartitionSpec(None, "tp")


def test_the_norm_is_of_the_rows_of_the_parameter() -> None:
    linear = nnx.Linear(9, 8, use_bias=False, rngs=nnx.Rngs(0))
    fully_shard(linear, mesh=helpers.mesh_of(4), uneven="pad")
    nnx.update(linear, jax.tree.map(jnp.ones_like, nnx.state(linear)))
    np.testing.assert_allclose(fsdp_jax.global_norm(linear) ** 2, 72, 1e-6)
    norm = nnx.jit(lambda m: fsdp_jax.global_norm(nnx.state(m)))
    np.testing.assert_allclose(norm(linear) ** 2, 72, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unshard", "kept"])
def test_a_model_that_is_unsharded_trains(how: str) -> None:
    data = batch(3)
    model = sharded(
        helpers.mesh_of(3), reshard_after_forward=False if how == "kept" else None
    )
    optimizer = fsdp_jax.Optimizer(model, tx())
    if how == "kept":
        model(data[0])  # an evaluation, which leaves every module full
    else:
        model.unshard()
    update = nnx.jit(lambda optimizer, *args: optimizer.update(*args))
    losses = []
    for _ in range(2):
        value, grads = fsdp_jax.value_and_grad(helpers.mean_square)(model, *data)
        update(optimizer, model, grads)
        losses.append(float(value))
    assert_same((losses, own_values(model)), twin(3, steps=2))


@pytest.mark.parametrize("shape", [(3, 1, 4), (6, 5, 5)])
def test_factored_moments_of_stacks(shape: tuple[int, int, int]) -> None:
    class Stack(nnx.Module):
        def __init__(self) -> None:
            made = jax.random.normal(jax.random.key(0), shape)
            self.kernel = nnx.Param(made)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.einsum("bi,lio->bo", x, jnp.sin(self.kernel[...]))

    def make_tx() -> optax.GradientTransformation:
        return optax.adafactor(1e-1, min_dim_size_to_factor=2)

    x = jax.random.normal(jax.random.key(1), (6, shape[1]))
    data = (x, jnp.ones((6, shape[2])))
    model = Stack()
    fully_shard(
        model,
        mesh=helpers.mesh_of(3),
        uneven="pad",
        shard_placement_fn=lambda _: Shard(1),
    )
    got = trained(
        model,
        fsdp_jax.value_and_grad,
        data,
        lambda m: fsdp_jax.Optimizer(m, make_tx()),
    )
    want = trained(
        Stack(),
        nnx.value_and_grad,
        data,
        lambda m: nnx.Optimizer(m, make_tx(), wrt=nnx.Param),
    )
    assert_same(got, want)


def test_a_loop_over_the_padded_dim_of_a_variable_is_refused() -> None:
    class Experts(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.arange(20.0).reshape(5, 4))

        def mean(self, over: Any) -> jax.Array:
            return nnx.vmap(lambda w: w[...].sum())(over).mean()

    model = fully_shard(Experts(), mesh=helpers.mesh_of(3), uneven="pad")
    for jit in (lambda f: f, nnx.jit):
        with pytest.raises(ValueError, match=r"'w' is cut on dim -2.*param\[\.\.\.\]"):
            jit(lambda m: m.mean(m.w))(model)
        got = jit(lambda m: m.mean(m.w[...]))(model)
        np.testing.assert_allclose(got, Experts().mean(Experts().w[...]), 1e-6)


def test_a_plain_model_takes_the_rows_of_the_parameters() -> None:
    plain = Odd(nnx.Rngs(3))
    nnx.update(plain, nnx.to_pure_dict(nnx.state(sharded(helpers.mesh_of(3)))))
    helpers.assert_trees_close(plain, Odd(nnx.Rngs(0)), rtol=0, atol=0)
