"""What a step needs does not grow with depth but by what each layer keeps for itself.

Compiled for slices that are not there, so only where the TPU compiler is installed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, Shard, fully_shard
from tests import helpers

WIDTH, ROWS = 1024, 256


class Layer(nnx.Module):
    """Two matrices of 4 M parameters each, around a skip connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Stack(nnx.Module):
    """Scanned layers."""

    def __init__(self, depth: int) -> None:
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return fsdp_jax.scan_layers(self.layers, x, remat=True)


def build(depth: int) -> Any:
    def with_devices(devices: Any) -> Any:
        mesh, dims = fsdp_jax.make_mesh(devices)
        model: Any = nnx.eval_shape(lambda: Stack(depth))
        how: Any = dict(mesh=mesh, dp_mesh_dims=dims)
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
        fully_shard(model.layers, shard_placement_fn=lambda _: Shard(1), **how)
        fully_shard(model, **how)
        optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-3))
        rows = jax.ShapeDtypeStruct((ROWS * len(devices), WIDTH), jnp.bfloat16)
        x = fsdp_jax.shard_batch(rows, model)

        def step(model: Any, optimizer: Any, x: Any) -> Any:
            loss, grads = fsdp_jax.value_and_grad(helpers.mean_square)(model, x, x)
            optimizer.update(model, grads)
            return loss

        return nnx.jit(step, donate_argnums=(0, 1)), (model, optimizer, x)

    return with_devices


@pytest.mark.needs_tpu_compiler
@pytest.mark.parametrize(
    "topology", ["v5e:4x4", "v5e:8x8", "v5e:16x16", "v6e:16x16", "v5p:4x4x4"]
)
def test_temporaries_grow_by_the_inputs_and_gradients_of_the_layers(topology):
    shallow, deep = (fsdp_jax.plan(build(depth), topology) for depth in (8, 32))
    layer = 8 * WIDTH * WIDTH
    kept = 2 * ROWS * WIDTH + 4 * layer // shallow.num_devices  # input, gradient shard
    assert deep.peak_bytes - shallow.peak_bytes >= 24 * 12 * layer // deep.num_devices
    growth = deep.working_bytes - shallow.working_bytes
    # With room for a copy of both. Full weights would add 24 * 2 * layer.
    assert growth <= 24 * 2 * kept + layer < 24 * layer
