"""Means and sums over devices are right wherever the result can be represented."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

LARGE = {"float16": 60000.0, "bfloat16": 3e38, "float32": 3e38}


class Statistic(nnx.Module):
    """A parameter, and the largest value so far in a dtype of one's own."""

    def __init__(self, dtype: Any) -> None:
        self.scale = nnx.Param(jnp.ones(4))
        self.largest = nnx.BatchStat(jnp.zeros((), dtype))


def model_of(dtype: Any = jnp.float32) -> Any:
    return fully_shard(Statistic(dtype), mesh=helpers.mesh_of(4))


@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("slices", [1, 2])
def test_means_of_large_numbers_do_not_overflow(dtype, slices):
    model, large = model_of(dtype), jnp.asarray(LARGE[dtype], dtype)
    x = jnp.full((8,), large) * jnp.linspace(0.9, 1, 8).astype(dtype)

    def f(model, x, weight):
        model.largest[...] = x[-1]
        loss = (weight * large).astype(jnp.float32) * 0 + x[0] * weight
        return loss.astype(dtype) * jnp.asarray(0.125, dtype), x[0]

    step = fsdp_jax.grad(
        f,
        argnums=2,
        has_aux=True,
        num_microbatches=slices,
        in_specs=(None, PartitionSpec()),
    )
    grad, aux = step(model, x, jnp.ones((), dtype))
    firsts = np.asarray(x, np.float64)[:: 2 // slices]
    lasts = np.asarray(x, np.float64)[1::2]
    rtol = 0.01 if dtype == "bfloat16" else 1e-3
    np.testing.assert_allclose(np.float64(aux), firsts.mean(), rtol)
    np.testing.assert_allclose(np.float64(grad), firsts.mean() / 8, rtol)
    np.testing.assert_allclose(np.float64(model.largest[...]), lasts.mean(), rtol)
    mean = fsdp_jax.shard_map(lambda model, x: x.mean())(model, x)
    assert mean.dtype == dtype


def test_counts_of_the_devices_do_not_wrap_around():
    def f(model, x):
        return x.sum() * 1e9, jnp.int32(10**9)

    step = fsdp_jax.value_and_grad(f, reduction="weighted", wrt=nnx.Param)
    assert step(model_of(), jnp.ones((4,)))[0] == pytest.approx(1)
