"""Shardings that model code asks for, in a per-device program and on global arrays."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, auto_axes, explicit_axes
from jax.sharding import PartitionSpec as P

import fsdp_jax
from fsdp_jax import fully_shard, linen
from tests import helpers

MESH = helpers.mesh_of(4)
CUT = NamedSharding(MESH, P("fsdp"))


class Model(nnx.Module):
    """A linear layer, called as a function says."""

    def __init__(self, how: Callable[[Any, jax.Array], jax.Array]) -> None:
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.how = how

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.how(self.layer, x)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def inputs() -> jax.Array:
    return jnp.linspace(-1, 1, 256).reshape(32, 8)


def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


NAMING: dict[str, Callable[[Any, jax.Array], Any]] = {
    "out_sharding": lambda layer, x: layer(x, out_sharding=P("fsdp")),
    "einsum": lambda layer, x: jnp.einsum("bi->b", layer(x), out_sharding=P("fsdp")),
    "reshard": lambda layer, x: jax.sharding.reshard(layer(x), P(None, "fsdp")),
    "constraint": lambda layer, x: with_sharding_constraint(layer(x), P("fsdp")),
    "named": lambda layer, x: with_sharding_constraint(layer(x), CUT),
    "jit in": lambda layer, x: jax.jit(doubled, in_shardings=CUT)(layer(x)),
    "nnx.jit out": lambda layer, x: nnx.jit(doubled, out_shardings=CUT)(layer(x)),
    "in a loop": lambda layer, x: jax.lax.scan(
        lambda c, _: (with_sharding_constraint(c, CUT), None), x, None, 2
    )[0],
    "logical": lambda layer, x: nn.spmd.with_logical_constraint(
        layer(x), ("batch", None), rules=(("batch", "fsdp"),), mesh=MESH
    ),
}

OF_MESH: dict[str, Callable[[Any, jax.Array], Any]] = {
    "dot": lambda layer, x: jnp.dot(layer(x), jnp.eye(8), out_sharding=CUT),
    "broadcast": lambda layer, x: (
        layer(x) + jax.lax.broadcast(jnp.ones(()), (4, 8), out_sharding=CUT)
    ),
    "jit": lambda layer, x: jax.jit(doubled, out_shardings=P("fsdp"))(layer(x)),
}

RETYPED: dict[str, Callable[[Any, jax.Array], Any]] = {
    "auto_axes": lambda layer, x: auto_axes(doubled, out_sharding=P("fsdp"))(layer(x)),
    "explicit_axes": lambda layer, x: explicit_axes(doubled, in_sharding=P("fsdp"))(x),
}


def assert_refuses(how: Any, error: type[Exception], *texts: str) -> None:
    """Check the error of a gradient and of a forward, and that nothing stays behind."""
    model = fully_shard(Model(how), mesh=MESH)
    for step in (fsdp_jax.value_and_grad(loss), nnx.jit(fsdp_jax.shard_map(loss))):
        with pytest.raises(error) as caught:
            step(model, inputs())
        for text in (*texts, "test_annotations.py:"):
            assert text in str(caught.value)
        assert not re.search("issues|bug|Internal|reshard. API", str(caught.value))
    model.how = lambda layer, x: layer(x)
    plain = Model(model.how)
    np.testing.assert_allclose(loss(model, inputs()), loss(plain, inputs()), rtol=1e-6)


@pytest.mark.parametrize("how", NAMING)
def test_a_sharding_that_names_a_data_axis_is_refused_with_axis_and_place(how):
    assert_refuses(
        NAMING[how], ValueError, "names the mesh axis 'fsdp'", "leave 'fsdp'"
    )


@pytest.mark.parametrize("how", OF_MESH)
def test_a_sharding_of_the_whole_mesh_is_refused_with_the_place(how):
    assert_refuses(
        OF_MESH[how], ValueError, "a sharding on a whole mesh", "without ['fsdp']"
    )


@pytest.mark.parametrize("how", RETYPED)
def test_a_change_of_the_kind_of_axes_is_refused_with_the_place(how):
    assert_refuses(RETYPED[how], NotImplementedError, "auto_axes", "['fsdp']")


def test_a_shard_map_in_the_model_is_refused_with_advice():
    def how(layer: Any, x: jax.Array) -> jax.Array:
        mapped = jax.shard_map(doubled, mesh=MESH, in_specs=P("fsdp"), out_specs=P())
        return mapped(layer(x))

    assert_refuses(how, ValueError, "jax.shard_map", "Call the mapped function itself")


def test_what_jax_wants_to_be_told_of_is_said_in_our_words():
    text = "def fail(x): raise NotImplementedError('please open an issue')"
    of_jax: dict[str, Any] = {}
    exec(compile(text, jax.__file__, "exec"), of_jax)
    assert_refuses(
        lambda layer, x: of_jax["fail"](x), NotImplementedError, "JAX cannot do what"
    )


def test_an_error_of_the_users_own_code_passes_as_it_is():
    error = ValueError("names of type Auto or Manual: fsdp. Please file a bug")

    def how(layer: Any, x: jax.Array) -> jax.Array:
        raise error

    with pytest.raises(ValueError) as caught:
        fsdp_jax.value_and_grad(loss)(fully_shard(Model(how), mesh=MESH), inputs())
    assert caught.value is error


def test_a_sharding_that_names_a_tensor_parallel_axis_is_applied():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))

    def how(layer: Any, x: jax.Array) -> jax.Array:
        return with_sharding_constraint(layer(x), P(None, "tp"))

    model, plain = Model(how), Model(lambda layer, x: layer(x))
    params: tuple[Any, ...] = (model.layer.kernel, model.layer.bias)
    for param in params:
        param[...] = jax.device_put(param[...], NamedSharding(mesh, P()))
    dims = fsdp_jax.DataParallelMeshDims(shard="fsdp")
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    found = nnx.jit(fsdp_jax.value_and_grad(loss))(model, inputs())
    helpers.assert_trees_close(found, nnx.value_and_grad(loss)(plain, inputs()))


def test_an_annotation_of_global_arrays_is_the_users():
    model = fully_shard(Model(NAMING["named"]), mesh=MESH)
    plain = Model(lambda layer, x: layer(x))
    found = nnx.jit(loss)(model, inputs())
    np.testing.assert_allclose(found, loss(plain, inputs()), rtol=1e-6)


def test_a_linen_model_is_refused_with_axis_and_place():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return with_sharding_constraint(nn.Dense(8)(x), CUT)

    variables = jax.jit(Net().init)(jax.random.key(0), inputs())
    model, placed = linen.fully_shard(Net(), variables, mesh=MESH)
    step = linen.value_and_grad(lambda p, x: jnp.mean(model.apply(p, x)), model)
    with pytest.raises(ValueError, match="names the mesh axis 'fsdp'"):
        step(placed, inputs())
