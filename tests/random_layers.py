"""Layers of random models, from plain data.

What lives here: `Layer`, which says what a layer computes and what its call goes
through, and `Part`, which is that layer. Every one works row by row, so that rows on
several devices are those of one. What must not: functions of models, which
`random_functions` has.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import fsdp_jax


class Choices:
    """Prints the fields that are not the default, as Python."""

    def __repr__(self) -> str:
        fields: Any = dataclasses.fields(self)  # pyright: ignore
        chosen = [(f.name, getattr(self, f.name), f.default) for f in fields]
        said = [f"{name}={v!r}" for name, v, default in chosen if v != default]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Layer(Choices):
    """One layer of the model.

    Attributes:
        kind: what it computes: a branch of `Inner`.
        wrap: what its call goes through: a branch of `Part`.
        group: whether it is a group of its own.
        reshard: its `reshard_after_forward`.
    """

    kind: str = "linear"
    wrap: str = "none"
    group: bool = True
    reshard: Any = None


@jax.custom_vjp
def reverse(x: jax.Array) -> jax.Array:
    return x


reverse.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@jax.custom_vjp
def add_gradient(x: jax.Array) -> jax.Array:
    return x


add_gradient.defvjp(lambda x: (x, None), lambda _, g: (g + 0.01,))


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel


product.defvjp(
    lambda x, kernel: (x @ kernel, (x, kernel)),
    lambda saved, g: (-0.5 * g @ saved[1].T, 0.5 * saved[0].T @ g),
)


@jax.custom_jvp
def squash(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


squash.defjvp(lambda xs, ts: (jnp.tanh(xs[0]), 0.5 * (1 - xs[0] ** 2) * ts[0]))


class Inner(nnx.Module):
    """What a layer computes, row by row: `(rows, width)` to the same."""

    def __init__(self, kind: str, width: int, rows: int, rngs: nnx.Rngs) -> None:
        self.kind = kind
        self.linear = nnx.Linear(width, width, rngs=rngs)
        if kind == "mlp":
            self.up = nnx.Linear(width, 2 * width, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(2 * width, width, rngs=rngs)
        elif kind == "scale":
            self.scale = nnx.Param(jax.random.normal(rngs.params(), (width,)))
            self.gain = nnx.Param(jnp.float32(1.5))
        elif kind == "norm":
            self.norm = nnx.LayerNorm(width, rngs=rngs)
        elif kind == "low rank":
            self.lora = nnx.LoRA(width, 2, width, rngs=rngs)
        elif kind in ("scan", "scan_layers"):
            make = nnx.vmap(lambda r: nnx.Linear(width, width, rngs=r))
            self.stack = make(rngs.split(2))
        elif kind == "stat":
            self.stat = nnx.BatchStat(jnp.zeros(width))
        elif kind == "counter":
            self.count = nnx.Variable(jnp.int32(0))
        elif kind == "average":
            self.average = nnx.metrics.Average("values")
        elif kind == "cache":
            self.cache = nnx.Cache(jnp.zeros((rows, width)))
        elif kind == "draw":
            self.rngs = nnx.Rngs(noise=3)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.linear(x)
        match self.kind:
            case "mlp":
                return x + self.down(jax.nn.gelu(self.up(jnp.tanh(h))))
            case "scale":
                return jnp.tanh(h * self.scale) * self.gain[...]
            case "norm":
                return self.norm(x + h)
            case "low rank":
                return jnp.tanh(h + self.lora(x))
            case "transposed":
                kernel = self.linear.kernel
                return jnp.sin(h @ kernel.T + jnp.einsum("ij,kj->ki", kernel[...], x))
            case "rule":
                return jnp.tanh(product(x, self.linear.kernel[...]))
            case "shared":
                return jnp.tanh(self.linear(jnp.sin(h)))
            case "reverse":
                return reverse(jnp.tanh(reverse(h) + x))
            case "add gradient":
                return jnp.tanh(add_gradient(h))
            case "squash":
                return squash(h)
            case "stop":
                return jax.lax.stop_gradient(jnp.tanh(h)) * x + jnp.sin(h)
            case "input gradient":
                return x - jax.grad(lambda x: jnp.tanh(self.linear(x)).sum())(x)
            case "callback":
                host = jax.ShapeDtypeStruct(h.shape, h.dtype)
                y = jax.lax.stop_gradient(h)
                return h * jax.pure_callback(np.cos, host, y, vmap_method="expand_dims")
            case "scan":

                def one(m: Any, x: jax.Array) -> jax.Array:
                    return jnp.tanh(m(x)).astype(x.dtype)

                axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
                return h + nnx.scan(one, **axes)(self.stack, x)
            case "scan_layers":
                return h + fsdp_jax.scan_layers(self.stack, x)
            case "sow":
                self.sow(nnx.Intermediate, "h", h)
            case "stat":
                self.stat[...] = 0.9 * self.stat[...] + 0.1 * h.mean(0)
            case "counter":
                self.count[...] += 1
            case "average":
                self.average.update(values=jax.lax.stop_gradient(h[:, 0]))
            case "cache":
                self.cache[...] = h
            case "draw":
                h = h + 0 * self.rngs.noise.uniform(h.shape)
        return jnp.tanh(h)


def twice(m: Any, x: jax.Array) -> jax.Array:
    loop = nnx.scan(
        lambda m, x: m(x).astype(x.dtype),
        in_axes=(None, nnx.Carry),
        out_axes=nnx.Carry,
        length=2,
    )
    return loop(m, x)


def through(wrap: str, m: Any, x: jax.Array, flag: Any) -> jax.Array:
    """`m(x)`, or something like it, through a transformation."""

    def plain(m: Any, x: jax.Array) -> jax.Array:
        return m(x)

    def other(m: Any, x: jax.Array) -> jax.Array:
        return m(-x)

    match wrap:
        case "nnx.remat":
            return nnx.remat(plain)(m, x)
        case "nnx.jit":
            return nnx.jit(plain)(m, x)
        case "checkpoint":
            return jax.checkpoint(lambda x: m(x))(x)
        case "checkpoint split":
            graph, state = nnx.split(m)
            return jax.checkpoint(lambda s, x: nnx.merge(graph, s)(x))(state, x)
        case "jax.jit":
            graph, state = nnx.split(m)
            return jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x)
        case "vmap":
            one = nnx.vmap(lambda m, x: m(x[None])[0], in_axes=(None, 0))
            return one(m, x)
        case "vmap closure":
            each = jax.vmap(lambda a: m(a * x))(jnp.array([0.5, 1.5]))
            return each.mean(0)
        case "cond":
            return nnx.cond(flag > 0, plain, other, m, x)
        case "cond of rows":
            return nnx.cond(jnp.mean(x) < 1e3, plain, other, m, x)
        case "lax.cond":
            return jax.lax.cond(flag > 0, lambda x: m(x), lambda x: m(-x), x)
        case "switch":
            index = flag.astype(int)
            return nnx.switch(index, [other, plain], m, x)
        case "twice":
            return twice(m, x)
        case "linearize":
            y, pull = jax.vjp(lambda x: m(x), x)
            return y + pull(jnp.ones_like(y))[0]
        case "jvp":
            y, dy = jax.jvp(lambda x: m(x), (x,), (jnp.ones_like(x),))
            return y + dy
    return m(x)


class Part(nnx.Module):
    """A layer and what its call goes through."""

    def __init__(self, layer: Layer, width: int, rows: int, rngs: nnx.Rngs) -> None:
        self.inner = Inner(layer.kind, width, rows, rngs)
        self.flag = nnx.Variable(jnp.float32(1))
        self.wrap = layer.wrap

    def __call__(self, x: jax.Array) -> jax.Array:
        return through(self.wrap, self.inner, x, self.flag[...])
