"""`jax_debug_nans` and `jax_debug_infs`: an error that says where, and only then."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import fully_shard, linen, scan_layers
from tests import helpers


class Layer(nnx.Module):
    """A linear layer of a function of the input, 8 wide."""

    def __init__(self, before: Callable[..., jax.Array]) -> None:
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.before = nnx.static(before)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.before(x))


class Net(nnx.Module):
    """A layer of no harm, and one of a function."""

    def __init__(self, before: Callable[..., jax.Array]) -> None:
        self.layers = nnx.List([Layer(jnp.sin), Layer(before)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.layers[0](x))


def root_of_nothing(x: jax.Array) -> jax.Array:
    return jnp.sqrt(x * 0) * 0  # its derivative is 0 * inf


@pytest.fixture
def mesh() -> Mesh:
    return helpers.mesh_of(2)


@pytest.fixture(autouse=True)
def looking() -> Any:
    with jax.debug_nans(True):
        yield


def sharded(mesh: Mesh, before: Callable[..., jax.Array], **kwargs: Any) -> Any:
    model = Net(before)
    fully_shard(list(model.layers), mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (4, 8))


def square(m: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(m(x) ** 2)


def outside(m: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.log(m(x) * 0 - 1))


def by_sign(m: Any, x: jax.Array) -> jax.Array:
    """Whose devices have to agree: nothing runs once more."""
    return jnp.mean(jax.lax.cond(x.sum() > 9, lambda x: x, lambda x: m(x), x) ** 2)


def of_shard_map(m: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(fsdp_jax.shard_map(lambda m, x: m(x))(m, x) ** 2)


STEP = fsdp_jax.value_and_grad(square)
SLICED = fsdp_jax.value_and_grad(square, num_microbatches=2)
KEPT = {"reshard_after_forward": False}
HERE = r"at \S*test_debug_nans\.py:\d+"
CASES: dict[str, Any] = {
    "forward": (STEP, jnp.log, {}, "log, in the forward of module 'layers.1', "),
    "kept": (STEP, jnp.log, KEPT, "log, in the forward of module 'layers.1', "),
    "backward": (STEP, root_of_nothing, {}, "mul, in the backward of module 'layers.1"),
    "slices": (SLICED, root_of_nothing, {}, "mul, in the backward of module 'layers.1"),
    "no module": (
        fsdp_jax.value_and_grad(outside),
        jnp.sin,
        {},
        "log, in the forward, ",
    ),
    "condition": (fsdp_jax.grad(by_sign), jnp.log, {}, "in the results"),
    "shard_map": (fsdp_jax.shard_map(square), jnp.log, {}, "of module 'layers.1', "),
    "from outside": (nnx.grad(of_shard_map), jnp.log, {}, "of module 'layers.1', "),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_says_where(mesh, case):
    step, before, options, text = CASES[case]
    step = nnx.jit(step) if case in ("backward", "slices", "no module") else step
    text += "" if case == "condition" else f".*{HERE}"
    with pytest.raises(FloatingPointError, match=rf"\(nan\) .*{text}"):
        step(sharded(mesh, before, **options), rows())


def test_on_global_arrays_the_error_names_the_module(mesh):
    text = r"\(nan\) encountered in log, in module 'layers\.1'"
    with pytest.raises(FloatingPointError, match=text):
        sharded(mesh, jnp.log)(rows())


def test_infinite_numbers_are_looked_for_where_it_is_asked_for(mesh):
    model = sharded(mesh, lambda x: 1 / (x * 0))
    forward = fsdp_jax.shard_map(lambda m, x: m.layers[0](x) + m.layers[1].before(x))
    assert np.isinf(forward(model, rows())).any()
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\).*div"):
        forward(model, rows())


def test_in_a_scan_over_layers(mesh):
    class Stack(nnx.Module):
        def __init__(self) -> None:
            make = functools.partial(Layer, jnp.log)
            self.blocks = nnx.vmap(lambda _: make(), in_axes=0)(jnp.arange(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return scan_layers(self.blocks, x)

    model = Stack()
    fully_shard(model.blocks, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(FloatingPointError, match=f"log, .*module 'blocks', {HERE}"):
        STEP(model, rows())


def test_linen(mesh):
    class Wrong(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8)(jnp.log(x))

    wrong = Wrong()
    variables = wrong.init(jax.random.key(0), jnp.ones((4, 8)))
    model, placed = linen.fully_shard(wrong, variables, mesh=mesh)
    step = linen.grad(lambda p, x: jnp.mean(model.apply({"params": p}, x)), model)
    with pytest.raises(FloatingPointError, match=rf"\(nan\).*log, .*{HERE}"):
        step(placed["params"], rows())


def test_a_healthy_step_runs(mesh):
    def train() -> Any:
        model = sharded(mesh, lambda x: jnp.where(x > 0, jnp.log(x), 0))
        optimizer = fsdp_jax.Optimizer(model, optax.adam(1e-2))
        value, grads = SLICED(model, rows())
        optimizer.update(model, grads)
        return value, nnx.state(model), of_shard_map(model, rows())

    found = train()
    with jax.debug_nans(False):
        helpers.assert_trees_close(found, train())
