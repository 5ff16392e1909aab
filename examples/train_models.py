"""Shard and train every architecture of `models/`, each on a small synthetic task.

The models are plain Flax. What makes them fully sharded is here, in three places: one
`fully_shard` per block and one for the root, `fsdp_jax.value_and_grad`, and
`fsdp_jax.Optimizer`. Where JAX finds only CPUs this runs on simulated devices.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models.decoder import Decoder, DecoderConfig
from models.encoder_decoder import PAD, EncoderDecoder, EncoderDecoderConfig
from models.moe import MoEConfig, MoETransformer
from models.resnet import ResNet, ResNetConfig
from models.vit import ViT, ViTConfig

import fsdp_jax
from fsdp_jax import Shard, fully_shard, register_fsdp_forward_method

# How each is sharded: blocks first, root last. `how` goes to every `fully_shard`.


def shard_decoder(model: Decoder, **how: Any) -> Decoder:
    """The stack is one group per layer, and cut along another dim than the layers'."""
    fully_shard(model.layers, shard_placement_fn=lambda _: Shard(1), **how)
    fully_shard(model, **how)
    register_fsdp_forward_method(model, "generate")
    return model


def shard_blocks(model: Any, **how: Any) -> Any:
    """ViT and ResNet: one group per block, one for all that is left."""
    fully_shard(list(model.blocks), **how)
    return fully_shard(model, **how)


def shard_encoder_decoder(model: EncoderDecoder, **how: Any) -> EncoderDecoder:
    """One group per block on both sides; each way in gathers what it reads itself."""
    fully_shard([*model.encoder, *model.decoder], **how)
    fully_shard(model, **how)
    for name in ("encode", "decode", "generate"):
        register_fsdp_forward_method(model, name)
    return model


def shard_moe(model: MoETransformer, **how: Any) -> MoETransformer:
    """Experts are groups of their own, so that attention does not wait for them."""
    for layer in model.layers:
        fully_shard(layer.moe.experts, **how)
        fully_shard(layer, **how)
    return fully_shard(model, **how)


# Losses. With reduction="mean" each device returns the mean over its rows.


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def next_token_loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def moe_loss(model: MoETransformer, tokens: jax.Array) -> jax.Array:
    """The router's losses count for little: 0.001 and 0.01, as in their papers."""
    logits, router = model(tokens[:, :-1])
    loss = cross_entropy(logits, tokens[:, 1:]).mean()
    return loss + 0.001 * router["z_loss"] + 0.01 * router["load_balance"]


def image_loss(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return cross_entropy(model(images), labels).mean()


def target_loss(
    model: EncoderDecoder, source: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sum over the tokens that are no padding, and their number, for "weighted"."""
    known = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
    losses, weights = cross_entropy(model(source, known), target), target != PAD
    return jnp.sum(losses * weights), jnp.sum(weights, dtype=jnp.float32)


# Tasks: batches of host arrays, rows first.


def counting(rng: np.random.Generator, rows: int) -> tuple[np.ndarray]:
    """Numbers that go up by one from a random start, `(rows, 17)`, modulo 64."""
    return ((rng.integers(64, size=(rows, 1)) + np.arange(17)) % 64,)


def stripes(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy stripes in one of four directions, `(rows, 16, 16, 3)`, and which one."""
    labels = rng.integers(4, size=rows)
    angle = (np.pi / 4 * labels)[:, None, None]
    phase = rng.uniform(0, 2 * np.pi, size=(rows, 1, 1))
    y, x = np.mgrid[:16, :16]
    waves = np.cos(x * np.cos(angle) + y * np.sin(angle) + phase)
    noise = rng.normal(size=(rows, 16, 16, 3))
    return (waves[..., None] + 0.5 * noise).astype(np.float32), labels


def reversing(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources of 2 to 8 random tokens and the same in reverse, padded, `(rows, 8)`."""
    lengths = rng.integers(2, 9, size=(rows, 1))
    there = np.arange(8) < lengths
    source = np.where(there, rng.integers(1, 16, size=(rows, 8)), PAD)
    backwards = np.take_along_axis(source, (lengths - 1 - np.arange(8)) % 8, axis=1)
    return source, np.where(there, backwards, PAD)


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train, and on what."""

    make: Callable[[nnx.Rngs], Any]
    shard: Callable[..., Any]
    loss: Callable[..., Any]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]
    reduction: str = "mean"


def make_decoder(rngs: nnx.Rngs) -> Decoder:
    config = DecoderConfig(vocab_size=64, width=64, depth=2, head_dim=16, mlp_width=128)
    return Decoder(config, rngs=rngs)


def make_vit(rngs: nnx.Rngs) -> ViT:
    config = ViTConfig(image_size=16, num_classes=4, width=64, depth=2, mlp_width=128)
    return ViT(config, rngs=rngs)


def make_resnet(rngs: nnx.Rngs) -> ResNet:
    # The axis of the default mesh: statistics are those of the whole batch.
    config = ResNetConfig(
        num_classes=4, widths=(16, 32), blocks_per_stage=1, batch_axis="fsdp"
    )
    return ResNet(config, rngs=rngs)


def make_encoder_decoder(rngs: nnx.Rngs) -> EncoderDecoder:
    config = EncoderDecoderConfig(
        vocab_size=16, max_length=8, width=64, depth=2, mlp_width=128
    )
    return EncoderDecoder(config, rngs=rngs)


def make_moe(rngs: nnx.Rngs) -> MoETransformer:
    config = MoEConfig(
        vocab_size=64, width=64, depth=2, head_dim=16, mlp_width=64, num_experts=4
    )
    return MoETransformer(config, rngs=rngs)


TASKS = {
    "decoder": Task(make_decoder, shard_decoder, next_token_loss, counting),
    "vit": Task(make_vit, shard_blocks, image_loss, stripes),
    "resnet": Task(make_resnet, shard_blocks, image_loss, stripes),
    "encoder_decoder": Task(
        make_encoder_decoder, shard_encoder_decoder, target_loss, reversing, "weighted"
    ),
    "moe": Task(make_moe, shard_moe, moe_loss, counting),
}


def train(task: Task, steps: int, rows: int, rate: float) -> list[float]:
    """Train with AdamW and clipping; the loss of each step."""
    model = task.shard(task.make(nnx.Rngs(0)))
    adamw = optax.adamw(rate, weight_decay=0.01)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    optimizer = fsdp_jax.Optimizer(model, tx)
    value_and_grad = fsdp_jax.value_and_grad(task.loss, reduction=task.reduction)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def train_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = value_and_grad(model, *batch)
        optimizer.update(model, grads)
        return loss

    rng, losses = np.random.default_rng(0), []
    for _ in range(steps):
        batch = fsdp_jax.shard_batch(task.batch(rng, rows), model)
        losses.append(float(train_step(model, optimizer, batch)))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train small models of public architectures, fully sharded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    text = "which to train, one after the other"
    names = list(TASKS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, help=text)
    text = "training steps of each"
    parser.add_argument("--steps", type=int, default=100, help=text)
    text = "rows per step on each device"
    parser.add_argument("--rows", type=int, default=4, help=text)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    text = "CPU devices to simulate; not used with GPUs or TPUs"
    parser.add_argument("--devices", type=int, default=8, help=text)
    args = parser.parse_args()
    # Before JAX starts its backends. It changes nothing where these are GPUs or TPUs.
    jax.config.update("jax_num_cpu_devices", args.devices)
    rows = args.rows * jax.device_count()
    for name in args.models:
        losses = train(TASKS[name], args.steps, rows, args.lr)
        print(f"{name:16} loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
