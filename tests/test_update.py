"""`nnx.update` and optimizers: all is written, where the model lies, or nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

WIDTH = 8


class Net(nnx.Module):
    """Two linear layers with statistics and random state between them."""

    def __init__(self, seed: int = 0, width: int = WIDTH) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Param(rngs.params.normal((width,)))
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.bn = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.bn(self.layers[0](x + self.embed[...]))
        return self.layers[1](self.dropout(x))


def mesh_of(devices: Any) -> Mesh:
    return Mesh(np.array(devices), ("fsdp",))


def make(mesh: Mesh, root: bool = True, seed: int = 0, **kwargs: Any) -> Any:
    net = Net(seed)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(net, mesh=mesh, **kwargs) if root else net


def held(*trees: Any) -> list[Any]:
    """Every object that a change could replace."""
    leaves = jax.tree.leaves([nnx.state(t) for t in trees], is_leaf=is_variable)
    return [(v.get_raw_value(), dict(v._var_metadata)) for v in leaves]


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def assert_untouched(found: list[Any], before: list[Any]) -> None:
    for (x, data), (old, old_data) in zip(found, before, strict=True):
        assert x is old
        assert data == old_data


BAD = {
    "size": lambda old: jnp.ones((old.shape[0] + 4, *old.shape[1:])),
    "dtype": lambda old: np.ones(old.shape, np.int32),
    "key": lambda old: jax.random.split(jax.random.key(0), old.shape),
    "subgraph": lambda old: nnx.State({"deeper": old}),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("root", "pure"),
    [(True, True), (False, False)],
    ids=["arrays", "Variables, plain parent"],
)
def test_a_state_with_a_bad_value_writes_nothing(bad, root, pure, mesh8):
    model = make(mesh8, root)
    new = nnx.state(Net(1))
    value = BAD[bad](new["layers"][1]["kernel"][...])
    if not pure and bad != "subgraph":
        value = nnx.Param(value)
    if pure:
        new = nnx.to_pure_dict(new)
    new["layers"][1]["kernel"] = value
    before = held(model)
    with pytest.raises((ValueError, TypeError)):
        nnx.update(model, new)
    assert_untouched(held(model), before)


def test_a_padded_array_for_another_number_of_devices_writes_nothing():
    model = make(mesh_of(jax.devices()[:3]), uneven="pad")
    new: Any = nnx.to_pure_dict(nnx.state(Net(1)))
    new["layers"][1]["kernel"] = jnp.ones((10, WIDTH))  # over five
    before = held(model)
    with pytest.raises(ValueError, match="8 rows on dim"):
        nnx.update(model, new)
    assert_untouched(held(model), before)


def test_a_good_state_is_written_whole(mesh8):
    model, other = make(mesh8, root=False), Net(1)
    nnx.update(model, nnx.state(other))
    for x, y in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other))
    ):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("make_optimizer", [fsdp_jax.Optimizer, nnx.Optimizer])
def test_gradients_of_other_shapes_change_nothing(make_optimizer, mesh8):
    model = make(mesh8)
    optimizer = make_optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads: Any = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    grads["layers"][1]["bias"] = nnx.Param(jnp.ones((16, 1)))
    before = held(model, optimizer)
    with pytest.raises(ValueError):
        optimizer.update(model, grads)
    assert_untouched(held(model, optimizer), before)


def test_an_update_that_would_broadcast_a_parameter_is_refused(mesh8):
    model = make(mesh8)
    optimizer = fsdp_jax.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads: Any = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    grads["layers"][1]["bias"] = nnx.Param(jnp.ones((3, WIDTH)))
    before = held(model, optimizer)
    with pytest.raises(ValueError, match=r"'layers.1.bias' has shape \(8,\).*\(3, 8\)"):
        optimizer.update(model, grads)
    assert_untouched(held(model, optimizer), before)


def other_mesh(model: Any) -> Any:
    return nnx.state(make(mesh_of(jax.devices()[:4]), seed=1))


def single_device(model: Any) -> Any:
    return jax.device_put(nnx.state(Net(1)), jax.devices()[3])


def same_devices_in_another_order(model: Any) -> Any:
    return nnx.state(make(mesh_of(jax.devices()[::-1]), seed=1))


def host(model: Any) -> Any:
    def to_host(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else np.asarray(x)

    return jax.tree.map(to_host, nnx.state(Net(1)))


SOURCES = [other_mesh, single_device, same_devices_in_another_order, host]


@pytest.mark.parametrize("abstract", [False, True], ids=["", "abstract"])
@pytest.mark.parametrize("source", SOURCES)
def test_what_comes_from_elsewhere_lies_on_the_mesh_of_the_model(
    source, abstract, mesh8
):
    model = make(mesh8)
    if abstract:
        model = nnx.eval_shape(Net)
        fully_shard(model, mesh=mesh8)
    nnx.update(model, source(model))
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert isinstance(leaf.sharding, NamedSharding)
        assert leaf.sharding.mesh == mesh8
    kernel = model.layers[0].kernel
    assert fsdp_jax.local_shape(kernel) == (1, WIDTH)
    assert model.bn.mean.sharding == NamedSharding(mesh8, PartitionSpec())
    np.testing.assert_array_equal(kernel[...], Net(1).layers[0].kernel[...])


def test_an_optimizer_takes_a_state_from_another_mesh(mesh8):
    def trained(mesh: Mesh) -> Any:
        model = make(mesh)
        optimizer = fsdp_jax.Optimizer(model, optax.adam(0.1))
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        return optimizer

    other, optimizer = trained(mesh_of(jax.devices()[:4])), trained(mesh8)
    nnx.update(optimizer, nnx.state(other))
    for leaf in jax.tree.leaves(nnx.state(optimizer)):
        assert leaf.sharding.mesh == mesh8
    assert optimizer.step[...] == 1


def test_a_plain_parent_keeps_what_was_never_on_the_mesh(mesh8):
    model = make(mesh8, root=False)
    nnx.update(model, single_device(model))
    assert model.bn.mean.get_raw_value().sharding.device_set == {jax.devices()[3]}
    assert model.layers[1].kernel.get_raw_value().sharding.mesh == mesh8


def test_parameters_of_a_model_on_another_mesh_give_their_value_only():
    x, y = helpers.regression_batch(8)
    others = Mesh(np.array(jax.devices()[4:8]), ("fsdp",))
    step = fsdp_jax.value_and_grad(helpers.mean_square)
    for mesh in (others, helpers.mesh_of(2)):
        model = helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)), mesh=helpers.mesh_of(4))
        other = helpers.shard_blocks(helpers.MLP(nnx.Rngs(1)), mesh=mesh)
        own = model.layers[0].kernel
        model.layers[0].kernel = other.layers[0].kernel
        for call in (lambda: step(model, x, y), lambda: model(x)):  # noqa: B023
            with pytest.raises(ValueError, match="parameter 'kernel' of a Linear is"):
                call()
        model.layers[0].kernel = own
        own[...] = other.layers[0].kernel[...]
        own[2:4] = other.layers[0].kernel[2:4]
        plain = helpers.MLP(nnx.Rngs(0))
        plain.layers[0].kernel[...] = helpers.MLP(nnx.Rngs(1)).layers[0].kernel[...]
        want = helpers.mean_square(plain, x, y)
        np.testing.assert_allclose(step(model, x, y)[0], want, rtol=1e-5)
