"""`state_dict` and `load_state_dict`: names, layouts, casts, and what is refused."""

import collections
import types
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


class Net(nnx.Module):
    """Every kind of Variable: parameters, statistics, random state, a counter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tables = nnx.Dict(
            b=nnx.Param(rngs.params.normal((8, 8), jnp.bfloat16)),
            a=nnx.Param(rngs.params.normal((3,))),
        )
        self.counter = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.layers[0](x) + self.layers[1](x)
        return self.dropout(self.norm(h)).sum(-1) + self.tables["a"].sum()


NAMES = [
    "counter",
    "dropout.rngs.count",
    "dropout.rngs.key",
    "layers.0.bias",
    "layers.0.kernel",
    "layers.1.bias",
    "layers.1.kernel",
    "norm.bias",
    "norm.mean",
    "norm.scale",
    "norm.var",
    "tables.a",
    "tables.b",
]
CUT = {"layers.0", "layers.1", "norm.bias", "norm.scale", "tables.b"}


def make(mesh: Mesh | None, seed: int = 0) -> Any:
    model = Net(nnx.Rngs(seed))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def names_of(module: Any) -> list[str]:
    """Dotted paths of `nnx.state`, in its order."""
    flat = nnx.to_flat_state(nnx.state(module))
    return [".".join(map(str, path)) for path, _ in flat]


def host(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def assert_same(got: Any, want: Any) -> None:
    """Two state dicts hold the same names, dtypes and values, bit for bit."""
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        np.testing.assert_array_equal(host(got[name]), host(value), err_msg=name)


def raw_values(model: Any) -> list[Any]:
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [v.get_raw_value() for v in leaves]


def assert_at_rest(model: Any, mesh: Mesh) -> None:
    for name, value in zip(names_of(model), raw_values(model), strict=True):
        assert value.sharding.mesh == mesh, name
        cut = any(name.startswith(prefix) for prefix in CUT)
        assert value.sharding.is_fully_replicated is not cut, name


@pytest.fixture
def net(mesh8) -> Any:
    return make(mesh8)


# --- state_dict -------------------------------------------------------------------


def test_shapes_without_values_are_refused() -> None:
    model: Any = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    shapes = jax.eval_shape(lambda: model.state_dict())
    with pytest.raises(TypeError, match="'bias' is a ShapeDtypeStruct"):
        model.load_state_dict(shapes)
    assert model.bias.shape == (8,) and model.bias[...].sum() == 0


def test_names_are_those_of_the_state_before_and_after_sharding(net):
    assert names_of(Net(nnx.Rngs(0))) == NAMES
    assert names_of(net) == NAMES
    state_dict = net.state_dict()
    assert type(state_dict) is dict
    assert list(state_dict) == NAMES


def test_values_are_the_arrays_of_the_variables_as_they_rest(net, mesh8):
    for name, value, held in zip(
        NAMES, net.state_dict().values(), raw_values(net), strict=True
    ):
        assert value is held, name
    assert_at_rest(net, mesh8)
    twin = dict(zip(NAMES, raw_values(Net(nnx.Rngs(0))), strict=True))
    assert_same(net.state_dict(), twin)


def test_an_inner_module_reports_names_of_its_own(net):
    inner = net.layers[0].state_dict()
    assert list(inner) == ["bias", "kernel"]
    assert inner["kernel"] is net.state_dict()["layers.0.kernel"]


def test_changing_the_dict_does_not_change_the_module(net):
    before = raw_values(net)
    state_dict = net.state_dict()
    state_dict["layers.0.bias"] = jnp.ones(16)
    del state_dict["counter"]
    assert all(a is b for a, b in zip(before, raw_values(net), strict=True))
    assert list(net.state_dict()) == NAMES


def test_state_dict_works_in_a_trace(net):
    got = nnx.jit(lambda m: m.state_dict())(net)
    assert_same(dict(sorted(got.items())), net.state_dict())


# --- load_state_dict --------------------------------------------------------------


def on_host(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Numpy arrays; random keys, which numpy does not have, stay on a device."""
    return {
        name: v if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else np.asarray(v)
        for name, v in state_dict.items()
    }


def on_one_device(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {n: jax.device_put(v, jax.devices()[3]) for n, v in state_dict.items()}


def replicated(state_dict: dict[str, Any]) -> dict[str, Any]:
    mesh = helpers.mesh_of(8)
    target = NamedSharding(mesh, PartitionSpec())
    return {n: jax.device_put(v, target) for n, v in state_dict.items()}


def from_four_devices(_: dict[str, Any]) -> dict[str, Any]:
    return make(helpers.mesh_of(4), seed=9).state_dict()


def as_variables(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {n: nnx.Variable(v) for n, v in state_dict.items()}


SOURCES = [dict, on_host, on_one_device, replicated, from_four_devices, as_variables]


@pytest.mark.parametrize("source", SOURCES)
def test_loads_arrays_from_anywhere_and_puts_them_where_they_rest(net, mesh8, source):
    other = make(mesh8, seed=9)
    other.counter[...] = jnp.int32(5)
    other.norm.mean[...] = jnp.arange(16.0)
    want = other.state_dict()
    given = source(want)
    given["counter"], given["norm.mean"] = want["counter"], want["norm.mean"]
    assert net.load_state_dict(given) == ([], [])
    assert_same(net.state_dict(), want)
    assert_at_rest(net, mesh8)


def test_a_loaded_model_computes_what_the_source_does(net, mesh8):
    other, x = Net(nnx.Rngs(9)), jnp.arange(64.0).reshape(8, 8) / 64
    values = dict(zip(NAMES, raw_values(other), strict=True))
    net.load_state_dict(values)
    for m in (other, net):
        m.eval()
    np.testing.assert_allclose(net(x), other(x), 1e-5, 1e-5)
    got = fsdp_jax.shard_map(lambda m, x: m(x))(net, x)
    np.testing.assert_allclose(got, other(x), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "mapping",
    [
        lambda d: types.MappingProxyType(d),
        lambda d: collections.OrderedDict(reversed(d.items())),
    ],
    ids=["proxy", "reversed"],
)
def test_any_mapping_in_any_order_is_accepted(net, mesh8, mapping):
    want = make(mesh8, seed=9).state_dict()
    net.load_state_dict(mapping(want))
    assert_same(net.state_dict(), want)


def test_loads_on_explicit_axes(mesh8):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Explicit,))
    model, want = make(mesh), make(mesh8, seed=9).state_dict()
    model.load_state_dict(want)
    assert_same(model.state_dict(), want)
    assert_at_rest(model, mesh)


def test_loads_inside_jit(net, mesh8):
    want = make(mesh8, seed=9).state_dict()
    nnx.jit(lambda m, d: m.load_state_dict(d))(net, want)
    assert_same(net.state_dict(), want)
    assert_at_rest(net, mesh8)


def test_floating_values_are_cast_to_the_dtype_of_the_variable(net):
    given = on_host(net.state_dict())
    given["layers.0.kernel"] = given["layers.0.kernel"].astype(jnp.bfloat16)
    given["norm.mean"] = np.arange(16, dtype=np.float64)
    given["tables.b"] = np.full((8, 8), 1.5, np.float16)
    net.load_state_dict(given)
    got = net.state_dict()
    assert got["layers.0.kernel"].dtype == jnp.float32
    np.testing.assert_array_equal(
        got["layers.0.kernel"], given["layers.0.kernel"].astype(np.float32)
    )
    assert got["norm.mean"].dtype == jnp.float32
    np.testing.assert_array_equal(got["norm.mean"], given["norm.mean"])
    assert got["tables.b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        host(got["tables.b"]).astype(np.float32), np.full((8, 8), 1.5)
    )


def test_an_inner_module_loads_names_of_its_own(net, mesh8):
    want = make(mesh8, seed=9).layers[0].state_dict()
    before = net.state_dict()
    net.layers[0].load_state_dict(want)
    assert_same(net.layers[0].state_dict(), want)
    assert net.state_dict()["layers.1.kernel"] is before["layers.1.kernel"]


def test_tied_parameters_are_reported_and_loaded_once(mesh8):
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.second = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.second.kernel = self.first.kernel

    model: Any = fully_shard(Tied(nnx.Rngs(0)), mesh=mesh8)
    assert list(model.state_dict()) == names_of(Tied(nnx.Rngs(0))) == ["first.kernel"]
    model.load_state_dict({"first.kernel": np.ones((8, 8), np.float32)})
    np.testing.assert_array_equal(model.second.kernel[...], np.ones((8, 8)))
    assert model.second.kernel is model.first.kernel


# --- strict and not ---------------------------------------------------------------


def test_a_missing_or_unexpected_name_is_refused_and_named(net):
    state_dict = net.state_dict()
    before = raw_values(net)
    missing = {n: v for n, v in state_dict.items() if n != "layers.1.kernel"}
    with pytest.raises(ValueError, match=r"missing.*'layers\.1\.kernel'"):
        net.load_state_dict(missing)
    with pytest.raises(ValueError, match=r"unexpected.*'layers\.7\.kernel'"):
        net.load_state_dict({**state_dict, "layers.7.kernel": jnp.ones(3)})
    assert all(a is b for a, b in zip(before, raw_values(net), strict=True))


def test_without_strict_only_known_names_are_loaded(net, mesh8):
    before, other = net.state_dict(), make(mesh8, seed=9).state_dict()
    part = {n: other[n] for n in ("layers.0.bias", "dropout.rngs.key", "norm.var")}
    net.load_state_dict({**part, "head.kernel": "anything"}, strict=False)
    assert_same(net.state_dict(), {**before, **part})
    net.load_state_dict({}, strict=False)
    assert_same(net.state_dict(), {**before, **part})
    assert_at_rest(net, mesh8)


def test_strict_can_only_be_given_by_keyword(net):
    with pytest.raises(TypeError):
        net.load_state_dict(net.state_dict(), False)


# --- what is refused --------------------------------------------------------------

BAD_VALUES = {
    "text": ("layers.1.kernel", "abc", TypeError),
    "list": ("layers.1.bias", [0.0] * 16, TypeError),
    "none": ("norm.mean", None, TypeError),
    "shard": ("layers.1.kernel", np.zeros((1, 16), np.float32), ValueError),
    "transposed": ("layers.1.kernel", np.zeros((16, 8), np.float32), ValueError),
    "scalar": ("tables.a", np.float32(0), ValueError),
    "integer for float": ("layers.1.bias", np.zeros(16, np.int32), ValueError),
    "float for integer": ("counter", np.float32(1), ValueError),
    "float for key": ("dropout.rngs.key", np.float32(1), ValueError),
    "complex": ("layers.1.bias", np.zeros(16, np.complex64), ValueError),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "error"), BAD_VALUES.values(), ids=BAD_VALUES
)
def test_a_bad_value_is_named_and_nothing_is_written(net, name, value, error, strict):
    before = raw_values(net)
    good = {n: v * 0 for n, v in net.state_dict().items() if n.startswith("layers")}
    given = {**net.state_dict(), **good, name: value}
    with pytest.raises(error, match=f"load_state_dict: '{name}'"):
        net.load_state_dict(given, strict=strict)
    assert all(a is b for a, b in zip(before, raw_values(net), strict=True))


def test_a_wrong_shape_is_explained_by_both_shapes(net):
    given = {"layers.1.kernel": np.zeros((1, 16), np.float32)}
    with pytest.raises(ValueError, match=r"\(1, 16\).*\(8, 16\)"):
        net.load_state_dict(given, strict=False)


@pytest.mark.parametrize("bad", [None, [("counter", 1)], "counter"])
def test_what_is_no_mapping_is_refused(net, bad):
    with pytest.raises(TypeError, match="mapping"):
        net.load_state_dict(bad)


# --- parameters without values ----------------------------------------------------


def test_an_abstract_model_gets_its_values_from_a_state_dict(mesh8):
    model: Any = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    assert list(model.state_dict()) == NAMES
    want = make(mesh8, seed=9).state_dict()
    model.load_state_dict(want)
    assert_same(model.state_dict(), want)
    assert_at_rest(model, mesh8)


# --- random keys from their data --------------------------------------------------


class Keys(nnx.Module):
    """A parameter, typed keys of two shapes, and a key as older code holds it."""

    def __init__(self, impl: str, raw_impl: str) -> None:
        self.kernel = nnx.Param(jnp.ones((8, 2)))
        self.one = nnx.Variable(jax.random.key(1, impl=impl))
        self.stack = nnx.Variable(jax.random.split(jax.random.key(2, impl=impl), 3))
        self.raw = nnx.Variable(jax.random.PRNGKey(3, impl=raw_impl))


def key_data(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


@pytest.mark.parametrize("abstract", [True, False])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_loaded_from_their_data(mesh8, impl, abstract):
    model = Keys(impl, impl)
    saved = {n: key_data(x) for n, x in nnx_state(model).items()}

    again: Any = Keys(impl, impl)
    if abstract:
        again = nnx.eval_shape(lambda: Keys(impl, impl))
    fully_shard(again, mesh=mesh8)
    again.load_state_dict(saved)
    for name, x in again.state_dict().items():
        np.testing.assert_array_equal(key_data(x), saved[name])
    assert jax.random.key_impl(again.stack.get_raw_value()) == jax.random.key_impl(
        model.stack.get_raw_value()
    )
    again.load_state_dict(saved | {"raw": jax.random.key(5, impl=impl)})
    np.testing.assert_array_equal(again.raw[...], jax.random.PRNGKey(5, impl=impl))


def nnx_state(model: Any) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {str(path[0]): v.get_raw_value() for path, v in flat}


@pytest.mark.parametrize("abstract", [True, False])
def test_keys_of_another_kind_are_refused(mesh8, abstract):
    model: Any = Keys("threefry2x32", "rbg")
    if abstract:
        model = nnx.eval_shape(lambda: Keys("threefry2x32", "rbg"))
    model = fully_shard(model, mesh=mesh8)
    bad = {"one": np.zeros(4, np.uint32)}
    with pytest.raises(ValueError, match=r"'one' has shape \(4,\).*of shape \(2,\)"):
        model.load_state_dict(bad, strict=False)
    bad = {"one": jax.random.key(0, impl="rbg")}
    with pytest.raises(ValueError, match="'one' is of the implementation key<rbg>"):
        model.load_state_dict(bad, strict=False)


# --- names that two things have ---------------------------------------------------


class Dotted(nnx.Module):
    """Two parameters called `table.a.b`: by a key with a dot, and by a child."""

    def __init__(self, other: Any = "a.b") -> None:
        inner = nnx.Dict(b=nnx.Param(jnp.ones(8)))
        self.table = nnx.data({"a": inner, other: nnx.Param(jnp.zeros(8))})

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.table.values()
        return x * getattr(first, "b", first)[...] + getattr(second, "b", second)[...]


def test_two_parameters_of_one_name_are_refused(mesh8):
    model: Any = fully_shard(Dotted(), mesh=mesh8)
    names = r"'table.a.b' names two things, at .*'a', 'b'.*'a.b'"
    with pytest.raises(ValueError, match="state_dict: " + names):
        model.state_dict()
    with pytest.raises(ValueError, match="load_state_dict: " + names):
        model.load_state_dict({"table.a.b": np.ones(8)})
    step = fsdp_jax.grad(lambda m, x: m(x).mean())
    with pytest.raises(ValueError, match="^grad: " + names):
        step(model, jnp.ones((8, 8)))
    none = fsdp_jax.PendingGradients({}, {}, {}, reduction="mean")
    with pytest.raises(ValueError, match="synchronize_gradients: " + names):
        model.synchronize_gradients(none)


def test_a_dot_in_a_name_is_no_matter_if_nothing_else_has_it(mesh8):
    model: Any = fully_shard(Dotted("c.b"), mesh=mesh8)
    saved = model.state_dict()
    assert list(saved) == ["table.a.b", "table.c.b"]
    again: Any = fully_shard(Dotted("c.b"), mesh=mesh8)
    again.load_state_dict({"table.a.b": np.zeros(8), "table.c.b": np.ones(8)})
    np.testing.assert_array_equal(again.table["c.b"][...], np.ones(8))
    grads = fsdp_jax.grad(lambda m, x: m(x).sum(), reduction="sum")(
        model, jnp.ones((8, 8))
    )
    for leaf in jax.tree.leaves(grads):
        np.testing.assert_array_equal(leaf, np.full(8, 8.0))
