"""Gradients summed over several calls before they are reduced: the numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard
from fsdp_jax._ordering import ORDERINGS
from tests import helpers

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
GRIDS = [(2, 2), (4, 2), (1, 4), (4, 1)]


class Scale(nnx.Module):
    """`x * w`: the gradient of the sum of its outputs is the sum of the rows of x."""

    def __init__(self, dtype: Any = F32) -> None:
        self.w = nnx.Param(jnp.ones(8, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[...].astype(x.dtype)


class Family(nnx.Module):
    """Two scales, the second one a group of its own."""

    def __init__(self) -> None:
        self.root, self.child = nnx.Param(jnp.ones(8)), Scale()

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.root[...] + self.child(x)


def grid(*sizes: int) -> Mesh:
    """Replicas times shards; one size is shards alone."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("replicate", "fsdp")[-len(sizes) :])


def scale(*sizes: int, dtype: Any = F32, **policy: Any) -> Any:
    policy = MixedPrecisionPolicy(**policy)  # type: ignore[assignment]
    return fully_shard(Scale(dtype), mesh=grid(*sizes), mp_policy=policy)  # type: ignore[arg-type]


def family(*sizes: int) -> Any:
    model: Any = Family()
    fully_shard(model.child, mesh=grid(*sizes))
    return fully_shard(model, mesh=grid(*sizes))


def ranks(model: Any, factor: float = 1, dtype: Any = F32) -> jax.Array:
    """One row per device: `(r + 1) * factor`, 8 columns."""
    count = len(jax.tree.leaves(nnx.state(model))[0].sharding.device_set)
    row = jnp.arange(1, count + 1, dtype=dtype)[:, None]
    return jnp.broadcast_to(row * factor, (count, 8)).astype(dtype)


def total(model: Any, x: jax.Array) -> jax.Array:
    return model(x).sum()


def traced(model: Any, x: jax.Array, pending: Any = None, **kwargs: Any) -> Any:
    return fsdp_jax.grad(total, **kwargs)(model, x, pending=pending)


# Compiled once for all tests whose models and settings are the same.
grads_of = nnx.jit(traced, static_argnames="reduction")


def constant(grads: Any, name: str = "w") -> float:
    """The one value of a gradient all of whose entries are alike."""
    for part in name.split("."):
        grads = grads[part]
    value = np.asarray(grads[...], np.float64)
    np.testing.assert_array_equal(value, value.flat[0])
    return float(value.flat[0])


def sync(model: Any, on: bool) -> None:
    model.set_requires_gradient_sync(on)


# --- sums -------------------------------------------------------------------------


def test_calls_without_sync_are_added_to_the_next_reduction():
    model = scale(4)
    first = grads_of(model, ranks(model, 1))
    assert constant(first) == 2.5
    sync(model, False)
    kept = grads_of(model, ranks(model, 10))
    assert isinstance(kept, fsdp_jax.PendingGradients)
    assert constant(first) == 2.5
    sync(model, True)
    last = grads_of(model, ranks(model, 100), kept)
    assert constant(last) + constant(first) == 277.5


def test_a_synchronised_sum_needs_no_batch():
    model = scale(4)
    sync(model, False)
    kept = grads_of(model, ranks(model, 1)) + grads_of(model, ranks(model, 10))
    np.testing.assert_array_equal(
        kept.unreduced["w"], 11 * np.tile(np.arange(1.0, 5)[:, None], (1, 8))
    )
    for _ in range(2):  # it stays as it is
        assert constant(model.synchronize_gradients(kept)) == 11 * 2.5


def test_equal_micro_batches_are_not_scaled_again():
    model = scale(4)
    sync(model, False)
    kept = grads_of(model, ranks(model))
    for _ in range(3):
        kept = grads_of(model, ranks(model), kept)
    sync(model, True)
    assert constant(grads_of(model, ranks(model), kept)) == 5 * 2.5
    assert constant(grads_of(model, ranks(model), kept, reduction="mean")) == 12.5


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"param_dtype": BF16}, 0),
        ({"param_dtype": BF16, "reduce_dtype": BF16}, 0),
        ({"param_dtype": BF16, "reduce_dtype": F32}, 1),
        ({"reduce_dtype": BF16}, 0),
        ({}, 1),
    ],
)
def test_unreduced_sums_are_kept_in_the_dtype_of_the_reduction(policy, expected):
    """256 + 1 - 256 rounds to 0 in bfloat16."""
    model = scale(4, **policy)
    sync(model, False)
    pending = None
    for x in (256, 1, -256):
        pending = grads_of(model, jnp.full((4, 8), x, F32), pending)
    dtype = policy.get("reduce_dtype") or policy.get("param_dtype") or F32
    assert pending.unreduced["w"].dtype == dtype
    done = model.synchronize_gradients(pending)
    assert done["w"].dtype == F32
    assert constant(done) == expected
    sync(model, True)
    separate = [grads_of(model, jnp.full((4, 8), x, F32)) for x in (256, 1, -256)]
    assert sum(constant(g) for g in separate) == 1


@pytest.mark.parametrize(("deferred", "expected"), [(True, 0), (False, 1)])
def test_partial_sums_are_kept_in_the_dtype_of_the_reduction(deferred, expected):
    model = scale(2, 2, param_dtype=BF16)
    model.set_requires_all_reduce(not deferred)
    results = [grads_of(model, jnp.full((4, 8), x, F32)) for x in (256, 1, -256)]
    if deferred:
        kept = results[0] + results[1] + results[2]
        assert kept.partial["w"].dtype == BF16
        results = [model.synchronize_gradients(kept)]
    assert sum(constant(g) for g in results) == expected


def test_parameters_in_bfloat16_are_summed_in_float32_if_asked():
    model = scale(4, dtype=BF16, reduce_dtype=F32)
    sync(model, False)
    pending = None
    for x in (256, 1, -256):
        pending = grads_of(model, jnp.full((4, 8), x, F32), pending)
    assert pending.unreduced["w"].dtype == F32
    done = model.synchronize_gradients(pending)
    assert (constant(done), done["w"].dtype) == (1, BF16)


def test_complex_parameters_are_summed_as_such():
    class Complex(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.arange(8) + 2j * jnp.arange(8))
            self.v = nnx.Param(jnp.ones(8))

    def loss(model, x):
        return (jnp.abs(x * model.w[...]) ** 2 * model.v[...]).sum()

    def run(model, x):
        return loss(model, x)

    for policy in (MixedPrecisionPolicy(reduce_dtype=F32), MixedPrecisionPolicy(BF16)):
        model: Any = Complex()
        model.__class__.__call__ = run
        fully_shard(model, mesh=grid(4), mp_policy=policy)
        step = fsdp_jax.grad(lambda model, x: model(x))
        expected = step(model, jnp.ones((4, 8)))
        sync(model, False)
        kept = step(model, jnp.ones((4, 8)))
        assert kept.unreduced["w"].dtype == jnp.complex64
        helpers.assert_trees_close(
            jax.tree.map(jnp.abs, model.synchronize_gradients(kept)),
            jax.tree.map(jnp.abs, expected),
        )


# --- replicas ---------------------------------------------------------------------


def test_partial_gradients_are_means_over_the_shards():
    model = scale(2, 2)
    model.set_requires_all_reduce(False)
    kept = grads_of(model, ranks(model))
    assert not kept.unreduced and not kept.reduced
    np.testing.assert_array_equal(kept.partial["w"][:, 0], [1.5, 3.5])
    assert kept.partial["w"].shape == (2, 8)
    assert constant(model.synchronize_gradients(kept)) == 2.5
    model.set_requires_all_reduce(True)
    assert constant(grads_of(model, ranks(model, 10), kept)) == 27.5


@pytest.mark.parametrize("sizes", GRIDS)
def test_deferring_by_stages_gives_the_same_as_deferring_nothing(sizes):
    model = family(*sizes)
    expected = grads_of(model, ranks(model, 111))
    sync(model, False)
    kept = grads_of(model, ranks(model, 1))
    assert list(map(len, kept.stages)) == [2, 0, 0]
    sync(model, True)
    model.set_requires_all_reduce(False)
    kept = grads_of(model, ranks(model, 10), kept)
    cut = sizes[1] > 1  # what is whole on every device has no partial sum
    assert list(map(len, kept.stages)) == ([0, 2, 0] if cut else [2, 0, 0])
    sync(model, False)
    both = grads_of(model, ranks(model, 0), kept)
    assert list(map(len, both.stages)) == ([2, 2, 0] if cut else [2, 0, 0])
    sync(model, True)
    for old in (kept, both):
        helpers.assert_trees_close(grads_of(model, ranks(model, 100), old), expected)


def test_sync_sets_the_all_reduce_too_and_the_order_of_setters_matters():
    model, one = scale(2, 2), scale(4)
    x = ranks(model)

    def stages(model):
        grads = grads_of(model, x)
        return [bool(s) for s in getattr(grads, "stages", [])]

    sync(model, False)
    model.set_requires_all_reduce(True)
    assert stages(model) == [True, False, False]  # no communication at all
    sync(model, True)
    model.set_requires_all_reduce(False)
    assert stages(model) == [False, True, False]
    sync(model, True)
    assert stages(model) == []
    one.set_requires_all_reduce(False)  # nothing to leave out without replicas
    assert constant(grads_of(one, x)) == 2.5


def test_a_setting_can_change_between_calls_in_either_direction():
    model = scale(4)
    finished = grads_of(model, ranks(model))
    sync(model, False)
    kept = grads_of(model, ranks(model, 10))
    assert not kept.reduced and constant(finished) == 2.5
    sync(model, True)
    assert constant(grads_of(model, ranks(model, 0), kept)) == 25


# --- the divide factor ------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "sizes", "reduction"),
    [
        (1, (4,), "mean"),
        (8, (4,), "sum"),
        (8, (2, 2), "mean"),
        (0.5, (2, 2), "weighted"),
    ],
)
def test_the_result_is_the_sum_over_the_devices_divided_once(factor, sizes, reduction):
    def loss(model, x):
        weighted = reduction == "weighted"
        return (total(model, x), jnp.full((), 0.25)) if weighted else total(model, x)

    step = fsdp_jax.grad(loss, reduction=reduction)
    model = scale(*sizes)
    model.set_gradient_divide_factor(factor)
    x = ranks(model)
    assert constant(step(model, x)) == 10 / factor
    sync(model, False)
    assert constant(model.synchronize_gradients(step(model, x))) == 10 / factor
    sync(model, True)
    model.set_requires_all_reduce(False)
    kept = step(model, x)
    if len(sizes) > 1:
        kept = model.synchronize_gradients(kept)
    assert constant(kept) == 10 / factor
    for on in (True, False):
        sync(model, on)
        micro = fsdp_jax.grad(loss, reduction=reduction, num_microbatches=2)
        slices = 2 if reduction != "mean" else 1
        wide = jnp.repeat(x, 2, axis=0)
        expected = 10 / factor * slices / (2 if reduction == "weighted" else 1)
        assert constant(micro(model, wide)) == expected


def test_a_factor_belongs_to_one_group_and_can_be_taken_back():
    model = family(4)
    model.set_gradient_divide_factor(1)
    grads = grads_of(model, ranks(model))
    assert (constant(grads, "root"), constant(grads, "child.w")) == (10, 2.5)
    sync(model, False)
    grads = model.synchronize_gradients(grads_of(model, ranks(model)))
    assert (constant(grads, "root"), constant(grads, "child.w")) == (10, 2.5)
    model.set_gradient_divide_factor(None)
    grads = model.synchronize_gradients(grads_of(model, ranks(model)))
    assert (constant(grads, "root"), constant(grads, "child.w")) == (2.5, 2.5)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (4, 1)])
def test_means_of_large_float16_gradients_do_not_overflow(sizes):
    model = scale(*sizes, reduce_dtype=F16)
    large = 28672.0  # few bits, so that no sum is rounded; 65504 is the end
    x = jnp.full((int(np.prod(sizes)), 8), large)
    assert constant(grads_of(model, x)) == large
    sync(model, False)
    kept = grads_of(model, x)
    assert kept.unreduced["w"].dtype == F16
    assert constant(model.synchronize_gradients(kept)) == large
    sync(model, True)
    model.set_requires_all_reduce(False)
    kept = grads_of(model, x)
    if len(sizes) > 1:
        if sizes[1] > 1:
            assert kept.partial["w"].dtype == F16
            np.testing.assert_array_equal(kept.partial["w"], large)
        kept = model.synchronize_gradients(kept)
    assert constant(kept) == large


@pytest.mark.parametrize("num_devices", [4, 8])
def test_thirty_thousand_in_float16_comes_back(num_devices):
    model = scale(num_devices, reduce_dtype=F16)
    mean = constant(grads_of(model, jnp.full((num_devices, 8), 30000.0)))
    assert mean == pytest.approx(30000, rel=1e-3)  # a sum of eight is rounded
    sync(model, False)
    kept = grads_of(model, jnp.full((num_devices, 8), 30000.0))
    assert constant(model.synchronize_gradients(kept)) == mean


@pytest.mark.parametrize(("factor", "dtype"), [(None, F16), (4.0, F32)])
def test_one_device_divides_once_and_sends_nothing(factor, dtype):
    model = scale(1, reduce_dtype=dtype)
    model.set_gradient_divide_factor(factor)
    x, expected = jnp.full((1, 8), 12.0), 12 / (factor or 1)
    assert constant(grads_of(model, x)) == expected
    sync(model, False)
    kept = grads_of(model, x)
    assert kept.unreduced["w"].shape == (1, 8)
    assert constant(model.synchronize_gradients(kept)) == expected
    sync(model, True)
    assert constant(grads_of(model, x, kept)) == 2 * expected
    for counts in (
        helpers.count_collectives(helpers.lowered_text(traced, model, x)),
        helpers.count_collectives(helpers.lowered_text(traced, model, x, kept)),
    ):
        assert not any(counts.values())


# --- counts -----------------------------------------------------------------------


def model_and_batch(*sizes: int) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    model: Any = helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)), mesh=grid(*sizes))
    return model, helpers.regression_batch(16)


GROUPS = 3  # the root has no parameters of its own


def counted(f: Any, *args: Any) -> tuple[int, int]:
    counts = helpers.count_collectives(helpers.lowered_text(f, *args))
    return counts["reduce_scatter"], counts["all_reduce"]


def step_of(model: Any, batch: Any, pending: Any = None) -> Any:
    return fsdp_jax.value_and_grad(helpers.mean_square)(model, *batch, pending=pending)


run_step = nnx.jit(step_of)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_accumulating_costs_one_reduction_per_group(sizes):
    model, batch = model_and_batch(*sizes)
    replicas = GROUPS if len(sizes) > 1 else 0
    sync(model, False)
    assert counted(step_of, model, batch) == (0, 1)  # the loss
    kept = run_step(model, batch)[1]
    assert counted(step_of, model, batch, kept) == (0, 1)
    sync(model, True)
    assert counted(step_of, model, batch, kept) == (GROUPS, 1 + replicas)
    assert counted(lambda m, p: m.synchronize_gradients(p), model, kept) == (
        GROUPS,
        replicas,
    )


def test_deferring_the_all_reduce_costs_one_per_group():
    model, batch = model_and_batch(2, 2)
    model.set_requires_all_reduce(False)
    assert counted(step_of, model, batch) == (GROUPS, 1)
    kept = run_step(model, batch)[1]
    assert counted(step_of, model, batch, kept) == (GROUPS, 1)
    assert counted(lambda m, p: m.synchronize_gradients(p), model, kept) == (0, GROUPS)
    sync(model, False)
    both = run_step(model, batch, kept)[1]  # unreduced ones too: still one of each
    assert counted(lambda m, p: m.synchronize_gradients(p), model, both) == (
        GROUPS,
        GROUPS,
    )
    sync(model, True)
    assert counted(step_of, model, batch, kept) == (GROUPS, 1 + GROUPS)


def test_a_whole_step_of_four_micro_batches():
    model, batch = model_and_batch(4)

    def step(model, batch):
        sync(model, False)
        pending = None
        for _ in range(3):
            _, pending = step_of(model, batch, pending)
        sync(model, True)
        return step_of(model, batch, pending)[1]

    assert counted(step, model, batch)[0] == GROUPS
    once = run_step(model, batch)[1]
    expected = jax.tree.map(lambda g: 4 * g, once)
    helpers.assert_trees_close(nnx.jit(step)(model, batch), expected)


twin_gradient = nnx.jit(nnx.grad(helpers.mean_square))


@pytest.mark.parametrize(
    ("platform", "reshard"),
    [("tpu", True), ("tpu", None), ("gpu", False)],
)
def test_every_ordering_gives_the_same(platform, reshard):
    twin = helpers.MLP(nnx.Rngs(0))
    expected = twin_gradient(twin, *helpers.regression_batch(16))
    model, batch = model_and_batch(4)
    model.set_ordering(ORDERINGS[platform])
    if reshard is not None:
        model.set_reshard_after_forward(reshard)
    sync(model, False)
    kept = run_step(model, batch)[1]
    helpers.assert_trees_close(model.synchronize_gradients(kept), expected)
    sync(model, True)
    doubled = jax.tree.map(lambda g: 2 * g, expected)
    helpers.assert_trees_close(run_step(model, batch, kept)[1], doubled)
