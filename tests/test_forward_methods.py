"""`register_fsdp_forward_method`: other methods than `__call__` that gather.

Where a test needs proof that a method gathered, it runs as a per-device program: there
an unregistered method cannot read a sharded parameter.
"""

import collections
import copy
import pickle
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard, register_fsdp_forward_method
from tests import helpers

Output = collections.namedtuple("Output", ["logits", "extra"])


class Base(nnx.Module):
    """A linear layer with several ways in, width 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear: Any = nnx.Linear(8, 8, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))

    def encode(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        """Encode a batch."""
        return self.linear(x) * scale

    def decode(self, h: jax.Array) -> jax.Array:
        return h @ self.linear.kernel[...].T

    def roundtrip(self, x: jax.Array) -> jax.Array:
        return self.decode(self.encode(x)) + self(x)

    def tree(self, x: jax.Array) -> Any:
        h = self.linear(x)
        return {"out": Output(h, [h + 1, None]), "name": "abc", "rest": (h.sum(1),)}

    def counting(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        return self.linear(x)

    def broken(self, x: jax.Array) -> jax.Array:
        raise KeyError(self.linear(x).shape)

    @staticmethod
    def static(x: jax.Array) -> jax.Array:
        return x

    @classmethod
    def of_class(cls, x: jax.Array) -> jax.Array:
        return x

    @property
    def width(self) -> int:
        return 8

    @nnx.jit
    def compiled(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * 3

    number = 3


class Child(Base):
    """Overrides one method and adds one."""

    def encode(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return super().encode(x, scale=scale) + self.linear.bias[...] + 1

    def added(self, x: jax.Array) -> jax.Array:
        return self.decode(x) + 2


def make(mesh: Any, *methods: str, cls: type = Base, **kwargs: Any) -> Any:
    model = fully_shard(cls(nnx.Rngs(0)), mesh=mesh, **kwargs)
    for name in methods:
        register_fsdp_forward_method(model, name)
    return model


def inputs() -> jax.Array:
    """An `(8, 8)` batch."""
    return jnp.arange(64.0).reshape(8, 8) / 64


def per_device(model: Any, name: str, *args: Any) -> Any:
    """The method as a per-device program."""
    return fsdp_jax.shard_map(lambda m, *args: getattr(m, name)(*args))(model, *args)


def assert_gathers(model: Any, name: str, twin: Any) -> None:
    x = inputs()
    expected = getattr(twin, name)(x)
    helpers.assert_trees_close(
        jax.tree.leaves(per_device(model, name, x)), jax.tree.leaves(expected)
    )


def assert_does_not_gather(model: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match="register_fsdp_forward_method"):
        per_device(model, name, inputs())


def is_at_rest(model: Any) -> bool:
    return fsdp_jax.local_shape(model.linear.kernel) == (1, 8)


# --- what a registered method does ------------------------------------------------


@pytest.mark.parametrize("name", ["encode", "decode", "compiled"])
def test_a_method_gathers_only_once_registered(mesh8, name):
    model, twin = make(mesh8), Base(nnx.Rngs(0))
    assert_does_not_gather(model, name)
    assert register_fsdp_forward_method(model, name) is None
    assert_gathers(model, name, twin)
    assert is_at_rest(model)


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_gradient_through_a_method_is_the_unsharded_one(mesh8, asked):
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m.encode(x, scale=2.0) ** 2)

    expected = nnx.jit(nnx.value_and_grad(loss))(Base(nnx.Rngs(0)), inputs())
    model = make(mesh8, "encode", reshard_after_forward=asked)
    got = fsdp_jax.value_and_grad(loss)(model, inputs())
    helpers.assert_trees_close(got, expected)
    helpers.assert_trees_close(nnx.value_and_grad(loss)(model, inputs()), expected)


@pytest.mark.parametrize("asked", [None, True, False])
def test_an_eager_method_frees_as_a_call_does(mesh8, asked):
    model = make(mesh8, "encode", reshard_after_forward=asked)
    expected = Base(nnx.Rngs(0)).encode(inputs())
    np.testing.assert_allclose(model.encode(inputs()), expected, 1e-5, 1e-6)
    assert is_at_rest(model) is (asked is not False)


def test_methods_count_as_forwards_for_an_integer(mesh8):
    model = make(mesh8, "encode", reshard_after_forward=2)
    model.encode(inputs())
    assert not is_at_rest(model)
    model(inputs())
    assert is_at_rest(model)


def test_a_method_casts_inputs_parameters_and_outputs(mesh8):
    policy = fsdp_jax.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, output_dtype=jnp.float16
    )
    model, seen = make(mesh8, "look", cls=Looking, mp_policy=policy), []
    out = model.look({"x": inputs()}, jnp.arange(8), seen.extend)
    assert seen == [jnp.bfloat16, jnp.bfloat16, jnp.int32]
    assert out.dtype == jnp.float16
    assert model.linear.kernel.dtype == jnp.float32


class Looking(Base):
    """Notes the dtypes that it sees."""

    def look(self, tree: Any, ids: jax.Array, note: Any) -> jax.Array:
        note([tree["x"].dtype, self.linear.kernel.dtype, ids.dtype])
        return tree["x"] @ self.linear.kernel[...]


@pytest.mark.parametrize("view", ["eager", "nnx.jit", "per device"])
def test_keeps_the_structure_of_what_a_method_returns(mesh8, view):
    model = make(mesh8, "tree")
    expected = Base(nnx.Rngs(0)).tree(inputs())
    if view == "eager":
        got = model.tree(inputs())
    elif view == "nnx.jit":
        # jit itself refuses a string among its outputs.
        got = nnx.jit(lambda m, x: {**m.tree(x), "name": 0})(model, inputs())
        got["name"] = "abc"
    else:
        got = per_device(model, "tree", inputs())
    assert got["name"] == "abc"
    assert isinstance(got["out"], Output)
    assert got["out"].extra[1] is None
    for part in ("out", "rest"):
        helpers.assert_trees_close(got[part], expected[part])


@pytest.mark.parametrize("asked", [None, True])
@pytest.mark.parametrize("view", ["eager", "nnx.jit", "per device"])
def test_what_a_method_changes_reaches_the_caller(mesh8, view, asked):
    model = make(mesh8, "counting", reshard_after_forward=asked)
    for _ in range(2):
        if view == "eager":
            model.counting(inputs())
        elif view == "nnx.jit":
            nnx.jit(lambda m, x: m.counting(x))(model, inputs())
        else:
            per_device(model, "counting", inputs())
    assert int(model.count[...]) == 2


@pytest.mark.parametrize("view", ["eager", "per device"])
def test_an_error_in_a_method_keeps_its_type_and_leaves_all_sharded(mesh8, view):
    model = make(mesh8, "broken")
    with pytest.raises(KeyError, match=r"8"):
        if view == "eager":
            model.broken(inputs())
        else:
            per_device(model, "broken", inputs())
    assert is_at_rest(model)
    expected = Base(nnx.Rngs(0))(inputs())
    np.testing.assert_allclose(model(inputs()), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("names", [("roundtrip",), ("roundtrip", "encode", "decode")])
def test_methods_may_call_each_other_and_the_module(mesh8, names):
    model, twin = make(mesh8, *names), Base(nnx.Rngs(0))
    assert_gathers(model, "roundtrip", twin)
    expected = twin.roundtrip(inputs())
    np.testing.assert_allclose(model.roundtrip(inputs()), expected, 1e-5, 1e-5)
    assert is_at_rest(model)


def test_methods_calling_each_other_gather_once(mesh8):
    model = make(mesh8, "roundtrip", "encode", "decode")
    text = helpers.lowered_text(
        fsdp_jax.shard_map(lambda m, x: m.roundtrip(x)), model, inputs()
    )
    assert helpers.count_collectives(text)["all_gather"] == 1


def test_call_works_when_it_uses_registered_methods(mesh8):
    class Split(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.features(x) + 1

        def features(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(self.linear(x))

    model, twin = make(mesh8, "features", cls=Split), Split(nnx.Rngs(0))
    assert_gathers(model, "features", twin)
    assert_gathers(model, "__call__", twin)


def test_a_method_of_an_inner_module_may_be_registered(mesh8):
    class Outer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = Base(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner.encode(x)

    model, twin = Outer(nnx.Rngs(0)), Outer(nnx.Rngs(0))
    fully_shard(model.inner, mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    with pytest.raises(RuntimeError, match=r"'inner\.linear\.kernel'"):
        per_device(model, "__call__", inputs())
    register_fsdp_forward_method(model.inner, "encode")
    assert_gathers(model, "__call__", twin)


def test_registering_twice_or_registering_call_changes_nothing(mesh8):
    model = make(mesh8, "encode")
    graphdef, method = nnx.graphdef(model), type(model).encode
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "__call__")
    assert nnx.graphdef(model) == graphdef
    assert type(model).encode is method
    assert_gathers(model, "encode", Base(nnx.Rngs(0)))
    assert_gathers(model, "__call__", Base(nnx.Rngs(0)))


def test_a_registered_method_keeps_its_name_and_docstring(mesh8):
    model = make(mesh8, "encode")
    assert model.encode.__name__ == "encode"
    assert model.encode.__doc__ == "Encode a batch."


def test_state_paths_are_the_same_after_registering(mesh8):
    before = list(make(mesh8).state_dict())
    assert list(make(mesh8, "encode").state_dict()) == before
    assert before == ["count", "linear.bias", "linear.kernel"]


# --- what may be registered -------------------------------------------------------


@pytest.mark.parametrize("name", ["encode", "no_such_method", "static"])
def test_a_plain_module_is_left_alone(name):
    model = Base(nnx.Rngs(0))
    before = dict(vars(model))
    assert register_fsdp_forward_method(model, name) is None
    assert type(model) is Base
    assert dict(vars(model)) == before
    assert not hasattr(model, "no_such_method")


def test_a_missing_name_is_refused_and_named(mesh8):
    model = make(mesh8)
    graphdef = nnx.graphdef(model)
    with pytest.raises(ValueError, match=r"Base.*'no_such_method'"):
        register_fsdp_forward_method(model, "no_such_method")
    assert nnx.graphdef(model) == graphdef


@pytest.mark.parametrize("name", ["static", "of_class", "width", "number"])
def test_what_is_no_method_of_an_instance_is_refused(mesh8, name):
    model = make(mesh8)
    with pytest.raises(TypeError, match=f"Base.{name}"):
        register_fsdp_forward_method(model, name)
    assert model.width == 8
    assert model.number == 3
    assert model.static(1) == 1
    assert_does_not_gather(model, "encode")


def test_a_method_whose_body_runs_later_is_refused(mesh8):
    class Lazy(nnx.Linear):
        def parts(self, x):
            yield self(x)

        async def later(self, x):
            return self(x)

    layer = fully_shard(Lazy(8, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    for name in ("parts", "later"):
        with pytest.raises(TypeError, match=f"Lazy.{name} is a generator or a corout"):
            register_fsdp_forward_method(layer, name)


@pytest.mark.parametrize("name", [None, 3, b"encode", Base.encode])
def test_a_name_that_is_no_string_is_refused(mesh8, name):
    with pytest.raises(TypeError, match="method_name"):
        register_fsdp_forward_method(make(mesh8), name)


# --- which modules it holds for ---------------------------------------------------


def test_another_instance_of_the_class_is_not_affected(mesh8):
    before, plain = make(mesh8), Base(nnx.Rngs(0))
    model = make(mesh8, "encode")
    after = make(mesh8)
    assert type(before) is type(model) is type(after)
    for other in (before, after):
        assert_does_not_gather(other, "encode")
    assert_gathers(model, "encode", plain)
    assert "encode" in vars(Base)
    assert plain.encode.__func__ is Base.encode


def split_and_merge(model: Any) -> Any:
    return nnx.merge(*nnx.split(model))


COPIES = {
    "clone": nnx.clone,
    "merge": split_and_merge,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "cloudpickle": lambda m: cloudpickle.loads(cloudpickle.dumps(m)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_keeps_its_registered_methods(mesh8, how):
    model = COPIES[how](make(mesh8, "encode"))
    assert isinstance(model, fsdp_jax.FSDPModule)
    assert_gathers(model, "encode", Base(nnx.Rngs(0)))
    assert_does_not_gather(model, "decode")
    register_fsdp_forward_method(model, "decode")
    assert_gathers(model, "decode", Base(nnx.Rngs(0)))


def test_registering_on_a_clone_does_not_reach_the_original(mesh8):
    model = make(mesh8)
    clone = nnx.clone(model)
    register_fsdp_forward_method(clone, "encode")
    assert_gathers(clone, "encode", Base(nnx.Rngs(0)))
    assert_does_not_gather(model, "encode")


def test_inherited_overridden_and_added_methods_can_be_registered(mesh8):
    twin = Child(nnx.Rngs(0))
    model = make(mesh8, "encode", "decode", "added", cls=Child)
    for name in ("encode", "decode", "added"):
        assert_gathers(model, name, twin)
    assert isinstance(model, Base)


@pytest.mark.parametrize("first", [Base, Child])
def test_registering_on_a_class_does_not_reach_its_bases_or_children(mesh8, first):
    second = Child if first is Base else Base
    registered, other = make(mesh8, "encode", cls=first), make(mesh8, cls=second)
    assert_does_not_gather(other, "encode")
    assert_gathers(registered, "encode", first(nnx.Rngs(0)))


def test_a_method_named_like_one_of_the_bases_runs_the_one_of_the_class(mesh8):
    base, child = make(mesh8, "encode"), make(mesh8, "encode", cls=Child)
    assert_gathers(base, "encode", Base(nnx.Rngs(0)))
    assert_gathers(child, "encode", Child(nnx.Rngs(0)))
