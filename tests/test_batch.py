"""Where arguments go: shard_batch, in_specs, local_shape, and their error texts."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import Shard, fully_shard, local_shape, shard_batch
from tests import helpers

P = PartitionSpec
CUT = P("fsdp")


@pytest.fixture
def model(mesh8: Mesh) -> Any:
    """Linear(16, 8), seed 0, over eight devices."""
    return fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=mesh8)


def rows(count: int, *shape: int) -> np.ndarray:
    """Distinct float32 numbers `(count, *shape)`."""
    numbers = np.arange(count * int(np.prod(shape)), dtype=np.float32)
    return numbers.reshape(count, *shape) / 8


def assert_placed(x: Any, expected: Any, mesh: Mesh, spec: PartitionSpec) -> None:
    assert isinstance(x, jax.Array)
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(expected))


class Pair(NamedTuple):
    first: Any
    second: Any


# --- shard_batch ------------------------------------------------------------------


def test_each_device_gets_its_own_rows_in_device_order(model, mesh8):
    host = rows(16, 3)
    placed = shard_batch(host, model)
    assert_placed(placed, host, mesh8, CUT)
    pieces = {s.device: np.asarray(s.data) for s in placed.addressable_shards}
    for i, device in enumerate(mesh8.devices.flat):
        np.testing.assert_array_equal(pieces[device], host[2 * i : 2 * i + 2])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool"])
def test_numpy_arrays_keep_their_dtype(model, mesh8, dtype):
    host = (rows(8, 2) * 8 % 2).astype(dtype)
    placed = shard_batch(host, model)
    assert placed.dtype == host.dtype
    assert_placed(placed, host, mesh8, CUT)


def test_bfloat16_host_arrays_keep_their_dtype(model):
    host = rows(8).astype(jnp.bfloat16)
    placed = shard_batch(host, model)
    assert placed.dtype == jnp.bfloat16
    assert local_shape(placed) == (1,)


@pytest.mark.parametrize(
    "scalar", [3, 2.5, True, np.float32(4), np.int32(5), np.ones(()), jnp.ones(())]
)
def test_scalars_are_replicated_on_the_mesh(model, mesh8, scalar):
    placed = shard_batch(scalar, model)
    assert placed.shape == ()
    assert_placed(placed, scalar, mesh8, P())


def test_an_array_committed_to_one_device_is_moved(model, mesh8):
    x = jax.device_put(rows(8, 2), jax.devices()[3])
    assert_placed(shard_batch(x, model), x, mesh8, CUT)


def test_an_array_on_part_of_the_devices_is_moved(model, mesh8):
    x = jax.device_put(rows(8, 2), NamedSharding(helpers.mesh_of(4), CUT))
    assert_placed(shard_batch(x, model), x, mesh8, CUT)


def test_a_replicated_array_is_cut(model, mesh8):
    x = jax.device_put(rows(8, 2), NamedSharding(mesh8, P()))
    assert_placed(shard_batch(x, model), x, mesh8, CUT)


def test_a_placed_array_passes_through_unchanged(model):
    placed = shard_batch({"x": rows(8, 2), "n": 3}, model)
    again = shard_batch(placed, model)
    assert again["x"] is placed["x"]
    assert again["n"] is placed["n"]


def test_typed_keys_are_cut_by_row_and_single_keys_replicated(model, mesh8):
    keys = jax.random.split(jax.random.key(0), 8)
    placed = shard_batch({"rows": keys, "one": jax.random.key(1)}, model)
    assert placed["rows"].dtype == keys.dtype
    assert local_shape(placed["rows"]) == (1,)
    assert placed["one"].sharding.is_fully_replicated
    assert placed["one"].sharding.device_set == set(mesh8.devices.flat)
    for name, key in (("rows", keys), ("one", jax.random.key(1))):
        expected = jax.random.key_data(key)
        np.testing.assert_array_equal(jax.random.key_data(placed[name]), expected)


def test_trees_keep_their_structure(model, mesh8):
    batch = {"pair": Pair(rows(8, 2), None), "list": [rows(16), (rows(8, 1),)], "n": 1}
    placed = shard_batch(batch, model)
    assert jax.tree.structure(placed) == jax.tree.structure(batch)
    assert isinstance(placed["pair"], Pair)
    assert_placed(placed["pair"].first, batch["pair"].first, mesh8, CUT)
    assert_placed(placed["list"][0], rows(16), mesh8, CUT)
    assert_placed(placed["list"][1][0], rows(8, 1), mesh8, CUT)


def test_a_plain_parent_of_sharded_modules_gives_the_mesh(model, mesh8):
    parent = nnx.List([model])
    assert_placed(shard_batch(rows(8), parent), rows(8), mesh8, CUT)


def test_a_batch_goes_to_the_devices_of_the_model_only():
    mesh = helpers.mesh_of(2)
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh)
    assert_placed(shard_batch(rows(2, 8), model), rows(2, 8), mesh, CUT)


def test_a_batch_on_explicit_axes_trains_like_the_host_batch():
    mesh = jax.make_mesh((8,), ("fsdp",))
    model = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=mesh)
    x, y = helpers.regression_batch(8)
    step = fsdp_jax.value_and_grad(helpers.mean_square)
    value, _ = step(model, *shard_batch((x, y), model))
    host_value, _ = step(model, np.asarray(x), np.asarray(y))
    reference = helpers.mean_square(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), x, y)
    np.testing.assert_allclose(value, reference, rtol=1e-5)
    np.testing.assert_allclose(host_value, reference, rtol=1e-5)


def test_rows_that_do_not_divide_raise_with_path_and_sizes(model):
    with pytest.raises(ValueError, match=r"shard_batch: batch\['x'\]\[1\] has 19 rows"):
        shard_batch({"x": [rows(8), rows(19, 2)]}, model)
    with pytest.raises(ValueError, match="8 devices"):
        shard_batch(rows(19), model)


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["text"] * 8), b"bytes"])
def test_a_leaf_that_is_no_array_raises_with_its_path(model, leaf):
    with pytest.raises(TypeError, match=re.escape("batch['x'][0]")):
        shard_batch({"x": [leaf, rows(8)]}, model)


@pytest.mark.parametrize("wrong", [None, 3, "model", rows(8)])
def test_shard_batch_needs_a_sharded_module(wrong):
    with pytest.raises(ValueError, match="shard_batch: no argument .* fully_shard"):
        shard_batch(rows(8), wrong)
    with pytest.raises(ValueError, match="shard_batch: no argument .* fully_shard"):
        shard_batch(rows(8), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_modules_on_different_meshes_raise(model):
    other = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4))
    with pytest.raises(ValueError, match="shard_batch: .* 2 different meshes"):
        shard_batch(rows(8), nnx.List([model, other]))


# --- arguments of value_and_grad --------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        np.asarray,
        jnp.asarray,
        lambda x: jax.device_put(x, jax.devices()[5]),
        lambda x: jax.device_put(x, NamedSharding(helpers.mesh_of(4), P())),
    ],
    ids=["numpy", "uncommitted", "one device", "four devices"],
)
def test_arguments_are_placed_from_wherever_they_are(model, place):
    x, y = helpers.regression_batch(8)
    reference = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    want, want_grads = nnx.jit(nnx.value_and_grad(helpers.mean_square))(reference, x, y)
    step = fsdp_jax.value_and_grad(helpers.mean_square)
    value, grads = step(model, place(x), place(y))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    helpers.assert_trees_close(grads, want_grads)


def seen_shapes(*args: Any, in_specs: Any = None, **kwargs: Any) -> list[tuple]:
    """Shapes that `f` sees of its arguments on one device, in order."""
    seen: list[tuple] = []

    def f(model: Any, *args: Any, **kwargs: Any) -> None:
        seen.extend(jnp.shape(x) for x in jax.tree.leaves((args, kwargs)))

    fsdp_jax.shard_map(f, in_specs=in_specs)(*args, **kwargs)
    return seen


def test_arrays_are_cut_on_dim_0_and_scalars_are_whole(model):
    batch = {"a": rows(16, 3), "b": [jnp.ones(8), np.float32(1)], "c": 3}
    assert seen_shapes(model, batch, jnp.ones(())) == [(2, 3), (1,), (), (), ()]


def test_keyword_arguments_are_cut_too(model):
    shapes = seen_shapes(model, x=rows(16, 3), y={"z": rows(8)}, s=2.0)
    assert shapes == [(), (2, 3), (1,)]


@pytest.mark.parametrize(
    ("in_specs", "expected"),
    [
        (P(), [(16, 8), (8,), (24,)]),
        ((P(), None), [(16, 8), (8,), (3,)]),
        ([P(), CUT], [(16, 8), (8,), (3,)]),
        ((None, None), [(2, 8), (1,), (3,)]),
        (({"a": P(None, "fsdp"), "b": None}, P()), [(16, 1), (1,), (24,)]),
        (({"a": P(("fsdp",)), "b": P()}, CUT), [(2, 8), (8,), (3,)]),
        ((None, P(), None), [(16, 8), (8,), (3,)]),
    ],
    ids=["one", "none", "list", "nones", "prefix", "tuple axis", "with model"],
)
def test_in_specs_say_how_each_argument_is_cut(model, in_specs, expected):
    args = {"a": rows(16, 8), "b": rows(8)}, rows(24)
    assert seen_shapes(model, *args, in_specs=in_specs) == expected


def test_a_whole_argument_has_the_same_values_on_every_device(model):
    def f(model: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2 * weights)

    x, _ = helpers.regression_batch(16)
    weights = jnp.arange(8.0)
    run = fsdp_jax.value_and_grad(f, in_specs=(None, P()), argnums=(0, 2))
    value, (grads, weight_grads) = run(model, x, weights)
    reference = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    want, want_grads = nnx.jit(nnx.value_and_grad(f, argnums=(0, 2)))(
        reference, x, weights
    )
    np.testing.assert_allclose(value, want, rtol=1e-5)
    helpers.assert_trees_close(grads, want_grads[0])
    np.testing.assert_allclose(weight_grads, want_grads[1], rtol=1e-5)


def loss(model: Any, x: Any, y: Any) -> jax.Array:
    """A loss whose arguments have names and paths to report."""
    return jnp.mean((model(x["rows"][0]) - y) ** 2)


@pytest.mark.parametrize(
    ("in_specs", "error", "text"),
    [
        (None, ValueError, r"argument 'x'\['rows'\]\[1\] has size 19 on dim 0.* 8 dev"),
        ("fsdp", TypeError, "in_specs must be a PartitionSpec or a tuple.* got str"),
        ((CUT,), ValueError, "in_specs has 1 entries for 2 arguments"),
        ((CUT,) * 4, ValueError, "in_specs has 4 entries for 2 arguments"),
        (("fsdp", CUT), TypeError, "in_specs holds 'fsdp', not a PartitionSpec"),
        (P("tp"), ValueError, r"spec P.*'tp'.* of argument 'x'.* axis 'tp'.*'fsdp'"),
        (
            ({"rows": [None, P(None, "fsdp")]}, None),
            ValueError,
            r"argument 'x'\['rows'\]\[1\] has shape \(19,\).* has 2 entries",
        ),
        (({"lines": CUT}, None), ValueError, "does not fit argument 'x'"),
        (
            ({"rows": [None, P()]}, P(None, ("fsdp",))),
            ValueError,
            r"argument 'y' has size 12 on dim 1.* 8 devices.*in_specs",
        ),
    ],
    ids=[
        "rows",
        "no spec",
        "too few",
        "too many",
        "string",
        "axis",
        "rank",
        "prefix",
        "dim 1",
    ],
)
@pytest.mark.parametrize("make", [fsdp_jax.value_and_grad, fsdp_jax.shard_map])
def test_bad_specs_raise_naming_function_argument_and_path(
    model, make, in_specs, error, text
):
    x = {"rows": [rows(16, 16), rows(19)]}
    with pytest.raises(error, match=rf"(?s)^{make.__name__}: .*{text}"):
        make(loss, in_specs=in_specs)(model, x, rows(16, 12))


def test_bad_rows_raise_inside_jit_too(model):
    step = nnx.jit(fsdp_jax.value_and_grad(helpers.mean_square))
    with pytest.raises(ValueError, match="argument 'x' has size 19 on dim 0"):
        step(model, rows(19, 16), rows(19, 8))


def test_variadic_and_keyword_arguments_are_named(model):
    def f(model: Any, *xs: Any, scale: Any = None) -> jax.Array:
        return jnp.sum(jnp.stack([jnp.sum(model(x)) for x in xs]))

    step = fsdp_jax.value_and_grad(f)
    with pytest.raises(ValueError, match=r"argument 'xs'\[1\] has size 3 on dim 0"):
        step(model, rows(8, 16), rows(3, 16))
    with pytest.raises(ValueError, match=r"argument 'scale'\['a'\] has size 3"):
        step(model, rows(8, 16), scale={"a": rows(3)})


def test_after_a_bad_call_the_model_still_works(model):
    step = fsdp_jax.value_and_grad(helpers.mean_square)
    with pytest.raises(ValueError, match="19"):
        step(model, rows(19, 16), rows(19, 8))
    x, y = helpers.regression_batch(8)
    reference = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    want = helpers.mean_square(reference, x, y)
    np.testing.assert_allclose(step(model, x, y)[0], want, rtol=1e-5)


@pytest.mark.parametrize("in_specs", [None, (P(), CUT), ({"a": P()}, None)])
def test_specs_of_every_form_work_again_and_again(model, in_specs):
    def f(model: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean(model(x["a"])) * jnp.mean(y)

    step = fsdp_jax.value_and_grad(f, in_specs=in_specs)
    values = {float(step(model, {"a": rows(8, 16)}, rows(8))[0]) for _ in range(3)}
    assert len(values) == 1


# --- local_shape ------------------------------------------------------------------


def test_local_shape_is_the_piece_of_one_device():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    fully_shard(layer, mesh=helpers.mesh_of(2))
    assert layer.kernel.shape == (8, 8)
    assert local_shape(layer.kernel) == (4, 8)
    assert local_shape(layer.bias) == (4,)
    pieces = layer.kernel.get_raw_value().addressable_shards
    assert [p.data.shape for p in pieces] == [(4, 8)] * 2


def test_local_shape_takes_arrays_and_abstract_arrays(model, mesh8):
    assert local_shape(model.kernel[...]) == (2, 8)
    assert local_shape(rows(6, 2)) == (6, 2)
    assert local_shape(shard_batch(rows(16, 3), model)) == (2, 3)
    abstract = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    assert local_shape(abstract) == (16, 3)
    cut = NamedSharding(mesh8, P(None, "fsdp"))
    abstract = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=cut)
    assert local_shape(abstract) == (16, 1)


def test_local_shape_of_another_dim_and_of_a_whole_parameter(mesh8):
    layer = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
    fully_shard(layer, mesh=mesh8, shard_placement_fn=lambda v: Shard(v.ndim - 1))
    assert local_shape(layer.kernel) == (16, 3)
    odd = fully_shard(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), mesh=mesh8)
    assert local_shape(odd.kernel) == (3, 5)


def test_local_shape_follows_unshard_and_reshard(model):
    model.unshard()
    assert local_shape(model.kernel) == (16, 8)
    model.reshard()
    assert local_shape(model.kernel) == (2, 8)


def test_local_shape_of_an_abstract_model(mesh8):
    layer = nnx.eval_shape(lambda: nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    assert local_shape(layer.kernel) == (16, 8)
    fully_shard(layer, mesh=mesh8)
    assert local_shape(layer.kernel) == (2, 8)


def test_local_shape_in_a_per_device_program_is_the_shape_there(model):
    seen = []

    def f(model: Any, x: jax.Array) -> jax.Array:
        seen.append((local_shape(model.kernel), local_shape(x)))
        return model(x)

    fsdp_jax.shard_map(f)(model, rows(16, 16))
    assert seen == [((2, 8), (2, 16))]


def test_local_shape_in_jit_is_the_shape_outside(model):
    seen = []

    @nnx.jit
    def f(model: Any) -> None:
        seen.append((local_shape(model.kernel), model.kernel.shape))

    f(model)
    assert seen == [((2, 8), (16, 8))]


@pytest.mark.parametrize("wrong", [None, 3.0, "kernel", [1, 2]])
def test_local_shape_refuses_what_has_no_shape(model, wrong):
    with pytest.raises(TypeError, match=f"local_shape: .* got {type(wrong).__name__}"):
        local_shape(wrong)
    with pytest.raises(TypeError, match="local_shape: .* got LinearFSDPModule"):
        local_shape(model)
