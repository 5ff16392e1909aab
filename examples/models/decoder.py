"""A decoder-only language model of the Llama and Gemma families.

After Llama (Touvron et al., 2023, arXiv:2302.13971), with the grouped-query attention
of Llama 2 (arXiv:2307.09288), and Gemma (Gemma Team, 2024, arXiv:2403.08295): GeGLU,
an output head tied to the embedding, which is scaled. Layers are stacked and run in a
scan, and each is recomputed in the backward pass.

Simplified: norms multiply by `scale` where Gemma's multiply by `1 + scale`; rows have
no padding; `generate` is greedy.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Position = int | jax.Array
Cache = dict[str, jax.Array] | None
"""Keys and values seen so far, `(rows, length, kv_heads, head_dim)` each; stacked for
all layers outside of them. Without one, attention sees the tokens of the call alone."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    Attributes:
        num_kv_heads: heads of keys and values; each serves equally many query heads.
        activation: of the gate: `nnx.gelu` makes GeGLU (Gemma), `nnx.silu` SwiGLU
            (Llama).
        dtype: of activations and caches; parameters are float32.
    """

    vocab_size: int = 256
    width: int = 128
    depth: int = 4
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 32
    mlp_width: int = 512
    activation: Callable[[jax.Array], jax.Array] = nnx.gelu
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    dtype: DTypeLike = jnp.float32


def make_linear(config: DecoderConfig, rngs: nnx.Rngs, *sizes: int) -> nnx.Linear:
    return nnx.Linear(*sizes, use_bias=False, dtype=config.dtype, rngs=rngs)


def make_norm(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    epsilon, dtype = config.norm_eps, config.dtype
    return nnx.RMSNorm(config.width, epsilon=epsilon, dtype=dtype, rngs=rngs)


def make_embed(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Embed:
    sizes = (config.vocab_size, config.width)
    return nnx.Embed(*sizes, dtype=config.dtype, rngs=rngs)


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotate `(rows, length, heads, head_dim)` by angles for `(length,)` positions."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half) / half)
    angles = positions[:, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary embeddings, without biases."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(make_linear, config, rngs)
        self.config = config
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.query = linear(config.width, query_width)
        self.key = linear(config.width, kv_width)
        self.value = linear(config.width, kv_width)
        self.out = linear(query_width, config.width)

    def __call__(
        self, x: jax.Array, cache: Cache = None, start: Position = 0
    ) -> tuple[jax.Array, Cache]:
        """Attend to what is at and before each position; the first one is `start`."""
        rows, length, _ = x.shape

        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(rows, length, -1, self.config.head_dim)

        positions = start + jnp.arange(length)
        base = self.config.rope_base
        query = rotate(heads(self.query(x)), positions, base)
        key, value = rotate(heads(self.key(x)), positions, base), heads(self.value(x))
        if cache is not None:
            where = (0, start, 0, 0)
            key = jax.lax.dynamic_update_slice(cache["key"], key, where)
            value = jax.lax.dynamic_update_slice(cache["value"], value, where)
            cache = {"key": key, "value": value}
        seen = jnp.arange(key.shape[1]) <= positions[:, None]
        mixed = jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])
        return self.out(mixed.reshape(rows, length, -1)), cache


class GatedMLP(nnx.Module):
    """GeGLU or SwiGLU: one projection gates the other."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(make_linear, config, rngs)
        self.activation = config.activation
        self.gate = linear(config.width, config.mlp_width)
        self.up = linear(config.width, config.mlp_width)
        self.down = linear(config.mlp_width, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """Attention and an MLP, each behind a norm and around a skip connection."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = make_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = make_norm(config, rngs)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, cache: Cache = None, start: Position = 0
    ) -> tuple[jax.Array, Cache]:
        mixed, cache = self.attention(self.norm1(x), cache, start)
        x = x + mixed
        return x + self.mlp(self.norm2(x)), cache


class Decoder(nnx.Module):
    """Tokens `(rows, length)` to logits of the next `(rows, length, vocab_size)`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, rngs=rngs)

        self.config = config
        self.embed = make_embed(config, rngs)
        self.layers = stack(rngs)
        self.norm = make_norm(config, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.forward(tokens)[0]

    def forward(
        self, tokens: jax.Array, cache: Cache = None, start: Position = 0
    ) -> tuple[jax.Array, Cache]:
        """Logits, and the cache with `tokens` in it, the first of them at `start`."""

        @nnx.scan(in_axes=(0, nnx.Carry, 0, None), out_axes=(nnx.Carry, 0))
        @nnx.remat
        def run(
            layer: DecoderLayer, x: jax.Array, cache: Cache, start: Position
        ) -> tuple[jax.Array, Cache]:
            return layer(x, cache, start)

        x = self.embed(tokens) * self.config.width**0.5
        x, cache = run(self.layers, x, cache, start)
        return self.embed.attend(self.norm(x)), cache

    def empty_cache(self, rows: int, length: int) -> Cache:
        """A cache for `length` positions of each row."""
        config = self.config
        shape = (config.depth, rows, length, config.num_kv_heads, config.head_dim)
        return {name: jnp.zeros(shape, config.dtype) for name in ("key", "value")}

    def generate(self, prompt: jax.Array, num_tokens: int) -> jax.Array:
        """The likeliest `(rows, num_tokens)` after a prompt `(rows, length)`."""
        rows, length = prompt.shape
        cache = self.empty_cache(rows, length + num_tokens)
        logits, cache = self.forward(prompt, cache)

        @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def step(
            model: Decoder, carry: tuple[jax.Array, Cache], position: jax.Array
        ) -> tuple[tuple[jax.Array, Cache], jax.Array]:
            token, cache = carry
            logits, cache = model.forward(token[:, None], cache, position)
            return (logits[:, -1].argmax(-1), cache), token

        first = logits[:, -1].argmax(-1)
        positions = length + jnp.arange(num_tokens)
        _, tokens = step(self, (first, cache), positions)
        return tokens.T
