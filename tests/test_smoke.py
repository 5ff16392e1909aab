"""One training step equals the unsharded one."""

import numpy as np
from flax import nnx

import fsdp_jax
from tests import helpers


def test_trains_like_the_unsharded_model(transformer, mesh8):
    ids = helpers.token_batch()
    reference = helpers.Transformer(nnx.Rngs(0))
    expected = helpers.train(
        reference, nnx.value_and_grad, helpers.next_token_loss, [ids]
    )
    model = helpers.shard_blocks(transformer, mesh=mesh8)
    losses = helpers.train(
        model, fsdp_jax.value_and_grad, helpers.next_token_loss, [ids]
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    helpers.assert_trees_close(model, reference)


def test_counts(transformer, mesh8):
    model = helpers.shard_blocks(transformer, mesh=mesh8)
    text = helpers.lowered_text(
        fsdp_jax.value_and_grad(helpers.next_token_loss), model, helpers.token_batch()
    )
    counts = helpers.count_collectives(text)
    assert counts == {
        "all_gather": 3 + 2,
        "reduce_scatter": 3,
        "all_reduce": 1,
        "all_to_all": 0,
    }
