"""Models that are sharded before they have values, or made sharded inside jit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import FSDPModule, fully_shard, local_shape
from tests import helpers


class Model(nnx.Module):
    """A layer, a norm, a dropout and a head: 16 in, 8 out, four kinds of state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(16, 24, rngs=rngs)])
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.head = nnx.Linear(24, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(jnp.tanh(self.norm(self.layers[0](x)))))


def make() -> Model:
    return Model(nnx.Rngs(0))


def make_sharded(mesh: Mesh) -> Any:
    return helpers.shard_blocks(make(), mesh=mesh)


def born_in_jit(mesh: Mesh) -> Any:
    return nnx.jit(lambda: make_sharded(mesh))()


def born_abstract(mesh: Mesh) -> Any:
    return helpers.shard_blocks(nnx.eval_shape(make), mesh=mesh)


def abstract_of_sharded(mesh: Mesh) -> Any:
    return nnx.eval_shape(lambda: make_sharded(mesh))


def arrays_of(model: Any) -> dict[str, Any]:
    """Dotted names to raw values, keys as their data."""
    named = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_raw_value()
        if isinstance(value, jax.Array) and jnp.issubdtype(
            value.dtype, jax.dtypes.prng_key
        ):
            value = jax.random.key_data(value)
        named[".".join(map(str, path))] = value
    return named


def assert_bit_equal(model: Any, expected: Any) -> None:
    got, want = arrays_of(model), arrays_of(expected)
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
        assert got[name].dtype == value.dtype


def assert_at_rest(model: Any, mesh: Mesh) -> None:
    """Every parameter is cut, everything else is whole on the mesh."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_raw_value()
        cut = isinstance(variable, nnx.Param)
        spec = PartitionSpec("fsdp") if cut else PartitionSpec()
        target = NamedSharding(mesh, spec)
        assert value.sharding.is_equivalent_to(target, value.ndim), path


def host_state(seed_model: Any) -> dict[str, np.ndarray]:
    """Parameters and statistics as full host arrays."""
    state = nnx.state(seed_model, nnx.Any(nnx.Param, nnx.BatchStat))
    return {
        ".".join(map(str, path)): np.asarray(variable.get_raw_value())
        for path, variable in nnx.to_flat_state(state)
    }


def assert_trains(model: Any, reference: Any) -> None:
    """Two steps as the unsharded model takes them."""
    for m in (model, reference):
        m.norm.use_running_average = True
    batch = helpers.regression_batch(8)
    expected = helpers.train(
        reference, nnx.value_and_grad, helpers.mean_square, batch, steps=2
    )
    losses = helpers.train(
        model,
        fsdp_jax.value_and_grad,
        helpers.mean_square,
        batch,
        steps=2,
        make_optimizer=lambda m: fsdp_jax.Optimizer(m, optax.adamw(1e-2, eps=1e-3)),
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    params = [nnx.state(m, nnx.Param) for m in (model, reference)]
    helpers.assert_trees_close(*params)


# --- made inside jit --------------------------------------------------------------


@pytest.mark.parametrize(
    ("birth", "num_devices"),
    [(make_sharded, 1), (born_in_jit, 1), (make_sharded, 8), (born_in_jit, 8)],
)
def test_values_do_not_depend_on_the_number_of_devices_or_on_jit(num_devices, birth):
    mesh = helpers.mesh_of(num_devices)
    model = birth(mesh)
    assert_bit_equal(model, make())
    assert_at_rest(model, mesh)


def test_made_inside_jit_it_is_the_eager_model(mesh8):
    model, eager = born_in_jit(mesh8), make_sharded(mesh8)
    assert type(model) is type(eager)
    assert type(model.layers[0]) is type(eager.layers[0])
    assert isinstance(model.layers[0], FSDPModule)
    assert nnx.graphdef(model) == nnx.graphdef(eager)
    assert fsdp_jax.describe(model) == fsdp_jax.describe(eager)
    assert local_shape(model.head.kernel) == (3, 8)
    assert_trains(model, make())


def test_made_inside_jit_no_output_is_whole(mesh8):
    compiled = nnx.jit(lambda: make_sharded(mesh8)).lower().lowered.compile()
    sizes = [x.nbytes for x in arrays_of(make()).values()]
    analysis: Any = compiled.memory_analysis()
    assert analysis.output_size_in_bytes < sum(sizes) / 4


def test_made_inside_jit_over_the_default_mesh():
    model = nnx.jit(lambda: fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0))))()
    assert local_shape(model.kernel) == (2, 8)
    assert model.kernel.get_raw_value().sharding.device_set == set(jax.devices())
    reference = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    assert_bit_equal(model, reference)


def test_made_inside_jit_on_explicit_axes():
    mesh = jax.make_mesh((8,), ("fsdp",))
    with jax.set_mesh(mesh):  # jit without arguments takes its devices from here
        model = born_in_jit(mesh)
    # The same draws, which the compiler may round otherwise.
    helpers.assert_trees_close(model, make(), atol=1e-7)
    assert_at_rest(model, mesh)


def test_inside_jit_the_ambient_mesh_must_be_passed(mesh8):
    def birth(mesh: Mesh | None) -> Any:
        return fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=mesh)

    with jax.set_mesh(mesh8):
        with pytest.raises(ValueError, match="fully_shard: inside jit .* Pass mesh="):
            nnx.jit(lambda: birth(None))()
        assert local_shape(nnx.jit(lambda: birth(mesh8))().kernel) == (2, 8)


def test_a_model_that_is_passed_into_jit_is_not_half_sharded(mesh8):
    model = make()
    with pytest.raises(ValueError, match="ModelFSDPModule"):
        nnx.jit(lambda m: fully_shard(m, mesh=mesh8) and None)(model)
    assert not isinstance(model, FSDPModule)
    assert_bit_equal(model, make())
    assert_bit_equal(helpers.shard_blocks(model, mesh=mesh8), make())


# --- made without values ----------------------------------------------------------


def load_by_update(model: Any, values: dict[str, np.ndarray]) -> None:
    flat = {
        path: values[".".join(map(str, path))]
        for path, _ in nnx.to_flat_state(nnx.state(model))
        if ".".join(map(str, path)) in values
    }
    nnx.update(model, nnx.from_flat_state(flat))


def load_by_state_update(model: Any, values: dict[str, np.ndarray]) -> None:
    source: Any = make()
    source.head.bias[...] = values["head.bias"]
    nnx.update(model, nnx.state(source, nnx.Any(nnx.Param, nnx.BatchStat)))


def load_by_state_dict(model: Any, values: dict[str, np.ndarray]) -> None:
    model.load_state_dict(values, strict=False)


def load_by_assignment(model: Any, values: dict[str, np.ndarray]) -> None:
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    for path, variable in variables.items():
        name = ".".join(map(str, path))
        if name in values:
            variable.set_value(jnp.asarray(values[name]))
    nnx.update(model, nnx.from_flat_state(variables))


LOADS = [load_by_update, load_by_state_update, load_by_state_dict, load_by_assignment]


def test_sharding_an_abstract_model_makes_no_arrays(mesh8):
    model = born_abstract(mesh8)
    for name, value in arrays_of(model).items():
        assert isinstance(value, jax.ShapeDtypeStruct), name
    assert type(model).__name__ == "ModelFSDPModule"
    assert local_shape(model.head.kernel) == (3, 8)
    target = model.head.kernel.get_raw_value().sharding
    assert target == NamedSharding(mesh8, PartitionSpec("fsdp"))


def test_an_abstract_copy_of_a_sharded_model_knows_its_shardings(mesh8):
    model = abstract_of_sharded(mesh8)
    assert fsdp_jax.describe(model) == fsdp_jax.describe(make_sharded(mesh8))
    assert local_shape(model.head.kernel) == (3, 8)


@pytest.mark.parametrize(
    ("birth", "load"),
    [*((born_abstract, load) for load in LOADS), (abstract_of_sharded, LOADS[0])],
)
def test_values_loaded_into_an_abstract_model_land_as_shards(mesh8, birth, load):
    source: Any = make()
    source.head.bias[...] = jnp.arange(8.0)
    model = birth(mesh8)
    load(model, host_state(source))
    values = arrays_of(model)
    for name, value in host_state(source).items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)
        if name.startswith(("layers", "head")):
            spec = PartitionSpec("fsdp")
            assert values[name].sharding == NamedSharding(mesh8, spec), name


@pytest.mark.parametrize("load", [load_by_update, load_by_state_dict])
def test_a_loaded_model_runs_like_the_unsharded_one(mesh8, load):
    model = born_abstract(mesh8)
    load(model, host_state(make()))
    reference = make()
    x, _ = helpers.regression_batch(8)
    for m in (model, reference):
        m.norm.use_running_average = True
    np.testing.assert_allclose(model(x), reference(x), rtol=1e-5, atol=1e-6)


def test_a_loaded_model_trains_like_the_unsharded_one(mesh8):
    model = born_abstract(mesh8)
    load_by_state_dict(model, host_state(make()))
    nnx.update(model, nnx.state(make(), nnx.RngState))
    assert_trains(model, make())


def test_values_of_a_sharded_model_can_be_loaded(mesh8):
    source = make_sharded(mesh8)
    model = born_abstract(mesh8)
    model.load_state_dict(source.state_dict())
    assert_bit_equal(model, make())
    assert_at_rest(model, mesh8)


def test_a_wrong_shape_is_refused_and_nothing_is_loaded(mesh8):
    model = born_abstract(mesh8)
    values = host_state(make()) | {"head.kernel": np.ones((3, 8), np.float32)}
    with pytest.raises(ValueError, match=r"'head.kernel' has shape \(3, 8\).*\(24, 8"):
        model.load_state_dict(values, strict=False)
    for name, value in arrays_of(model).items():
        assert isinstance(value, jax.ShapeDtypeStruct), name


# --- use before there are values --------------------------------------------------


def call_root(model: Any, x: jax.Array) -> Any:
    return model(x)


def differentiate(model: Any, x: jax.Array) -> Any:
    return fsdp_jax.value_and_grad(lambda m, x: m(x).mean())(model, x)


def run_per_device(model: Any, x: jax.Array) -> Any:
    return fsdp_jax.shard_map(lambda m, x: m(x))(model, x)


def unshard_root(model: Any, x: jax.Array) -> Any:
    return model.unshard()


@pytest.mark.parametrize(
    "use", [call_root, differentiate, run_per_device, unshard_root]
)
def test_use_without_values_raises_naming_the_parameters(mesh8, use):
    model = born_abstract(mesh8)
    x, _ = helpers.regression_batch(8)
    with pytest.raises(RuntimeError, match=r"(?s)head\.bias.*head\.kernel.*abstract"):
        use(model, x)
    load_by_update(model, host_state(make()))
    if use is not unshard_root:
        model.norm.use_running_average = True
        reference = make()
        reference.norm.use_running_average = True
        np.testing.assert_allclose(model(x), reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use", [call_root, differentiate, run_per_device])
def test_only_parameters_without_values_are_named(mesh8, use):
    model = born_abstract(mesh8)
    values = host_state(make())
    del values["head.bias"]
    load_by_state_dict(model, values)
    x, _ = helpers.regression_batch(8)
    with pytest.raises(RuntimeError, match="abstract") as caught:
        use(model, x)
    assert "head.bias" in str(caught.value)
    assert "head.kernel" not in str(caught.value)


@pytest.mark.parametrize("use", [call_root, differentiate, run_per_device])
def test_statistics_without_values_are_named_too(mesh8, use):
    model = born_abstract(mesh8)
    values = host_state(make())
    del values["norm.mean"]
    load_by_state_dict(model, values)
    x, _ = helpers.regression_batch(8)
    with pytest.raises(RuntimeError, match=r"(?s)norm\.mean.*abstract"):
        use(model, x)


def test_an_inner_module_without_values_names_its_own_parameters(mesh8):
    model = born_abstract(mesh8)
    values = {k: v for k, v in host_state(make()).items() if "layers" not in k}
    load_by_state_dict(model, values)
    x, _ = helpers.regression_batch(8)
    uses: list[Callable] = [call_root, differentiate]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"bias.*kernel.*abstract.*load_state"):
            use(model, x)


def test_a_model_can_be_saved_from_and_described_without_values(mesh8):
    model = born_abstract(mesh8)
    for name, value in model.state_dict().items():
        assert isinstance(value, jax.ShapeDtypeStruct), name
    assert "ShapeDtypeStruct" in repr(model)
    assert fsdp_jax.describe(model).bytes_per_device > 0
