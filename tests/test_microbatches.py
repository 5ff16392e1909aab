"""`num_microbatches`: the numbers of the whole batch, from one loop over its slices."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval
from jax.sharding import Mesh, PartitionSpec

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard
from fsdp_jax._ordering import ORDERINGS
from tests import helpers

DEVICES, COUNT = 4, 2
ROWS = 16


class Noisy(nnx.Module):
    """Linear, dropout, a counter, statistics, Linear."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        # No bias: the norm takes it out, and its gradient would be all noise.
        self.first = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.last = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.last(jnp.tanh(self.dropout(self.norm(self.first(x)))))


class Gated(nnx.Module):
    """A gate beside a Linear, and a counter that scales the loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(16, 8, rngs=rngs)
        self.gate = nnx.Linear(16, 1, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.body(x)


def mlp(num_devices: int = DEVICES, **kwargs: Any) -> Any:
    mesh = helpers.mesh_of(num_devices)
    return helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)), mesh=mesh, **kwargs)


def twin() -> helpers.MLP:
    return helpers.MLP(nnx.Rngs(0))


def batch() -> tuple[jax.Array, jax.Array]:
    return helpers.regression_batch(ROWS)


def sliced(loss: Callable[..., Any], count: int = COUNT, **kwargs: Any) -> Any:
    return fsdp_jax.value_and_grad(loss, num_microbatches=count, **kwargs)


def order_of_slices(
    count: int = COUNT, num_devices: int = DEVICES, num_rows: int = ROWS
) -> np.ndarray:
    """Rows by slice and device: `(count, num_devices, rows of both)`."""
    return np.arange(num_rows).reshape(num_devices, count, -1).swapaxes(0, 1)


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found[0], expected[0], 1e-5)
    helpers.assert_trees_close(found[1], expected[1])


@functools.cache
def expected_mlp() -> Any:
    return nnx.jit(nnx.value_and_grad(helpers.mean_square))(twin(), *batch())


# --- parity -----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "jit", "sync"), [(2, False, True), (4, True, False)])
def test_slices_give_the_mean_of_the_whole_batch(sync, count, jit):
    model = mlp()
    model.set_requires_gradient_sync(sync)
    step = sliced(helpers.mean_square, count)
    found = (nnx.jit(step) if jit else step)(model, *batch())
    assert_same(found, expected_mlp())
    for leaf, param in zip(
        jax.tree.leaves(found[1]), jax.tree.leaves(nnx.state(model))
    ):
        assert leaf.sharding == param.sharding and leaf.dtype == param.dtype


@pytest.mark.parametrize("sync", [True, False])
def test_slices_give_the_sum_of_the_whole_batch(sync):
    def loss(model, x, y):
        return ((model(x) - y) ** 2).mean(1).sum()

    model = mlp()
    model.set_requires_gradient_sync(sync)
    found = sliced(loss, 4, reduction="sum")(model, *batch())
    assert_same(found, nnx.jit(nnx.value_and_grad(loss))(twin(), *batch()))


@pytest.mark.parametrize(("kind", "sync"), [("int32", True), ("float32", False)])
def test_weights_count_over_all_slices_and_devices(kind, sync):
    x, y = batch()
    counts = [3, 5, 1, 0, 2, 6, 4, 1, 8, 7, 0, 0, 2, 2, 1, 3]  # of each row
    mask = jnp.asarray(np.arange(8) < np.array(counts)[:, None], kind)

    def loss(model, x, y, mask):
        return ((model(x) - y) ** 2 * mask).sum(), mask.sum()

    def whole(model, x, y, mask):
        total, weight = loss(model, x, y, mask)
        return total / weight

    model = mlp()
    model.set_requires_gradient_sync(sync)
    found = sliced(loss, 4, reduction="weighted")(model, x, y, mask)
    assert_same(found, nnx.jit(nnx.value_and_grad(whole))(twin(), x, y, mask))


@pytest.mark.parametrize(("num_devices", "counts"), [(1, False), (4, True)])
def test_a_weight_may_depend_on_parameters_and_the_loss_on_the_state(
    num_devices, counts
):
    def loss(model, x):
        scale = 1.0
        if counts:
            model.count[...] += 1
            scale = model.count[...]
        weight = jax.nn.sigmoid(model.gate(x)).sum()
        return scale * (model.body(x) ** 2).sum(), weight

    def whole(model, x):
        sums = [jnp.zeros(()), jnp.zeros(())]
        for devices in order_of_slices(COUNT, num_devices):
            before = model.count[...]
            for rows in devices:
                model.count[...] = before
                sums = [a + b for a, b in zip(sums, loss(model, x[rows]))]
        return sums[0] / sums[1]

    model, mesh = Gated(nnx.Rngs(0)), helpers.mesh_of(num_devices)
    fully_shard([model.body, model.gate], mesh=mesh)
    x, _ = batch()
    found = sliced(loss, reduction="weighted")(model, x)
    assert_same(found, nnx.jit(nnx.value_and_grad(whole))(Gated(nnx.Rngs(0)), x))
    assert model.count[...] == COUNT * counts


def test_a_constant_weight():
    def loss(model, x, y):
        return ((model(x) - y) ** 2).mean(), jnp.ones(())

    assert_same(sliced(loss, reduction="weighted")(mlp(), *batch()), expected_mlp())


def test_arguments_of_all_kinds():
    x, y = batch()

    def loss(model, x, shift, *, y, scale):
        return (((model(x) + shift["by"]) - y) ** 2 * scale).mean()

    shift = {"by": jnp.linspace(0, 1, 8), "unused": "a string"}
    step = sliced(loss, in_specs=(None, PartitionSpec()))
    found = step(mlp(), x, shift, y=y, scale=2.0)
    whole = functools.partial(loss, x=x, shift=shift, y=y, scale=2.0)
    wanted = nnx.jit(nnx.value_and_grad(lambda model: whole(model)))(twin())
    assert_same(found, wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_the_batch_have_its_rows_in_order(reduction):
    x, y = batch()

    def loss(model, x, y, shift):
        each = (model(x) + shift - y) ** 2
        return each.mean() if reduction == "mean" else each.sum()

    arguments = (0, 1, 3)
    shift = jnp.linspace(0, 1, 8)
    step = sliced(
        loss,
        argnums=arguments,
        reduction=reduction,
        in_specs=(None, None, PartitionSpec()),
    )
    found = step(mlp(), x, y, shift)
    expected = nnx.jit(nnx.value_and_grad(loss, argnums=arguments))(twin(), x, y, shift)
    np.testing.assert_allclose(found[0], expected[0], 1e-5)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        helpers.assert_trees_close(mine, theirs)


def test_aux_keeps_the_order_of_the_rows():
    x, y = batch()
    number = jnp.arange(ROWS)

    def loss(model, x, y, number):
        out = model(x)
        aux = {
            "rows": out,
            "number": number,
            "mean": out.mean(),
            "fixed": jnp.asarray(3),
            "slices": number[:1],
            "name": "aux",
        }
        return ((out - y) ** 2).mean(), aux

    (value, aux), grads = sliced(loss, 4, has_aux=True)(mlp(), x, y, number)
    assert_same((value, grads), expected_mlp())
    out = twin()(x)
    np.testing.assert_allclose(aux["rows"], out, 1e-5, 1e-6)
    np.testing.assert_array_equal(aux["number"], number)
    np.testing.assert_allclose(aux["mean"], out.mean(), 1e-4)
    np.testing.assert_array_equal(aux["slices"], number)  # one row each
    assert (aux["fixed"], aux["name"]) == (3, "aux")


@pytest.mark.parametrize(("sync", "keep"), [(True, False), (False, True)])
def test_training_five_steps(sync, keep):
    plain = twin()
    losses = helpers.train(plain, nnx.value_and_grad, helpers.mean_square, batch())
    model = mlp()
    model.set_requires_gradient_sync(sync)
    model.set_reshard_after_backward(not keep)
    step = functools.partial(fsdp_jax.value_and_grad, num_microbatches=2)
    found = helpers.train(
        model,
        step,
        helpers.mean_square,
        batch(),
        make_optimizer=lambda model: fsdp_jax.Optimizer(
            model, optax.adamw(1e-2, eps=1e-3)
        ),
    )
    np.testing.assert_allclose(found, losses, 1e-5)
    helpers.assert_trees_close(model, plain)


@pytest.mark.parametrize(
    ("platform", "forward"),
    [("tpu", True), ("gpu", None), ("cpu", False)],
)
def test_every_ordering_and_way_to_free(platform, forward):
    assert platform in ORDERINGS and len(ORDERINGS) == 3
    model = mlp(reshard_after_forward=forward)
    model.set_ordering(ORDERINGS[platform])
    for backward, sync in ((True, True), (False, True), (False, False)):
        model.set_reshard_after_backward(backward)
        model.set_requires_gradient_sync(sync)
        step = sliced(helpers.mean_square)
        assert_same(step(model, *batch()), expected_mlp())


def test_pending_gradients_join_the_one_reduction():
    model = mlp()
    model.set_requires_gradient_sync(False)
    _, kept = fsdp_jax.value_and_grad(helpers.mean_square)(model, *batch())
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        value, grads = sliced(helpers.mean_square)(model, *batch(), pending=kept)
        expected = jax.tree.map(lambda g: 2 * g, expected_mlp()[1])
        assert_same((value, grads), (expected_mlp()[0], expected))


@pytest.mark.parametrize(("sync", "expected"), [(True, 1), (False, 0)])
def test_slices_add_up_in_the_dtype_that_they_are_kept_in(sync, expected):
    """256 + 1 - 256: shards are kept in float32, unreduced gradients in bfloat16."""
    model: Any = nnx.Linear(1, 8, use_bias=False, rngs=nnx.Rngs(0))
    policy = MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    fully_shard(model, mesh=helpers.mesh_of(4), mp_policy=policy)
    model.set_requires_gradient_sync(sync)
    x = jnp.tile(jnp.array([[256.0], [1], [-256]]), (4, 1))
    step = sliced(lambda model, x: model(x).sum(), 3, reduction="sum")
    _, grads = step(model, x)
    np.testing.assert_array_equal(grads["kernel"], np.full((1, 8), 4 * expected))


# --- state ------------------------------------------------------------------------


def test_state_goes_from_slice_to_slice():
    def loss(model, x, y):
        return helpers.mean_square(model, x, y)

    def by_hand(model, x, y):
        """One slice after the other, statistics averaged over the devices."""
        losses = []
        for devices in order_of_slices(num_rows=64):
            graphdef, params, stats, rest = nnx.split(
                model, nnx.Param, nnx.BatchStat, ...
            )
            after = []
            for rows in devices:
                copy = nnx.merge(graphdef, params, stats, rest)
                losses.append(loss(copy, x[rows], y[rows]))
                after.append(nnx.state(copy, nnx.BatchStat))
            mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *after)
            nnx.update(model, mean)
        return sum(losses) / len(losses)

    x, y = helpers.regression_batch(64)
    model, plain = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))
    fully_shard([model.first, model.last], mesh=helpers.mesh_of(4))
    found = sliced(loss)(fully_shard(model, mesh=helpers.mesh_of(4)), x, y)
    value = nnx.jit(nnx.value_and_grad(by_hand))(plain, x, y)
    np.testing.assert_allclose(found[0], value[0], 1e-5)
    helpers.assert_trees_close(found[1], value[1], rtol=1e-4, atol=1e-5)
    assert model.calls[...] == COUNT and model.calls.dtype == jnp.int32


def test_masks_differ_between_slices_and_devices_and_calls():
    def loss(model, x):
        return model(x).mean(), model.dropout(x) != 0

    model: Any = fully_shard(Noisy(nnx.Rngs(0), 0.5), mesh=helpers.mesh_of(DEVICES))
    step, masks = sliced(loss, has_aux=True), []
    for _ in range(2):
        (_, mask), _ = step(model, jnp.ones((ROWS, 16)))
        masks += list(np.asarray(mask).reshape(DEVICES * COUNT, -1))
    assert len({m.tobytes() for m in masks}) == 2 * DEVICES * COUNT
    assert model.dropout.rngs.count[...] == 2 * 2 * COUNT


def test_a_parameter_that_f_writes_goes_from_slice_to_slice():
    """One of no group; those of a group cannot be written."""

    def loss(model, x):
        out = model.body(x) * model.gain[...]
        model.gain[...] += 1
        return (out**2).mean()

    model: Any = Gated(nnx.Rngs(0))
    plain: Any = Gated(nnx.Rngs(0))
    model.gain, plain.gain = nnx.Param(jnp.ones(())), nnx.Param(jnp.ones(()))
    fully_shard([model.body, model.gate], mesh=helpers.mesh_of(DEVICES))
    x = batch()[0]
    found = sliced(loss)(model, x)
    each = []
    for rows in order_of_slices():  # linear in x, so that devices may come together
        each.append(nnx.value_and_grad(loss)(plain, x[rows.reshape(-1)]))
    mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *each)
    assert_same(found, mean)
    assert model.gain[...] == plain.gain[...] == 1 + COUNT


def test_a_new_variable_holds_all_slices():
    def loss(model, x):
        model.seen = nnx.Intermediate(x[:, 0])
        return (model(x) ** 2).mean()

    model, x = mlp(), batch()[0]
    sliced(loss, 4)(model, x)
    np.testing.assert_array_equal(model.seen[...], x[:, 0])


# --- counts -----------------------------------------------------------------------

GROUPS = 3  # the root has no parameters of its own


def counted(model: Any, count: int = 4, **kwargs: Any) -> tuple[Any, Any]:
    """Collectives outside of the loop over the slices, and in its body.

    Gathers, reduce-scatters and all-reduces each.
    """
    names = {"all_gather": 0, "reduce_scatter": 1, "psum": 2}
    step = sliced(helpers.mean_square, count, **kwargs)
    all_eqns = list(helpers.equations_of(step, model, *batch()))
    (loop,) = [eqn for eqn in all_eqns if eqn.primitive.name == "scan"]
    assert loop.params["length"] == count

    inside = [0, 0, 0]
    body = loop.params["jaxpr"].jaxpr  # of which lowering drops what nothing reads
    body, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars))
    for eqn in inner_equations(body):
        name = eqn.primitive.name.removesuffix("_invariant")
        if name in names:
            inside[names[name]] += 1
    text = helpers.lowered_text(step, model, *batch())
    everywhere = helpers.count_collectives(text).values()
    return tuple(a - b for a, b in zip(everywhere, inside)), tuple(inside)


def inner_equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr)
        ):
            if isinstance(inner, ClosedJaxpr):
                yield from inner_equations(inner.jaxpr)


def hsdp() -> Any:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replicate", "fsdp"))
    return helpers.shard_blocks(twin(), mesh=mesh)


AGAIN = 2  # of the first layer backward reads nothing: the batch has no gradient


def test_synchronised_slices_reduce_in_the_loop():
    assert counted(mlp()) == ((0, 0, 1), (GROUPS + AGAIN, GROUPS, 0))
    assert counted(hsdp()) == ((0, 0, 1), (GROUPS + AGAIN, GROUPS, GROUPS))


def test_without_sync_every_group_is_reduced_once_after_the_loop():
    model = mlp()
    model.set_requires_gradient_sync(False)
    assert counted(model) == ((0, GROUPS, 1), (GROUPS + AGAIN, 0, 0))
    _, kept = fsdp_jax.value_and_grad(helpers.mean_square)(model, *batch())
    step = functools.partial(sliced(helpers.mean_square), pending=kept)
    counts = helpers.count_collectives(helpers.lowered_text(step, model, *batch()))
    assert counts["reduce_scatter"] == GROUPS
    model = hsdp()
    model.set_requires_gradient_sync(False)
    assert counted(model) == ((0, GROUPS, 1 + GROUPS), (GROUPS + AGAIN, 0, 0))


def test_replicas_are_reduced_once_after_the_loop():
    model = hsdp()
    model.set_requires_all_reduce(False)
    assert counted(model) == ((0, 0, 1 + GROUPS), (GROUPS + AGAIN, GROUPS, 0))


def test_kept_parameters_are_gathered_once_before_the_loop():
    model = mlp()
    model.set_reshard_after_backward(False)
    assert counted(model) == ((GROUPS, 0, 1), (0, GROUPS, 0))
    model.set_requires_gradient_sync(False)
    assert counted(model) == ((GROUPS, GROUPS, 1), (0, 0, 0))
    model.set_reshard_after_backward(True)
    model.layers[1].set_reshard_after_backward(False)
    assert counted(model) == ((1, GROUPS, 1), (GROUPS - 1 + AGAIN - 1, 0, 0))


def test_groups_may_differ():
    model = mlp()
    model.layers[0].set_requires_gradient_sync(False)
    assert counted(model) == ((0, 1, 1), (GROUPS + AGAIN, GROUPS - 1, 0))
    assert_same(sliced(helpers.mean_square)(model, *batch()), expected_mlp())


def test_frozen_groups_are_not_reduced():
    model = mlp()
    model.set_requires_gradient_sync(False)
    last = nnx.All(nnx.Param, lambda path, _: path[1] == 2)
    assert counted(model, wrt=last) == ((0, 1, 1), (GROUPS, 0, 0))


def test_the_batch_is_looped_over_with_one_copy_of_the_model():
    """Not unrolled: the program does not grow with the number of slices."""
    model = mlp()
    texts = [
        helpers.lowered_text(sliced(helpers.mean_square, n), model, *batch())
        for n in (2, 4)
    ]
    assert texts[0].count("dot_general") == texts[1].count("dot_general")


# --- errors -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1])
def test_the_number_is_positive(count):
    with pytest.raises(ValueError, match=f"num_microbatches must be >= 1, got {count}"):
        fsdp_jax.grad(helpers.mean_square, num_microbatches=count)


@pytest.mark.parametrize("count", [2.0, "2", True, None])
def test_the_number_is_an_int(count):
    with pytest.raises(TypeError, match="num_microbatches must be an int"):
        fsdp_jax.value_and_grad(helpers.mean_square, num_microbatches=count)


def test_rows_divide_into_slices():
    text = r"argument 'x' has 4 rows per device.*num_microbatches=3.*Pad"
    with pytest.raises(ValueError, match=text):
        sliced(helpers.mean_square, 3)(mlp(), *batch())


def test_a_variable_keeps_its_shape_from_slice_to_slice():
    def loss(model, x):
        model.count.set_value(jnp.zeros((1,)))
        return (model(x) ** 2).mean()

    model: Any = Gated(nnx.Rngs(0))
    fully_shard([model.body, model.gate], mesh=helpers.mesh_of(DEVICES))
    before = model.count[...]
    text = r"f changes 'count' from float32\[\] to float32\[1\].*Keep its shape"
    with pytest.raises(ValueError, match=text):
        sliced(loss)(model, batch()[0])
    assert model.count[...] is before or model.count[...] == before
    good = sliced(lambda model, x: (model.body(x) ** 2).mean())
    assert jnp.isfinite(good(model, batch()[0])[0])


def test_integer_scalars_that_differ_between_slices_are_refused():
    def loss(model, x):
        return (model(x) ** 2).mean(), (x > 0).sum()

    model = mlp(1)
    text = "int32 scalar that differs between micro-batches.*shape \\(1,\\)"
    with pytest.raises(TypeError, match=text):
        sliced(loss, has_aux=True)(model, batch()[0])

    def fixed(model, x):
        value, count = loss(model, x)
        return value, count[None]

    (_, counts), _ = sliced(fixed, has_aux=True)(model, batch()[0])
    assert counts.shape == (COUNT,) and counts.sum() == (batch()[0] > 0).sum()


def test_an_argument_that_is_cut_on_another_dim_is_sliced_on_that_dim():
    columns = helpers.MLP(nnx.Rngs(0))
    model = helpers.MLP(nnx.Rngs(0))
    fully_shard(model, mesh=helpers.mesh_of(2))
    x = jax.random.normal(jax.random.key(0), (16, 8))

    def loss(m, x_t, y):
        return jnp.mean((m(x_t.T) - y) ** 2)

    y = jnp.arange(64.0).reshape(8, 8) / 64
    want, want_grads = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(columns, x, y)
    specs = (PartitionSpec(None, "fsdp"), None)
    step = fsdp_jax.value_and_grad(
        loss, argnums=(0, 1), num_microbatches=2, in_specs=specs
    )
    got, grads = step(model, x, y)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    pairs = zip(jax.tree.leaves(nnx.as_pure(grads)), jax.tree.leaves(want_grads))
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="x_t.*4 rows per device.*num_microbatches=3"):
        fsdp_jax.value_and_grad(loss, num_microbatches=3, in_specs=specs)(model, x, y)
    whole = (PartitionSpec(), PartitionSpec())
    with pytest.raises(ValueError, match="num_microbatches=2.*nothing to slice"):
        fsdp_jax.value_and_grad(loss, num_microbatches=2, in_specs=whole)(model, x, y)
