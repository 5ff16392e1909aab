"""Every way in which user code can reach a sharded module, against the unsharded twin.

Calls around and through transforms, reading a parameter from outside, and what may be
an argument or a result. Many ways share one compiled program; a failing one is named by
the path of what differs. Registered methods as such are in `test_forward_methods`.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard, register_fsdp_forward_method
from tests import helpers


class Block(nnx.Module):
    """A linear layer around a skip connection, width 8."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.features(x)

    def features(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    """One block and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = Block(rngs)
        self.head: Any = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.head(self.block(x)))


def make(mesh: Any, *, asked: bool | None = None, cls: type = Net) -> Any:
    """Three groups: block, head, and the root with the rest."""
    model = cls(nnx.Rngs(0))
    fully_shard([model.block, model.head], mesh=mesh, reshard_after_forward=asked)
    return fully_shard(model, mesh=mesh, reshard_after_forward=asked)


def inputs() -> jax.Array:
    """An `(8, 8)` batch."""
    return jax.random.normal(jax.random.key(1), (8, 8))


def is_at_rest(model: Any) -> bool:
    params = [p for _, p in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return all(fsdp_jax.local_shape(p)[0] * 8 == p.shape[0] for p in params)


def plain(loss: Any) -> Any:
    """The gradients of the unsharded model, or of global arrays."""
    return nnx.jit(nnx.value_and_grad(loss))


# --- ways of calling --------------------------------------------------------------


def by_class(m: Any, x: jax.Array) -> jax.Array:
    return type(m).__call__(m, type(m).__mro__[0].__call__(m, x))


def by_nnx_call(m: Any, x: jax.Array) -> jax.Array:
    return nnx.call(nnx.split(m))(x)[0]


def by_partial(m: Any, x: jax.Array) -> jax.Array:
    return functools.partial(m, x)()


def in_jit(m: Any, x: jax.Array) -> jax.Array:
    return nnx.jit(m)(nnx.jit(lambda m, x: m(x))(m, jax.jit(lambda x: m(x))(x)))


def in_remat(m: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda x: m(x))(nnx.remat(lambda m, x: m(x))(m, x))


def in_checkpoint(m: Any, x: jax.Array) -> jax.Array:
    return m.head(jax.checkpoint(lambda x: m.block(x))(x))


def in_scan(m: Any, x: jax.Array) -> jax.Array:
    how: Any = {"in_axes": (None, nnx.Carry), "out_axes": nnx.Carry, "length": 2}
    x = nnx.scan(lambda m, x: m(x), **how)(m, x)
    return jax.lax.scan(lambda x, _: (m(x), None), x, None, length=2)[0]


def in_vmap(m: Any, x: jax.Array) -> jax.Array:
    x = nnx.vmap(lambda row: m(row))(x)
    x = nnx.vmap(lambda m, row: m(row), in_axes=(None, 0))(m, x)
    return jax.vmap(lambda rows: m(rows))(x[:, None, :])[:, 0]


def in_map(m: Any, x: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: m(row), x)


def in_branches(m: Any, x: jax.Array) -> jax.Array:
    one = jnp.ones((), jnp.int32)  # what all devices know alike
    x = nnx.cond(one > 0, lambda m, x: m(x), lambda m, x: x, m, x)
    x = jax.lax.cond(one > 0, lambda x: m.block(x), lambda x: -x, x)
    x = jax.lax.switch(one, [lambda x: x, lambda x: m(x)], x)
    return nnx.switch(one, [lambda m, x: x, lambda m, x: m(x)], m, x)


def in_fori(m: Any, x: jax.Array) -> jax.Array:
    loop = jax.lax.fori_loop(0, 2, lambda _, x: m(x), x)
    return nnx.fori_loop(0, 2, lambda _, c: (c[0], c[0](c[1])), (m, loop))[1]


def under_custom_vjp(m: Any, x: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def doubled(x):
        return jnp.sin(x)

    doubled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (2 * g * cos,))
    return m(doubled(m(x)))


def in_custom_vjp(m: Any, x: jax.Array) -> jax.Array:
    @nnx.custom_vjp
    def run(m, x):
        return m(x)

    def backward(residuals, g):
        (m, x), (_, g_out) = residuals, g
        graphdef, state = nnx.split(m)
        _, vjp = jax.vjp(lambda s, x: nnx.merge(graphdef, s)(x), state, x)
        return vjp(2 * g_out)

    run.defvjp(lambda m, x: (run(m, x), (m, x)), backward)
    return run(m, x)


def input_gradient(m: Any, x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: m(x).sum())(x)


WAYS = {
    f.__name__: f
    for f in (
        by_class,
        by_nnx_call,
        by_partial,
        in_jit,
        in_remat,
        in_checkpoint,
        in_scan,
        in_vmap,
        in_map,
        in_branches,
        in_fori,
        under_custom_vjp,
        in_custom_vjp,
        input_gradient,
    )
}


@functools.cache
def all_ways_unsharded() -> Any:
    return all_ways(nnx.value_and_grad, Net(nnx.Rngs(0)), inputs())


def all_ways(value_and_grad: Callable[..., Any], m: Any, x: jax.Array) -> Any:
    """Value and gradients of a loss through each way, as one program."""

    def one(way):
        return value_and_grad(lambda m, x: jnp.mean(way(m, x) ** 2))

    run = nnx.jit(lambda m, x: {name: one(way)(m, x) for name, way in WAYS.items()})
    return run(m, x)


@pytest.mark.parametrize("way", [nnx, fsdp_jax], ids=["global view", "per device"])
def test_every_way_of_calling_gives_the_unsharded_gradients(mesh8, way):
    model = make(mesh8, asked=True)
    got = all_ways(way.value_and_grad, model, inputs())
    helpers.assert_trees_close(got, all_ways_unsharded())
    assert is_at_rest(model)


def test_a_while_loop_of_nnx_may_call_a_module(mesh8):
    def run(m: Any, x: jax.Array) -> jax.Array:
        def step(c: Any) -> Any:
            return c[0], c[1] + 1, c[0](c[2])

        start = (m, jnp.zeros((), jnp.int32), x)
        return nnx.while_loop(lambda c: c[1] < 3, step, start)[2]

    want = nnx.jit(run)(Net(nnx.Rngs(0)), inputs())
    got = fsdp_jax.shard_map(run)(make(mesh8, asked=True), inputs())
    np.testing.assert_allclose(got, want, 1e-5, 1e-6)


# --- calling around the hook ------------------------------------------------------


def unbound(m: Any, x: jax.Array) -> jax.Array:
    """By the original class, which knows of no hook."""
    return Net.__call__(m, Block.features(m.block, x))


def unbound_once_unsharded(m: Any, x: jax.Array) -> jax.Array:
    m.block.unshard()
    return unbound(m, x)


class Around(Net):
    """Calls a method of its child that is no `__call__`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.block.features(x))


def test_an_unbound_method_of_the_original_class_needs_gathered_parameters(mesh8):
    def loss(m: Any, x: jax.Array, forward: Any = unbound) -> jax.Array:
        return jnp.mean(forward(m, x) ** 2)

    want = plain(loss)(Net(nnx.Rngs(0)), inputs())
    model = make(mesh8)
    helpers.assert_trees_close(plain(loss)(model, inputs()), want)
    with pytest.raises(RuntimeError, match=r"'block\.linear\.kernel'.*model\(x\), not"):
        fsdp_jax.value_and_grad(loss)(model, inputs())
    late = functools.partial(loss, forward=unbound_once_unsharded)
    helpers.assert_trees_close(fsdp_jax.value_and_grad(late)(model, inputs()), want)


def test_a_childs_method_called_by_its_parent_must_be_registered(mesh8):
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    want = plain(loss)(Around(nnx.Rngs(0)), inputs())
    model = make(mesh8, asked=True, cls=Around)
    helpers.assert_trees_close(plain(loss)(model, inputs()), want)
    with pytest.raises(RuntimeError, match=r"'block\..*register_fsdp_forward_method"):
        fsdp_jax.value_and_grad(loss)(model, inputs())
    register_fsdp_forward_method(model.block, "features")
    helpers.assert_trees_close(fsdp_jax.value_and_grad(loss)(model, inputs()), want)


def test_a_loss_that_reads_the_heads_kernel(mesh8):
    def loss(m: Any, x: jax.Array, unshards: bool = False) -> jax.Array:
        h = m.block(x)
        if unshards:
            m.head.unshard()
        logits = h @ m.head.kernel[...] + m.head.bias
        if unshards:
            m.head.reshard()
        return jnp.mean(logits**2) + jnp.mean(m.head(h))

    want = plain(loss)(Net(nnx.Rngs(0)), inputs())
    model = make(mesh8, asked=True)
    helpers.assert_trees_close(plain(loss)(model, inputs()), want)
    with pytest.raises(RuntimeError, match=r"'head\.kernel'.*register_.*unshard\(\)"):
        fsdp_jax.value_and_grad(loss)(model, inputs())
    late = functools.partial(loss, unshards=True)
    helpers.assert_trees_close(fsdp_jax.value_and_grad(late)(model, inputs()), want)


# --- methods that need their parameters for long ----------------------------------


class Chunked(Net):
    """A loss that makes the logits of a few rows at a time, and a generator."""

    def chunked(self, h: jax.Array, labels: jax.Array, *, chunk: int) -> jax.Array:
        def one(total: jax.Array, piece: Any) -> Any:
            rows, targets = piece
            logits = jax.nn.log_softmax(self.head(rows))
            return total - jnp.take_along_axis(logits, targets[:, None], 1).sum(), None

        pieces = (h.reshape(-1, chunk, 8), labels.reshape(-1, chunk))
        return jax.lax.scan(jax.checkpoint(one), jnp.zeros(()), pieces)[0] / len(h)

    def generate(self, x: jax.Array, steps: int = 3) -> tuple[jax.Array, Any]:
        cache = nnx.Cache(jnp.zeros((len(x), steps, 8)))

        def step(at: jax.Array, carry: Any) -> Any:
            x, seen = carry
            seen = jax.lax.dynamic_update_index_in_dim(seen, x, at, 1)
            return self(x + seen.mean(1)), seen

        x, cache[...] = jax.lax.fori_loop(0, steps, step, (x, cache[...]))
        return x, {"cache": cache[...], "steps": steps, "scores": None}


def test_a_chunked_loss_through_the_head(mesh8):
    def loss(m: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return m.chunked(m.block(x), labels, chunk=2)

    x = jax.random.normal(jax.random.key(1), (32, 8))
    labels = jnp.arange(32) % 8
    want = plain(loss)(Chunked(nnx.Rngs(0)), x, labels)
    model = Chunked(nnx.Rngs(0))
    fully_shard(model.block, mesh=mesh8)
    fully_shard(model, mesh=mesh8)
    register_fsdp_forward_method(model, "chunked")
    step = fsdp_jax.value_and_grad(loss)
    helpers.assert_trees_close(step(model, x, labels), want)
    text = helpers.lowered_text(step, model, x, labels)
    counts = helpers.count_collectives(text)
    assert (counts["all_gather"], counts["reduce_scatter"]) == (2, 2)  # none per chunk


def test_generating_with_a_cache_gathers_once(mesh8):
    x = inputs()
    want: Any = Chunked(nnx.Rngs(0)).generate(x)
    model = fully_shard(Chunked(nnx.Rngs(0)), mesh=mesh8)
    register_fsdp_forward_method(model, "generate")
    run: Any = fsdp_jax.shard_map(lambda m, x: m.generate(x))
    got: Any = run(model, x)
    assert (got[1]["steps"], got[1]["scores"]) == (3, None)
    for a, b in ((got[0], want[0]), (got[1]["cache"], want[1]["cache"])):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    text = helpers.lowered_text(lambda m, x: jax.tree.leaves(run(m, x))[0], model, x)
    assert helpers.count_collectives(text)["all_gather"] == 1


class Loud(Chunked):
    """Overrides a method that its base registers, too."""

    def generate(self, x: jax.Array, steps: int = 3) -> Any:
        return super().generate(self(x), steps=steps)[0] * 2 + self.head.bias[...]


def test_a_registered_method_may_call_the_one_that_it_overrides(mesh8):
    want = Loud(nnx.Rngs(0)).generate(inputs())
    model = make(mesh8, asked=True, cls=Loud)
    register_fsdp_forward_method(model, "generate")
    with pytest.raises(RuntimeError, match=r"'head\.bias'"):  # of a group of its own
        fsdp_jax.shard_map(lambda m, x: m.generate(x))(model, inputs())
    model = fully_shard(Loud(nnx.Rngs(0)), mesh=mesh8)
    register_fsdp_forward_method(model, "generate")
    got = fsdp_jax.shard_map(lambda m, x: m.generate(x))(model, inputs())
    np.testing.assert_allclose(got, want, 1e-5, 1e-6)


# --- steps in which a module is called twice, or not at all -----------------------


def test_a_module_that_a_step_skips_trains_like_the_unsharded_one(mesh8):
    def loss(m: Any, x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = m.block(x)
        return jnp.mean(m.head(x) ** 2)

    def steps(model: Any, value_and_grad: Any, make_optimizer: Any) -> Any:
        optimizer = make_optimizer(model, optax.adamw(1e-2, eps=1e-3))

        @nnx.jit(static_argnums=3)
        def step(model, optimizer, x, times):
            one = functools.partial(loss, times=times)
            value, grads = value_and_grad(one)(model, x)
            optimizer.update(model, grads)
            return value, grads

        return [step(model, optimizer, inputs(), times) for times in (1, 0, 2, 0)]

    twin, model = Net(nnx.Rngs(0)), make(mesh8, asked=True)
    optimizer = functools.partial(nnx.Optimizer, wrt=nnx.Param)
    want = steps(twin, nnx.value_and_grad, optimizer)
    got = steps(model, fsdp_jax.value_and_grad, fsdp_jax.Optimizer)
    helpers.assert_trees_close(got, want)
    helpers.assert_trees_close(model, twin)
    for skipped in (got[1], got[3]):
        for g in jax.tree.leaves(skipped[1]["block"]):
            assert not np.any(g)
            assert fsdp_jax.local_shape(g)[0] == 1


# --- conditions that differ between devices ---------------------------------------


def branch(m: Any, x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda x: m.block(x), lambda x: x, x)


def branch_of_nnx(m: Any, x: jax.Array) -> jax.Array:
    return nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: x, m, x)


def choice(m: Any, x: jax.Array) -> jax.Array:
    which = (x.sum() > 0).astype(int)
    return jax.lax.switch(which, [lambda x: x, lambda x: m.block(x)], x)


def until_done(m: Any, x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: m(x) / 8, x)


def as_often_as_asked(m: Any, x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, (x.sum() > 0).astype(int), lambda _, x: m(x), x)


def branch_in_a_loop(m: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (branch(m, x), None), x, None, length=2)[0]


def branch_in_a_branch(m: Any, x: jax.Array) -> jax.Array:
    one = jnp.ones(())
    return jax.lax.cond(one > 0, lambda x: branch(m, x), lambda x: x, x)


def branch_in_a_while_loop(m: Any, x: jax.Array) -> jax.Array:
    def step(c: Any) -> Any:
        return c[0] + 1, branch(m, c[1])

    return jax.lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]


def by_chance(m: Any, x: jax.Array) -> jax.Array:
    drop = jax.random.bernoulli(m.rngs.drop())  # a mask of its own on each device
    return jax.lax.cond(drop, lambda x: x, lambda x: m.block(x), x)


OUTSIDE = [branch, branch_of_nnx, choice]
INSIDE = [
    until_done,
    as_often_as_asked,
    branch_in_a_loop,
    branch_in_a_branch,
    branch_in_a_while_loop,
]


@pytest.mark.parametrize("forward", INSIDE)
def test_a_condition_of_a_loop_that_may_differ_is_refused(mesh8, forward):
    model = make(mesh8)
    text = r"(?s)shard_map: the condition of a (cond or switch|while loop) may differ"
    text += r".*fsdp:gather:.*pmax\(.*\('fsdp',\)\).*unshard\(\).*jnp\.where"
    with pytest.raises(ValueError, match=text):  # traced only: it would never end
        helpers.lowered_text(fsdp_jax.shard_map(forward), model, inputs())
    assert is_at_rest(model)


@pytest.mark.parametrize("forward", OUTSIDE)
def test_devices_that_agree_on_a_condition_follow_it(mesh8, forward):
    model, plain = make(mesh8), Net(nnx.Rngs(0))

    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(forward(m, x) ** 2)

    step = nnx.jit(fsdp_jax.value_and_grad(loss))
    for x in (jnp.abs(inputs()), -jnp.abs(inputs())):
        want = nnx.jit(nnx.value_and_grad(loss))(plain, x)
        got = step(model, x)
        np.testing.assert_allclose(got[0], want[0], 1e-5)
        helpers.assert_trees_close(got[1], want[1])


@pytest.mark.parametrize("forward", [*OUTSIDE, by_chance])
def test_where_they_differ_all_is_nan_and_nothing_hangs(mesh8, forward):
    model = make(mesh8)
    model.rngs = nnx.Rngs(0)
    x = inputs()
    x = jnp.where(jnp.arange(len(x))[:, None] < 3, jnp.abs(x), -jnp.abs(x))
    step = nnx.jit(fsdp_jax.value_and_grad(lambda m, x: jnp.mean(forward(m, x))))
    value, grads = step(model, x)
    assert np.isnan(value)
    assert all(np.isnan(g).all() for g in jax.tree.leaves(grads))
    assert np.isnan(fsdp_jax.shard_map(forward)(model, x)).all()


def test_without_a_floating_result_it_is_refused(mesh8):
    with pytest.raises(ValueError, match=r"shard_map: .*branch.*fsdp:gather:block"):
        fsdp_jax.shard_map(lambda m, x: branch(m, x) > 0)(make(mesh8), inputs())


def agreed(m: Any, x: jax.Array) -> jax.Array:
    any_positive = jax.lax.pmax((x.sum() > 0).astype(int), "fsdp") > 0
    return jax.lax.cond(any_positive, lambda x: m.block(x), lambda x: x, x)


def agreed_loop(m: Any, x: jax.Array) -> jax.Array:
    def going(x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x.sum(), "fsdp") > 1

    return jax.lax.while_loop(going, lambda x: m(x) / 8, x)


def gathered_before(m: Any, x: jax.Array) -> jax.Array:
    m.block.unshard()
    return branch(m, x)


def both(m: Any, x: jax.Array) -> jax.Array:
    return jnp.where(x.sum() > 0, m.block(x), x)


def test_each_remedy_for_a_condition_that_differs_works(mesh8):
    x, twin = inputs(), Net(nnx.Rngs(0))
    branched, called = nnx.jit(branch), nnx.jit(Net.__call__)
    rows = np.stack([branched(twin, row[None])[0] for row in np.asarray(x)])
    while (np.asarray(x).sum(1) > 1).any():
        x = called(twin, x) / 8
    want = (nnx.jit(Block.__call__)(twin.block, inputs()), x, rows, rows)

    def run(m: Any, x: jax.Array) -> Any:
        return [f(m, x) for f in (agreed, agreed_loop, gathered_before, both)]

    got = fsdp_jax.shard_map(run)(make(mesh8, asked=True), inputs())
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_on_one_device_no_condition_differs():
    model = make(helpers.mesh_of(1))
    got = fsdp_jax.shard_map(branch)(model, inputs())
    np.testing.assert_allclose(got, branch(Net(nnx.Rngs(0)), inputs()), 1e-5, 1e-6)


# --- arguments and results of every kind ------------------------------------------


@flax.struct.dataclass
class Struct:
    """A dataclass of Flax."""

    a: Any
    name: str = flax.struct.field(pytree_node=False, default="struct")


class Record(nnx.Pytree):
    """A pytree of NNX that declares nothing."""

    def __init__(self, a: Any) -> None:
        self.a = a
        self.name = "record"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """A dataclass that JAX knows."""

    a: Any


@jax.tree_util.register_pytree_node_class
class Custom:
    """A node with functions of its own."""

    def __init__(self, a: Any) -> None:
        self.a = a

    def tree_flatten(self) -> Any:
        return (self.a,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Any:
        return cls(*children)


Pair = collections.namedtuple("Pair", ["a", "none"])

# How to put an array into a container, and how to take it out.
BOXES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "flax.struct": (Struct, lambda t: t.a),
    "nnx.Pytree": (Record, lambda t: t.a),
    "dataclass": (Data, lambda t: t.a),
    "node": (Custom, lambda t: t.a),
    "namedtuple": (lambda a: Pair(a, None), lambda t: t.a),
    "dict": (lambda a: {"a": a, "b": None}, lambda t: t["a"]),
    "FrozenDict": (lambda a: flax.core.freeze({"a": a}), lambda t: t["a"]),
    "OrderedDict": (lambda a: collections.OrderedDict(a=a), lambda t: t["a"]),
    "nnx.List": (lambda a: nnx.List([a]), lambda t: t[0]),
    "nnx.Dict": (lambda a: nnx.Dict(a=a), lambda t: t["a"]),
    "nnx.State": (lambda a: nnx.State({"a": nnx.Variable(a)}), lambda t: t["a"][...]),
    "Variable": (nnx.Variable, lambda t: t[...]),
    "Cache": (nnx.Cache, lambda t: t[...]),
}


class Boxed(nnx.Module):
    """Takes a container and returns one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, box: Any, *, kind: str, take: Any, nothing: None = None) -> Any:
        assert nothing is None
        return BOXES[kind][0](jnp.tanh(self.linear(take(box))))


class Boxes(Net):
    """Passes what needs a gradient to a sharded module in a container, and back."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.boxed = Boxed(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.block(x)
        for kind, (put, take) in BOXES.items():
            h = h + 0.1 * take(self.boxed(put(h), kind=kind, take=take))
        return self.head(h)


@pytest.mark.parametrize("per_device", [False, True])
def test_arrays_come_and_go_in_every_container(mesh8, per_device):
    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    want = plain(loss)(Boxes(nnx.Rngs(0)), inputs())
    model = Boxes(nnx.Rngs(0))
    modules = [model.block, model.boxed, model]
    fully_shard(modules, mesh=mesh8, reshard_after_forward=True)
    run = fsdp_jax.value_and_grad(loss) if per_device else plain(loss)
    helpers.assert_trees_close(run(model, inputs()), want)
    assert isinstance(model.boxed, Boxed)


@pytest.mark.parametrize("kinds", [[k for k in BOXES if k != "Cache"], ["Cache"]])
def test_a_program_takes_and_returns_every_container(mesh8, kinds):

    def run(m: Any, *boxes: Any) -> Any:
        return [
            m(box, kind=kind, take=BOXES[kind][1])
            for kind, box in zip(kinds, boxes, strict=True)
        ]

    want = BOXES["dict"][1](
        Boxed(nnx.Rngs(0))({"a": inputs()}, kind="dict", take=BOXES["dict"][1])
    )
    model = fully_shard(Boxed(nnx.Rngs(0)), mesh=mesh8, reshard_after_forward=True)
    boxes = [BOXES[kind][0](inputs()) for kind in kinds]
    for kind, box, got in zip(kinds, boxes, fsdp_jax.shard_map(run)(model, *boxes)):
        assert type(got) is type(box), kind
        np.testing.assert_allclose(BOXES[kind][1](got), want, 1e-5, 1e-6, err_msg=kind)


def test_a_traced_array_in_a_closure_is_refused_with_the_way_out(mesh8):
    class Calls(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, get: Any) -> jax.Array:
            return self.linear(get())

    def loss(m: Any, x: jax.Array, first: Any) -> jax.Array:
        h = first(x)
        return jnp.mean(m(lambda: h) ** 2)

    first, want = Block(nnx.Rngs(1)), Calls(nnx.Rngs(0))
    want = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 2)))(want, inputs(), first)
    for asked in (False, True):
        model = fully_shard(Calls(nnx.Rngs(0)), mesh=mesh8, reshard_after_forward=asked)
        step = fsdp_jax.value_and_grad(loss, argnums=(0, 2))
        if not asked:
            got = step(model, inputs(), first)
            helpers.assert_trees_close(got, want)
            continue
        with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
            step(model, inputs(), first)
        notes = "".join(caught.value.__notes__)
        assert "through a closure" in notes
        assert "reshard_after_forward=False" in notes


# --- containers with a call -------------------------------------------------------


def test_a_sequential_is_a_module_like_any_other(mesh8):
    def build() -> Any:
        rngs = nnx.Rngs(0)
        inner = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), jnp.tanh)
        return nnx.Sequential(inner, nnx.Linear(16, 8, rngs=rngs), nnx.relu)

    def loss(m: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(m(x) ** 2)

    want = plain(loss)(build(), inputs())
    model: Any = build()
    fully_shard([model.layers[0], model], mesh=mesh8)
    assert type(model).__name__ == type(model.layers[0]).__name__
    helpers.assert_trees_close(fsdp_jax.value_and_grad(loss)(model, inputs()), want)
    helpers.assert_trees_close(plain(loss)(model, inputs()), want)
