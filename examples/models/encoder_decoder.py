"""A transformer that reads one sequence and writes another.

After T5 (Raffel et al., 2019, arXiv:1910.10683): a bidirectional encoder, and a causal
decoder that also attends to what was encoded. Blocks are pre-norm, no layer has a bias,
and one table embeds the tokens of both sides and is the output head. Whisper (Radford
et al., 2022, arXiv:2212.04356) is alike, with sound in place of the source tokens.

Simplified: positions are learned vectors for each side, as in Whisper's decoder, where
T5 has relative biases; there is no dropout; the decoder projects what was encoded anew
for every token that it generates, always the likeliest one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

PAD = 0
"""Token that fills up a source, and starts a target, as in T5."""


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
    """Sizes of an encoder-decoder; `depth` blocks on each side."""

    vocab_size: int = 256
    max_length: int = 128
    width: int = 128
    depth: int = 3
    num_heads: int = 4
    mlp_width: int = 512


def attention(config: EncoderDecoderConfig, rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
    """Attention that keeps no keys and values, unless it is called with `decode`."""
    return nnx.MultiHeadAttention(
        config.num_heads, config.width, use_bias=False, decode=False, rngs=rngs
    )


class MLP(nnx.Module):
    """Two linear layers with ReLU between them."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.up = linear(config.width, config.mlp_width)
        self.down = linear(config.mlp_width, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


class EncoderBlock(nnx.Module):
    """Self-attention and an MLP, each behind a norm and around a skip connection."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = attention(config, rngs)
        self.norm2 = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class DecoderBlock(nnx.Module):
    """Causal self-attention, attention to what was encoded, and an MLP."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(config.width, rngs=rngs)
        self.self_attention = attention(config, rngs)
        self.norm2 = nnx.RMSNorm(config.width, rngs=rngs)
        self.cross_attention = attention(config, rngs)
        self.norm3 = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, encoded: jax.Array, mask: jax.Array, cached: bool
    ) -> jax.Array:
        """One token per row if `cached`, which attends to those before by the cache."""
        causal = None if cached else nnx.make_causal_mask(x[..., 0])
        x = x + self.self_attention(self.norm1(x), mask=causal, decode=cached)
        x = x + self.cross_attention(self.norm2(x), encoded, mask=mask)
        return x + self.mlp(self.norm3(x))


class EncoderDecoder(nnx.Module):
    """Tokens to logits of the next target token `(rows, target_length, vocab_size)`."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        width, depth = config.width, range(config.depth)
        self.embed = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.source_positions = nnx.Embed(config.max_length, width, rngs=rngs)
        self.target_positions = nnx.Embed(config.max_length, width, rngs=rngs)
        self.encoder = nnx.List([EncoderBlock(config, rngs=rngs) for _ in depth])
        self.encoder_norm = nnx.RMSNorm(width, rngs=rngs)
        self.decoder = nnx.List([DecoderBlock(config, rngs=rngs) for _ in depth])
        self.decoder_norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Logits for a source and the target as far as it is known, `PAD` first."""
        return self.decode(target, self.encode(source), source)

    def encode(self, source: jax.Array) -> jax.Array:
        """Encode `(rows, length)` tokens as `(rows, length, width)`."""
        x = self.embed(source) + self.source_positions(jnp.arange(source.shape[1]))
        for block in self.encoder:
            x = block(x, nnx.make_attention_mask(source != PAD, source != PAD))
        return self.encoder_norm(x)

    def decode(
        self,
        target: jax.Array,
        encoded: jax.Array,
        source: jax.Array,
        position: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next tokens; `source` says which of `encoded` are padding.

        With a position, `target` is the one token there, and those before are in the
        caches of the blocks.
        """
        cached = position is not None
        where = position[None] if cached else jnp.arange(target.shape[1])
        mask = nnx.make_attention_mask(jnp.ones_like(target), source != PAD)
        x = self.embed(target) + self.target_positions(where)
        for block in self.decoder:
            x = block(x, encoded, mask, cached)
        return self.embed.attend(self.decoder_norm(x))

    def generate(self, source: jax.Array, num_tokens: int) -> jax.Array:
        """The likeliest target `(rows, num_tokens)` for a source `(rows, length)`."""
        encoded = self.encode(source)
        start = jnp.full((source.shape[0], 1), PAD)
        attentions = [block.self_attention for block in self.decoder]
        for attention in attentions:
            attention.init_cache((len(source), num_tokens, attention.in_features))
        cached = nnx.StateAxes({nnx.Cache: nnx.Carry, ...: None})

        @nnx.scan(in_axes=(cached, nnx.Carry, None, None, 0), out_axes=(nnx.Carry, 0))
        def step(
            model: EncoderDecoder,
            token: jax.Array,
            encoded: jax.Array,
            source: jax.Array,
            position: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            logits = model.decode(token, encoded, source, position)
            token = logits.argmax(-1)
            return token, token[:, 0]

        _, tokens = step(self, start, encoded, source, jnp.arange(num_tokens))
        for attention in attentions:
            attention.cached_key = attention.cached_value = None
            attention.cache_index = None
        return tokens.T
