"""The programs under comparison: one training step of one model, written in each way.

What lives here: how a step is partitioned, its arguments, and its options. What must
not: models (`models`), compiling, timing and tables.

    auto          automatic partitioning: plain Flax, dim-0 shards on one flat axis
    unsharded     plain Flax on the first device
    keep          fsdp_jax, gathered weights kept until backward
    ours          fsdp_jax as it comes
    ours+options  the same, compiled with fsdp_jax.compiler_options
    ours+ahead    the same, a scanned stack run by fsdp_jax.scan_layers
    ours[F,B,R]   the same, with fsdp_jax.Ordering(F, B, R)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard

_PATTERN = re.compile(r"(auto|unsharded|keep|ours)(\+options|\+ahead)?(\[.*\])?")


@dataclasses.dataclass(frozen=True)
class Program:
    """A way to write a training step.

    Attributes:
        name: as the tables show it.
        kind: `auto`, `unsharded`, `keep` or `ours`.
        options: whether it is compiled with `fsdp_jax.compiler_options`.
        ahead: whether a scanned stack gathers one layer ahead.
        ordering: what collectives wait for; None: the default.
    """

    name: str
    kind: str
    options: bool = False
    ahead: bool = False
    ordering: fsdp_jax.Ordering | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is plain Flax, without fsdp_jax."""
        return self.kind in ("auto", "unsharded")

    def compiler_options(self, devices: Sequence[Any]) -> dict[str, Any]:
        """Options to compile with.

        GPUs get the scheduler that hides collectives in every program: it is no merit
        of a program that somebody turned it on.
        """
        options: dict[str, Any] = {}
        if devices[0].platform in ("gpu", "cuda"):
            options["xla_gpu_enable_latency_hiding_scheduler"] = True
        if self.options:
            options |= fsdp_jax.compiler_options(devices)
        return options


def parse(name: str) -> Program:
    """Read the name of a program.

    Raises:
        ValueError: there is none of that name.
    """
    found = _PATTERN.fullmatch(name)
    if found is None or (found[1] != "ours" and (found[2] or found[3])):
        raise ValueError(
            f"unknown program {name!r}: choose from auto, keep, ours, ours+options, "
            "ours+ahead, ours[FORWARD,BACKWARD,REDUCTION], and on CPU unsharded"
        )
    ordering = None
    if found[3]:
        words = found[3].strip("[]").split(",")
        if len(words) != 3:
            raise ValueError(f"unknown ordering in {name!r}: write three words")
        ordering = fsdp_jax.Ordering(*words)  # pyright: ignore[reportArgumentType]
    extra = found[2] or ""
    return Program(name, found[1], extra == "+options", extra == "+ahead", ordering)


@dataclasses.dataclass(frozen=True)
class Step:
    """A jitted training step with its arguments, abstract or not.

    Attributes:
        jitted: has `.lower`.
        args: its arguments; the last one is the batch.
        returns_state: whether it returns `(new first argument, loss)` rather than
            changing its arguments and returning the loss.
    """

    jitted: Any
    args: tuple[Any, ...]
    returns_state: bool

    def runner(self, compiled: Any) -> Callable[[], Any]:
        """A function that takes one step more each time and returns the loss."""
        args = self.args

        def run() -> Any:
            nonlocal args
            if not self.returns_state:
                return compiled(*args)
            state, loss = compiled(*args)
            args = (state, *args[1:])
            return loss

        return run


def build(
    program: Program,
    config: models.Config,
    make_model: Callable[[models.Config, nnx.Rngs], Any],
    devices: Sequence[Any],
    num_rows: int,
    offload_policy: fsdp_jax.OffloadPolicy = fsdp_jax.OffloadPolicy(),  # noqa: B008
) -> Step:
    """Make the step of a program.

    Args:
        program: which one.
        config: size of the model.
        make_model: `models.GPT` or `models.Llama`.
        devices: to shard over. If they are only there to be compiled for, all arrays
            are abstract.
        num_rows: of the batch, over all devices.
        offload_policy: of the programs that use fsdp_jax.
    """
    if program.kind == "unsharded":
        devices = devices[:1]
    abstract = type(devices[0].client).__name__ == "CompileOnlyPyClient"

    def make() -> Any:
        return make_model(config, nnx.Rngs(0))

    model = nnx.eval_shape(make) if abstract else make()
    ids: Any = jax.ShapeDtypeStruct((num_rows, config.length), jnp.int32)
    if not abstract:
        ids = jax.random.randint(jax.random.key(0), ids.shape, 0, config.vocabulary)
    tx = optax.adamw(1e-3)
    if program.is_plain:
        return _plain(model, tx, ids, devices, abstract)
    return _sharded(program, config, model, tx, ids, devices, offload_policy)


def _plain(
    model: Any, tx: Any, ids: Any, devices: Sequence[Any], abstract: bool
) -> Step:
    """Plain Flax with every array cut along its first dim that divides."""
    mesh = Mesh(np.array(devices), ("fsdp",))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    if isinstance(model, models.Llama):
        # Otherwise the partitioner gathers activations in place of weights.
        model.run_blocks = _on(rows)

    def sharding(path: Any, x: Any) -> NamedSharding:
        # A scan slices dim 0 of a stack: cutting it would move the stack around.
        stacked = isinstance(model, models.Llama) and "blocks" in map(_key, path)
        dims = range(int(stacked), len(x.shape))
        cut = next((d for d in dims if x.shape[d] % mesh.size == 0), None)
        spec = () if cut is None else (*[None] * cut, "fsdp")
        return NamedSharding(mesh, PartitionSpec(*spec))

    def place(x: Any, where: NamedSharding) -> Any:
        if abstract:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        return jax.device_put(x, where)

    def optimizer_of(model: Any) -> nnx.Optimizer:
        return nnx.Optimizer(model, tx, wrt=nnx.Param)

    optimizer = nnx.eval_shape(optimizer_of, model) if abstract else optimizer_of(model)
    graphdef, state = nnx.split((model, optimizer))
    shardings = jax.tree.map_with_path(sharding, state)

    def step(state: Any, ids: Any) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(models.next_token_loss)(model, ids)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    whole = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole))
    placed = jax.tree.map(place, state, shardings)
    return Step(jitted, (placed, place(ids, rows)), returns_state=True)


def _on(rows: NamedSharding) -> Callable[[Any, Any], Any]:
    """`models.scan` that is told how the batch is cut."""

    def run(blocks: Any, x: Any) -> Any:
        return models.scan(blocks, jax.lax.with_sharding_constraint(x, rows))

    return run


def _key(entry: Any) -> Any:
    """What a step of a path is called."""
    return getattr(entry, "key", getattr(entry, "name", None))


def _sharded(
    program: Program,
    config: models.Config,
    model: Any,
    tx: Any,
    ids: Any,
    devices: Sequence[Any],
    offload_policy: fsdp_jax.OffloadPolicy,
) -> Step:
    """Our own, as the README tells to write it."""
    mesh, dims = fsdp_jax.make_mesh(devices)
    options: dict[str, Any] = {
        "mesh": mesh,
        "dp_mesh_dims": dims,
        "offload_policy": offload_policy,
        "mp_policy": fsdp_jax.MixedPrecisionPolicy(param_dtype=config.dtype),
    }
    if program.kind == "keep":
        options["reshard_after_forward"] = False
    if isinstance(model, models.Llama):
        # Dim 0 of the stack is the layers.
        by_layer: dict[str, Any] = {"shard_placement_fn": lambda _: fsdp_jax.Shard(1)}
        fully_shard(model.blocks, **options, **by_layer)
    else:
        for block in model.blocks:
            fully_shard(block, **options)
    keep = {"reshard_after_forward": False} if config.keep_head else {}
    fully_shard(model.head, **{**options, **keep})
    fully_shard(model, **options)
    if program.ordering:
        assert isinstance(model, fsdp_jax.FSDPModule)
        model.set_ordering(program.ordering)
    if program.ahead:
        if not isinstance(model, models.Llama):
            raise ValueError(f"{program.name} is for models with scanned layers")
        model.run_blocks = _scan_ahead
    optimizer = fsdp_jax.Optimizer(model, tx)

    def step(model: Any, optimizer: Any, ids: Any) -> Any:
        loss, grads = fsdp_jax.value_and_grad(models.next_token_loss)(model, ids)
        optimizer.update(model, grads)
        return loss

    jitted = nnx.jit(step, donate_argnums=(0, 1))
    batch = fsdp_jax.shard_batch(ids, model)
    return Step(jitted, (model, optimizer, batch), returns_state=False)


def _scan_ahead(blocks: Any, x: Any) -> Any:
    """`models.scan` with each layer gathered while the one before it computes."""
    return fsdp_jax.scan_layers(blocks, x, remat=True)
