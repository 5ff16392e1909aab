"""Shards, gradients and optimizer state in host memory: the same training.

`UNPINNED` stands for `CPUOffloadPolicy(pin_memory=False)`. Every run is compared with
the same sharded run without offload, which other tests compare with unsharded models.
"""

import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import CPUOffloadPolicy, OffloadPolicy, fully_shard
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._ordering import ORDERINGS
from tests import helpers

PINNED, UNPINNED = CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)
POLICIES = pytest.mark.parametrize(
    "policy", [PINNED, UNPINNED], ids=["pinned", "unpinned"]
)


def hybrid() -> dict[str, Any]:
    """Two replicas of four shards."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "shard"))
    return {
        "mesh": mesh,
        "dp_mesh_dims": fsdp_jax.DataParallelMeshDims("shard", "replica"),
    }


MESHES: dict[str, Callable[[], dict[str, Any]]] = {
    "1": lambda: {"mesh": helpers.mesh_of(1)},
    "2": lambda: {"mesh": helpers.mesh_of(2)},
    "8": lambda: {"mesh": helpers.mesh_of(8)},
    "2x4": hybrid,
}


def adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-2, eps=1e-3)


class TwoLayers(nnx.Module):
    """Two linear layers with tanh between them, 16 in, 8 out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = ((16, 16), (16, 8))
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def mlp(**kwargs: Any) -> Any:
    """The model, seed 0, in a group per layer; on two devices unless told otherwise."""
    kwargs = {"mesh": helpers.mesh_of(2), **kwargs}
    return helpers.shard_blocks(TwoLayers(nnx.Rngs(0)), **kwargs)


def one_layer(**kwargs: Any) -> Any:
    """One linear layer, on two devices."""
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    return fully_shard(layer, mesh=helpers.mesh_of(2), **kwargs)


def make_step(loss: Any = helpers.mean_square, **kwargs: Any) -> Callable:
    """One training step `(model, optimizer, *batch) -> loss`."""

    def step(model: Any, optimizer: Any, *batch: Any) -> jax.Array:
        value, grads = fsdp_jax.value_and_grad(loss, **kwargs)(model, *batch)
        optimizer.update(model, grads)
        return value

    return step


def run(
    model: Any,
    tx: Any = None,
    *,
    steps: int = 2,
    jit: bool = True,
    batch: Any = None,
    wrt: Any = nnx.Param,
    **kwargs: Any,
) -> tuple[Any, Any, list[float]]:
    """Train a model; it, its optimizer, and the losses."""
    optimizer = fsdp_jax.Optimizer(model, tx or adamw(), wrt=wrt)
    if wrt is not nnx.Param:
        kwargs["wrt"] = wrt
    step = make_step(**kwargs)
    step = nnx.jit(step) if jit else step
    batch = helpers.regression_batch(8) if batch is None else batch
    losses = [float(step(model, optimizer, *batch)) for _ in range(steps)]
    return model, optimizer, losses


def array_of(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def arrays(tree: Any) -> dict[str, jax.Array]:
    """Every array of a module, an optimizer or a state, with its path."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    return {
        jax.tree_util.keystr(path): array_of(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    }


def kinds(tree: Any, *, scalars: bool = False) -> set[str | None]:
    """The memory kinds of the arrays of a tree, without scalars unless asked for."""
    found = arrays(tree).values()
    return {x.sharding.memory_kind for x in found if x.ndim or scalars}


def params(model: Any) -> Any:
    return nnx.state(model, nnx.Param)


def assert_rests(policy: Any, model: Any, optimizer: Any = None) -> None:
    """Parameters and moments rest where the policy says, scalars in device memory."""
    assert kinds(params(model)) == {policy.memory_kind}
    if optimizer is None:
        return
    state = nnx.state(optimizer)
    assert kinds(state) <= {policy.memory_kind}
    counters = [x for x in arrays(state).values() if not x.ndim]
    assert {x.sharding.memory_kind for x in counters} == {"device"}


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adamw": adamw,
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "schedule": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 9), eps=1e-3),
    "MultiSteps": lambda: optax.MultiSteps(adamw(), 2),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.05), adamw()),
    "finite": lambda: optax.apply_if_finite(adamw(), 3),
    "constant state": lambda: optax.optimistic_gradient_descent(1e-2),
    "lists": lambda: optax.sm3(1e-2),
    "list to tuple": lambda: sum_of_gradients(),
    "norm of parameters": lambda: optax.contrib.dog(),
}


def sum_of_gradients() -> optax.GradientTransformation:
    """A state that is a list at first and a tuple from then on."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        total = jax.tree.map(jnp.add, state[1], updates)
        return jax.tree.map(lambda g: -g / 8, total), (state[0] + 1, total)

    def init(params: Any) -> Any:
        return [jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)]

    return optax.GradientTransformation(init, update)


BASES: dict[Any, Any] = {}


def assert_same_run(
    policy: Any,
    make_model: Callable[..., Any] = mlp,
    *,
    mesh: str = "2",
    model_options: dict[str, Any] | None = None,
    base: Any = None,
    tx: str = "adamw",
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Train with and without a policy; the same losses, parameters and state.

    Args:
        policy: the policy.
        make_model: takes the arguments of `fully_shard`.
        mesh: one of `MESHES`.
        model_options: for both.
        base: names the run without a policy, if others compare with it too.
        tx: one of `TRANSFORMATIONS`.
        **kwargs: for `run`.
    """
    options, make_tx = MESHES[mesh]() | (model_options or {}), TRANSFORMATIONS[tx]
    key = base and (base, mesh, tx, kwargs.get("steps"))
    expected = BASES.get(key) or run(make_model(**options), make_tx(), **kwargs)
    if key:
        BASES[key] = expected
    offloaded = make_model(offload_policy=policy, **options)
    assert_rests(policy, offloaded)
    model, optimizer, losses = run(offloaded, make_tx(), **kwargs)
    np.testing.assert_allclose(losses, expected[2], rtol=1e-6)
    helpers.assert_trees_close(model, expected[0], rtol=1e-6)
    helpers.assert_trees_close(
        nnx.state(optimizer), nnx.state(expected[1]), rtol=1e-6, atol=1e-7
    )
    return model, optimizer


# --- training is the same ---------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "mesh", "steps", "jit"),
    [
        (PINNED, "8", 5, True),
        (PINNED, "2", 2, False),
        (PINNED, "2x4", 2, True),
        (UNPINNED, "1", 2, True),
    ],
)
def test_training_equals_training_without_offload(policy, mesh, steps, jit):
    model, optimizer = assert_same_run(
        policy, mesh=mesh, steps=steps, jit=jit, base="mlp"
    )
    assert_rests(policy, model, optimizer)


@pytest.mark.slow
def test_groups_that_are_kept_train_the_same():
    options = {"reshard_after_forward": False}
    assert_same_run(PINNED, model_options=options, base="mlp", steps=2)
    assert_same_run(UNPINNED, model_options=options, base="mlp", steps=2)


def test_bfloat16_with_a_float32_reduction_trains_the_same():
    mp = fsdp_jax.MixedPrecisionPolicy(jnp.bfloat16, jnp.float32, jnp.float32)
    model, optimizer = assert_same_run(PINNED, model_options={"mp_policy": mp})
    assert {x.dtype for x in arrays(params(model)).values()} == {jnp.dtype("float32")}
    assert_rests(PINNED, model, optimizer)


@pytest.mark.parametrize("ordering", ORDERINGS.values(), ids=list(ORDERINGS))
def test_every_ordering_trains_the_same(ordering):
    def make(**kwargs):
        model = mlp(**kwargs)
        model.set_ordering(ordering)
        return model

    assert_same_run(PINNED, make, base="mlp", steps=2)


class Stack(nnx.Module):
    """Three linear layers, stacked and run by a scan, and a head."""

    def __init__(self, rngs: nnx.Rngs, scan: Any, remat: bool = False) -> None:
        make = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)
        self.scan, self.remat = scan, remat

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scan == "scan_layers":
            return self.head(fsdp_jax.scan_layers(self.layers, x, remat=self.remat))

        def body(x, layer):
            call = nnx.remat(lambda layer, x: layer(x))
            return call(layer, x) if self.remat else layer(x)

        scanned = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(scanned(x, self.layers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "scan", "remat"),
    [
        (PINNED, "nnx.scan", True),
        (PINNED, "scan_layers", False),
        (UNPINNED, "scan_layers", True),
    ],
)
def test_scanned_layers_train_the_same(policy, scan, remat):
    def make(**kwargs):
        model = Stack(nnx.Rngs(0), scan, remat)
        placement = lambda _: fsdp_jax.Shard(1)  # noqa: E731
        fully_shard(model.layers, shard_placement_fn=placement, **kwargs)
        return fully_shard(model, **kwargs)

    model, optimizer = assert_same_run(policy, make)
    assert_rests(policy, model, optimizer)


def test_a_block_in_a_checkpoint_trains_the_same():
    def make(**kwargs):
        return mlp(reshard_after_forward=True, **kwargs)

    def loss(model, x, y):
        call = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
        for layer in list(model.layers)[:-1]:
            x = call(layer, x)
        return jnp.mean((model.layers[-1](x) - y) ** 2)

    assert_same_run(PINNED, make, loss=loss, base="mlp", steps=2)


class Odd(nnx.Module):
    """BatchNorm and dropout, and a bias of 5 that no mesh of 2 divides."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def odd_batch() -> tuple[jax.Array, jax.Array]:
    x, y = helpers.regression_batch(8)
    return x, y[:, :5]


@pytest.mark.slow
@POLICIES
def test_whole_parameters_statistics_and_dropout_train_the_same(policy):
    def make(**kwargs):
        return fully_shard(Odd(nnx.Rngs(0)), **kwargs)

    model, optimizer = assert_same_run(policy, make, batch=odd_batch(), base="odd")
    assert_rests(policy, model, optimizer)
    assert model.last.bias.get_raw_value().sharding.is_fully_replicated
    assert kinds(nnx.state(model, nnx.BatchStat)) == {"device"}
    assert kinds(nnx.state(model, nnx.RngState), scalars=True) == {"device"}


def test_ignored_parameters_stay_on_the_devices():
    policy, ignored = UNPINNED, nnx.PathContains("first")

    def make(**kwargs):
        mesh = helpers.mesh_of(2)
        model = Odd(nnx.Rngs(0))
        return fully_shard(model, mesh=mesh, ignored_params=ignored, **kwargs)

    base, _, expected = run(make(), batch=odd_batch())
    model = make(offload_policy=policy)
    model, optimizer, losses = run(model, batch=odd_batch())
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    helpers.assert_trees_close(model, base, rtol=1e-6)
    assert kinds(params(model.first)) == {"device"}
    assert kinds(params(model.last)) == {policy.memory_kind}
    moments = arrays(nnx.state(optimizer))
    for name, x in moments.items():
        if x.ndim:
            where = "device" if "first" in name else policy.memory_kind
            assert x.sharding.memory_kind == where, name


@POLICIES
def test_frozen_parameters_stay_as_they_are(policy):
    trained = nnx.All(nnx.Param, nnx.PathContains("layers"), nnx.PathContains(0))
    model, optimizer = assert_same_run(policy, wrt=trained, base="wrt")
    assert_rests(policy, model, optimizer)
    helpers.assert_trees_close(
        params(model.layers[1]), params(mlp().layers[1]), rtol=0, atol=0
    )


def test_only_some_groups_can_be_offloaded():
    policy = PINNED

    def make(**kwargs):
        model, mesh = TwoLayers(nnx.Rngs(0)), helpers.mesh_of(2)
        fully_shard(model.layers[0], mesh=mesh, **kwargs)
        return fully_shard(model, mesh=mesh)

    tx = TRANSFORMATIONS["clip"]
    base, _, expected = run(make(), tx())
    model, optimizer, losses = run(make(offload_policy=policy), tx())
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    helpers.assert_trees_close(model, base, rtol=1e-6)
    assert kinds(params(model.layers[0])) == {policy.memory_kind}
    assert kinds(params(model.layers[1])) == {"device"}
    for name, x in arrays(nnx.state(optimizer)).items():
        if x.ndim:
            where = policy.memory_kind if "[0]['kernel']" in name else "device"
            if "bias" not in name:
                assert x.sharding.memory_kind == where, name


# --- micro-batches and accumulation -----------------------------------------------


def test_microbatches_train_the_same():
    """The gradients of all slices are summed in another order than of one."""
    assert_same_run(PINNED, num_microbatches=2, base="slices")
    options = {"reshard_after_forward": False}
    assert_same_run(UNPINNED, num_microbatches=2, model_options=options, base="slices")


@pytest.mark.parametrize(
    ("policy", "mesh", "jit"),
    [(PINNED, "2x4", True), (UNPINNED, "1", False)],
)
def test_gradients_that_wait_stay_on_the_devices(policy, jit, mesh):
    batch = helpers.regression_batch(16)
    halves = [tuple(x[:8] for x in batch), tuple(x[8:] for x in batch)]

    def wrap(f):
        return nnx.jit(f) if jit else f

    def accumulate(model):
        one = wrap(fsdp_jax.value_and_grad(helpers.mean_square))
        model.set_requires_gradient_sync(False)
        _, pending = one(model, *halves[0])
        model.set_requires_gradient_sync(True)
        last = wrap(
            lambda model, p, x, y: fsdp_jax.value_and_grad(helpers.mean_square)(
                model, x, y, pending=p
            )
        )
        _, grads = last(model, pending, *halves[1])
        return pending, grads

    _, expected = accumulate(mlp(**MESHES[mesh]()))
    model = mlp(offload_policy=policy, **MESHES[mesh]())
    pending, grads = accumulate(model)
    assert kinds(pending) == {"device"}
    assert kinds(grads) == {policy.memory_kind}
    helpers.assert_trees_close(grads, expected, rtol=1e-6)
    with pytest.raises(TypeError, match="not reduced yet"):
        fsdp_jax.Optimizer(model, adamw()).update(model, pending)
    sync = wrap(lambda model, p: model.synchronize_gradients(p))
    synced, plain = sync(model, pending), mlp(**MESHES[mesh]())
    assert kinds(synced) == {policy.memory_kind}
    once = fsdp_jax.grad(helpers.mean_square)(plain, *halves[0])
    helpers.assert_trees_close(synced, once, rtol=1e-6)


def test_slices_that_are_summed_before_the_reduction():
    """With gradient sync off, slices of one call are still reduced, once."""
    model, batch = mlp(offload_policy=PINNED), helpers.regression_batch(8)
    expected = fsdp_jax.grad(helpers.mean_square)(mlp(), *batch)
    model.set_requires_gradient_sync(False)
    run = fsdp_jax.value_and_grad(helpers.mean_square, num_microbatches=2)
    _, grads = nnx.jit(run)(model, *batch)
    assert kinds(grads) == {"pinned_host"}
    helpers.assert_trees_close(grads, expected)


@pytest.mark.parametrize("policy", [PINNED])
def test_an_all_reduce_that_waits_leaves_shards_on_the_devices(policy):
    model, batch = mlp(offload_policy=policy, **hybrid()), helpers.regression_batch(8)
    expected = fsdp_jax.grad(helpers.mean_square)(mlp(**hybrid()), *batch)
    model.set_requires_all_reduce(False)
    _, pending = fsdp_jax.value_and_grad(helpers.mean_square)(model, *batch)
    assert kinds(pending) == {"device"}
    model.set_requires_all_reduce(True)
    grads = model.synchronize_gradients(pending)
    assert kinds(grads) == {policy.memory_kind}
    helpers.assert_trees_close(grads, expected)


# --- other ways in ----------------------------------------------------------------


def forward_and_gradient(model: Any, x: jax.Array, y: jax.Array) -> Any:
    return model(x), nnx.grad(helpers.mean_square)(model, x, y)


@pytest.mark.parametrize(
    ("policy", "mesh", "jit"),
    [(PINNED, "1", False), (PINNED, "2x4", True), (UNPINNED, "2", True)],
)
def test_the_forward_and_its_gradient_on_global_arrays(policy, mesh, jit):
    batch, jitted = helpers.regression_batch(8), nnx.jit(forward_and_gradient)
    model = mlp(offload_policy=policy, **MESHES[mesh]())
    found = (jitted if jit else forward_and_gradient)(model, *batch)
    helpers.assert_trees_close(found, jitted(TwoLayers(nnx.Rngs(0)), *batch))
    np.testing.assert_allclose(model(batch[0]), found[0], rtol=1e-5, atol=1e-6)
    assert_rests(policy, model)


@pytest.mark.parametrize(
    ("policy", "mesh", "jit"),
    [(PINNED, "1", True), (PINNED, "8", False), (UNPINNED, "8", True)],
)
def test_evaluation_by_shard_map(policy, jit, mesh):
    reference, (x, _) = TwoLayers(nnx.Rngs(0)), helpers.regression_batch(8)
    model = mlp(offload_policy=policy, **MESHES[mesh]())
    evaluate = fsdp_jax.shard_map(lambda model, x: model(x))
    y = (nnx.jit(evaluate) if jit else evaluate)(model, x)
    np.testing.assert_allclose(y, reference(x), rtol=1e-5, atol=1e-6)
    assert_rests(policy, model)


@POLICIES
def test_unshard_brings_full_arrays_to_the_devices(policy):
    model, reference = mlp(offload_policy=policy), TwoLayers(nnx.Rngs(0))
    model.layers[0].unshard()
    full = model.layers[0].kernel.get_raw_value()
    assert full.sharding.is_fully_replicated and full.sharding.memory_kind == "device"
    assert kinds(params(model.layers[1])) == {policy.memory_kind}
    x = helpers.regression_batch(8)[0]
    np.testing.assert_allclose(model(x), reference(x), rtol=1e-5, atol=1e-6)
    model.layers[0].kernel[...] = 2 * full  # what is written stays
    model.layers[0].reshard()
    assert_rests(policy, model)
    np.testing.assert_array_equal(model.layers[0].kernel.get_raw_value(), 2 * full)


@POLICIES
def test_modules_that_stay_unsharded_train_and_reshard(policy):
    x, _ = helpers.regression_batch(8)
    model = mlp(offload_policy=policy, reshard_after_forward=False)
    model(x)
    assert kinds(params(model)) == {"device"}
    optimizer = fsdp_jax.Optimizer(model, adamw())
    for module in (model, *model.layers):
        module.reshard()
    assert_rests(policy, model, optimizer)


@POLICIES
def test_writing_a_parameter_moves_it(policy):
    """Whatever memory a value comes from, the parameter rests where it did."""
    model = mlp(offload_policy=policy)
    kernel = model.layers[0].kernel
    kernel[...] = np.ones((16, 16), np.float32)
    kernel.set_value(jax.device_put(jnp.ones((16, 16)), jax.devices()[0]))
    nnx.update(model, jax.tree.map(np.asarray, nnx.as_pure(params(mlp()))))
    assert_rests(policy, model)
    expected = mlp()(helpers.regression_batch(8)[0])
    np.testing.assert_array_equal(model(helpers.regression_batch(8)[0]), expected)
    assert fsdp_jax.local_shape(kernel) == (8, 16)


@POLICIES
def test_state_dicts_clones_and_pickles_rest_on_the_host(policy):
    x, _ = helpers.regression_batch(8)
    model = mlp(offload_policy=policy)
    expected = model(x)
    state = model.state_dict()
    assert {a.sharding.memory_kind for a in state.values()} == {policy.memory_kind}
    for given in (
        state,
        {n: np.asarray(a) for n, a in state.items()},
        mlp().state_dict(),
    ):
        again = helpers.shard_blocks(
            TwoLayers(nnx.Rngs(1)), mesh=helpers.mesh_of(4), offload_policy=policy
        )
        again.load_state_dict(given)
        assert_rests(policy, again)
        np.testing.assert_allclose(again(x), expected, rtol=1e-6)
    plain = mlp()
    plain.load_state_dict(state)
    assert kinds(params(plain)) == {"device"}
    for copy in (nnx.clone(model), pickle.loads(pickle.dumps(model))):
        assert_rests(policy, copy)
        np.testing.assert_array_equal(copy(x), expected)
    assert_rests(policy, nnx.merge(*nnx.split(model)))


@POLICIES
def test_a_model_born_inside_jit_rests_on_the_host(policy):
    def create():
        model = mlp(offload_policy=policy)
        return model, fsdp_jax.Optimizer(model, adamw())

    model, optimizer = nnx.jit(create)()
    if policy is UNPINNED:  # the first update puts it there
        nnx.update(model, params(model))
    assert_rests(policy, model)
    step = nnx.jit(make_step())
    step(model, optimizer, *helpers.regression_batch(8))
    assert_rests(policy, model, optimizer)


def test_an_embedding_trains_on_the_host():
    """XLA's scatter on arrays in host memory ended the process (openxla/xla#34565)."""

    def make(**kwargs):
        model = nnx.Embed(64, 8, rngs=nnx.Rngs(0))
        return fully_shard(model, **kwargs)

    def loss(model, ids):
        return jnp.mean(model(ids) ** 2)

    assert_same_run(PINNED, make, loss=loss, batch=(helpers.token_batch(4),))


def test_batches_stay_in_device_memory():
    model = mlp(offload_policy=PINNED)
    batch = fsdp_jax.shard_batch(helpers.regression_batch(8), model)
    assert {x.sharding.memory_kind for x in batch} == {"device"}


# --- the optimizer ----------------------------------------------------------------


@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_transformations_update_the_same(name):
    """Given the same gradients, three times."""
    grads = fsdp_jax.grad(helpers.mean_square)(
        one_layer(), *helpers.regression_batch(8)
    )

    def update(model, optimizer, grads):
        optimizer.update(model, grads)

    def updated(jit, **kwargs):
        model = one_layer(**kwargs)
        optimizer = fsdp_jax.Optimizer(model, TRANSFORMATIONS[name]())
        like, tree = jax.tree.flatten(params(model))
        for scale in (1.0, -0.5, 2.0):
            pairs = zip(jax.tree.leaves(grads), like, strict=True)
            own = [jax.device_put(scale * g, p.sharding) for g, p in pairs]
            given = jax.tree.unflatten(tree, own)
            (nnx.jit(update) if jit else update)(model, optimizer, given)
        return model, optimizer

    expected, state = updated(True)
    ways = [(PINNED, True)]
    if name in ("adamw", "clip", "MultiSteps", "norm of parameters"):
        ways.append((UNPINNED, False))
    for policy, jit in ways:
        model, optimizer = updated(jit, offload_policy=policy)
        helpers.assert_trees_close(model, expected, rtol=1e-6)
        helpers.assert_trees_close(nnx.state(optimizer), nnx.state(state), rtol=1e-6)
        assert_rests(policy, model)


def test_an_elementwise_update_runs_on_the_host():
    """Nothing of AdamW's arithmetic is left for the devices."""
    model = mlp(offload_policy=PINNED)
    optimizer = fsdp_jax.Optimizer(model, adamw())
    grads = fsdp_jax.grad(helpers.mean_square)(model, *helpers.regression_batch(8))

    def update(model, optimizer, grads):
        optimizer.update(model, grads)

    text = helpers.lowered_text(update, model, optimizer, grads)
    outside, inside = split_by_place(text)
    assert inside.count("stablehlo.sqrt") == len(arrays(params(model)))
    assert "stablehlo.sqrt" not in outside


def split_by_place(text: str) -> tuple[str, str]:
    """The functions of StableHLO that run on the devices, and those on the host."""
    called = re.findall(r'call @([\w.]+)\(.*_xla_compute_type = "host"', text)
    assert called
    outside, inside = [], []
    for function in re.split(r"(?=func\.func )", text):
        name = re.match(r"func\.func \w+ @([\w.]+)\(", function)
        (inside if name and name[1] in called else outside).append(function)
    return "".join(outside), "".join(inside)


def test_without_an_offloaded_group_nothing_runs_on_the_host():
    tx = adamw()
    assert fsdp_jax.Optimizer(mlp(), tx).tx is tx
    assert fsdp_jax.Optimizer(mlp(offload_policy=OffloadPolicy()), tx).tx is tx


@pytest.mark.parametrize(("policy", "jit"), [(PINNED, True), (UNPINNED, False)])
def test_the_optimizer_of_nnx(policy, jit):
    def train(model):
        optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)
        step = nnx.jit(make_step()) if jit else make_step()
        batch = helpers.regression_batch(8)
        return [float(step(model, optimizer, *batch)) for _ in range(3)]

    expected = train(mlp())
    np.testing.assert_allclose(train(mlp(offload_policy=policy)), expected, rtol=1e-6)


# --- memory and compilation -------------------------------------------------------


@POLICIES
def test_a_step_compiles_once(policy):
    model = mlp(offload_policy=policy)
    optimizer = fsdp_jax.Optimizer(model, adamw())
    step = nnx.jit(make_step())
    batch = fsdp_jax.shard_batch(helpers.regression_batch(8), model)
    compiled: list[str] = []

    def record(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    step(model, optimizer, *batch)
    step(model, optimizer, *batch)
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        step(model, optimizer, *batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert compiled == []


@pytest.mark.parametrize(("policy", "jit"), [(PINNED, True), (UNPINNED, False)])
def test_nothing_but_the_batch_stays_in_device_memory(policy, jit):
    def here():
        gc.collect()
        alive = [x for x in jax.live_arrays() if x.ndim]
        return {id(x): x.shape for x in alive if x.sharding.memory_kind == "device"}

    batch = helpers.regression_batch(8)
    model = mlp(offload_policy=policy)
    optimizer = fsdp_jax.Optimizer(model, adamw())
    step = nnx.jit(make_step()) if jit else make_step()
    batch = fsdp_jax.shard_batch(batch, model)
    before = here()
    for _ in range(2):
        step(model, optimizer, *batch)
    after = here()
    assert {i: shape for i, shape in after.items() if i not in before} == {}


# --- what is refused --------------------------------------------------------------


@POLICIES
@pytest.mark.parametrize("mesh", ["1", "2"])
def test_reading_a_shard_in_a_per_device_program_is_refused(policy, mesh):
    def around(model, x, y):
        return jnp.mean((x @ model.layers[0].kernel[...]) ** 2) + 0 * y.sum()

    model = mlp(offload_policy=policy, **MESHES[mesh]())
    batch = helpers.regression_batch(8)
    for run in (fsdp_jax.value_and_grad(around), fsdp_jax.shard_map(around)):
        with pytest.raises(
            RuntimeError, match=r"'layers\.0\.kernel' is read while it is sharded"
        ):
            run(model, *batch)
    frozen = fsdp_jax.value_and_grad(around, wrt=nnx.PathContains("bias"))
    with pytest.raises(
        RuntimeError, match=r"'layers\.0\.kernel' is read while it is sharded"
    ):
        frozen(model, *batch)


@pytest.mark.parametrize(
    ("found", "platform", "policy", "usable"),
    [
        (["device"], "cpu", PINNED, "['OffloadPolicy()']"),
        (["device", "unpinned_host"], "tpu", UNPINNED, "['OffloadPolicy()']"),
        (
            ["device", "pinned_host", "unpinned_host"],
            "tpu",
            UNPINNED,
            "['CPUOffloadPolicy(pin_memory=True)', 'OffloadPolicy()']",
        ),
        (
            ["device", "unpinned_host"],
            "cpu",
            PINNED,
            "['CPUOffloadPolicy(pin_memory=False)', 'OffloadPolicy()']",
        ),
    ],
)
def test_memory_that_is_not_there_is_refused(
    found, platform, policy, usable, monkeypatch
):
    monkeypatch.setattr(MeshInfo, "memory_kinds", found)
    monkeypatch.setattr(MeshInfo, "platform", platform)
    model = TwoLayers(nnx.Rngs(0))
    before = nnx.state(model)
    text = f"needs memory of kind {policy.memory_kind!r}.*{re.escape(usable)}"
    with pytest.raises(ValueError, match=text):
        fully_shard(model, mesh=helpers.mesh_of(2), offload_policy=policy)
    assert type(model) is TwoLayers
    for own, old in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(before)):
        assert own is old


@POLICIES
def test_a_gradient_inside_an_evaluation_is_that_of_the_run_without(policy):
    def norm(model, x, y):
        grads = fsdp_jax.grad(helpers.mean_square)(model, x, y)
        return fsdp_jax.global_norm(grads)

    batch = helpers.regression_batch(8)
    want = fsdp_jax.shard_map(norm)(mlp(), *batch)
    model = mlp(offload_policy=policy)
    np.testing.assert_array_equal(fsdp_jax.shard_map(norm)(model, *batch), want)
    with pytest.raises(NotImplementedError, match="host memory.*unsharded"):
        fsdp_jax.grad(norm)(model, *batch)


@POLICIES
@pytest.mark.parametrize("sync", [True, False])
def test_parameters_can_be_unsharded_inside_micro_batches(policy, sync):
    def loss(model, x, y):
        model.unshard()
        once = helpers.mean_square(model, x, y)
        model.reshard()
        return once + helpers.mean_square(model, x, y)

    batch = helpers.regression_batch(8)
    want = fsdp_jax.grad(loss, num_microbatches=2)(mlp(), *batch)
    model = mlp(offload_policy=policy)
    model.set_requires_gradient_sync(sync)
    found = fsdp_jax.grad(loss, num_microbatches=2)(model, *batch)
    pairs = zip(jax.tree.leaves(nnx.as_pure(found)), jax.tree.leaves(nnx.as_pure(want)))
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)
