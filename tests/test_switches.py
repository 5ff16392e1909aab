"""Switches of JAX and Flax that are off by default."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fsdp_jax
from fsdp_jax._callees import equations_inside
from fsdp_jax._dependence import depends_on
from tests import helpers


@contextmanager
def switched(config: Any, **values: bool) -> Iterator[None]:
    """Hold switches for a block."""
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            config.update(name, value)


def test_training_in_the_tree_mode_of_flax_is_that_of_graph_mode(mlp, mesh8):
    batch = helpers.regression_batch()
    expected = nnx.jit(nnx.value_and_grad(helpers.mean_square))(mlp, *batch)
    helpers.shard_blocks(mlp, mesh=mesh8)

    def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
        found = fsdp_jax.value_and_grad(helpers.mean_square)(model, x, y)
        optimizer.update(model, found[1])
        return found

    with switched(flax.config, nnx_graph_mode=False, nnx_graph_updates=False):
        optimizer = fsdp_jax.Optimizer(mlp, optax.sgd(0.1))
        before = mlp.layers[0].kernel[...]
        found = nnx.jit(step)(mlp, optimizer, *batch)
    helpers.assert_trees_close(found, expected)
    moved = before - 0.1 * expected[1]["layers"][0]["kernel"][...]
    helpers.assert_trees_close(mlp.layers[0].kernel[...], moved)


def test_a_loop_in_the_tree_mode_of_flax_has_the_gradients_of_graph_mode(mesh8):
    batch = helpers.regression_batch()
    expected = helpers.gradients_of_stack()
    model = helpers.Stack("scan_layers remat")
    fsdp_jax.fully_shard(model.layers, mesh=mesh8)
    step = nnx.jit(fsdp_jax.value_and_grad(helpers.mean_square))
    with switched(flax.config, nnx_graph_mode=False, nnx_graph_updates=False):
        found = step(fsdp_jax.fully_shard(model, mesh=mesh8), *batch)
    helpers.assert_trees_close(found, expected)


def test_custom_vjp_and_checkpoint_of_the_new_kind_are_looked_into():
    @jax.custom_vjp
    def swap(x: jax.Array, y: jax.Array) -> Any:
        return jnp.sin(y), jnp.cos(x)

    swap.defvjp(lambda x, y: (swap(x, y), (x, y)), lambda kept, grads: grads)
    with switched(jax.config, jax_custom_vjp3=True, jax_remat3=True):
        closed = jax.make_jaxpr(jax.checkpoint(swap))(1.0, 2.0)
    assert [e.primitive.name for e in closed.jaxpr.eqns] == ["call_hi_primitive"]
    assert depends_on(closed, [True, False], into_loops=True) == [False, True]
    names = [eqn.primitive.name for eqn in equations_inside(closed)]
    assert {"sin", "cos"} <= set(names)
