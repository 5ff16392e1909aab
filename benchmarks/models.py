"""The models that the benchmarks compile and run, in plain Flax, and their sizes.

What must not live here: anything about sharding; the programs under comparison are in
the benchmarks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """Size of a model and of one device's batch.

    Attributes:
        width: features of the residual stream.
        hidden: features inside of the MLP.
        num_blocks: depth.
        num_heads: attention heads.
        vocabulary: rows of the embedding, columns of the head.
        length: tokens of one sequence.
        rows: sequences of each device.
        dtype: what is computed in; parameters are float32.
        keep_head: whether the head's gathered weights stay for backward, which begins
            with them: one gather less, if the peak is elsewhere.
    """

    width: int
    hidden: int
    num_blocks: int
    num_heads: int
    vocabulary: int
    length: int
    rows: int = 1
    dtype: Any = jnp.bfloat16
    keep_head: bool = False


# 740 M and 220 M parameters, 12 unrolled blocks; 6.74 G in 32 scanned ones; and a GPT
# small enough for simulated CPU devices.
WEIGHT_HEAVY = Config(2048, 8192, 12, 16, 32768, 512, keep_head=True)
ACTIVATION_HEAVY = Config(1024, 4096, 12, 16, 32768, 2048)
LLAMA_7B = Config(4096, 11008, 32, 32, 32000, 2048)
CPU_GPT = Config(512, 2048, 6, 8, 4096, 128, dtype=jnp.float32)
# Sizes that tests can afford.
NANO_GPT = Config(256, 512, 2, 2, 512, 64)
NANO_LLAMA = Config(256, 512, 2, 2, 512, 64)
TINY_CPU_GPT = Config(64, 128, 2, 2, 64, 16, dtype=jnp.float32)


def attention(q: Array, k: Array, v: Array, num_heads: int) -> Array:
    """Causal attention, `(rows, length, width)` each."""
    rows, length, width = q.shape
    q, k, v = (x.reshape(rows, length, num_heads, -1) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // num_heads) ** -0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, width)


class Block(nnx.Module):
    """Attention and MLP, each after a LayerNorm and around a skip connection."""

    def __init__(self, c: Config, rngs: nnx.Rngs) -> None:
        self.num_heads = c.num_heads
        self.norm1 = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.qkv = nnx.Linear(c.width, 3 * c.width, dtype=c.dtype, rngs=rngs)
        self.project = nnx.Linear(c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.up = nnx.Linear(c.width, c.hidden, dtype=c.dtype, rngs=rngs)
        self.down = nnx.Linear(c.hidden, c.width, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        x = x + self.project(attention(q, k, v, self.num_heads))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Token ids `(rows, length)` to logits; blocks in a Python loop."""

    def __init__(self, c: Config, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(c.vocabulary, c.width, dtype=c.dtype, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((c.length, c.width)))
        self.blocks = nnx.List([Block(c, rngs) for _ in range(c.num_blocks)])
        self.norm = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.head = nnx.Linear(
            c.width, c.vocabulary, use_bias=False, dtype=c.dtype, rngs=rngs
        )

    def __call__(self, ids: Array) -> Array:
        x = self.embed(ids)
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nnx.Module):
    """Attention and a gated MLP after RMSNorms; seven matrices."""

    def __init__(self, c: Config, rngs: nnx.Rngs) -> None:
        def linear(rows: int, cols: int) -> nnx.Linear:
            return nnx.Linear(rows, cols, use_bias=False, dtype=c.dtype, rngs=rngs)

        self.num_heads = c.num_heads
        self.norm1 = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.q = linear(c.width, c.width)
        self.k = linear(c.width, c.width)
        self.v = linear(c.width, c.width)
        self.o = linear(c.width, c.width)
        self.norm2 = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.gate = linear(c.width, c.hidden)
        self.up = linear(c.width, c.hidden)
        self.down = linear(c.hidden, c.width)

    def __call__(self, x: Array) -> Array:
        y = self.norm1(x)
        x = x + self.o(attention(self.q(y), self.k(y), self.v(y), self.num_heads))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def scan(blocks: LlamaBlock, x: Array) -> Array:
    """Run a stack of blocks one after the other, each recomputed in backward."""
    run = nnx.scan(
        lambda x, block: nnx.remat(lambda block, x: block(x))(block, x),
        in_axes=(nnx.Carry, 0),
        out_axes=nnx.Carry,
    )
    return run(x, blocks)


class Llama(nnx.Module):
    """Token ids `(rows, length)` to logits; blocks stacked on dim 0.

    Attributes:
        run_blocks: how the stack is run: `scan`, or something like it.
    """

    run_blocks: Callable[[Any, Array], Array]

    def __init__(self, c: Config, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(c.vocabulary, c.width, dtype=c.dtype, rngs=rngs)
        stack = nnx.vmap(lambda rngs: LlamaBlock(c, rngs))
        self.blocks = nnx.split_rngs(splits=c.num_blocks)(stack)(rngs)
        self.norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.head = nnx.Linear(
            c.width, c.vocabulary, use_bias=False, dtype=c.dtype, rngs=rngs
        )
        self.run_blocks = scan

    def __call__(self, ids: Array) -> Array:
        return self.head(self.norm(self.run_blocks(self.blocks, self.embed(ids))))


def next_token_loss(model: Any, ids: Array) -> Array:
    """Mean cross entropy of the next token, in float32."""
    logits = model(ids)[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()
