"""`unshard`, `reshard` and `UnshardHandle`; writing to parameters in either state."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import UnshardHandle, fully_shard
from tests import helpers


class Net(nnx.Module):
    """Two layers with tanh between them, and a head; width 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x)


FIRST = {"layers.0.kernel", "layers.0.bias"}
SECOND = {"layers.1.kernel", "layers.1.bias"}
HEAD = {"head.kernel", "head.bias"}


@pytest.fixture
def net(mesh8) -> Any:
    """Three groups: each layer, and the root with the head."""
    return helpers.shard_blocks(Net(nnx.Rngs(0)), mesh=mesh8)


def make_root(mesh: Any, **kwargs: Any) -> Any:
    """One group for everything."""
    return fully_shard(Net(nnx.Rngs(0)), mesh=mesh, **kwargs)


def twin_state() -> dict[str, np.ndarray]:
    """Every value of the same model unsharded, by dotted name."""
    flat = nnx.to_flat_state(nnx.state(Net(nnx.Rngs(0))))
    return {".".join(map(str, path)): np.asarray(v[...]) for path, v in flat}


def full_names(model: Any) -> set[str]:
    """Parameters that every device holds whole."""
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {
        ".".join(map(str, path))
        for path, p in found
        if fsdp_jax.local_shape(p) == p.shape
    }


def raw_values(model: Any) -> list[Any]:
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [v.get_raw_value() for v in leaves]


def is_same(before: list[Any], after: list[Any]) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


def inputs() -> jax.Array:
    """An `(8, 8)` batch."""
    return jnp.arange(64.0).reshape(8, 8) / 64


def expected_output() -> jax.Array:
    return Net(nnx.Rngs(0))(inputs())


# --- unshard and reshard ----------------------------------------------------------


def test_unshard_gives_full_values_and_reshard_takes_them_away(net):
    assert net.unshard() is None
    assert full_names(net) == HEAD
    kernel = net.head.kernel
    assert kernel.get_raw_value().sharding.is_fully_replicated
    np.testing.assert_array_equal(kernel[...], twin_state()["head.kernel"])
    assert net.reshard() is None
    assert full_names(net) == set()
    assert fsdp_jax.local_shape(kernel) == (1, 8)
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, twin_state()[name])


def test_unshard_and_reshard_twice_change_nothing_more(net):
    net.unshard()
    full = raw_values(net)
    net.unshard()
    assert is_same(full, raw_values(net))
    net.reshard()
    shards = raw_values(net)
    net.reshard()
    assert is_same(shards, raw_values(net))


def test_reshard_of_a_sharded_module_changes_nothing(net):
    before = raw_values(net)
    net.reshard()
    assert is_same(before, raw_values(net))


def test_unshard_of_one_group_leaves_the_others(net):
    net.layers[0].unshard()
    assert full_names(net) == FIRST
    net.unshard()
    assert full_names(net) == FIRST | HEAD
    net.reshard()
    assert full_names(net) == FIRST
    net.layers[1].reshard()
    assert full_names(net) == FIRST
    net.layers[0].reshard()
    assert full_names(net) == set()


def test_unshard_before_the_root_is_sharded_is_kept(mesh8):
    model: Any = Net(nnx.Rngs(0))
    fully_shard(model.layers[0], mesh=mesh8)
    model.layers[0].unshard()
    fully_shard(model, mesh=mesh8)
    assert full_names(model) == FIRST
    np.testing.assert_allclose(model(inputs()), expected_output(), 1e-5, 1e-6)


def test_unshard_keeps_the_parameters_own_dtype(mesh8):
    policy = fsdp_jax.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    model = make_root(mesh8, mp_policy=policy)
    model.unshard()
    assert model.head.kernel.dtype == jnp.float32
    assert model(inputs()).dtype == jnp.bfloat16
    model.unshard()
    model.reshard()
    np.testing.assert_array_equal(model.head.kernel[...], twin_state()["head.kernel"])


def test_a_module_without_parameters_of_its_own_can_be_unsharded(mesh8):
    model = helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)), mesh=mesh8)
    assert model.unshard() is None
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    assert handle.wait() is None
    model.reshard()
    assert full_names(model) == set()


@pytest.mark.parametrize("asked", [None, True, False, 2])
def test_a_forward_uses_unsharded_parameters_and_then_frees_as_told(mesh8, asked):
    model = make_root(mesh8, reshard_after_forward=asked)
    model.unshard()
    model.head.bias[...] = jnp.ones(8)
    held = model.head.kernel.get_raw_value()
    np.testing.assert_allclose(
        model(inputs()), expected_output() + 1 - twin_state()["head.bias"], 1e-5, 1e-6
    )
    if asked in (None, True):
        assert full_names(model) == set()
    else:
        assert model.head.kernel.get_raw_value() is held
        assert full_names(model) == FIRST | SECOND | HEAD


@pytest.mark.parametrize("unshard", [True, False])
def test_any_method_works_while_unsharded(net, unshard):
    if unshard:
        net.unshard()
    x = inputs()
    expected = x @ twin_state()["head.kernel"].T
    np.testing.assert_allclose(x @ net.head.kernel[...].T, expected, 1e-5, 1e-6)


# --- the handle -------------------------------------------------------------------


def test_parameters_become_full_in_wait(net):
    handle = net.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    assert full_names(net) == set()
    assert handle.wait() is None
    assert full_names(net) == HEAD
    np.testing.assert_array_equal(net.head.kernel[...], twin_state()["head.kernel"])


def test_waiting_twice_is_harmless(net):
    handle = net.unshard(async_op=True)
    handle.wait()
    net.head.bias[...] = jnp.ones(8)
    before = raw_values(net)
    handle.wait()
    assert is_same(before, raw_values(net))
    net.reshard()
    handle.wait()
    assert full_names(net) == set()


def test_a_started_gather_is_used_by_the_next_forward(net):
    handle = net.unshard(async_op=True)
    np.testing.assert_allclose(net(inputs()), expected_output(), 1e-5, 1e-6)
    assert full_names(net) == set()
    handle.wait()
    assert full_names(net) == set()


def test_a_started_gather_is_kept_by_a_forward_that_keeps(mesh8):
    model = make_root(mesh8, reshard_after_forward=2)
    model.unshard(async_op=True)
    model(inputs())
    assert full_names(model) == FIRST | SECOND | HEAD
    model(inputs())
    assert full_names(model) == set()


def test_a_started_gather_is_dropped_by_reshard(net):
    handle = net.unshard(async_op=True)
    net.reshard()
    handle.wait()
    assert full_names(net) == set()
    np.testing.assert_allclose(net(inputs()), expected_output(), 1e-5, 1e-6)


def test_a_started_gather_is_finished_by_unshard(net):
    handle = net.unshard(async_op=True)
    net.unshard()
    assert full_names(net) == HEAD
    held = raw_values(net)
    handle.wait()
    assert is_same(held, raw_values(net))


def test_two_started_gathers_of_one_module_are_one(net):
    first, second = net.unshard(async_op=True), net.unshard(async_op=True)
    second.wait()
    held = raw_values(net)
    first.wait()
    assert is_same(held, raw_values(net))
    assert full_names(net) == HEAD


def test_a_handle_of_an_unsharded_module_has_nothing_to_wait_for(net):
    net.unshard()
    held = raw_values(net)
    handle = net.unshard(async_op=True)
    net.reshard()
    handle.wait()
    assert full_names(net) == set()
    assert not is_same(held, raw_values(net))


@pytest.mark.parametrize("then", ["wait", "forward", "unshard"])
def test_a_value_written_after_the_gather_started_is_not_lost(net, then):
    handle = net.unshard(async_op=True)
    net.head.bias[...] = jnp.ones(8)
    expected = expected_output() + 1 - twin_state()["head.bias"]
    if then == "wait":
        handle.wait()
    elif then == "unshard":
        net.unshard()
    np.testing.assert_allclose(net(inputs()), expected, 1e-5, 1e-6)
    np.testing.assert_array_equal(net.head.bias[...], np.ones(8))


def test_a_traced_forward_does_not_use_up_a_started_gather(net):
    handle = net.unshard(async_op=True)
    got = nnx.jit(lambda m, x: m(x))(net, inputs())
    np.testing.assert_allclose(got, expected_output(), 1e-5, 1e-6)
    assert full_names(net) == set()
    handle.wait()
    assert full_names(net) == HEAD


def test_a_dropped_handle_keeps_nothing_alive(mesh8):
    model = make_root(mesh8)
    handle = model.unshard(async_op=True)
    alive = weakref.ref(model)
    del handle, model
    gc.collect()
    assert alive() is None


# --- in a trace -------------------------------------------------------------------


def test_unshard_and_reshard_inside_jit_last_until_it_returns(net):
    @nnx.jit
    def unshard(m: Any) -> None:
        m.unshard()

    @nnx.jit
    def reshard(m: Any) -> None:
        m.reshard()

    unshard(net)
    assert full_names(net) == set()
    np.testing.assert_array_equal(net.head.kernel[...], twin_state()["head.kernel"])
    np.testing.assert_allclose(net(inputs()), expected_output(), 1e-5, 1e-6)
    assert full_names(net) == set()
    net.unshard()
    reshard(net)
    assert full_names(net) == HEAD
    np.testing.assert_array_equal(net.head.kernel[...], twin_state()["head.kernel"])
    net.reshard()
    assert full_names(net) == set()
    np.testing.assert_allclose(net(inputs()), expected_output(), 1e-5, 1e-6)


def test_a_step_on_an_unsharded_module_is_right(net):
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    expected = nnx.jit(nnx.grad(loss))(Net(nnx.Rngs(0)), inputs())
    net.unshard()
    for grad in (fsdp_jax.grad, nnx.grad):
        got = nnx.jit(grad(loss))(net, inputs())
        helpers.assert_trees_close(got, expected)


def test_optimizer_updates_of_an_unsharded_module_are_kept(net):
    twin: Any = Net(nnx.Rngs(0))
    grads = jax.tree.map(jnp.ones_like, nnx.state(twin, nnx.Param))
    for m in (twin, net):
        optimizer = nnx.Optimizer(m, optax.sgd(0.5), wrt=nnx.Param)
        if m is net:
            m.unshard()
        optimizer.update(m, grads)
    net.reshard()
    helpers.assert_trees_close(net, twin)
    assert full_names(net) == set()


# --- writing ----------------------------------------------------------------------


@pytest.mark.parametrize("unsharded", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda p, v: p.__setitem__(..., v),
        lambda p, v: p.__setitem__(..., np.asarray(v)),
        lambda p, v: p.set_value(v),
        lambda p, v: p.__setitem__(slice(None), v),
        lambda p, v: [p.__setitem__(i, v[i]) for i in range(8)],
    ],
    ids=["array", "numpy", "set_value", "slice", "rows"],
)
def test_a_written_value_is_used_and_rests_where_the_old_one_did(net, unsharded, write):
    value = jnp.arange(64.0).reshape(8, 8) / 32
    if unsharded:
        net.unshard()
    write(net.head.kernel, value)
    assert full_names(net) == (HEAD if unsharded else set())
    assert net.head.kernel.get_raw_value().sharding.device_set == set(jax.devices())
    if unsharded:
        net.reshard()
    assert fsdp_jax.local_shape(net.head.kernel) == (1, 8)
    np.testing.assert_array_equal(net.head.kernel[...], value)
    twin = Net(nnx.Rngs(0))
    twin.head.kernel[...] = value
    np.testing.assert_allclose(net(inputs()), twin(inputs()), 1e-5, 1e-6)


@pytest.mark.parametrize("unsharded", [True, False])
@pytest.mark.parametrize("host", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_state_of_host_arrays_is_taken_over_and_rests_sharded(net, host, unsharded):
    other = Net(nnx.Rngs(9))
    state = jax.tree.map(host, nnx.as_pure(nnx.state(other)))
    if unsharded:
        net.unshard()
    nnx.update(net, state)
    assert full_names(net) == (HEAD if unsharded else set())
    for value in raw_values(net):
        assert isinstance(value, jax.Array)
        assert value.sharding.device_set == set(jax.devices())
    net.reshard()
    assert full_names(net) == set()
    np.testing.assert_allclose(net(inputs()), other(inputs()), 1e-5, 1e-6)


def test_a_state_of_variables_from_an_unsharded_model_is_taken_over(net):
    other = Net(nnx.Rngs(9))
    nnx.update(net, nnx.state(other))
    assert full_names(net) == set()
    np.testing.assert_allclose(net(inputs()), other(inputs()), 1e-5, 1e-6)
    assert isinstance(net, fsdp_jax.FSDPModule)
    np.testing.assert_allclose(
        fsdp_jax.shard_map(lambda m, x: m(x))(net, inputs()),
        other(inputs()),
        1e-5,
        1e-6,
    )


def test_the_state_of_a_sharded_model_goes_into_an_unsharded_one(net):
    twin = Net(nnx.Rngs(9))
    nnx.update(twin, nnx.state(net))
    assert type(twin) is Net
    np.testing.assert_allclose(twin(inputs()), expected_output(), 1e-5, 1e-6)


# --- state dicts while unsharded --------------------------------------------------


def test_state_dict_is_sharded_also_while_unsharded_and_leaves_the_module_so(net):
    at_rest = net.state_dict()
    net.unshard()
    held = raw_values(net)
    got = net.state_dict()
    assert list(got) == list(at_rest)
    for name, value in got.items():
        assert fsdp_jax.local_shape(value)[0] == 1, name
        np.testing.assert_array_equal(value, at_rest[name])
    assert is_same(held, raw_values(net))
    assert full_names(net) == HEAD


def test_load_state_dict_while_unsharded_is_used_and_kept(net):
    other = Net(nnx.Rngs(9))
    source: Any = fully_shard(Net(nnx.Rngs(9)))
    net.unshard()
    net.load_state_dict(source.state_dict())
    assert full_names(net) == HEAD
    np.testing.assert_allclose(net(inputs()), other(inputs()), 1e-5, 1e-6)
    assert full_names(net) == set()
    np.testing.assert_allclose(net(inputs()), other(inputs()), 1e-5, 1e-6)


def test_unshard_of_a_module_from_outside_of_a_trace_is_refused(net):
    before = net.head.kernel.get_raw_value()
    with pytest.raises(RuntimeError, match="outside of the function being traced"):
        jax.jit(lambda x: (net.unshard(), x)[1])(1.0)
    assert net.head.kernel.get_raw_value() is before


def test_a_module_that_cannot_be_hashed_can_be_unsharded_asynchronously(mesh8):
    @nnx.dataclass
    class Scale(nnx.Module):
        scale: nnx.Param

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.scale[...]

    module: Any = fully_shard(Scale(nnx.Param(jnp.arange(8.0))), mesh=mesh8)
    with pytest.raises(TypeError):
        hash(module)
    module.unshard(async_op=True).wait()
    assert fsdp_jax.local_shape(module.scale) == (8,)
    np.testing.assert_array_equal(module(jnp.ones(8)), np.arange(8.0))
