"""Train a byte-level GPT, fully sharded, on the source of Python's standard library.

Every machine has that text, so nothing is downloaded. Where JAX finds only CPUs this
runs on simulated devices; on a GPU or TPU host, on the real ones. Everything that has
to do with sharding says `fsdp_jax`; the rest is plain Flax.
"""

import argparse
import functools
import re
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

import fsdp_jax

NUM_BYTES = 256  # the vocabulary
HEAD_WIDTH = 32


class Block(nnx.Module):
    """Causal attention and an MLP, each behind a norm and around a skip connection."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, length, 3, -1, HEAD_WIDTH)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Bytes `(rows, length)` to logits of each next byte `(rows, length, 256)`."""

    def __init__(self, width: int, depth: int, context: int, rngs: nnx.Rngs, **dtype):
        normal = nnx.initializers.normal(1.0)  # learns faster than the default
        # Embed alone computes in the dtype of its table, unless told.
        embed = functools.partial(nnx.Embed, features=width, rngs=rngs, **dtype)
        self.embed = embed(NUM_BYTES, embedding_init=normal)
        self.position = embed(context)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, NUM_BYTES, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.embed(text) + self.position(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def generate(self, prompt: jax.Array, length: int, seed: int) -> jax.Array:
        """Sample `(rows, length)` bytes that continue a prompt `(rows, context)`."""

        def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = jax.random.categorical(key, self(window)[:, -1] / 0.7)
            return jnp.append(window[:, 1:], new[:, None], axis=1), new

        keys = jax.random.split(jax.random.key(seed), length)
        return jax.lax.scan(step, prompt, keys)[1].T


def shard(model: GPT, mp_policy: fsdp_jax.MixedPrecisionPolicy) -> None:
    """One communication group per block, and the root's for what is left."""
    for block in model.blocks:
        fsdp_jax.fully_shard(block, mp_policy=mp_policy)
    fsdp_jax.fully_shard(model, mp_policy=mp_policy)
    fsdp_jax.register_fsdp_forward_method(model, "generate")


def loss_fn(model: GPT, text: jax.Array) -> jax.Array:
    """Mean cross entropy of each next byte in nats; `text` is `(rows, context + 1)`."""
    logits = model(text[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return losses.mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: GPT, optimizer: fsdp_jax.Optimizer, text: jax.Array) -> jax.Array:
    """Update the model and the optimizer, and return the loss."""
    loss, grads = fsdp_jax.value_and_grad(loss_fn)(model, text)
    optimizer.update(model, grads)
    return loss


def train(model: GPT, text: np.ndarray, rows: int, args: argparse.Namespace) -> None:
    """AdamW with clipping, warmup over a tenth of the steps, and a cosine decay."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.lr, args.steps // 10, args.steps, end_value=args.lr / 50
    )
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    optimizer = fsdp_jax.Optimizer(model, clipped)
    rng, start, speed = np.random.default_rng(args.seed), 0.0, 0.0
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        "{task.fields[note]}",
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=args.steps, note="compiling")
        for step in range(args.steps):
            starts = rng.integers(len(text) - args.context, size=rows)
            batch = fsdp_jax.shard_batch(windows(text, starts, args.context), model)
            loss = float(train_step(model, optimizer, batch))
            if step == 0:  # the clock starts after it, because it compiled
                start = time.perf_counter()
            else:
                speed = step * rows * args.context / (time.perf_counter() - start)
            note = f"loss {loss:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, advance=1, note=note)
            if (step + 1) % max(args.steps // 10, 1) == 0:
                progress.print(f"step {step + 1:4}  loss {loss:.3f}")


def sample(model: GPT, prompt: jax.Array, length: int, seed: int) -> jax.Array:
    """Generate with each block gathered once, instead of anew for every byte."""
    for block in model.blocks:
        if isinstance(block, fsdp_jax.FSDPModule):
            block.unshard()
    return model.generate(prompt, length, seed)


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and those of every tenth file, which are held out."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    train = [file for i, file in enumerate(files) if i % 10]
    return np.concatenate(train), np.concatenate(files[::10])


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """Pieces of a text with their next byte, `(len(starts), context + 1)`."""
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def decode(row: jax.Array) -> str:
    return bytes(np.asarray(row, np.uint8)).decode("ascii", "replace")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags = {
        "steps": (500, "training steps"),
        "width": (128, f"width of the model, a multiple of {HEAD_WIDTH}"),
        "depth": (3, "number of blocks"),
        "context": (64, "bytes that the model sees at once"),
        "batch": (32, "rows per step over all devices, rounded up to divide by them"),
        "lr": (5e-3, "highest learning rate"),
        "seed": (0, "seed of the initial values, the batches and the sample"),
        "sample": (300, "bytes of text to generate at the end"),
        "devices": (8, "CPU devices to simulate; not used with GPUs or TPUs"),
    }
    for name, (default, text) in flags.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    text = "gather and compute in bfloat16; shards and sums of gradients stay float32"
    parser.add_argument("--bf16", action="store_true", help=text)
    text = "print a table of how each parameter is sharded"
    parser.add_argument("--describe", action="store_true", help=text)
    args = parser.parse_args()
    if args.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}")
    return args


def main() -> None:
    args, console = parse_args(), Console(highlight=False)
    # Before JAX starts its backends. It changes nothing where these are GPUs or TPUs.
    jax.config.update("jax_num_cpu_devices", args.devices)
    num_devices = jax.device_count()
    rows = -(-args.batch // num_devices) * num_devices
    dtype = {"dtype": jnp.bfloat16} if args.bf16 else {}
    model = GPT(args.width, args.depth, args.context, nnx.Rngs(args.seed), **dtype)
    dtypes = (jnp.bfloat16, jnp.float32) if args.bf16 else ()
    shard(model, fsdp_jax.MixedPrecisionPolicy(*dtypes))
    report = fsdp_jax.describe(model)
    if args.describe:
        console.print(report)
    console.print(
        f"{report.total_bytes / 1e6:.2f} MB of parameters, "
        f"{report.bytes_per_device / 1e6:.2f} MB on each of {num_devices} "
        f"{jax.default_backend()} devices"
    )

    text, held_out = read_text()
    starts = np.linspace(0, len(held_out) - args.context - 1, 8 * rows, dtype=int)
    tests = fsdp_jax.shard_batch(windows(held_out, starts, args.context), model)
    held_out_loss = fsdp_jax.shard_map(loss_fn)
    before = float(held_out_loss(model, tests))
    train(model, text, rows, args)
    after = float(held_out_loss(model, tests))

    # One prompt per device, each the text before the name of a held-out method.
    ends = [m.end() for m in re.finditer(rb"\n    def ", held_out.tobytes())]
    starts = np.resize(ends, num_devices) - args.context
    prompt = windows(held_out, starts, args.context)[:, :-1]
    prompt = fsdp_jax.shard_batch(prompt, model)
    new = fsdp_jax.shard_map(sample)(model, prompt, args.sample, args.seed)
    prompt, new = decode(prompt[0]), decode(new[0])
    console.print(Text("--- the prompt\n" + prompt, "dim"), soft_wrap=True)
    console.print(Text("--- the model goes on\n" + new), soft_wrap=True)
    console.print(f"held-out loss: {before:.2f} -> {after:.2f} nats per byte")


if __name__ == "__main__":
    main()
