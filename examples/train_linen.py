"""Train a small Flax Linen transformer in a TrainState loop, fully sharded.

The task is to sort: the model reads digits in any order and then writes them in order.
Where JAX finds only CPUs this runs on simulated devices. Everything that has to do with
sharding says `fsdp_jax`; the rest is plain Linen.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import fsdp_jax
import fsdp_jax.linen

DIGITS, LENGTH = 10, 6


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and around a skip connection."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(num_heads=2)
        x = x + attention(nn.LayerNorm()(x))
        h = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=not train)(h)


class Sorter(nn.Module):
    """Digits `(rows, LENGTH)` to logits of the sorted ones, `(rows, LENGTH, 10)`."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, digits: jax.Array, train: bool = False) -> jax.Array:
        place = self.param("place", nn.initializers.normal(0.1), (LENGTH, self.width))
        x = nn.Embed(DIGITS, self.width)(digits) + place
        for _ in range(self.depth):
            x = Block(self.width)(x, train)
        return nn.Dense(DIGITS)(nn.LayerNorm()(x))


def draw(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    digits = rng.integers(DIGITS, size=(rows, LENGTH))
    return digits, np.sort(digits)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a Linen transformer to sort.")
    flags = {"steps": 300, "width": 64, "depth": 2, "batch": 128, "devices": 8}
    for name, default in flags.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # Before JAX starts its backends. It changes nothing where these are GPUs or TPUs.
    jax.config.update("jax_num_cpu_devices", args.devices)
    module = Sorter(args.width, args.depth)
    rng = np.random.default_rng(0)
    rows = -(-args.batch // jax.device_count()) * jax.device_count()
    digits, _ = draw(rng, rows)

    # Shapes first, so that no device ever holds the whole model.
    shapes = jax.eval_shape(module.init, jax.random.key(0), digits)
    model, _ = fsdp_jax.linen.fully_shard(module, shapes, modules="Block_*")
    variables = model.init(jax.random.key(0), digits)
    tx = fsdp_jax.linen.optimizer(optax.adamw(3e-3), model)
    state: Any = TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx
    )
    print(fsdp_jax.describe(model))

    @jax.jit
    def train_step(state: Any, digits: jax.Array, wanted: jax.Array, key: jax.Array):
        def loss_fn(params, digits, wanted, key):
            logits = state.apply_fn(
                {"params": params}, digits, train=True, rngs={"dropout": key}
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
            return losses.mean()

        # was: jax.value_and_grad(loss_fn)(state.params, digits, wanted, key)
        step = fsdp_jax.linen.value_and_grad(loss_fn, model)
        loss, grads = step(state.params, digits, wanted, key)
        return state.apply_gradients(grads=grads), loss

    for i in range(args.steps):
        batch = fsdp_jax.shard_batch(draw(rng, rows), model)
        key = jax.random.fold_in(jax.random.key(1), i)
        state, loss = train_step(state, *batch, key)
        if (i + 1) % max(args.steps // 10, 1) == 0:
            print(f"step {i + 1:4}  loss {float(loss):.3f}")

    digits, wanted = draw(rng, rows)
    logits = jax.jit(model.apply)({"params": state.params}, digits)
    right = float((jnp.argmax(logits, -1) == wanted).mean())
    print(f"{digits[0]} -> {np.asarray(jnp.argmax(logits[0], -1))}")
    print(f"right digits: {right:.0%}")


if __name__ == "__main__":
    main()
