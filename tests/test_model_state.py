"""State that is not parameters, after a step on any mesh: one row of the table each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, Shard, fully_shard
from tests import helpers

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 2, 8, 16

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


class Count(nnx.Variable):
    """A Variable that the library knows nothing of."""


class RunningMax(nnx.BatchStat):
    """A statistic of the user's own."""


def mesh_of(which: Any) -> Mesh:
    if which == "2x4":
        return Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
    return helpers.mesh_of(which)


def data_axes(which: Any) -> Any:
    return ("replica", "fsdp") if which == "2x4" else "fsdp"


def rows(count: int = 16, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, WIDTH))


def square(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


# --- everything at once ---------------------------------------------------------------


class Everything(nnx.Module):
    """One Variable of every kind, updated in every call."""

    def __init__(self, rngs: nnx.Rngs, axes: Any = None) -> None:
        self.linear = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axes, rngs=rngs)
        self.dropout = nnx.Dropout(1.0, rngs=rngs)
        self.rngs = rngs
        self.calls = Count(jnp.zeros((), jnp.int32))
        self.decay = Count(jnp.ones(()))
        self.average = Count(jnp.zeros((WIDTH, 8)))
        self.untouched = Count(jnp.arange(3.0))
        self.nothing = Count(None)
        self.steps = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.metrics = nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(), value=nnx.metrics.Average("value")
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.linear(x))
        y += self.dropout(y)  # zeros, but draws a mask
        self.calls[...] += 1
        self.steps[...] += 1
        self.decay[...] *= 0.9
        kernel = self.linear.kernel[...]
        self.average[...] = 0.9 * self.average[...] + 0.1 * kernel
        labels = jnp.zeros(len(x), jnp.int32)
        self.metrics.update(logits=y, labels=labels, value=y[:, 0])
        self.sow(nnx.Intermediate, "rows", y)
        self.sow(nnx.Intermediate, "mean", y.mean())
        return y


def everything(which: Any) -> Any:
    model = Everything(nnx.Rngs(0), data_axes(which))
    return fully_shard(model, mesh=mesh_of(which))


@pytest.mark.parametrize("which", [1, 8, "2x4"])
def test_every_kind_of_state_equals_the_unsharded_model(which):
    model, plain, x = everything(which), Everything(nnx.Rngs(0)), rows()
    step = fsdp_jax.value_and_grad(square)
    expected = nnx.jit(nnx.value_and_grad(square))
    forward = nnx.jit(fsdp_jax.shard_map(lambda model, x: model(x)))
    helpers.assert_trees_close(step(model, x), expected(plain, x), rtol=1e-4)
    x = rows(seed=1)
    helpers.assert_trees_close(
        forward(model, x), nnx.jit(Everything.__call__)(plain, x)
    )
    assert len(model.rows) == len(model.mean) == 2
    kept, twins = (jax.tree.leaves(nnx.state(m)) for m in (model, plain))
    assert [x.dtype for x in kept] == [x.dtype for x in twins]
    helpers.assert_trees_close(model, plain, atol=1e-5)  # a sum of means near 0


def test_local_statistics_are_the_mean_of_the_devices_in_their_own_dtype():
    class Local(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.largest = RunningMax(jnp.zeros(()))

        def __call__(self, x):
            self.largest[...] = jnp.maximum(self.largest[...], x.max())
            return self.norm(x)

    policy = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, cast_forward_inputs=False)
    model = fully_shard(Local(nnx.Rngs(0)), mesh=mesh_of("2x4"), mp_policy=policy)
    x = rows()
    fsdp_jax.value_and_grad(square)(model, x)
    parts = np.asarray(x).reshape(8, 2, WIDTH)
    mean, var = parts.mean(1).mean(0), parts.var(1).mean(0)
    np.testing.assert_allclose(model.norm.mean[...], 0.01 * mean, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(model.norm.var[...], 0.99 + 0.01 * var, rtol=1e-5)
    largest = np.maximum(parts.max((1, 2)), 0).mean()
    np.testing.assert_allclose(model.largest[...], largest, rtol=1e-6)
    found = {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.BatchStat))}
    assert found == {jnp.dtype("float32")}


def test_micro_batches_hand_state_on_and_join_what_is_new():
    model: Any = Everything(nnx.Rngs(0), "fsdp")
    model.norm.use_running_average = True
    plain: Any = nnx.clone(model)
    fully_shard(model, mesh=mesh_of(8))
    model.per_row = Count(None)

    def loss(model, x):
        y = model(x)
        model.per_row.set_value(y[:, 0])
        return jnp.mean(y**2)

    x = rows(32)
    step = fsdp_jax.value_and_grad(loss, num_microbatches=2)
    step(model, x)
    y = plain(x)
    assert int(model.calls[...]) == int(model.steps[...]) == 2
    np.testing.assert_allclose(model.decay[...], 0.9**2, rtol=1e-6)
    for name in ("accuracy", "value"):  # each row counts once, whatever the slices
        got, want = (getattr(m.metrics, name) for m in (model, plain))
        assert int(got.count[...]) == int(want.count[...]) == 32
        np.testing.assert_allclose(got.total[...], want.total[...], rtol=1e-4)
    np.testing.assert_allclose(model.rows[0], y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.mean[0], y.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.per_row[...], y[:, 0], rtol=1e-4, atol=1e-5)


# --- caches ---------------------------------------------------------------------------


class Layer(nnx.Module):
    """Attention with a decode cache, around a skip connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, decode=True, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(self.norm(x))


class Decoder(nnx.Module):
    """One token `(batch, 1)` a call to logits; layers in a list or in a stack."""

    def __init__(self, num_rows: int, num_stacked: int = 0) -> None:
        rngs, shape = nnx.Rngs(0), (num_rows, LENGTH, WIDTH)

        def make(rngs):
            layer = Layer(rngs)
            if num_rows:
                layer.attention.init_cache(shape)
            return layer

        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.stacked = bool(num_stacked)
        if not num_stacked:
            self.layers: Any = nnx.List([make(rngs)])
        else:
            split = nnx.split_rngs(splits=num_stacked)
            self.layers = split(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, token: jax.Array) -> jax.Array:
        x = self.embed(token)
        if self.stacked:
            scan = nnx.scan(
                lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
            )
            x = scan(self.layers, x)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def below_the_layers(param: Any) -> Shard:
    """A dim that divides and is not that of the layers."""
    return next(Shard(d) for d in range(1, param.ndim) if param.shape[d] % 8 == 0)


def decoders(which: Any, num_rows: int, num_stacked: int = 0) -> tuple[Any, Any]:
    """A sharded one and its twin."""
    model, mesh = Decoder(num_rows, num_stacked), mesh_of(which)
    plain = nnx.clone(model)
    if num_stacked:
        fully_shard(model.layers, mesh=mesh, shard_placement_fn=below_the_layers)
    else:
        fully_shard(list(model.layers), mesh=mesh)
    return fully_shard(model, mesh=mesh), plain


def tokens(num_rows: int) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (num_rows, 1), 0, VOCABULARY)


def next_token(model: Any, token: jax.Array) -> jax.Array:
    return model(token).argmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "num_rows", "num_stacked"),
    [(8, 16, 0), ("2x4", 8, 8)],
    ids=["list", "as many layers as rows"],
)
def test_decoding_equals_the_unsharded_model(which, num_rows, num_stacked):
    model, plain = decoders(which, num_rows, num_stacked)
    step, expected = fsdp_jax.shard_map(next_token), nnx.jit(next_token)
    if num_stacked:
        step = nnx.jit(step)
    found = twin = tokens(num_rows)
    for _ in range(2):
        found, twin = step(model, found), expected(plain, twin)
        np.testing.assert_array_equal(found, twin)
    caches, twins = (nnx.state(m, nnx.Cache) for m in (model, plain))
    helpers.assert_trees_close(caches, twins, rtol=1e-4, atol=1e-5)
    dim = 1 if num_stacked else 0
    for leaf in jax.tree.leaves(caches):
        piece = list(leaf.shape)
        if leaf.ndim > 1:
            piece[dim] //= mesh_of(which).size
        assert leaf.sharding.shard_shape(leaf.shape) == tuple(piece)


def test_a_cache_made_on_the_devices_is_joined_and_then_cut():
    (model, plain), shape = decoders(8, 0), (16, LENGTH, WIDTH)
    plain.layers[0].attention.init_cache(shape)
    plain.same_in_all_rows = nnx.Cache(jnp.zeros((16, 3)))

    def start(model, token):
        for layer in model.layers:
            layer.attention.init_cache((len(token), LENGTH, WIDTH))
        model.same_in_all_rows = nnx.Cache(jnp.zeros((len(token), 3)))
        return next_token(model, token)

    expected = nnx.jit(next_token)
    found = fsdp_jax.shard_map(start)(model, tokens(16))
    twin = expected(plain, tokens(16))
    found = fsdp_jax.shard_map(next_token)(model, found)
    np.testing.assert_array_equal(found, expected(plain, twin))
    caches, twins = (nnx.state(m, nnx.Cache) for m in (model, plain))
    helpers.assert_trees_close(caches, twins, rtol=1e-4, atol=1e-5)


class Prefixed(nnx.Module):
    """Adds something per row that it holds as a cache."""

    def __init__(self, prefix: Any) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.prefix = nnx.Cache(prefix)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x + self.prefix[...])


class Recurrent(nnx.Module):
    """Holds a state with a row for each of the batch, as no cache."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.h = nnx.Variable(jnp.zeros((8, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x) + self.h[...])


@pytest.mark.parametrize("devices", [4, 8])
def test_state_with_rows_that_is_no_cache_is_named(devices):
    model: Any = fully_shard(Recurrent(), mesh=helpers.mesh_of(devices))
    named = {4: r"Variable 'h' \(8, 16\)", 8: "nnx.Cache"}[devices]
    with pytest.raises(ValueError, match=f"grad: .*{named}.*"):
        fsdp_jax.grad(square)(model, rows(8))
    model.h = nnx.Cache(model.h[...])
    plain = Recurrent()
    got = fsdp_jax.grad(square)(model, rows(8))
    helpers.assert_trees_close(got, nnx.grad(square)(plain, rows(8)))


def test_a_cache_that_is_only_read_goes_with_the_rows():
    model, plain = Prefixed(rows(32, 1)), Prefixed(rows(32, 1))
    fully_shard(model, mesh=mesh_of("2x4"))
    x = rows(32)
    want = nnx.jit(nnx.value_and_grad(square))(plain, x)
    for count in (1, 2):
        step = fsdp_jax.value_and_grad(square, num_microbatches=count)
        helpers.assert_trees_close(step(model, x), want)
    turned = fsdp_jax.shard_map(
        lambda model, x: model(x.T),
        in_specs=PartitionSpec(None, ("replica", "fsdp")),
    )
    np.testing.assert_allclose(turned(model, x.T), plain(x), rtol=1e-5, atol=1e-6)


def test_a_cache_without_rows_is_whole_and_the_same_everywhere():
    def f(model, x):
        model.prefix[...] += 1
        return model(x)

    model, plain = Prefixed(jnp.zeros((WIDTH,))), Prefixed(jnp.ones((WIDTH,)))
    fully_shard(model, mesh=mesh_of(8))
    x = rows(8)
    np.testing.assert_allclose(
        fsdp_jax.shard_map(f)(model, x), plain(x), rtol=1e-5, atol=1e-6
    )
    assert model.prefix.get_raw_value().sharding.is_fully_replicated

    def differ(model, x):
        model.prefix[...] = x[0]

    text = (
        r"changed the Cache 'prefix' to values that differ.*no dim of its shape "
        r"\(16,\).*for the rows of the whole batch"
    )
    with pytest.raises(ValueError, match=text):
        fsdp_jax.shard_map(differ)(model, x)


def test_what_caches_cannot_do_is_said():
    model, _ = decoders(2, 4)
    text = r"f changes the Cache 'layers.0.attention.cache_index', and micro-batches"
    with pytest.raises(ValueError, match=text):
        fsdp_jax.value_and_grad(lambda m, t: m(t).mean(), num_microbatches=2)(
            model, tokens(4)
        )
    prefixed = fully_shard(Prefixed(rows(4)), mesh=mesh_of(2))
    perturbed: Any = fully_shard(Recurrent(), mesh=mesh_of(2))
    perturbed.h = nnx.Perturbation(jnp.zeros((2, WIDTH)))
    with pytest.raises(TypeError, match=r"wrt selects the Perturbation 'h'.*nnx.grad"):
        fsdp_jax.grad(square, wrt=nnx.Perturbation)(perturbed, rows(4))
    with pytest.raises(TypeError, match=r"wrt selects the Cache 'prefix'.*argnums"):
        fsdp_jax.grad(square, wrt=nnx.Cache)(prefixed, rows(4))

    def stack(model, x):
        model.made = nnx.Cache(jnp.stack([x, x, x]))

    text = r"made the Cache 'made', \(3, 2, 16\) on each device.*rows of the batch on "
    with pytest.raises(ValueError, match=text + r"dim 1.*make it before"):
        fsdp_jax.shard_map(stack)(prefixed, rows(4))


class Started(nnx.Module):
    """A cache of rows, and other state beside it."""

    def __init__(self, prefix: Any, **state: nnx.Variable) -> None:
        self.inner = Prefixed(prefix)
        for name, variable in state.items():
            setattr(self, name, variable)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (Count(jnp.zeros(8, jnp.int32)), "the Count 'start' of shape .8,. is whole"),
        (nnx.Variable(jnp.zeros((8, 5))), "but dim 0 has as many entries as the Cache"),
        (nnx.Variable(jnp.zeros((1, 8))), "but dim 1 has .*'inner.prefix'"),
        (Count(jnp.zeros((5, 8), bool)), "but dim 1 .* make it an nnx.Cache"),
        (nnx.data(jnp.zeros(8)), "the array 'start'"),
    ],
    ids=["index", "floats", "after a one", "any of a mask", "no Variable"],
)
def test_state_that_may_hold_rows_beside_a_cut_cache_is_refused(variable, found):
    model = fully_shard(Started(rows(8), start=variable), mesh=mesh_of(8))
    with pytest.raises(ValueError, match=f"^value_and_grad: .*{found}"):
        fsdp_jax.value_and_grad(square)(model, rows(8))
    said = fsdp_jax.value_and_grad(square, in_specs={"model": PartitionSpec()})
    want = square(Started(rows(8)), rows(8))
    np.testing.assert_allclose(said(model, rows(8))[0], want, rtol=1e-5)


def test_other_state_beside_a_cut_cache_is_whole():
    table = {
        "table": nnx.Variable(jnp.ones((5, 8))),
        "count": Count(jnp.zeros((), int)),
    }
    model = Started(rows(8), sown=nnx.Intermediate(rows(8)), **table)
    fully_shard(model, mesh=mesh_of(8))
    want = square(Started(rows(8)), rows(8))
    np.testing.assert_allclose(
        fsdp_jax.shard_map(square)(model, rows(8)), want, rtol=1e-5
    )
    alone: Any = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    alone.table = nnx.Variable(jnp.arange(8.0))
    fully_shard(alone, mesh=mesh_of(8))
    total = fsdp_jax.shard_map(lambda model, x: model.table[...].sum() + 0 * x.sum())
    assert total(alone, rows(8)) == 28


# --- metrics --------------------------------------------------------------------------


class Loss(nnx.metrics.Average):
    """A subclass with a method of its own."""

    def perplexity(self) -> jax.Array:
        return jnp.exp(self.compute())


class Largest(nnx.Metric):
    """A metric that no sum gives."""

    def __init__(self) -> None:
        self.value = nnx.metrics.MetricState(jnp.zeros(()))

    def update(self, **kwargs: jax.Array) -> None:
        self.value[...] = jnp.maximum(self.value[...], kwargs["values"].max())


def make_metrics() -> Any:
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), value=Loss("value"))


def evaluate(model: Any, metrics: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    y = model(x)
    labels = jnp.arange(len(x)) * 0 + 3
    metrics.update(logits=y, labels=labels, value=y[:, 0], mask=mask)
    return y.mean()


def linear(which: Any = 8) -> Any:
    model = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0))
    return fully_shard(model, mesh=mesh_of(which))


@pytest.mark.parametrize("which", [1, "2x4"])
def test_metrics_given_as_an_argument_count_every_row_once(which):
    model, plain = linear(which), nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0))
    metrics, twin = make_metrics(), make_metrics()
    step = nnx.jit(fsdp_jax.shard_map(evaluate))
    for seed in range(3):
        x, mask = rows(seed=seed), jnp.arange(16) % (seed + 2) != 0
        step(model, metrics, x, mask)
        evaluate(plain, twin, x, mask)
    helpers.assert_trees_close(nnx.state(metrics), nnx.state(twin))
    assert metrics.value.count.dtype == jnp.int32
    helpers.assert_trees_close(metrics.compute(), twin.compute())


def every_way(model: Any, metric: Any, x: jax.Array) -> None:
    """Updates in a jitted helper, a branch, a loop over rows, and after a reset."""
    nnx.jit(lambda metric, x: metric.update(value=x))(metric, x)
    nnx.cond(
        x[0, 0] > 0,
        lambda metric: metric.update(value=x),
        lambda metric: None,
        metric,
    )

    def one(metric, row):
        metric.update(value=row)
        return metric

    nnx.scan(one, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(metric, x)
    metric.count[...] -= 1  # one less for each device


def test_a_metric_may_be_updated_in_branches_and_loops_and_reset():
    model, metric, twin, x = linear(), Loss("value"), Loss("value"), rows()
    fsdp_jax.shard_map(every_way)(model, metric, x)
    for part in jnp.split(x, 8):
        every_way(model, twin, part)
    helpers.assert_trees_close(nnx.state(metric), nnx.state(twin))

    def restart(model, metric, x):
        metric.reset()
        metric.update(value=x)

    fsdp_jax.shard_map(restart)(model, metric, x)
    restart(model, twin, x)
    helpers.assert_trees_close(nnx.state(metric), nnx.state(twin))

    def made(model, x):
        metric = Loss("value")
        metric.update(value=x)
        return metric

    new = fsdp_jax.shard_map(made)(model, x)
    helpers.assert_trees_close(nnx.state(new), nnx.state(twin))


def read_while_counting(model, metric, x):
    metric.update(value=x)
    return metric.compute()


def reset_on_one_device(model, metric, x):
    nnx.cond(x.sum() > 0, lambda m: m.reset(), lambda m: None, metric)


def decayed(model, metric, x):
    metric.total[...] = 0.9 * metric.total[...] + x.sum()


def decayed_in_a_loop(model, metric, x):
    total = jax.lax.fori_loop(0, 3, lambda i, t: 0.9 * t, metric.total[...])
    metric.total[...] = total + x.sum()


@pytest.mark.parametrize(
    "f", [read_while_counting, reset_on_one_device, decayed, decayed_in_a_loop]
)
def test_a_metric_that_is_not_only_added_to_is_refused(f):
    metric = Loss("value")
    metric.update(value=jnp.ones(3))
    text = r"f updates the MetricState '\w+' of Loss and uses its value.*compute after"
    with pytest.raises(ValueError, match=text):
        fsdp_jax.shard_map(f)(linear(), metric, rows())
    assert float(metric.total[...]) == int(metric.count[...]) == 3

    def read(model, metric, x):
        return metric.compute()

    assert float(fsdp_jax.shard_map(read)(linear(), metric, rows())) == 1


@pytest.mark.parametrize("make", [nnx.metrics.Welford, Largest], ids=["Welford", "own"])
def test_metrics_that_are_no_sums_are_refused_where_devices_differ(make):
    model, x = linear(), rows()
    text = rf"of a {make.__name__} is not a sum over devices.*update it outside"
    metric, twin = make(), make()

    def update(model, metric, x):
        metric.update(values=x)

    with pytest.raises(ValueError, match=text):
        fsdp_jax.shard_map(update)(model, metric, x)

    def made(model, x):
        metric = make()
        metric.update(values=x)
        return metric

    with pytest.raises(ValueError, match=text):
        fsdp_jax.shard_map(made)(model, x)

    def same_rows(model, metric, x):
        metric.update(values=jax.lax.all_gather(x, "fsdp", tiled=True))

    fsdp_jax.shard_map(same_rows)(model, metric, x)
    twin.update(values=x)
    helpers.assert_trees_close(nnx.state(metric), nnx.state(twin))


def test_micro_batches_do_not_make_metrics():
    def loss(model, x):
        model.seen = nnx.metrics.Average()
        model.seen.update(values=x)
        return jnp.mean(model(x) ** 2)

    with pytest.raises(
        ValueError, match=r"makes the MetricState 'seen\.\w+', a new one"
    ):
        fsdp_jax.value_and_grad(loss, num_microbatches=2)(linear(1), rows())


# --- parameters of no group -----------------------------------------------------------


def test_a_parameter_of_no_group_must_be_the_same_everywhere():
    model = linear()
    model.gain = nnx.Param(jnp.ones(()))

    def write(model, x):
        model.gain[...] += x.sum()

    with pytest.raises(ValueError, match="Param 'gain' to values that differ"):
        fsdp_jax.shard_map(write)(model, rows())
    fsdp_jax.shard_map(lambda m, x: write(m, jnp.ones(())))(model, rows())
    assert float(model.gain[...]) == 2


# --- Python values --------------------------------------------------------------------


def test_a_python_number_is_kept_or_refused_as_an_array_would_be():
    model = linear()
    model.number = Count(2)

    def count(model, x):
        model.number.set_value(model.number.get_value() + 1)
        return jnp.mean(model(x) ** 2)

    def total(model, x):
        model.number.set_value(model.number.get_value() + x.sum())
        return jnp.mean(model(x) ** 2)

    fsdp_jax.value_and_grad(count)(model, rows())
    assert model.number.get_raw_value() == 3
    assert type(model.number.get_raw_value()) is int
    for wrap in (lambda f: f, nnx.jit):
        with pytest.raises(ValueError, match="Count 'number' to values that differ"):
            wrap(fsdp_jax.value_and_grad(total))(model, rows())
    model.number.set_value(2)
    for f in (count, total):
        text = r"f changes 'number', which holds the Python number 2.*jnp\.asarray\(2\)"
        with pytest.raises(ValueError, match=text):
            fsdp_jax.value_and_grad(f, num_microbatches=2)(model, rows())
    nnx.jit(fsdp_jax.value_and_grad(count, num_microbatches=2))(model, rows())
    assert model.number.get_raw_value() == 4  # an array in jit: handed on


# --- what differs between devices -----------------------------------------------------


class Averaged(nnx.Module):
    """Holds a running average of its own kernel."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0))
        self.average = Count(jnp.zeros((WIDTH, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.average[...] = 0.9 * self.average[...] + 0.1 * self.linear.kernel[...]
        return self.linear(x)


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 1, 2)], ids=["torus", "tensor"])
def test_what_is_computed_from_parameters_is_the_same_along_every_axis(shape):
    axes = ("x", "y", "tensor")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), axes)
    dims = fsdp_jax.DataParallelMeshDims(shard=axes[:2])
    model = Averaged()
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            sharding = jax.sharding.NamedSharding(mesh, PartitionSpec())
            variable[...] = jax.device_put(variable[...], sharding)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    fsdp_jax.value_and_grad(square)(model, rows())
    kernel = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0)).kernel[...]
    np.testing.assert_allclose(model.average[...], 0.1 * kernel, rtol=1e-6)


def summed_over_one_axis(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x.sum(), "fsdp")


def scattered(x: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(jnp.arange(4.0), "fsdp")


def exchanged(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(jnp.arange(4.0), "fsdp", 0, 0)[0]


def shifted(x: jax.Array) -> jax.Array:
    return jax.lax.ppermute(jnp.ones(()), "fsdp", [(0, 1)])


def in_a_loop(x: jax.Array) -> jax.Array:
    def step(i):
        return i + 1 + jax.lax.axis_index("fsdp")

    return jax.lax.while_loop(lambda i: i < 10, step, jnp.int32(0))


def in_a_branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(
        jnp.int32(3) > 2, lambda: jax.lax.axis_index("fsdp"), lambda: jnp.int32(0)
    )


@pytest.mark.parametrize(
    "f",
    [summed_over_one_axis, scattered, exchanged, shifted, in_a_loop, in_a_branch],
)
def test_values_that_differ_along_one_axis_are_found(f):
    model = linear("2x4")
    model.value = Count(jnp.zeros((), jnp.int32))

    def write(model, x):
        model.value[...] = f(x).astype(jnp.int32)

    with pytest.raises(ValueError, match="Count 'value' to values that differ"):
        fsdp_jax.shard_map(write)(model, rows())


def test_a_batch_statistic_that_f_makes_is_averaged(mesh8: Mesh) -> None:
    model = fully_shard(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), mesh=mesh8)
    x = jnp.arange(64.0).reshape(16, 4)
    got = fsdp_jax.shard_map(lambda m, x: nnx.BatchStat(x.mean(0)))(model, x)
    np.testing.assert_allclose(got[...], x.mean(0), 1e-6)
