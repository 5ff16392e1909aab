"""Which dim of a parameter is cut: layers, stacks, functions of users."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import Shard, fully_shard, largest_dim
from tests import helpers


def dims_of(module: Any, **kwargs: Any) -> dict[str, int | None]:
    fully_shard(module, **kwargs)
    rows = fsdp_jax.describe(module).rows
    for row in rows:
        local = list(row.shape)
        if row.dim is not None:
            local[row.dim] = -(-local[row.dim] // 8)
        assert row.local_shape == tuple(local), row
    specs = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(module, nnx.Param)))
    real = nnx.to_flat_state(nnx.state(module, nnx.Param))
    for (path, spec), (_, variable) in zip(specs, real, strict=True):
        assert spec.get_raw_value() == variable.get_raw_value().sharding.spec, path
    return {row.path: row.dim for row in rows}


LAYERS = {
    "conv": (
        lambda rngs: nnx.Conv(16, 32, (3, 3), rngs=rngs),
        {"kernel": 3, "bias": 0},
    ),
    "embed": (lambda rngs: nnx.Embed(50257, 16, rngs=rngs), {"embedding": 1}),
    "attention": (
        lambda rngs: nnx.MultiHeadAttention(4, 16, rngs=rngs, decode=False),
        {"query.kernel": 0, "query.bias": None, "out.kernel": 2, "out.bias": 0},
    ),
    "norm": (lambda rngs: nnx.LayerNorm(16, rngs=rngs), {"scale": 0, "bias": 0}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_flax(name: str) -> None:
    make, expected = LAYERS[name]
    found = dims_of(make(nnx.Rngs(0)))
    assert {k: found[k] for k in expected} == expected


def test_padded_layers_of_flax() -> None:
    for make, expected in LAYERS.values():
        found = dims_of(make(nnx.Rngs(0)), uneven="pad")
        assert {found[k] for k in expected} == {0}


def test_a_padded_embedding_of_50257_rows() -> None:
    embed, plain = (nnx.Embed(50257, 16, rngs=nnx.Rngs(0)) for _ in range(2))
    fully_shard(embed, uneven="pad")
    assert fsdp_jax.local_shape(embed.embedding) == (6283, 16)
    ids = jnp.arange(50257 - 8, 50257)
    got = fsdp_jax.grad(lambda m, ids: jnp.mean(m(ids) ** 2))(embed, ids)
    want = nnx.jit(nnx.grad(lambda m, ids: jnp.mean(m(ids) ** 2)))(plain, ids)
    np.testing.assert_allclose(
        got["embedding"][...], want["embedding"][...], 1e-5, 1e-9
    )


class Scaled(nnx.Module):
    """A scalar parameter next to a matrix."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.scale = nnx.Param(jnp.asarray(0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.scale[...]


@pytest.mark.parametrize("uneven", ["auto", "pad", "error"])
def test_scalars_stay_whole_and_train(uneven: str) -> None:
    model, plain = Scaled(), Scaled()
    assert dims_of(model, uneven=uneven)["scale"] is None
    reasons = {r.path: r.reason for r in fsdp_jax.describe(model).rows}
    assert reasons["scale"] == "a scalar has no dim to cut"
    x = jax.random.normal(jax.random.key(0), (16, 8))
    got, want = (
        helpers.train(m, vg, helpers.mean_square, (x, jnp.cos(x)), steps=3)
        for m, vg in (
            (model, fsdp_jax.value_and_grad),
            (plain, nnx.value_and_grad),
        )
    )
    np.testing.assert_allclose(got, want, 1e-5)
    helpers.assert_trees_close(model, plain)


def test_a_function_of_the_user_decides() -> None:
    def place(param: Any) -> Shard | None:
        return Shard(-1) if param.ndim > 1 else None

    assert dims_of(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), shard_placement_fn=place) == {
        "kernel": 1,
        "bias": 0,
    }


def test_matrices_on_dim_0_and_vectors_by_default() -> None:
    def place(param: Any) -> Shard | None:
        return Shard(0) if param.ndim > 1 else None

    found = dims_of(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), shard_placement_fn=place)
    assert found == {"kernel": 0, "bias": 0}


def test_the_largest_dim() -> None:
    conv = nnx.Conv(64, 32, (3, 3), rngs=nnx.Rngs(0))
    assert dims_of(conv, shard_placement_fn=largest_dim) == {"kernel": 2, "bias": 0}
    both = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    assert dims_of(both, shard_placement_fn=largest_dim)["kernel"] == 0
    assert largest_dim(nnx.Param(jnp.zeros(()))) is None
    odd = nnx.Linear(3, 9, rngs=nnx.Rngs(0))
    assert dims_of(odd, shard_placement_fn=largest_dim, uneven="pad")["kernel"] == 1


def test_the_largest_dim_may_be_uneven() -> None:
    odd = nnx.Linear(16, 21, use_bias=False, rngs=nnx.Rngs(0))
    assert dims_of(odd, shard_placement_fn=largest_dim) == {"kernel": 0}
    for place in (largest_dim, lambda _: Shard(1)):
        with pytest.raises(ValueError, match="on dim 1, but 21 does not divide"):
            fully_shard(
                nnx.Linear(16, 21, use_bias=False, rngs=nnx.Rngs(0)),
                shard_placement_fn=place,
                uneven="error",
            )


def test_a_dim_that_a_scalar_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="'scale' of shape .*None for a scalar"):
        fully_shard(Scaled(), shard_placement_fn=lambda _: Shard(0))


# --- stacks -----------------------------------------------------------------------


class Layer(nnx.Module):
    """A parameter of its own, before a layer of Flax that may be there."""

    def __init__(self, rngs: nnx.Rngs, names: tuple | None, linear: bool) -> None:
        made = jax.random.normal(rngs.params(), (8, 24)) / 5
        metadata: Any = {} if names is None else {"out_sharding": names}
        self.kernel = nnx.Param(made, eager_sharding=False, **metadata)
        self.linear = nnx.Linear(24, 8, rngs=rngs) if linear else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x @ self.kernel[...])
        return x[..., :8] if self.linear is None else self.linear(x)


class Decoder(nnx.Module):
    """Eight layers in a scan: as many as there are devices."""

    def __init__(self, names: tuple | None, linear: bool) -> None:
        self.named = names is not None
        metadata = {nnx.PARTITION_NAME: "layers"} if self.named else {}

        @nnx.split_rngs(splits=8)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=metadata)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs, names, linear)

        self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.layers = make(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        metadata = {nnx.PARTITION_NAME: "layers"} if self.named else {}
        run = nnx.scan(
            lambda layer, x: layer(x),
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata=metadata,
        )
        return self.head(run(self.layers, x))


@pytest.mark.parametrize(
    ("names", "linear"),
    [(None, True), (("embed", "mlp"), False), (("embed", "mlp"), True)],
    ids=["found", "named", "both"],
)
def test_a_stack_is_never_cut_along_its_layers(names: Any, linear: bool) -> None:
    model, plain = Decoder(names, linear), Decoder(names, linear)
    found = dims_of(model.layers)
    assert found["kernel"] == 1
    if linear:
        assert found["linear.kernel"] == 1 and found["linear.bias"] == 1
    assert dims_of(model)["head.kernel"] == 0
    x = jax.random.normal(jax.random.key(0), (16, 8))
    got, want = (
        helpers.train(m, vg, helpers.mean_square, (x, jnp.cos(x)), steps=2)
        for m, vg in (
            (model, fsdp_jax.value_and_grad),
            (plain, nnx.value_and_grad),
        )
    )
    np.testing.assert_allclose(got, want, 1e-5)
    values = (nnx.to_flat_state(nnx.state(m, nnx.Param)) for m in (model, plain))
    for (path, a), (_, b) in zip(*values, strict=True):
        np.testing.assert_allclose(a[...], b[...], 1e-4, 1e-6, err_msg=str(path))


def test_a_named_stack_with_dims_that_do_not_divide() -> None:
    param = nnx.Param(
        jnp.zeros((8, 3, 5)), out_sharding=("layers", None, None), eager_sharding=False
    )

    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.stack = param

    assert largest_dim(param) == Shard(2)
    holder = Holder()
    assert dims_of(holder) == {"stack": None}
    (row,) = fsdp_jax.describe(holder).rows
    assert row.reason == "no dim of (8, 3, 5) but its layers divides by 8"


def test_a_stack_that_nothing_names_says_what_to_do_where_it_is_scanned() -> None:
    model = Decoder(None, linear=False)
    fully_shard(model.layers)
    for grad in (fsdp_jax.grad, nnx.grad):
        with pytest.raises(ValueError, match="'kernel'.*layer dim.*Shard"):
            grad(lambda m, x: jnp.mean(m(x)))(model, jnp.ones((8, 8)))


# --- parameters that are cut already ----------------------------------------------


@pytest.mark.parametrize("spec", [(None, "fsdp"), ("fsdp",), ()])
def test_a_parameter_that_carries_a_sharding(mesh8: Any, spec: tuple) -> None:
    linear = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    target = NamedSharding(mesh8, PartitionSpec(*spec))
    linear.kernel[...] = jax.device_put(linear.kernel[...], target)
    assert dims_of(linear, mesh=mesh8) == {"kernel": 0, "bias": 0}


def test_an_annotation_that_is_a_sharding(mesh8: Any) -> None:
    target = NamedSharding(mesh8, PartitionSpec(None, "fsdp"))
    linear = nnx.Linear(
        8, 16, kernel_metadata={"out_sharding": target}, rngs=nnx.Rngs(0)
    )
    assert dims_of(linear, mesh=mesh8)["kernel"] == 0


STACKED = {
    "conv": (lambda rngs: nnx.Conv(8, 8, (3,), rngs=rngs), {"kernel": 2, "bias": 1}),
    "general": (
        lambda rngs: nnx.LinearGeneral((8, 2), (4,), axis=(-2, -1), rngs=rngs),
        {"kernel": 1, "bias": None},
    ),
    "einsum": (
        lambda rngs: nnx.Einsum("ab,bc->ac", (8, 8), rngs=rngs),
        {"kernel": 1},
    ),
}


@pytest.mark.parametrize("name", STACKED)
def test_stacks_of_other_layers(name: str) -> None:
    make, expected = STACKED[name]

    @nnx.split_rngs(splits=8)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs: nnx.Rngs) -> Any:
        return make(rngs)

    assert dims_of(stack(nnx.Rngs(0))) == expected


def test_annotations_of_the_model_are_replaced_by_what_is_true(mesh8: Any) -> None:
    with jax.set_mesh(mesh8):
        linear = nnx.Linear(
            8, 16, kernel_metadata={"out_sharding": (None, "fsdp")}, rngs=nnx.Rngs(0)
        )
    assert dims_of(linear, mesh=mesh8)["kernel"] == 0
    optimizer = nnx.Optimizer(linear, optax.adam(1e-3), wrt=nnx.Param)
    specs: Any = nnx.get_partition_spec(nnx.state(optimizer))
    mu = specs["opt_state"][0]["mu"]["kernel"]
    assert mu.get_raw_value() == PartitionSpec("fsdp")
    clone = nnx.clone(linear)
    assert clone.kernel.get_metadata("out_sharding") == ("fsdp",)
