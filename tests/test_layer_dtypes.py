"""The warning that a layer's own dtype contradicts the mixed precision policy."""

import warnings

import jax.numpy as jnp
import pytest
from flax import nnx

from fsdp_jax import MixedPrecisionPolicy, fully_shard
from tests import helpers

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
POLICY = MixedPrecisionPolicy(param_dtype=BF16)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


class Layers(nnx.Module):
    """Linear layers `a`, `b`, ... with the dtypes given."""

    a: nnx.Linear
    b: nnx.Linear

    def __init__(self, *dtypes):
        for name, dtype in zip("abcdef", dtypes):
            setattr(self, name, nnx.Linear(8, 8, dtype=dtype, rngs=rngs()))

    def __call__(self, x):
        return x


def warning_of(call) -> str:
    """The text of the one warning of a call, which must point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (warning,) = caught
    assert warning.category is UserWarning
    assert warning.filename == __file__
    return str(warning.message)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nnx.Linear(8, 8, dtype=F32, rngs=rngs()),
        lambda: nnx.Linear(8, 8, dtype="float32", rngs=rngs()),  # pyright: ignore
        lambda: nnx.Linear(8, 8, dtype=float, rngs=rngs()),
        lambda: nnx.Linear(8, 8, dtype=jnp.dtype(F32), rngs=rngs()),
        lambda: nnx.LayerNorm(8, dtype=F32, rngs=rngs()),
        lambda: nnx.RMSNorm(8, dtype=F32, rngs=rngs()),
        lambda: nnx.BatchNorm(8, dtype=F32, rngs=rngs()),
        lambda: nnx.Embed(8, 8, dtype=F32, rngs=rngs()),
        lambda: nnx.Conv(8, 8, (3,), dtype=F32, rngs=rngs()),
        lambda: nnx.Einsum("ab,bc->ac", (8, 8), dtype=F32, rngs=rngs()),
    ],
)
def test_a_layer_with_its_own_dtype(layer, mesh8):
    layer = layer()
    kind = type(layer).__name__
    text = warning_of(lambda: fully_shard(layer, mesh=mesh8, mp_policy=POLICY))
    assert f"the module itself ({kind}, dtype float32)" in text
    assert "param_dtype=bfloat16" in text
    assert "at None" in text and "its own fully_shard call" in text


def test_attention_and_its_projections(mesh8):
    attention = nnx.MultiHeadAttention(
        num_heads=2, in_features=8, decode=False, dtype=F32, rngs=rngs()
    )
    text = warning_of(lambda: fully_shard(attention, mesh=mesh8, mp_policy=POLICY))
    assert "the module itself (MultiHeadAttention, dtype float32)" in text
    assert "2 more" in text  # of query, key, value and out


def test_an_embedding_computes_in_the_dtype_of_its_table_unless_told(mesh8):
    def make(**dtype):
        return nnx.Embed(8, 8, rngs=rngs(), **dtype)

    model = make()
    text = warning_of(lambda: fully_shard(model, mesh=mesh8, mp_policy=POLICY))
    assert "(Embed, dtype float32)" in text and "set bfloat16" in text
    assert model(jnp.zeros(8, jnp.int32)).dtype == F32
    told = fully_shard(make(dtype=BF16), mesh=mesh8, mp_policy=POLICY)
    assert told(jnp.zeros(8, jnp.int32)).dtype == BF16


def test_at_most_three_layers_are_named(mesh8):
    model = Layers(F32, F32, F16, F32, None, BF16)
    text = warning_of(lambda: fully_shard(model, mesh=mesh8, mp_policy=POLICY))
    named = "'a' (Linear, dtype float32), 'b' (Linear, dtype float32)"
    assert f"{named}, 'c' (Linear, dtype float16) and 1 more." in text
    model = Layers(F32, F32, F32)
    text = warning_of(lambda: fully_shard(model, mesh=mesh8, mp_policy=POLICY))
    assert "more." not in text.split("once more")[0]


def test_one_warning_for_a_list_of_modules(mesh8):
    modules = [Layers(F32), Layers(None), nnx.Linear(8, 8, dtype=F32, rngs=rngs())]
    text = warning_of(lambda: fully_shard(modules, mesh=mesh8, mp_policy=POLICY))
    assert "'[0].a' (Linear" in text and "'[2]' (Linear" in text


def test_a_module_and_one_below_it_in_one_list_name_a_layer_once(mesh8):
    model = Layers(F32, None)
    call = lambda: fully_shard([model, model.a], mesh=mesh8, mp_policy=POLICY)  # noqa: E731
    text = warning_of(call)
    assert text.count("(Linear") == 1 and "'[1]'" in text


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(reduce_dtype=BF16, output_dtype=BF16),
        MixedPrecisionPolicy(param_dtype=F32),
    ],
)
def test_no_warning_where_nothing_is_contradicted(policy, mesh8):
    fully_shard(Layers(F32, None), mesh=mesh8, mp_policy=policy)


def test_a_layer_with_its_own_call_does_not_count(mesh8):
    model = Layers(F32, None, BF16)
    island = MixedPrecisionPolicy(param_dtype=F32, output_dtype=BF16)
    fully_shard(model.a, mesh=mesh8, mp_policy=island)
    model.b = nnx.LayerNorm(  # pyright: ignore
        8, use_scale=False, use_bias=False, dtype=F32, rngs=rngs()
    )
    fully_shard(model.b, mesh=mesh8, mp_policy=island)  # without parameters
    fully_shard(model, mesh=mesh8, mp_policy=POLICY)


def test_layers_whose_parameters_are_ignored_do_not_count(mesh8):
    model = Layers(F32, None)
    ignored = nnx.PathContains("a")
    fully_shard(model, mesh=mesh8, mp_policy=POLICY, ignored_params=ignored)


def test_other_attributes_of_that_name_do_not_count(mesh8):
    class Model(nnx.Module):
        def __init__(self, dtype):
            self.weight = nnx.Param(jnp.ones(8))
            self.dtype = dtype

        def __call__(self, x):
            return x

    class Reading(Model):
        dtype = property(lambda self: self.weight.dtype)  # of what is at rest

        def __init__(self):
            self.weight = nnx.Param(jnp.ones(8))

    for dtype in (None, jnp.int32, bool, "not a dtype", 3, Model):
        fully_shard(Model(dtype), mesh=mesh8, mp_policy=POLICY)
    fully_shard(Model(nnx.Variable(jnp.ones(8))), mesh=mesh8, mp_policy=POLICY)
    fully_shard(Reading(), mesh=mesh8, mp_policy=POLICY)


def test_as_an_error_it_leaves_everything_as_it_was(mesh8):
    model = helpers.MLP(nnx.Rngs(0))
    model.layers[0].dtype = F32
    kind, before = type(model), nnx.state(model)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="'layers.0'"):
        warnings.simplefilter("error")
        fully_shard(model, mesh=mesh8, mp_policy=POLICY)
    assert type(model) is kind
    kernel = model.layers[0].kernel
    assert type(kernel) is nnx.Param
    assert kernel.sharding == before["layers"][0]["kernel"].sharding
    fully_shard(model, mesh=mesh8)


def test_what_is_warned_of_is_so(mesh8):
    class Model(Layers):
        def __call__(self, x):
            return self.a(x), self.b(x)

    model = Model(F32, None)
    with pytest.warns(UserWarning, match="'a'"):
        fully_shard(model, mesh=mesh8, mp_policy=POLICY)
    a, b = model(jnp.ones((8, 8)))
    assert (a.dtype, b.dtype) == (F32, BF16)
