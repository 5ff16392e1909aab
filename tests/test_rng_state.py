"""Random streams, statistics, counters and sown values in the program of one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers


class Count(nnx.Variable):
    """A Variable that the library knows nothing of."""


class Noisy(nnx.Module):
    """Linear, Dropout, Linear, Dropout."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.5) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.inner_dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.inner_dropout(jnp.tanh(self.first(x)))
        return self.dropout(self.last(h))


class NoisyStack(nnx.Module):
    """Two noisy blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Noisy(rngs), Noisy(rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Masks(nnx.Module):
    """Dropout alone, behind a parameter that changes nothing."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(8))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x * self.scale[...])


class Stateful(nnx.Module):
    """A parameter, and a Variable that a given rule updates in every call."""

    def __init__(self, value: Any, update: Callable[..., Any], kind: Any = Count):
        self.scale = nnx.Param(jnp.ones(8))
        self.state = kind(jnp.asarray(value))
        self.update = nnx.static(update)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.state[...] = self.update(self.state[...], x)
        return x * self.scale[...]


class Sowing(nnx.Module):
    """A block that sows its activations, their mean, and a number of rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.sow(nnx.Intermediate, "activations", y)
        self.sow(nnx.Intermediate, "mean", y.mean())
        return y


class Outer(nnx.Module):
    """A module around a block that sows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = Sowing(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def twice(model: Any, x: jax.Array) -> jax.Array:
    return square(model, x) + square(model, 2 * x)


def rows(count: int = 8, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, 8))


def on_device(model: Any, index: int) -> Any:
    """A copy of an unsharded model with the device index folded into its keys."""
    copy = nnx.clone(model)
    for _, key in nnx.iter_graph(copy):
        if isinstance(key, nnx.RngKey):
            key[...] = jax.random.fold_in(key[...], index)
    return copy


def counters(model: Any) -> list[int]:
    return [int(c) for c in jax.tree.leaves(nnx.state(model, nnx.RngCount))]


def key_bits(model: Any) -> list[list[int]]:
    keys = jax.tree.leaves(nnx.state(model, nnx.RngKey))
    return [jax.random.key_data(key).tolist() for key in keys]


def device_mean(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def test_masks_differ_per_device_and_per_step_and_counters_advance_alike(mesh8):
    model = fully_shard(Masks(nnx.Rngs(0)), mesh=mesh8)
    keys = key_bits(model)
    forward = fsdp_jax.shard_map(lambda model, x: model(x))
    masks = [np.asarray(forward(model, jnp.ones((8, 32, 8)))) for _ in range(2)]
    everything = [mask.tobytes() for step in masks for mask in step]
    assert len(set(everything)) == 2 * 8
    for step in masks:
        assert set(np.unique(step)) == {0.0, 2.0}
    assert counters(model) == [2]
    assert key_bits(model) == keys  # the index is folded in on the device only
    plain = Masks(nnx.Rngs(0))
    for _ in range(2):
        plain(jnp.ones((8, 8)))
    assert counters(plain) == counters(model)


@pytest.fixture(scope="module")
def one_device() -> Any:
    """Loss and gradients on one device, compiled once."""
    return nnx.jit(nnx.value_and_grad(square))


@pytest.mark.parametrize("mode", ["freed", "kept", "jitted"])
def test_dropout_equals_a_reference_that_folds_the_device_index_in(mode, one_device):
    num_devices = 4
    mesh = helpers.mesh_of(num_devices)
    reference = NoisyStack(nnx.Rngs(params=0, dropout=1))
    copies = [on_device(reference, i) for i in range(num_devices)]
    model = NoisyStack(nnx.Rngs(params=0, dropout=1))
    helpers.shard_blocks(model, mesh=mesh, reshard_after_forward=mode != "kept")
    step = fsdp_jax.value_and_grad(square)
    if mode == "jitted":
        step = nnx.jit(step)
    for seed in range(2):
        x = rows(8, seed)
        parts = jnp.split(x, num_devices)
        expected = [one_device(c, part) for c, part in zip(copies, parts)]
        value, grads = step(model, x)
        np.testing.assert_allclose(value, np.mean([v for v, _ in expected]), rtol=1e-5)
        helpers.assert_trees_close(grads, device_mean([g for _, g in expected]))
    assert counters(model) == counters(copies[0]) == [2] * 4


def test_one_device_draws_what_the_unsharded_model_draws():
    model = fully_shard(Noisy(nnx.Rngs(0)), mesh=helpers.mesh_of(1))
    reference = Noisy(nnx.Rngs(0))
    reference_step = nnx.jit(nnx.value_and_grad(square))
    for seed in range(2):
        got = fsdp_jax.value_and_grad(square)(model, rows(seed=seed))
        expected = reference_step(reference, rows(seed=seed))
        helpers.assert_trees_close(got, expected)
    assert counters(model) == counters(reference)


def test_recomputed_masks_are_those_of_the_forward():
    class Rematerialized(nnx.Module):
        def __init__(self, rngs):
            self.inner = Noisy(rngs)

        def __call__(self, x):
            return nnx.remat(lambda inner, x: inner(x))(self.inner, x)

    mesh = helpers.mesh_of(2)
    plain = fully_shard(Noisy(nnx.Rngs(0)), mesh=mesh)
    expected = fsdp_jax.value_and_grad(square)(plain, rows())
    model = Rematerialized(nnx.Rngs(0))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    value, grads = fsdp_jax.value_and_grad(square)(model, rows())
    helpers.assert_trees_close((value, grads["inner"]), expected)
    assert counters(model) == counters(plain)


def test_streams_given_as_an_argument_are_treated_alike():
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4))
    rngs = nnx.Rngs(dropout=3)

    def noise(model, rngs, x):
        return model(x) * 0 + jax.random.normal(rngs.dropout(), x.shape)

    drawn = fsdp_jax.shard_map(noise)(model, rngs, rows(4))
    key = nnx.Rngs(dropout=3).dropout.key[...]
    for i, row in enumerate(drawn):
        stream = nnx.Rngs(dropout=jax.random.fold_in(key, i))
        np.testing.assert_array_equal(row, jax.random.normal(stream.dropout(), (8,)))
    assert int(rngs.dropout.count[...]) == 1


def test_split_streams_are_folded_key_by_key():
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(2))
    rngs = nnx.Rngs(dropout=3)
    nnx.split_rngs(rngs, splits=3)
    keys = rngs.dropout.key[...]

    def look(model, rngs):
        return jax.random.key_data(rngs.dropout.key[...])[None]

    seen = fsdp_jax.shard_map(look)(model, rngs)
    for i in range(2):
        expected = jax.vmap(lambda k, i=i: jax.random.fold_in(k, i))(keys)
        np.testing.assert_array_equal(seen[i], jax.random.key_data(expected))


@pytest.mark.parametrize("value", [3, 3.0], ids=["int", "float"])
def test_a_counter_that_ignores_the_data_counts(value, mesh8):
    model = fully_shard(Stateful(value, lambda c, x: c + 1), mesh=mesh8)
    for _ in range(2):
        fsdp_jax.value_and_grad(square)(model, rows())
    assert model.state[...] == value + 2
    assert model.state[...].dtype == jnp.asarray(value).dtype
    nnx.jit(fsdp_jax.shard_map(lambda model, x: model(x)))(model, rows())
    assert model.state[...] == value + 3


@pytest.mark.parametrize(
    ("value", "update"),
    [
        (0, lambda c, x: c + (x > 0).sum()),
        (0.0, lambda c, x: x.mean()),
        (jnp.zeros(8), lambda c, x: c + x.sum(0)),
    ],
    ids=["int", "float", "array"],
)
@pytest.mark.parametrize("free", [True, False])
def test_a_variable_that_differs_between_devices_is_an_error(
    value, update, free, mesh8
):
    model = Stateful(value, update)
    fully_shard(model, mesh=mesh8, reshard_after_forward=free)
    before = np.asarray(model.state[...])
    with pytest.raises(ValueError, match=r"Count 'state'.*differ between devices"):
        fsdp_jax.value_and_grad(square)(model, rows())
    np.testing.assert_array_equal(model.state[...], before)
    with pytest.raises(ValueError, match=r"Count 'state'.*differ between devices"):
        fsdp_jax.shard_map(lambda model, x: model(x))(model, rows())


def test_an_integer_statistic_that_differs_is_an_error(mesh8):
    model = Stateful(0, lambda c, x: c + (x > 0).sum(), nnx.BatchStat)
    fully_shard(model, mesh=mesh8)
    with pytest.raises(ValueError, match=r"BatchStat 'state'"):
        fsdp_jax.value_and_grad(square)(model, rows())


@pytest.mark.parametrize("reduce", [jax.lax.psum, jax.lax.pmax, jax.lax.pmean])
def test_a_variable_that_the_user_reduced_is_the_same_everywhere(reduce, mesh8):
    def update(c, x):
        return c + reduce(x.sum(), "fsdp")

    model = fully_shard(Stateful(1.0, update), mesh=mesh8)
    x = rows()
    fsdp_jax.shard_map(lambda model, x: model(x))(model, x)
    per_device = x.sum(1)
    kind = {jax.lax.psum: jnp.sum, jax.lax.pmax: jnp.max, jax.lax.pmean: jnp.mean}
    np.testing.assert_allclose(model.state[...], 1 + kind[reduce](per_device), 1e-5)


def test_a_variable_computed_from_gathered_parameters_is_the_same_everywhere(mesh8):
    class Norm(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.arange(8.0))
            self.norm = Count(jnp.zeros(()))

        def __call__(self, x):
            self.norm[...] = jnp.linalg.norm(self.scale[...])
            return x * self.scale[...]

    model = fully_shard(Norm(), mesh=mesh8)
    fsdp_jax.value_and_grad(square)(model, rows())
    np.testing.assert_allclose(model.norm[...], jnp.linalg.norm(jnp.arange(8.0)), 1e-6)


def test_floating_statistics_are_averaged_also_without_a_gradient(mesh8):
    for run in (
        fsdp_jax.value_and_grad(square),
        fsdp_jax.shard_map(lambda model, x: model(x)),
    ):
        model = Stateful(jnp.zeros(8), lambda c, x: c + x.max(0) ** 2, nnx.BatchStat)
        fully_shard(model, mesh=mesh8)
        x = rows(16)
        run(model, x)
        expected = np.mean([part.max(0) ** 2 for part in jnp.split(x, 8)], axis=0)
        np.testing.assert_allclose(model.state[...], expected, rtol=1e-5)
        assert model.state[...].sharding.is_fully_replicated


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_come_back_for_the_global_batch(free, mesh8):
    reference, model = Outer(nnx.Rngs(0)), Outer(nnx.Rngs(0))
    fully_shard(model.inner, mesh=mesh8, reshard_after_forward=free)
    fully_shard(model, mesh=mesh8)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    for seed in range(2):
        expected = nnx.jit(nnx.value_and_grad(twice))(reference, rows(16, seed))
        got = fsdp_jax.value_and_grad(twice)(model, rows(16, seed))
        helpers.assert_trees_close(got, expected)
        sown, wanted = (nnx.pop(m, nnx.Intermediate) for m in (model, reference))
        assert len(jax.tree.leaves(wanted)) == 2 * 2  # two values, two calls
        helpers.assert_trees_close(sown, wanted)
        assert [path for path, _ in nnx.to_flat_state(nnx.state(model))] == paths


@pytest.mark.parametrize("free", [True, False])
def test_captured_values_are_seen_in_the_loss(free, mesh8):
    reference, model = Outer(nnx.Rngs(0)), Outer(nnx.Rngs(0))
    fully_shard(model.inner, mesh=mesh8, reshard_after_forward=free)
    fully_shard(model, mesh=mesh8)

    def loss(model, x):
        capture: Any = nnx.capture(nnx.Intermediate)
        y, captured = capture(lambda model, x: model(x))(model, x)
        return jnp.mean(y**2), nnx.to_pure_dict(captured)

    expected = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(reference, rows(16))
    got = fsdp_jax.value_and_grad(loss, has_aux=True)(model, rows(16))
    assert len(jax.tree.leaves(expected[0][1])) == 2
    helpers.assert_trees_close(got, expected)


# --- keys that f writes -----------------------------------------------------------


def reseeded(model, x, key):
    nnx.reseed(model, default=key)
    return model(x)


def assigned(model, x, key):
    model.dropout.rngs.key[...] = key
    return model(x)


def replaced(model, x, key):
    model.dropout.rngs = nnx.Rngs(default=key).default.fork()
    return model(x)


def split(model, x, key):
    nnx.split_rngs(model, splits=2)
    return jnp.zeros(())


def in_a_loop(model, x, key):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def loop(model, x):
        nnx.reseed(model, default=key)
        return model

    loop(model, x)
    return x.sum()


@pytest.mark.parametrize("f", [reseeded, assigned, replaced, split, in_a_loop])
def test_a_key_that_f_writes_is_refused_and_the_model_is_as_it_was(f):
    model = fully_shard(Masks(nnx.Rngs(0)), mesh=helpers.mesh_of(4))
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.RngState))
    text = "^shard_map: f writes the random key 'dropout.rngs.key'.*before the call"
    with pytest.raises(ValueError, match=text):
        fsdp_jax.shard_map(f)(model, jnp.ones((4, 8)), jax.random.key(3))
    helpers.assert_trees_close(nnx.state(model, nnx.RngState), before)


def test_a_stream_that_f_makes_of_the_models_is_refused():
    model: Any = fully_shard(Masks(nnx.Rngs(0)), mesh=helpers.mesh_of(4))

    def forked(model, x):
        model.forked = model.dropout.rngs.fork()

    with pytest.raises(ValueError, match="changed the RngKey 'forked.key'.*before"):
        fsdp_jax.shard_map(forked)(model, jnp.ones((4, 8)))

    def fresh(model, x):
        model.fresh = nnx.Rngs(5)

    fsdp_jax.shard_map(fresh)(model, jnp.ones((4, 8)))
    assert model.fresh.params() == nnx.Rngs(5).params()


@pytest.mark.parametrize("slices", [1, 2])
def test_keys_that_pass_through_loops_and_branches_are_kept(slices):
    model: Any = Masks(nnx.Rngs(0))
    key = model.dropout.rngs.key[...]
    fully_shard(model, mesh=helpers.mesh_of(4))

    def f(model, x):
        model.unshard()
        nnx.remat(lambda model, x: model(x))(model, x)
        nnx.scan(
            lambda model, x: (model, nnx.jit(lambda model, x: model(x))(model, x)),
            length=2,
            in_axes=(nnx.Carry, None),
            out_axes=(nnx.Carry, 0),
        )(model, x)
        nnx.cond(True, lambda model: model(x), lambda model: model(-x), model)
        return model(x).mean()

    fsdp_jax.value_and_grad(f, num_microbatches=slices)(model, jnp.ones((8, 8)))
    assert model.dropout.rngs.key[...] == key
    assert model.dropout.rngs.count[...] == 5 * slices
