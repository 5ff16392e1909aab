"""Arguments of a call: specs by name, and arrays where JAX does not look for them."""

import dataclasses
import functools
from collections import UserDict, deque
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
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
        r"'batch' is a Foreign of shape \(8, 4\).*asarray",
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
    given += (helpers.mesh_of(4), P("fsdp"), nn.Dense(4), nnx.graphdef(model))
    run = fsdp_jax.shard_map(lambda model, *args, f: (args[1].x, f(1.0)))
    scalar, cut = run(model, *given, f=partial)
    assert scalar == 1
    np.testing.assert_array_equal(cut, x + 1)
    whole = fsdp_jax.shard_map(
        lambda model, batch: batch.x.sum(), in_specs={"batch": P()}
    )
    assert whole(model, Batch(x)) == 32


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
