"""Freeing gathered parameters after forward, after errors, and by `reset_iter_state`.

All in the eager view and in traces that start from it; how often a per-device program
gathers is only looked at where a setter changes it.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers


class BrokenError(Exception):
    """What a test's module raises."""


@jax.custom_vjp
def fails_in_backward(x: jax.Array) -> jax.Array:
    return x


def _fail(_: Any, __: Any) -> Any:
    raise BrokenError("backward")


fails_in_backward.defvjp(lambda x: (x, None), _fail)


class Layer(nnx.Module):
    """`tanh(linear(x))`, width 8; first runs `before`, a function of `x`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array, before: Callable[[Any], Any]) -> jax.Array:
        return jnp.tanh(self.linear(before(x)))


class Net(nnx.Module):
    """Three layers and a head, width 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(
        self, x: jax.Array, before_second: Callable[[Any], Any] = lambda x: x
    ) -> jax.Array:
        for i, layer in enumerate(self.layers):
            x = layer(x, before_second if i == 1 else lambda x: x)
        return self.head(x)


LAYERS = {f"layers.{i}.linear.{name}" for i in range(3) for name in ("kernel", "bias")}
HEAD = {"head.kernel", "head.bias"}


def make_net(mesh: Any, **kwargs: Any) -> Any:
    return helpers.shard_blocks(Net(nnx.Rngs(0)), mesh=mesh, **kwargs)


def full_names(model: Any) -> set[str]:
    """Parameters that every device holds whole."""
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {
        ".".join(map(str, path))
        for path, p in found
        if fsdp_jax.local_shape(p) == p.shape
    }


def inputs() -> jax.Array:
    """An `(8, 8)` batch."""
    return jnp.arange(64.0).reshape(8, 8) / 64


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


# --- after an eager forward -------------------------------------------------------


@pytest.mark.parametrize("asked", [None, True, 1, np.int64(1)])
def test_eager_forward_ends_sharded(mesh8, asked):
    model = make_net(mesh8, reshard_after_forward=asked)
    expected = Net(nnx.Rngs(0))(inputs())
    for _ in range(2):
        np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)
        assert full_names(model) == set()


def test_true_on_a_root_that_is_the_only_group_is_honoured(mesh8):
    model = fully_shard(Net(nnx.Rngs(0)), mesh=mesh8, reshard_after_forward=True)
    model(inputs())
    assert full_names(model) == set()


def test_several_roots_follow_what_each_was_given(mesh8):
    model = Net(nnx.Rngs(0))
    for layer, asked in zip(model.layers, (True, False, None)):
        fully_shard(layer, mesh=mesh8, reshard_after_forward=asked)
    model(inputs())
    kept = {n for n in LAYERS if n.startswith("layers.1.")}
    assert full_names(model) == kept | HEAD  # the head is in no group


def test_false_stays_unsharded_until_each_module_is_resharded(mesh8):
    model = make_net(mesh8, reshard_after_forward=False)
    expected = Net(nnx.Rngs(0))(inputs())
    np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)
    assert full_names(model) == LAYERS | HEAD
    held = model.layers[1].linear.kernel.get_raw_value()
    np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)
    assert model.layers[1].linear.kernel.get_raw_value() is held  # not gathered again
    model.reshard()
    assert full_names(model) == LAYERS
    for layer in model.layers:
        layer.reshard()
    assert full_names(model) == set()
    np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)


def test_an_integer_counts_forwards(mesh8):
    model = make_net(mesh8, reshard_after_forward=3)
    expected = Net(nnx.Rngs(0))(inputs())
    for _ in range(2):
        for full in (LAYERS | HEAD, LAYERS | HEAD, set()):
            np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)
            assert full_names(model) == full


def test_an_integer_counts_forwards_of_each_module_for_itself(mesh8):
    model = make_net(mesh8, reshard_after_forward=2)
    first = {n for n in LAYERS if n.startswith("layers.0.")}
    model.layers[0](inputs(), lambda x: x)
    assert full_names(model) == first
    model(inputs())
    assert full_names(model) == (LAYERS | HEAD) - first
    model(inputs())
    assert full_names(model) == first


def test_traced_forwards_are_not_counted_and_change_nothing(mesh8):
    model = make_net(mesh8, reshard_after_forward=2)
    run = nnx.jit(lambda m, x: m(x))
    expected = run(model, inputs())
    assert full_names(model) == set()
    model(inputs())
    for _ in range(3):
        np.testing.assert_allclose(run(model, inputs()), expected, 1e-5, 1e-6)
        assert full_names(model) == LAYERS | HEAD
    model(inputs())
    assert full_names(model) == set()


@pytest.mark.parametrize("asked", [None, False, 2])
def test_a_traced_module_leaves_as_it_came_in(mesh8, asked):
    model = make_net(mesh8, reshard_after_forward=asked)
    step = nnx.jit(nnx.grad(loss_of))
    expected = nnx.jit(nnx.grad(loss_of))(Net(nnx.Rngs(0)), inputs())
    helpers.assert_trees_close(step(model, inputs()), expected)
    assert full_names(model) == set()
    model.layers[0].unshard()
    first = full_names(model)
    assert len(first) == 2
    helpers.assert_trees_close(step(model, inputs()), expected)
    assert full_names(model) == first


def test_values_written_while_kept_are_used_and_stay_after_reshard(mesh8):
    twin: Any = Net(nnx.Rngs(0))
    model = make_net(mesh8, reshard_after_forward=False)
    model(inputs())
    for m in (twin, model):
        m.head.bias[...] = jnp.full((8,), 2.0)
    np.testing.assert_allclose(model(inputs()), twin(inputs()), 1e-5, 1e-6)
    model.reshard()
    np.testing.assert_array_equal(model.head.bias[...], np.full(8, 2.0))
    np.testing.assert_allclose(model(inputs()), twin(inputs()), 1e-5, 1e-6)


def test_training_after_an_eager_forward_that_kept_full_parameters_is_right(mesh8):
    twin, model = Net(nnx.Rngs(0)), make_net(mesh8, reshard_after_forward=False)
    twin(inputs())
    model(inputs())
    value, grads = nnx.jit(nnx.value_and_grad(loss_of))(twin, inputs())
    got_value, got = fsdp_jax.value_and_grad(loss_of)(model, inputs())
    np.testing.assert_allclose(got_value, value, 1e-5)
    helpers.assert_trees_close(got, grads)
    assert fsdp_jax.local_shape(got["head"]["kernel"]) == (1, 8)


def test_reshard_in_its_own_forward_is_refused(mesh8):
    model = make_net(mesh8)

    def reshard(x: jax.Array) -> jax.Array:
        model.layers[1].reshard()
        return x

    with pytest.raises(RuntimeError, match="reshard"):
        model(inputs(), reshard)
    assert full_names(model) == set()
    expected = Net(nnx.Rngs(0))(inputs())
    np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)


# --- what may be asked ------------------------------------------------------------


@pytest.mark.parametrize("bad", ["x", 2.0, 0, -1, [True]])
def test_other_values_are_refused_and_nothing_is_changed(mesh8, bad):
    model = Net(nnx.Rngs(0))
    with pytest.raises(ValueError, match="reshard_after_forward"):
        fully_shard(model, mesh=mesh8, reshard_after_forward=bad)
    assert type(model) is Net
    assert model.head.kernel.get_raw_value().sharding.device_set == {jax.devices()[0]}
    fully_shard(model, mesh=mesh8)


@pytest.mark.parametrize("bad", [1, 0, None, "x", 2.0])
def test_the_setter_takes_only_a_bool(mesh8, bad):
    model = make_net(mesh8, reshard_after_forward=False)
    with pytest.raises(ValueError, match="set_reshard_after_forward"):
        model.set_reshard_after_forward(bad)
    model(inputs())
    assert full_names(model) == LAYERS | HEAD


def test_the_setter_reaches_inner_modules_unless_told_not_to(mesh8):
    model = make_net(mesh8)
    model.set_reshard_after_forward(False)
    model(inputs())
    assert full_names(model) == LAYERS | HEAD
    model.set_reshard_after_forward(True, False)
    model(inputs())
    assert full_names(model) == LAYERS
    model.set_reshard_after_forward(True, recurse=True)
    model(inputs())
    assert full_names(model) == set()
    model.set_reshard_after_forward(False, recurse=False)
    model(inputs())
    assert full_names(model) == HEAD


def test_the_setter_changes_how_often_a_step_gathers(mesh8):
    model = make_net(mesh8)
    gathers = []
    # The first layer needs its weight in backward only for the gradient of its input.
    grad = fsdp_jax.grad(loss_of, argnums=(0, 1))
    for asked in (None, True, False):
        if asked is not None:
            model.set_reshard_after_forward(asked)
        text = helpers.lowered_text(grad, model, inputs())
        gathers.append(helpers.count_collectives(text)["all_gather"])
    groups = 4  # each packed into one collective
    assert gathers == [groups + groups - 1, 2 * groups, groups]


# --- errors in the middle ---------------------------------------------------------


def raising(error: type[BaseException]) -> Callable[[Any], Any]:
    def before(x: Any) -> Any:
        raise error("in the second layer")

    return before


update = nnx.jit(lambda optimizer, model, grads: optimizer.update(model, grads))


def adamw_step(model: Any, optimizer: Any, grad: Callable[..., Any]) -> None:
    update(optimizer, model, grad(model, inputs()))


def optimizer_of(model: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)


def call_eagerly(model: Any, before: Callable[[Any], Any]) -> None:
    model(inputs(), before)


def call_in_jit(model: Any, before: Callable[[Any], Any]) -> None:
    nnx.jit(lambda m, x: m(x, before))(model, inputs())


def call_in_jax_jit(model: Any, before: Callable[[Any], Any]) -> None:
    jax.jit(lambda m, x: m(x, before))(model, inputs())


def call_in_nnx_grad(model: Any, before: Callable[[Any], Any]) -> None:
    nnx.grad(lambda m, x: jnp.mean(m(x, before) ** 2))(model, inputs())


def call_in_step(model: Any, before: Callable[[Any], Any]) -> None:
    fsdp_jax.grad(lambda m, x: jnp.mean(m(x, before) ** 2))(model, inputs())


def call_in_jitted_step(model: Any, before: Callable[[Any], Any]) -> None:
    nnx.jit(fsdp_jax.grad(lambda m, x: jnp.mean(m(x, before) ** 2)))(model, inputs())


def call_in_shard_map(model: Any, before: Callable[[Any], Any]) -> None:
    fsdp_jax.shard_map(lambda m, x: m(x, before))(model, inputs())


CALLS = [
    call_eagerly,
    call_in_jit,
    call_in_jax_jit,
    call_in_nnx_grad,
    call_in_step,
    call_in_jitted_step,
    call_in_shard_map,
]


@pytest.mark.parametrize(
    ("call", "asked"),
    [(call, (None, True)[i % 2]) for i, call in enumerate(CALLS)]
    + [(call, (False, 2)[i % 2]) for i, call in enumerate(CALLS)],
)
def test_an_error_in_the_second_layer_keeps_its_type_and_leaves_all_sharded(
    mesh8, call, asked
):
    model = make_net(mesh8, reshard_after_forward=asked)
    with pytest.raises(BrokenError, match="in the second layer"):
        call(model, raising(BrokenError))
    if asked in (None, True) or call is not call_eagerly:
        assert full_names(model) == set()
    else:  # the first layer had finished, and may have been told to keep
        assert full_names(model) <= {n for n in LAYERS if n.startswith("layers.0.")}
        model.reset_iter_state()
        assert full_names(model) == set()
    expected = Net(nnx.Rngs(0))(inputs())
    np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("call", [call_eagerly, call_in_jitted_step, call_in_shard_map])
def test_the_step_after_an_error_is_right(mesh8, call):
    twin, model = Net(nnx.Rngs(0)), make_net(mesh8)
    twin_optimizer, optimizer = optimizer_of(twin), optimizer_of(model)
    with pytest.raises(BrokenError):
        call(model, raising(BrokenError))
    adamw_step(twin, twin_optimizer, nnx.jit(nnx.grad(loss_of)))
    adamw_step(model, optimizer, fsdp_jax.grad(loss_of))
    helpers.assert_trees_close(model, twin)
    assert full_names(model) == set()


@pytest.mark.parametrize("call", [call_eagerly, call_in_step])
def test_an_interrupt_leaves_all_sharded(mesh8, call):
    model = make_net(mesh8)
    with pytest.raises(KeyboardInterrupt):
        call(model, raising(KeyboardInterrupt))
    assert full_names(model) == set()


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (call_in_nnx_grad, None),
        (call_in_nnx_grad, False),
        (call_in_step, True),
        (call_in_step, False),
        (call_in_jitted_step, None),
    ],
)
def test_an_error_in_backward_leaves_all_sharded(mesh8, call, asked):
    model = make_net(mesh8, reshard_after_forward=asked)
    with pytest.raises(BrokenError, match="backward"):
        call(model, fails_in_backward)
    model.reset_iter_state()
    assert full_names(model) == set()
    got = fsdp_jax.grad(loss_of)(model, inputs())
    expected = nnx.jit(nnx.grad(loss_of))(Net(nnx.Rngs(0)), inputs())
    helpers.assert_trees_close(got, expected)


def test_an_error_does_not_undo_values_written_before_it(mesh8):
    model = make_net(mesh8)

    def write_and_raise(x: jax.Array) -> jax.Array:
        model.layers[1].linear.bias[...] = jnp.full((8,), 5.0)
        raise BrokenError

    with contextlib.suppress(BrokenError):
        model(inputs(), write_and_raise)
    bias = model.layers[1].linear.bias
    np.testing.assert_array_equal(bias[...], np.full(8, 5.0))
    assert fsdp_jax.local_shape(bias) == (1,)


# --- reset_iter_state -------------------------------------------------------------


def test_reset_brings_every_module_back_to_rest(mesh8):
    model = make_net(mesh8, reshard_after_forward=False)
    model(inputs())
    model.head.bias[...] = jnp.full((8,), 2.0)
    model.reset_iter_state()
    assert full_names(model) == set()
    np.testing.assert_array_equal(model.head.bias[...], np.full(8, 2.0))


def test_reset_starts_the_count_of_forwards_anew(mesh8):
    model = make_net(mesh8, reshard_after_forward=2)
    model(inputs())
    model.reset_iter_state()
    assert full_names(model) == set()
    model(inputs())
    assert full_names(model) == LAYERS | HEAD
    model(inputs())
    assert full_names(model) == set()


def test_reset_drops_started_gathers(mesh8):
    model = make_net(mesh8)
    handles = [layer.unshard(async_op=True) for layer in model.layers]
    model.reset_iter_state()
    for handle in handles:
        handle.wait()
    assert full_names(model) == set()


def test_reset_changes_nothing_when_nothing_failed(mesh8):
    model = make_net(mesh8)
    before = [v.get_raw_value() for v in jax.tree.leaves(model, is_leaf=is_variable)]
    graphdef = nnx.graphdef(model)
    model.reset_iter_state()
    model(inputs())
    model.reset_iter_state()
    after = [v.get_raw_value() for v in jax.tree.leaves(model, is_leaf=is_variable)]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert nnx.graphdef(model) == graphdef


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def test_reset_in_a_forward_is_refused(mesh8):
    model = make_net(mesh8)

    def reset(x: jax.Array) -> jax.Array:
        model.reset_iter_state()
        return x

    with pytest.raises(RuntimeError, match="reset_iter_state"):
        model(inputs(), reset)
    assert full_names(model) == set()
