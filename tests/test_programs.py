"""What `f` asks for survives in the program that a call makes of it.

Derivatives that a function was given, checkpoints, callbacks and constants; and which
compiled programs an eager call finds again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

DEVICES = 4


class Net(nnx.Module):
    """Two linear layers and a function between them, 8 wide."""

    def __init__(self, between: Callable[..., jax.Array] = jnp.tanh) -> None:
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.between = nnx.static(between)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.between(self.first(x)))


@pytest.fixture
def mesh() -> Mesh:
    return helpers.mesh_of(DEVICES)


def sharded(mesh: Mesh, between: Callable[..., jax.Array] = jnp.tanh, **kwargs) -> Any:
    model = Net(between)
    fully_shard([model.first, model.last], mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def rows(count: int = 8) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (count, 8))


def square(m: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(m(x) ** 2)


# --- derivatives of its own -------------------------------------------------------


@jax.custom_vjp
def reversed_gradient(x):
    return jnp.sin(x)


reversed_gradient.defvjp(
    lambda x: (reversed_gradient(x), x), lambda x, ct: (-3 * ct * x,)
)


@jax.custom_jvp
def other_tangent(x):
    return jnp.sin(x)


other_tangent.defjvp(lambda x, t: (other_tangent(*x), -3 * t[0] * x[0]))
RULES = [reversed_gradient, other_tangent]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", ["inside", "beside"])
def test_a_rule_is_kept_where_devices_agree_on_a_condition(mesh, rule, where):
    def forward(m: Any, x: jax.Array) -> jax.Array:
        there = rule if where == "inside" else jnp.tanh
        y = jax.lax.cond(x.sum() > 0, lambda x: there(m.first(x)), lambda x: x, x)
        return m.last(y if where == "inside" else rule(y))

    def of_inputs(run: Any, m: Any) -> jax.Array:
        loss = nnx.grad(lambda m, x: jnp.mean(run(m, x) ** 2), argnums=1)
        return nnx.jit(loss)(m, jnp.abs(rows()))

    got = of_inputs(fsdp_jax.shard_map(forward), sharded(mesh))
    np.testing.assert_allclose(got, of_inputs(forward, Net()), 1e-5, 1e-6)


@pytest.mark.parametrize("rule", [jax.custom_vjp, jax.custom_jvp])
def test_a_condition_that_may_differ_inside_of_a_rule_is_refused(mesh, rule):
    @rule
    def branch(x, kernel):
        return jax.lax.cond(
            x.sum() > 0, lambda x: x * jax.lax.psum(x, "fsdp"), jnp.sin, x
        )

    if rule is jax.custom_vjp:
        branch.defvjp(lambda *x: (branch(*x), None), lambda _, ct: (ct, None))
    else:
        branch.defjvp(lambda x, t: (branch(*x), t[0]))
    forward = fsdp_jax.shard_map(lambda m, x: branch(m(x), 1.0))
    with pytest.raises(ValueError, match="cond or switch may differ.*pmax"):
        helpers.lowered_text(forward, sharded(mesh), rows())


@pytest.mark.parametrize("rule", RULES)
def test_second_derivatives_of_a_rule_do_not_depend_on_freeing(mesh, rule):
    class Ruled(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ rule(self.first.kernel[...])) @ self.last.kernel[...]

    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(lambda x: jnp.sum(m(x) ** 2))(x) ** 2) / 64

    want = nnx.jit(nnx.grad(loss))(Ruled(), rows())
    for free in (True, False):
        model = fully_shard(Ruled(), mesh=mesh, reshard_after_forward=free)
        step = fsdp_jax.grad(loss, reduction="sum")
        helpers.assert_trees_close(nnx.jit(step)(model, rows()), want)


# --- micro-batches ----------------------------------------------------------------


def test_micro_batches_keep_callbacks(mesh):
    seen: list[str] = []

    def loss(m: Any, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: seen.append("callback"), x.sum())
        y = jax.jit(m.first)(x)
        jax.debug.callback(lambda: seen.append("nothing read"))
        return jnp.mean(m.last(y) ** 2)

    for count in (1, 2):
        seen.clear()
        step = fsdp_jax.value_and_grad(loss, num_microbatches=count)
        step(sharded(mesh), rows())
        jax.effects_barrier()
        assert seen.count("callback") == seen.count("nothing read") == DEVICES * count


@pytest.mark.parametrize("free", [True, False])
def test_micro_batches_keep_checkpoints(mesh, free):
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(nnx.remat(lambda m, x: m(x))(m, x) ** 2)

    def checkpoints(count: int) -> list[str]:
        step = fsdp_jax.grad(loss, num_microbatches=count)
        names = [
            eqn.primitive.name
            for eqn in helpers.equations_of(nnx.jit(step), model, rows())
        ]
        return [name for name in names if name in ("checkpoint", "remat2")]

    model = sharded(mesh, reshard_after_forward=free)
    assert checkpoints(2) == checkpoints(1) != []
