"""Which mesh a module is sharded over, and which meshes are refused."""

import pickle
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fsdp_jax import DataParallelMeshDims, fully_shard, local_shape
from fsdp_jax._mesh import MeshInfo, resolve_mesh
from tests import helpers

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def linear() -> Any:
    return nnx.Linear(16, 8, rngs=nnx.Rngs(0))


def make_mesh(kind: AxisType, name: str = "data", count: int = 8) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), (name,), axis_types=(kind,))


def mesh_under(module: Any) -> Mesh:
    """The mesh that a sharded module's parameters lie on."""
    sharding = module.kernel[...].sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def test_without_a_mesh_all_devices_form_one_axis_named_fsdp():
    module = fully_shard(linear())
    assert mesh_under(module) == Mesh(np.array(jax.devices()), ("fsdp",))
    assert local_shape(module.kernel) == (2, 8)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
def test_the_ambient_mesh_is_the_default(kind):
    mesh, module = make_mesh(kind, count=4), linear()
    with jax.set_mesh(mesh):
        fully_shard(module)
    assert mesh_under(module) == mesh
    assert local_shape(module.kernel) == (4, 8)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
def test_the_mesh_argument_goes_before_the_ambient_mesh(kind):
    mesh, module = make_mesh(kind, "mine", 2), linear()
    with jax.set_mesh(make_mesh(kind)):
        fully_shard(module, mesh=mesh)
    assert mesh_under(module) == mesh


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
def test_a_module_lies_on_the_devices_of_its_mesh_and_computes_alike(count, kind):
    x = helpers.regression_batch()[0]
    expected = linear()(x)
    mesh = make_mesh(kind, count=count)
    module = fully_shard(linear(), mesh=mesh)
    assert local_shape(module.kernel) == (16 // count, 8)
    assert local_shape(module.bias) == (8 // count,)
    assert module.kernel.shape == (16, 8)
    assert set(module.kernel[...].devices()) == set(jax.devices()[:count])
    np.testing.assert_allclose(module(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
@pytest.mark.parametrize("ambient", [False, True], ids=["argument", "ambient"])
def test_a_module_computes_alike_under_jit_on_either_kind_of_axis(kind, ambient):
    x = helpers.regression_batch()[0]
    expected = linear()(x)
    mesh, module = make_mesh(kind), linear()
    with jax.set_mesh(mesh) if ambient else nullcontext():
        fully_shard(module, mesh=None if ambient else mesh)
        found = nnx.jit(lambda m, x: m(x))(module, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert module.kernel[...].sharding.spec == P("data")


def test_the_order_of_devices_on_the_mesh_is_kept():
    mesh = Mesh(np.array(jax.devices()[::-1]), ("fsdp",))
    module = fully_shard(linear(), mesh=mesh)
    full = np.asarray(linear().kernel[...])
    for shard in module.kernel[...].addressable_shards:
        row = 2 * (7 - shard.device.id)
        np.testing.assert_array_equal(shard.data, full[row : row + 2])


def test_on_one_device_every_shard_is_the_whole_parameter():
    module = fully_shard(linear(), mesh=helpers.mesh_of(1))
    assert local_shape(module.kernel) == module.kernel.shape
    assert type(module).__name__ == "LinearFSDPModule"
    module.unshard()
    module.reshard()
    assert local_shape(module.kernel) == module.kernel.shape


def two_axes() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("replicate", "shard"))


def three_axes() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("mesh", "error", "text"),
    [
        (two_axes, NotImplementedError, r"mesh has two axes.*replicate.*shard"),
        (three_axes, ValueError, r"mesh has 3 axes.*'a', 'b', 'c'"),
        (lambda: Mesh(np.array(jax.devices()[0]), ()), ValueError, "mesh has 0 axes"),
        (lambda: two_axes().abstract_mesh, TypeError, "mesh must be .*AbstractMesh"),
        (jax.devices, TypeError, "mesh must be a jax.sharding.Mesh, got list"),
        (lambda: "fsdp", TypeError, "mesh must be a jax.sharding.Mesh, got str"),
        (lambda: 8, TypeError, "mesh must be a jax.sharding.Mesh, got int"),
    ],
)
def test_a_mesh_that_cannot_be_used_is_refused(mesh, error, text):
    module = linear()
    with pytest.raises(error, match=text):
        fully_shard(module, mesh=mesh())
    assert type(module) is nnx.Linear
    assert local_shape(fully_shard(module).kernel) == (2, 8)


def test_an_ambient_mesh_that_cannot_be_used_is_refused_as_such():
    module = linear()
    with jax.set_mesh(two_axes()):
        with pytest.raises(NotImplementedError, match=r"set by jax\.set_mesh"):
            fully_shard(module)
    with jax.set_mesh(three_axes()):
        with pytest.raises(ValueError, match=r"set by jax\.set_mesh"):
            fully_shard(module)
    assert type(module) is nnx.Linear


def test_dp_mesh_dims_is_not_supported_and_says_so(mesh8):
    with pytest.raises(NotImplementedError, match="dp_mesh_dims"):
        fully_shard(linear(), mesh=mesh8, dp_mesh_dims=DataParallelMeshDims("fsdp"))
    with pytest.raises(TypeError, match="dp_mesh_dims must be.*got str"):
        fully_shard(linear(), mesh=mesh8, dp_mesh_dims="fsdp")


def test_sharding_inside_a_per_device_program_is_refused(mesh8):
    module = linear()
    errors = []

    def body(x):
        with pytest.raises(ValueError, match="per-device program") as caught:
            fully_shard(module, mesh=mesh8)
        errors.append(caught.value)
        return x

    jax.shard_map(body, mesh=mesh8, in_specs=P("fsdp"), out_specs=P("fsdp"))(
        np.ones((8, 2), np.float32)
    )
    assert len(errors) > 0
    assert type(module) is nnx.Linear


def test_the_ambient_mesh_has_no_devices_inside_jit_and_the_error_says_what_to_do():
    with jax.set_mesh(make_mesh(AUTO)):

        @jax.jit
        def program(x):
            fully_shard(linear())
            return x

        with pytest.raises(ValueError, match="Pass mesh= explicitly"):
            program(1.0)


@pytest.mark.parametrize(
    ("ndim", "dim", "spec"),
    [
        (1, 0, P("fsdp")),
        (2, 0, P("fsdp")),
        (2, -1, P(None, "fsdp")),
        (3, -2, P(None, "fsdp")),
        (3, -3, P("fsdp")),
        (2, None, P()),
    ],
)
def test_the_spec_of_a_cut_dim(mesh8, ndim, dim, spec):
    info = MeshInfo(mesh8, ("fsdp",))
    assert info.spec(ndim, dim) == spec
    assert info.sharding(ndim, dim) == NamedSharding(mesh8, spec)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda k: k.name)
def test_a_mesh_survives_pickling_with_its_devices_and_axis_types(kind):
    mesh = Mesh(np.array(jax.devices()[::-1][:4]), ("data",), axis_types=(kind,))
    info = resolve_mesh(mesh, None)
    again = pickle.loads(pickle.dumps(info))
    assert again == info
    assert again.mesh.axis_types == (kind,)
    assert again.num_shards == 4
    assert again.explicit == (kind is EXPLICIT)


def test_code_is_a_per_device_program_only_where_the_shard_axis_is_manual(mesh8):
    info = MeshInfo(mesh8, ("fsdp",))
    seen = []

    def body(x):
        seen.append(info.per_device())
        return x

    x = np.ones((8, 2), np.float32)
    assert not info.per_device()
    jax.jit(body)(x)
    jax.shard_map(body, mesh=mesh8, in_specs=P("fsdp"), out_specs=P("fsdp"))(x)
    assert seen[0] is False
    assert seen[-1] is True


def test_a_per_device_program_of_another_size_is_refused(mesh8):
    info = MeshInfo(mesh8, ("fsdp",))

    def body(x):
        info.per_device()
        return x

    program = jax.shard_map(
        body, mesh=helpers.mesh_of(4), in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    with pytest.raises(ValueError, match=r"sizes \(8,\).*sizes \(4,\)"):
        program(np.ones((8, 2), np.float32))
