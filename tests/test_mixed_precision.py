"""What `MixedPrecisionPolicy` casts, and what keeps its dtype.

Dtypes on the wire are read from StableHLO: XLA for CPU widens bfloat16 collectives.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard
from tests import helpers

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    """A dataclass that JAX knows as a tree."""

    x: Any
    index: Any


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Probe(nnx.Module):
    """Notes the dtypes that it sees, and returns its inputs."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(8))
        self.seen = nnx.static([])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(
            (self.scale[...].dtype, jax.tree.map(dtype_of, (args, kwargs)))
        )
        return args, kwargs


class Vector(nnx.Module):
    """One parameter; a call multiplies it into the batch."""

    def __init__(self, size: int = 8, dtype: Any = F32) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight[...]


class Pipeline(nnx.Module):
    """Linear, then LayerNorm, then Linear; notes the dtypes between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)
        self.seen = nnx.static([])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.first(x)
        n = self.norm(h)
        y = self.last(n)
        self.seen.append(tuple(dtype_of(a) for a in (x, h, n, y)))
        return y


def dtype_of(x: Any) -> Any:
    return jnp.dtype(x.dtype).name if hasattr(x, "dtype") else type(x).__name__


def wire_dtypes(text: str, collective: str) -> list[str]:
    """Element types of the operands of a collective in StableHLO text."""
    pattern = rf'"stablehlo\.{collective}"\(.*?\}}>?\)* : \(tensor<(?:\d+x)*(\w+)>\)'
    return re.findall(pattern, text, re.DOTALL)


def policy_model(mesh: Any, **policy: Any) -> Any:
    model = helpers.MLP(nnx.Rngs(0))
    return helpers.shard_blocks(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy)
    )


@functools.cache
def float32_step() -> tuple[Any, Any]:
    """Loss and gradients of the unsharded MLP."""
    step = nnx.jit(nnx.value_and_grad(helpers.mean_square))
    return step(helpers.MLP(nnx.Rngs(0)), *helpers.regression_batch())


@pytest.mark.parametrize(
    ("policy", "gathered", "reduced"),
    [
        ({}, "f32", "f32"),
        ({"param_dtype": BF16}, "bf16", "bf16"),
        ({"param_dtype": BF16, "reduce_dtype": F32}, "bf16", "f32"),
        ({"reduce_dtype": BF16}, "f32", "bf16"),
        ({"param_dtype": F16, "reduce_dtype": F16}, "f16", "f16"),
    ],
    ids=str,
)
def test_what_travels_has_the_policy_s_dtypes(policy, gathered, reduced, mesh8):
    model = policy_model(mesh8, **policy)
    model.set_reshard_after_forward(True)  # so that second gathers are seen too
    model.set_packing_threshold_bytes(600)  # one kernel alone, the rest packed
    x, y = helpers.regression_batch()
    text = helpers.lowered_text(
        fsdp_jax.value_and_grad(helpers.mean_square), model, x, y
    )
    gathers = wire_dtypes(text, "all_gather")
    scatters = wire_dtypes(text, "reduce_scatter")
    counts = helpers.count_collectives(text)
    assert len(gathers) == counts["all_gather"] >= 3
    assert len(scatters) == counts["reduce_scatter"] >= 3
    assert set(gathers) == {gathered}
    assert set(scatters) == {reduced}


def test_gradients_and_shards_keep_the_parameter_dtype(mesh8):
    model = policy_model(mesh8, param_dtype=BF16, reduce_dtype=F32)
    before = jax.tree.map(lambda a: (a.dtype, a.sharding), nnx.state(model))
    batch = helpers.regression_batch()
    expected, expected_grads = float32_step()

    def loss(model, x, y):
        assert model(x).dtype == BF16
        return helpers.mean_square(model, x, y)

    value, grads = fsdp_jax.value_and_grad(loss)(model, *batch)
    np.testing.assert_allclose(value, expected, rtol=0.02)
    helpers.assert_trees_close(grads, expected_grads, rtol=0.1, atol=0.02)
    assert jax.tree.map(lambda a: (a.dtype, a.sharding), nnx.state(model)) == before
    assert jax.tree.map(lambda a: (a.dtype, a.sharding), nnx.to_pure_dict(grads)) == (
        jax.tree.map(
            lambda a: (a.dtype, a.sharding), nnx.to_pure_dict(nnx.state(model))
        )
    )


def test_a_bfloat16_parameter_reduced_in_float32_gets_a_bfloat16_gradient(mesh8):
    policy = MixedPrecisionPolicy(reduce_dtype=F32)
    model = fully_shard(Vector(dtype=BF16), mesh=mesh8, mp_policy=policy)

    def loss(model, x):
        return model(x).astype(F32).sum()

    f = fsdp_jax.value_and_grad(loss)
    _, grads = f(model, jnp.ones((8, 8), BF16))
    assert grads["weight"].dtype == BF16
    text = helpers.lowered_text(f, model, jnp.ones((8, 8), BF16))
    assert wire_dtypes(text, "reduce_scatter") == ["f32"]


def test_the_sum_in_float32_keeps_what_bfloat16_would_drop(mesh8):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    model = fully_shard(Vector(), mesh=mesh8, mp_policy=policy)
    x = jnp.ones((8, 8)).at[0].set(256.0)  # each device's gradient is its row
    grads = fsdp_jax.grad(lambda model, x: model(x).astype(F32).sum())(model, x)
    np.testing.assert_array_equal(grads["weight"][...], np.full(8, (256 + 7) / 8))


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_mean_in_float16_does_not_overflow(num_devices):
    policy = MixedPrecisionPolicy(reduce_dtype=F16)
    mesh = helpers.mesh_of(num_devices)
    model = fully_shard(Vector(), mesh=mesh, mp_policy=policy)
    x = jnp.full((num_devices, 8), 30000.0)
    grads = fsdp_jax.grad(lambda model, x: model(x).sum())(model, x)
    # float16 has steps of 16 and 32 on the way there.
    np.testing.assert_allclose(grads["weight"][...], np.full(8, 30000.0), rtol=1e-3)


def test_floating_inputs_are_cast_wherever_they_are(mesh8):
    def inputs():
        x, i, b = jnp.ones((8, 2)), jnp.ones(8, jnp.int32), jnp.ones(8, bool)
        return (
            x,
            {"a": [x, i], "p": Pair(x.astype(F16), (b,))},
            Point(x, i),
            None,
            "text",
            3,
            2.5,
            np.ones(8, np.float32),
        ), {"key": {"deep": (x, Point(b, x))}, "flag": True}

    expected = (
        (
            "bfloat16",
            {"a": ["bfloat16", "int32"], "p": Pair("bfloat16", ("bool",))},
            Point("bfloat16", "int32"),
            None,
            "str",
            "int",
            "float",
            "bfloat16",
        ),
        {"key": {"deep": ("bfloat16", Point("bool", "bfloat16"))}, "flag": "bool"},
    )
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    args, kwargs = inputs()
    for free in (True, False):
        probe = fully_shard(
            Probe(), mesh=mesh8, mp_policy=policy, reshard_after_forward=free
        )
        seen = probe.seen
        probe(*args, **kwargs)  # eager
        arrays = [a for a in args if not isinstance(a, (str, int, float))]

        def loss(probe, arrays, kwargs, free=free):
            a, b, c, none, numpy = arrays
            probe(a, b, c, none, "text", 3, 2.5, numpy, flag=True, **kwargs)
            return jnp.float32(0)

        fsdp_jax.value_and_grad(loss)(probe, arrays, {"key": kwargs["key"]})
        assert len(seen) >= 2
        for weight, inputs_seen in seen:
            assert weight == BF16
            assert inputs_seen == expected


def test_inputs_are_left_alone_without_param_dtype_or_when_told(mesh8):
    x = jnp.ones((8, 2), F16)
    for policy, weight in (
        (MixedPrecisionPolicy(output_dtype=None), F32),
        (MixedPrecisionPolicy(reduce_dtype=BF16), F32),
        (MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False), BF16),
    ):
        probe = fully_shard(Probe(), mesh=mesh8, mp_policy=policy)
        probe(x, key=x)
        assert probe.seen == [(weight, (("float16",), {"key": "float16"}))]


def test_a_float32_policy_widens_inputs(mesh8):
    policy = MixedPrecisionPolicy(param_dtype=F32)
    probe = fully_shard(Probe(), mesh=mesh8, mp_policy=policy)
    probe(jnp.ones((8, 2), BF16))
    assert probe.seen == [(F32, (("float32",), {}))]


def test_floating_outputs_are_cast_wherever_they_are(mesh8):
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)
    probe = fully_shard(Probe(), mesh=mesh8, mp_policy=policy)
    x, i = jnp.ones((8, 2)), jnp.ones(8, jnp.int32)
    expected = (
        ({"x": "float32"}, (Pair("float32", "int32"), Point("float32", "int32"))),
        {"name": "str"},
    )
    output = probe({"x": x}, (Pair(x, i), Point(x, i)), name="text")
    assert jax.tree.map(dtype_of, output) == expected

    def loss(probe, x, i):
        output = probe({"x": x}, (Pair(x, i), Point(x, i)), name="text")
        assert jax.tree.map(dtype_of, output) == expected
        return output[0][0]["x"].sum()

    fsdp_jax.value_and_grad(loss)(probe, x, i)
    assert {weight for weight, _ in probe.seen} == {jnp.dtype(BF16)}


def test_without_output_dtype_outputs_leave_as_computed(mesh8):
    model = policy_model(mesh8, param_dtype=BF16)
    x, _ = helpers.regression_batch()
    assert model(x).dtype == BF16
    assert jax.eval_shape(fsdp_jax.shard_map(lambda m, x: m(x)), model, x).dtype == BF16


def test_the_gradient_of_an_input_has_the_input_s_dtype(mesh8):
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = fully_shard(Vector(), mesh=mesh8, mp_policy=policy)
    x = jnp.ones((8, 8))
    f = fsdp_jax.grad(
        lambda model, x: model(x).astype(F32).sum(), argnums=(0, 1), reduction="sum"
    )
    grads, x_grad = f(model, x)
    assert grads["weight"].dtype == F32
    assert x_grad.dtype == F32
    np.testing.assert_array_equal(x_grad, np.ones((8, 8)))


@pytest.mark.parametrize("view", ["global", "per device"])
def test_policies_are_not_inherited(view, mesh8):
    model = Pipeline(nnx.Rngs(0))
    norm = MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16)
    fully_shard(model.first, mesh=mesh8)  # no policy of its own
    fully_shard(model.norm, mesh=mesh8, mp_policy=norm)
    fully_shard(model, mesh=mesh8, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    x, y = helpers.regression_batch()
    if view == "global":
        model(x)
    else:
        text = helpers.lowered_text(
            fsdp_jax.value_and_grad(helpers.mean_square), model, x, y
        )
        # Forward in the order root, first, norm; then first and norm again.
        gathers = wire_dtypes(text, "all_gather")
        assert sorted(gathers[:3]) == ["bf16", "f32", "f32"]
        assert set(gathers[3:]) <= {"f32"}
        assert sorted(wire_dtypes(text, "reduce_scatter")) == ["bf16", "f32", "f32"]
    # The root casts its input; `first` has float32 weights and returns float32.
    assert set(model.seen) == {("bfloat16", "float32", "bfloat16", "bfloat16")}


def test_statistics_and_ignored_parameters_keep_their_dtype(mesh8):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.linear = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            h = self.norm(x)
            assert self.norm.mean[...].dtype == F32
            assert nnx.state(self.linear)["bias"].dtype == F32
            assert self.linear.kernel[...].dtype == BF16
            return self.linear(h)

    model = fully_shard(
        Model(nnx.Rngs(0)),
        mesh=mesh8,
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32),
        ignored_params=nnx.PathContains("bias"),
    )
    reference = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    x, y = helpers.regression_batch(32)
    reference(x)
    fsdp_jax.value_and_grad(helpers.mean_square)(model, x, y)
    assert model.norm.mean[...].dtype == F32
    assert model.norm.var[...].dtype == F32
    np.testing.assert_allclose(model.norm.mean[...], reference.mean[...], atol=1e-3)


def test_plain_nnx_gradients_obey_the_policy_in_the_global_view(mesh8):
    model = policy_model(mesh8, param_dtype=BF16, output_dtype=F32)
    batch = helpers.regression_batch()
    expected, expected_grads = float32_step()
    step = nnx.jit(nnx.value_and_grad(helpers.mean_square))
    text = step.lower(model, *batch).lowered.as_text()
    products = re.findall(r"stablehlo\.dot_general.*-> tensor<(?:\d+x)*(\w+)>", text)
    assert products and set(products) == {"bf16"}
    value, grads = step(model, *batch)
    np.testing.assert_allclose(value, expected, rtol=0.02)
    helpers.assert_trees_close(grads, expected_grads, rtol=0.1, atol=0.02)
    for grad, param in zip(
        jax.tree.leaves(grads), jax.tree.leaves(nnx.state(model)), strict=True
    ):
        assert grad.dtype == param.dtype == F32
        assert grad.sharding == param.sharding


# --- in every view ----------------------------------------------------------------

VIEWS = ["eager", "jit", "value_and_grad", "shard_map"]


def run(view: str, model: Any, *args: Any, method: str = "__call__") -> Any:
    """Call a method of a model once, in the given view; None where there is a loss."""

    def f(model, *args):
        return getattr(type(model), method)(model, *args)

    if view == "value_and_grad":
        fsdp_jax.value_and_grad(lambda *a: f(*a).astype(F32).mean())(model, *args)
        return None
    wrap = {"eager": lambda f: f, "jit": nnx.jit, "shard_map": fsdp_jax.shard_map}
    return wrap[view](f)(model, *args)


def is_frozen(path: Any, value: Any) -> bool:
    return any(name in path for name in ("frozen", "integer"))


class Mixed(nnx.Module):
    """Parameters of several kinds; notes what dtypes a call finds."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(8))
        self.half = nnx.Param(jnp.ones(8, BF16))
        self.frozen = nnx.Param(jnp.ones(8, F16))
        self.integer = nnx.Param(jnp.ones(8, jnp.int32))
        self.ignored = nnx.Param(jnp.ones(8))
        self.statistic = nnx.BatchStat(jnp.ones(8))
        self.custom = nnx.Variable(jnp.ones(8, F16))
        self.seen = nnx.static([])

    def __call__(self, x: jax.Array) -> jax.Array:
        names = [n for n in vars(self) if isinstance(getattr(self, n), nnx.Variable)]
        self.seen.append({n: dtype_of(getattr(self, n)[...]) for n in names})
        self.statistic[...] = self.statistic[...] * 2
        return x * self.weight[...] * self.half[...] * self.frozen[...]


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_floating_parameters_are_cast_and_nothing_else(view, free, mesh8):
    model = Mixed()
    before = {n: dtype_of(v.get_raw_value()) for n, v in variables_of(model)}
    sharded: Any = fully_shard(
        model,
        mesh=mesh8,
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16),
        ignored_params=[model.ignored],
        reshard_after_forward=free,
    )
    x = jnp.ones((8, 8))
    if view == "value_and_grad":
        wrt = nnx.All(nnx.Param, nnx.Not(is_frozen))
        _, grads = fsdp_jax.value_and_grad(
            lambda m, x: m(x).astype(F32).mean(), wrt=wrt
        )(model, x)
        assert {k: dtype_of(v) for k, v in nnx.to_pure_dict(grads).items()} == {
            "half": "bfloat16",
            "ignored": "float32",
            "weight": "float32",
        }
    else:
        run(view, model, x)
    assert model.seen and all(
        seen
        == {
            "weight": "bfloat16",
            "half": "bfloat16",
            "frozen": "bfloat16",
            "integer": "int32",
            "ignored": "float32",
            "statistic": "float32",
            "custom": "float16",
        }
        for seen in model.seen
    )
    sharded.reshard()
    assert {n: dtype_of(v.get_raw_value()) for n, v in variables_of(model)} == before
    assert not model.frozen.get_raw_value().sharding.is_fully_replicated
    np.testing.assert_array_equal(model.statistic[...], np.full(8, 2.0))


def variables_of(model: Any) -> list[tuple[str, Any]]:
    return [(n, v) for n, v in vars(model).items() if isinstance(v, nnx.Variable)]


class WithMethod(nnx.Module):
    """A second way in."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(8))
        self.seen = nnx.static([])

    def encode(self, x: jax.Array) -> jax.Array:
        y = x * self.weight[...]
        self.seen.append((dtype_of(x), dtype_of(y)))
        return y

    def __call__(self, x: jax.Array) -> jax.Array:
        first = self.encode(x)  # a call inside a call casts its output too
        second = self.encode(first)
        assert first.dtype == second.dtype == F16
        return second


@pytest.mark.parametrize(
    ("method", "view", "free"),
    [
        (method, view, (i + j) % 2 == 0)
        for i, method in enumerate(("encode", "__call__"))
        for j, view in enumerate(VIEWS)
    ],
)
def test_registered_methods_cast_as_a_call_does(method, view, free, mesh8):
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F16)
    model = fully_shard(
        WithMethod(), mesh=mesh8, mp_policy=policy, reshard_after_forward=free
    )
    fsdp_jax.register_fsdp_forward_method(model, "encode")
    y = run(view, model, jnp.ones((8, 8)), method=method)
    assert set(model.seen) == {("bfloat16", "bfloat16")}
    assert y is None or y.dtype == F16


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("view", ["global", "per device"])
def test_a_recomputed_and_a_repeated_call_cast_again(view, free, mesh8):
    class Model(nnx.Module):
        def __init__(self):
            self.block = WithMethod()

        def __call__(self, x):
            def encode(block, x):
                return block.encode(x)

            y = nnx.remat(encode)(self.block, x)
            assert y.dtype == F16
            return nnx.remat(encode)(self.block, y).sum().astype(F32)

    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F16)
    fully_shard(model.block, mesh=mesh8, mp_policy=policy, reshard_after_forward=free)
    fsdp_jax.register_fsdp_forward_method(model.block, "encode")
    fully_shard(model, mesh=mesh8)
    library = nnx if view == "global" else fsdp_jax
    f = library.value_and_grad(lambda model, x: model(x))
    text = helpers.lowered_text(f, model, jnp.ones((8, 8)))
    products = re.findall(r"stablehlo\.multiply .* tensor<[18]x8x(\w+)>", text)
    # Each call once in forward and once in backward, for its product alone.
    assert len(products) >= 4 and set(products) == {"bf16"}
    assert set(model.block.seen) == {("bfloat16", "bfloat16")}
    _, grads = nnx.jit(f)(model, jnp.ones((8, 8)))
    count = {"global": 64, "per device": 8}[view]  # rows of one device, then a mean
    expected = np.full(8, 2.0 * count / 8)
    np.testing.assert_array_equal(grads["block"]["weight"][...], expected)


@pytest.mark.parametrize("view", VIEWS)
def test_inputs_stay_as_they_are_when_told(view, mesh8):
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = fully_shard(WithMethod(), mesh=mesh8, mp_policy=policy)
    fsdp_jax.register_fsdp_forward_method(model, "encode")
    run(view, model, jnp.ones((8, 8), F16), method="encode")
    assert {seen[0] for seen in model.seen} == {"float16"}


@pytest.mark.parametrize("view", VIEWS)
def test_a_norm_in_float32_inside_a_bfloat16_model(view, mesh8):
    class Norm(nnx.LayerNorm):
        def __call__(self, x, *args, **kwargs):
            y = super().__call__(x, *args, **kwargs)
            found.append((x.dtype, nnx.state(self)["scale"].dtype, y.dtype))
            return y

    found = []
    model = Pipeline(nnx.Rngs(0))
    model.norm = Norm(16, rngs=nnx.Rngs(1))
    island = MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16)
    fully_shard(model.norm, mesh=mesh8, mp_policy=island)
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    fully_shard(model, mesh=mesh8, mp_policy=policy)
    run(view, model, helpers.regression_batch()[0])
    assert set(found) == {(jnp.dtype(F32),) * 3}
    assert set(model.seen) == {("bfloat16",) * 4}


@pytest.mark.parametrize("view", VIEWS)
def test_a_child_without_policy_gets_what_its_bfloat16_parent_has(view, mesh8):
    class Child(Vector):
        def __call__(self, x):
            found.append((dtype_of(x), dtype_of(self.weight[...])))
            return super().__call__(x)

    class Parent(nnx.Module):
        def __init__(self):
            self.scale, self.child = nnx.Param(jnp.ones(8)), Child()

        def __call__(self, x):
            return self.child(x * self.scale[...])

    found = []
    model = Parent()
    fully_shard(model.child, mesh=mesh8)
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    fully_shard(model, mesh=mesh8, mp_policy=policy)
    y = run(view, model, jnp.ones((8, 8)))
    assert set(found) == {("bfloat16", "float32")}
    assert y is None or y.dtype == F32  # as it was computed


@pytest.mark.parametrize("view", ["global", "per device"])
def test_the_gradient_of_a_float32_input_is_float32_in_both_views(view, mesh8):
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = fully_shard(Vector(), mesh=mesh8, mp_policy=policy)

    def loss(model, x):
        return model(x).astype(F32).sum()

    if view == "global":
        f = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    else:
        f = fsdp_jax.grad(loss, argnums=(0, 1), reduction="sum")
    grads, x_grad = f(model, jnp.ones((8, 8)))
    assert x_grad.dtype == grads["weight"].dtype == F32
    np.testing.assert_array_equal(x_grad, np.ones((8, 8)))
    np.testing.assert_array_equal(grads["weight"][...], np.full(8, 8.0))


@pytest.mark.filterwarnings("ignore:gradients of a sharded module are taken")
@pytest.mark.parametrize("view", ["global", "per device"])
def test_nothing_that_lasts_takes_the_policy_s_dtype(view, mesh8):
    policy = {"param_dtype": BF16, "reduce_dtype": F16, "output_dtype": F32}
    model = policy_model(mesh8, **policy)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    library = nnx if view == "global" else fsdp_jax
    batch = helpers.regression_batch()

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = library.value_and_grad(helpers.mean_square)(model, x, y)
        optimizer.update(model, grads)
        return loss, grads

    before = model.state_dict()
    step(model, optimizer, *batch)
    loss, grads = step(model, optimizer, *batch)
    found = [loss, *jax.tree.leaves((grads, nnx.state(model)))]
    found += [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
    assert {dtype_of(x) for x in found} == {"float32"}
    after = model.state_dict()
    assert list(after) == list(before)
    assert {dtype_of(x) for x in after.values()} == {"float32"}
    model.unshard()
    assert {dtype_of(x) for x in jax.tree.leaves(nnx.state(model))} == {"float32"}


@pytest.mark.parametrize("view", ["eager", "jit", "value_and_grad"])
def test_running_statistics_are_those_of_the_unsharded_model(view, mesh8):
    class Model(nnx.Module):
        def __init__(self, axis=None):
            self.norm = nnx.BatchNorm(16, axis_name=axis, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    twin = Model()
    axis = "fsdp" if view == "value_and_grad" else None
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = fully_shard(Model(axis), mesh=mesh8, mp_policy=policy)
    x = helpers.regression_batch(64)[0] + 0.5
    for _ in range(3):
        run(view, model, x)
        twin(x)
    for name in ("mean", "var"):
        found, expected = (getattr(m.norm, name)[...] for m in (model, twin))
        assert found.dtype == F32
        np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.filterwarnings("ignore:gradients of a sharded module are taken")
@pytest.mark.parametrize("view", ["global", "per device"])
@pytest.mark.parametrize(
    "policy", [{}, {"param_dtype": BF16}, {"param_dtype": BF16, "reduce_dtype": F32}]
)
def test_no_program_has_a_float64(policy, view, mesh8):
    model = policy_model(mesh8, **policy)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    library = nnx if view == "global" else fsdp_jax

    def step(model, optimizer, x, y):
        loss, grads = library.value_and_grad(helpers.mean_square)(model, x, y)
        optimizer.update(model, grads)
        return loss

    x, y = (np.asarray(a, np.float64) for a in helpers.regression_batch())
    text = helpers.lowered_text(step, model, optimizer, x, y)
    assert "tensor<16x16xf32>" in text and "f64" not in text


def test_the_global_view_makes_the_cast_parameter_whole(mesh8):
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    layer = nnx.Linear(16, 24, use_bias=False, rngs=nnx.Rngs(0))
    model = fully_shard(layer, mesh=mesh8, mp_policy=policy)
    text = helpers.lowered_text(lambda m, x: m(x), model, jnp.ones((8, 16)))
    moved = re.findall(r"sdy\.sharding_constraint .*tensor<16x24x(\w+)>", text)
    assert moved == ["f32", "bf16"]  # the shard is pinned, then cast, then gathered


@pytest.mark.parametrize("packed", [True, False])
def test_each_parameter_keeps_its_own_dtype_in_a_mixed_group(packed, mesh8):
    class Model(nnx.Module):
        def __init__(self):
            self.base = nnx.Linear(8, 8, param_dtype=BF16, rngs=nnx.Rngs(0))
            self.adapter = nnx.Linear(8, 8, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.adapter(self.base(x))

    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    model: Any = fully_shard(Model(), mesh=mesh8, mp_policy=policy)
    model.set_packing_threshold_bytes(1 << 20 if packed else 0)
    f = fsdp_jax.value_and_grad(lambda m, x: m(x).astype(F32).mean())
    x = jnp.ones((8, 8))
    _, grads = f(model, x)
    for name, dtype in (("base", BF16), ("adapter", F32)):
        assert {g.dtype for g in jax.tree.leaves(grads[name])} == {jnp.dtype(dtype)}
    text = helpers.lowered_text(f, model, x)
    assert wire_dtypes(text, "all_gather") == ["bf16"] * (1 if packed else 4)
    assert wire_dtypes(text, "reduce_scatter") == ["f32"] * (1 if packed else 4)
