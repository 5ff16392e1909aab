"""Shard a model with `fully_shard`: first in one process, then over two.

Runs on any machine, on its CPU. The script starts itself twice more, as the two
processes of a `jax.distributed` program, which shard an `nnx.Linear(8, 8)` and compare
every shard with the same training step of an unsharded copy.
"""

import argparse
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard

NUM_PROCESSES = 2
TIME_LIMIT_S = 120


def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def one_process() -> None:
    """With one device each shard is the whole parameter; all else is the same."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 4, rngs=rngs)
    )
    model = fully_shard(model)
    print(type(model).__name__)  # SequentialFSDPModule

    x, y = jax.random.normal(jax.random.key(1), (2, 4)), jnp.ones((2, 4))
    out = model(x)  # gathers the parameters for the length of the call
    print(out.shape)  # (2, 4)

    optimizer = fsdp_jax.Optimizer(model, optax.sgd(0.1))
    loss, grads = fsdp_jax.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    print(f"loss {loss:.3f}, after one step {loss_fn(model, x, y):.3f}")

    try:
        fully_shard(model)
    except RuntimeError as error:
        print(error)  # fully_shard has already been applied ...


def one_of_two_processes(rank: int, port: int) -> None:
    """Train one step on half of the rows, and check it against the unsharded step."""
    jax.distributed.initialize(f"127.0.0.1:{port}", NUM_PROCESSES, rank)
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(42))  # the same values in each process
    x, y = np.random.default_rng(42).normal(size=(2, 4, 8)).astype(np.float32)

    # The reference sees all rows; its arrays are this process's own.
    reference = nnx.Linear(8, 8, rngs=nnx.Rngs(42))
    expected_out = reference(jnp.asarray(x))
    expected_loss, expected_grads = nnx.value_and_grad(loss_fn)(reference, x, y)
    nnx.Optimizer(reference, optax.sgd(0.1), wrt=nnx.Param).update(
        reference, expected_grads
    )

    fully_shard(model)
    print(rank, "shards", shapes(nnx.state(model)))  # kernel (4, 8), bias (4,)

    mine = slice(rank * 2, rank * 2 + 2)
    x, y = fsdp_jax.shard_batch((x[mine], y[mine]), model)
    check_slices(model(x), expected_out)  # all-gather inside the call

    loss, grads = fsdp_jax.value_and_grad(loss_fn)(model, x, y)  # reduce-scatter
    print(rank, "gradients", shapes(grads))  # the shapes of the shards again
    check_slices(loss, expected_loss)
    check_slices(grads, expected_grads)

    fsdp_jax.Optimizer(model, optax.sgd(0.1)).update(model, grads)
    check_slices(nnx.state(model), nnx.state(reference))
    assert isinstance(model, fsdp_jax.FSDPModule)  # as well as an nnx.Linear
    model.unshard()
    print(rank, "unsharded", shapes(nnx.state(model)))  # kernel (8, 8), bias (8,)
    check_slices(nnx.state(model), nnx.state(reference))
    print(rank, "equal to the unsharded run, slice by slice")
    jax.distributed.shutdown()


def shapes(state: Any) -> dict[str, tuple[int, ...]]:
    """Shape of the piece that a device holds, by the name of the parameter."""
    return {
        str(path[-1]): fsdp_jax.local_shape(variable)
        for path, variable in nnx.to_flat_state(state)
    }


def check_slices(arrays: Any, expected: Any) -> None:
    """Compare the pieces that this process holds with the same slices of `expected`."""
    for array, whole in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(expected), strict=True
    ):
        for piece in array.addressable_shards:
            np.testing.assert_allclose(piece.data, whole[piece.index], 1e-5, 1e-6)


def start_processes() -> bool:
    """Run the two processes; returns whether both checked out in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])  # a free one
    command = [sys.executable, __file__, "--port", port, "--rank"]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(NUM_PROCESSES)
    ]
    try:
        deadline = time.monotonic() + TIME_LIMIT_S
        codes: list[int | None] = [None]
        while None in codes and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
            if any(codes):  # the other one would wait for ever
                break
        return all(code == 0 for code in codes)
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            print(process.communicate()[0], end="")


def main() -> None:
    parser = argparse.ArgumentParser(description="Shard a model with fully_shard.")
    parser.add_argument("--rank", type=int, help="set for the processes it starts")
    parser.add_argument("--port", type=int, help="set for the processes it starts")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)  # per process
    if args.rank is not None:
        one_of_two_processes(args.rank, args.port)
        return
    one_process()
    if not start_processes():
        sys.exit("quickstart: the two processes failed, or took too long")


if __name__ == "__main__":
    main()
