"""Pickling, cloning and copying of sharded modules."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import fsdp_jax
from fsdp_jax import (
    FSDPModule,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    local_shape,
    register_fsdp_forward_method,
)
from tests import helpers
from tests.flags import xla_flags

ROOT = Path(__file__).parent.parent
PICKLERS = pytest.mark.parametrize(
    "pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"]
)


class Net(nnx.Module):
    """Parameters, running statistics and random streams; an extra method."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.drop(self.norm(self.up(x))))

    def encode(self, x: jax.Array) -> jax.Array:
        return self.up(x)


def sharded_net(mesh: Mesh, **kwargs: Any) -> Any:
    """A `Net` in two groups."""
    model = Net(nnx.Rngs(0))
    fully_shard(model.up, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def inputs() -> jax.Array:
    return helpers.regression_batch()[0]


def round_trip(model: Any, pickler: Any = pickle) -> Any:
    return pickle.loads(pickler.dumps(model))


def assert_same_model(found: Any, expected: Any) -> None:
    """Check classes, groups, shardings and values, and that nothing is shared."""
    assert type(found) is type(expected)
    assert describe(found) == describe(expected)
    mine, theirs = (nnx.to_flat_state(nnx.state(m)) for m in (found, expected))
    assert [path for path, _ in mine] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(mine, theirs):
        assert type(a) is type(b), path
        assert a is not b, path
        assert a[...].sharding == b[...].sharding, path
        assert a[...].dtype == b[...].dtype, path
    helpers.assert_trees_close(found, expected, rtol=0, atol=0)


# --- pickling ---------------------------------------------------------------------


@PICKLERS
def test_a_sharded_model_survives_pickling(mesh8, pickler):
    model = sharded_net(mesh8)
    again = round_trip(model, pickler)
    assert_same_model(again, model)
    assert type(again.up) is type(model.up)
    np.testing.assert_array_equal(again(inputs()), model(inputs()))
    helpers.assert_trees_close(again, model, rtol=0, atol=0)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_that_flax_supports_works(mesh8, protocol):
    model = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    assert_same_model(pickle.loads(pickle.dumps(model, protocol)), model)


def test_the_generated_classes_pickle_by_name(mesh8):
    model = sharded_net(mesh8)
    for cls in (type(model), type(model.up), type(model.up.kernel)):
        assert round_trip(cls) is cls


def test_a_copy_is_independent_of_the_original(mesh8):
    model = sharded_net(mesh8)
    again = round_trip(model)
    again.up.kernel[...] = jnp.zeros((16, 32))
    assert float(jnp.abs(model.up.kernel[...]).sum()) > 1
    assert local_shape(again.up.kernel) == (2, 32)
    again.unshard()
    assert local_shape(model.norm.scale) == (4,)


def test_settings_and_registered_methods_survive_pickling(mesh8):
    policy = MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, output_dtype=jnp.float16, cast_forward_inputs=False
    )
    model = sharded_net(mesh8, reshard_after_forward=2, mp_policy=policy)
    register_fsdp_forward_method(model, "encode")
    again = round_trip(model)
    assert nnx.graphdef(again) == nnx.graphdef(model)
    assert again.encode(inputs()).dtype == jnp.float16
    assert local_shape(again.down.kernel) == (32, 8)
    assert again(inputs()).dtype == jnp.float16
    assert local_shape(again.down.kernel) == (4, 8)


def test_the_graphdef_of_a_pickled_model_is_the_one_of_the_original(mesh8):
    model = sharded_net(mesh8)
    assert nnx.graphdef(round_trip(model)) == nnx.graphdef(model)
    assert hash(nnx.graphdef(round_trip(model))) == hash(nnx.graphdef(model))


def test_a_pickled_model_has_the_gradients_of_the_original(mesh8, mlp):
    model = helpers.shard_blocks(mlp, mesh=mesh8)
    again = round_trip(model)
    step = fsdp_jax.value_and_grad(helpers.mean_square)
    batch = helpers.regression_batch()
    found, expected = (nnx.jit(step)(m, *batch) for m in (again, model))
    np.testing.assert_array_equal(found[0], expected[0])
    helpers.assert_trees_close(found[1], expected[1], rtol=0, atol=0)
    for grad, param in zip(jax.tree.leaves(found[1]), jax.tree.leaves(nnx.state(mlp))):
        assert grad.sharding.is_equivalent_to(param.sharding, grad.ndim)


def test_tied_parameters_are_still_tied(mesh8):
    layers = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))
    model: Any = nnx.Sequential(*layers)
    model.layers[1].kernel = model.layers[0].kernel
    fully_shard(model, mesh=mesh8)
    again = round_trip(model)
    assert again.layers[0].kernel is again.layers[1].kernel
    assert_same_model(again, model)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_survives_with_its_order_and_kind_of_axis(kind):
    mesh = Mesh(np.array(jax.devices()[:4][::-1]), ("data",), axis_types=(kind,))
    model = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=mesh)
    again = round_trip(model)
    assert_same_model(again, model)
    np.testing.assert_array_equal(again(inputs()), model(inputs()))


def test_an_unsharded_model_comes_back_in_a_consistent_state(mesh8):
    model = sharded_net(mesh8)
    model.unshard()
    again = round_trip(model)
    assert local_shape(model.down.kernel) == (32, 8)
    again.unshard()
    assert local_shape(again.down.kernel) == (32, 8)
    again.reshard()
    assert local_shape(again.down.kernel) == (4, 8)
    expected = sharded_net(mesh8)(inputs())
    np.testing.assert_allclose(again(inputs()), expected, rtol=1e-5, atol=1e-6)


def test_a_model_with_a_started_gather_can_be_pickled(mesh8):
    model = sharded_net(mesh8)
    handle = model.unshard(async_op=True)
    again = round_trip(model)
    handle.wait()
    model.reshard()
    assert_same_model(again, model)


def test_a_plain_module_that_contains_sharded_ones_can_be_pickled(mesh8, mlp):
    fully_shard(mlp.layers[1], mesh=mesh8)
    again = round_trip(mlp)
    assert type(again) is helpers.MLP
    assert type(again.layers[1]) is type(mlp.layers[1])
    assert local_shape(again.layers[1].kernel) == (4, 16)
    helpers.assert_trees_close(again, mlp, rtol=0, atol=0)


def test_the_state_of_a_sharded_model_can_be_pickled(mesh8):
    model = sharded_net(mesh8)
    state = round_trip(nnx.state(model, nnx.Param))
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(state), nnx.to_flat_state(nnx.state(model, nnx.Param))
    ):
        assert a[...].sharding == b[...].sharding, path
        np.testing.assert_array_equal(a[...], b[...])


def test_an_abstract_model_can_be_pickled(mesh8):
    model = nnx.eval_shape(lambda: helpers.MLP(nnx.Rngs(0)))
    fully_shard(model, mesh=mesh8)
    again = round_trip(model)
    assert type(again) is type(model)
    kernel = again.layers[0].kernel.get_raw_value()
    assert kernel.shape == (16, 32)
    assert local_shape(again.layers[0].kernel) == (2, 32)
    nnx.update(again, nnx.state(helpers.MLP(nnx.Rngs(0))))
    assert local_shape(again.layers[0].kernel) == (2, 32)


def test_a_class_made_inside_a_function_can_be_cloudpickled(mesh8):
    model = make_local(mesh8)
    again = round_trip(model, cloudpickle)
    assert type(again) is type(model)
    np.testing.assert_array_equal(again(inputs()), model(inputs()))


def test_a_class_with_a_metaclass_of_its_own_can_be_cloudpickled(mesh8):
    class Meta(type(nnx.Module)):
        pass

    class Marked(nnx.Module, metaclass=Meta):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((8,)))

        def __call__(self) -> jax.Array:
            return self.w[...] * 2

    model = fully_shard(Marked(), mesh=mesh8)
    again = round_trip(model, cloudpickle)
    assert type(again) is type(model)
    assert local_shape(again.w) == (1,)


def test_a_model_that_is_being_traced_is_refused_by_name(mesh8):
    model = sharded_net(mesh8)

    @nnx.jit
    def program(model: Any, x: jax.Array) -> jax.Array:
        with pytest.raises(RuntimeError, match=r"parameter '[\w.]+' is being traced"):
            pickle.dumps(model)
        return x

    program(model, jnp.ones(()))


# --- in another process -----------------------------------------------------------


def make_local(mesh: Mesh) -> Any:
    """A sharded model of a class that no other process can import."""

    class Local(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(16, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(self.layer(x))

    return fully_shard(Local(nnx.Rngs(0)), mesh=mesh)


LOADER = """
import json, pickle, sys
import jax.numpy as jnp

report = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        data = file.read()
    try:
        model, again = pickle.loads(data), pickle.loads(data)
    except RuntimeError as error:
        report.append({"error": str(error)})
        continue
    from fsdp_jax import FSDPModule, describe

    before = {row.path: row.local_shape for row in describe(model).rows}
    x = jnp.linspace(-1, 1, 128).reshape(8, 16)
    if hasattr(model, "encode"):
        model.encode(x)
    encoded = {row.path: row.local_shape for row in describe(model).rows}
    output = model(x)
    model.reset_iter_state()
    report.append({
        "name": type(model).__name__,
        "is_fsdp": isinstance(model, FSDPModule),
        "one_class": type(model) is type(again),
        "groups": sorted({row.group for row in describe(model).rows}),
        "before": before,
        "encoded": encoded,
        "after": {row.path: row.local_shape for row in describe(model).rows},
        "output": output.tolist(),
    })
print(json.dumps(report))
"""


def load_elsewhere(num_devices: int, *files: Path) -> list[dict[str, Any]]:
    """Unpickle and use models in a fresh process with that many devices."""
    env = {**os.environ, "XLA_FLAGS": xla_flags(num_devices), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADER, *map(str, files)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_fresh_process_loads_and_uses_pickled_models(mesh8, tmp_path):
    models = [sharded_net(mesh8, reshard_after_forward=False), make_local(mesh8)]
    register_fsdp_forward_method(models[0], "encode")
    files = [tmp_path / "net.pickle", tmp_path / "local.pickle"]
    for model, file, pickler in zip(models, files, (pickle, cloudpickle)):
        file.write_bytes(pickler.dumps(model))
    loaded = load_elsewhere(8, *files)
    full = {row.path: list(row.shape) for row in describe(models[0]).rows}
    assert loaded[0]["encoded"] == full
    x = jnp.linspace(-1, 1, 128).reshape(8, 16)
    for model, found in zip(models, loaded, strict=True):
        shapes = {row.path: list(row.local_shape) for row in describe(model).rows}
        assert found["name"] == type(model).__name__
        assert found["is_fsdp"]
        assert found["one_class"]
        assert found["groups"] == sorted({row.group for row in describe(model).rows})
        assert found["before"] == found["after"] == shapes
        np.testing.assert_allclose(found["output"], model(x), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_process_with_fewer_devices_says_what_to_do_instead(mesh8, tmp_path):
    small = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(2))
    files = [tmp_path / "net.pickle", tmp_path / "small.pickle"]
    files[0].write_bytes(pickle.dumps(sharded_net(mesh8)))
    files[1].write_bytes(pickle.dumps(small))
    refused, loaded = load_elsewhere(2, *files)
    assert "8 devices" in refused["error"]
    assert "[2, 3, 4, 5, 6, 7]" in refused["error"]
    assert "state_dict" in refused["error"]
    assert loaded["name"] == "LinearFSDPModule"
    assert loaded["after"] == {"bias": [4], "kernel": [8, 8]}


# --- copying ----------------------------------------------------------------------


def test_deepcopy_is_refused_and_the_error_names_what_works(mesh8):
    model = sharded_net(mesh8)
    for copied in (model, [model], {"models": (model.up,)}):
        with pytest.raises(RuntimeError, match="deepcopy") as caught:
            copy.deepcopy(copied)
        for remedy in ("state_dict()", "nnx.state", "nnx.clone"):
            assert remedy in str(caught.value)
    assert_same_model(nnx.clone(model), model)


def test_a_shallow_copy_shares_its_parameters(mesh8):
    model = sharded_net(mesh8)
    again = copy.copy(model)
    assert type(again) is type(model)
    assert again is not model
    assert again.up is model.up
    assert again.down.kernel is model.down.kernel


# --- NNX's own functions ----------------------------------------------------------


def test_split_and_merge_keep_class_groups_and_shardings(mesh8):
    model = sharded_net(mesh8)
    graphdef, state = nnx.split(model)
    again = nnx.merge(graphdef, state)
    assert type(again) is type(model)
    assert describe(again) == describe(model)
    for path, variable in nnx.to_flat_state(nnx.state(again)):
        value = dict(nnx.to_flat_state(nnx.state(model)))[path][...]
        assert variable[...].sharding == value.sharding
    np.testing.assert_array_equal(again(inputs()), sharded_net(mesh8)(inputs()))


def test_split_by_type_finds_parameters_and_the_rest(mesh8):
    model = sharded_net(mesh8)
    graphdef, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    assert len(jax.tree.leaves(params)) == 6
    assert len(jax.tree.leaves(stats)) == 2
    assert type(nnx.merge(graphdef, params, stats, rest)) is type(model)


def test_clone_makes_an_independent_sharded_model(mesh8):
    model = sharded_net(mesh8)
    again = nnx.clone(model)
    assert_same_model(again, model)
    again.unshard()
    assert local_shape(model.down.kernel) == (4, 8)
    assert local_shape(again.down.kernel) == (32, 8)


def test_jit_sees_and_returns_the_class(mesh8):
    model, seen = sharded_net(mesh8), []

    @nnx.jit
    def program(model: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        seen.append((type(model), type(model.up)))
        return model(x), nnx.clone(model)

    output, again = program(model, inputs())
    assert set(seen) == {(type(model), type(model.up))}
    assert type(again) is type(model)
    assert_same_model(again, model)
    assert output.shape == (16, 8)


@pytest.mark.parametrize("transform", ["grad", "remat", "eval_shape", "cond"])
def test_nnx_transforms_see_the_class(mesh8, mlp, transform):
    model, seen = helpers.shard_blocks(mlp, mesh=mesh8), []

    def loss(model: Any, x: jax.Array) -> jax.Array:
        seen.append((type(model), type(model.layers[0])))
        return jnp.mean(model(x) ** 2)

    programs = {
        "grad": nnx.grad(loss),
        "remat": nnx.remat(loss),
        "eval_shape": lambda m, x: nnx.eval_shape(loss, m, x),
        "cond": lambda m, x: nnx.cond(True, loss, loss, m, x),
    }
    programs[transform](model, inputs())
    assert set(seen) == {(type(model), type(model.layers[0]))}
    assert all(issubclass(cls, FSDPModule) for pair in seen for cls in pair)
    assert local_shape(model.layers[0].kernel) == (2, 32)


def test_turning_a_knob_changes_the_graphdef_and_turning_it_back_restores_it(mesh8):
    model = sharded_net(mesh8, reshard_after_forward=True)
    before = nnx.graphdef(model)
    model.set_reshard_after_forward(False)
    assert nnx.graphdef(model) != before
    model.set_reshard_after_forward(True)
    assert nnx.graphdef(model) == before
    model.unshard()
    model.reshard()
    assert nnx.graphdef(model) == before
