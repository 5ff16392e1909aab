"""`global_norm`, and clipping by optax, of sharded gradients: as of whole ones."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import fsdp_jax
from fsdp_jax import CPUOffloadPolicy, DataParallelMeshDims, fully_shard
from tests import helpers


class Odd(nnx.Module):
    """Sizes of which some meshes divide none: parameters that stay whole."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 24, rngs=rngs)
        self.last = nnx.Linear(24, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


def batch() -> tuple[jax.Array, jax.Array]:
    x, y = helpers.regression_batch(24)
    return x, y[:, :5]


def hybrid(replicas: int, shards: int) -> dict[str, Any]:
    devices = np.array(jax.devices()).reshape(replicas, shards)
    return {
        "mesh": Mesh(devices, ("replica", "shard")),
        "dp_mesh_dims": DataParallelMeshDims("shard", "replica"),
    }


MESHES = {
    "1": lambda: {"mesh": helpers.mesh_of(1)},
    "2": lambda: {"mesh": helpers.mesh_of(2)},
    "3": lambda: {"mesh": helpers.mesh_of(3)},
    "8": lambda: {"mesh": helpers.mesh_of(8)},
    "2x4": lambda: hybrid(2, 4),
}


def sharded(mesh: str = "8", **kwargs: Any) -> Any:
    """The model, seed 0, in two groups."""
    model = Odd(nnx.Rngs(0))
    fully_shard(model.first, **MESHES[mesh](), **kwargs)
    return fully_shard(model, **MESHES[mesh](), **kwargs)


def plain_norm(tree: Any) -> float:
    """By numpy, in float64."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(nnx.as_pure(tree))]
    return float(np.sqrt(sum((x**2).sum() for x in leaves)))


sharded_gradient = nnx.jit(fsdp_jax.grad(helpers.mean_square))


def gradients(model: Any) -> Any:
    return sharded_gradient(model, *batch())


def compiled_text(f: Any, *args: Any) -> str:
    """The text of a compiled program."""
    return f.lower(*args).compile().as_text() or ""


def all_reduces(text: str) -> int:
    """All-reduces in it."""
    return len(re.findall(r" all-reduce(?:-start)?\(", text))


@pytest.fixture(scope="module")
def unsharded() -> Any:
    """The gradients of the unsharded model."""
    return nnx.jit(nnx.grad(helpers.mean_square))(Odd(nnx.Rngs(0)), *batch())


@pytest.fixture(scope="module")
def expected(unsharded) -> float:
    """Their norm."""
    return plain_norm(unsharded)


@pytest.mark.parametrize("mesh", ["1", "3", "8", "2x4"])
def test_the_norm_is_that_of_the_unsharded_gradients(mesh, expected):
    model = sharded(mesh)
    grads = gradients(model)
    norm = nnx.jit(fsdp_jax.global_norm).lower(grads).compile()
    for found in (fsdp_jax.global_norm(grads), norm(grads)):
        assert found.shape == () and found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    text = norm.as_text() or ""
    assert all_reduces(text) == (mesh != "1")
    assert not re.search(r" (all-gather|all-to-all|reduce-scatter)\(", text)
    weights = plain_norm(nnx.state(model, nnx.Param))
    np.testing.assert_allclose(fsdp_jax.global_norm(model), weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "pin"), [("1", False), ("8", True), ("2x4", False), ("2x4", True)]
)
def test_the_norm_of_offloaded_gradients(mesh, pin, expected):
    grads = gradients(sharded(mesh, offload_policy=CPUOffloadPolicy(pin)))
    for norm in (fsdp_jax.global_norm, nnx.jit(fsdp_jax.global_norm)):
        found = norm(grads)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert found.sharding.memory_kind == "device"


@pytest.mark.parametrize(
    ("mesh", "offload", "jit"),
    [("1", True, True), ("2x4", False, False), ("3", False, True), ("3", True, False)],
)
def test_optax_clips_by_the_same_norm(mesh, offload, jit, unsharded, expected):
    """Every parameter moves by the clipped gradient, in jit and eagerly."""
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    before = nnx.as_pure(nnx.state(Odd(nnx.Rngs(0)), nnx.Param))
    scale = 0.1 / np.asarray(expected)
    want = jax.tree.map(
        lambda p, g: np.asarray(p) - scale * np.asarray(g),
        before,
        nnx.as_pure(unsharded),
    )

    def step(model, optimizer, x, y):
        loss, grads = fsdp_jax.value_and_grad(helpers.mean_square)(model, x, y)
        optimizer.update(model, grads)
        return loss

    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    model = sharded(mesh, **options)
    run = nnx.jit(step) if jit else step
    run(model, fsdp_jax.Optimizer(model, tx), *batch())
    helpers.assert_trees_close(nnx.state(model, nnx.Param), want)


@pytest.mark.parametrize("policy", [None, CPUOffloadPolicy()], ids=["", "offloaded"])
def test_a_step_that_clips_sums_two_scalars_over_the_devices(policy):
    """One for the norm, one for the loss and what is averaged with it."""
    options = {} if policy is None else {"offload_policy": policy}
    model = helpers.shard_blocks(
        helpers.MLP(nnx.Rngs(0)), mesh=helpers.mesh_of(8), **options
    )
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))
    optimizer = fsdp_jax.Optimizer(model, tx)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = fsdp_jax.value_and_grad(helpers.mean_square)(model, x, y)
        optimizer.update(model, grads)
        return loss

    arguments = (model, optimizer, *helpers.regression_batch(16))
    text = compiled_text(step, *arguments)
    assert 1 <= all_reduces(text) <= 2
    report = fsdp_jax.comm_report(step, *arguments)
    assert report.count("reduce-scatter") == 3
    assert not [
        r for r in report.rows if r.group == "(partitioner)" and "gather" in r.op
    ]


@pytest.mark.parametrize("mesh", ["1", "8"])
def test_bfloat16_gradients_add_up_in_float32(mesh):
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gradients(sharded(mesh)))
    for found in (fsdp_jax.global_norm(grads), nnx.jit(fsdp_jax.global_norm)(grads)):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, plain_norm(grads), rtol=1e-5)


def test_norms_of_other_trees():
    tree = {"a": jnp.arange(4.0), "b": [np.float32(3), jnp.ones((2, 2))]}
    assert float(fsdp_jax.global_norm(tree)) == pytest.approx(np.sqrt(14 + 9 + 4))
    assert float(fsdp_jax.global_norm({"z": jnp.array([3 + 4j])})) == pytest.approx(5)
    assert fsdp_jax.global_norm({"z": jnp.array([3 + 4j])}).dtype == jnp.float32
    assert float(fsdp_jax.global_norm({})) == 0
    assert float(jax.jit(fsdp_jax.global_norm)(tree)) == pytest.approx(np.sqrt(27))


def test_not_a_number_and_infinity_come_through():
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(8))
    model.kernel[...] = model.kernel[...].at[7, 7].set(jnp.inf)
    assert jnp.isinf(fsdp_jax.global_norm(model))
    model.kernel[...] = model.kernel[...].at[7, 7].set(jnp.nan)
    assert jnp.isnan(fsdp_jax.global_norm(model))


def test_gradients_that_are_not_reduced_are_refused():
    model = sharded("2")
    model.set_requires_gradient_sync(False)
    with pytest.raises(TypeError, match=r"global_norm: the gradients are not reduced"):
        fsdp_jax.global_norm(gradients(model))


def test_integers_are_refused_by_name():
    with pytest.raises(TypeError, match=r"\['count'\] has dtype int32.*nnx\.Param"):
        fsdp_jax.global_norm({"a": jnp.ones(2), "count": jnp.ones(2, jnp.int32)})


def test_a_norm_in_a_per_device_program_counts_every_piece_once():
    def loss(model, x, y):
        return helpers.mean_square(model, x, y) + fsdp_jax.global_norm(model)

    model = Odd(nnx.Rngs(0))
    want = helpers.mean_square(model, *batch()) + plain_norm(nnx.state(model))
    for options in ({}, {"uneven": "pad"}):
        found = fsdp_jax.shard_map(loss)(sharded("3", **options), *batch())
        np.testing.assert_allclose(found, want, rtol=1e-5)


def test_a_norm_of_plain_arrays_in_a_per_device_program_is_refused():
    mapped = jax.shard_map(
        fsdp_jax.global_norm,
        mesh=helpers.mesh_of(2),
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(RuntimeError, match="plain array.*Give Variables"):
        jax.jit(mapped)(jnp.ones(8))
