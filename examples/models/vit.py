"""A vision transformer that classifies images.

After ViT (Dosovitskiy et al., 2020, arXiv:2010.11929): the image is cut into patches,
each embedded by one convolution; a learned class token goes in front, learned positions
are added, and pre-norm transformer blocks follow. The class token is classified.

Simplified: the head is one linear layer, as in the paper's fine-tuning; attention
weights have no dropout of their own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Sizes of a vision transformer; images are square, with channels last."""

    image_size: int = 32
    patch_size: int = 4
    channels: int = 3
    num_classes: int = 10
    width: int = 128
    depth: int = 4
    num_heads: int = 4
    mlp_width: int = 512
    dropout_rate: float = 0.1

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class MLP(nnx.Module):
    """Two linear layers with GELU between them and dropout after each."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(config.width, config.mlp_width, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(nnx.gelu(self.up(x)))
        return self.dropout(self.down(x))


class EncoderBlock(nnx.Module):
    """Attention and an MLP, each behind a norm and around a skip connection."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.num_heads, config.width, decode=False, rngs=rngs
        )
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)
        self.norm2 = nnx.LayerNorm(config.width, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class ViT(nnx.Module):
    """Images `(rows, size, size, channels)` to logits `(rows, num_classes)`."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        width, patch = config.width, (config.patch_size, config.patch_size)
        normal = nnx.initializers.normal(0.02)
        positions = (1, 1 + config.num_patches, width)
        self.patch_embed = nnx.Conv(
            config.channels, width, patch, strides=patch, padding="VALID", rngs=rngs
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(normal(rngs.params(), positions))
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)
        self.blocks = nnx.List(
            [EncoderBlock(config, rngs=rngs) for _ in range(config.depth)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = self.patch_embed(images)
        rows, *_, width = patches.shape
        patches = patches.reshape(rows, -1, width)
        class_token = jnp.broadcast_to(self.class_token[...], (rows, 1, width))
        x = jnp.concatenate([class_token, patches], axis=1) + self.positions[...]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))
