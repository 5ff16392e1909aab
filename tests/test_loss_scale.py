"""The loss scale of `examples/train_float16.py`: what it skips, and what it saves."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_jax
from tests import helpers

ROWS = 32  # four on each of the eight devices


def load_example() -> Any:
    """The example as a module; it is not in a package."""
    path = Path(__file__).parent.parent / "examples" / "train_float16.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()
loss_and_grads = nnx.jit(example.loss_and_grads)
plain_loss_and_grads = nnx.jit(nnx.value_and_grad(example.scaled_loss))
adjust = nnx.jit(example.LossScale.adjust)


def make_model() -> Any:
    """Not sharded yet. Input 0 counts for nothing, until its gradient says so."""
    model = example.MLP(32, 1, nnx.Rngs(0))
    kernel = model.inputs.kernel[...]
    model.inputs.kernel[...] = kernel.at[0].set(0)
    return model


def make_sharded(reduce_dtype: Any = jnp.float32) -> Any:
    model = make_model()
    example.shard(model, fsdp_jax.MixedPrecisionPolicy(jnp.float16, reduce_dtype))
    return model


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    """Rows whose gradients fit float16 up to a scale of 2**15 or so."""
    x, y = example.make_batch(np.random.default_rng(1), ROWS)
    x[:, 0] = 0
    return x, y


def with_overflow(x: np.ndarray) -> np.ndarray:
    """Inputs of which a row of device 3 makes the gradient of input 0 overflow."""
    x = x.copy()
    x[3 * ROWS // 8, 0] = 60000
    return x


def pieces(tree: Any) -> list[list[bytes]]:
    """The bits that each device holds of every array, copied."""
    return [
        [np.asarray(piece.data).tobytes() for piece in leaf.addressable_shards]
        for leaf in jax.tree.leaves(tree)
    ]


def cache_size(jitted: Any) -> int:
    """Entries in the dispatch cache of an `nnx.jit` function."""
    return jitted.jitted_fn._cache_size()


def devices_with_overflow(grads: Any) -> set[int]:
    """Numbers of the devices whose shard of some gradient is not finite."""
    return {
        piece.device.id
        for leaf in jax.tree.leaves(grads)
        for piece in leaf.addressable_shards
        if not np.isfinite(piece.data).all()
    }


def test_an_overflow_on_one_device_changes_nothing_but_the_scale():
    model = make_sharded()
    optimizer = example.make_optimizer(model, 1e-3)
    loss_scale = example.LossScale(model, 2.0**10, growth_interval=2)
    x, y = make_batch()
    good = fsdp_jax.shard_batch((x, y), model)
    bad = fsdp_jax.shard_batch((with_overflow(x), y), model)

    start = pieces(nnx.state((model, optimizer)))
    _, finite = example.train_step(model, optimizer, loss_scale, *good)
    assert finite
    before = pieces(nnx.state((model, optimizer)))
    assert before != start
    assert optimizer.step[...] == 1

    # Rows of one device overflow, and only device 0 holds a gradient of input 0.
    _, grads = loss_and_grads(model, *bad, loss_scale.scale[...])
    assert devices_with_overflow(grads) == {0}
    loss, finite = example.train_step(model, optimizer, loss_scale, *bad)
    assert np.isfinite(loss) and not finite
    assert pieces(nnx.state((model, optimizer))) == before
    assert optimizer.step[...] == 1
    assert pieces(loss_scale.scale[...]) == [[np.float32(2**9).tobytes()] * 8]

    _, finite = example.train_step(model, optimizer, loss_scale, *good)
    assert finite and optimizer.step[...] == 2
    assert pieces(nnx.state((model, optimizer))) != before


def test_the_scale_doubles_after_good_steps_and_one_program_does_it_all():
    model = make_sharded()
    optimizer = example.make_optimizer(model, 1e-3)
    loss_scale = example.LossScale(model, 2.0**10, growth_interval=2)
    x, y = make_batch()
    good = fsdp_jax.shard_batch((x, y), model)
    bad = fsdp_jax.shard_batch((with_overflow(x), y), model)
    losses, scales, programs = [], [], set()
    for batch in (good, good, good, bad, good, good):
        losses.append(
            float(example.train_step(model, optimizer, loss_scale, *batch)[0])
        )
        scales.append(np.log2(loss_scale.scale[...]))
        programs.add(cache_size(example.train_step))
    assert scales == [10, 11, 11, 10, 10, 11]
    assert losses[-1] < losses[0]
    assert optimizer.step[...] == 5
    assert len(programs) == 1  # no step but the first compiled


@pytest.mark.parametrize(
    ("finite", "exponents"),
    [
        ("yyyyyy", [4, 4, 5, 5, 5, 6]),
        ("ynyyyy", [4, 3, 3, 3, 4, 4]),  # an overflow starts the count again
        ("nnnnn", [3, 2, 1, 1, 1]),  # not below the minimum
        ("y" * 12, [4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7, 7]),  # nor above the maximum
    ],
)
def test_the_scale_follows_the_overflows(finite, exponents):
    loss_scale = example.LossScale(make_sharded(), 2.0**4, 3, 2.0, 2.0**7)
    scales = []
    for sign in finite:
        adjust(loss_scale, jnp.bool_(sign == "y"))
        scales.append(np.log2(loss_scale.scale[...]))
    assert scales == exponents


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_number_anywhere_is_found(bad):
    _, grads = loss_and_grads(make_sharded(), *make_batch(), jnp.float32(1))
    find = jax.jit(example.all_finite)
    assert find(grads)
    leaves, tree = jax.tree.flatten(grads)
    for i, leaf in enumerate(leaves):
        last = leaf.at[(-1,) * leaf.ndim].set(bad)
        assert not find(tree.unflatten([*leaves[:i], last, *leaves[i + 1 :]]))


@pytest.mark.parametrize("reduce_dtype", [jnp.float32, jnp.float16])
def test_gradients_without_the_scale_are_those_of_float32(reduce_dtype):
    batch = make_batch()
    expected, expected_grads = plain_loss_and_grads(
        make_model(), *batch, jnp.float32(1)
    )
    loss, grads = loss_and_grads(
        make_sharded(reduce_dtype), *batch, jnp.float32(2.0**10)
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    np.testing.assert_allclose(loss, expected, rtol=1e-3)
    helpers.assert_trees_close(grads, expected_grads, rtol=1e-3, atol=5e-4)


def test_gradients_below_float16_survive_with_the_scale():
    model = make_model()
    model.outputs.kernel[...] = jnp.zeros_like(model.outputs.kernel[...])
    x, _ = make_batch()
    y = np.full((ROWS, example.OUTPUTS), 1e-7, np.float32)  # the model says zero
    _, expected = plain_loss_and_grads(model, x, y, jnp.float32(1))
    bias = expected["outputs"]["bias"][...]
    np.testing.assert_allclose(bias, np.full(8, -2.5e-8), rtol=1e-5)

    example.shard(model, fsdp_jax.MixedPrecisionPolicy(jnp.float16, jnp.float32))
    _, lost = loss_and_grads(model, x, y, jnp.float32(1))
    assert not any(leaf.any() for leaf in jax.tree.leaves(lost))
    _, kept = loss_and_grads(model, x, y, jnp.float32(2.0**20))
    helpers.assert_trees_close(kept, expected, rtol=1e-2, atol=1e-10)
