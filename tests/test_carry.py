"""Groups whose casts change the type of a carry or a branch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard
from tests import helpers

BFLOAT16 = MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
HEALED = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, output_dtype=jnp.float32)
CAST_NOTHING = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, cast_forward_inputs=False)


class Cell(nnx.Module):
    """A recurrent cell of one layer."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(self.layer(carry) + x)
        return carry, carry


class Model(nnx.Module):
    """A cell, run over time as a function says."""

    def __init__(self, run: Callable[..., Any], cell: Any = Cell) -> None:
        self.cell = cell(8, 8, rngs=nnx.Rngs(0))
        self.run = run

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.run(self.cell, x)


def by_rnn(cell: Any, x: jax.Array) -> Any:
    return nnx.RNN(cell)(x)


def start(x: jax.Array) -> jax.Array:
    return jnp.zeros((len(x), 8))


LOOPS: dict[str, Callable[..., jax.Array]] = {
    "scan": lambda cell, x: jax.lax.scan(cell, start(x), x.swapaxes(0, 1))[0],
    "nnx.scan": lambda cell, x: nnx.scan(
        lambda cell, c, x: cell(c, x),
        in_axes=(None, nnx.Carry, 1),
        out_axes=(nnx.Carry, 1),
    )(cell, start(x), x)[0],
    "while": lambda cell, x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, cell(c[1], x[:, 0])[0]), (0, start(x))
    )[1],
    "cond": lambda cell, x: jax.lax.cond(
        jnp.ones(()) > 0, lambda c: cell(c, x[:, 0])[0], lambda c: c, start(x)
    ),
}


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def inputs() -> jax.Array:
    return jnp.linspace(-1, 1, 192).reshape(8, 3, 8)


def sharded(model: Any, policy: MixedPrecisionPolicy, root: bool = True) -> Any:
    fully_shard(model.cell, mesh=helpers.mesh_of(4), mp_policy=policy)
    return fully_shard(model, mesh=helpers.mesh_of(4)) if root else model


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("cell", [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell])
def test_a_recurrent_cell_that_casts_its_carry_is_refused_by_name(cell, root):
    model = sharded(Model(by_rnn, cell), BFLOAT16, root)
    with pytest.raises(TypeError, match=r"'cell'.*output_dtype=jnp.float32"):
        fsdp_jax.shard_map(loss)(model, inputs())
    if root:
        with pytest.raises(TypeError, match=r"'cell'.*cast_forward_inputs=False"):
            model(inputs())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_or_branch_over_a_group_that_casts_is_refused_by_name(loop):
    model = sharded(Model(LOOPS[loop]), BFLOAT16)
    with pytest.raises(TypeError, match=r"'cell'.*output_dtype=jnp.float32"):
        fsdp_jax.shard_map(loss)(model, inputs())


@pytest.mark.parametrize("policy", [HEALED, CAST_NOTHING])
def test_what_the_error_advises_works(policy):
    model = sharded(Model(by_rnn, nnx.GRUCell), policy)
    found = nnx.jit(fsdp_jax.value_and_grad(loss))(model, inputs())
    expected = nnx.jit(nnx.value_and_grad(loss))(Model(by_rnn, nnx.GRUCell), inputs())
    helpers.assert_trees_close(found, expected, rtol=0.1, atol=0.01)


def test_an_unequal_carry_that_no_cast_made_is_jaxs():
    def run(cell: Any, x: jax.Array) -> jax.Array:
        y = cell(start(x), x[:, 0])[0].astype(jnp.float32)
        return jax.lax.fori_loop(0, 3, lambda i, c: c.astype(jnp.float16), y)

    model = sharded(Model(run), BFLOAT16)
    with pytest.raises(TypeError, match="equal types"):
        fsdp_jax.shard_map(loss)(model, inputs())
