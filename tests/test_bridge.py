"""Linen modules inside NNX models, and NNX modules inside Linen ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn

import fsdp_jax
from fsdp_jax import fully_shard, linen
from tests import helpers

WIDTH = 16
KEY = jax.random.key(0)
X, Y = (jax.random.normal(k, (16, WIDTH)) for k in jax.random.split(KEY))


class Layer(nn.Module):
    """A layer whose kernel names axes that no mesh here has."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return x + jnp.tanh(nn.Dense(WIDTH, kernel_init=init)(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers(name="layers")(x, None)[0]


class Block(nnx.Module):
    """A Linen module and a layer of NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.bridge.ToNNX(Scanned(), rngs=rngs)
        self.outer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.inner(x))


class Model(nnx.Module):
    """Linen modules in three places."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = Block(rngs)
        self.first = nnx.bridge.ToNNX(nn.Dense(WIDTH), rngs=rngs)
        self.second = nnx.bridge.ToNNX(nn.Dense(WIDTH), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(self.block(x))))


def make() -> Any:
    with nnx.use_eager_sharding(False):  # the axes that are named do not exist
        return nnx.bridge.lazy_init(Model(nnx.Rngs(0)), X)


@pytest.mark.parametrize("keep", [None, False])
def test_linen_modules_in_an_nnx_model_train_as_on_one_device(keep):
    model, twin = make(), make()
    mesh = helpers.mesh_of(8)
    with jax.set_mesh(mesh):
        fully_shard([model.block, model.first], reshard_after_forward=keep)
        fully_shard(model)  # `second` is in the root's group
        sharded = helpers.train(
            model, fsdp_jax.value_and_grad, helpers.mean_square, (X, Y), steps=2
        )
    plain = helpers.train(
        twin, nnx.value_and_grad, helpers.mean_square, (X, Y), steps=2
    )
    np.testing.assert_allclose(sharded, plain, rtol=1e-5)
    helpers.assert_trees_close(model, twin)
    kernel = model.second.kernel
    assert fsdp_jax.local_shape(kernel) == (WIDTH // 8, WIDTH)
    assert isinstance(kernel, nnx.Param)
    helpers.assert_trees_close(model(X), twin(X))


def test_metadata_of_linen_is_there_after_a_call():
    model = fully_shard(make(), mesh=helpers.mesh_of(8))
    before = nnx.graphdef(model)
    model(X)
    assert nnx.graphdef(model) == before
    kernel = model.block.inner.layers["Dense_0"]["kernel"]
    assert kernel.get_metadata("out_sharding") == (None, "fsdp")  # as it is cut


def test_an_error_leaves_linen_modules_as_they_were():
    model = fully_shard(make(), mesh=helpers.mesh_of(8))
    before = nnx.graphdef(model)
    with pytest.raises(errors.ScopeParamShapeError):
        model(jnp.ones((8, 3)))
    assert nnx.graphdef(model) == before


def test_statistics_of_a_linen_module_are_averaged():
    class Normed(nnx.Module):
        def __init__(self) -> None:
            norm = nn.BatchNorm(use_running_average=False, momentum=0.5)
            self.norm = nnx.bridge.ToNNX(norm, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(x, mutable=["batch_stats"])

    model: Any = Normed()
    nnx.bridge.lazy_init(model.norm, X)
    fully_shard(model, mesh=helpers.mesh_of(8))
    fsdp_jax.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, X)
    np.testing.assert_allclose(model.norm.mean[...], X.mean(0) / 2, atol=1e-6)


def test_a_nnx_module_in_a_linen_model():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.bridge.ToLinen(nnx.Linear, args=(WIDTH, 8), name="first")(x)
            return nnx.bridge.to_linen(nnx.Linear, 8, WIDTH, name="second")(jnp.tanh(x))

    def loss(apply: Any) -> Any:
        return lambda p, x, y: jnp.mean((apply({"params": p}, x) - y) ** 2)

    variables = Mixed().init(KEY, X)
    model, placed = linen.fully_shard(Mixed(), variables, modules="first")
    got = jax.jit(linen.value_and_grad(loss(model.apply), model))(
        placed["params"], X, Y
    )
    want = jax.value_and_grad(loss(Mixed().apply))(variables["params"], X, Y)
    helpers.assert_trees_close(got, want)


def test_a_module_of_the_other_kind_is_refused():
    module = nnx.bridge.ToLinen(nnx.Linear, args=(WIDTH, WIDTH))
    with pytest.raises(TypeError, match="must be an nnx.Module, got ToLinen"):
        fully_shard(module)

    def sharded(rngs: nnx.Rngs) -> Any:
        return fully_shard(nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    module = nnx.bridge.ToLinen(sharded)
    with pytest.raises(ValueError, match="ToLinen of a module that is sharded"):
        linen.fully_shard(module, module.init(KEY, X))
