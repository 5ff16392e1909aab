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
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_what_travels_has_the_policy_s_dtypes(
    policy, gathered, reduced, reshard_after_forward, mesh8
):
    model = policy_model(mesh8, **policy)
    model.set_reshard_after_forward(reshard_after_forward)
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
