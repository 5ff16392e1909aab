"""What `fully_shard` refuses: which error, what it names, and that nothing changed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    Shard,
    fully_shard,
    local_shape,
)
from tests import helpers


class Inner(nnx.Module):
    """A layer with a parameter that can be spoilt."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.full((8,), 2.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.scale[...]


class Net(nnx.Module):
    """Two layers in a list, running statistics and random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.blocks = nnx.List([Inner(rngs), Inner(rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.drop(self.norm(x))
        return self.blocks[0](x) + self.blocks[1](x)


def make_net() -> Any:
    return Net(nnx.Rngs(0))


INPUTS: Any = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


def snapshot(module: Any) -> dict[str, Any]:
    """All that a failed call must leave alone: objects, classes, values, places."""
    found: dict[str, Any] = {}
    for path, node in nnx.iter_graph(module):
        name = ".".join(map(str, path))
        if isinstance(node, nnx.Variable):
            value = node.get_raw_value()
            metadata = {k: v for k, v in node.get_metadata().items()}
            found[name] = (id(node), type(node), id_and_place(value), metadata)
        elif isinstance(node, nnx.Pytree):
            found[name] = (id(node), type(node), sorted(vars(node)))
    return found


def id_and_place(value: Any) -> Any:
    """Content, dtype and sharding of a value that may be an array."""
    if not isinstance(value, jax.Array):
        return (type(value), str(value))
    if value.is_deleted():
        return "deleted"
    place = value.sharding
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return (place, str(value.dtype), value.shape, np.asarray(value).tobytes())


def assert_refuses(
    call: Callable[[], Any], module: Any, error: type[Exception], *texts: str
) -> None:
    """Check the error, that its text holds `texts`, and that `module` is untouched."""
    before = snapshot(module)
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    for text in texts:
        assert text in str(caught.value)
    assert snapshot(module) == before


def assert_shards_correctly(model: Any, mesh: Mesh, **kwargs: Any) -> None:
    """Shard a model that earlier calls were refused for, and compare its output."""
    expected = model(INPUTS)
    for block in model.blocks:
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    assert type(model).__name__ == "NetFSDPModule"
    assert local_shape(model.blocks[1].linear.kernel) == (2, 8)
    assert local_shape(model.norm.scale) == (2,)
    np.testing.assert_allclose(model(INPUTS), expected, rtol=1e-5, atol=1e-6)


# --- bad arguments ----------------------------------------------------------------


def fails(*args: Any) -> Any:
    raise LookupError("in the user's function")


ARGUMENTS: list[tuple[str, Any, type[Exception], list[str]]] = [
    ("reshard_after_forward", "x", ValueError, ["'x'"]),
    ("reshard_after_forward", 2.0, ValueError, ["2.0"]),
    ("reshard_after_forward", 0, ValueError, ["got 0"]),
    ("reshard_after_forward", -1, ValueError, ["-1"]),
    ("reshard_after_forward", [True], ValueError, ["[True]"]),
    ("mp_policy", jnp.bfloat16, TypeError, ["MixedPrecisionPolicy"]),
    ("mp_policy", None, TypeError, ["MixedPrecisionPolicy", "NoneType"]),
    ("mp_policy", {"param_dtype": jnp.bfloat16}, TypeError, ["dict"]),
    ("offload_policy", None, TypeError, ["OffloadPolicy", "NoneType"]),
    ("offload_policy", True, TypeError, ["OffloadPolicy", "bool"]),
    ("offload_policy", CPUOffloadPolicy, TypeError, ["OffloadPolicy", "type"]),
    ("dp_mesh_dims", "fsdp", TypeError, ["DataParallelMeshDims", "str"]),
    ("dp_mesh_dims", DataParallelMeshDims("data"), ValueError, ["'data'", "fsdp"]),
    ("dp_mesh_dims", DataParallelMeshDims, TypeError, ["DataParallelMeshDims", "type"]),
    ("shard_placement_fn", Shard(0), TypeError, ["callable", "Shard"]),
    ("shard_placement_fn", 1, TypeError, ["callable", "int"]),
    ("ignored_params", "linear", TypeError, ["str", "nnx.PathContains"]),
    ("ignored_params", ["linear"], TypeError, ["str", "nnx.PathContains"]),
    ("ignored_params", {"linear"}, TypeError, ["set"]),
    ("ignored_params", {"linear": 1}, TypeError, ["dict"]),
    ("ignored_params", jnp.ones((8,)), TypeError, ["nnx filter"]),
    ("ignored_params", [jnp.ones((8,))], TypeError, ["Variables"]),
    ("ignored_params", [np.ones((8,))], TypeError, ["Variables"]),
    ("ignored_params", 5, TypeError, ["nnx filter"]),
    ("ignored_params", [5], TypeError, ["nnx filter"]),
    ("ignored_params", object(), TypeError, ["nnx filter"]),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "texts"),
    ARGUMENTS,
    ids=[f"{name}-{type(value).__name__}" for name, value, *_ in ARGUMENTS],
)
def test_a_bad_argument_is_refused_by_name(mesh8, name, value, error, texts):
    model = make_net()
    kwargs = {"mesh": mesh8, name: value}
    assert_refuses(lambda: fully_shard(model, **kwargs), model, error, name, *texts)
    assert_shards_correctly(model, mesh8)


def test_an_integer_reshard_after_forward_with_mesh_dims_is_refused(mesh8):
    model = make_net()
    assert_refuses(
        lambda: fully_shard(
            model,
            mesh=mesh8,
            reshard_after_forward=2,
            dp_mesh_dims=DataParallelMeshDims("fsdp"),
        ),
        model,
        NotImplementedError,
        "reshard_after_forward",
        "dp_mesh_dims",
    )
    assert_shards_correctly(model, mesh8)


@pytest.mark.parametrize("shape", ["one", "list"])
def test_modules_as_ignored_params_are_refused_by_name(mesh8, shape):
    model = make_net()
    given = model.blocks[0] if shape == "one" else [model.blocks[0]]
    assert_refuses(
        lambda: fully_shard(model, mesh=mesh8, ignored_params=given),
        model,
        TypeError,
        "ignored_params",
    )
    assert_shards_correctly(model, mesh8)


def test_variables_and_filters_in_one_list_are_refused_by_name(mesh8):
    model = make_net()
    mixed = [model.norm.scale, nnx.PathContains("norm")]
    assert_refuses(
        lambda: fully_shard(model, mesh=mesh8, ignored_params=mixed),
        model,
        TypeError,
        "ignored_params",
        "PathContains",
    )
    assert_shards_correctly(model, mesh8)


@pytest.mark.parametrize("mesh_kind", ["three axes", "devices", "str"])
def test_a_bad_mesh_is_refused_by_name(mesh8, mesh_kind):
    model = make_net()
    cases: dict[str, tuple[Any, type[Exception]]] = {
        "three axes": (
            Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c")),
            ValueError,
        ),
        "devices": (jax.devices(), TypeError),
        "str": ("fsdp", TypeError),
    }
    mesh, error = cases[mesh_kind]
    assert_refuses(
        lambda: fully_shard(model, mesh=mesh),
        model,
        error,
        "mesh",
    )
    assert_shards_correctly(model, mesh8)


PLACEMENTS: list[tuple[str, Callable, type[Exception], list[str]]] = [
    ("an int", lambda p: 1, ValueError, ["returned 1", "Shard(dim)"]),
    ("a str", lambda p: "rows", ValueError, ["'rows'"]),
    ("a class", lambda p: Shard, ValueError, ["Shard"]),
    ("dim 1 of a vector", lambda p: Shard(1), ValueError, ["(8,)", "Shard(dim=1)"]),
    ("dim -2 of a vector", lambda p: Shard(-2), ValueError, ["(8,)", "Shard(dim=-2)"]),
]


@pytest.mark.parametrize(
    ("place", "error", "texts"),
    [case[1:] for case in PLACEMENTS],
    ids=[case[0] for case in PLACEMENTS],
)
def test_a_bad_placement_is_refused_with_the_parameter(mesh8, place, error, texts):
    model = make_net()

    def last_only(param: nnx.Variable) -> Any:
        return place(param) if param is model.blocks[1].scale else None

    assert_refuses(
        lambda: fully_shard(model, mesh=mesh8, shard_placement_fn=last_only),
        model,
        error,
        "shard_placement_fn",
        "'blocks.1.scale'",
        *texts,
    )
    assert_shards_correctly(model, mesh8)


def test_a_placement_on_a_dim_that_does_not_divide_is_refused(mesh8):
    module = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    for dim in (1, -1):
        assert_refuses(
            lambda dim=dim: fully_shard(
                module,
                mesh=mesh8,
                shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None,
            ),
            module,
            NotImplementedError,
            "shard_placement_fn",
            "'kernel'",
            "(8, 3)",
            "8 devices",
        )
    assert local_shape(fully_shard(module, mesh=mesh8).kernel) == (1, 3)


@pytest.mark.parametrize("name", ["shard_placement_fn", "ignored_params"])
def test_an_error_in_the_users_function_leaves_the_module_alone(mesh8, name):
    model = make_net()
    kwargs: Any = {name: fails}
    assert_refuses(
        lambda: fully_shard(model, mesh=mesh8, **kwargs),
        model,
        LookupError,
        "in the user's function",
    )
    assert_shards_correctly(model, mesh8)


# --- bad modules ------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["x", None, 3, nnx.Linear, jnp.ones((8,)), {"a": 1}, nnx.Param(jnp.ones((8,)))],
    ids=["str", "None", "int", "class", "array", "dict", "Variable"],
)
def test_what_is_no_module_is_refused(mesh8, value):
    with pytest.raises(TypeError, match=r"fully_shard: module must be an nnx\.Module"):
        fully_shard(value, mesh=mesh8)
    model = make_net()
    assert_refuses(
        lambda: fully_shard([model, value], mesh=mesh8),
        model,
        TypeError,
        "module 1 of the list",
        "nnx.Module",
    )


def test_an_empty_list_is_refused(mesh8):
    for empty in ([], ()):
        with pytest.raises(ValueError, match="list of modules is empty"):
            fully_shard(empty, mesh=mesh8)


def test_a_container_that_is_never_called_is_refused(mesh8):
    model = make_net()
    assert_refuses(
        lambda: fully_shard(model.blocks, mesh=mesh8),
        model,
        ValueError,
        "nnx.List",
        "Shard each item",
    )
    named = nnx.Dict(a=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    assert_refuses(
        lambda: fully_shard(named, mesh=mesh8), named, ValueError, "nnx.Dict"
    )
    assert_shards_correctly(model, mesh8)


def test_a_list_with_a_container_in_it_is_refused(mesh8):
    model = make_net()
    assert_refuses(
        lambda: fully_shard([model, model.blocks], mesh=mesh8),
        model,
        ValueError,
        "module 1 of the list",
        "nnx.List",
    )
    assert_shards_correctly(model, mesh8)


APPLIED = "fully_shard has already been applied"


def test_a_second_application_is_refused(mesh8):
    model = make_net()
    fully_shard(model, mesh=mesh8)
    assert_refuses(
        lambda: fully_shard(model, mesh=mesh8),
        model,
        RuntimeError,
        APPLIED,
        "NetFSDPModule",
    )
    np.testing.assert_allclose(model(INPUTS), make_net()(INPUTS), rtol=1e-5, atol=1e-6)


def test_a_list_with_one_module_twice_is_refused(mesh8):
    model = make_net()
    first = model.blocks[0]
    assert_refuses(
        lambda: fully_shard([first, model.blocks[1], first], mesh=mesh8),
        model,
        RuntimeError,
        APPLIED,
        "module 2 of the list",
    )
    assert_shards_correctly(model, mesh8)


def test_a_list_with_a_sharded_module_leaves_the_others_alone(mesh8):
    model = make_net()
    fully_shard(model.blocks[0], mesh=mesh8)
    assert_refuses(
        lambda: fully_shard([model.blocks[1], model.blocks[0]], mesh=mesh8),
        model,
        RuntimeError,
        APPLIED,
        "module 1 of the list",
    )
    assert type(model.blocks[1]) is Inner
    assert_shards_correctly(model, mesh8)


def test_the_outer_module_first_is_refused(mesh8):
    model = make_net()
    fully_shard(model, mesh=mesh8)
    inner = model.blocks[1].linear
    assert_refuses(
        lambda: fully_shard(inner, mesh=mesh8),
        model,
        RuntimeError,
        "'blocks.1.linear.",
        "bottom-up",
    )
    assert_refuses(
        lambda: fully_shard(list(model.blocks), mesh=mesh8),
        model,
        RuntimeError,
        "'blocks.0.",
        "bottom-up",
    )
    np.testing.assert_allclose(model(INPUTS), make_net()(INPUTS), rtol=1e-5, atol=1e-6)


# --- bad parameters ---------------------------------------------------------------


BAD_VALUES = {
    "number": (2.0, ["float", "ignored_params"]),
    "list": ([1.0, 2.0], ["list", "ignored_params"]),
    "text": ("two", ["str", "ignored_params"]),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_a_parameter_that_cannot_be_cut_is_refused_with_its_path(mesh8, kind):
    value, texts = BAD_VALUES[kind]
    model = make_net()
    model.blocks[1].scale = nnx.Param(value)
    for whole in (model, [model.blocks[0], model.blocks[1]], [model, model.blocks[0]]):
        path = "'scale'" if whole is not model and model not in whole else "1.scale'"
        assert_refuses(
            lambda whole=whole: fully_shard(whole, mesh=mesh8),
            model,
            ValueError,
            path,
            *texts,
        )
    model.blocks[1].scale = nnx.Param(jnp.full((8,), 2.0))
    assert_shards_correctly(model, mesh8)


def tie(model: Any) -> None:
    model.blocks[1].scale = model.blocks[0].scale


def test_a_parameter_tied_to_an_earlier_group_is_refused_with_both_paths(mesh8):
    model = make_net()
    tie(model)
    fully_shard(model.blocks[0], mesh=mesh8)
    assert_refuses(
        lambda: fully_shard(model, mesh=mesh8),
        model,
        ValueError,
        "'blocks.1.scale'",
        "'blocks.0.scale'",
        "shard only a module that contains both",
    )
    assert_refuses(
        lambda: fully_shard(model.blocks[1], mesh=mesh8),
        model,
        ValueError,
        "'scale'",
        "contains both",
    )
    model.blocks[1].scale = nnx.Param(jnp.full((8,), 2.0))
    assert_shards_correctly(model, mesh8)


def test_a_parameter_tied_across_the_modules_of_a_list_is_refused(mesh8):
    model = make_net()
    tie(model)
    for modules in (list(model.blocks), [model, model.blocks[0]]):
        assert_refuses(
            lambda modules=modules: fully_shard(modules, mesh=mesh8),
            model,
            ValueError,
            "scale'",
            "tied",
            "contains both",
        )
    fully_shard(model, mesh=mesh8)
    assert model.blocks[0].scale is model.blocks[1].scale
    np.testing.assert_allclose(model(INPUTS), make_net()(INPUTS), rtol=1e-5, atol=1e-6)


# --- failures half way ------------------------------------------------------------


class FinalMeta(type(nnx.Module)):
    """A metaclass whose classes have no subclasses."""

    def __new__(mcs, name: str, bases: Any, namespace: Any, **kwargs: Any) -> Any:
        if any(isinstance(base, FinalMeta) for base in bases):
            raise TypeError(f"{bases[-1].__name__} cannot be subclassed")
        return super().__new__(mcs, name, bases, namespace, **kwargs)


class Final(nnx.Module, metaclass=FinalMeta):
    """A module whose class refuses to be subclassed."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def test_a_class_that_cannot_be_subclassed_leaves_everything_as_it_was(mesh8):
    module: Any = Final(nnx.Rngs(0))
    assert_refuses(
        lambda: fully_shard(module, mesh=mesh8), module, TypeError, "subclassed"
    )
    model = make_net()
    model.blocks.append(module)
    assert_refuses(
        lambda: fully_shard([*model.blocks, model], mesh=mesh8),
        model,
        TypeError,
        "subclassed",
    )
    del model.blocks[2]
    assert_shards_correctly(model, mesh8)


@pytest.mark.parametrize("place", ["parameter", "statistic"])
def test_an_array_that_was_deleted_leaves_everything_as_it_was(mesh8, place):
    model = make_net()
    holder = model.blocks[1].scale if place == "parameter" else model.norm.mean
    value = np.asarray(holder[...])
    holder[...].delete()
    assert_refuses(
        lambda: fully_shard([*model.blocks, model], mesh=mesh8),
        model,
        RuntimeError,
        "deleted",
    )
    holder.set_value(jnp.asarray(value))
    assert_shards_correctly(model, mesh8)


def test_a_failed_call_keeps_the_shardings_that_parameters_had(mesh8):
    model = make_net()
    earlier = jax.sharding.NamedSharding(
        helpers.mesh_of(4), jax.sharding.PartitionSpec(None, "fsdp")
    )
    kernel = model.blocks[0].linear.kernel
    kernel[...] = jax.device_put(kernel[...], earlier)
    model.blocks.append(Final(nnx.Rngs(0)))
    assert_refuses(
        lambda: fully_shard([*model.blocks, model], mesh=mesh8),
        model,
        TypeError,
        "subclassed",
    )
    assert kernel[...].sharding == earlier


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_variables_of_other_kinds_are_refused_by_name(mesh8, kind):
    with nnx.var_defaults(**{kind: True}):
        module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    classes = type(module), type(module.kernel)
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    for refused in (
        lambda: fully_shard([Inner(nnx.Rngs(0)), module], mesh=mesh8),
        lambda: fsdp_jax.shard_map(lambda a, b: None)(model, module),
    ):
        with pytest.raises(TypeError, match=rf"'bias' was made with {kind}=True"):
            refused()
    assert (type(module), type(module.kernel)) == classes


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_a_default_for_other_kinds_does_not_reach_what_is_sharded(mesh8, kind):
    def step(model: Any, x: Any) -> Any:
        model = fully_shard(model, mesh=mesh8) if sharded else model
        wrt: Any = {} if sharded else {"wrt": nnx.Param}
        make = fsdp_jax.Optimizer if sharded else nnx.Optimizer
        grad = fsdp_jax.grad if sharded else nnx.grad
        optimizer = make(model, optax.adam(0.1, eps=1e-3), **wrt)
        optimizer.update(model, grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x))
        return model

    sharded = False
    expected = step(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), INPUTS)
    model, sharded = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), True
    with nnx.var_defaults(**{kind: True}):
        helpers.assert_trees_close(step(model, INPUTS), expected)
