"""Calling a sharded module on global arrays: values, structures, side effects."""

import collections
import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

VIEWS = ["eager", "nnx.jit", "jax.jit"]


def mesh_with(axis_type: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(axis_type,))


def in_view(view: str, f: Any) -> Any:
    """`f(module, *arrays)` run eagerly, or traced in one of two ways."""
    if view == "eager":
        return f
    if view == "nnx.jit":
        return nnx.jit(f)

    def pure(module: Any, *args: Any, **kwargs: Any) -> Any:
        graphdef, state = nnx.split(module)

        @jax.jit
        def run(state: Any, args: Any, kwargs: Any) -> Any:
            return f(nnx.merge(graphdef, state), *args, **kwargs)

        return run(state, args, kwargs)

    return pure


class Chain(nnx.Module):
    """Two linear layers of width 8 with tanh between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](jnp.tanh(self.layers[0](x)))


@pytest.fixture
def chain() -> Any:
    return Chain(nnx.Rngs(0))


def inputs() -> jax.Array:
    """An `(8, 8)` batch."""
    return jnp.arange(64.0).reshape(8, 8) / 64


def full_names(model: Any) -> list[str]:
    """Parameters that every device holds whole."""
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [
        ".".join(map(str, path))
        for path, p in found
        if fsdp_jax.local_shape(p) == p.shape
    ]


@pytest.mark.parametrize(
    ("axis_type", "ambient", "view"),
    [
        (axis_type, (i + j) % 2 == 0, view)
        for i, axis_type in enumerate((AxisType.Auto, AxisType.Explicit))
        for j, view in enumerate(VIEWS)
    ],
)
def test_call_gives_the_value_of_the_unsharded_module(chain, axis_type, ambient, view):
    x = inputs()
    expected = chain(x)
    mesh = mesh_with(axis_type)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        model = helpers.shard_blocks(chain, mesh=None if ambient else mesh)
        batch = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))
        run = in_view(view, lambda m, x: m(x))
        np.testing.assert_allclose(run(model, x), expected, 1e-5, 1e-6)
        np.testing.assert_allclose(run(model, batch), expected, 1e-5, 1e-6)
    assert not full_names(model)


# Differentiating outside of jit on an Explicit mesh needs jax.set_mesh: JAX itself
# refuses it without, for any function of such arrays.
@pytest.mark.parametrize(
    ("axis_type", "ambient", "jit"),
    [
        (AxisType.Auto, False, False),
        (AxisType.Auto, False, True),
        (AxisType.Auto, True, False),
        (AxisType.Explicit, False, True),
        (AxisType.Explicit, True, False),
        (AxisType.Explicit, True, True),
    ],
)
def test_gradient_equals_the_unsharded_one_and_rests_as_the_parameters(
    chain, axis_type, ambient, jit
):
    x, y = inputs(), jnp.ones((8, 8))
    value, grads = nnx.jit(nnx.value_and_grad(helpers.mean_square))(chain, x, y)
    mesh = mesh_with(axis_type)
    run = nnx.value_and_grad(helpers.mean_square)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        model = helpers.shard_blocks(chain, mesh=mesh)
        got_value, got = (nnx.jit(run) if jit else run)(model, x, y)
    np.testing.assert_allclose(got_value, value, 1e-5)
    helpers.assert_trees_close(got, grads)
    for g, p in zip(jax.tree.leaves(got), jax.tree.leaves(nnx.state(model))):
        assert g.sharding.is_equivalent_to(p.sharding, g.ndim)


def test_gradient_of_an_input_equals_the_unsharded_one(chain, mesh8):
    x, y = inputs(), jnp.ones((8, 8))
    expected = jax.grad(lambda x: helpers.mean_square(chain, x, y))(x)
    model = helpers.shard_blocks(chain, mesh=mesh8)
    got = jax.grad(lambda x: helpers.mean_square(model, x, y))(x)
    np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_call_works_on_a_mesh_of_fewer_devices(chain, num_devices):
    x = inputs()
    expected = chain(x)
    mesh = helpers.mesh_of(num_devices)
    model = helpers.shard_blocks(chain, mesh=mesh)
    np.testing.assert_allclose(model(x), expected, 1e-5, 1e-6)
    assert model.layers[0].kernel.get_raw_value().sharding.mesh == mesh


def test_calls_sharded_modules_below_a_plain_parent(chain, mesh8):
    x = inputs()
    expected = chain(x)
    for layer in chain.layers:
        fully_shard(layer, mesh=mesh8)
    assert not isinstance(chain, fsdp_jax.FSDPModule)
    np.testing.assert_allclose(chain(x), expected, 1e-5, 1e-6)
    np.testing.assert_allclose(
        nnx.jit(lambda m, x: m(x))(chain, x), expected, 1e-5, 1e-6
    )
    assert not full_names(chain)


# --- arguments and results --------------------------------------------------------


class Many(nnx.Module):
    """Positional and keyword-only arguments, with and without defaults."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, a, b, c, d=1.0, *rest, scale, shift=0.0, **more):
        total = self.linear(a) - b * c + d
        for x in rest:
            total = total + x
        return total * scale + shift + sum(more.values())


@pytest.mark.parametrize("view", VIEWS)
def test_passes_positional_and_keyword_arguments(mesh8, view):
    a, b, c, d, e = (jnp.full((8, 8), i + 1.0) for i in range(5))
    twin, model = (
        Many(nnx.Rngs(0)),
        fully_shard(Many(nnx.Rngs(0)), mesh=mesh8),
    )

    def everything(m, a, b, c, d, e):
        return m(a, b, c, d, e, scale=d, shift=c, extra=e)

    def keywords_only(m, a, b, c, d, e):
        return m(a=a, c=c, b=b, scale=2.0)

    for f in (everything, keywords_only):
        got = in_view(view, f)(model, a, b, c, d, e)
        np.testing.assert_allclose(got, f(twin, a, b, c, d, e), 1e-5, 1e-5)


@pytest.mark.parametrize("view", ["eager", "nnx.jit"])
def test_wrong_arguments_raise_the_type_error_of_the_module(mesh8, view):
    model = fully_shard(Many(nnx.Rngs(0)), mesh=mesh8)
    with pytest.raises(TypeError, match=r"missing .* 'scale'"):
        in_view(view, lambda m, x: m(x, x, x))(model, jnp.ones((8, 8)))
    assert not full_names(model)
    out = model(jnp.ones((8, 8)), 0.0, 0.0, scale=1.0)
    assert out.shape == (8, 8)


Pair = collections.namedtuple("Pair", ["left", "right"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    """A dataclass that JAX knows as a pytree, with a static field."""

    value: Any
    ids: Any
    label: str = dataclasses.field(default="", metadata={"static": True})


class Opaque:
    """Not a pytree: JAX cannot look inside."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Trees(nnx.Module):
    """Takes and returns containers of every kind."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, tree: Any) -> Any:
        pair, record, (nothing, scalar) = tree["pair"], tree["record"], tree["list"]
        assert nothing is None
        h = self.linear(pair.left)
        return {
            "pair": Pair(h + pair.right, [h * scalar]),
            "record": Record(record.value @ h, record.ids + 1, record.label + "!"),
            "rest": (None, (), {}),
        }


def tree_input() -> dict[str, Any]:
    x = inputs()
    return {
        "pair": Pair(x, x + 1),
        "record": Record(x.T, jnp.arange(8), "name"),
        "list": [None, jnp.float32(3)],
    }


@pytest.mark.parametrize("view", VIEWS)
def test_keeps_the_structure_of_arguments_and_results(mesh8, view):
    expected = Trees(nnx.Rngs(0))(tree_input())
    model = fully_shard(Trees(nnx.Rngs(0)), mesh=mesh8)
    got = in_view(view, lambda m, tree: m(tree))(model, tree_input())
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert got["record"].label == "name!"
    assert got["record"].ids.dtype == expected["record"].ids.dtype
    helpers.assert_trees_close(got, expected)


class Chooser(nnx.Module):
    """Its arguments are a name, a function, a flag and an object JAX cannot enter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, name: str, function: Any, flag: bool, box: Opaque) -> Any:
        assert isinstance(name, str)
        assert flag is True
        return name, function, box, function(self.linear(box.value))


@pytest.mark.parametrize("view", VIEWS)
def test_passes_arguments_that_are_no_arrays_unchanged(mesh8, view):
    x = inputs()
    box = Opaque(None)
    model = fully_shard(Chooser(nnx.Rngs(0)), mesh=mesh8)
    seen: dict[str, Any] = {}

    def f(m: Any, x: jax.Array) -> jax.Array:
        box.value = x
        seen["out"] = m("abc", jnp.tanh, True, box)
        return seen["out"][3]

    got = in_view(view, f)(model, x)
    name, function, same_box, _ = seen["out"]
    assert (name, function, same_box) == ("abc", jnp.tanh, box)
    expected = Chooser(nnx.Rngs(0))("abc", jnp.tanh, True, Opaque(x))[3]
    np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


class Table(nnx.Module):
    """Called without arguments."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rows = nnx.Param(rngs.params.normal((16, 8)))

    def __call__(self) -> jax.Array:
        return jnp.tanh(self.rows[...])


@pytest.mark.parametrize("view", VIEWS)
def test_works_without_arguments(mesh8, view):
    expected = Table(nnx.Rngs(0))()
    model = fully_shard(Table(nnx.Rngs(0)), mesh=mesh8)
    got = in_view(view, lambda m: m())(model)
    np.testing.assert_allclose(got, expected, 1e-6)


# --- what a call changes ----------------------------------------------------------


class Noisy(nnx.Module):
    """Draws noise from the `nnx.Rngs` it is given, and counts its calls."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs) -> jax.Array:
        self.calls[...] += 1
        h = self.norm(self.linear(x))
        return h + rngs.noise.normal(h.shape)


@pytest.mark.parametrize("view", ["eager", "nnx.jit"])
def test_rngs_given_as_an_argument_advance_in_the_caller(mesh8, view):
    x = inputs()
    twin, twin_rngs = Noisy(nnx.Rngs(0)), nnx.Rngs(noise=5)
    model, rngs = fully_shard(Noisy(nnx.Rngs(0)), mesh=mesh8), nnx.Rngs(noise=5)
    run = in_view(view, lambda m, x, r: m(x, rngs=r))
    for count in (1, 2):
        expected = twin(x, rngs=twin_rngs)
        np.testing.assert_allclose(run(model, x, rngs), expected, 1e-5, 1e-5)
        assert int(rngs.noise.count[...]) == count


@pytest.mark.parametrize("view", ["eager", "nnx.jit"])
def test_statistics_and_counters_change_as_in_the_unsharded_module(mesh8, view):
    x = inputs()
    twin, model = Noisy(nnx.Rngs(0)), fully_shard(Noisy(nnx.Rngs(0)), mesh=mesh8)
    run = in_view(view, lambda m, x: m(x, rngs=nnx.Rngs(noise=1)))
    for _ in range(2):
        twin(x, rngs=nnx.Rngs(noise=1))
        run(model, x)
    assert int(model.calls[...]) == 2
    helpers.assert_trees_close(model, twin)
    mean: Any = model.norm.mean.get_raw_value()
    assert mean.sharding.mesh == mesh8
    assert mean.sharding.is_fully_replicated


class Jitter(nnx.Module):
    """Adds noise from the `nnx.Rngs` it is given to a linear layer's output."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return self.linear(x) + rngs.noise.normal(x.shape)


@pytest.mark.parametrize("asked", [None, True])
def test_rngs_given_to_a_per_device_program_advance_in_the_caller(mesh8, asked):
    model = fully_shard(Jitter(nnx.Rngs(0)), mesh=mesh8, reshard_after_forward=asked)
    run = fsdp_jax.shard_map(lambda m, x, rngs: m(x, rngs))
    rngs, outputs = nnx.Rngs(noise=5), []
    for count in (1, 2):
        outputs.append(np.asarray(run(model, inputs(), rngs)))
        assert int(rngs.noise.count[...]) == count
    noise = [out - Jitter(nnx.Rngs(0)).linear(inputs()) for out in outputs]
    rows = np.concatenate(noise)  # one row per device and call
    assert len(np.unique(rows.round(4), axis=0)) == 16


class Sower(nnx.Module):
    """Sows an intermediate value."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", h)
        return jnp.tanh(h)


@pytest.mark.parametrize("view", ["eager", "nnx.jit"])
def test_sown_values_reach_the_caller(mesh8, view):
    x = inputs()
    twin, model = Sower(nnx.Rngs(0)), fully_shard(Sower(nnx.Rngs(0)), mesh=mesh8)
    run = in_view(view, lambda m, x: nnx.capture(m, nnx.Intermediate)(x))
    expected, got = run(twin, x), run(model, x)
    helpers.assert_trees_close(got, expected)
    assert got[1]["hidden"].get_value()[0].shape == (8, 8)


class Scaling(nnx.Module):
    """Writes its own parameter in a call."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones((16,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.scale[...] = self.scale[...] * 2
        return x * self.scale[...]


@pytest.mark.parametrize("view", ["eager", "nnx.jit"])
def test_a_parameter_written_in_a_call_keeps_value_and_layout(mesh8, view):
    model = fully_shard(Scaling(), mesh=mesh8)
    run = in_view(view, lambda m, x: m(x))
    np.testing.assert_allclose(run(model, jnp.ones(16)), 2 * np.ones(16))
    np.testing.assert_allclose(run(model, jnp.ones(16)), 4 * np.ones(16))
    np.testing.assert_allclose(model.scale[...], 4 * np.ones(16))
    assert fsdp_jax.local_shape(model.scale) == (2,)


@pytest.mark.parametrize("view", VIEWS)
def test_a_module_called_twice_in_one_forward_is_used_twice(mesh8, view):
    class Twice(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.shared = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array, depth: int = 2) -> jax.Array:
            x = jnp.tanh(self.shared(x))
            return self(x, depth - 1) if depth > 1 else x

    x = inputs()
    twin, model = Twice(nnx.Rngs(0)), Twice(nnx.Rngs(0))
    fully_shard(model.shared, mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    got = in_view(view, lambda m, x: m(x))(model, x)
    np.testing.assert_allclose(got, twin(x), 1e-5, 1e-6)
    assert not full_names(model)


def test_evaluation_first_and_training_afterwards_is_right(mesh8):
    class Dropped(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.linear(x))

    x, y = inputs(), jnp.ones((8, 8))
    twin, model = Dropped(nnx.Rngs(0)), fully_shard(Dropped(nnx.Rngs(0)), mesh=mesh8)
    losses = []
    for m in (twin, model):
        m.eval()
        evaluated = m(x)
        m.train()
        value, grads = nnx.jit(nnx.value_and_grad(helpers.mean_square))(m, x, y)
        losses.append((evaluated, value, grads))
    helpers.assert_trees_close(losses[1], losses[0])
    helpers.assert_trees_close(model, twin)


def test_new_parameter_values_are_used_by_the_next_call(chain, mesh8):
    x = inputs()
    other: Any = Chain(nnx.Rngs(9))
    model = helpers.shard_blocks(chain, mesh=mesh8)
    model(x)
    nnx.update(model, nnx.as_pure(nnx.state(other)))
    np.testing.assert_allclose(model(x), other(x), 1e-5, 1e-6)
    model.layers[1].bias[...] = jnp.full((8,), 3.0)
    other.layers[1].bias[...] = jnp.full((8,), 3.0)
    np.testing.assert_allclose(model(x), other(x), 1e-5, 1e-6)
    assert not full_names(model)


# --- calling around the hook, and under transforms --------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_a_method_without_hook_gives_the_unsharded_value(mesh8, view):
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(16, 8, rngs=rngs)

        def __call__(self, ids: jax.Array) -> jax.Array:
            return self.embed(ids)

        def decode(self, h: jax.Array) -> jax.Array:
            return h @ self.embed.embedding[...].T

    h = inputs()
    expected = Tied(nnx.Rngs(0)).decode(h)
    model = fully_shard(Tied(nnx.Rngs(0)), mesh=mesh8)
    got = in_view(view, lambda m, h: m.decode(h))(model, h)
    np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


def test_parameters_read_outside_a_call_have_their_full_value(chain, mesh8):
    expected = np.asarray(chain.layers[0].kernel[...])
    model = helpers.shard_blocks(chain, mesh=mesh8)
    kernel = model.layers[0].kernel
    assert kernel.shape == (8, 8)
    assert fsdp_jax.local_shape(kernel) == (1, 8)
    np.testing.assert_array_equal(kernel[...], expected)
    np.testing.assert_array_equal(kernel + 1, expected + 1)


def test_call_works_under_vmap_and_remat(chain, mesh8):
    x, y = inputs(), jnp.ones((8, 8))
    expected = chain(x)
    value, grads = nnx.jit(nnx.value_and_grad(helpers.mean_square))(chain, x, y)
    model = helpers.shard_blocks(chain, mesh=mesh8)
    mapped = nnx.vmap(lambda m, row: m(row), in_axes=(None, 0))(model, x)
    np.testing.assert_allclose(mapped, expected, 1e-5, 1e-6)

    def loss(m: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        run = nnx.remat(lambda m, x: m(x))
        return helpers.mean_square(lambda x: run(m, x), x, y)

    got_value, got = nnx.jit(nnx.value_and_grad(loss))(model, x, y)
    np.testing.assert_allclose(got_value, value, 1e-5)
    helpers.assert_trees_close(got, grads)
    assert not full_names(model)


# --- what a call must not change --------------------------------------------------


class Wrapped(nnx.Module):
    """A layer behind a transform that hands its Variables back."""

    def __init__(self, rngs: nnx.Rngs, wrap: Any) -> None:
        self.linear, self.wrap = nnx.Linear(8, 8, rngs=rngs), wrap

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wrap(lambda layer, x: layer(x))(self.linear, x)


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.remat])
@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit])
def test_a_low_precision_call_never_rounds_the_parameters(mesh8, wrap, outer):
    model = Wrapped(nnx.Rngs(0), wrap)
    before = np.asarray(model.linear.kernel[...])
    policy = fsdp_jax.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    fully_shard(model, mesh=mesh8, mp_policy=policy)
    outer(lambda m, x: m(x))(model, jnp.ones((8, 8)))
    np.testing.assert_array_equal(model.linear.kernel[...], before)


@pytest.mark.parametrize("transform", [jax.jit, nnx.jit])
def test_a_model_that_a_failing_step_closed_over_stays_whole(mesh8, transform):
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    x = jnp.ones((8, 8))
    want = np.asarray(model(x))
    step = fsdp_jax.value_and_grad(lambda m, x: jnp.sum(m(x)))
    with pytest.raises(Exception, match="trace level"):
        transform(lambda x: step(model, x))(x)
    np.testing.assert_array_equal(model(x), want)


def test_a_base_class_hook_does_not_run_for_the_generated_class(mesh8):
    class Base(nnx.Module):
        tag: str

        def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.tag = tag

    class Child(Base, tag="child"):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.ones(8))

    child = fully_shard(Child(), mesh=mesh8)
    assert child.tag == "child"
    assert type(child).__name__ == "ChildFSDPModule"


@pytest.mark.parametrize(
    "turn",
    [
        lambda m: m.set_requires_gradient_sync(False),
        lambda m: m.set_gradient_divide_factor(2.0),
        lambda m: m.set_ordering(fsdp_jax.Ordering("own", "own", "own")),
        lambda m: m.set_modules_to_forward_prefetch([m]),
    ],
)
def test_a_knob_without_effect_on_global_arrays_warns_where_gradients_are_taken(
    mesh8, turn
):
    model: Any = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    turn(model)
    x = jnp.ones((8, 8))
    model(x)  # no gradient: says nothing
    nnx.jit(lambda m, x: m(x))(model, x)
    with pytest.warns(UserWarning, match=r"global arrays.* has no effect.*value_and_"):
        nnx.grad(lambda m, x: m(x).sum())(model, x)
    model.set_requires_gradient_sync(True)
    fsdp_jax.value_and_grad(lambda m, x: m(x).sum())(model, x)
