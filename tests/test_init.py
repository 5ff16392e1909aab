"""What `fully_shard` makes of a module: class, names, layout, groups."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fsdp_jax import (
    FSDPModule,
    MixedPrecisionPolicy,
    Shard,
    describe,
    fully_shard,
    local_shape,
    register_fsdp_forward_method,
)
from tests import helpers


class Net(nnx.Module):
    """Every kind of Variable: parameters, running statistics, random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(self.norm(self.up(x))))


class Tied(nnx.Module):
    """An output layer that uses the embedding of the input layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Embed(16, 8, rngs=rngs)
        self.head.embedding = self.embed.embedding

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head.attend(self.norm(self.embed(ids)))


class One(nnx.Module):
    """One parameter of a given shape, returned as the call sees it."""

    def __init__(self, *shape: int) -> None:
        self.w = nnx.Param(jnp.arange(float(np.prod(shape))).reshape(shape))

    def __call__(self) -> jax.Array:
        return self.w[...] + 0


def linear(inputs: int = 8, outputs: int = 8, seed: int = 0) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, rngs=nnx.Rngs(seed))


def mlp_output() -> np.ndarray:
    """What the unsharded MLP of seed 0 makes of the shared batch."""
    return np.asarray(helpers.MLP(nnx.Rngs(0))(helpers.regression_batch()[0]))


def assert_is_mlp(model: Any) -> None:
    """Check that a model computes what the unsharded MLP of seed 0 does."""
    found = model(helpers.regression_batch()[0])
    np.testing.assert_allclose(found, mlp_output(), rtol=1e-5, atol=1e-6)


def paths(model: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in nnx.to_flat_state(nnx.state(model))]


def groups(model: Any) -> dict[str, str]:
    """Path of each parameter, and the group that `describe` reports for it."""
    return {row.path: row.group for row in describe(model).rows}


def shard_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {row.path: row.local_shape for row in describe(model).rows}


def arrays(model: Any) -> dict[str, jax.Array]:
    """Every array of a model by dotted path, keys as their data."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable[...]
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        found[".".join(map(str, path))] = value
    return found


def assert_same_arrays(model: Any, expected: Any) -> None:
    found, wanted = arrays(model), arrays(expected)
    assert list(found) == list(wanted)
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


# --- class and identity -----------------------------------------------------------


def test_the_module_is_changed_in_place_and_returned(mesh8):
    module = linear()
    kernel, value = module.kernel, np.asarray(module.kernel[...])
    assert fully_shard(module, mesh=mesh8) is module
    assert module.kernel is kernel
    np.testing.assert_array_equal(module.kernel[...], value)


@pytest.mark.parametrize("container", [list, tuple])
def test_a_list_is_returned_as_the_same_object(mesh8, container):
    modules = container([linear(), linear()])
    assert fully_shard(modules, mesh=mesh8) is modules
    assert [type(m).__name__ for m in modules] == ["LinearFSDPModule"] * 2


def test_the_class_is_a_subclass_of_both_and_named_after_the_original(mesh8):
    model = nnx.Sequential(linear(), jnp.tanh, linear())
    fully_shard(model, mesh=mesh8)
    cls = type(model)
    assert cls.__name__ == "SequentialFSDPModule"
    assert cls.__bases__ == (FSDPModule, nnx.Sequential)
    assert cls.__mro__.index(FSDPModule) < cls.__mro__.index(nnx.Sequential)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nnx.Sequential)
    assert cls.__module__ == nnx.Sequential.__module__
    assert cls.__doc__ == nnx.Sequential.__doc__


def test_there_is_one_generated_class_per_original_class(mesh8):
    first = fully_shard(linear(), mesh=mesh8)
    second = fully_shard(linear(16, 8), mesh=helpers.mesh_of(4))
    other = fully_shard(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), mesh=mesh8)
    assert type(first) is type(second)
    assert type(other) is not type(first)
    assert type(other).__name__ == "LayerNormFSDPModule"


def test_two_classes_of_one_name_get_two_generated_classes(mesh8):
    def make() -> Any:
        class Linear(nnx.Linear):
            pass

        return fully_shard(Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh8)

    first, second, plain = make(), make(), fully_shard(linear(), mesh=mesh8)
    assert len({type(first), type(second), type(plain)}) == 3
    assert isinstance(first, nnx.Linear)
    assert not isinstance(first, type(plain))


def test_only_the_given_module_changes_its_class(mesh8, mlp):
    fully_shard(mlp, mesh=mesh8)
    assert type(mlp).__name__ == "MLPFSDPModule"
    assert type(mlp.layers) is nnx.List
    assert [type(layer) for layer in mlp.layers] == [nnx.Linear] * 3


def test_methods_properties_and_attributes_of_the_original_work(mesh8):
    class Scaled(nnx.Module):
        factor = 3

        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((8,)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.scale(x) * self.w[...]

        def scale(self, x: jax.Array) -> jax.Array:
            return self.twice * x

        @property
        def twice(self) -> int:
            return 2 * self.factor

        @classmethod
        def name(cls) -> str:
            return cls.__name__

        @staticmethod
        def constant() -> int:
            return 7

    module = fully_shard(Scaled(), mesh=mesh8)
    assert (module.twice, module.constant()) == (6, 7)
    assert module.name() == "ScaledFSDPModule"
    module.factor = 5
    np.testing.assert_array_equal(module(jnp.ones(8)), np.full(8, 10.0))


def test_the_methods_of_fsdp_go_before_methods_of_the_same_name(mesh8):
    class Own(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((8,)))

        def __call__(self) -> None:
            return None

        def unshard(self) -> str:
            return "mine"

    module: Any = fully_shard(Own(), mesh=mesh8)
    assert module.unshard() is None
    assert local_shape(module.w) == (8,)


def test_the_generated_class_makes_plain_instances_of_the_original(mesh8):
    model: Any = fully_shard(nnx.Sequential(linear(), linear()), mesh=mesh8)
    again = type(model)(*model.layers[:1])
    assert type(again) is nnx.Sequential
    cut = fully_shard(linear(), mesh=mesh8)
    plain = type(cut)(8, 8, rngs=nnx.Rngs(0))
    assert type(plain) is nnx.Linear
    assert plain.kernel[...].sharding.is_fully_addressable
    assert local_shape(plain.kernel) == (8, 8)


def test_fsdp_module_cannot_be_made_directly():
    with pytest.raises(TypeError, match="fully_shard"):
        FSDPModule()


def test_modules_that_are_no_pytrees_can_be_sharded(mesh8):
    class Plain(nnx.Module, pytree=False):
        def __init__(self) -> None:
            self.layer = linear(16, 8)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    x = helpers.regression_batch()[0]
    module = fully_shard(Plain(), mesh=mesh8)
    assert local_shape(module.layer.kernel) == (2, 8)
    np.testing.assert_allclose(module(x), linear(16, 8)(x), rtol=1e-5, atol=1e-6)


def test_modules_with_a_metaclass_of_their_own_can_be_sharded(mesh8):
    class Meta(type(nnx.Module)):
        @property
        def marked(cls) -> bool:
            return True

    class Marked(nnx.Module, metaclass=Meta):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((8,)))

        def __call__(self) -> jax.Array:
            return self.w[...] * 2

    module = fully_shard(Marked(), mesh=mesh8)
    assert isinstance(type(module), Meta)
    assert type(module).marked
    np.testing.assert_array_equal(module(), np.full(8, 2.0))


def test_containers_with_a_call_of_their_own_can_be_sharded(mesh8):
    class Chain(nnx.List):
        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self:
                x = layer(x)
            return x

    x = helpers.regression_batch()[0]
    chain = fully_shard(Chain([linear(16, 8), linear()]), mesh=mesh8)
    assert type(chain).__name__ == "ChainFSDPModule"
    assert len(chain) == 2
    assert paths(chain)[0] == (0, "bias")
    expected = linear()(linear(16, 8)(x))
    np.testing.assert_allclose(chain(x), expected, rtol=1e-5, atol=1e-6)


def test_a_module_without_a_call_is_still_not_callable(mesh8):
    class Encoder(nnx.Module):
        def __init__(self, *rngs: Any) -> None:
            self.layer = linear(16, 8)

        def encode(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    x = helpers.regression_batch()[0]
    module: Any = fully_shard(Encoder(), mesh=mesh8)
    register_fsdp_forward_method(module, "encode")
    expected = linear(16, 8)(x)
    np.testing.assert_allclose(module.encode(x), expected, rtol=1e-5, atol=1e-6)
    assert not callable(module)
    with pytest.raises(TypeError, match="not callable"):
        module(x)


# --- names and layout -------------------------------------------------------------


def test_names_and_their_order_are_unchanged(mesh8):
    before = paths(Net(nnx.Rngs(0)))
    model: Any = Net(nnx.Rngs(0))
    fully_shard(model.up, mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    assert paths(model) == before
    assert list(model.state_dict()) == [".".join(p) for p in before]


def test_values_are_unchanged(mesh8):
    model: Any = Net(nnx.Rngs(0))
    fully_shard(model.up, mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    assert_same_arrays(model, Net(nnx.Rngs(0)))


def test_a_parameter_keeps_its_logical_shape_and_each_device_holds_a_slice():
    module = fully_shard(linear(), mesh=helpers.mesh_of(2))
    assert module.kernel.shape == (8, 8)
    assert local_shape(module.kernel) == (4, 8)
    assert local_shape(module.bias) == (4,)
    full = np.asarray(linear().kernel[...])
    for i, shard in enumerate(module.kernel[...].addressable_shards):
        np.testing.assert_array_equal(shard.data, full[4 * i : 4 * i + 4])


def test_parameters_are_cut_and_every_other_variable_is_whole_on_all_devices(mesh8):
    model = fully_shard(Net(nnx.Rngs(0)), mesh=mesh8)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        expected = P("fsdp") if isinstance(variable, nnx.Param) else P()
        sharding = variable[...].sharding
        assert sharding == NamedSharding(mesh8, expected), path


def test_parameters_are_still_params_to_every_filter(mesh8):
    class Adapter(nnx.Module):
        def __init__(self) -> None:
            self.base = nnx.Param(jnp.ones((8, 8)))
            self.low = nnx.LoRAParam(jnp.ones((8, 8)))

    model = fully_shard(Adapter(), mesh=mesh8)
    assert isinstance(model.base, nnx.Param)
    assert not isinstance(model.base, nnx.LoRAParam)
    assert isinstance(model.low, nnx.LoRAParam)
    assert paths_of(nnx.state(model, nnx.Param)) == [("base",), ("low",)]
    assert paths_of(nnx.state(model, nnx.LoRAParam)) == [("low",)]
    assert local_shape(model.low) == (1, 8)


def paths_of(state: Any) -> list[tuple[Any, ...]]:
    return [path for path, _ in nnx.to_flat_state(state)]


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        ((8,), (1,)),
        ((16, 3), (2, 3)),
        ((4, 8), (4, 1)),
        ((3, 3, 16, 32), (3, 3, 16, 4)),
        ((50, 24, 16), (50, 3, 16)),
        ((4,), (4,)),
        ((3, 5), (3, 5)),
        ((0, 8), (0, 8)),
    ],
)
def test_a_dim_that_does_not_divide_gives_way_to_the_largest_that_does(
    mesh8, shape, local
):
    module = fully_shard(One(*shape), mesh=mesh8)
    assert local_shape(module.w) == local
    assert module.w.shape == shape
    np.testing.assert_array_equal(module(), One(*shape)())
    (row,) = describe(module).rows
    assert row.local_shape == local
    whole = local == shape
    assert (row.dim is None) == whole
    assert bool(row.reason) == whole
    if whole:
        assert str(shape) in row.reason
        assert row.reason in str(describe(module)).replace("\n", " ")
        assert module.w[...].sharding == NamedSharding(mesh8, P())


def test_integer_and_numpy_parameters_are_cut_like_others(mesh8):
    class Mixed(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Param(jnp.arange(16))
            self.host = nnx.Param(np.ones((8, 3), np.float32))

        def __call__(self) -> tuple[jax.Array, jax.Array]:
            return self.table[...] + 0, self.host[...] + 0

    policy = MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    module = fully_shard(Mixed(), mesh=mesh8, mp_policy=policy)
    assert local_shape(module.table) == (2,)
    assert local_shape(module.host) == (1, 3)
    table, host = module()
    assert table.dtype == jnp.int32
    assert host.dtype == jnp.bfloat16
    np.testing.assert_array_equal(table, np.arange(16))


@pytest.mark.parametrize("dim", [1, -1])
def test_a_placement_function_moves_the_cut(dim):
    mesh = helpers.mesh_of(4)

    def place(param: nnx.Variable) -> Shard | None:
        return Shard(dim) if param.ndim == 2 else None

    module = nnx.Linear(3, 8, rngs=nnx.Rngs(0))
    expected = module(jnp.ones((4, 3)))
    fully_shard(module, mesh=mesh, shard_placement_fn=place)
    assert local_shape(module.kernel) == (3, 2)
    assert local_shape(module.bias) == (2,)
    assert {r.path: r.dim for r in describe(module).rows} == {"kernel": 1, "bias": 0}
    np.testing.assert_allclose(module(jnp.ones((4, 3))), expected, rtol=1e-5)


def test_a_placement_of_dim_0_is_the_default(mesh8):
    module = fully_shard(One(4, 16), mesh=mesh8, shard_placement_fn=lambda p: Shard(0))
    assert local_shape(module.w) == (4, 2)


def test_a_placement_function_sees_each_managed_parameter_once(mesh8):
    model, seen = Tied(nnx.Rngs(0)), []
    fully_shard(
        model,
        mesh=mesh8,
        shard_placement_fn=seen.append,
        ignored_params=[model.norm.bias],
    )
    expected = [model.embed.embedding, model.norm.scale]
    assert {id(v) for v in seen} == {id(v) for v in expected}
    assert len(seen) == 2


# --- groups -----------------------------------------------------------------------


def test_the_root_groups_what_earlier_calls_left(mesh8, mlp):
    fully_shard(mlp.layers[0], mesh=mesh8)
    fully_shard(mlp.layers[1], mesh=mesh8)
    fully_shard(mlp, mesh=mesh8)
    owners = {path.rpartition(".")[0]: group for path, group in groups(mlp).items()}
    assert owners == {
        "layers.0": "layers.0 (Linear)",
        "layers.1": "layers.1 (Linear)",
        "layers.2": "MLP",
    }
    mlp.unshard()
    assert [local_shape(layer.kernel)[0] for layer in mlp.layers] == [2, 4, 16]
    mlp.reshard()
    assert_is_mlp(mlp)


def test_the_root_alone_is_one_group(mesh8, mlp):
    fully_shard(mlp, mesh=mesh8)
    assert set(groups(mlp).values()) == {"MLP"}
    mlp.unshard()
    assert [local_shape(layer.kernel)[0] for layer in mlp.layers] == [16, 32, 16]


def test_a_root_with_nothing_left_is_sharded_but_gathers_nothing(mesh8, mlp):
    fully_shard(list(mlp.layers), mesh=mesh8)
    fully_shard(mlp, mesh=mesh8)
    assert type(mlp).__name__ == "MLPFSDPModule"
    assert "MLP" not in groups(mlp).values()
    assert mlp.unshard() is None
    handle = mlp.unshard(async_op=True)
    assert handle is not None
    assert handle.wait() is None
    assert [local_shape(layer.kernel)[0] for layer in mlp.layers] == [2, 4, 2]
    mlp.reshard()
    assert_is_mlp(mlp)


def test_a_module_without_parameters_can_be_sharded(mesh8):
    module = fully_shard(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), mesh=mesh8)
    assert type(module).__name__ == "DropoutFSDPModule"
    assert module(jnp.ones((8, 4))).shape == (8, 4)


def test_each_module_of_a_list_is_a_group_of_its_own(mesh8, mlp):
    fully_shard(list(mlp.layers)[:2], mesh=mesh8)
    fully_shard(mlp, mesh=mesh8)
    assert len(set(groups(mlp).values())) == 3
    mlp.layers[0].unshard()
    assert local_shape(mlp.layers[0].kernel) == (16, 32)
    assert local_shape(mlp.layers[1].kernel) == (4, 16)
    mlp.layers[1].reshard()
    assert local_shape(mlp.layers[0].kernel) == (16, 32)
    mlp.layers[0].reshard()
    assert_is_mlp(mlp)


@pytest.mark.parametrize("outer_first", [True, False])
def test_a_list_may_hold_a_module_and_one_inside_of_it(mesh8, mlp, outer_first):
    pair = [mlp, mlp.layers[1]]
    fully_shard(pair if outer_first else pair[::-1], mesh=mesh8)
    found = groups(mlp)
    assert found["layers.0.kernel"] == found["layers.2.bias"] == "MLP"
    assert found["layers.1.kernel"] == found["layers.1.bias"] == "layers.1 (Linear)"
    assert isinstance(mlp.layers[1], FSDPModule)
    assert_is_mlp(mlp)


def test_groups_nest_to_any_depth(mesh8):
    def make() -> nnx.Sequential:
        inner = nnx.Sequential(linear(16, 16), linear(16, 16, 1))
        return nnx.Sequential(nnx.Sequential(inner, linear(16, 16)), linear(16, 8))

    x = helpers.regression_batch()[0]
    expected = make()(x)
    model: Any = make()
    middle = model.layers[0]
    inner = middle.layers[0]
    for module in (inner.layers[0], inner, middle, model):
        fully_shard(module, mesh=mesh8)
    found = groups(model)
    assert {path: found[f"{path}.kernel"] for path in owners_of(found)} == {
        "layers.0.layers.0.layers.0": "layers.0.layers.0.layers.0 (Linear)",
        "layers.0.layers.0.layers.1": "layers.0.layers.0 (Sequential)",
        "layers.0.layers.1": "layers.0 (Sequential)",
        "layers.1": "Sequential",
    }
    np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-5)


def owners_of(names: Any) -> set[str]:
    """The modules that dotted parameter names belong to."""
    return {name.rpartition(".")[0] for name in names}


def test_a_module_under_two_names_is_sharded_once_and_works_through_both(mesh8):
    class Twice(nnx.Module):
        def __init__(self) -> None:
            self.first = linear()
            self.second = self.first

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(jnp.tanh(self.first(x)))

    x = jnp.ones((8, 8))
    expected = Twice()(x)
    for inner in (False, True):
        model = Twice()
        if inner:
            fully_shard(model.first, mesh=mesh8)
        fully_shard(model, mesh=mesh8)
        assert model.first is model.second
        assert list(shard_shapes(model)) == ["first.bias", "first.kernel"]
        assert local_shape(model.second.kernel) == (1, 8)
        np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-6)


def test_a_child_that_is_unsharded_when_its_root_is_sharded(mesh8, mlp):
    child = fully_shard(mlp.layers[0], mesh=mesh8)
    child.unshard()
    fully_shard(mlp, mesh=mesh8)
    assert local_shape(child.kernel) == (16, 32)
    assert_is_mlp(mlp)
    child.reshard()
    assert local_shape(child.kernel) == (2, 32)
    assert_is_mlp(mlp)


# --- ignored and tied parameters --------------------------------------------------


def is_bias(path: tuple[Any, ...], value: Any) -> bool:
    return path[-1] == "bias"


@pytest.mark.parametrize(
    ("ignored", "whole"),
    [
        (lambda m: [m.layers[0].kernel], {"layers.0.kernel"}),
        (lambda m: (m.layers[0].kernel,), {"layers.0.kernel"}),
        (lambda m: m.layers[0].kernel, {"layers.0.kernel"}),
        (
            lambda m: [m.layers[0].kernel, m.layers[2].bias],
            {"layers.0.kernel", "layers.2.bias"},
        ),
        (
            lambda m: nnx.PathContains("bias"),
            {"layers.0.bias", "layers.1.bias", "layers.2.bias"},
        ),
        (
            lambda m: is_bias,
            {"layers.0.bias", "layers.1.bias", "layers.2.bias"},
        ),
        (
            lambda m: nnx.All(nnx.Param, nnx.PathContains(2)),
            {"layers.2.kernel", "layers.2.bias"},
        ),
        (
            lambda m: [nnx.PathContains(0), nnx.PathContains(2)],
            {"layers.0.kernel", "layers.0.bias", "layers.2.kernel", "layers.2.bias"},
        ),
        (lambda m: nnx.LoRAParam, set()),
        (lambda m: [], set()),
        (lambda m: [nnx.Param(jnp.ones((8, 8)))], set()),
    ],
    ids=[
        "list",
        "tuple",
        "one Variable",
        "two Variables",
        "PathContains",
        "function",
        "All",
        "list of filters",
        "type",
        "empty",
        "of another module",
    ],
)
def test_ignored_parameters_stay_whole_and_outside_of_the_group(
    mesh8, mlp, ignored, whole
):
    fully_shard(mlp, mesh=mesh8, ignored_params=ignored(mlp))
    rows = describe(mlp).rows
    assert {r.path for r in rows if r.dim is None} == whole
    for row in rows:
        assert (row.group == "-") == (row.path in whole)
        assert ("ignored" in row.reason) == (row.path in whole)
    assert_is_mlp(mlp)


def test_a_type_filter_ignores_the_parameters_of_that_type(mesh8):
    model = nnx.LoRALinear(16, 8, lora_rank=8, rngs=nnx.Rngs(0))
    fully_shard(model, mesh=mesh8, ignored_params=nnx.LoRAParam)
    whole = {r.path for r in describe(model).rows if r.dim is None}
    assert whole == {"lora.lora_a", "lora.lora_b"}
    assert local_shape(model.kernel) == (2, 8)


def test_ignored_parameters_keep_shape_dtype_and_class_whatever_happens(mesh8):
    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.cut = nnx.Param(jnp.ones((8, 8)))
            self.whole = nnx.Param(jnp.ones((8, 8)))

        def __call__(self) -> tuple[jax.Array, jax.Array]:
            return self.cut[...] * 2, self.whole[...] * 2

    model: Any = Pair()
    fully_shard(
        model,
        mesh=mesh8,
        ignored_params=[model.whole],
        mp_policy=MixedPrecisionPolicy(param_dtype=jnp.bfloat16),
    )
    replicated = NamedSharding(mesh8, P())
    for step in (lambda: None, model.unshard, model.reshard):
        step()
        assert type(model.whole) is nnx.Param
        assert model.whole[...].sharding == replicated
    cut, whole = model()
    assert cut.dtype == jnp.bfloat16
    assert whole.dtype == jnp.float32
    assert model.whole[...].sharding == replicated


def test_a_scalar_parameter_may_be_ignored(mesh8):
    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.asarray(2.0))
            self.w = nnx.Param(jnp.ones((8,)))

        def __call__(self) -> jax.Array:
            return self.scale[...] * self.w[...]

    model = Scaled()
    fully_shard(model, mesh=mesh8, ignored_params=[model.scale])
    np.testing.assert_array_equal(model(), np.full(8, 2.0))


def test_parameters_ignored_by_a_child_are_not_taken_by_its_parent(mesh8, mlp):
    fully_shard(mlp.layers[0], mesh=mesh8, ignored_params=nnx.Param)
    fully_shard(mlp, mesh=mesh8)
    found = groups(mlp)
    assert found["layers.0.kernel"] == found["layers.0.bias"] == "-"
    assert found["layers.1.kernel"] == "MLP"
    assert_is_mlp(mlp)


def test_a_parameter_ignored_by_a_root_can_be_sharded_with_its_own_module(mesh8, mlp):
    inner = nnx.PathContains(1)
    fully_shard(mlp, mesh=mesh8, ignored_params=inner)
    fully_shard(mlp.layers[1], mesh=mesh8)
    assert groups(mlp)["layers.1.kernel"] == "layers.1 (Linear)"
    assert_is_mlp(mlp)


def test_a_parameter_tied_inside_one_group_is_one_parameter(mesh8):
    ids = helpers.token_batch(8) % 16
    expected = Tied(nnx.Rngs(0))(ids)
    before = paths(Tied(nnx.Rngs(0)))
    model: Any = fully_shard(Tied(nnx.Rngs(0)), mesh=mesh8)
    assert model.embed.embedding is model.head.embedding
    assert paths(model) == before
    assert len(describe(model).rows) == 3
    np.testing.assert_allclose(model(ids), expected, rtol=1e-5, atol=1e-6)
    model.unshard()
    assert model.embed.embedding is model.head.embedding
    assert local_shape(model.head.embedding) == (16, 8)
    model.reshard()
    assert local_shape(model.head.embedding) == (2, 8)


def test_a_parameter_may_be_tied_to_another_group_if_it_is_ignored(mesh8):
    ids = helpers.token_batch(8) % 16
    model = Tied(nnx.Rngs(0))
    expected = model(ids)
    tied = [model.embed.embedding]
    fully_shard([model.embed, model.head], mesh=mesh8, ignored_params=tied)
    fully_shard(model, mesh=mesh8)
    assert model.embed.embedding is model.head.embedding
    assert groups(model) == {
        "embed.embedding": "-",
        "norm.bias": "Tied",
        "norm.scale": "Tied",
    }
    np.testing.assert_allclose(model(ids), expected, rtol=1e-5, atol=1e-6)


# --- models that have no values yet, or are being traced --------------------------


def test_an_abstract_model_is_sharded_without_making_an_array(mesh8):
    model: Any = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    fully_shard(model.up, mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    assert shard_shapes(model)["up.kernel"] == local_shape(model.up.kernel) == (2, 32)
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        assert isinstance(variable.get_raw_value(), jax.ShapeDtypeStruct)
    kernel = model.up.kernel.get_raw_value()
    assert kernel.sharding == NamedSharding(mesh8, P("fsdp"))
    assert kernel.shape == (16, 32)


def test_an_abstract_model_cannot_be_used_and_names_its_parameters(mesh8):
    model: Any = nnx.eval_shape(lambda: helpers.MLP(nnx.Rngs(0)))
    fully_shard(model.layers[0], mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    x = helpers.regression_batch()[0]
    for use in (lambda: model(x), model.unshard, lambda: nnx.jit(model)(x)):
        with pytest.raises(RuntimeError, match=r"layers\.2\.kernel.*nnx\.update"):
            use()
    assert type(model).__name__ == "MLPFSDPModule"


@pytest.mark.parametrize("way", ["update", "load_state_dict"])
def test_an_abstract_model_takes_values_in_the_layout_it_was_given(mesh8, way):
    model: Any = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    fully_shard(model, mesh=mesh8)
    filled = Net(nnx.Rngs(0))
    if way == "update":
        nnx.update(model, nnx.state(filled))
    else:
        values = nnx.to_flat_state(nnx.state(filled))
        model.load_state_dict({".".join(map(str, p)): v[...] for p, v in values})
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert param[...].sharding == NamedSharding(mesh8, P("fsdp")), path
    assert_same_arrays(model, filled)
    x = helpers.regression_batch()[0]
    np.testing.assert_allclose(model(x), filled(x), rtol=1e-5, atol=1e-5)


def test_a_model_made_and_sharded_inside_jit_is_born_sharded(mesh8):
    @nnx.jit
    def make() -> Net:
        model: Any = Net(nnx.Rngs(0))
        fully_shard(model.up, mesh=mesh8)
        return fully_shard(model, mesh=mesh8)

    model = make()
    assert type(model).__name__ == "NetFSDPModule"
    assert type(model.up).__name__ == "LinearFSDPModule"
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert param[...].sharding == NamedSharding(mesh8, P("fsdp")), path
    assert_same_arrays(model, Net(nnx.Rngs(0)))
    assert groups(model)["up.kernel"] == "up (Linear)"


# --- what is built on the shards --------------------------------------------------


def test_the_moments_of_an_optimizer_have_the_shardings_of_their_parameters(mesh8):
    model = fully_shard(helpers.MLP(nnx.Rngs(0)), mesh=mesh8)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    adam = optimizer.opt_state[0]
    for moment in (adam.mu, adam.nu):
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            value: Any = moment
            for key in path:
                value = value[key]
            assert value[...].sharding == param[...].sharding, path


def test_a_second_application_changes_nothing(mesh8, mlp):
    fully_shard(mlp, mesh=mesh8)
    cls, shapes = type(mlp), shard_shapes(mlp)
    for again in (mlp, [mlp], [linear(), mlp]):
        with pytest.raises(RuntimeError, match="fully_shard has already been applied"):
            fully_shard(again, mesh=helpers.mesh_of(2))
    assert type(mlp) is cls
    assert shard_shapes(mlp) == shapes
    assert_is_mlp(mlp)
