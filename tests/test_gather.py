"""Parameters that arrive one after the other: the ordering word "each"."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, Ordering, Shard, fully_shard
from fsdp_jax._comm import GroupComm, small_members
from fsdp_jax._mesh import MeshInfo
from tests import helpers
from tests.program_order import Collective, Order, matmul_named, order_of

WIDTH = 8
KERNEL = (WIDTH, WIDTH)
LINE = 100  # bytes; between a bias or a scale (32) and a kernel (256)
FREE = Ordering("free", "own", "own")
EACH = Ordering("each", "each", "own")

Run = Callable[[list[jax.Array], jax.Array], jax.Array]


def one_by_one(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return x


class Kernels(nnx.Module):
    """Kernels without biases, to be read as a function of arrays says."""

    def __init__(self, num: int, rngs: nnx.Rngs, run: Run = one_by_one) -> None:
        draw = nnx.initializers.lecun_normal()
        keys = [rngs.params() for _ in range(num)]
        self.kernels = nnx.List([nnx.Param(draw(k, KERNEL)) for k in keys])
        self.run = run

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.run([kernel[...] for kernel in self.kernels], x)


class Stack(nnx.Module):
    """Blocks, and a head that belongs to the root's group."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], num_blocks: int) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([make(rngs) for _ in range(num_blocks)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(make: Any, ordering: Ordering, line: int = 0, blocks: int = 2, **how: Any):
    model: Any = Stack(make, blocks)
    how = {"reshard_after_forward": True, **how}
    helpers.shard_blocks(model, mesh=helpers.mesh_of(2), **how)
    model.set_packing_threshold_bytes(line)
    model.set_ordering(ordering)
    return model


def kernels(num: int, ordering: Ordering, run: Run = one_by_one, **kwargs: Any) -> Any:
    return stack(lambda rngs: Kernels(num, rngs, run), ordering, **kwargs)


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(5), (8, WIDTH))


def mean_of_squares(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def one_step(
    model: Any, x: Any = None, loss: Any = mean_of_squares, wrt: Any = nnx.Param
) -> tuple[dict[str, int], Any]:
    """Collectives of a step by name; its loss and gradients."""
    x = batch() if x is None else x
    gradient = nnx.jit(fsdp_jax.value_and_grad(loss, wrt=wrt)).lower(model, x)
    counts = helpers.count_collectives(gradient.lowered.as_text())
    return counts, nnx.as_pure(gradient.compile()(model, x))


def assert_alike(found: Any, expected: Any) -> None:
    """Nothing more travels, and the numbers are the same, bit for bit."""
    assert found[0] == expected[0]
    leaves = jax.tree.leaves(found[1]), jax.tree.leaves(expected[1])
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_array_equal(a, b)


# Numbers, and how much travels.


@pytest.fixture(scope="module")
def free_step() -> Callable[[int], Any]:
    """A step of blocks of so many kernels whose gathers start at any time."""
    return functools.cache(lambda num: one_step(kernels(num, FREE)))


@pytest.mark.parametrize("num", [1, 3, 7])
def test_a_step_is_the_one_whose_gathers_start_at_any_time(num, free_step):
    assert_alike(one_step(kernels(num, EACH)), free_step(num))


@pytest.mark.parametrize(
    "ordering", [Ordering("each", "own", "free"), Ordering("free", "each", "free")]
)
def test_one_direction_alone_can_gather_each_after_the_other(ordering, free_step):
    assert_alike(one_step(kernels(4, ordering)), free_step(4))


def test_a_step_is_that_of_the_unsharded_model(free_step):
    model = Stack(lambda rngs: Kernels(4, rngs), 2)
    expected = nnx.jit(nnx.value_and_grad(mean_of_squares))(model, batch())
    helpers.assert_trees_close(free_step(4)[1], nnx.as_pure(expected))


def test_one_small_parameter_is_not_a_large_one():
    mesh = MeshInfo(helpers.mesh_of(2), ("fsdp",))
    dims, others, paddings = (-1, -2, None, -2), ((),) * 4, (0, 0, 0, 1)
    dtypes, divisors = (None, None), (1.0, 1.0)
    comm = GroupComm(mesh, dims, others, paddings, *dtypes, divisors, LINE, "")
    shapes = [(8,), (8, 8), (100, 100), (7, 8)]  # the last one travels as (8, 8)
    full = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert small_members(full, comm) == {0, 2}


def read_twice(ks, x):
    return one_by_one([ks[0], ks[1], ks[0], ks[2], ks[3], ks[0]], x)


def none_read(ks, x):
    return jnp.tanh(x)


def one_without_gradient(ks, x):
    return one_by_one([ks[0], jax.lax.stop_gradient(ks[1]), ks[2], ks[3]], x)


def cast_before_all_reads(ks, x):
    low = [k.astype(jnp.bfloat16) for k in ks[::-1]]
    return one_by_one([k.astype(jnp.float32) for k in low[::-1]], x)


def with_activations(ks, x):
    return one_by_one(ks[2:], jax.nn.relu(jax.nn.gelu(x @ jax.nn.relu(ks[0])) @ ks[1]))


def added_to_the_output(ks, x):
    return one_by_one(ks[:2], x) + ks[2][0] + ks[3].sum()


def in_one_jit(ks, x):
    return jax.jit(one_by_one)(ks, x)


def three_in_one_jit(ks, x):
    return one_by_one(ks[3:], jax.jit(one_by_one)(ks[:3], x))


def in_a_scan_over_them(ks, x):
    return jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), x, jnp.stack(ks))[0]


def in_every_iteration(ks, x):
    return jax.lax.fori_loop(0, 2, lambda i, x: one_by_one(ks, x), x)


def in_a_branch(ks, x):
    return jax.lax.cond(x.sum() < 1e9, one_by_one, lambda ks, x: x @ ks[2], ks, x)


def with_a_callback(ks, x):
    jax.debug.callback(lambda k: None, ks[2])
    return one_by_one(ks, x)


def with_random_keys(ks, x):
    noisy = jax.jit(lambda key, k, x: x @ k + jax.random.key_data(key)[1] / 9)
    for i, k in enumerate(ks):
        x = jnp.tanh(noisy(jax.random.key(i), k, x))
    return x


def in_a_ref(ks, x):
    ref = jax.new_ref(x)

    def step(i, _):
        ref[...] = jnp.tanh(ref[...] @ ks[0])

    jax.lax.fori_loop(0, 2, step, None)
    return one_by_one(ks[1:], ref[...])


def from_a_ref(ks, x):
    ref = jax.new_ref(ks[0])
    ref[...] = ref[...] * 2
    return jnp.tanh(jnp.tanh(jnp.tanh(x @ ref[...]) @ ks[1]) @ ks[2]) @ ks[3]


RUNS = [
    from_a_ref,
    read_twice,
    none_read,
    one_without_gradient,
    cast_before_all_reads,
    with_activations,
    added_to_the_output,
    three_in_one_jit,
    in_a_scan_over_them,
    in_every_iteration,
    in_a_branch,
    with_a_callback,
    with_random_keys,
    in_a_ref,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda f: f.__name__)
def test_a_step_does_not_depend_on_how_kernels_are_read(run):
    how: Any = {"blocks": 1, "reshard_after_forward": None}
    found, expected = (one_step(kernels(4, o, run, **how)) for o in (EACH, FREE))
    assert_alike(found, expected)


class Layers(nnx.Module):
    """Linear layers around a skip connection, and what people put between them."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0, statistics: bool = False):
        self.linears = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs) if statistics else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.statistics = nnx.BatchNorm(WIDTH, rngs=rngs) if statistics else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x if self.norm is None else self.norm(x)
        for linear in self.linears:
            y = self.dropout(jnp.tanh(linear(y)))
            if self.statistics is not None:
                y = self.statistics(y)
        return x + y


class Remade(Layers):
    """Computes all of its forward again in backward."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.remat(lambda layers, x: Layers.__call__(layers, x))(self, x)


def tied(rngs: nnx.Rngs) -> Any:
    model = Layers(rngs)
    model.linears[2].kernel = model.linears[0].kernel
    return model


class Einsums(nnx.Module):
    """Kernels of three dims, each read by a call of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        heads = (2, WIDTH // 2)
        how: Any = {"use_bias": False, "rngs": rngs}
        self.query, self.key = (nnx.LinearGeneral(WIDTH, heads, **how) for _ in "qk")
        self.out = nnx.LinearGeneral(heads, WIDTH, axis=(-2, -1), **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.query(x)) * jnp.tanh(self.key(x)))


class Adapted(nnx.Module):
    """Kernels that are not trained, and small ones that are."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        how: Any = {"lora_rank": 2, "use_bias": False, "rngs": rngs}
        self.linears = nnx.List([nnx.LoRALinear(WIDTH, WIDTH, **how) for _ in "abcd"])

    def __call__(self, x: jax.Array) -> jax.Array:
        for linear in self.linears:
            x = jnp.tanh(linear(x))
        return x


class Embedded(nnx.Module):
    """Takes token ids, or what a block before it made of them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, WIDTH, rngs=rngs)
        self.layers = Layers(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return self.layers(self.embed(x))
        return self.layers(x) @ self.embed.embedding[:WIDTH]


def some(key: Any) -> Any:
    """Parameters with this in their path."""
    return nnx.All(nnx.Param, nnx.PathContains(key))


MODULES = {
    "remat": (Remade, {}, {}),
    "tied": (tied, {}, {}),
    "dropout and statistics": (lambda rngs: Layers(rngs, 0.5, True), {}, {}),
    "low precision": (
        Layers,
        {"mp_policy": MixedPrecisionPolicy(jnp.bfloat16, jnp.float32)},
        {},
    ),
    "einsums": (Einsums, {}, {}),
    "adapted": (Adapted, {}, {"wrt": nnx.LoRAParam}),
    "one trained": (Layers, {}, {"wrt": some(1)}),
    "integers": (Embedded, {}, {"x": jnp.arange(8) % 4}),
    "kept root": (Layers, {"reshard_after_forward": None}, {}),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_step_does_not_depend_on_what_is_in_a_module(name):
    make, how, step = MODULES[name]
    found, expected = (
        one_step(stack(make, o, LINE, blocks=1, **how), **step) for o in (EACH, FREE)
    )
    assert_alike(found, expected)


# Traces around the blocks.


def halves(x: jax.Array) -> jax.Array:
    return x.reshape(2, -1, WIDTH)


def blocks_in_remat(model, x):
    for block in model.blocks:
        x = nnx.remat(lambda block, x: block(x))(block, x)
    return x


def all_in_a_scan(model, x):
    axes = (nnx.StateAxes({...: None}), nnx.Carry, 0)
    loop = nnx.scan(
        lambda model, carry, rows: (carry, model(rows)),
        in_axes=axes,
        out_axes=(nnx.Carry, 0),
    )
    return loop(model, 0.0, halves(x))[1]


def all_in_a_vmap(model, x):
    axes = (nnx.StateAxes({...: None}), 0)
    return nnx.vmap(lambda model, rows: model(rows), in_axes=axes)(model, halves(x))


def all_in_a_branch(model, x):
    return nnx.cond(x.sum() < 1e9, lambda m, x: m(x), lambda m, x: x, model, x)


def blocks_twice(model, x):
    for block in (*model.blocks, *model.blocks):
        x = block(x)
    return x


AROUND = [blocks_in_remat, all_in_a_scan, all_in_a_vmap, all_in_a_branch, blocks_twice]


@pytest.mark.parametrize("around", AROUND, ids=lambda f: f.__name__)
def test_blocks_in_a_trace_of_their_own_give_the_unsharded_gradients(around):
    def loss(model, x):
        return jnp.mean(around(model, x) ** 2)

    model = Stack(lambda rngs: Kernels(4, rngs), 2)
    expected = nnx.jit(nnx.value_and_grad(loss))(model, batch())
    found = nnx.jit(fsdp_jax.value_and_grad(loss))(kernels(4, EACH), batch())
    helpers.assert_trees_close(nnx.as_pure(found), nnx.as_pure(expected))


class Scanned(nnx.Module):
    """Stacked layers of four kernels in one loop."""

    def __init__(self) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Kernels(4, rngs)

        self.layers = make(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        loop = nnx.scan(
            lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return loop(self.layers, x)


def test_a_scan_over_stacked_layers_gives_the_unsharded_gradients():
    expected = nnx.jit(nnx.value_and_grad(mean_of_squares))(Scanned(), batch())
    model: Any = Scanned()
    mesh = helpers.mesh_of(2)
    fully_shard(model.layers, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=mesh).set_ordering(EACH)
    model.set_packing_threshold_bytes(0)
    found = nnx.jit(fsdp_jax.value_and_grad(mean_of_squares))(model, batch())
    helpers.assert_trees_close(nnx.as_pure(found), nnx.as_pure(expected))


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_shard_map_of_ones_own_gives_the_same_gradients(check_vma):
    def gradients(ordering: Ordering) -> Any:
        model = kernels(4, ordering)
        graphdef, state = nnx.split(model)
        specs = jax.tree.map(lambda a: a.sharding.spec, nnx.as_pure(state))

        def of_one_device(state, x):
            def loss(state):
                return mean_of_squares(nnx.merge(graphdef, state), x)

            return jax.grad(loss)(state)

        step = jax.shard_map(
            of_one_device,
            mesh=helpers.mesh_of(2),
            in_specs=(specs, P("fsdp")),
            out_specs=specs,
            check_vma=check_vma,
        )
        return {}, jax.jit(step)(nnx.as_pure(state), batch())

    assert_alike(gradients(EACH), gradients(FREE))


def of_gradients(model: Any, x: jax.Array) -> jax.Array:
    ours = any(isinstance(m, fsdp_jax.FSDPModule) for _, m in nnx.iter_graph(model))
    grads = (fsdp_jax.grad if ours else nnx.grad)(mean_of_squares)(model, x)
    return fsdp_jax.global_norm(grads) ** 2


def of_input_gradients(model: Any, x: jax.Array) -> jax.Array:
    def total(model, x):
        return jnp.sum(jnp.tanh(model(x)))

    return jnp.mean((nnx.grad(total, argnums=1)(model, x) - x) ** 2)


@pytest.mark.parametrize("penalty", [of_gradients, of_input_gradients])
def test_a_gradient_of_a_gradient_is_that_of_the_unsharded_model(penalty):
    rows = batch()[:4]
    model = Stack(lambda rngs: Kernels(4, rngs), 1)
    expected = nnx.as_pure(nnx.jit(nnx.grad(penalty))(model, rows))
    both = jnp.tile(rows, (2, 1))  # every device has the same rows
    found = nnx.jit(fsdp_jax.grad(penalty))(kernels(4, EACH, blocks=1), both)
    helpers.assert_trees_close(nnx.as_pure(found), expected)


# The order in the traced step. Gathers of a kind are numbered as they start.


def named(block: int, order: list[int]) -> Run:
    """Read the kernels in this order, each in a matmul of its own name."""

    def run(ks: list[jax.Array], x: jax.Array) -> jax.Array:
        for i in order:
            with matmul_named(f"{block}.{i}"):
                x = jnp.tanh(x @ ks[i])
        return x

    return run


def named_stack(order: list[int], ordering: Ordering = EACH, blocks: int = 3) -> Any:
    count = itertools.count()

    def make(rngs):
        return Kernels(max(order) + 1, rngs, named(next(count), order))

    return stack(make, ordering, blocks=blocks)


@functools.cache
def in_turn(num: int) -> Order:
    """Of three blocks that read so many kernels one after the other."""
    return order_in(named_stack(list(range(num))))


def order_in(model: Any) -> Order:
    return order_of(fsdp_jax.value_and_grad(mean_of_squares), model, batch())


def matmuls_before(
    found: Order, collective: Collective, block: int, backward: bool = False
) -> set[int]:
    """Kernels of a block whose matmul comes before a collective."""
    names = [
        c.group.split(".")
        for c in found.ancestors(collective)
        if c.kind == "matmul" and bool(c.number) == backward
    ]
    return {int(kernel) for b, kernel in names if int(b) == block}


def gathers_before(found: Order, collective: Collective, group: str) -> set[int]:
    """Numbers of the gathers of a group that come before a collective."""
    before = found.ancestors(collective)
    return {c.number for c in before if (c.kind, c.group) == ("gather", group)}


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7])
def test_a_gather_comes_after_the_matmul_two_reads_before_it(num):
    found = in_turn(num)
    gathers = found.of("gather", "blocks.1")
    assert len(gathers) == num
    for i, gather in enumerate(gathers):
        last_of_many = num > 3 and i == num - 1  # one place earlier
        done = i - 2 if last_of_many else i - 1
        assert matmuls_before(found, gather, 1) == set(range(done))
        assert gathers_before(found, gather, "blocks.1") == set(range(i))


def test_the_matmul_before_the_last_waits_for_the_last_gather():
    found = in_turn(4)
    for kernel, numbers in ((0, {0}), (2, {0, 1, 2, 3}), (3, {0, 1, 2, 3})):
        matmul = found.find("matmul", f"1.{kernel}")
        assert gathers_before(found, matmul, "blocks.1") == numbers


def test_a_module_that_follows_none_makes_no_room():
    model: Any = fully_shard(Kernels(4, nnx.Rngs(0), named(0, [0, 1, 2, 3])))
    model.set_reshard_after_forward(True)
    model.set_packing_threshold_bytes(0)
    model.set_ordering(EACH)
    found = order_in(model)
    last = found.find("gather", "", 3)
    assert matmuls_before(found, last, 0) == {0, 1}
    assert gathers_before(found, found.find("matmul", "0.2"), "") == {0, 1, 2}


@pytest.mark.parametrize("num", [2, 4])
def test_only_what_is_read_first_starts_before_the_input_is_there(num):
    found = in_turn(num)
    first, *others = found.of("gather", "blocks.2")
    assert matmuls_before(found, first, 0) == set(range(num))
    assert matmuls_before(found, first, 1) == set()
    for gather in others:
        assert matmuls_before(found, gather, 1) == set(range(num))


def test_kernels_are_gathered_in_the_order_in_which_they_are_read():
    order = [2, 0, 1]
    found = order_in(named_stack(order))
    for position, kernel in enumerate(order):
        matmul = found.find("matmul", f"1.{kernel}")
        before = gathers_before(found, matmul, "blocks.1")
        assert before == set(range(position + 1))


def test_what_is_cast_first_but_read_last_is_gathered_last():
    count = itertools.count()

    def make(rngs):
        run = named(next(count), [0, 1, 2])

        def cast(ks, x):
            low = [k.astype(jnp.bfloat16) for k in ks[::-1]]
            return run([k.astype(jnp.float32) for k in low[::-1]], x)

        return Kernels(3, rngs, cast)

    found = order_in(stack(make, EACH, blocks=3))
    first, *others = found.of("gather", "blocks.2")
    assert gathers_before(found, found.find("matmul", "2.0"), "blocks.2") == {0}
    assert matmuls_before(found, first, 1) == set()
    for gather in others:
        assert matmuls_before(found, gather, 1) == {0, 1, 2}


@pytest.mark.parametrize("run", [in_one_jit, three_in_one_jit, in_a_branch])
def test_kernels_that_one_equation_reads_are_all_gathered_before_it(run):
    found = order_in(kernels(4, EACH, run))
    loss = found.find("all_reduce", "loss")
    assert gathers_before(found, loss, "blocks.1") == {0, 1, 2, 3}


def test_what_waits_for_a_gather_is_computed_after_what_the_gather_waits_for():
    def make(rngs):
        def products(ks, x):
            with matmul_named("0.0"):
                first = x @ ks[0]
            with matmul_named("0.1"):
                second = x @ ks[1]
            return first + second + x @ ks[2]

        return Kernels(3, rngs, products)

    found = order_in(stack(make, EACH, blocks=1))
    assert matmuls_before(found, found.find("matmul", "0.1"), 0) == {0}


def test_a_kernel_that_is_read_twice_counts_where_it_is_read_first():
    found = order_in(named_stack([0, 1, 0, 2]))
    gathers = found.of("gather", "blocks.1")
    assert len(gathers) == 3
    assert matmuls_before(found, gathers[2], 1) == {0}
    for name, count in (("1.0", 1), ("1.1", 2)):
        matmul = found.find("matmul", name)
        assert gathers_before(found, matmul, "blocks.1") == set(range(count))


def test_backward_sends_the_kernel_ahead_that_it_reads_first():
    found = order_in(named_stack([0, 1, 2, 0]))  # the last one is not the last new one
    done = [
        matmuls_before(found, gather, 1, backward=True)
        for gather in found.of("regather", "blocks.0")
    ]
    assert sorted(2 in kernels for kernels in done) == [False, True, True]


def test_a_kernel_that_is_not_read_keeps_nothing_waiting():
    found = order_in(named_stack([0, 1, 3]))
    assert len(found.of("gather", "blocks.1")) == 4
    last = found.find("matmul", "1.3")
    numbers = gathers_before(found, last, "blocks.1")
    assert numbers == {0, 2, 3}


@pytest.mark.parametrize("num", [2, 3, 4, 7])
def test_a_second_gather_comes_after_the_matmul_two_reads_before_it(num):
    found = in_turn(num)
    gathers = found.of("regather", "blocks.1")
    assert len(gathers) == num
    for i, gather in enumerate(gathers):
        done = {num - 1 - k for k in range(i - 1)}
        assert matmuls_before(found, gather, 1, backward=True) == done
        earlier = matmuls_before(found, gather, 2, backward=True)
        assert earlier == (set(range(num)) if i else set())


class NamedLinears(nnx.Module):
    """Linear layers, each in a matmul of its own name."""

    def __init__(self, block: int, rngs: nnx.Rngs) -> None:
        self.linears = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(5)])
        self.block = block

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, linear in enumerate(self.linears):
            with matmul_named(f"{self.block}.{i}"):
                x = jnp.tanh(linear(x))
        return x


def named_linears() -> Order:
    count = itertools.count()
    return order_in(stack(lambda rngs: NamedLinears(next(count), rngs), EACH, LINE))


def test_small_parameters_travel_after_the_first_kernel_and_before_the_second():
    found = named_linears()
    gathers = found.of("gather", "blocks.1")
    assert [g.shape == KERNEL for g in gathers] == [True, False, *[True] * 4]
    for i, gather in enumerate(gathers):
        assert gathers_before(found, gather, "blocks.1") == set(range(i))


def test_reading_a_small_parameter_starts_no_gather():
    found = named_linears()
    large = found.of("gather", "blocks.1")[2:]
    done = [matmuls_before(found, gather, 1) for gather in large]
    assert done == [set(), {0}, {0, 1}, {0, 1}]


def test_small_parameters_that_backward_does_not_read_keep_nothing_waiting():
    found = named_linears()
    gathers = found.of("regather", "blocks.1")
    assert [g.shape == KERNEL for g in gathers] == [True, False, *[True] * 4]
    assert not any(gathers[1] in found.ancestors(c) for c in found.collectives)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_prefetch_lists_go_before_the_order(direction):
    model = named_stack([0, 1, 2, 3])
    first, _, last = model.blocks
    if direction == "forward":
        first.set_modules_to_forward_prefetch([last])
        kind, group = "gather", "blocks.2"
    else:
        last.set_modules_to_backward_prefetch([first])
        kind, group = "regather", "blocks.0"
    found = order_in(model)
    gathers = found.of(kind, group)
    assert len(gathers) > 1
    for gather in gathers:
        assert not found.ancestors(gather) & set(gathers)
        for block in range(3):
            assert not matmuls_before(found, gather, block, direction == "backward")


class Outer(nnx.Module):
    """A sharded module in the middle of another one."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.before, self.inner, self.after = (Kernels(3, rngs) for _ in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.after(self.inner(self.before(x)))


def test_collectives_of_a_module_inside_keep_their_names():
    def names(ordering: Ordering) -> list[str]:
        model: Any = Outer()
        for module in (model.inner, model):
            fully_shard(module, mesh=helpers.mesh_of(2), reshard_after_forward=True)
        model.set_packing_threshold_bytes(0)
        model.set_ordering(ordering)
        return sorted(str(c) for c in order_in(model).collectives)

    assert names(EACH) == names(FREE)
    assert names(EACH).count("regather:inner") == 3
