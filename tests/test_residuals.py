"""What a forward leaves behind for backward, looked at in the program of one device.

The arrays inside `jax.vjp`'s function are what is alive between forward and backward.
With `reshard_after_forward=True` none of them may have the size of a full parameter;
every model and batch here has sizes that tell the two apart.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard
from tests import helpers

ROWS, IN, HIDDEN, OUT = 5, 24, 40, 56  # rows per device; all sizes below are distinct
DEVICES = 8


class Wrapped(nnx.Module):
    """A module whose parameters are its children's, and a function of it and x."""

    def __init__(self, apply: Callable[..., Any], **children: Any) -> None:
        self.children = nnx.Dict(children)
        self.apply = nnx.static(apply)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.apply(self.children, x)


class JittedLinear(nnx.Module):
    """A layer whose call is compiled on its own."""

    def __init__(self, d_in: int, d_out: int, **kwargs: Any) -> None:
        self.inner = linear(d_in, d_out, **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.jit(lambda inner, x: inner(x))(self.inner, x)


def linear(d_in: int = IN, d_out: int = HIDDEN, **kwargs: Any) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, rngs=nnx.Rngs(0), **kwargs)


def two_layers(activation: Callable[..., Any], **kwargs: Any) -> Wrapped:
    return Wrapped(
        lambda c, x: c.down(activation(c.up(x))),
        up=linear(**kwargs),
        down=linear(HIDDEN, OUT, **kwargs),
    )


def normalized(c: Any, x: jax.Array) -> jax.Array:
    kernel = c.up.kernel[...]
    kernel = kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True)
    return jnp.tanh(x @ kernel)


@jax.custom_vjp
def product(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return x @ kernel


def _product_fwd(kernel, x):
    return x @ kernel, (kernel.astype(jnp.bfloat16), x)


def _product_bwd(saved, cotangent):
    kernel, x = saved
    return x.T @ cotangent, cotangent @ kernel.T.astype(x.dtype)


product.defvjp(_product_fwd, _product_bwd)


def attention() -> nnx.Module:
    return nnx.MultiHeadAttention(
        num_heads=DEVICES, in_features=IN, decode=False, rngs=nnx.Rngs(0)
    )


CASES: dict[str, Callable[[], nnx.Module]] = {
    "linear": lambda: linear(),
    "linear in bfloat16": lambda: linear(dtype=jnp.bfloat16),
    "einsum": lambda: Wrapped(
        lambda c, x: jnp.tanh(jnp.einsum("ri,io->ro", x, c.up.kernel[...])), up=linear()
    ),
    "einsum module in bfloat16": lambda: nnx.Einsum(
        "ri,io->ro", (IN, HIDDEN), (HIDDEN,), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    ),
    "gelu": lambda: two_layers(nnx.gelu),
    "relu in bfloat16": lambda: two_layers(nnx.relu, dtype=jnp.bfloat16),
    "silu": lambda: two_layers(nnx.silu),
    "transposed": lambda: Wrapped(
        lambda c, x: jnp.tanh(x @ c.up.kernel[...]) @ c.up.kernel[...].T, up=linear()
    ),
    "normalized weight": lambda: Wrapped(normalized, up=linear()),
    "jitted submodule": lambda: Wrapped(
        lambda c, x: c.down(jnp.tanh(c.up(x))),
        up=JittedLinear(IN, HIDDEN, dtype=jnp.bfloat16),
        down=JittedLinear(HIDDEN, OUT),
    ),
    "jitted function": lambda: Wrapped(
        lambda c, x: jax.jit(lambda k, x: jnp.sin(x @ k))(c.up.kernel[...], x),
        up=linear(),
    ),
    "checkpointed": lambda: Wrapped(
        lambda c, x: nnx.remat(lambda up, x: jnp.sin(up(x)))(c.up, x),
        up=linear(dtype=jnp.bfloat16),
    ),
    "custom gradient": lambda: Wrapped(
        lambda c, x: product(c.up.kernel[...], x), up=linear()
    ),
    "scan over rows": lambda: Wrapped(
        lambda c, x: jax.lax.scan(
            lambda carry, row: (carry, jnp.tanh(row @ c.up.kernel[...])), 0.0, x
        )[1],
        up=linear(),
    ),
    "attention": attention,
    "convolution": lambda: nnx.Conv(IN, HIDDEN, (3,), rngs=nnx.Rngs(0)),
    "norm and embedding": lambda: Wrapped(
        lambda c, x: c.norm(c.embed(jnp.argmax(x, axis=-1))),
        embed=nnx.Embed(64, HIDDEN, rngs=nnx.Rngs(0)),
        norm=nnx.LayerNorm(HIDDEN, rngs=nnx.Rngs(0)),
    ),
}


def saved_arrays(
    model: Any, x: jax.Array, wrt: Any = nnx.Param
) -> list[tuple[int, str]]:
    """Size and dtype of each array that one device's forward saves for backward.

    The batch is differentiated too, so that backward reads every kernel.
    """
    graphdef, diff, rest = nnx.split(model, wrt, ...)
    saved: list[tuple[int, str]] = []

    def specs(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding.spec, state)

    def one_device(diff, rest, x):
        def loss(diff, x):
            output = nnx.merge(graphdef, diff, rest, copy=True)(x)
            return jnp.mean(output.astype(jnp.float32) ** 2)

        value, vjp = jax.vjp(loss, diff, x)
        saved.extend((a.size, a.dtype.name) for a in jax.tree.leaves(vjp))
        return value[None]

    mapped = jax.shard_map(
        one_device,
        mesh=helpers.mesh_of(DEVICES),
        in_specs=(specs(diff), specs(rest), PartitionSpec("fsdp")),
        out_specs=PartitionSpec("fsdp"),
        check_vma=False,
    )
    jax.eval_shape(mapped, diff, rest, x)
    assert saved
    return saved


def full_ones(saved: list[tuple[int, str]], model: Any) -> list[tuple[int, str]]:
    """Those saved arrays that have as many elements as some parameter."""
    sizes = {leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))}
    return [s for s in saved if s[0] in sizes]


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (DEVICES * ROWS, IN))


def shard(model: Any, free: bool | None, **kwargs: Any) -> Any:
    mesh = helpers.mesh_of(DEVICES)
    return fully_shard(model, mesh=mesh, reshard_after_forward=free, **kwargs)


@pytest.mark.parametrize("case", CASES)
def test_nothing_saved_has_a_full_parameter_s_size(case):
    model = shard(CASES[case](), True)
    saved = saved_arrays(model, batch())
    assert full_ones(saved, model) == []


@pytest.mark.filterwarnings("ignore:.*layers compute in a dtype of their own")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("gelu", jnp.bfloat16),
        ("relu in bfloat16", jnp.float32),
        ("attention", jnp.bfloat16),
    ],
)
def test_nothing_full_is_saved_under_a_policy(case, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=jnp.float32)
    model = shard(CASES[case](), True, mp_policy=policy)
    assert full_ones(saved_arrays(model, batch()), model) == []


@pytest.mark.parametrize("case", ["gelu", "relu in bfloat16", "transposed"])
def test_gathered_parameters_are_saved_when_kept(case):
    model = shard(CASES[case](), False)
    sizes = {size for size, _ in saved_arrays(model, batch())}
    assert IN * HIDDEN in sizes
    assert HIDDEN * OUT in sizes or case == "transposed"


def test_the_root_keeps_its_parameters_and_inner_groups_do_not():
    model = Wrapped(
        lambda c, x: c.head(jnp.tanh(c.inner(x))),
        inner=two_layers(nnx.gelu),
        head=linear(OUT, 64),
    )
    shard(model.children["inner"], None)
    shard(model, None)
    kept = {size for size, _ in full_ones(saved_arrays(model, batch()), model)}
    assert kept == {OUT * 64}


def test_frozen_parameters_are_freed_too():
    model = Wrapped(
        lambda c, x: c.down(nnx.gelu(c.up(x))),
        up=linear(),
        down=linear(HIDDEN, OUT),
    )
    shard(model, True)
    up_only = nnx.All(nnx.Param, nnx.PathContains("up"))
    assert full_ones(saved_arrays(model, batch(), up_only), model) == []


def test_what_mixes_parameters_and_batch_is_saved_not_computed_again():
    """Only parameters are recomputed: activations stay, unlike in a checkpoint."""
    model = shard(two_layers(jnp.tanh), True)
    text = helpers.lowered_text(
        fsdp_jax.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2)),
        model,
        batch(),
    )
    assert text.count("stablehlo.tanh") == 1
    sizes = collections.Counter(size for size, _ in saved_arrays(model, batch()))
    assert sizes[ROWS * HIDDEN] >= 1


def test_freeing_saves_as_many_bytes_as_the_full_parameters_have():
    def saved_bytes(free):
        model = shard(two_layers(nnx.gelu), free)
        saved = saved_arrays(model, batch())
        return sum(size * jnp.dtype(dtype).itemsize for size, dtype in saved)

    kernels = (IN * HIDDEN + HIDDEN * OUT) * 4
    shards = kernels // DEVICES + (HIDDEN + OUT) * 4 // DEVICES
    assert saved_bytes(True) <= saved_bytes(False) - kernels + shards
