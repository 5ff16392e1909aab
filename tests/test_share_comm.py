"""`share_comm_ctx`: which roots order their collectives with which."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import Ordering, fully_shard, share_comm_ctx
from tests import helpers


class Three(nnx.Module):
    """Three roots under a plain parent, called one after the other."""

    def __init__(self) -> None:
        self.student = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.teacher = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.critic = nnx.Linear(8, 8, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.student(x))
        return self.critic(jnp.tanh(self.teacher(x)))


def roots(names: str = "") -> tuple[Any, list[Any]]:
    model: Any = Three()
    for root in (model.student, model.teacher, model.critic):
        fully_shard(root)
        root.set_ordering(Ordering(forward="previous"))
    return model, [getattr(model, name) for name in names.split()]


def barriers(model: Any, x: jax.Array) -> int:
    text = helpers.lowered_text(fsdp_jax.shard_map(lambda m, x: m(x)), model, x)
    return text.count("stablehlo.optimization_barrier")


@pytest.mark.parametrize(
    ("shared", "waits"),
    [
        ("", 2),  # of the teacher for the student, and of the critic for the teacher
        ("student teacher critic", 2),
        ("student critic", 1),  # the teacher, alone, waits for nobody
        ("teacher", 1),
    ],
)
def test_who_waits_for_whom(shared: str, waits: int) -> None:
    model, given = roots(shared)
    x, want = jnp.ones((8, 8)), Three()(jnp.ones((8, 8)))
    share_comm_ctx(given)
    assert barriers(model, x) == waits
    got = fsdp_jax.shard_map(lambda m, x: m(x))(model, x)
    np.testing.assert_allclose(got, want, 1e-5)


@pytest.mark.parametrize(("shared", "waits"), [("student critic", 1), ("student", 0)])
def test_prefetch_crosses_between_those_that_share(shared: str, waits: int) -> None:
    model, given = roots(shared)
    share_comm_ctx(given)
    for root in (model.student, model.teacher, model.critic):
        root.set_ordering(Ordering(forward="free"))
    assert barriers(model, jnp.ones((8, 8))) == 0
    model.student.set_modules_to_forward_prefetch([model.critic])
    assert barriers(model, jnp.ones((8, 8))) == waits


def test_gradients_do_not_change() -> None:
    model, given = roots("student critic")
    share_comm_ctx(given)
    x = jax.random.normal(jax.random.key(0), (8, 8))
    want = nnx.jit(nnx.grad(lambda m, x: jnp.mean(m(x) ** 2)))(Three(), x)
    got = nnx.jit(fsdp_jax.grad(lambda m, x: jnp.mean(m(x) ** 2)))(model, x)
    helpers.assert_trees_close(got, want)


def test_inner_modules_follow_their_root() -> None:
    model = helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)))
    share_comm_ctx([model])
    contexts = {vars(m)["_pytree__fsdp"].comm_context for m in [model, *model.layers]}
    assert len(contexts) == 1 and None not in contexts


def test_what_is_refused() -> None:
    model, (student, critic) = roots("student critic")
    share_comm_ctx([])
    with pytest.raises(ValueError, match="entry 1 is a Linear that fully_shard"):
        share_comm_ctx([student, nnx.Linear(8, 8, rngs=nnx.Rngs(0))])
    with pytest.raises(TypeError, match="expected a list of sharded modules"):
        share_comm_ctx(student)
    other = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    fully_shard(other, mesh=helpers.mesh_of(2))
    with pytest.raises(ValueError, match="entry 2 is sharded over .*one mesh"):
        share_comm_ctx([student, critic, other])
    assert barriers(model, jnp.ones((8, 8))) == 2
