"""Parameters that come into a model after it was sharded."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard
from tests import helpers


class Net(nnx.Module):
    """An embedding of 8 rows and a head of 16 columns, 8 wide."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(self.embed(ids))


IDS = jnp.arange(16) % 8
NAMES = "'embed.embedding', 'head.kernel'"


def make(mesh: Any = None, **kwargs: Any) -> Any:
    net = Net()
    if mesh is not None:
        fully_shard(net.head, mesh=mesh, **kwargs)
        fully_shard(net, mesh=mesh, **kwargs)
    return net


def grow(net: Any) -> Any:
    """An embedding of 16 rows, and another head."""
    rows = jnp.zeros((8, 8), net.embed.embedding.dtype)
    net.embed.embedding = nnx.Param(jnp.concatenate([net.embed.embedding[...], rows]))
    net.embed.num_embeddings = 16
    net.head.kernel = nnx.Param(jnp.ones((8, 24)))
    return net


def loss(m: Any, ids: jax.Array) -> jax.Array:
    return jnp.mean(m(ids) ** 2)


@pytest.mark.parametrize("full", [False, True], ids=["", "unsharded"])
def test_new_parameters_join_their_groups(mesh8, full):
    model, twin = make(mesh8), grow(make())
    if full:
        model.unshard()
    grow(model)
    assert fsdp_jax.shard_new_params(model) is model
    assert fsdp_jax.local_shape(model.embed.embedding) == (2, 8)
    assert fsdp_jax.local_shape(model.head.kernel) == (1, 24)
    rows = {row.path: row for row in fsdp_jax.describe(model).rows}
    assert rows["head.kernel"].group == "head (Linear)"
    assert rows["embed.embedding"].group == "Net"
    grads = nnx.jit(fsdp_jax.grad(loss))(model, IDS)
    helpers.assert_trees_close(grads, nnx.jit(nnx.grad(loss))(twin, IDS))
    optimizer = fsdp_jax.Optimizer(model, optax.sgd(0.1, momentum=0.9))
    moments = [v for v in jax.tree.leaves(nnx.state(optimizer)) if v.ndim]
    assert all(not x.sharding.is_fully_replicated for x in moments)


CALLS = {
    "call": lambda m: m(IDS),
    "grad": lambda m: fsdp_jax.grad(loss)(m, IDS),
    "Optimizer": lambda m: fsdp_jax.Optimizer(m, optax.sgd(0.1)),
}


@pytest.mark.parametrize("called", CALLS)
def test_what_uses_new_parameters_names_them_and_the_remedy(mesh8, called):
    model = grow(make(mesh8))
    with pytest.warns(UserWarning, match=rf"\[{NAMES}\].*shard_new_params") as caught:
        CALLS[called](model)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[called](fsdp_jax.shard_new_params(model))


def test_what_is_left_whole_on_purpose_is_not_new(mesh8):
    model = make(mesh8, ignored_params=nnx.PathContains("embed"))
    model.gain = nnx.Param(jnp.ones(()))  # could not be cut
    before = model.embed.embedding.get_raw_value()
    loss_of = fsdp_jax.grad(loss)(model, IDS)
    fsdp_jax.shard_new_params(model)
    assert type(model.embed.embedding) is nnx.Param
    assert model.embed.embedding.get_raw_value() is before
    assert "gain" in loss_of


def test_new_parameters_take_policies_and_placement(mesh8):
    model = Net()
    fully_shard(model.head, mesh=mesh8, mp_policy=MixedPrecisionPolicy(jnp.bfloat16))
    grow(fully_shard(model, mesh=mesh8))
    fsdp_jax.shard_new_params(
        model, shard_placement_fn=lambda p: fsdp_jax.Shard(1), uneven="error"
    )
    assert fsdp_jax.local_shape(model.head.kernel) == (8, 3)
    assert model.head(jnp.ones((8, 8))).dtype == jnp.bfloat16


def test_a_call_that_fails_changes_nothing(mesh8):
    model = grow(make(mesh8))
    before = [
        (type(v), v.get_raw_value())
        for v in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    ]
    model.head.tied = model.embed.embedding
    with pytest.raises(ValueError, match="'head.tied' is tied to 'embed.embedding'"):
        fsdp_jax.shard_new_params(model)
    del model.head.tied
    model.head.odd = nnx.Param(np.ones((3, 8)))
    with pytest.raises(ValueError, match="odd"):
        fsdp_jax.shard_new_params(model, uneven="error")
    del model.head.odd
    after = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for v, (cls, value) in zip(after, before, strict=True):
        assert type(v) is cls
        assert v.get_raw_value() is value


@pytest.mark.parametrize("bad", [None, "model", Net()])
def test_what_is_no_sharded_model_is_refused(bad):
    with pytest.raises((TypeError, ValueError), match="shard_new_params"):
        fsdp_jax.shard_new_params(bad)
