"""Derivatives other than the outermost one: from outside, inside of f, of any order."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

import fsdp_jax
import fsdp_jax.linen
from fsdp_jax import CPUOffloadPolicy, _cotangents, fully_shard
from fsdp_jax._compiled import traced_for, traces
from tests import helpers

ROWS = 16
LAYOUTS = [(4,), (2, 4)]


class Net(nnx.Module):
    """Two linear layers, and a scale that is whole on every device."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.last = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x))) * self.scale[...].mean()


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("replica", "fsdp")[-len(shape) :])


def net(shape: tuple[int, ...] = (4,), **kwargs: Any) -> Net:
    model = Net()
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=mesh_of(shape), **kwargs)
    return model


def batch() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    return jax.random.normal(keys[0], (ROWS, 8)), jax.random.normal(keys[1], (ROWS, 4))


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def total(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((model(x) - y) ** 2)


def pair(model: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights = x[:, 0] > 0
    return jnp.sum(((model(x) - y) ** 2).mean(-1) * weights), jnp.sum(weights)


def squares(tree: Any) -> jax.Array:
    return sum((jnp.sum(x**2) for x in jax.tree.leaves(tree)), jnp.zeros(()))


def contrast(z: Any, y: jax.Array) -> jax.Array:
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return jnp.mean((z @ z.T - y @ y.T) ** 2)


def same(got: Any, want: Any) -> None:
    helpers.assert_trees_close(got, want, rtol=1e-4, atol=1e-6)


# --- from outside -----------------------------------------------------------------


@pytest.mark.parametrize("shape, free", [((2, 4), True), ((3,), False)])
def test_a_loss_over_the_whole_batch_outside_of_the_program(
    shape: tuple[int, ...], free: bool
) -> None:
    x, y = (a[:12] for a in batch())
    x, y = (jnp.tile(a, (2, 1)) for a in (x, y))  # 24 rows
    forward = fsdp_jax.shard_map(lambda model, x: model(x))
    step = nnx.jit(nnx.grad(lambda m, x, y: contrast(forward(m, x), y), argnums=(0, 1)))
    want = nnx.jit(nnx.grad(lambda m, x, y: contrast(m(x), y), argnums=(0, 1)))(
        Net(), x, y
    )
    same(step(net(shape, reshard_after_forward=free), x, y), want)


OPTIONS = [
    ("value", "mean", loss, 2),
    ("value", "weighted", pair, 1),
    ("gradients", "mean", loss, 1),
    ("gradients", "sum", total, 1),
    ("gradients", "weighted", pair, 2),
]


@pytest.mark.parametrize("of, reduction, f, slices", OPTIONS)
def test_what_value_and_grad_returns_is_differentiated(
    of: str, reduction: str, f: Callable, slices: int
) -> None:
    x, y = batch()
    options: dict[str, Any] = dict(reduction=reduction, num_microbatches=slices)

    def whole(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        out = f(model, x, y)
        return out if reduction != "weighted" else out[0] / out[1]

    def outer(step: Any) -> Any:
        def run(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            value, grads = step(model, x, y)
            return value**2 if of == "value" else squares(grads)

        return nnx.jit(nnx.grad(run, argnums=(0, 1)))

    want = outer(nnx.value_and_grad(whole))(Net(), x, y)
    model = net((2, 2))
    last: Any = model.last
    last.set_gradient_divide_factor(4.0 if reduction == "mean" else 1.0)
    same(outer(fsdp_jax.value_and_grad(f, **options))(model, x, y), want)


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (8,), (2, 4)])
def test_the_third_order(shape: tuple[int, ...]) -> None:
    x, y = batch()

    def third(grad: Any) -> Any:
        first = grad(loss)
        second = nnx.grad(lambda m: squares(first(m, x, y)))
        return nnx.jit(nnx.grad(lambda m: squares(second(m))))

    same(third(fsdp_jax.grad)(net(shape)), third(nnx.grad)(Net()))


@pytest.mark.parametrize("how", ["offload", "offload freed", "float16"])
def test_the_second_order_where_gradients_do_not_arrive_at_shards(how: str) -> None:
    def step(lib: Any) -> Any:
        def norm(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            grads = nnx.as_pure(lib.grad(loss)(model, x, y))
            if lib is fsdp_jax and how != "float16":  # JAX asks where they were
                host, device = jax.memory.Space.Host, jax.memory.Space.Device
                grads = jax.device_put(grads, device, src=host)
            return squares(jax.tree.map(lambda g: g.astype(jnp.float32), grads))

        return nnx.jit(nnx.grad(norm))

    kwargs: dict[str, Any] = dict(reshard_after_forward=how == "offload freed" or None)
    model, twin = Net(), Net()
    if how == "float16":
        for m in (model, twin):
            m.last.kernel.set_value(m.last.kernel[...].astype(jnp.float16))
    else:
        kwargs["offload_policy"] = CPUOffloadPolicy()
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=mesh_of((4,)), **kwargs)
    got, want = step(fsdp_jax)(model, *batch()), step(nnx)(twin, *batch())
    half = how == "float16"
    helpers.assert_trees_close(
        got, want, rtol=2e-3 if half else 1e-4, atol=2e-3 if half else 1e-6
    )


@pytest.mark.parametrize(
    "shape, compiled, checked",
    [((4,), False, False), ((2, 4), True, True), ((2, 4), True, False)],
)
def test_a_users_own_program_from_outside(
    shape: tuple[int, ...], compiled: bool, checked: bool
) -> None:
    x, y = batch()
    graphdef, state = nnx.split(net(shape))
    mesh, axes = mesh_of(shape), PartitionSpec(mesh_of(shape).axis_names)
    specs = jax.tree.map(lambda v: v.sharding.spec, state)
    forward = jax.shard_map(
        lambda state, x: nnx.merge(graphdef, state)(x),
        mesh=mesh,
        in_specs=(specs, axes),
        out_specs=axes,
        check_vma=checked,
    )
    forward = jax.jit(forward) if compiled else forward  # traced before or after

    step = jax.jit(jax.grad(lambda s, x: contrast(forward(s, x), y), (0, 1)))
    want = nnx.jit(nnx.grad(lambda m, x: contrast(m(x), y), argnums=(0, 1)))(Net(), x)
    same(step(state, x), want)


def test_a_users_own_program_from_inside_and_then_from_outside() -> None:
    x, y = batch()
    graphdef, state = nnx.split(fully_shard(Net().first, mesh=mesh_of((2, 4))))
    specs = jax.tree.map(lambda v: v.sharding.spec, state)
    axes = PartitionSpec(("replica", "fsdp"))

    def of(state: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(nnx.merge(graphdef, state)(x) ** 2)

    def moved(state: Any, x: jax.Array) -> jax.Array:
        step = lambda p, g: p - 0.1 * g  # noqa: E731
        return of(jax.tree.map(step, state, jax.grad(of)(state, x)), x)

    def inside(f: Callable) -> Callable:
        both = (specs, axes)
        return jax.shard_map(
            jax.grad(f),
            mesh=mesh_of((2, 4)),
            in_specs=both,
            out_specs=specs,
            check_vma=False,
        )

    plain, first = nnx.split(Net().first)

    def twin(state: Any) -> jax.Array:
        return jnp.mean(nnx.merge(plain, state)(x) ** 2)

    def twin_moved(state: Any) -> jax.Array:
        step = lambda p, g: p - 0.1 * g  # noqa: E731
        return twin(jax.tree.map(step, state, jax.grad(twin)(state)))

    same(jax.jit(inside(of))(state, x), jax.jit(jax.grad(twin))(first))
    same(jax.jit(inside(moved))(state, x), jax.jit(jax.grad(twin_moved))(first))
    outside = jax.jit(jax.grad(lambda s: squares(inside(of)(s, x))))(state)
    same(outside, jax.jit(jax.grad(lambda s: squares(jax.grad(twin)(s))))(first))


@jax.custom_vjp
def with_fixed_gradient(x: jax.Array) -> jax.Array:
    """Adds the gradient of its mean over rows, whatever arrives: an auxiliary loss."""
    return x


with_fixed_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct + 1 / len(ct),))


@pytest.mark.parametrize("shape", LAYOUTS[1:])
def test_gradients_that_do_not_depend_linearly_on_what_arrives(
    shape: tuple[int, ...],
) -> None:
    def f(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return loss(lambda x: with_fixed_gradient(model(x)), x, y)

    x, y = batch()
    want = nnx.jit(nnx.grad(f))(Net(), x, y)
    for slices in (1, 2):
        step = nnx.jit(fsdp_jax.grad(f, num_microbatches=slices))
        same(step(net(shape), x, y), want)


# --- inside of f ------------------------------------------------------------------


def moved(model: Any, grads: Any) -> Any:
    """A copy of a model after a step."""
    copy = nnx.clone(model)
    step = lambda p, g: p - 0.1 * g  # noqa: E731
    nnx.update(copy, jax.tree.map(step, nnx.state(copy, nnx.Param), grads))
    return copy


def one_step(grad: Callable) -> Callable:
    def f(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        grads = grad(loss)(model, x, y)
        return loss(moved(model, grads), x, y) + fsdp_jax.global_norm(grads) ** 2

    return f


@pytest.mark.parametrize("shape, free", [((2, 4), True), ((3,), False)])
def test_a_nested_gradient_is_that_of_all_devices(
    shape: tuple[int, ...], free: bool
) -> None:
    x, y = (jnp.tile(a[:12], (2, 1)) for a in batch())
    want = nnx.jit(nnx.value_and_grad(one_step(nnx.grad)))(Net(), x, y)
    step = nnx.jit(fsdp_jax.value_and_grad(one_step(fsdp_jax.grad)))
    same(step(net(shape, reshard_after_forward=free), x, y), want)


@pytest.mark.parametrize("reduction, f", [("sum", total), ("weighted", pair)])
def test_a_nested_value_and_its_reductions(reduction: str, f: Callable) -> None:
    x, y = batch()

    def whole(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        out = f(model, x, y)
        return out if reduction == "sum" else out[0] / out[1]

    def outer(step: Callable) -> Callable:
        def run(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            value, grads = step(model, x, y)
            return value**2 + fsdp_jax.global_norm(grads)

        return run

    want = nnx.jit(nnx.value_and_grad(outer(nnx.value_and_grad(whole))))(Net(), x, y)
    nested = fsdp_jax.value_and_grad(f, reduction=reduction)
    same(nnx.jit(fsdp_jax.value_and_grad(outer(nested)))(net(), x, y), want)
    evaluated = fsdp_jax.shard_map(lambda m, x, y: nested(m, x, y)[1])(net(), x, y)
    same(evaluated, nnx.jit(nnx.grad(whole))(Net(), x, y))


def task(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for _ in range(2):
        model = moved(model, nnx.grad(loss)(model, x, y))
    return loss(model, x, y)


def test_a_task_per_device() -> None:
    x, y = batch()
    shape = (2, 4)
    count = int(np.prod(shape))

    def f(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return task(fsdp_jax.unsharded(model), x, y)

    def twin(model: Any, x: jax.Array, y: jax.Array) -> Any:
        rows = [a.reshape(count, -1, a.shape[-1]) for a in (x, y)]
        return sum(task(model, *(a[i] for a in rows)) for i in range(count)) / count

    want = nnx.jit(nnx.value_and_grad(twin))(Net(), x, y)
    same(nnx.jit(fsdp_jax.value_and_grad(f))(net(shape), x, y), want)


def test_the_gradient_of_each_example() -> None:
    def norms(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        if isinstance(model, fsdp_jax.FSDPModule):
            model = fsdp_jax.unsharded(model)
        graphdef, state = nnx.split(model)

        def of(state: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return loss(nnx.merge(graphdef, state), x[None], y[None])

        grads = jax.vmap(jax.grad(of), (None, 0, 0))(state, x, y)
        return jax.vmap(squares)(grads)

    x, y = batch()
    want = nnx.jit(norms)(Net(), x, y)
    got = nnx.jit(fsdp_jax.shard_map(norms))(net((2, 4)), x, y)
    np.testing.assert_allclose(got, want, 1e-5)


def test_an_unsharded_copy_may_be_written_and_keeps_the_model() -> None:
    def f(model: Any, x: jax.Array) -> jax.Array:
        copy = fsdp_jax.unsharded(model)
        copy.last.kernel[...] = 2 * copy.last.kernel[...]
        return copy(x)

    x, _ = batch()
    model = net()
    np.testing.assert_allclose(fsdp_jax.shard_map(f)(model, x), 2 * Net()(x), 1e-5)
    same(nnx.state(model), nnx.state(Net()))
    np.testing.assert_allclose(fsdp_jax.unsharded(model)(x), Net()(x), 1e-5)
    with pytest.raises(ValueError, match="unsharded: .*fully_shard"):
        fsdp_jax.unsharded(Net())


@pytest.mark.parametrize("free", [True, False])
def test_a_plain_gradient_in_f_is_refused_with_both_spellings(free: bool) -> None:
    x, y = batch()
    text = r"fsdp_jax\.grad or .* rows: nnx\.grad .* fsdp_jax\.unsharded"
    model = net(reshard_after_forward=free)

    def pull(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        out, vjp = jax.vjp(lambda s: nnx.merge(graphdef, s)(x), state)
        return loss(moved(model, vjp(out)[0]), x, y)

    helper = nnx.jit(loss)
    fsdp_jax.grad(lambda m, x, y: helper(m, x, y))(model, x, y)  # JAX keeps its rule

    def compiled(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        grads = nnx.grad(lambda m, x, y: helper(m, x, y))(model, x, y)
        return loss(moved(model, grads), x, y)

    for f in (one_step(nnx.grad), pull, compiled):
        for run in (fsdp_jax.grad, fsdp_jax.shard_map):
            with pytest.raises(RuntimeError, match=text):
                run(f)(model, x, y)


def test_what_has_no_meaning_in_f_is_refused() -> None:
    x, y = batch()
    cases = [
        (dict(num_microbatches=2), ValueError, "num_microbatches cannot be given"),
        (dict(in_specs=PartitionSpec()), ValueError, "in_specs cannot be given"),
        (dict(argnums=1), TypeError, "argument 'x' holds arrays"),
    ]
    for options, kind, text in cases:
        with pytest.raises(kind, match=text):
            fsdp_jax.grad(
                lambda m, x, y, o=options: squares(fsdp_jax.grad(loss, **o)(m, x, y))
            )(net(), x, y)
    with pytest.raises(RuntimeError, match="Call the function itself"):
        fsdp_jax.grad(lambda m, x, y: fsdp_jax.shard_map(loss)(m, x, y))(net(), x, y)


# --- raw shards -------------------------------------------------------------------


def reordered(model: Any, change: Callable) -> jax.Array:
    copy = nnx.clone(model)
    nnx.update(copy, change(nnx.state(model, nnx.Param)))
    return jnp.mean(copy(jnp.ones((2, 8))) ** 2)


def noisy(state: Any) -> Any:
    key = jax.random.key(0)
    return jax.tree.map(lambda p: p + jax.random.normal(key, p.shape), state)


def flat(state: Any) -> Any:
    values, back = ravel_pytree(state)
    return back(0.5 * values)


def normal_step(model: Any) -> jax.Array:
    x = jnp.linspace(-1, 1, 16).reshape(2, 8)
    ours = isinstance(model, fsdp_jax.FSDPModule)
    grads = (fsdp_jax.grad if ours else nnx.grad)(lambda m: jnp.mean(m(x) ** 2))(model)
    norm = fsdp_jax.global_norm(grads)
    copy = moved(model, jax.tree.map(lambda g: g / norm, grads))
    return jnp.mean(copy(x) ** 2)


WRONG: dict[str, Callable[[Any], Any]] = {
    "state": lambda m: squares(nnx.state(m, nnx.Param)),
    "split": lambda m: squares(nnx.split(m, nnx.Param, ...)[1]),
    "pure": lambda m: jax.tree.leaves(nnx.as_pure(nnx.state(m)))[0].sum(),
    "norm": lambda m: optax.tree.norm(nnx.state(m, nnx.Param)),
    "flat": lambda m: squares(ravel_pytree(nnx.state(m, nnx.Param))[0]),
    "raw": lambda m: squares(m.first.kernel.get_raw_value()),
    "stopped": lambda m: jax.lax.stop_gradient(squares(nnx.state(m))),
    "jit": lambda m: nnx.jit(lambda m: squares(nnx.state(m)))(m),
    "vmap": lambda m: jax.vmap(lambda k: jnp.sum(k**2))(m.first.kernel).sum(),
    "cond": lambda m: jax.lax.cond(
        jax.tree.leaves(nnx.state(m))[1].sum() > 0, lambda: 1.0, lambda: 2.0
    ),
    "scan": lambda m: jax.lax.scan(
        lambda c, k: (c + k.sum(), None), 0.0, m.first.kernel.get_raw_value()
    )[0],
    "noise": lambda m: reordered(m, noisy),
    "end to end": lambda m: reordered(m.first, flat),
    "rolled": lambda m: reordered(
        m.first, lambda s: jax.tree.map(lambda p: jnp.roll(p, 1, 0), s)
    ),
    "own number": lambda m: reordered(
        m, lambda s: jax.tree.map(lambda p: p * jax.lax.axis_index("fsdp"), s)
    ),
    "element": lambda m: m.first.bias.get_raw_value()[0],
    "gradient": lambda m: squares(
        nnx.as_pure(fsdp_jax.grad(lambda m: jnp.mean(m(jnp.ones((2, 8)))))(m))
    ),
}
RIGHT: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda m: reordered(m, lambda s: jax.tree.map(lambda p: p * 0.5, s)),
    "normal step": lambda m: normal_step(m),
    "global_norm": lambda m: fsdp_jax.global_norm(nnx.state(m, nnx.Param)),
}


@pytest.mark.parametrize("name", WRONG)
def test_raw_shards_that_are_taken_for_parameters_are_refused(name: str) -> None:
    x, y = batch()
    text = r"depends on (parameter|a gradient of module) '[\w.]+' .*unsharded\(model\)"
    with pytest.raises(RuntimeError, match=text):
        fsdp_jax.grad(lambda m, x, y: loss(m, x, y) + WRONG[name](m))(net(), x, y)


@pytest.mark.parametrize("name", RIGHT)
def test_what_pieces_allow_is_right(name: str) -> None:
    x, y = batch()

    def f(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return loss(model, x, y) + RIGHT[name](model)

    want = nnx.jit(nnx.value_and_grad(f))(Net(), x, y)
    same(nnx.jit(fsdp_jax.value_and_grad(f))(net((2, 4)), x, y), want)


def test_raw_shards_that_a_callback_takes_for_parameters_are_refused(
    capfd: pytest.CaptureFixture,
) -> None:
    def f(show: Any, model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        jax.debug.print("shown {}", show(nnx.state(model, nnx.Param)))
        return loss(model, x, y)

    def run(show: Any) -> None:
        fsdp_jax.grad(functools.partial(f, show))(net(), *batch())
        jax.effects_barrier()

    text = r"grad: a callback .* depends on parameter '[\w.]+' .*fsdp_jax.global_norm"
    for show in (optax.tree.norm, lambda s: s["first"]["kernel"].get_raw_value().max()):
        with pytest.raises(RuntimeError, match=text):
            run(show)
    assert "shown" not in capfd.readouterr().out
    run(fsdp_jax.global_norm)
    params = [np.ravel(x) for x in jax.tree.leaves(nnx.state(Net(), nnx.Param))]
    whole = np.linalg.norm(np.concatenate(params))
    shown = [float(x.split()[1]) for x in capfd.readouterr().out.splitlines()]
    np.testing.assert_allclose(shown, [whole] * 4, rtol=1e-5)
    run(lambda state: 2 * state["first"]["kernel"].get_raw_value())  # pieces of it
    assert capfd.readouterr().out.count("shown") == 4


def test_raw_shards_in_results_are_refused_unless_their_spec_is_given() -> None:
    x, _ = batch()

    def f(model: Any, x: jax.Array) -> Any:
        return nnx.as_pure(nnx.state(model))["first"]["kernel"]

    with pytest.raises(RuntimeError, match="the output depends on parameter"):
        fsdp_jax.shard_map(f)(net((2, 4)), x)
    spec = PartitionSpec("fsdp")
    got = fsdp_jax.shard_map(f, out_specs=spec)(net((2, 4)), x)
    np.testing.assert_array_equal(got, Net().first.kernel[...])


# --- Linen ------------------------------------------------------------------------


class LinenNet(nn.Module):
    """The same in Flax Linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(nn.Dense(16, name="first")(x))
        return nn.Dense(3, name="last")(x)


LINEN = LinenNet()
VARIABLES = LINEN.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
MODEL, SHARDED = fsdp_jax.linen.fully_shard(
    LINEN, {"params": VARIABLES}, modules="first", mesh=mesh_of((2, 2))
)


def linen_loss(apply: Callable) -> Callable:
    return lambda p, x: jnp.mean(apply({"params": p}, x) ** 2)


def linen_step(grad: Callable, f: Callable) -> Callable:
    def run(params: Any, x: jax.Array) -> jax.Array:
        grads = grad(params, x)
        step = lambda p, g: p - 0.1 * g  # noqa: E731
        return f(jax.tree.map(step, params, grads), x) + squares(grads)

    return run


def test_linen_from_outside_and_in_f() -> None:
    x, _ = batch()
    ours, twin = linen_loss(MODEL.apply), linen_loss(LINEN.apply)
    grad = fsdp_jax.linen.grad(ours, MODEL)
    params = SHARDED["params"]

    apply = fsdp_jax.linen.shard_map(lambda p, x: MODEL.apply({"params": p}, x), MODEL)
    outside = jax.grad(lambda p: contrast(apply(p, x), x))
    want = jax.grad(lambda p: contrast(LINEN.apply({"params": p}, x), x))
    same(jax.jit(outside)(params), jax.jit(want)(VARIABLES))

    second = jax.jit(jax.grad(lambda p: squares(grad(p, x))))
    want = jax.jit(jax.grad(lambda p: squares(jax.grad(twin)(p, x))))
    same(second(params), want(VARIABLES))

    step = fsdp_jax.linen.value_and_grad(linen_step(grad, ours), MODEL)
    want = jax.jit(jax.value_and_grad(linen_step(jax.grad(twin), twin)))
    same(jax.jit(step)(params, x), want(VARIABLES, x))


def test_linen_gradients_of_one_device_and_plain_ones() -> None:
    x, _ = batch()
    ours, twin = linen_loss(MODEL.apply), linen_loss(LINEN.apply)
    own = linen_step(jax.grad(linen_loss(MODEL.module.apply)), ours)
    got = jax.jit(fsdp_jax.linen.value_and_grad(own, MODEL))(SHARDED["params"], x)

    def tasks(params: Any, x: jax.Array) -> jax.Array:
        step = linen_step(jax.grad(twin), twin)
        return jax.vmap(step, (None, 0))(params, x.reshape(4, -1, 8)).mean()

    same(got, jax.jit(jax.value_and_grad(tasks))(VARIABLES, x))
    plain = fsdp_jax.linen.grad(linen_step(jax.grad(ours), ours), MODEL)
    text = (
        r"differentiates with respect to .*fsdp_jax\.linen\.grad.*model\.module\.apply"
    )
    with pytest.raises(RuntimeError, match=text):
        plain(SHARDED["params"], x)


def test_jax_still_says_what_its_traces_are_made_for() -> None:
    found = []

    def body(x: jax.Array) -> jax.Array:
        found.append(_cotangents._body())
        jax.jit(lambda x: found.append(_cotangents._body()) or x)(x)
        jax.grad(lambda x: found.append(_cotangents._body()) or x.sum())(x)
        return x

    axis = PartitionSpec("fsdp")
    mapped = jax.shard_map(body, mesh=mesh_of((4,)), in_specs=axis, out_specs=axis)
    jax.jit(mapped)(jnp.ones(4))
    assert found[0] is not None and found[1] is found[0] and found[2] is found[0]
    assert _cotangents._body() is None
    kinds = []
    jax.jit(lambda x: kinds.extend(map(traced_for, traces())) or x)(jnp.ones(4))
    assert kinds[0] == "jit" and kinds[-1] is None
