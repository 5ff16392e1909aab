"""Train in float16 with a dynamic loss scale, fully sharded, and skip what overflows.

The smallest float16 is 6e-8 and the largest 65504, so gradients computed in it vanish
or overflow. The loss is therefore multiplied by a scale, and the gradients are divided
by it in float32. A step whose gradients are not finite is left out and halves the
scale; after enough good steps it doubles. It starts far too high here, to show both.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fsdp_jax

INPUTS, OUTPUTS = 16, 8


class Block(nnx.Module):
    """An MLP behind a norm and around a skip connection."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class MLP(nnx.Module):
    """`(rows, 16)` to `(rows, 8)` through residual blocks."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.inputs = nnx.Linear(INPUTS, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.outputs = nnx.Linear(width, OUTPUTS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x)


class LossScale(nnx.Module):
    """A factor for the loss: halved by an overflow, doubled after steps without one.

    The maximum keeps it finite where gradients are zero and so never overflow.
    """

    def __init__(
        self,
        model: nnx.Module,
        scale: float = 2.0**15,
        growth_interval: int = 2000,
        minimum: float = 1.0,
        maximum: float = 2.0**24,
    ) -> None:
        # On the model's mesh like all other state, or the second step compiles again.
        first = fsdp_jax.shard_batch((jnp.float32(scale), jnp.int32(0)), model)
        self.scale, self.good_steps = map(nnx.Variable, first)
        self.growth_interval = growth_interval
        self.minimum, self.maximum = minimum, maximum

    def adjust(self, finite: jax.Array) -> None:
        """Take note of a step whose gradients were finite, or were not."""
        good_steps = jnp.where(finite, self.good_steps[...] + 1, 0)
        grow = good_steps >= self.growth_interval
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        scale = jnp.clip(self.scale[...] * factor, self.minimum, self.maximum)
        self.scale[...] = scale
        self.good_steps[...] = jnp.where(grow, 0, good_steps)


def shard(model: MLP, mp_policy: fsdp_jax.MixedPrecisionPolicy) -> None:
    """One communication group per block, and the root's for what is left."""
    for block in model.blocks:
        fsdp_jax.fully_shard(block, mp_policy=mp_policy)
    fsdp_jax.fully_shard(model, mp_policy=mp_policy)


def scaled_loss(model: MLP, x: jax.Array, y: jax.Array, scale: jax.Array) -> jax.Array:
    """Mean squared error in float32, times the scale."""
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2) * scale


def loss_and_grads(
    model: MLP, x: jax.Array, y: jax.Array, scale: jax.Array
) -> tuple[jax.Array, Any]:
    """The loss and its gradients without the scale, float32 as the parameters are."""
    loss, grads = fsdp_jax.value_and_grad(scaled_loss)(model, x, y, scale)
    return loss / scale, jax.tree.map(lambda grad: grad / scale, grads)


def all_finite(grads: Any) -> jax.Array:
    """Whether no gradient on any device is infinite or NaN."""
    # Global arrays: `all` spans every device's shard, so all get one answer and agree.
    return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()


def update(model: MLP, optimizer: fsdp_jax.Optimizer, grads: Any) -> None:
    """Change the parameters, the moments and the step counter."""
    optimizer.update(model, grads)


def skip(model: MLP, optimizer: fsdp_jax.Optimizer, grads: Any) -> None:
    """Change none of them."""


@nnx.jit(donate_argnames=("model", "optimizer", "loss_scale"))
def train_step(
    model: MLP,
    optimizer: fsdp_jax.Optimizer,
    loss_scale: LossScale,
    x: jax.Array,
    y: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Update all, or the scale alone if a gradient is not finite.

    Returns:
        The loss, and whether all was updated.
    """
    loss, grads = loss_and_grads(model, x, y, loss_scale.scale[...])
    finite = all_finite(grads)
    nnx.cond(finite, update, skip, model, optimizer, grads)
    loss_scale.adjust(finite)
    return loss, finite


def make_optimizer(model: MLP, lr: float) -> fsdp_jax.Optimizer:
    """AdamW with clipping, both for gradients without the scale."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr))
    return fsdp_jax.Optimizer(model, clipped)


def make_batch(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `(rows, 16)`, and the waves `(rows, 8)` that the model shall learn."""
    x = rng.normal(size=(rows, INPUTS)).astype(np.float32)
    return x, np.sin(2 * x[:, :OUTPUTS]) + x[:, OUTPUTS:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small model in float16 with a dynamic loss scale.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags = {
        "steps": (300, "training steps"),
        "width": (64, "width of the model"),
        "depth": (2, "number of blocks"),
        "batch": (256, "rows per step over all devices, rounded up to divide by them"),
        "lr": (3e-3, "learning rate"),
        "seed": (0, "seed of the initial values and the batches"),
        "scale": (2.0**24, "loss scale of the first step"),
        "growth_interval": (100, "good steps after which the scale doubles"),
        "devices": (8, "CPU devices to simulate; not used with GPUs or TPUs"),
    }
    for name, (default, text) in flags.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # Before JAX starts its backends. It changes nothing where these are GPUs or TPUs.
    jax.config.update("jax_num_cpu_devices", args.devices)
    num_devices = jax.device_count()
    rows = -(-args.batch // num_devices) * num_devices
    model = MLP(args.width, args.depth, nnx.Rngs(args.seed))
    shard(model, fsdp_jax.MixedPrecisionPolicy(jnp.float16, reduce_dtype=jnp.float32))
    optimizer = make_optimizer(model, args.lr)
    loss_scale = LossScale(model, args.scale, args.growth_interval)

    rng, losses, skipped = np.random.default_rng(args.seed), [], 0
    for step in range(1, args.steps + 1):
        scale = float(loss_scale.scale[...])
        batch = fsdp_jax.shard_batch(make_batch(rng, rows), model)
        loss, finite = train_step(model, optimizer, loss_scale, *batch)
        losses.append(float(loss))
        line = f"step {step:4}  loss {losses[-1]:.4f}  scale 2**{np.log2(scale):.0f}"
        if not finite:
            skipped += 1
            print(f"{line}  skipped: a gradient overflowed")
        elif step % max(args.steps // 10, 1) == 0:
            print(line)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {skipped} steps skipped")


if __name__ == "__main__":
    main()
