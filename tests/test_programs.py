"""What `f` asks for survives in the program that a call makes of it.

Derivatives that a function was given, checkpoints, callbacks and constants; and which
compiled programs an eager call finds again.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard
from fsdp_jax._ordering import ordering_for
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


def sharded(
    mesh: Mesh, between: Callable[..., jax.Array] = jnp.tanh, **kwargs: Any
) -> Any:
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
    def there(x: jax.Array) -> jax.Array:
        return x * jax.lax.psum(x, "fsdp")

    def plain(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x.sum() > 0, there, jnp.sin, x)

    branch: Any = rule(plain)
    if rule is jax.custom_vjp:
        branch.defvjp(lambda x: (branch(x), None), lambda _, ct: (ct,))
    else:
        branch.defjvp(lambda x, t: (branch(*x), t[0]))
    forward = fsdp_jax.shard_map(lambda m, x: branch(m(x)))
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


# --- programs that eager calls find again -----------------------------------------


def by_callback(k: int) -> Callable[..., jax.Array]:
    def forward(m: Any, x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda v: np.asarray(k * v), shape, m(x))

    return forward


def test_each_eager_call_has_its_own_callback(mesh):
    model, x = sharded(mesh), rows()
    once, thrice = (fsdp_jax.shard_map(by_callback(k))(model, x) for k in (1, 3))
    np.testing.assert_allclose(thrice, 3 * once, 1e-6)


def test_each_eager_call_prints_its_own_text(mesh, capfd):
    model = sharded(mesh)
    for i in range(2):

        def loss(m: Any, x: jax.Array, i: int = i) -> jax.Array:
            jax.debug.print(f"step {i}")
            return square(m, x)

        fsdp_jax.value_and_grad(loss)(model, rows())
        jax.effects_barrier()
        assert capfd.readouterr().out.split("\n")[:-1] == [f"step {i}"] * DEVICES


def test_settings_of_jax_tell_programs_apart(mesh):
    model, x = sharded(mesh), rows().at[0, 0].set(jnp.nan)
    forward = fsdp_jax.shard_map(square)
    assert np.isnan(forward(model, x))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        forward(model, x)
    assert np.isnan(forward(model, x))


CONSTANTS = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import fsdp_jax
from tests import helpers

compiles = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiles.append(event)
    if event == "/jax/core/compile/backend_compile_duration"
    else None
)
linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
model = fsdp_jax.fully_shard(linear, mesh=helpers.mesh_of(2))
x, means = jnp.ones((2, 8)), []
for value in (1.0, 1.0, 3.0, 1.0, 3.0):
    table = np.full(8, value, np.float32)
    shift = jnp.arange(8.0) * value
    compiles.append("call")
    def f(m, x):
        return jnp.sum((m(x) * 0 + 1) * table + shift)
    means.append(float(fsdp_jax.shard_map(f)(model, x)))
calls = "".join("c" if c == "call" else "." for c in compiles)
print(means, [bool(c) for c in calls.split("c")[1:]])
"""


@pytest.mark.slow
def test_constants_tell_programs_apart_where_they_are_not_in_the_text():
    env = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CONSTANTS], env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == (
        "[36.0, 36.0, 108.0, 36.0, 108.0] [True, False, True, False, False]"
    ), done.stderr


# --- under no jit -----------------------------------------------------------------


@pytest.mark.parametrize("around", [nnx.remat, lambda f: f])
@pytest.mark.parametrize("what", ["shard_map", "value_and_grad"])
def test_eager_gradients_from_outside_equal_jitted_ones(mesh, what, around):
    @around
    def loss(m: Any, x: jax.Array) -> jax.Array:
        if what == "shard_map":
            return jnp.mean(fsdp_jax.shard_map(lambda m, x: m(x))(m, x) ** 2)
        return fsdp_jax.value_and_grad(square)(m, x)[0]

    grad = nnx.value_and_grad(loss, argnums=(0, 1))
    model = sharded(mesh)
    helpers.assert_trees_close(grad(model, rows()), nnx.jit(grad)(model, rows()))


@pytest.mark.parametrize("free", [True, False])
def test_the_users_own_shard_map_runs_eagerly(mesh, free):
    graphdef, state = nnx.split(sharded(mesh, reshard_after_forward=free))
    specs = jax.tree.map(lambda p: p.sharding.spec, state)

    def gradients(state: Any, x: jax.Array) -> Any:
        return jax.grad(lambda s: square(nnx.merge(graphdef, s), x))(state)

    step = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(specs, PartitionSpec("fsdp")),
        out_specs=specs,
        check_vma=False,
    )
    want = jax.tree.leaves(jax.jit(step)(state, rows()))
    for got, expected in zip(jax.tree.leaves(step(state, rows())), want, strict=True):
        np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


def test_checkify_runs_around_an_eager_call(mesh):
    def checked(m: Any, x: jax.Array) -> jax.Array:
        checkify.check(jnp.all(x < 1), "{} is no less than one", x.max())
        return square(m, x)

    x, step = rows() / 100, fsdp_jax.value_and_grad(checked)
    run = checkify.checkify(lambda x: step(sharded(mesh), x)[0])
    error, value = run(x)
    assert error.get() is None
    np.testing.assert_allclose(value, square(sharded(mesh), x), 1e-5)
    assert "is no less than one" in str(run(x + 1)[0].get())


@pytest.mark.slow
@pytest.mark.parametrize("offload", [True, False])
def test_without_jit_the_numbers_are_the_same(mesh, offload):
    policy: Any = {"offload_policy": fsdp_jax.CPUOffloadPolicy()} if offload else {}

    def train(jits: bool) -> Any:
        with jax.disable_jit(not jits):
            model = sharded(mesh, **policy)
            optimizer = fsdp_jax.Optimizer(model, optax.adam(1e-2))

            @nnx.jit
            def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
                value, grads = fsdp_jax.value_and_grad(square)(model, x)
                optimizer.update(model, grads)
                return value, fsdp_jax.global_norm(grads)

            results = [step(model, optimizer, rows())]
            results += [fsdp_jax.shard_map(lambda m, x: m(x))(model, rows())]
            results += [model(rows()), nnx.grad(square)(model, rows())]
            model.first.unshard()
            results += [model(rows())]
            model.first.reshard()
            return results, nnx.state(model)

    helpers.assert_trees_close(train(False), train(True))


def test_a_platform_that_was_not_measured_has_the_default_ordering():
    assert ordering_for("neuron") == fsdp_jax.Ordering()
