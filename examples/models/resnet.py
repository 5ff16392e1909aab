"""A residual convolutional network that classifies small images.

After the CIFAR-10 networks of He et al. (2015, arXiv:1512.03385): one 3x3 convolution,
stages of basic blocks that halve the image and widen it from the second stage on, and a
linear layer on the mean over the image. Every convolution is followed by BatchNorm.

Simplified: where a block changes the shape, a 1x1 convolution projects the shortcut
(the paper's option B; its CIFAR-10 networks pad with zeros).
"""

import dataclasses

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a residual network.

    Attributes:
        widths: channels of each stage.
        blocks_per_stage: basic blocks, of two convolutions each.
        batch_axis: mapped axis over which BatchNorm takes its statistics; None for
            those of the rows at hand.
    """

    channels: int = 3
    num_classes: int = 10
    widths: tuple[int, ...] = (16, 32, 64)
    blocks_per_stage: int = 3
    batch_axis: str | None = None


class ConvNorm(nnx.Module):
    """A convolution without bias, and BatchNorm."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int,
        batch_axis: str | None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (size, size),
            strides=(stride, stride),
            use_bias=False,
            kernel_init=nnx.initializers.he_normal(),
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            outputs, momentum=0.9, axis_name=batch_axis, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions around a shortcut, projected where the shape changes."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        batch_axis: str | None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.first = ConvNorm(inputs, outputs, 3, stride, batch_axis, rngs=rngs)
        self.second = ConvNorm(outputs, outputs, 3, 1, batch_axis, rngs=rngs)
        same = inputs == outputs and stride == 1
        self.shortcut = nnx.data(
            None
            if same
            else ConvNorm(inputs, outputs, 1, stride, batch_axis, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return nnx.relu(self.second(nnx.relu(self.first(x))) + shortcut)


class ResNet(nnx.Module):
    """Images `(rows, height, width, channels)` to logits `(rows, num_classes)`."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        axis, inputs = config.batch_axis, config.widths[0]
        self.stem = ConvNorm(config.channels, inputs, 3, 1, axis, rngs=rngs)
        blocks = []
        for stage, width in enumerate(config.widths):
            for i in range(config.blocks_per_stage):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(BasicBlock(inputs, width, stride, axis, rngs=rngs))
                inputs = width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))
