"""Random module trees: no shape, dtype, nesting or mesh makes a sharded model differ.

`FSDP_JAX_EXAMPLES=300 pytest tests/test_random_models.py` tries more of them.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import Shard, fully_shard

EXAMPLES = os.environ.get("FSDP_JAX_EXAMPLES")
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 8e-3}


@dataclasses.dataclass(frozen=True)
class Tree:
    """What one module is made of.

    Attributes:
        params: shape and dtype of each parameter.
        children: inner modules, and how many times each is called.
        sharded: whether it is a group of its own.
        reshard: its `reshard_after_forward`.
    """

    params: tuple[tuple[tuple[int, ...], str], ...]
    children: tuple[tuple["Tree", int], ...]
    sharded: bool
    reshard: Any


class Node(nnx.Module):
    """A module made from a `Tree`: each parameter changes every row of the input."""

    def __init__(self, tree: Tree, rng: np.random.Generator) -> None:
        self.params = nnx.List(
            [
                nnx.Param(jnp.asarray(rng.normal(size=shape).astype(dtype)))
                for shape, dtype in tree.params
            ]
        )
        self.children = nnx.List([Node(child, rng) for child, _ in tree.children])
        self.calls = tuple(calls for _, calls in tree.children)

    def __call__(self, x: jax.Array) -> jax.Array:
        for param in self.params:
            flat = param[...].reshape(1, -1).astype(jnp.float32)
            x = x + jnp.tanh(x[:, :1] * flat).sum(1, keepdims=True) / max(param.size, 1)
        for child, calls in zip(self.children, self.calls, strict=True):
            for _ in range(calls):
                x = jnp.sin(child(x))
        return x


def shard(node: Any, tree: Tree, **kwargs: Any) -> None:
    for child, (inner, _) in zip(node.children, tree.children, strict=True):
        shard(child, inner, **kwargs)
    if tree.sharded:
        fully_shard(node, reshard_after_forward=tree.reshard, **kwargs)


shapes = st.lists(st.integers(0, 11), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float32", "bfloat16", "float16"])
reshards = st.sampled_from([None, True, False, 1, 2])


def trees(depth: int) -> st.SearchStrategy[Tree]:
    inner = st.tuples(trees(depth - 1), st.integers(0, 2)) if depth else st.nothing()
    return st.builds(
        Tree,
        st.lists(st.tuples(shapes, dtypes), max_size=3).map(tuple),
        st.lists(inner, max_size=2).map(tuple) if depth else st.just(()),
        st.booleans(),
        reshards,
    )


def mean_square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def variables(tree: Any) -> list[tuple[Any, Any]]:
    state = nnx.state(tree) if isinstance(tree, Node) else tree
    return list(nnx.to_flat_state(state))


def values(tree: Any) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(v[...], np.float32) for path, v in variables(tree)}


def assert_close(got: Any, want: Any) -> None:
    dtypes = {path: str(v.dtype) for path, v in variables(want)}
    got, want = values(got), values(want)
    assert list(got) == list(want)
    for path, value in want.items():
        limit = TOLERANCE[dtypes[path]]
        np.testing.assert_allclose(got[path], value, limit, limit, err_msg=str(path))


@settings(
    max_examples=int(EXAMPLES or 2),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    phases=[Phase.generate] if EXAMPLES is None else [Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    tree=trees(2),
    layout=st.sampled_from([(1,), (2,), (3,), (5,), (6,), (7,), (8,), (2, 3), (4, 2)]),
    uneven=st.sampled_from(["pad", "pad", "auto"]),
    place=st.sampled_from([None, fsdp_jax.largest_dim, "last"]),
    packed=st.booleans(),
    microbatches=st.sampled_from([1, 1, 2]),
)
def test_a_sharded_model_is_the_unsharded_one(
    tree: Tree,
    layout: tuple[int, ...],
    uneven: str,
    place: Any,
    packed: bool,
    microbatches: int,
) -> None:
    def last(param: Any) -> Shard | None:
        return Shard(-1) if param.ndim else None

    tree = dataclasses.replace(
        tree, sharded=True, params=(((3, 5), "float32"), *tree.params)
    )
    devices = np.array(jax.devices()[: np.prod(layout)]).reshape(layout)
    mesh = Mesh(devices, ("replica", "fsdp")[-len(layout) :])
    plain: Any = Node(tree, np.random.default_rng(0))
    model: Any = Node(tree, np.random.default_rng(0))
    if place == "last":  # with "auto" an asked dim has to divide
        place = last if uneven == "pad" else None
    elif place is not None and uneven == "auto":
        place = None
    shard(model, tree, mesh=mesh, uneven=uneven, shard_placement_fn=place)
    if not packed:
        model.set_packing_threshold_bytes(0)
    x = np.random.default_rng(1).normal(size=(2 * devices.size, 2))
    x = jnp.asarray(x.astype(np.float32))
    tx = optax.sgd(0.1, momentum=0.9)
    optimizers = (
        nnx.Optimizer(plain, tx, wrt=nnx.Param),
        fsdp_jax.Optimizer(model, tx),
    )

    @nnx.jit
    def plain_step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        value, grads = nnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, grads)
        return value, grads

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        make = fsdp_jax.value_and_grad(mean_square, num_microbatches=microbatches)
        value, grads = make(model, x)
        optimizer.update(model, grads)
        return value, grads

    want, want_grads = plain_step(plain, optimizers[0], x)
    got, got_grads = step(model, optimizers[1], x)
    np.testing.assert_allclose(got, want, 2e-5)
    assert_close(got_grads, want_grads)
    assert_close(model, plain)
    forward = nnx.jit(lambda model, x: model(x))
    np.testing.assert_allclose(forward(model, x), forward(plain, x), 1e-2)
