"""Stacked layers in a loop: one layer gathered at a time, and `scan_layers`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, Shard, fully_shard, scan_layers
from tests import helpers

LAYERS = 5


class Layer(nnx.Module):
    """A LayerNorm and an MLP around a skip connection."""

    def __init__(self, rngs: nnx.Rngs, width: int = 16) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, shift: Any = 0.0) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(self.norm(x)) + shift))


def stack(make: Any = Layer, layers: int = LAYERS) -> Any:
    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs):
        return make(rngs)

    return build(nnx.Rngs(0, dropout=1))


class Model(nnx.Module):
    """A stack between two linear layers."""

    def __init__(self, make: Any = Layer, **how: Any) -> None:
        self.before = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
        self.layers = stack(make)
        self.after = nnx.Linear(16, 8, rngs=nnx.Rngs(2))
        self.how = how

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.after(scan_layers(self.layers, self.before(x), **self.how))


class Scanned(Model):
    """The same with `nnx.scan`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        loop = nnx.scan(
            lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return self.after(loop(self.layers, self.before(x)))


def shard(model: Any, mesh: Any, **kwargs: Any) -> Any:
    fully_shard(model.layers, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def loss_and_grads(model: Any) -> Any:
    def step(model, x, y):
        vg = (
            fsdp_jax.value_and_grad
            if isinstance(model, fsdp_jax.FSDPModule)
            else nnx.value_and_grad
        )
        return vg(helpers.mean_square)(model, x, y)

    return nnx.jit(step)(model, *helpers.regression_batch())


@pytest.fixture(scope="module")
def unsharded() -> Any:
    """Loss and gradients of the unsharded model."""
    return loss_and_grads(Scanned())


@pytest.fixture(scope="module")
def ahead_on_8() -> Any:
    """Loss and gradients of the sharded model that looks ahead."""
    return loss_and_grads(shard(Model(), helpers.mesh_of(8)))


def test_scan_layers_gives_the_gradients_of_the_unsharded_model(ahead_on_8, unsharded):
    helpers.assert_trees_close(ahead_on_8, unsharded)


def test_with_remat_it_gives_the_gradients_of_the_unsharded_model(mesh8, unsharded):
    model = shard(Model(remat=True), mesh8)
    helpers.assert_trees_close(loss_and_grads(model), unsharded)


def test_scan_layers_is_nnx_scan_for_an_unsharded_model(unsharded):
    helpers.assert_trees_close(loss_and_grads(Model()), unsharded)


def test_look_ahead_and_plain_scan_are_bit_equal(mesh8, ahead_on_8):
    ahead = ahead_on_8
    plain = loss_and_grads(shard(Scanned(), mesh8))
    for a, b in zip(jax.tree.leaves(ahead), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


# What a layer may be and be given. Small: most of it is compiled twice.

WIDTH, DEPTH, LINE = 8, 3, 100  # LINE in bytes: above a bias, below a kernel
UP, DOWN = (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)


class Mlp(nnx.Module):
    """Two linear layers around a skip connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class WithDropout(Mlp):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(jnp.tanh(self.up(x))))


class WithStatistics(Mlp):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return Mlp.__call__(self, self.norm(x))


class WithArguments(Mlp):
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Any, scale: Any, *, mask: Any, mode: str = "add"
    ) -> Any:
        y = self.down(jnp.tanh(self.up(x) * scale + mask["bias"])) * mask["keep"]
        return x + y if mode == "add" else x - y


class WithCounter(Mlp):
    def __call__(self, x: Any) -> Any:
        x, n = x["x"], x["n"]
        return {"x": x + self.down(jnp.tanh(self.up(x))) / (1 + n), "n": n + 1}


def ahead(layers: Any, carry: Any, *args: Any, **kwargs: Any) -> Any:
    return scan_layers(layers, carry, *args, **kwargs)


def ahead_with_remat(layers: Any, carry: Any, *args: Any, **kwargs: Any) -> Any:
    return scan_layers(layers, carry, *args, remat=True, **kwargs)


def plain(layers: Any, carry: Any, *args: Any, **kwargs: Any) -> Any:
    def layer(layer, carry):
        return layer(carry, *args, **kwargs)

    return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, carry)


class Run(nnx.Module):
    """A stack alone."""

    def __init__(self, make: Any = Mlp, run: Any = ahead) -> None:
        self.layers = stack(make, DEPTH)
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.layers, *args, **kwargs)


def sharded_run(make: Any = Mlp, run: Any = ahead, **kwargs: Any) -> Any:
    return shard(Run(make, run), helpers.mesh_of(2), **kwargs)


def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(5), (8, WIDTH))


def squares(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def gradients(model: Any, loss: Any = squares, *args: Any, **kwargs: Any) -> Any:
    is_sharded = isinstance(model, fsdp_jax.FSDPModule)
    vg = fsdp_jax.value_and_grad if is_sharded else nnx.value_and_grad
    return nnx.jit(vg(loss, **kwargs))(model, *(args or (rows(),)))


RUNS = pytest.mark.parametrize("run", [ahead, ahead_with_remat])


@pytest.mark.parametrize(
    ("make", "run"), [(WithDropout, ahead_with_remat), (WithStatistics, ahead)]
)
def test_layers_with_random_or_running_state(make, run):
    plainly, model = sharded_run(make, plain), sharded_run(make, run)
    helpers.assert_trees_close(gradients(model), gradients(plainly))
    helpers.assert_trees_close(model, plainly)
    before = nnx.state(Run(make), nnx.Not(nnx.Param))
    after = nnx.state(model, nnx.Not(nnx.Param))
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    ]
    assert any(changed)


@pytest.mark.parametrize("run", [ahead_with_remat, plain])
def test_every_layer_draws_its_own_dropout_mask(run):
    def zeros(model, x):  # each layer adds 1 where it keeps
        return model(x)

    model = Run(WithDropout, run)
    model.layers.down.kernel[...] *= 0
    model.layers.down.bias[...] = jnp.ones((DEPTH, WIDTH))
    found = nnx.jit(fsdp_jax.shard_map(zeros))(
        shard(model, helpers.mesh_of(2)), jnp.zeros((32, WIDTH))
    )
    # One mask for all layers would leave 0 or 6 only.
    assert set(np.unique(found)) == {0.0, 2.0, 4.0, 6.0}


@RUNS
def test_arguments_are_the_same_for_every_layer_and_have_gradients(run):
    def loss(model, x, scale, bias, keep):
        mask = {"bias": bias, "keep": keep}
        return jnp.mean(model(x, scale, mask=mask, mode="subtract") ** 2)

    keep = jnp.arange(WIDTH) % 2
    args = (rows(), jnp.float32(1.25), jnp.linspace(0, 1, 2 * WIDTH), keep)
    how: dict[str, Any] = {"argnums": (0, 1, 2, 3)}
    wanted = gradients(Run(WithArguments, plain), loss, *args, **how)
    specs = (None, None, None, P(), P())
    model = sharded_run(WithArguments, run)
    found = gradients(model, loss, *args, in_specs=specs, **how)
    helpers.assert_trees_close(found, wanted)


@RUNS
def test_a_carry_of_several_arrays_one_of_them_an_integer(run):
    def loss(model, x):
        carry = model({"x": x, "n": jnp.int32(0)})
        return jnp.mean(carry["x"] ** 2) * carry["n"]

    wanted = gradients(Run(WithCounter, plain), loss)
    helpers.assert_trees_close(gradients(sharded_run(WithCounter, run), loss), wanted)


def test_layers_gathered_in_bfloat16_and_reduced_in_float32():
    run = ahead
    policy = MixedPrecisionPolicy(jnp.bfloat16, jnp.float32)

    def as_bfloat16(layers, x):  # what the policy makes of the input
        return plain(layers, x.astype(jnp.bfloat16))

    def make(run):
        model: Any = Run(run=run)
        fully_shard(model.layers, mesh=helpers.mesh_of(2), mp_policy=policy)
        return fully_shard(model, mesh=helpers.mesh_of(2))

    found, wanted = gradients(make(run)), gradients(make(as_bfloat16))
    helpers.assert_trees_close(found, wanted)
    assert {g.dtype for g in jax.tree.leaves(found[1])} == {jnp.dtype(jnp.float32)}
    step = nnx.jit(fsdp_jax.value_and_grad(squares))
    report = fsdp_jax.comm_report(step, make(run), rows(), compiled=False)
    dtypes = {(r.direction, r.dtype) for r in report.rows if r.group == "layers"}
    assert dtypes == {
        ("forward gather", "bf16"),
        ("backward re-gather", "bf16"),
        ("reduce-scatter", "f32"),
    }


@pytest.mark.parametrize(("name", "run"), [("up", ahead), ("bias", ahead_with_remat)])
def test_frozen_parameters_are_gathered_and_not_reduced(run, name):
    wrt = nnx.All(nnx.Param, nnx.PathContains(name))

    def vg(f):
        return nnx.value_and_grad(f, argnums=nnx.DiffState(0, wrt))

    wanted = nnx.jit(vg(squares))(Run(run=plain), rows())
    model = sharded_run(run=run)
    helpers.assert_trees_close(gradients(model, wrt=wrt), wanted)
    model.set_packing_threshold_bytes(LINE)
    kinds = {"up": 2, "bias": 1}  # kernel and bias, or a buffer with both biases
    assert counts(model, wrt=wrt)[2] == kinds[name] * DEPTH


@pytest.mark.parametrize("layers", [1, 2])
def test_a_stack_of_one_or_two_layers(layers):
    model, twin = Run(), Run(run=plain)
    model.layers, twin.layers = stack(Mlp, layers), stack(Mlp, layers)
    shard(model, helpers.mesh_of(4))
    helpers.assert_trees_close(gradients(model), gradients(twin))


def ahead_in_remat(layers: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda layers, x: scan_layers(layers, x))(layers, x)


def ahead_with_remat_in_remat(layers: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(lambda layers, x: ahead_with_remat(layers, x))(layers, x)


def ahead_in_cond(layers: Any, x: jax.Array) -> jax.Array:
    return nnx.cond(x.sum() < 1e9, ahead, lambda layers, x: x, layers, x)


def ahead_in_jit(layers: Any, x: jax.Array) -> jax.Array:
    return nnx.jit(lambda layers, x: scan_layers(layers, x))(layers, x)


@pytest.fixture(scope="module")
def wanted() -> Any:
    """Loss and gradients of the unsharded stack."""
    return gradients(Run(run=plain))


@pytest.mark.parametrize(
    "run", [ahead_in_remat, ahead_with_remat_in_remat, ahead_in_cond, ahead_in_jit]
)
def test_a_look_ahead_in_another_trace(run, wanted):
    helpers.assert_trees_close(gradients(sharded_run(run=run)), wanted)


def test_a_gradient_of_a_gradient():
    run = ahead

    def loss(model, x):
        slope = nnx.grad(lambda model, x: jnp.sum(model(x) ** 2), argnums=1)(model, x)
        return jnp.mean(slope**2)

    wanted = gradients(Run(run=plain), loss)
    found = gradients(sharded_run(run=run), loss)
    helpers.assert_trees_close(found, wanted, atol=1e-5)  # gradients of up to 5


@pytest.mark.parametrize("kind", ["eager", "jit", "gradient"])
def test_on_global_arrays_it_is_a_plain_scan(kind, wanted):
    model = sharded_run()
    if kind == "gradient":
        found = nnx.jit(nnx.value_and_grad(squares))(model, rows())
        helpers.assert_trees_close(found, wanted)
        return
    forward = nnx.jit(lambda model, x: model(x)) if kind == "jit" else Run.__call__
    expected = Run(run=plain)(rows())
    np.testing.assert_allclose(forward(model, rows()), expected, rtol=1e-5, atol=1e-6)


@RUNS
def test_a_layer_with_a_group_of_its_own(run, wanted):
    model: Any = Run(run=run)
    fully_shard(model.layers.up, mesh=helpers.mesh_of(2))
    shard(model, helpers.mesh_of(2))
    helpers.assert_trees_close(gradients(model), wanted)
    first, second, scattered = counts(model)
    assert scattered == 2 * DEPTH
    assert first == (DEPTH + 1) + DEPTH


@pytest.mark.parametrize("free", [False, 2])
def test_kept_layers_are_not_gathered_ahead(free, wanted):
    model = sharded_run(reshard_after_forward=free)
    helpers.assert_trees_close(gradients(model), wanted)
    assert counts(model) == (DEPTH, 0, DEPTH)


# What is gathered, and what is saved.


def counts(model: Any, **kwargs: Any) -> tuple[int, int, int]:
    """Gathers of forward, second gathers and reduce-scatters, over all iterations."""
    step = nnx.jit(fsdp_jax.value_and_grad(squares, **kwargs))
    report = fsdp_jax.comm_report(step, model, rows(), compiled=False)
    names = ("forward gather", "backward re-gather", "reduce-scatter")
    first, second, scattered = (report.count(name) for name in names)
    return first, second, scattered


@RUNS
def test_one_more_gather_than_layers_and_as_many_second_ones(run):
    model = sharded_run(run=run)
    assert counts(model) == (DEPTH + 1, DEPTH, DEPTH)
    assert counts(sharded_run(run=plain)) == (DEPTH, DEPTH, DEPTH)


def test_only_what_backward_reads_is_gathered_again():
    model = sharded_run()
    model.set_packing_threshold_bytes(LINE)
    # Per layer two kernels, and a buffer with the biases that backward does not read.
    assert counts(model) == (3 * (DEPTH + 1), 2 * DEPTH, 3 * DEPTH)


def test_an_evaluation_gathers_one_layer_more():
    step = nnx.jit(fsdp_jax.shard_map(lambda model, x: model(x)))
    report = fsdp_jax.comm_report(step, sharded_run(), rows(), compiled=False)
    assert report.count() == report.count("forward gather") == DEPTH + 1


@pytest.mark.parametrize("run", [ahead, ahead_with_remat, ahead_in_remat, plain])
def test_never_more_than_a_layer_is_gathered_at_once(run):
    model = sharded_run(run=run)
    model.set_packing_threshold_bytes(LINE)
    found = helpers.equations_of(fsdp_jax.value_and_grad(squares), model, rows())
    gathered = {
        eqn.outvars[0].aval.shape for eqn in found if eqn.primitive.name == "all_gather"
    }
    biases = (2, (2 * WIDTH + WIDTH) // 2)
    assert gathered == {UP, DOWN, biases}


def test_no_loop_saves_full_parameters():
    model = sharded_run()
    saved = helpers.stacked_by_loops(fsdp_jax.value_and_grad(squares), model, rows())
    assert not {(DEPTH, *UP), (DEPTH, *DOWN)} & set(saved)
    assert (DEPTH, WIDTH, WIDTH) in saved  # gradients, which are shards


def test_with_remat_only_the_input_of_each_layer_is_saved():
    activations = {(DEPTH, 4, WIDTH), (DEPTH, 4, 2 * WIDTH)}  # 4 rows per device

    def saved(run):
        step = fsdp_jax.value_and_grad(squares)
        # Cut on the last dim: no shard of a gradient has the shape of activations.
        model = sharded_run(run=run, shard_placement_fn=lambda _: Shard(-1))
        found = helpers.stacked_by_loops(step, model, rows())
        return [shape for shape in found if shape in activations]

    assert saved(ahead_with_remat) == [(DEPTH, 4, WIDTH)]
    assert len(saved(ahead)) > 1


@RUNS
def test_what_every_layer_reads_is_not_saved_per_layer(run):
    def loss(model, x, mask):
        both = {"bias": jnp.zeros(2 * WIDTH), "keep": mask}
        return jnp.mean(model(x, 1.0, mask=both) ** 2)

    mask = jnp.ones((4, 1))  # of no other array's shape
    step = fsdp_jax.value_and_grad(loss, in_specs=(None, None, P()))
    model = sharded_run(WithArguments, run)
    assert (DEPTH, 4, 1) not in helpers.stacked_by_loops(step, model, rows(), mask)


# Errors.


def lower(model: Any, forward: Any) -> None:
    helpers.lowered_text(fsdp_jax.shard_map(forward), model, rows())


@pytest.mark.parametrize("wrong", [None, [Mlp(nnx.Rngs(0))], Mlp])
def test_layers_that_are_no_module_are_refused(wrong):
    with pytest.raises(TypeError, match="layers must be an nnx.Module, got"):
        scan_layers(wrong, rows())


def test_layers_of_different_numbers_are_refused_with_their_names():
    model = Run()
    model.layers.down = stack(lambda rngs: nnx.Linear(16, 8, rngs=rngs), DEPTH + 2)
    shard(model, helpers.mesh_of(2))
    with pytest.raises(ValueError, match=r"same leading dim.*'down.kernel': 5.*up"):
        lower(model, lambda model, x: model(x))


class Custom(nnx.Module):
    """A layer of which nothing tells that it is in a stack."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jnp.eye(WIDTH) + rngs.params.uniform((WIDTH, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.kernel[...])


@pytest.mark.parametrize("run", [ahead, ahead_with_remat, plain])
def test_a_stack_cut_along_its_layers_is_refused_with_advice(run):
    model: Any = Run(run=run)
    model.layers = stack(Custom, layers=4)
    shard(model, helpers.mesh_of(2))
    text = r"parameter 'kernel' is cut .*shard_placement_fn=lambda p: Shard\(1\)"
    with pytest.raises(ValueError, match=text):
        lower(model, lambda model, x: model(x))


def test_a_stack_of_as_many_layers_as_devices_is_cut_along_another_dim():
    def make(run):
        model: Any = Run(run=run)
        model.layers = stack(Mlp, layers=2)
        return model

    model = make(ahead)
    fully_shard(
        model.layers, mesh=helpers.mesh_of(2), shard_placement_fn=lambda p: Shard(1)
    )
    fully_shard(model, mesh=helpers.mesh_of(2))
    helpers.assert_trees_close(gradients(model), gradients(make(plain)))


def test_a_random_stream_for_all_layers_is_refused():
    model = Run()
    model.layers.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    shard(model, helpers.mesh_of(2))
    with pytest.raises(ValueError, match=r"None.*nnx\.split_rngs"):
        lower(model, lambda model, x: model(x))


class Narrowing(Mlp):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x[:, :4]


class Doubling(Mlp):
    def __call__(self, x: Any) -> Any:
        return (x, x)


class Casting(Mlp):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16)


class Growing(Mlp):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.note = nnx.Intermediate(x)
        return x


@RUNS
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (Narrowing, TypeError, r"Given float32\[4, 8\].*returned float32\[4, 4\]"),
        (Doubling, TypeError, r"Given float32\[4, 8\] in PyTreeDef\(\*\), returned"),
        (Casting, TypeError, r"returned bfloat16\[4, 8\]"),
        (Growing, ValueError, "Every layer must keep its structure"),
    ],
)
def test_a_layer_that_returns_something_else_is_refused(make, error, text, run):
    with pytest.raises(error, match=text):
        lower(sharded_run(make, run), lambda model, x: model(x))


def test_a_module_among_the_arguments_is_refused():
    model = sharded_run(WithArguments)
    for forward in (
        lambda model, x: model(x, nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
        lambda model, x: model({"x": x, "m": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}),
    ):
        with pytest.raises(TypeError, match="must hold arrays, found a Linear"):
            lower(model, forward)
