"""Recomputation around and inside of sharded blocks: right, and gathered once more."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard
from fsdp_jax._ordering import in_checkpoint
from tests import helpers

WIDTH = 8
BLOCKS = 3


class Block(nnx.Module):
    """An MLP around a skip connection, with dropout after it."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.down(jnp.tanh(self.up(x)))
        return x + (self.dropout(y) if self.dropout is not None else y)


@nnx.remat
def function_of_one(block: Any, x: jax.Array) -> jax.Array:
    return block(x)


def run_plain(blocks: Any, x: jax.Array) -> jax.Array:
    for block in blocks:
        x = block(x)
    return x


def run_in_function(blocks: Any, x: jax.Array) -> jax.Array:
    for block in blocks:
        x = function_of_one(block, x)
    return x


def run_in_wrapped_lambda(blocks: Any, x: jax.Array) -> jax.Array:
    for block in blocks:
        x = nnx.remat(lambda block, x: block(x), prevent_cse=False)(block, x)
    return x


def run_with_policy(blocks: Any, x: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.nothing_saveable
    for block in blocks:
        x = nnx.remat(lambda block, x: block(x), policy=policy)(block, x)
    return x


def run_saving_matmuls(blocks: Any, x: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    for block in blocks:
        x = nnx.remat(lambda block, x: block(x), policy=policy)(block, x)
    return x


def run_by_closure(blocks: Any, x: jax.Array) -> jax.Array:
    for block in blocks:
        x = jax.checkpoint(lambda x, block=block: block(x))(x)
    return x


def run_two_together(blocks: Any, x: jax.Array) -> jax.Array:
    first, second, third = blocks
    x = nnx.remat(lambda a, b, x: b(a(x)))(first, second, x)
    return nnx.remat(lambda block, x: block(x))(third, x)


def run_all_together(blocks: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda blocks, x: run_plain(blocks, x))(blocks, x)


def run_nested(blocks: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda blocks, x: run_in_function(blocks, x))(blocks, x)


class Model(nnx.Module):
    """Blocks that run as they are told, and a head in the root's group."""

    def __init__(self, run: Any = run_plain, make: Any = Block) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([make(rngs) for _ in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.run = run

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.run(self.blocks, x))

    @nnx.remat
    def remat_call(self, x: jax.Array) -> jax.Array:
        return self(x)


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(5), (8, WIDTH))


def sharded(model: Any, free: Any = None, devices: int = 2) -> Any:
    mesh = helpers.mesh_of(devices)
    return helpers.shard_blocks(model, mesh=mesh, reshard_after_forward=free)


def results(model: Any) -> Any:
    is_sharded = isinstance(model, fsdp_jax.FSDPModule)
    vg = fsdp_jax.value_and_grad if is_sharded else nnx.value_and_grad
    return nnx.jit(vg(loss_of))(model, batch())


def counts(model: Any, loss: Any = loss_of) -> tuple[int, int, int]:
    """Gathers of forward, second gathers, and reduce-scatters of all groups."""
    step = nnx.jit(fsdp_jax.value_and_grad(loss))
    report = fsdp_jax.comm_report(step, model, batch(), compiled=False)
    assert report.count("other") == 0
    assert report.count("all-reduce") == 1  # the loss
    names = ("forward gather", "backward re-gather", "reduce-scatter")
    first, second, scattered = (report.count(name) for name in names)
    return first, second, scattered


@pytest.fixture(scope="module")
def expected() -> Any:
    """Loss and gradients without sharding or recomputation."""
    return results(Model())


# A sharded block in a recomputation.


AROUND = [
    run_in_function,
    run_in_wrapped_lambda,
    run_with_policy,
    run_saving_matmuls,
    run_by_closure,
    run_two_together,
    run_all_together,
    run_nested,
]


@pytest.mark.parametrize("run", AROUND, ids=lambda f: f.__name__)
def test_blocks_in_a_recomputation_have_the_unsharded_gradients(run, expected):
    helpers.assert_trees_close(results(sharded(Model(run))), expected)


# Whether they free parameters differs between `None` and `True` for the root alone.
FREEING = [(None, True)[i % 2] for i in range(len(AROUND))]


@pytest.mark.parametrize(
    ("run", "free"),
    [
        *zip(AROUND, FREEING),
        *((run, False) for run in (run_saving_matmuls, run_by_closure, run_nested)),
    ],
)
def test_a_block_in_a_recomputation_is_gathered_once_more(run, free):
    groups, root = BLOCKS + 1, int(free is True)
    # Of two nested recomputations the outer one needs all blocks but its last again.
    again = 2 * BLOCKS - 1 if run is run_nested else BLOCKS
    assert counts(sharded(Model(run), free)) == (groups, again + root, groups)


def test_a_model_in_its_own_remat_method(expected):
    def loss(model, x):
        return jnp.mean(model.remat_call(x) ** 2)

    model = sharded(Model())
    found = nnx.jit(fsdp_jax.value_and_grad(loss))(model, batch())
    helpers.assert_trees_close(found, expected)
    assert counts(model, loss) == (BLOCKS + 1, BLOCKS + 1, BLOCKS + 1)


def test_large_parameters_in_a_recomputation_are_gathered_once_more_each():
    model = sharded(Model(run_in_function))
    model.set_packing_threshold_bytes(100)
    per_block = 3  # two kernels and a buffer with the biases
    first, second, scattered = counts(model)
    assert (first, scattered) == (per_block * BLOCKS + 1, per_block * BLOCKS + 1)
    assert second <= per_block * BLOCKS


def test_dropout_in_a_recomputation_draws_the_same_masks():
    def make(rngs):
        return Block(rngs, rate=0.5)

    plain = sharded(Model(make=make))
    expected = results(plain)
    again = sharded(Model(run_two_together, make))
    helpers.assert_trees_close(results(again), expected)
    helpers.assert_trees_close(
        nnx.state(again, nnx.RngCount), nnx.state(plain, nnx.RngCount)
    )
    assert counts(again)[1] == BLOCKS


# A recomputation in a sharded block.


class RematCall(Block):
    """All of the block is computed again."""

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block.__call__(self, x)


class RematPart(Block):
    """One layer of the block is computed again."""

    def __call__(self, x: jax.Array) -> jax.Array:
        up = nnx.remat(lambda up, x: jnp.tanh(up(x)))
        return x + self.down(up(self.up, x))


class RematPolicy(Block):
    """All but matrix products is computed again."""

    def __call__(self, x: jax.Array) -> jax.Array:
        policy = jax.checkpoint_policies.dots_saveable
        return nnx.remat(Block.__call__, policy=policy)(self, x)


class RematClosure(Block):
    """Computed again, with the parameters in a closure."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: Block.__call__(self, x))(x)


INSIDE = [RematCall, RematPart, RematPolicy, RematClosure]


@pytest.mark.parametrize("make", INSIDE)
def test_recomputing_blocks_have_the_unsharded_gradients(make, expected):
    helpers.assert_trees_close(results(sharded(Model(make=make))), expected)


@pytest.mark.parametrize(
    ("make", "free"),
    [*zip(INSIDE, FREEING), (RematPart, False)],
)
def test_a_recomputing_block_is_gathered_at_most_once_more(make, free):
    again = {None: BLOCKS, True: BLOCKS + 1, False: 0}[free]
    assert counts(sharded(Model(make=make), free)) == (BLOCKS + 1, again, BLOCKS + 1)


def test_recomputing_blocks_in_a_recomputation_are_gathered_once_more(expected):
    model = sharded(Model(run_in_function, RematCall))
    helpers.assert_trees_close(results(model), expected)
    assert counts(model) == (BLOCKS + 1, BLOCKS, BLOCKS + 1)


# Loops.


def layers(make: Any = Block) -> Any:
    @nnx.split_rngs(splits=BLOCKS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs):
        return make(rngs)

    return build(nnx.Rngs(0))


def loop(stack: Any, x: jax.Array, layer: Any = lambda block, x: block(x)) -> jax.Array:
    return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(stack, x)


def remat_in_loop(stack: Any, x: jax.Array) -> jax.Array:
    return loop(stack, x, function_of_one)


def loop_in_remat(stack: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda stack, x: loop(stack, x))(stack, x)


def remat_in_loop_in_remat(stack: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda stack, x: remat_in_loop(stack, x))(stack, x)


class Looped(nnx.Module):
    """Stacked blocks in a loop, and a head."""

    def __init__(self, run: Any = loop, make: Any = Block) -> None:
        self.stack = layers(make)
        self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(1))
        self.run = run

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.run(self.stack, x))


def sharded_loop(model: Any, free: Any = None) -> Any:
    mesh = helpers.mesh_of(2)
    fully_shard(model.stack, mesh=mesh, reshard_after_forward=free)
    return fully_shard(model, mesh=mesh)


LOOPS = [
    (remat_in_loop, Block, 1),
    (loop_in_remat, Block, 2),
    (loop, RematCall, 1),
    (remat_in_loop_in_remat, Block, 2),
]


@pytest.fixture(scope="module")
def expected_of_loop() -> Any:
    """Loss and gradients of the stack without sharding or recomputation."""
    return results(Looped())


@pytest.mark.parametrize(("run", "make", "times"), LOOPS)
def test_loops_and_recomputation(run, make, times, expected_of_loop):
    model = sharded_loop(Looped(run, make))
    helpers.assert_trees_close(results(model), expected_of_loop)
    assert counts(model) == (BLOCKS + 1, times * BLOCKS, BLOCKS + 1)


@pytest.mark.parametrize(("run", "make", "times"), LOOPS)
def test_no_loop_saves_the_full_stack(run, make, times):
    model = sharded_loop(Looped(run, make))
    saved = helpers.stacked_by_loops(fsdp_jax.value_and_grad(loss_of), model, batch())
    stacks = [(BLOCKS, *shape) for shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))]
    assert (BLOCKS, WIDTH, WIDTH) in saved  # the gradients, which are shards
    assert not set(stacks) & set(saved)


def test_a_kept_block_in_a_recomputation_in_a_loop_is_gathered_once_more():
    model = sharded_loop(Looped(remat_in_loop), free=False)
    assert counts(model) == (BLOCKS + 1, BLOCKS, BLOCKS + 1)


# How it is known.


def test_a_recomputation_is_told_by_its_traces():
    seen = {}

    def note(name, x):
        seen[name] = in_checkpoint()
        return jnp.sin(x)

    def noting(name):
        return lambda x: note(name, x)

    def loop_over(name, x):
        return jax.lax.scan(lambda c, _: (note(name, c), None), x, None, length=2)[0]

    def program(x):
        x = note("before", x)
        x = jax.checkpoint(noting("checkpoint"))(x)
        x = jax.checkpoint(lambda x: jax.jit(noting("jit in checkpoint"))(x))(x)
        x = jax.checkpoint(lambda x: loop_over("scan in checkpoint", x))(x)
        x = jax.checkpoint(lambda x: jax.grad(noting("grad in checkpoint"))(x))(x)
        x = jax.checkpoint(
            lambda x: jax.vmap(noting("vmap in checkpoint"))(x[None])[0]
        )(x)
        x = jax.checkpoint(
            lambda x: jax.lax.cond(x > 0, noting("cond in checkpoint"), jnp.cos, x)
        )(x)
        x = jax.checkpoint(jax.checkpoint(noting("checkpoint in checkpoint")))(x)
        x = nnx.remat(noting("nnx.remat"))(x)
        x = jax.lax.scan(
            lambda c, _: (jax.checkpoint(noting("checkpoint in scan"))(c), None),
            x,
            None,
            length=2,
        )[0]
        x = jax.jit(noting("jit"))(x)
        x = loop_over("scan", x)
        x = jax.vmap(noting("vmap"))(x[None])[0]
        return note("after", x)

    outside = {"before", "jit", "scan", "vmap", "after", "scan in checkpoint"}
    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.value_and_grad(f))):
        seen.clear()
        transform(program)(1.0)
        told = {name for name, inside in seen.items() if inside}
        assert told == {name for name in seen if name not in outside}
        assert len(seen) == 14
    assert in_checkpoint() is False


def test_a_recomputation_around_a_per_device_program_is_not_told(mesh8):
    # JAX traces the program as if it stood alone: such a block is gathered twice.
    seen = {}

    def note(name, x):
        seen[name] = in_checkpoint()
        return x

    def program(x):
        x = note("outside", x)
        return jax.checkpoint(lambda x: note("inside", x))(x)

    spec = jax.sharding.PartitionSpec("fsdp")
    per_device = jax.shard_map(program, mesh=mesh8, in_specs=spec, out_specs=spec)
    jax.jit(jax.checkpoint(per_device)).lower(jnp.ones(8))
    assert seen == {"outside": False, "inside": True}


def test_without_jaxs_private_names_a_block_is_gathered_twice_and_still_right(
    monkeypatch, expected
):
    monkeypatch.setattr("fsdp_jax._ordering._CHECKPOINT", "no longer this")
    # Functions that no other test uses: JAX does not trace one again that it knows.
    model = sharded(Model(run_in_wrapped_lambda))
    loss = lambda model, x: loss_of(model, x)  # noqa: E731
    found = nnx.jit(fsdp_jax.value_and_grad(loss))(model, batch())
    helpers.assert_trees_close(found, expected)
    assert counts(model, loss) == (BLOCKS + 1, 2 * BLOCKS, BLOCKS + 1)
