"""Gradients of gradients, and forward mode: right, or refused with advice."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_jax
from tests import helpers


def model(reshard: bool | None, sharded: bool = True) -> helpers.MLP:
    made = helpers.MLP(nnx.Rngs(0))
    if sharded:
        helpers.shard_blocks(made, reshard_after_forward=reshard)
    return made


def loss(m: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(m(x) ** 2)


def gradient_norm(m: Any, x: jax.Array) -> jax.Array:
    grads = nnx.grad(loss)(m, x)
    return sum((jnp.sum(g**2) for g in jax.tree.leaves(grads)), jnp.zeros(()))


def input_penalty(m: Any, x: jax.Array) -> jax.Array:
    """Mean over rows of the norm of the gradient of each row."""
    return jnp.mean(jnp.sum(jax.grad(loss, argnums=1)(m, x) ** 2, axis=-1))


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_of_gradients_of_parameters_on_global_arrays(reshard: bool) -> None:
    x, _ = helpers.regression_batch(8)
    want = nnx.jit(nnx.grad(gradient_norm))(model(None, sharded=False), x)
    got = nnx.jit(nnx.grad(gradient_norm))(model(reshard), x)
    helpers.assert_trees_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_of_gradients_of_inputs_per_device(reshard: bool) -> None:
    x, _ = helpers.regression_batch(8)
    want = nnx.jit(nnx.grad(input_penalty))(model(None, sharded=False), x)
    got = nnx.jit(fsdp_jax.grad(input_penalty))(model(reshard), x)
    helpers.assert_trees_close(got, want, rtol=1e-4, atol=1e-5)


def directional(m: Any, x: jax.Array) -> jax.Array:
    return jax.jvp(lambda x: m(x), (x,), (jnp.ones_like(x),))[1]


def hessian_product(m: Any, x: jax.Array) -> jax.Array:
    grad = jax.grad(lambda x: loss(m, x))
    return jax.jvp(grad, (x,), (jnp.ones_like(x),))[1]


@pytest.mark.parametrize("f", [directional, hessian_product])
def test_forward_mode_in_inputs(f: Callable[..., Any]) -> None:
    x, _ = helpers.regression_batch(8)
    want = f(model(None, sharded=False), x)
    np.testing.assert_allclose(f(model(True), x), want, 1e-5, 1e-5)
    kept = nnx.jit(fsdp_jax.shard_map(f))(model(False), x)
    np.testing.assert_allclose(kept, want, 1e-5, 1e-5)


ADVICE = "forward-mode .* reverse mode"


def test_forward_mode_through_a_freed_module_is_refused_with_advice() -> None:
    x, _ = helpers.regression_batch(8)
    for jit in (lambda f: f, nnx.jit):
        with pytest.raises(NotImplementedError, match=ADVICE):
            jit(fsdp_jax.shard_map(directional))(model(True), x)

    def penalty(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(directional(m, x) ** 2)

    with pytest.raises(NotImplementedError, match=ADVICE):
        fsdp_jax.grad(penalty)(model(True), x)


@pytest.mark.slow
def test_forward_mode_through_a_program_from_outside_is_right_or_refused() -> None:
    x, y = helpers.regression_batch(8)
    step = fsdp_jax.value_and_grad(helpers.mean_square)
    want = jax.jacfwd(lambda x: helpers.mean_square(model(True, False), x, y))(x)
    for jit in (lambda f: f, jax.jit):
        try:
            got = jit(jax.jacfwd(lambda x: step(model(True), x, y)[0]))(x)
        except NotImplementedError as error:  # eagerly with jax 0.10
            assert jit is not jax.jit and re.search(ADVICE, str(error))
        else:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_forward_mode_in_parameters_is_refused_with_advice() -> None:
    x, _ = helpers.regression_batch(8)
    graphdef, state = nnx.split(model(True))
    with pytest.raises(NotImplementedError, match=ADVICE):
        jax.jvp(lambda s: nnx.merge(graphdef, s)(x), (state,), (state,))
