"""Models, comparisons and counts that tests share."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from fsdp_jax import FSDPModule, Optimizer, fully_shard, scan_layers
from fsdp_jax._callees import equations_inside

VOCABULARY = 64


class MLP(nnx.Module):
    """Three linear layers with tanh between them, 16 in, 8 out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            [
                nnx.Linear(16, 32, rngs=rngs),
                nnx.Linear(32, 16, rngs=rngs),
                nnx.Linear(16, 8, rngs=rngs),
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in list(self.layers)[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


class Block(nnx.Module):
    """Attention and MLP, each after a LayerNorm and around a skip connection."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(jnp.tanh(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Token ids `(batch, length)` to logits over `VOCABULARY`."""

    def __init__(self, rngs: nnx.Rngs, width: int = 16, num_blocks: int = 2) -> None:
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(num_blocks)])
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nnx.Module):
    """Two linear layers around a skip connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Stack(nnx.Module):
    """Three stacked `Residual` in a loop, and a head.

    Args:
        how: "scan" or "remat" with `nnx.scan`, "scan_layers" or "scan_layers remat".
    """

    def __init__(self, how: str) -> None:
        make = nnx.vmap(Residual, in_axes=0, out_axes=0)
        self.layers = make(nnx.Rngs(0).split(3))
        self.head = nnx.Linear(16, 8, rngs=nnx.Rngs(1))
        self.how = how

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.how.startswith("scan_layers"):
            x = scan_layers(self.layers, x, remat=self.how.endswith("remat"))
            return self.head(x)

        def one(layer, x):
            return layer(x)

        one = nnx.remat(one) if self.how == "remat" else one
        loop = nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(loop(self.layers, x))


@functools.cache
def gradients_of_stack() -> Any:
    """Loss and gradients of the unsharded `Stack` for `regression_batch()`."""
    step = nnx.jit(nnx.value_and_grad(mean_square))
    return step(Stack("scan"), *regression_batch())


def shard_blocks(model: Any, **kwargs: Any) -> Any:
    """One group per block or layer, one for what is left."""
    for block in getattr(model, "blocks", None) or model.layers:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def mesh_of(num_devices: int) -> Mesh:
    """An Auto axis `fsdp` over the first devices."""
    return Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))


def mean_square(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error of a model's output."""
    return jnp.mean((model(x) - y) ** 2)


def next_token_loss(model: Any, ids: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token."""
    logits = model(ids)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def regression_batch(rows: int = 16) -> tuple[jax.Array, jax.Array]:
    """Inputs `(rows, 16)` and targets `(rows, 8)`."""
    keys = jax.random.split(jax.random.key(7))
    return jax.random.normal(keys[0], (rows, 16)), jax.random.normal(keys[1], (rows, 8))


def token_batch(rows: int = 16, length: int = 6) -> jax.Array:
    """Token ids `(rows, length)`."""
    return jax.random.randint(jax.random.key(3), (rows, length), 0, VOCABULARY)


def assert_trees_close(
    actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Compare two models, states or trees leaf by leaf, naming what differs."""
    got, want = (_named_leaves(tree) for tree in (actual, expected))
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol, atol, err_msg=name)


def _named_leaves(tree: Any) -> dict[str, np.ndarray]:

    def is_module(x: Any) -> bool:
        return isinstance(x, nnx.Module)

    # Also inside, as Flax returns gradients in its tree mode.
    state = lambda x: nnx.state(x) if is_module(x) else x  # noqa: E731
    tree = jax.tree.map(state, tree, is_leaf=is_module)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(tree))
    named = {}
    for path, leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        named[jax.tree_util.keystr(path)] = np.asarray(leaf, np.float64)
    return named


def train(
    model: Any,
    value_and_grad: Callable[..., Any],
    loss: Callable[..., Any],
    batch: Sequence[Any],
    *,
    steps: int = 5,
    make_optimizer: Callable[[Any], nnx.Optimizer] | None = None,
    jit: Callable[[Any], Any] = nnx.jit,
) -> list[float]:
    """Train with AdamW (eps large enough that no parameter is all rounding noise).

    Returns:
        The loss of each step.
    """
    if make_optimizer is None:
        tx = optax.adamw(1e-2, eps=1e-3)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    else:
        optimizer = make_optimizer(model)

    @jit
    def step(model: Any, optimizer: Any, *batch: Any) -> jax.Array:
        value, grads = value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, *batch)) for _ in range(steps)]


def clipped_adamw(model: Any) -> Any:
    """An optimizer that clips by the global norm; this library's if sharded."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))
    make = Optimizer if isinstance(model, FSDPModule) else nnx.Optimizer
    return make(model, tx, wrt=nnx.Param)


def count_collectives(text: str) -> dict[str, int]:
    """Collectives in StableHLO text, by name."""
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return {name: len(re.findall(rf"stablehlo\.{name}\b", text)) for name in names}


def lowered_text(f: Callable[..., Any], *args: Any) -> str:
    """StableHLO of a function of NNX modules and arrays."""
    return nnx.jit(f).lower(*args).lowered.as_text()


def equations_of(f: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Every equation of a function of NNX modules and arrays, inner ones too."""
    graphdef, state = nnx.split(args)

    def pure(state: Any) -> Any:
        return nnx.as_pure(f(*nnx.merge(graphdef, state)))

    return equations_inside(jax.make_jaxpr(pure)(state))


def stacked_by_loops(f: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """Shapes of the arrays that `jax.lax.scan` loops stack, one piece an iteration."""
    shapes = []
    for eqn in equations_of(f, *args):
        if eqn.primitive.name == "scan":
            each = eqn.params["jaxpr"].jaxpr.outvars
            for whole, piece in zip(eqn.outvars, each, strict=True):
                if whole.aval.ndim == piece.aval.ndim + 1:
                    shapes.append(whole.aval.shape)
    return shapes
