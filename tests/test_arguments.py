"""Arguments of a call: specs by name, and arrays where JAX does not look for them."""

import array
import dataclasses
import functools
from collections import UserDict, deque
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import sparse
from jax.sharding import PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard
from fsdp_jax import linen as fsdp_linen
from tests import helpers

P = PartitionSpec


@pytest.fixture(scope="module")
def model() -> Any:
    return fully_shard(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4))


# --- specs by name --------------------------------------------------------------------


def shapes(f: Any, in_specs: Any) -> Any:
    """Runs a function that returns shapes, which are static."""
    seen: list[Any] = []

    @functools.wraps(f)
    def noting(*args: Any, **kwargs: Any) -> None:
        seen.append(f(*args, **kwargs))

    run = fsdp_jax.shard_map(noting, in_specs=in_specs)

    def call(*args: Any, **kwargs: Any) -> Any:
        run(*args, **kwargs)
        return seen[-1]

    return call


def of_names(model: Any, x: Any, y: Any = None, *more: Any, scale: Any = None, **rest):
    return jax.tree.map(jnp.shape, (x, y, more, scale, rest))


def test_specs_by_name_take_positional_and_keyword_arguments(model):
    x, w = jnp.ones((8, 4)), jnp.ones(12)
    call = shapes(of_names, {"scale": P()})
    assert call(model, x, w, scale=jnp.ones(6)) == ((2, 4), (3,), (), (6,), {})
    call = shapes(of_names, {"y": P(), "table": P(), "scale": {"a": P(), "b": None}})
    given = {"a": jnp.ones(3), "b": jnp.ones(4)}
    found = call(model, x, w, scale=given, table=jnp.ones(5))
    assert found == ((2, 4), (12,), (), {"a": (3,), "b": (1,)}, {"table": (5,)})
    assert call(model, x=x, y=w, table=w)[:2] == ((2, 4), (12,))
    call = shapes(of_names, {"more": (None, P()), "x": P(None, "fsdp")})
    assert call(model, x, w, w, w) == ((8, 1), (3,), ((3,), (12,)), None, {})
    assert shapes(of_names, {"more": P()})(model, x, w, w)[2] == ((12,),)
    assert shapes(of_names, P())(model, x, scale=w)[3] == (12,)  # one for all


@pytest.mark.parametrize(
    ("in_specs", "kwargs", "text"),
    [
        (
            {"scal": P()},
            {},
            r"names the argument 'scal', but.*'y', 'more', 'scale'",
        ),
        ({"rest": P()}, {}, "names the argument 'rest'"),
        ({0: P()}, {}, "names the argument 0"),
        ({"model": P("fsdp")}, {}, "argument 'model', but the Variables of a Linear"),
        ({"more": (P(),)}, {}, r"does not fit argument 'more', which takes 2 values"),
        (
            {},
            {"scale": 6},
            r"'scale' has size 6 .* in_specs={'scale': PartitionSpec\(\)}",
        ),
        (
            {},
            {"other": 6},
            r"'other' has .* replicate it: in_specs={'other': Partition",
        ),
        ({"scale": P("tp")}, {"scale": 8}, "names axis 'tp'"),
    ],
)
def test_bad_specs_by_name_are_refused_with_the_names_that_there_are(
    model, in_specs, kwargs, text
):
    x, kwargs = jnp.ones((8, 4)), {k: jnp.ones(v) for k, v in kwargs.items()}
    with pytest.raises(ValueError, match=f"^shard_map: .*{text}"):
        shapes(of_names, in_specs)(model, x, x, x, x, **kwargs)


def test_linen_takes_specs_by_name():
    module: Any = nn.Dense(4)
    variables = module.init(jax.random.key(0), jnp.ones((1, 4)))
    sharded, params = fsdp_linen.fully_shard(module, variables, mesh=helpers.mesh_of(4))

    def loss(variables, x, *, weights):
        return jnp.mean(sharded.apply(variables, x) * weights)

    x, weights = jnp.arange(32.0).reshape(8, 4), jnp.arange(4.0)
    step = fsdp_linen.value_and_grad(loss, sharded, in_specs={"weights": P()})
    expected = jnp.mean(module.apply(variables, x) * weights)
    np.testing.assert_allclose(step(params, x, weights=weights)[0], expected, rtol=1e-5)
    run = fsdp_linen.shard_map(loss, sharded, in_specs={"weight": P()})
    with pytest.raises(ValueError, match="names the argument 'weight', but"):
        run(params, x, weights=weights)
    run = fsdp_linen.shard_map(loss, sharded)
    with pytest.raises(
        TypeError, match=r"argument 'x'.a is an array .* SimpleNamespace"
    ):
        run(params, SimpleNamespace(a=x), weights=weights)


# --- objects that JAX does not look into ----------------------------------------------


@dataclasses.dataclass
class Batch:
    """No pytree."""

    x: Any
    name: str = "train"


class Slotted:
    __slots__ = ("__hidden", "name")

    def __init__(self, x: Any) -> None:
        self.__hidden = x


class Mapped(dict):
    """Which JAX takes for a leaf, as it does every subclass."""


class Foreign:
    """An array of another library."""

    shape = (8, 4)

    def __array__(self, *args: Any) -> Any:
        return np.ones(self.shape)


class Converted:
    """An array for those who ask."""

    def __init__(self, x: Any) -> None:
        self.hidden = x

    def __jax_array__(self) -> Any:
        return self.hidden


class WithTable:
    table = np.ones((8, 4))


@jax.tree_util.register_static
class Static:
    """A pytree without leaves."""

    def __init__(self, x: Any) -> None:
        self.x = x


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["y"]
)
@dataclasses.dataclass
class Half:
    """A pytree of which one field is static."""

    x: Any
    y: Any


def closure(x: Any) -> Any:
    return lambda: x


OBJECTS = {
    "dataclass": (Batch, "argument 'batch'.x is an array .* in a Batch"),
    "namespace": (lambda x: SimpleNamespace(a=[0, {"b": x}]), r"'batch'.a\[1\]\['b'\]"),
    "user dict": (lambda x: UserDict(x=x), r"'batch'.data\['x'\] .* in a UserDict"),
    "dict": (lambda x: Mapped(x=x), r"'batch'\['x'\] .* in a Mapped"),
    "deque": (lambda x: deque([x]), r"'batch'\[0\]"),
    "slots": (Slotted, "'batch'._Slotted__hidden"),
    "in a pytree": (lambda x: {"a": (1, Batch([x]))}, r"'batch'\['a'\]\[1\].x\[0\]"),
    "in one another": (lambda x: Batch(SimpleNamespace(b=x)), "'batch'.x.b"),
    "module": (lambda x: Batch(nnx.Dict(a=x)), "'batch'.x.a"),
    "function": (closure, "'batch' .'x' in its closure.*Pass the array as an argument"),
    "method": (lambda x: x.__add__, "'batch'.__self__ .*argument of its own"),
    "numpy's": (lambda x: np.ones((8, 4)).sum, "'batch'.__self__"),
    "partial": (lambda x: functools.partial(jnp.add, x), r"'batch'.args\[0\]"),
    "jitted": (lambda x: jax.jit(closure(x)), "in its closure"),
    "foreign": (
        lambda x: Foreign(),
        r"'batch' has type Foreign and shape \(8, 4\).*asarray",
    ),
    "converted": (Converted, r"'batch' has type Converted and shape \(8, 4\)"),
    "buffer": (lambda x: array.array("f", [1.0] * 8), r"type array and shape \(8,\)"),
    "memory": (
        lambda x: memoryview(np.ones((8, 4)).data),
        r"memoryview and shape \(8, 4\)",
    ),
    "of its class": (lambda x: WithTable(), "'batch'.table is an array .* WithTable"),
    "class": (lambda x: WithTable, "'batch'.table is an array .* in a WithTable"),
    "static": (Static, r"'batch' is a Static that is registered .*\(8, 4\) in what is"),
    "static field": (lambda x: {"a": Half(x, Batch(x))}, r"'batch'\['a'\] is a Half"),
    "sparse": (
        lambda x: [sparse.BCOO.fromdense(jnp.eye(8), nse=8)],
        r"'batch'\[0\] is a BCOO, whose arrays hold entries, not rows",
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_array_in_an_object_that_jax_does_not_open_is_refused(model, kind):
    make, text = OBJECTS[kind]
    batch = make(jnp.ones((8, 4)))

    def f(model, batch):
        raise AssertionError("it is refused before")

    with pytest.raises(TypeError, match=f"^shard_map: .*{text}"):
        fsdp_jax.shard_map(f)(model, batch)
    with pytest.raises(TypeError, match=f"^grad: .*{text}"):
        nnx.jit(lambda m, x: fsdp_jax.grad(f)(m, make(x)))(model, jnp.ones((8, 4)))


def test_objects_without_rows_and_those_that_are_said_to_be_whole_pass(model):
    x = jnp.ones((8, 4))
    partial = jax.tree_util.Partial(jnp.add, x)  # a pytree
    given = (Batch(None), Batch(jnp.ones(())), len, closure(3), Slotted(2), Batch)
    given += (Static(3), Half(x, "name"), [0.9, 0.999], [[1, 2]], (1,) * 8, [x] * 8)
    given += (helpers.mesh_of(4), P("fsdp"), nn.Dense(4), nnx.graphdef(model))
    run = fsdp_jax.shard_map(lambda model, *args, f: (args[1].x, f(1.0)))
    scalar, cut = run(model, *given, f=partial)
    assert scalar == 1
    np.testing.assert_array_equal(cut, x + 1)
    whole = fsdp_jax.shard_map(
        lambda model, batch: batch.x.sum(), in_specs={"batch": P()}
    )
    for batch in (Batch(x), Half(x, Batch(x))):
        whole(model, batch)
    assert whole(model, Batch(x)) == 32


@pytest.mark.parametrize("numbers", [[1, 0] * 4, [[1.0, 2.0]] * 8, [(1, 2), [3]] * 4])
def test_a_list_with_as_many_numbers_as_the_batch_has_rows_is_refused(model, numbers):
    def loss(model, x, y):
        return jnp.sum(model(x)) * len(jax.tree.leaves(y))

    x = jnp.ones((8, 4))
    with pytest.raises(TypeError, match=r"argument 'y'\['a'\] is a list of 8 entries"):
        fsdp_jax.grad(loss)(model, x, {"a": numbers})
    run = fsdp_jax.value_and_grad(loss, in_specs={"y": P()})
    count = len(jax.tree.leaves(numbers))
    expected = jnp.mean(jnp.sum(model(x).reshape(4, 2, 4), (1, 2))) * count
    np.testing.assert_allclose(run(model, x, {"a": numbers})[0], expected, rtol=1e-5)


def test_arguments_of_less_than_a_byte_are_cut_like_others(model):
    run = fsdp_jax.shard_map(lambda model, x: x.astype(jnp.float32) + 1)
    got = run(model, jnp.arange(8, dtype=jnp.int4))
    np.testing.assert_array_equal(got, jnp.arange(8, dtype=jnp.int4).astype(float) + 1)


def test_a_list_of_numbers_is_found_in_jit_and_by_shard_batch(model):
    def loss(model, x, y):
        return jnp.mean((model(x)[:, 0] - jnp.asarray(y)) ** 2)

    x, y = jnp.ones((8, 4)), [1, 0] * 4
    with pytest.raises(TypeError, match="argument 'y' is a list of 8 entries"):
        nnx.jit(lambda m, x, y: fsdp_jax.grad(loss)(m, x, y))(model, x, y)
    with pytest.raises(TypeError, match=r"shard_batch: batch\[1\] is a list of 8 entr"):
        fsdp_jax.shard_batch((np.ones((8, 4)), y), model)


def test_targets_from_outside_that_do_not_fit_are_named(model):
    y = jnp.ones((8, 4))
    with pytest.raises(
        ValueError, match="grad: shapes do not fit in f: .*'y' in its c"
    ):
        fsdp_jax.grad(lambda m, x: jnp.mean((m(x) - y) ** 2))(model, jnp.ones((8, 4)))


def test_a_cut_argument_beside_more_rows_is_no_row_of_the_batch(model):
    x, weights = jnp.linspace(-1, 1, 64).reshape(16, 4), jnp.arange(1.0, 5.0)
    step = fsdp_jax.value_and_grad(lambda m, x, w: jnp.mean(w * m(x)))
    own = jnp.mean(jnp.repeat(weights, 4)[:, None] * model(x))  # as documented: cut
    np.testing.assert_allclose(step(model, x, weights)[0], own, rtol=1e-5)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_raw_key_is_not_cut_in_two(devices):
    mesh = helpers.mesh_of(devices)
    model = fully_shard(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), mesh=mesh)

    def draw(model, x, key):
        return jax.random.normal(key, x.shape[1:])

    x, key = jnp.ones((8, 4)), jax.random.PRNGKey(3)
    with pytest.raises(ValueError, match="'key' .* two uint32, as jax.random.PRNGKey"):
        fsdp_jax.shard_map(draw)(model, x, key)
    run = fsdp_jax.shard_map(draw, in_specs={"key": P()}, out_specs=P())
    np.testing.assert_array_equal(run(model, x, key), draw(model, x, key))


TARGETS = np.arange(16.0).reshape(4, 4)


class Trainer:
    """A loss that is a method."""

    def __init__(self, y: Any) -> None:
        self.data = {"y": y}

    def loss(self, model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model(x) - self.data["y"]) ** 2)


def square(model: Any, x: jax.Array, y: Any) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def loss_of_targets(model: Any, x: jax.Array) -> jax.Array:
    return square(model, x, TARGETS)


@pytest.mark.parametrize(
    "kind", ["closure", "default", "partial", "method", "global", "jitted"]
)
def test_rows_from_outside_are_not_broadcast_beside_one_row(model, kind):
    y: Any = jnp.asarray(TARGETS)
    f: Any = {
        "closure": lambda model, x: square(model, x, y),
        "default": lambda model, x, y=y: square(model, x, y),
        "partial": functools.partial(square, y=y),
        "method": Trainer(y).loss,
        "global": loss_of_targets,
        "jitted": nnx.jit(lambda model, x: square(model, x, y)),
    }[kind]
    text = r"of shape \(4, 4\), whole on .* only row \(1, 4\) in sub at .*arguments.py"
    for compiled in (lambda f: f, nnx.jit):
        with pytest.raises(ValueError, match=text):
            compiled(fsdp_jax.grad(f))(model, jnp.ones((4, 4)))
    step = fsdp_jax.grad(square)
    got = step(model, jnp.ones((4, 4)), y)
    same = fsdp_jax.grad(f, in_specs={"x": P()})(model, jnp.ones((4, 4)))
    helpers.assert_trees_close(got, same)
    with pytest.raises(ValueError, match=text):  # the same where the user says it
        fsdp_jax.grad(square, in_specs={"y": P()})(model, jnp.ones((4, 4)), y)


LABELS, MASK = np.array([2, 0, 1, 2]), np.array([[True], [False], [True], [True]])
BESIDE: dict[str, Any] = {
    "labels": lambda h: optax.softmax_cross_entropy_with_integer_labels(h, LABELS),
    "taken": lambda h: jnp.take_along_axis(h, LABELS[:, None], 1),
    "indexed": lambda h: h[jnp.arange(4), LABELS],
    "masked": lambda h: jnp.where(MASK, h, 0.0),
    "transposed": lambda h: h.T * TARGETS.T,
    "reshaped": lambda h: h[:, None, :] + jnp.asarray(TARGETS)[:, None],
    "per row": lambda h: h.sum(-1) * LABELS,
}


@pytest.mark.parametrize("how", BESIDE)
@pytest.mark.parametrize("slices", [1, 2])
def test_one_row_does_not_meet_all_of_them(model, how, slices):
    def loss(model, x):
        return jnp.mean(jax.tree.leaves(BESIDE[how](model(x)))[0])

    if slices == 2:
        model = fully_shard(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(2))
    text = r"device's only row \((1|4),.* at \S+arguments\.py:\d"
    with pytest.raises(ValueError, match=text):
        fsdp_jax.grad(loss, num_microbatches=slices)(model, jnp.ones((4, 4)))


ROWWISE: dict[str, Any] = {
    "mapped": lambda h: jax.lax.map(lambda r: ((r[None] - TARGETS) ** 2).min(), h),
    "looped": lambda h: jnp.stack([((r - TARGETS) ** 2).min() for r in h]),
    "vmapped": lambda h: jax.vmap(lambda r: ((r - TARGETS) ** 2).min())(h),
    "heads": lambda h: h[:, None, :] * TARGETS,
    "permuted": lambda h: h[:, np.array([3, 2, 1, 0])] * TARGETS[0],
    "product": lambda h: jax.nn.softmax(h @ TARGETS.T) @ TARGETS,
    "rounded": lambda h: jax.lax.reduce_precision(h, 8, 23) * TARGETS[0],
    "looked up": lambda h: h + jnp.asarray(TARGETS)[jnp.argmax(h, -1)],
}


@pytest.mark.parametrize("how", ROWWISE)
def test_tables_with_as_many_entries_as_the_batch_has_rows_may_be_read(model, how):
    def loss(model, x):
        return jnp.mean(ROWWISE[how](model(x)))

    x = jnp.linspace(-1, 1, 16).reshape(4, 4)
    got = fsdp_jax.value_and_grad(loss)(model, x)
    want = nnx.value_and_grad(loss)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), x)
    helpers.assert_trees_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("batch", ["closure", "partial", "default", "numbers"])
def test_a_sum_of_losses_that_are_all_the_whole_one_is_refused(model, batch, how):
    x, y = jnp.arange(32.0).reshape(8, 4), jnp.ones((8, 4))

    def loss(model, x, y):
        return jnp.sum((model(x) - jnp.asarray(y)) ** 2)

    def run(reduction, model, x, y):
        if batch == "partial":
            f = functools.partial(loss, x=x, y=y)
        elif batch == "default":
            f = lambda model, x=x, y=y: loss(model, x, y)  # noqa: E731
        elif batch == "numbers":
            f, x = loss, [[0.5] * 4] * 3
            step = fsdp_jax.value_and_grad(f, reduction=reduction)
            return step(model, x, [[1] * 4] * 3)[0]
        else:
            f = lambda model: loss(model, x, y)  # noqa: E731
        return fsdp_jax.value_and_grad(f, reduction=reduction)(model)[0]

    step: Any = functools.partial(run, "sum")
    with pytest.raises(ValueError, match="the loss is the same on every device .* 4 t"):
        (nnx.jit(step) if how == "jit" else step)(model, x, y)
    if batch != "numbers":
        np.testing.assert_allclose(
            run("mean", model, x, y), loss(model, x, y), rtol=1e-5
        )
    nothing = lambda model: 0.0 * jax.lax.axis_index("fsdp")  # noqa: E731
    assert fsdp_jax.value_and_grad(nothing, reduction="sum")(model)[0] == 0
    nothing = lambda model: jnp.zeros(())  # noqa: E731
    assert fsdp_jax.value_and_grad(nothing, reduction="sum")(model)[0] == 0
    whole = fsdp_jax.value_and_grad(loss, reduction="sum")
    np.testing.assert_allclose(whole(model, x, y)[0], loss(model, x, y), rtol=1e-5)


def test_an_array_in_an_object_that_f_returns_is_refused(model):
    with pytest.raises(
        TypeError, match=r"f returned an array in a Batch \(output\['a'\]"
    ):
        fsdp_jax.shard_map(lambda model, x: {"a": Batch(x.sum())})(model, jnp.ones(4))


def test_shard_batch_says_what_to_do_with_such_an_object(model):
    with pytest.raises(
        TypeError, match=r"batch\[0\].x is an array .*register_dataclass"
    ):
        fsdp_jax.shard_batch([Batch(np.ones((8, 4)))], model)
