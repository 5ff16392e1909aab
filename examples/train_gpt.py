"""Train a byte-level GPT, fully sharded, on the source of Python's standard library.

Every machine has the text, so there is nothing to download. Where JAX finds only CPUs
this runs on 8 simulated devices; on a GPU or TPU host, on the real ones. The parts that
have to do with sharding are `shard`, `train_step`, and the two calls of
`fsdp_jax.shard_map`; the rest is plain Flax.
"""

import argparse
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

import fsdp_jax

NUM_BYTES = 256  # the vocabulary


class Block(nnx.Module):
    """Causal attention and an MLP, each behind a norm and around a skip connection."""

    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs) -> None:
        self.num_heads = num_heads
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.num_heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Bytes `(batch, length)` to logits of the next byte `(batch, length, 256)`."""

    def __init__(
        self, width: int, depth: int, num_heads: int, context: int, *, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.Embed(NUM_BYTES, width, rngs=rngs)
        self.position = nnx.Embed(context, width, rngs=rngs)
        blocks = [Block(width, num_heads, rngs=rngs) for _ in range(depth)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, NUM_BYTES, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.embed(text) + self.position(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def generate(self, window: jax.Array, seed: jax.Array, length: int) -> jax.Array:
        """Sample `length` bytes after each row of `window` `(rows, context)`."""

        def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = jax.random.categorical(key, self(window)[:, -1] / 0.7)
            return jnp.append(window[:, 1:], new[:, None], axis=1), new

        keys = jax.random.split(jax.random.key(seed), length)
        return jax.lax.scan(step, window, keys)[1].T


def shard(model: GPT) -> GPT:
    """One communication group per block, and one for what is left: the root's."""
    for block in model.blocks:
        fsdp_jax.fully_shard(block)
    fsdp_jax.fully_shard(model)
    fsdp_jax.register_fsdp_forward_method(model, "generate")
    return model


def loss_fn(model: GPT, text: jax.Array) -> jax.Array:
    """Mean cross entropy of each next byte, in nats, over `(rows, context + 1)`."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(text[:, :-1]), text[:, 1:]
    )
    return losses.mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(
    model: GPT, optimizer: fsdp_jax.Optimizer, text: jax.Array
) -> jax.Array:
    """Update the model and the optimizer in place; returns the loss."""
    loss, grads = fsdp_jax.value_and_grad(loss_fn)(model, text)
    optimizer.update(model, grads)
    return loss


held_out_loss = nnx.jit(fsdp_jax.shard_map(loss_fn))


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Training bytes, and those of every tenth file, which are held out."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    held_out = np.concatenate(files[::10])
    return np.concatenate([f for i, f in enumerate(files) if i % 10]), held_out


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Pieces of a text, `(len(starts), length)`."""
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def random_windows(
    text: np.ndarray, rows: int, length: int, seed: int
) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    while True:
        yield windows(text, rng.integers(len(text) - length, size=rows), length)
