"""Per-device programs: parameters can only be read while gathered, never written.

In a program of `value_and_grad`, `shard_map`, or a user's own `jax.shard_map`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard, register_fsdp_forward_method
from tests import helpers


class Net(nnx.Module):
    """Two layers with tanh between them, and a head; width 8, scale of shape (3,)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.arange(1.0, 4.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.around(x)

    def around(self, x: jax.Array) -> jax.Array:
        """The same as a call, but without hook."""
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x) * self.scale[1]


def make(mesh: Mesh, **kwargs: Any) -> Any:
    """Three groups: each layer, and the root with the head."""
    return helpers.shard_blocks(Net(nnx.Rngs(0)), mesh=mesh, **kwargs)


def inputs() -> jax.Array:
    """An `(8, 8)` batch."""
    return jnp.arange(64.0).reshape(8, 8) / 64


def full_names(model: Any) -> set[str]:
    """Parameters that every device holds whole."""
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {
        ".".join(map(str, path))
        for path, p in found
        if fsdp_jax.local_shape(p) == p.shape
    }


# --- the programs -----------------------------------------------------------------

Body = Callable[[Any, jax.Array], jax.Array]


def in_value_and_grad(body: Body, model: Any, x: jax.Array) -> Any:
    return fsdp_jax.value_and_grad(lambda m, x: jnp.mean(body(m, x) ** 2))(model, x)


def in_jitted_grad(body: Body, model: Any, x: jax.Array) -> Any:
    return nnx.jit(fsdp_jax.grad(lambda m, x: jnp.mean(body(m, x) ** 2)))(model, x)


def in_fsdp_shard_map(body: Body, model: Any, x: jax.Array) -> Any:
    return fsdp_jax.shard_map(body)(model, x)


def in_own_shard_map(
    body: Body, model: Any, x: jax.Array, check_vma: bool = False
) -> Any:
    """A user's program: parameters come in as they rest, the batch by rows."""
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda a: a.sharding.spec, state)
    axis = PartitionSpec("fsdp")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=jax.tree.leaves(state)[0].sharding.mesh,
        in_specs=(specs, axis),
        out_specs=axis,
        check_vma=check_vma,
    )
    def program(state: Any, x: jax.Array) -> jax.Array:
        return body(nnx.merge(graphdef, state), x)

    return program(state, x)


def own_value_and_grad(model: Any, x: jax.Array, check_vma: bool) -> Any:
    """A user's training program: local gradients, averaged by the hooks."""
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda a: a.sharding.spec, state)

    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=jax.tree.leaves(state)[0].sharding.mesh,
        in_specs=(specs, PartitionSpec("fsdp")),
        out_specs=(PartitionSpec(), specs),
        check_vma=check_vma,
    )
    def program(state: Any, x: jax.Array) -> Any:
        value, grads = nnx.value_and_grad(loss)(nnx.merge(graphdef, state), x)
        return jax.lax.pmean(value, "fsdp"), grads

    return program(state, x)


PROGRAMS = [in_value_and_grad, in_jitted_grad, in_fsdp_shard_map, in_own_shard_map]
FORWARD_PROGRAMS = [in_fsdp_shard_map, in_own_shard_map]

# --- reading ----------------------------------------------------------------------

READS = {
    "value": lambda p: p[...],
    "row": lambda p: p[0],
    "get_value": lambda p: p.get_value(),
    "operator": lambda p: p + 1,
    "matmul": lambda p: jnp.ones((8, 8)) @ p,
    "jnp": lambda p: jnp.sum(p[...]),
    "convert": lambda p: jnp.asarray(p),
    "iterate": lambda p: list(p),
    "transpose": lambda p: jnp.ones((8, 8)) @ p.T,
    "method": lambda p: p.sum(),
    "astype": lambda p: p.astype(jnp.bfloat16),
    "at": lambda p: p.at[0].set(0.0),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_reading_a_sharded_parameter_names_it_and_three_remedies(mesh8, program):
    model = make(mesh8)
    with pytest.raises(RuntimeError) as caught:
        program(lambda m, x: m.around(x), model, inputs())
    text = str(caught.value)
    assert "'head.kernel'" in text or "'head.bias'" in text
    assert "register_fsdp_forward_method" in text
    assert "unshard()" in text
    assert "model(x)" in text
    assert full_names(model) == {"scale"}
    expected = Net(nnx.Rngs(0))(inputs())
    np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_of_reading_raises(mesh8, read):
    def body(m: Any, x: jax.Array) -> jax.Array:
        read(m.head.kernel)
        return x

    with pytest.raises(RuntimeError, match=r"'head\.kernel'.*\(1, 8\)"):
        in_fsdp_shard_map(body, make(mesh8), inputs())


def test_the_parameter_of_an_inner_group_is_guarded_in_the_forward_of_the_outer(mesh8):
    class Peeking(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x) @ self.layers[0].kernel[...]

    model = helpers.shard_blocks(Peeking(nnx.Rngs(0)), mesh=mesh8)
    with pytest.raises(RuntimeError, match=r"'layers\.0\.kernel'"):
        in_fsdp_shard_map(lambda m, x: m(x), model, inputs())


def test_a_parameter_is_guarded_again_after_its_forward(mesh8):
    for asked in (None, True, False):
        model = make(mesh8, reshard_after_forward=asked)

        def body(m: Any, x: jax.Array) -> jax.Array:
            return m(x) @ m.head.kernel[...]

        with pytest.raises(RuntimeError, match=r"'head\.kernel'"):
            in_fsdp_shard_map(body, model, inputs())


@pytest.mark.parametrize("program", FORWARD_PROGRAMS)
def test_shapes_and_whole_parameters_can_be_read(mesh8, program):
    def body(m: Any, x: jax.Array) -> jax.Array:
        assert fsdp_jax.local_shape(m.head.kernel) == (1, 8)
        assert m.head.kernel.dtype == jnp.float32
        return x * m.scale[2]  # of size 3, so every device holds it whole

    np.testing.assert_allclose(program(body, make(mesh8), inputs()), inputs() * 3)


def test_nothing_is_guarded_on_one_device():
    model = make(helpers.mesh_of(1))
    expected = Net(nnx.Rngs(0))(inputs())
    got = in_fsdp_shard_map(lambda m, x: m.around(x), model, inputs())
    np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


# --- the remedies -----------------------------------------------------------------


def call(m: Any, x: jax.Array) -> jax.Array:
    return m(x)


def around(m: Any, x: jax.Array) -> jax.Array:
    return m.around(x)


def unshard_first(m: Any, x: jax.Array) -> jax.Array:
    m.unshard()
    return m.around(x)


def unshard_and_wait_first(m: Any, x: jax.Array) -> jax.Array:
    handle = m.unshard(async_op=True)
    handle.wait()
    return m.around(x)


def unshard_and_reshard(m: Any, x: jax.Array) -> jax.Array:
    m.unshard()
    out = m.around(x)
    m.reshard()
    return out


REMEDIES = [call, around, unshard_first, unshard_and_wait_first, unshard_and_reshard]


@pytest.mark.parametrize("body", REMEDIES)
@pytest.mark.parametrize("program", FORWARD_PROGRAMS)
def test_each_remedy_gives_the_unsharded_value(mesh8, program, body):
    model = make(mesh8)
    register_fsdp_forward_method(model, "around")
    got = program(body, model, inputs())
    np.testing.assert_allclose(got, Net(nnx.Rngs(0))(inputs()), 1e-5, 1e-6)
    assert full_names(model) == {"scale"}


@pytest.mark.parametrize(
    ("body", "asked"),
    [(body, (None, True)[i % 2]) for i, body in enumerate(REMEDIES)],
)
def test_each_remedy_gives_the_unsharded_gradient(mesh8, body, asked):
    model = make(mesh8, reshard_after_forward=asked)
    register_fsdp_forward_method(model, "around")

    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    expected = nnx.jit(nnx.value_and_grad(loss))(Net(nnx.Rngs(0)), inputs())
    helpers.assert_trees_close(in_value_and_grad(body, model, inputs()), expected)
    assert full_names(model) == {"scale"}


@pytest.mark.parametrize("asked", [None, True, False])
def test_gradient_through_both_sides_of_a_reshard_is_the_unsharded_one(mesh8, asked):
    model = make(mesh8, reshard_after_forward=asked)

    def twice(m: Any, x: jax.Array) -> jax.Array:
        h = unshard_and_reshard(m, x)
        assert fsdp_jax.local_shape(m.head.kernel) == (1, 8)
        return m(h)

    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(m(x)) ** 2)

    expected = nnx.jit(nnx.value_and_grad(loss))(Net(nnx.Rngs(0)), inputs())
    helpers.assert_trees_close(in_value_and_grad(twice, model, inputs()), expected)


def test_reading_raises_again_after_reshard(mesh8):
    def body(m: Any, x: jax.Array) -> jax.Array:
        m.unshard()
        x = m.around(x)
        m.reshard()
        return m.around(x)

    with pytest.raises(RuntimeError, match=r"'head\.(kernel|bias)'"):
        in_fsdp_shard_map(body, make(mesh8), inputs())


def test_unshard_inside_a_program_gathers_one_group(mesh8):
    def body(m: Any, x: jax.Array) -> jax.Array:
        m.unshard()
        return x @ m.layers[0].kernel[...]

    with pytest.raises(RuntimeError, match=r"'layers\.0\.kernel'"):
        in_fsdp_shard_map(body, make(mesh8), inputs())


@pytest.mark.parametrize("program", [in_value_and_grad, in_fsdp_shard_map])
def test_a_module_unsharded_before_the_program_enters_it_sharded(mesh8, program):
    model = make(mesh8)
    model.unshard()
    held = full_names(model)
    program(call, model, inputs())
    assert full_names(model) == held
    np.testing.assert_allclose(model(inputs()), Net(nnx.Rngs(0))(inputs()), 1e-5, 1e-6)


# --- writing ----------------------------------------------------------------------

WRITES = {
    "array": lambda p: p.__setitem__(..., jnp.ones((8,))),
    "item": lambda p: p.__setitem__(0, 1.0),
    "set_value": lambda p: p.set_value(jnp.ones((8,))),
}


@pytest.mark.parametrize(
    ("program", "where", "write"),
    [
        (FORWARD_PROGRAMS[(i + j) % 2], where, write)
        for i, write in enumerate(WRITES.values())
        for j, where in enumerate(("outside", "inside", "unsharded"))
    ],
)
def test_writing_a_managed_parameter_raises_and_names_it(mesh8, program, where, write):
    class Writing(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            write(self.head.bias)
            return super().__call__(x)

    def body(m: Any, x: jax.Array) -> jax.Array:
        if where == "inside":
            return m(x)
        if where == "unsharded":
            m.unshard()
        write(m.head.bias)
        return x

    model = helpers.shard_blocks(Writing(nnx.Rngs(0)), mesh=mesh8)
    before = np.asarray(model.head.bias[...])
    with pytest.raises(RuntimeError, match=r"'head\.bias'.*written"):
        program(body, model, inputs())
    np.testing.assert_array_equal(model.head.bias[...], before)
    assert full_names(model) == {"scale"}


# --- a user's own shard_map -------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "check_vma", "axis_type"),
    [
        (None, False, AxisType.Auto),
        (None, True, AxisType.Explicit),
        (True, False, AxisType.Explicit),
        (True, True, AxisType.Auto),
        (False, False, AxisType.Auto),
        (False, True, AxisType.Explicit),
    ],
)
def test_hooks_in_an_own_program_give_value_and_gradients(asked, check_vma, axis_type):
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    twin = Chain(nnx.Rngs(0))
    value, grads = nnx.jit(nnx.value_and_grad(loss))(twin, inputs())
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(axis_type,))
    model = helpers.shard_blocks(
        Chain(nnx.Rngs(0)), mesh=mesh, reshard_after_forward=asked
    )
    x = jax.device_put(inputs(), NamedSharding(mesh, PartitionSpec("fsdp")))
    got_value, got = own_value_and_grad(model, x, check_vma)
    np.testing.assert_allclose(got_value, value, 1e-5)
    helpers.assert_trees_close(got, grads)
    for g, p in zip(jax.tree.leaves(got), jax.tree.leaves(nnx.state(model))):
        assert g.sharding.is_equivalent_to(p.sharding, g.ndim)


class Chain(nnx.Module):
    """Two linear layers of width 8 with tanh between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](jnp.tanh(self.layers[0](x)))


@pytest.mark.parametrize("asked", [None, True, False])
def test_forward_in_an_own_checked_program_gives_the_value(mesh8, asked):
    model = make(mesh8, reshard_after_forward=asked)
    expected = Net(nnx.Rngs(0))(inputs())
    for body in (call, unshard_and_reshard):
        got = in_own_shard_map(body, model, inputs(), check_vma=True)
        np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


def test_reading_in_an_own_checked_program_raises(mesh8):
    with pytest.raises(RuntimeError, match="register_fsdp_forward_method"):
        in_own_shard_map(around, make(mesh8), inputs(), check_vma=True)


def test_a_parameter_that_enters_an_own_program_whole_is_refused(mesh8):
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    graphdef, state = nnx.split(model)

    @functools.partial(
        jax.shard_map,
        mesh=mesh8,
        in_specs=(PartitionSpec(), PartitionSpec("fsdp")),
        out_specs=PartitionSpec("fsdp"),
        check_vma=False,
    )
    def program(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    with pytest.raises(ValueError, match=r"'(kernel|bias)'.*fsdp_jax\.shard_map"):
        program(state, inputs())


def test_a_program_over_another_mesh_is_refused(mesh8):
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4))
    graphdef, state = nnx.split(model)
    state = jax.tree.map(np.asarray, state)

    @functools.partial(
        jax.shard_map,
        mesh=mesh8,
        in_specs=(PartitionSpec("fsdp"), PartitionSpec("fsdp")),
        out_specs=PartitionSpec("fsdp"),
        check_vma=False,
    )
    def program(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    with pytest.raises(ValueError, match="fully_shard"):
        program(state, inputs())
