"""shard_map: the program of one device without a gradient, and joining its results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard, local_shape, shard_map
from tests import helpers

P = PartitionSpec
CUT = P("fsdp")


class Square(nnx.Module):
    """Two layers that keep the width of 8, so that they can be applied in a loop."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs)])
        self.out = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.layers[0](x)))


class Stateful(nnx.Module):
    """A layer with statistics, random masks, a counter and a last value."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.0, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.last = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


@pytest.fixture
def model(mesh8: Mesh) -> Any:
    """A `Square`, seed 0, two groups over eight devices."""
    return helpers.shard_blocks(Square(nnx.Rngs(0)), mesh=mesh8)


@pytest.fixture
def reference() -> Square:
    """The same model, unsharded."""
    return Square(nnx.Rngs(0))


@pytest.fixture
def stateful(mesh8: Mesh) -> Any:
    """A `Stateful`, seed 0, one group over eight devices."""
    return fully_shard(Stateful(nnx.Rngs(0)), mesh=mesh8)


def inputs(rows: int = 16) -> jax.Array:
    """Normal numbers `(rows, 8)`."""
    return jax.random.normal(jax.random.key(5), (rows, 8))


def forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# --- evaluation -------------------------------------------------------------------


def call_in_jax_jit(f: Callable, model: Any, *args: Any) -> Any:
    """Call `f` in `jax.jit`, on the split model."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, *args: f(nnx.merge(graphdef, state), *args))
    return run(state, *args)


WAYS = {
    "eager": lambda f, model, *args: f(model, *args),
    "nnx.jit": lambda f, model, *args: nnx.jit(f)(model, *args),
    "jax.jit": call_in_jax_jit,
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_and_metrics_equal_the_unsharded_model(model, reference, way):
    def evaluate(model: Any, x: jax.Array, y: jax.Array) -> tuple:
        output = model(x)
        return output, {"loss": jnp.mean((output - y) ** 2)}

    x, y = inputs(), inputs() + 1
    output, metrics = WAYS[way](shard_map(evaluate), model, x, y)
    want, want_metrics = evaluate(reference, x, y)
    assert_close(output, want)
    assert_close(metrics["loss"], want_metrics["loss"])
    assert output.sharding.spec == CUT
    assert metrics["loss"].shape == ()
    assert metrics["loss"].sharding.is_fully_replicated
    assert local_shape(model.out.kernel) == (2, 8)


def test_each_device_sees_its_rows_and_its_shards(model):
    seen = []

    def f(model: Any, x: jax.Array) -> jax.Array:
        seen.append((x.shape, local_shape(model.out.kernel)))
        return model(x)

    shard_map(f)(model, inputs())
    assert seen == [((2, 8), (2, 8))]


def test_one_gather_per_group_and_nothing_else(model):
    text = helpers.lowered_text(shard_map(forward), model, inputs())
    assert helpers.count_collectives(text) == {
        "all_gather": 2,
        "reduce_scatter": 0,
        "all_reduce": 0,
        "all_to_all": 0,
    }


def test_an_eager_call_reads_what_the_function_closes_over_anew(model, reference):
    factor = jnp.float32(1.0)
    run = shard_map(lambda model, x: factor * model(x))
    for factor in (jnp.float32(2.0), jnp.float32(3.0)):
        assert_close(run(model, inputs()), factor * reference(inputs()))


def test_an_unsharded_module_is_used_and_stays_unsharded(model, reference):
    model.unshard()
    assert_close(shard_map(forward)(model, inputs()), reference(inputs()))
    assert local_shape(model.out.kernel) == (16, 8)
    assert local_shape(model.layers[0].kernel) == (1, 16)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_any_number_of_devices(reference, num_devices):
    mesh = helpers.mesh_of(num_devices)
    model = helpers.shard_blocks(Square(nnx.Rngs(0)), mesh=mesh)
    output, mean = shard_map(lambda m, x: (m(x), m(x).mean()))(model, inputs())
    assert_close(output, reference(inputs()))
    assert_close(mean, reference(inputs()).mean())


def test_explicit_axes(reference):
    mesh = jax.make_mesh((8,), ("fsdp",))
    model = helpers.shard_blocks(Square(nnx.Rngs(0)), mesh=mesh)
    for run in (shard_map(forward), nnx.jit(shard_map(forward))):
        assert_close(run(model, inputs()), reference(inputs()))


def test_a_plain_parent_with_several_roots(reference, mesh8):
    roots = [fully_shard(Square(nnx.Rngs(0)), mesh=mesh8) for _ in range(2)]

    def f(parent: Any, x: jax.Array) -> jax.Array:
        return parent[1](parent[0](x))

    output = shard_map(f)(nnx.List(roots), inputs())
    assert_close(output, reference(reference(inputs())))


@pytest.mark.parametrize("where", ["second", "keyword", "twice"])
def test_the_model_can_be_any_argument(model, reference, where):
    x, want = inputs(), reference(inputs())
    if where == "second":
        output = shard_map(lambda x, model: model(x))(x, model)
    elif where == "keyword":
        output = shard_map(lambda x, model: model(x))(x, model=model)
    else:
        output, same = shard_map(lambda a, b, x: (a(x), a is b))(model, model, x)
        assert same
    assert_close(output, want)


def test_python_values_pass_through_untouched(model):
    seen = []

    def f(model: Any, x: jax.Array, train: bool, *, mode: Any = None) -> Any:
        seen.append((train, mode))
        return {"mode": mode, "size": 3, "none": None, "x": model(x)}

    output = shard_map(f)(model, inputs(), False, mode=("a", None))
    assert seen == [(False, ("a", None))]
    assert output["mode"] == ("a", None)
    assert output["size"] == 3
    assert output["none"] is None


def test_a_key_is_the_same_on_every_device(model):
    draws = shard_map(lambda model, key: jax.random.normal(key, (1,)))(
        model, jax.random.key(0)
    )
    assert draws.shape == (8,)
    assert len(set(np.asarray(draws).tolist())) == 1


# --- generation -------------------------------------------------------------------


def generate_scan(model: Any, x: jax.Array) -> tuple:
    def step(carry: jax.Array, _: None) -> tuple:
        carry = model(carry)
        return carry, carry.mean(axis=1)

    last, means = jax.lax.scan(step, x, None, length=3)
    return last, means.T


def generate_while(model: Any, x: jax.Array) -> tuple:
    def step(carry: tuple) -> tuple:
        count, value = carry
        return count + 1, model(value)

    start = (jnp.zeros((), jnp.int32), x)
    _, last = jax.lax.while_loop(lambda carry: carry[0] < 3, step, start)
    return last, None


def generate_fori(model: Any, x: jax.Array) -> tuple:
    return jax.lax.fori_loop(0, 3, lambda i, x: model(x), x), None


def generate_nnx(model: Any, x: jax.Array) -> tuple:
    axes = {"in_axes": (None, nnx.Carry), "out_axes": nnx.Carry}
    return nnx.scan(lambda model, x: model(x), length=3, **axes)(model, x), None


def rows_by_vmap(model: Any, x: jax.Array) -> tuple:
    return jax.vmap(lambda row: model(row))(x), None


def one_branch(model: Any, x: jax.Array) -> tuple:
    return jax.lax.cond(x.shape[0] > 0, lambda x: model(x), lambda x: -x, x), None


def checkpointed(model: Any, x: jax.Array) -> tuple:
    return jax.checkpoint(lambda x: model(x))(x), None


LOOPS = [generate_scan, generate_while, generate_fori, generate_nnx]
LOOPS += [rows_by_vmap, one_branch, checkpointed]


@pytest.mark.parametrize(
    ("generate", "root_frees"),
    [(generate, (None, True)[i % 2]) for i, generate in enumerate(LOOPS)],
)
def test_loops_equal_the_unsharded_model(mesh8, reference, generate, root_frees):
    model = helpers.shard_blocks(
        Square(nnx.Rngs(0)), mesh=mesh8, reshard_after_forward=root_frees
    )
    run = nnx.jit(shard_map(generate))
    for got, want in zip(
        jax.tree.leaves(run(model, inputs())),
        jax.tree.leaves(generate(reference, inputs())),
        strict=True,
    ):
        assert_close(got, want)
    assert local_shape(model.out.kernel) == (2, 8)


def test_a_loop_over_unsharded_parameters_gathers_once_outside(model, reference):
    def f(model: Any, x: jax.Array) -> tuple:
        model.unshard()
        model.layers[0].unshard()
        return generate_scan(model, x)

    last, _ = nnx.jit(shard_map(f))(model, inputs())
    assert_close(last, generate_scan(reference, inputs())[0])
    text = helpers.lowered_text(shard_map(f), model, inputs())
    assert helpers.count_collectives(text)["all_gather"] == 2
    loop = text[text.index("stablehlo.while") :]
    assert "all_gather" not in loop
    assert local_shape(model.out.kernel) == (2, 8)


@pytest.mark.slow
def test_greedy_tokens_equal_the_unsharded_model(transformer, mesh8):
    def generate(model: Any, ids: jax.Array) -> jax.Array:
        def step(ids: jax.Array, at: jax.Array) -> tuple:
            logits = jax.lax.dynamic_index_in_dim(model(ids), at, 1, keepdims=False)
            token = logits.argmax(-1).astype(ids.dtype)
            return jax.lax.dynamic_update_index_in_dim(ids, token, at + 1, 1), token

        return jax.lax.scan(step, ids, jnp.arange(2, 5))[0]

    ids = helpers.token_batch(rows=8)
    want = jax.jit(lambda ids: generate(transformer, ids))(ids)
    model = helpers.shard_blocks(transformer, mesh=mesh8)
    np.testing.assert_array_equal(shard_map(generate)(model, ids), want)


# --- joining results --------------------------------------------------------------


def test_floating_scalars_are_averaged(model):
    x = inputs()
    mean, total, half = shard_map(
        lambda model, x: (x.mean(), x.sum(), x.mean().astype(jnp.bfloat16))
    )(model, x)
    assert_close(mean, x.mean())
    assert_close(total, x.sum() / 8)
    assert half.dtype == jnp.bfloat16


def test_scalars_that_are_the_same_everywhere_come_as_they_are(model):
    def f(model: Any, x: jax.Array, n: jax.Array) -> tuple:
        positive = jax.lax.psum((x > 0).sum(), "fsdp")
        return positive, n + 1, x.shape[0], jnp.float32(2.5), jnp.bool_(True)

    x = inputs()
    positive, n, rows, constant, flag = shard_map(f)(model, x, jnp.int32(4))
    assert int(positive) == int((x > 0).sum())
    assert (int(n), rows, float(constant), bool(flag)) == (5, 2, 2.5, True)


@pytest.mark.parametrize(
    "f",
    [
        lambda model, x: (x > 0).sum(),
        lambda model, x: {"a": [x, (x > 0).any()]},
        lambda model, x: jax.lax.axis_index("fsdp"),
        lambda model, x: model(x).argmax(),
    ],
    ids=["count", "bool in a tree", "axis index", "argmax"],
)
@pytest.mark.parametrize("way", ["eager", "nnx.jit"])
def test_a_whole_number_that_differs_between_devices_raises(model, f, way):
    text = r"shard_map: .* scalar that differs .*float.*\(1,\).*jax\.lax\.psum.*fsdp"
    with pytest.raises(TypeError, match=text):
        WAYS[way](shard_map(f), model, inputs())
    assert local_shape(model.out.kernel) == (2, 8)


def test_a_whole_number_with_a_dim_gives_one_entry_per_device(model):
    x = inputs()
    counts = shard_map(lambda model, x: (x > 0).sum()[None])(model, x)
    np.testing.assert_array_equal(counts, (x > 0).reshape(8, -1).sum(1))


def test_results_keep_their_structure(model, reference):
    def f(model: Any, x: jax.Array) -> Any:
        return {"a": (model(x), None), "b": [x.mean(), {"c": x.sum(1)}], "d": ()}

    x = inputs()
    output = shard_map(f)(model, x)
    want = f(reference, x)
    assert jax.tree.structure(output) == jax.tree.structure(want)
    for got, expected in zip(
        jax.tree.leaves(output), jax.tree.leaves(want), strict=True
    ):
        assert_close(got, expected)


def test_nothing_can_be_returned(model):
    assert shard_map(lambda model, x: None)(model, inputs()) is None


@pytest.mark.parametrize(
    ("out_specs", "shape", "spec"),
    [
        (None, (16, 8), CUT),
        (CUT, (16, 8), CUT),
        (P(("fsdp",)), (16, 8), CUT),
        (P(None, "fsdp"), (2, 64), P(None, "fsdp")),
    ],
)
def test_out_specs_say_how_arrays_are_joined(model, out_specs, shape, spec):
    x = inputs()
    output = shard_map(lambda model, x: x, out_specs=out_specs)(model, x)
    assert output.shape == shape
    assert output.sharding.spec == spec
    pieces = np.split(np.asarray(x), 8)
    joined = np.concatenate(pieces, axis=0 if shape[0] == 16 else 1)
    np.testing.assert_array_equal(output, joined)


def test_an_empty_out_spec_takes_one_of_equal_values(model):
    def f(model: Any, x: jax.Array) -> tuple:
        return jax.lax.psum(x.sum(0), "fsdp"), jax.lax.pmax((x > 0).sum(), "fsdp")

    x = inputs()
    total, most = shard_map(f, out_specs=P())(model, x)
    assert_close(total, x.sum(0))
    assert total.sharding.is_fully_replicated
    assert int(most) == (x > 0).reshape(8, -1).sum(1).max()


@pytest.mark.parametrize(
    "out_specs",
    [
        {"rows": CUT, "pair": (P(), None)},
        {"rows": None, "pair": (P(), CUT)},
        {"rows": CUT, "pair": (P(), [P(None, "fsdp"), None])},
    ],
)
def test_out_specs_may_be_a_prefix_of_the_result(model, out_specs):
    def f(model: Any, x: jax.Array) -> dict:
        total = jax.lax.psum(x.sum(0), "fsdp")
        return {"rows": x, "pair": (total, [x, x[:, :1]])}

    x = inputs()
    for run in (shard_map, lambda f, **kw: nnx.jit(shard_map(f, **kw))):
        output = run(f, out_specs=out_specs)(model, x)
        np.testing.assert_array_equal(output["rows"], x)
        assert_close(output["pair"][0], x.sum(0))
        wide = isinstance(out_specs["pair"][1], list)
        assert output["pair"][1][0].shape == ((2, 64) if wide else (16, 8))
        assert output["pair"][1][1].shape == (16, 1)


@pytest.mark.parametrize(
    ("out_specs", "error", "text"),
    [
        (P("tp"), ValueError, "tp"),
        (P(None, None, "fsdp"), ValueError, "out_specs"),
        ("fsdp", TypeError, "'fsdp'.*not a PartitionSpec"),
        ((CUT, CUT), ValueError, "out_specs.* does not fit the output"),
        ({"a": CUT}, ValueError, "out_specs.* does not fit the output"),
    ],
    ids=["axis", "rank", "string", "tuple", "dict"],
)
def test_bad_out_specs_raise_and_leave_the_model_alone(model, out_specs, error, text):
    with pytest.raises(error, match=rf"(?s)^shard_map: .*{text}"):
        shard_map(forward, out_specs=out_specs)(model, inputs())
    assert local_shape(model.out.kernel) == (2, 8)


# --- modules in and out -----------------------------------------------------------


@pytest.mark.parametrize("way", ["eager", "nnx.jit"])
def test_the_model_comes_back_as_itself(model, way):
    def f(model: Any, x: jax.Array) -> tuple:
        return model, {"head": model.out}, model(x)

    same, head, _ = WAYS[way](shard_map(f), model, inputs())
    assert same is model
    assert head["head"] is model.out
    assert type(model) is type(same)
    assert local_shape(model.out.kernel) == (2, 8)


def test_a_new_module_can_be_returned(model):
    def f(model: Any, x: jax.Array) -> nnx.Module:
        return nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    made = shard_map(f)(model, inputs())
    assert type(made) is nnx.Linear
    np.testing.assert_array_equal(
        made.kernel[...], nnx.Linear(8, 4, rngs=nnx.Rngs(1)).kernel[...]
    )


def test_a_new_variable_is_joined_like_an_array(model):
    x = inputs()
    made = shard_map(lambda model, x: nnx.Variable(x.sum(1)))(model, x)
    assert isinstance(made, nnx.Variable)
    assert_close(made[...], x.sum(1))


def test_attributes_set_by_the_function_are_kept(model):
    def f(model: Any, x: jax.Array) -> None:
        model.mode = "evaluated"
        model.seen = nnx.Variable(jnp.float32(3))

    shard_map(f)(model, inputs())
    assert model.mode == "evaluated"
    assert float(model.seen[...]) == 3


# --- changes to the model ---------------------------------------------------------


def test_statistics_become_the_mean_over_devices(stateful):
    reference = Stateful(nnx.Rngs(0))
    x = inputs()
    shard_map(forward)(stateful, x)
    rows = np.asarray(reference.linear(x)).reshape(8, 2, 8)
    assert_close(stateful.norm.mean[...], rows.mean(1).mean(0))
    assert_close(stateful.norm.var[...], rows.var(1).mean(0))
    assert stateful.norm.mean.get_raw_value().sharding.is_fully_replicated


@pytest.mark.parametrize("way", ["eager", "nnx.jit"])
def test_counters_advance_alike_and_masks_differ(stateful, way):
    x = jnp.broadcast_to(jnp.arange(8.0), (8, 8))
    stateful.norm.use_running_average = True
    first = WAYS[way](shard_map(forward), stateful, x)
    second = WAYS[way](shard_map(forward), stateful, x)
    assert int(stateful.calls[...]) == 2
    assert int(stateful.dropout.rngs.count[...]) == 2
    masks = [np.asarray(y) == 0 for y in (first, second)]
    assert len({mask.tobytes() for mask in masks[0]}) > 1
    assert not np.array_equal(*masks)
    got, want = (nnx.state(m, nnx.RngKey) for m in (stateful, Stateful(nnx.Rngs(0))))
    helpers.assert_trees_close(got, want, rtol=0, atol=0)


def test_a_variable_that_differs_between_devices_raises_and_changes_nothing(stateful):
    def f(model: Any, x: jax.Array) -> jax.Array:
        output = model(x)
        model.last[...] = x.sum()
        return output

    with pytest.raises(ValueError, match=r"shard_map: f changed the Variable 'last'.*"):
        shard_map(f)(stateful, inputs())
    assert int(stateful.calls[...]) == 0
    assert int(stateful.dropout.rngs.count[...]) == 0
    assert float(stateful.last[...]) == 0
    assert local_shape(stateful.linear.kernel) == (1, 8)


def test_a_variable_made_equal_on_every_device_is_kept(stateful):
    def f(model: Any, x: jax.Array) -> None:
        model.last[...] = jax.lax.psum(x.sum(), "fsdp")

    x = inputs()
    shard_map(f)(stateful, x)
    assert_close(stateful.last[...], x.sum())
    assert stateful.last.get_raw_value().sharding.is_fully_replicated


@pytest.mark.parametrize("way", ["eager", "nnx.jit"])
def test_an_exception_keeps_its_type_and_the_model_stays_sharded(model, reference, way):
    class UsersError(Exception):
        pass

    def f(model: Any, x: jax.Array) -> jax.Array:
        model.layers[0](x)
        raise UsersError("from the user")

    with pytest.raises(UsersError, match="from the user"):
        WAYS[way](shard_map(f), model, inputs())
    assert local_shape(model.out.kernel) == (2, 8)
    assert_close(shard_map(forward)(model, inputs()), reference(inputs()))


# --- order of use -----------------------------------------------------------------


def inner_grad(model: Any, x: jax.Array) -> jax.Array:
    fsdp_jax.grad(lambda m, x: m(x).mean())(model, x)
    return x.mean()


def inner_shard_map(model: Any, x: jax.Array) -> jax.Array:
    return shard_map(lambda m, x: m(x).mean())(model, x)


@pytest.mark.parametrize("inner", [inner_grad, inner_shard_map])
def test_a_users_own_program_cannot_start_another(model, mesh8, inner):
    who = inner.__name__.removeprefix("inner_")
    specs = {"mesh": mesh8, "in_specs": CUT, "out_specs": P()}
    run = jax.shard_map(lambda x: inner(model, x), **specs)
    with pytest.raises(RuntimeError, match=f"{who}: called inside a jax.shard_map"):
        run(inputs())
    assert local_shape(model.out.kernel) == (2, 8)


def test_a_program_does_not_start_another_without_a_gradient(model):
    for outer in (shard_map, fsdp_jax.value_and_grad):
        with pytest.raises(
            RuntimeError, match="shard_map: .* Call the function itself"
        ):
            outer(inner_shard_map)(model, inputs())
    assert local_shape(model.out.kernel) == (2, 8)


def test_it_needs_a_sharded_module_and_a_function(reference):
    with pytest.raises(ValueError, match="shard_map: no argument .* fully_shard"):
        shard_map(forward)(reference, inputs())
    with pytest.raises(TypeError, match="shard_map: f must be callable, got int"):
        shard_map(3)  # pyright: ignore[reportArgumentType]


def test_a_constant_output_is_an_array_like_any_other(model):
    out = shard_map(lambda model, x: (jnp.float32(2.0), jnp.int32(3)))(model, inputs())
    assert [float(x) for x in out] == [2.0, 3.0]


def test_static_arguments_that_compare_equal_are_told_apart(model, reference):
    run = shard_map(lambda model, x, scale: (model(x) * scale, type(scale).__name__))
    for scale in (1, 1.0, True):
        out, name = run(model, inputs(), scale)
        assert name == type(scale).__name__
        assert_close(out, reference(inputs()))
