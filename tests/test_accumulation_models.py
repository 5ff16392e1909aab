"""Accumulation on models of all kinds, in every way, against the plain model."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import DataParallelMeshDims, Shard, fully_shard
from tests import helpers

WIDTH, ROWS, LAYERS = 8, 16, 3


class Layer(nnx.Module):
    """A residual layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Layers(nnx.Module):
    """Two layers, and a scale of the root's own whose dim divides by no mesh."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(rngs), Layer(rngs)])
        self.factor = nnx.Param(jnp.linspace(0.5, 1, 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x * self.factor[...].sum()


class Twice(Layers):
    """The first layer runs twice, the second never."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[0](self.layers[0](x)) * self.factor[...].sum()


class Tied(nnx.Module):
    """One kernel under two names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last.kernel = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


class Recomputed(Layers):
    """Layers in `nnx.remat`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        return x


class Stacked(nnx.Module):
    """Layers stacked by `nnx.vmap`, run by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.stack = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        loop = nnx.scan(
            lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return loop(self.stack, x)


class LookingAhead(Stacked):
    """The same by `scan_layers`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return fsdp_jax.scan_layers(self.stack, x)


class Penalised(Layers):
    """The loss holds the gradient with respect to the input."""

    def loss(self, x: jax.Array) -> jax.Array:
        slope = jax.grad(lambda x: self(x).sum())(x)
        return square(self, x) + (slope**2).mean()


class Adapted(nnx.Module):
    """A low-rank update beside a Linear; only the former is trained."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, 4, WIDTH, rngs=rngs)
        self.lora.lora_b[...] = jnp.ones((4, WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + self.lora(x)


class Frozen(Layers):
    """Kernels are trained, biases are not."""


class Unsharding(Layers):
    """A layer that `unshard()` gathers beforehand."""

    def loss(self, x: jax.Array) -> jax.Array:
        unshard = getattr(self.layers[0], "unshard", lambda: None)
        unshard()
        return square(self, x)


class Partitioned(nnx.Module):
    """Kernels cut over another axis too, on the cut dim and on the other one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear(*names: Any) -> nnx.Linear:
            init = nnx.initializers.lecun_normal()
            init = nnx.with_partitioning(init, names)
            return nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)

        self.first, self.last = linear(None, "tp"), linear("tp", None)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


def square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def loss(model: Any, x: jax.Array) -> jax.Array:
    own = getattr(model, "loss", None)
    return square(model, x) if own is None else own(x)


def per_layer(model: Any, **kwargs: Any) -> Any:
    fully_shard(list(model.layers), **kwargs)
    return fully_shard(model, **kwargs)


def per_stack(model: Any, **kwargs: Any) -> Any:
    fully_shard(model.stack, shard_placement_fn=lambda p: Shard(1), **kwargs)
    return fully_shard(model, **kwargs)


def with_ignored(model: Any, **kwargs: Any) -> Any:
    ignored = nnx.PathContains("bias")
    fully_shard(list(model.layers), ignored_params=ignored, **kwargs)
    return fully_shard(model, ignored_params=ignored, **kwargs)


def under_a_plain_parent(model: Any, **kwargs: Any) -> Any:
    fully_shard(list(model.layers), **kwargs)
    return model


def offloaded(model: Any, **kwargs: Any) -> Any:
    return per_layer(model, offload_policy=fsdp_jax.CPUOffloadPolicy(), **kwargs)


def wide_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))


def beside_another_axis(model: Any, mesh: Mesh) -> Any:
    dims = DataParallelMeshDims(shard="fsdp")
    return fully_shard(model, mesh=wide_mesh(), dp_mesh_dims=dims)


MODELS: dict[str, tuple[type, Callable[..., Any], Any]] = {
    "layers": (Layers, per_layer, nnx.Param),
    "one group": (Layers, fully_shard, nnx.Param),
    "twice and never": (Twice, per_layer, nnx.Param),
    "tied": (Tied, fully_shard, nnx.Param),
    "remat": (Recomputed, per_layer, nnx.Param),
    "nnx.scan": (Stacked, per_stack, nnx.Param),
    "scan_layers": (LookingAhead, per_stack, nnx.Param),
    "adapter": (Adapted, fully_shard, nnx.LoRAParam),
    "frozen": (Frozen, per_layer, nnx.All(nnx.Param, nnx.PathContains("kernel"))),
    "ignored": (Layers, with_ignored, nnx.Param),
    "plain parent": (Layers, under_a_plain_parent, nnx.Param),
    "unshard": (Unsharding, per_layer, nnx.Param),
    "offloaded": (Layers, offloaded, nnx.Param),
    "other axis": (Partitioned, beside_another_axis, nnx.Param),
    "gradient penalty": (Penalised, per_layer, nnx.Param),
}


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (ROWS, WIDTH))


def made(make: type) -> Any:
    with jax.set_mesh(wide_mesh()) if make is Partitioned else nullcontext():
        return make(nnx.Rngs(0))


@functools.cache
def unsharded(name: str) -> Any:
    make, _, wrt = MODELS[name]
    twin_gradient = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, wrt)))
    return twin_gradient(made(make), batch())


def everything(model: Any, x: jax.Array, wrt: Any) -> dict[str, Any]:
    """Gradients of one batch in every way, and of two where the name says so."""
    once = fsdp_jax.grad(loss, wrt=wrt)
    sliced = fsdp_jax.grad(loss, wrt=wrt, num_microbatches=2)
    groups = fsdp_groups(model)
    found = {}

    def switch(name: str, on: bool) -> None:
        for group in groups:
            getattr(group, name)(on)

    switch("set_requires_gradient_sync", False)
    kept = once(model, x)
    found["slices, one reduction"] = sliced(model, x)
    switch("set_reshard_after_backward", False)
    switch("set_requires_gradient_sync", True)
    found["slices, kept"] = sliced(model, x)
    switch("set_reshard_after_backward", True)
    found["two: pending"] = once(model, x, pending=kept)
    if isinstance(model, fsdp_jax.FSDPModule):
        found["pending"] = model.synchronize_gradients(kept)
    switch("set_requires_all_reduce", False)
    partial = once(model, x)
    switch("set_requires_all_reduce", True)
    if isinstance(partial, fsdp_jax.PendingGradients):
        found["two: partial"] = once(model, x, pending=partial)
    groups[-1].set_requires_gradient_sync(False)
    mixed = once(model, x)
    groups[-1].set_requires_gradient_sync(True)
    found["two: mixed"] = once(model, x, pending=mixed)
    return found


def fsdp_groups(model: Any) -> list[Any]:
    return [m for _, m in nnx.iter_modules(model) if isinstance(m, fsdp_jax.FSDPModule)]


ON_REPLICAS = ["one group", "scan_layers", "offloaded"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, (2, 2) if name in ON_REPLICAS else (4,)) for name in MODELS],
)
def test_every_way_to_accumulate_gives_the_same(name, sizes):
    make, shard, wrt = MODELS[name]
    devices = np.array(jax.devices()[:4]).reshape(sizes)
    mesh = Mesh(devices, ("replicate", "fsdp")[-len(sizes) :])
    model, expected = shard(made(make), mesh=mesh), unsharded(name)
    doubled = jax.tree.map(lambda g: 2 * g, expected)
    found = nnx.jit(everything, static_argnums=2)(model, batch(), wrt)
    assert len(found) >= 4
    for way, grads in found.items():
        try:
            helpers.assert_trees_close(
                grads, doubled if way.startswith("two") else expected
            )
        except AssertionError as error:
            raise AssertionError(way) from error
