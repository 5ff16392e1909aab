"""`fsdp_jax.check`: traps are named with what mends them, faults are not explained."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import fsdp_jax
import fsdp_jax.linen
from fsdp_jax import CheckReport, check, fully_shard
from tests import helpers

ROWS = 8
KEYS = jax.random.split(jax.random.key(0))
X = jax.random.normal(KEYS[0], (ROWS, 6))
Y = jax.random.normal(KEYS[1], (ROWS, 4))


class Net(nnx.Module):
    """Linear layers around what a test is about."""

    def __init__(self, norm: bool = False, drop: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(drop, rngs=rngs) if drop else None
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.up(x)
        for layer in (self.norm, jnp.tanh, self.drop):
            x = layer(x) if layer is not None else x
        return self.down(x)


def sharded(mesh=None, **kwargs) -> Any:
    model = Net(**kwargs)
    mesh = mesh or helpers.mesh_of(4)
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@functools.cache
def plain() -> Any:
    """One layer, for what does not depend on the model."""
    return fully_shard(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4))


def loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def rules(report: CheckReport) -> dict[str, set[str | None]]:
    """The rules that explain the rows, by what they are."""
    found: dict[str, set[str | None]] = {}
    for row in report.rows:
        found.setdefault(row.what, set()).add(row.rule)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    for row in report.rows:
        assert row.path.split(".")[0] in text
    return found


def of_loss(rule: str) -> dict[str, set[str | None]]:
    return {"loss": {rule}, "gradient": {rule}}


# --- no difference ----------------------------------------------------------------


def test_equal_numbers_are_one_line_and_everything_stays_as_it_was():
    model, calls = sharded(), []
    before = {k: np.asarray(v) for k, v in model.state_dict().items()}
    kinds = {k: type(v) for k, v in nnx.to_flat_state(nnx.state(model))}
    held, spec = model.up.kernel, model.up.kernel.sharding.spec

    def counting(model, x, y):
        calls.append(type(model))
        assert isinstance(model, Net)
        return loss(model, x, y)

    report = check(lambda: model, counting, X, Y)
    assert report.ok and not report.rows and not report.notes
    assert "all equal: loss, 4 gradients, 4 Variables" in str(report)
    assert "argument 'x' (8, 6): cut on dim 0 over 4 devices" in report.treated
    assert set(calls) == {type(model), Net}
    assert model.up.kernel is held and held.sharding.spec == spec
    assert kinds == {k: type(v) for k, v in nnx.to_flat_state(nnx.state(model))}
    for name, x in model.state_dict().items():
        np.testing.assert_array_equal(x, before[name])
    report.raise_if_different()


def test_replicas_padding_explicit_axes_and_gradients_of_the_batch():
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), (AxisType.Explicit,) * 2)
    model = fully_shard(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), mesh=mesh, uneven="pad")
    with jax.set_mesh(mesh):
        report = check(model, loss, X, Y, argnums=(0, 1))
    assert report.ok and report.equal == {"loss": 1, "gradient": 3, "state": 2}


def test_weighted_losses_of_micro_batches_without_gradient_sync_are_equal():
    model = nnx.clone(plain())
    model.set_requires_gradient_sync(False)
    mask = (jnp.arange(16) < 7).astype(jnp.float32)

    def parts(model, x, y, mask):
        each = mask * jnp.sum((model(x) - y) ** 2, -1)
        return (each.sum(), mask.sum() + jnp.sum(model(x) ** 2)), each

    x, y = jnp.tile(X, (2, 1)), jnp.tile(Y, (2, 1))
    options: Any = dict(reduction="weighted", has_aux=True, num_microbatches=2)
    report = check(model, parts, x, y, mask, **options)
    assert report.ok and not report.rows
    assert "gradient sync is off" in report.notes[0]


def test_functions_without_a_loss_run_as_in_shard_map():
    report = check(plain(), lambda model, x: model(x) + Y[0], X, reduction=None)
    assert report.ok and report.equal["output"] == 1
    assert "output: (2, 4) per device: concatenated on dim 0" in report.treated
    assert "'Y' (8, 4), from outside of f: whole on every device" in report.treated


# --- traps ------------------------------------------------------------------------


def weighed(model, x, y, weights):
    """`weights` is a table of the four classes, tiled to stay silent when cut."""
    table = jnp.tile(weights, 4 // len(weights))
    return jnp.mean((model(x) - y) ** 2 * table)


def test_an_argument_that_is_no_batch_is_named_with_the_specs_that_mend_it():
    weights = jnp.arange(1.0, 5.0)
    report = check(plain(), weighed, X, Y, weights)
    assert report.ok and rules(report) == of_loss("cut argument")
    (finding,) = {f for row in report.rows for f in row.findings}
    assert "argument 'weights' (4,) was cut on dim 0 over 4" in finding.reason
    assert "Pass in_specs=(None, None, PartitionSpec()): the" in finding.advice
    in_specs = (None, None, PartitionSpec())
    mended = check(plain(), weighed, X, Y, weights, in_specs=in_specs)
    assert mended.ok and not mended.rows


def test_two_rules_at_once_are_told_apart():
    def mixed(model, x, y, weights):
        z = model(x) * jnp.tile(weights, 4 // len(weights))
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ y.T)))

    report = check(plain(), mixed, X, Y, jnp.arange(1.0, 5.0))
    assert rules(report) == of_loss("cut argument + mixed rows")
    assert "the difference is another one then" in report.rows[0].advice


def test_what_proves_nothing_accuses_no_argument():
    def by_place(model, x, y, ones):
        each = jnp.sum((model(x) - y) ** 2, -1) * ones
        return jnp.mean(each * jnp.arange(len(x)))

    report = check(plain(), by_place, X, Y, jnp.ones(ROWS))
    assert rules(report) == of_loss("mixed rows")


def test_an_error_of_the_sharded_run_is_a_row_with_its_cause():
    def strict(model, x, y, weights):
        return jnp.mean((model(x) - y) ** 2 * weights[:4])

    weights = jnp.arange(1.0, 9.0)
    report = check(plain(), strict, X, Y, weights)
    assert not report.ok and rules(report) == {"error": {"cut argument"}}
    assert "PartitionSpec()): the function runs then" in report.rows[0].advice

    def noisy(model, x, y, key):
        return loss(model, x + jax.random.normal(key, x.shape), y)

    key = jax.random.PRNGKey(0)
    model = fully_shard(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(2))
    report = check(model, noisy, X, Y, key)
    assert "argument 'key' is an array of two uint32" in report.rows[0].found
    report = check(plain(), loss, X[:6], Y[:6])
    assert not report.ok and rules(report) == {"error": {None}}
    assert "argument 'x' has size 6 on dim 0" in report.rows[0].found
    with pytest.raises(RuntimeError, match="the sharded run fails"):
        report.raise_if_different()


def test_time_major_data():
    def recurrent(model, x, y):
        step = lambda h, z: (h / 2 + z, None)  # noqa: E731
        last, _ = jax.lax.scan(step, jnp.zeros((x.shape[1], 4)), model(x))
        return jnp.mean((last - y) ** 2)

    x = jax.random.normal(KEYS[0], (8, 4, 6))
    report = check(plain(), recurrent, x, Y[:4])
    assert rules(report) == of_loss("wrong dim")
    advice = "in_specs=(PartitionSpec(None, 'fsdp'), None)"
    assert advice in report.rows[0].advice
    in_specs = (PartitionSpec(None, "fsdp"), None)
    assert not check(plain(), recurrent, x, Y[:4], in_specs=in_specs).rows


def test_a_sum_where_a_mean_is_taken_and_the_other_way_round():
    report = check(plain(), lambda m, x, y: jnp.sum((m(x) - y) ** 2), X, Y)
    assert rules(report) == of_loss("reduction")
    assert "reduction='sum' makes" in report.rows[0].advice
    report = check(plain(), loss, X, Y, reduction="sum")
    assert "reduction='mean' makes" in report.rows[0].advice


def valid(model, x, y, mask):
    each = mask * jnp.sum((model(x) - y) ** 2, -1)
    return each.sum() / jnp.maximum(mask.sum(), 1)


def test_a_mean_over_valid_rows_also_where_devices_hold_as_many():
    mask = (jnp.arange(ROWS) < 3).astype(jnp.float32)
    report = check(plain(), valid, X, Y, mask)
    assert rules(report) == of_loss("uneven weights")
    assert "0.667, 0.333, 0, 0" in report.rows[0].findings[0].reason
    report = check(plain(), valid, X, Y, (jnp.arange(ROWS) % 2).astype(jnp.float32))
    assert not report.rows and "equal by chance" in report.notes[0]
    assert "uneven weights" in report.notes[0]


def test_outputs_that_are_averaged_concatenated_or_counted():
    def with_aux(model, x, y):
        z = model(x)
        aux = {"count": jnp.sum(x > 0) * 1.0, "rows": len(x), "z": z, "sum": z.sum(0)}
        return jnp.mean((z - y) ** 2), aux

    report = check(plain(), with_aux, X, Y, has_aux=True)
    assert report.ok and report.equal["output"] == 1
    assert {row.path: row.rule for row in report.rows} == {
        "['count']": "averaged",
        "['rows']": "counted per device",
        "['sum']": "concatenated",
    }
    assert "(16,) for (4,)" in str(report)
    assert "is their sum" in str(report)


def test_statistics_and_masks_per_device():
    report = check(sharded(norm=True, drop=0.5), loss, X, Y)
    assert report.ok
    found = {(row.what, row.path): row.rule for row in report.rows}
    assert found["loss", ""] == "random streams + batch norm"
    assert found["gradient", "up.kernel"] == "random streams + batch norm"
    assert found["state", "norm.var"] == "batch norm"
    assert ("state", "norm.mean") not in found
    assert "axis_name='fsdp'" in report.rows[0].advice
    with pytest.raises(RuntimeError, match="batch norm"):
        report.raise_if_different(allow=["random streams"])
    report.raise_if_different(allow=["random streams", "batch norm"])


def test_a_stream_without_a_switch_and_a_key_as_an_argument():
    class Noisy(nnx.Module):
        def __init__(self):
            self.net, self.rngs = nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nnx.Rngs(1)

        def __call__(self, x):
            return self.net(x + self.rngs.normal(x.shape))

    model = fully_shard(Noisy(), mesh=helpers.mesh_of(4))
    report = check(model, loss, X, Y)
    assert rules(report) == of_loss("random streams")
    assert "(rngs.default.count)" in report.rows[0].findings[0].reason

    def noisy(model, x, y, key):
        return loss(model, x + jax.random.normal(key, x.shape), y)

    report = check(plain(), noisy, X, Y, jax.random.key(1))
    assert rules(report) == of_loss("key argument")


def test_state_that_counts_rows_and_slices():
    counter = nnx.Dict(n=nnx.Variable(jnp.zeros(())))
    metric = nnx.metrics.Average()

    def counting(model, x, y, counter, metric):
        each = (model(x) - y) ** 2
        counter.n[...] += len(x)
        metric.update(values=each.mean())
        return each.mean()

    report = check(plain(), counting, X, Y, counter, metric, num_microbatches=2)
    assert report.ok and {row.path: row.rule for row in report.rows} == {
        "counter.n": "counted per device",
        "metric.count": "micro-batches + counted per device",
        "metric.total": "micro-batches + counted per device",
    }
    assert float(counter.n[...]) == 0 and float(metric.count[...]) == 0


def test_policies_and_factors():
    policy = fsdp_jax.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    model = fully_shard(model, mesh=helpers.mesh_of(4), mp_policy=policy)
    report = check(model, loss, X, Y)
    assert report.ok and rules(report)["gradient"] == {"mixed precision"}
    model = sharded()
    model.set_gradient_divide_factor(2.0)
    report = check(model, loss, X, Y)
    assert {row.path: row.rule for row in report.rows} == {
        "down.bias": "divide factor",
        "down.kernel": "divide factor",
    }


# --- faults -----------------------------------------------------------------------


def test_a_fault_of_the_library_is_not_explained(monkeypatch):
    right = jax.lax.psum_scatter

    def wrong(*args, **kwargs):
        return right(*args, **kwargs) * 1.01

    monkeypatch.setattr(jax.lax, "psum_scatter", wrong)
    report = check(plain(), weighed, X, Y, jnp.arange(1.0, 5.0))
    assert not report.ok
    assert rules(report) == {"loss": {"cut argument"}, "gradient": {None}}
    assert "! NOT EXPLAINED" in str(report)
    figures = json.loads(report.to_json())
    assert figures["ok"] is False and len(figures["rows"]) == len(report.rows) == 3


def test_a_replay_that_fails_explains_nothing(monkeypatch):
    def fails(*args):
        raise NotImplementedError("here")

    monkeypatch.setattr("fsdp_jax._check_run.Lab.replay", fails)
    report = check(plain(), weighed, X, Y, jnp.arange(1.0, 5.0))
    assert not report.ok and rules(report) == {"loss": {None}, "gradient": {None}}
    assert "NotImplementedError: here" in report.notes[0]


def test_another_model_to_compare_with():
    other: Any = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    report = check(plain(), loss, X, Y, unsharded=lambda: other)
    assert report.ok and not report.rows
    other.bias[...] += 1.0
    report = check(plain(), loss, X, Y, unsharded=other)
    assert not report.ok and None in rules(report)["state"]


# --- Linen ------------------------------------------------------------------------


class LinenNet(nn.Module):
    """As `Net`."""

    @nn.compact
    def __call__(self, x: jax.Array, norm: bool = False, rate: float = 0.0):
        x = nn.Dense(8)(x)
        if norm:
            x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(4)(nn.Dropout(rate, deterministic=False)(jnp.tanh(x)))


def linen_model(**kwargs):
    module = LinenNet()
    init = jax.jit(functools.partial(module.init, **kwargs))
    variables = init(jax.random.key(0), X)
    mesh = helpers.mesh_of(4)
    return fsdp_jax.linen.fully_shard(module, variables, modules="Dense_0", mesh=mesh)


def test_a_loss_that_is_one_device_s_mixes_rows():
    def worst(model, x, y):
        return jnp.max(jnp.mean((model(x) - y) ** 2, axis=1))

    report = check(plain(), worst, X, Y)
    assert {row.rule for row in report.rows} == {"mixed rows"}


def test_numbers_that_are_not_finite_tell_nothing():
    def log_loss(model, x, y):
        return jnp.mean(jnp.log(model(x)))

    with pytest.raises(ValueError, match="loss of the unsharded model .* is nan"):
        check(plain(), log_loss, X, Y)

    def empty_mean(model, x, y):
        return loss(model, x, y), {"none": jnp.mean(x[:0]), "all": jnp.mean(x)}

    report = check(plain(), empty_mean, X, Y, has_aux=True)
    assert report.equal["output"] == 1
    assert any("not finite" in n and "none" in n for n in report.notes)


def test_linen_parameters_and_a_trap():
    model, variables = linen_model()

    def linen_loss(params, x, y, weights):
        apply = lambda x: model.apply({"params": params}, x)  # noqa: E731
        return weighed(apply, x, y, weights)

    params, weights = variables["params"], jnp.arange(1.0, 5.0)
    report = check(model, linen_loss, params, X, Y, weights)
    assert rules(report) == of_loss("cut argument")
    in_specs = (None, None, PartitionSpec())
    report = check(model, linen_loss, params, X, Y, weights, in_specs=in_specs)
    assert report.ok and not report.rows
    assert report.equal == {"loss": 1, "gradient": 4, "state": 4}


def test_linen_statistics_and_masks():
    model, variables = linen_model(norm=True)

    def linen_loss(variables, x, y):
        rngs = {"dropout": jax.random.key(1)}
        out, new = model.apply(variables, x, True, 0.5, rngs=rngs, mutable=True)
        return jnp.mean((out - y) ** 2), new["batch_stats"]

    report = check(model, linen_loss, variables, X, Y, has_aux=True)
    assert report.ok
    found = {(row.what, row.path): row.rule for row in report.rows}
    assert found["loss", ""] == "random streams + batch norm"
    assert found["state", "batch_stats/BatchNorm_0/var"] == "batch norm"
    assert ("state", "batch_stats/BatchNorm_0/mean") not in found


# --- misuse -----------------------------------------------------------------------


def test_misuse_is_refused_and_what_f_raises_comes_through():
    with pytest.raises(TypeError, match="check: model must be a sharded NNX module"):
        check(3, loss, X, Y)
    with pytest.raises(ValueError, match="check: no argument is, or contains"):
        check(Net(), loss, X, Y)
    with pytest.raises(ValueError, match="check: reduction must be one of"):
        check(plain(), loss, X, Y, reduction="max")
    with pytest.raises(ValueError, match="check: rtol must not be negative"):
        check(plain(), loss, X, Y, rtol=-1.0)
    with pytest.raises(TypeError, match="call it outside of jit"):
        jax.jit(lambda x: check(plain(), loss, x, Y).ok)(X)
    with pytest.raises(TypeError, match="unsharded, wrt and argnums are for NNX"):
        check(linen_model()[0], loss, X, argnums=1)
    with pytest.raises(ValueError, match="has 'bias' of shape .2,. where"):
        check(plain(), loss, X, Y, unsharded=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ZeroDivisionError) as caught:
        check(plain(), lambda model, x: 1 / 0, X)
    assert "on the unsharded model" in "".join(caught.value.__notes__)


def test_a_function_that_takes_gradients_itself():
    def f(model, x, y):
        grads = fsdp_jax.grad(loss)(model, x, y)
        copy = fsdp_jax.unsharded(model)
        return loss(model, x, y) + fsdp_jax.global_norm(grads) + loss(copy, x, y)

    report = check(plain(), f, X, Y)
    assert report.ok and not report.rows, str(report)
