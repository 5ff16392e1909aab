"""Optimizers on sharded models: where their state rests, and training with them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

COMPILED: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _record_compile(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(event)


class Small(nnx.Module):
    """Two linear layers and a dropout, 16 in, 8 out."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(jnp.tanh(self.layers[0](x))))


def small(mesh: Mesh | None = None, rate: float = 0.0, **kwargs: Any) -> Any:
    """The model, seed 0: sharded in two groups if there is a mesh."""
    model = Small(nnx.Rngs(0), rate)
    return model if mesh is None else helpers.shard_blocks(model, mesh=mesh, **kwargs)


def make_step(value_and_grad: Callable, wrt: Any = nnx.Param) -> Callable:
    """One training step `(model, optimizer, x, y) -> loss`."""

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> jax.Array:
        if wrt is nnx.Param:
            run = value_and_grad(helpers.mean_square)
        elif value_and_grad is fsdp_jax.value_and_grad:
            run = value_and_grad(helpers.mean_square, wrt=wrt)
        else:
            diff = nnx.DiffState(0, wrt)
            run = value_and_grad(helpers.mean_square, argnums=diff)
        value, grads = run(model, x, y)
        optimizer.update(model, grads)
        return value

    return step


def run_steps(
    model: Any, optimizer: Any, steps: int = 3, wrt: Any = nnx.Param
) -> list[float]:
    """Train a model, sharded or not; the losses."""
    sharded = isinstance(model, fsdp_jax.FSDPModule)
    value_and_grad = fsdp_jax.value_and_grad if sharded else nnx.value_and_grad
    step = nnx.jit(make_step(value_and_grad, wrt))
    batch = helpers.regression_batch(8)
    return [float(step(model, optimizer, *batch)) for _ in range(steps)]


def assert_trains_like(
    model: Any, optimizer: Any, tx: Any, steps: int = 3, wrt: Any = nnx.Param
) -> Any:
    """Compare with the unsharded model under the same transformation; returns that."""
    reference = small()
    plain = nnx.Optimizer(reference, tx, wrt=wrt)
    expected = run_steps(reference, plain, steps, wrt)
    losses = run_steps(model, optimizer, steps, wrt)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    helpers.assert_trees_close(
        nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param)
    )
    return reference


def state_arrays(optimizer: Any) -> dict[str, jax.Array]:
    """Dotted name of each array of an optimizer's state."""
    named = {}
    for path, value in nnx.to_flat_state(nnx.state(optimizer)):
        if isinstance(value, nnx.Variable):
            value = value.get_raw_value()
        if isinstance(value, jax.Array):
            named[".".join(map(str, path))] = value
    return named


def parameters(model: Any) -> dict[str, jax.Array]:
    """Dotted name of each parameter."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): v.get_raw_value() for path, v in flat}


def assert_rests_with(optimizer: Any, model: Any, mesh: Mesh) -> dict[str, jax.Array]:
    """Moments rest as their parameters, everything else whole on the mesh."""
    params = parameters(model)
    arrays = state_arrays(optimizer)
    for name, x in arrays.items():
        own = [p for n, p in params.items() if name.endswith("." + n)]
        moment = own and own[0].shape == x.shape
        whole = NamedSharding(mesh, PartitionSpec())
        target = own[0].sharding if moment else whole
        assert x.sharding.is_equivalent_to(target, x.ndim), name
    return arrays


# --- where the state rests --------------------------------------------------------


def test_moments_rest_as_their_parameters_and_scalars_on_the_mesh(mesh8):
    model = small(mesh8)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    arrays = assert_rests_with(optimizer, model, mesh8)
    assert arrays["opt_state.0.mu.head.kernel"].sharding.shard_shape((16, 8)) == (2, 8)
    assert arrays["opt_state.0.count"].sharding.device_set == set(jax.devices())
    assert int(arrays["step"]) == int(arrays["opt_state.0.count"]) == 0
    per_device = sum(x.addressable_shards[0].data.nbytes for x in arrays.values())
    parameters = 16 * 16 + 16 + 16 * 8 + 8
    assert per_device == 2 * 4 * parameters // 8 + 8


def test_a_step_leaves_the_state_where_it_was(mesh8):
    model = small(mesh8)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    run_steps(model, optimizer, 2)
    arrays = assert_rests_with(optimizer, model, mesh8)
    assert int(arrays["step"]) == int(arrays["opt_state.0.count"]) == 2
    assert fsdp_jax.local_shape(model.head.kernel) == (2, 8)


def test_moments_of_a_plain_optimizer_rest_as_their_parameters(mesh8):
    model = small(mesh8)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    arrays = state_arrays(optimizer)
    for moment in ("mu", "nu"):
        for name in ("layers.0.kernel", "layers.0.bias", "head.kernel", "head.bias"):
            x = arrays[f"opt_state.0.{moment}.{name}"]
            assert x.sharding == NamedSharding(mesh8, PartitionSpec("fsdp")), name


def test_moments_of_parameters_that_stay_whole_are_whole(mesh8):
    model = fully_shard(nnx.Linear(16, 5, rngs=nnx.Rngs(0)), mesh=mesh8)
    optimizer = fsdp_jax.Optimizer(model, optax.adam(1e-2))
    arrays = assert_rests_with(optimizer, model, mesh8)
    assert arrays["opt_state.0.mu.bias"].sharding.is_fully_replicated
    assert not arrays["opt_state.0.mu.kernel"].sharding.is_fully_replicated


def test_an_optimizer_of_an_unsharded_module_holds_shards(mesh8):
    model = small(mesh8, reshard_after_forward=False)
    model(helpers.regression_batch(8)[0])
    assert fsdp_jax.local_shape(model.head.kernel) == (16, 8)
    optimizer = fsdp_jax.Optimizer(model, optax.adam(1e-2))
    model.reshard()
    model.layers[0].reshard()
    assert_rests_with(optimizer, model, mesh8)
    assert_trains_like(model, optimizer, optax.adam(1e-2), steps=2)


def test_an_optimizer_can_be_made_for_an_abstract_model(mesh8):
    model = helpers.shard_blocks(nnx.eval_shape(small), mesh=mesh8)
    optimizer = fsdp_jax.Optimizer(model, optax.adam(1e-2))
    concrete = small(mesh8)
    assert_rests_with(optimizer, concrete, mesh8)


def create(mesh: Mesh) -> tuple[Any, Any]:
    """A sharded model and its optimizer."""
    model = small(mesh)
    return model, fsdp_jax.Optimizer(model, optax.adam(1e-2))


def test_an_optimizer_made_inside_jit_holds_shards_and_trains(mesh8):
    model, optimizer = nnx.jit(create, static_argnums=0)(mesh8)
    assert_rests_with(optimizer, model, mesh8)
    assert_trains_like(model, optimizer, optax.adam(1e-2), steps=2)


def test_an_optimizer_of_a_plain_parent_covers_all_its_roots(mesh8):
    class Parent(nnx.Module):
        def __init__(self) -> None:
            self.a = fully_shard(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), mesh=mesh8)
            self.b = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(1)), mesh=mesh8)

    parent = Parent()
    optimizer = fsdp_jax.Optimizer(parent, optax.adam(1e-2))
    arrays = assert_rests_with(optimizer, parent, mesh8)
    assert {"opt_state.0.mu.a.kernel", "opt_state.0.nu.b.bias"} <= set(arrays)


# --- training equals the unsharded model ------------------------------------------


def label(tree: Any) -> Any:
    """`"matrix"` for kernels, `"vector"` for the rest."""
    return jax.tree.map_with_path(
        lambda path, _: "matrix" if "kernel" in str(path) else "vector", tree
    )


def is_kernel(tree: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "kernel" in str(path), tree)


TRANSFORMATIONS = {
    "adagrad": lambda: optax.adagrad(0.1),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.05), optax.adamw(1e-2, eps=1e-3)
    ),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "trust ratio": lambda: optax.lamb(1e-2, eps=1e-3),
    "by label": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2, eps=1e-3), "vector": optax.sgd(0.1, momentum=0.9)},
        label,
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), is_kernel),
        optax.sgd(0.1, momentum=0.9),
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 3), eps=1e-3
    ),
    "every second step": lambda: optax.MultiSteps(
        optax.sgd(0.5), 2
    ).gradient_transformation(),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_training_equals_the_unsharded_run(name, mesh8):
    tx = TRANSFORMATIONS[name]()
    model = small(mesh8)
    optimizer = fsdp_jax.Optimizer(model, tx)
    assert_rests_with(optimizer, model, mesh8)
    assert_trains_like(model, optimizer, tx)


def test_the_gradients_global_norm_is_the_unsharded_one(mesh8):
    batch = helpers.regression_batch(8)
    grads = fsdp_jax.grad(helpers.mean_square)(small(mesh8), *batch)
    expected = nnx.jit(nnx.grad(helpers.mean_square))(small(), *batch)
    norm = jax.jit(optax.tree.norm)
    found, expected = norm(nnx.as_pure(grads)), norm(nnx.as_pure(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_plain_optimizer_and_global_view_train_alike(mesh8):
    tx = optax.adam(1e-2, eps=1e-3)
    model = small(mesh8)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    reference = assert_trains_like(model, optimizer, tx)
    model = small(mesh8)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(make_step(nnx.value_and_grad))
    for _ in range(3):
        step(model, optimizer, *helpers.regression_batch(8))
    helpers.assert_trees_close(
        nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param)
    )


def test_updates_work_eagerly(mesh8):
    model, reference = small(mesh8), small()
    optimizer = fsdp_jax.Optimizer(model, optax.adam(1e-2, eps=1e-3))
    plain = nnx.Optimizer(reference, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
    plain_step = nnx.jit(make_step(nnx.value_and_grad))
    batch = helpers.regression_batch(8)
    for _ in range(2):
        make_step(fsdp_jax.value_and_grad)(model, optimizer, *batch)
        plain_step(reference, plain, *batch)
    helpers.assert_trees_close(
        nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param)
    )
    assert_rests_with(optimizer, model, mesh8)
    assert model.head.kernel.get_raw_value().sharding.spec == PartitionSpec("fsdp")


def test_an_optimizer_made_before_sharding_trains_right(mesh8):
    tx = optax.adam(1e-2, eps=1e-3)
    model = small()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    helpers.shard_blocks(model, mesh=mesh8)
    assert_trains_like(model, optimizer, tx)
    moment = state_arrays(optimizer)["opt_state.0.mu.head.kernel"]
    assert moment.sharding.device_set == set(jax.devices())


def test_the_librarys_optimizer_refuses_a_model_before_sharding():
    with pytest.raises(ValueError, match="Optimizer: .*fully_shard.*Shard the model"):
        fsdp_jax.Optimizer(small(), optax.sgd(0.1))


def test_an_optimizer_that_has_stepped_before_sharding_goes_on(mesh8):
    tx = optax.adam(1e-2, eps=1e-3)
    model, reference = small(), small()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plain = nnx.Optimizer(reference, tx, wrt=nnx.Param)
    run_steps(model, optimizer, 1)
    helpers.shard_blocks(model, mesh=mesh8)
    run_steps(model, optimizer, 1)
    run_steps(reference, plain, 2)
    helpers.assert_trees_close(
        nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param)
    )


# --- wrt --------------------------------------------------------------------------


def test_only_selected_parameters_are_trained(mesh8):
    wrt = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    tx = optax.adam(1e-2, eps=1e-3)
    model = small(mesh8)
    before = {k: np.asarray(v) for k, v in parameters(model).items()}
    optimizer = fsdp_jax.Optimizer(model, tx, wrt=wrt)
    moments = {k for k in state_arrays(optimizer) if ".mu." in k}
    assert moments == {
        "opt_state.0.mu.layers.0.kernel",
        "opt_state.0.mu.head.kernel",
    }
    assert_trains_like(model, optimizer, tx, wrt=wrt)
    after = parameters(model)
    for name, value in before.items():
        same = np.array_equal(value, after[name])
        assert same == ("kernel" not in name), name


def test_only_adapters_are_trained(mesh8):
    def make() -> Any:
        return nnx.LoRALinear(16, 8, lora_rank=8, rngs=nnx.Rngs(0))

    tx = optax.sgd(0.5)
    model, reference = fully_shard(make(), mesh=mesh8), make()
    batch = helpers.regression_batch(8)
    optimizer = fsdp_jax.Optimizer(model, tx, wrt=nnx.LoRAParam)
    plain = nnx.Optimizer(reference, tx, wrt=nnx.LoRAParam)
    step = nnx.jit(make_step(fsdp_jax.value_and_grad, nnx.LoRAParam))
    plain_step = nnx.jit(make_step(nnx.value_and_grad, nnx.LoRAParam))
    for _ in range(3):
        loss, want = (
            step(model, optimizer, *batch),
            plain_step(reference, plain, *batch),
        )
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    helpers.assert_trees_close(model, reference)
    untrained = make()
    np.testing.assert_array_equal(model.kernel[...], untrained.kernel[...])
    assert not np.array_equal(model.lora.lora_b[...], untrained.lora.lora_b[...])


# --- compiling once ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "donate"), [(0.0, ()), (0.5, (0, 1))], ids=["plain", "dropout, donated"]
)
def test_a_step_traces_and_compiles_once(mesh8, rate, donate):
    traces = []

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> jax.Array:
        traces.append(1)
        return make_step(fsdp_jax.value_and_grad)(model, optimizer, x, y)

    step = nnx.jit(step, donate_argnums=donate)
    model = small(mesh8, rate)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    batch = fsdp_jax.shard_batch(helpers.regression_batch(8), model)
    step(model, optimizer, *batch)
    compiled = len(COMPILED)
    for _ in range(3):
        step(model, optimizer, *batch)
    assert len(traces) == 1
    assert len(COMPILED) == compiled


def test_a_second_model_uses_the_compiled_step_of_the_first(mesh8):
    traces = []

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> jax.Array:
        traces.append(1)
        return make_step(fsdp_jax.value_and_grad)(model, optimizer, x, y)

    tx = optax.sgd(0.1)
    batch = helpers.regression_batch(8)
    for _ in range(2):
        model = small(mesh8)
        step(model, fsdp_jax.Optimizer(model, tx), *batch)
    assert len(traces) == 1


# --- errors -----------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, {"model": 1}])
def test_an_optimizer_needs_a_sharded_module(wrong):
    with pytest.raises(ValueError, match="Optimizer: no argument .* fully_shard"):
        fsdp_jax.Optimizer(wrong, optax.sgd(0.1))


def test_modules_on_different_meshes_raise(mesh8):
    models = nnx.List([small(mesh8), small(helpers.mesh_of(4))])
    with pytest.raises(ValueError, match="Optimizer: .* 2 different meshes"):
        fsdp_jax.Optimizer(models, optax.sgd(0.1))


# --- state that shares memory with the parameters ---------------------------------


def places_of(tree: Any) -> list[Any]:
    """Where each shard of each array lies."""
    return [
        (shard.device, shard.data.unsafe_buffer_pointer())
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
    ]


def keeping() -> optax.GradientTransformation:
    """SGD that keeps the parameters it began with twice, and the latest ones."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        first, second, _ = state
        grads = jax.tree.map(lambda g, p, q: g + 0.1 * (p - q), updates, params, first)
        return jax.tree.map(lambda g: -0.1 * g, grads), (first, second, params)

    return optax.GradientTransformation(lambda params: (params,) * 3, update)


def assert_apart(model: Any, optimizer: Any) -> None:
    """No two arrays share memory; else JAX ends a process that donates them."""
    places = places_of((nnx.state(model, nnx.Param), nnx.state(optimizer)))
    assert len({*places}) == len(places)


def test_a_step_can_donate_state_that_began_as_the_parameters():
    plain, (x, y) = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), helpers.regression_batch()
    model = fully_shard(nnx.clone(plain), mesh=helpers.mesh_of(4))
    optimizer = fsdp_jax.Optimizer(model, keeping())
    assert_apart(model, optimizer)
    step = nnx.jit(make_step(fsdp_jax.value_and_grad), donate_argnums=(0, 1))
    step(model, optimizer, x, y)
    _, grads = nnx.jit(nnx.value_and_grad(helpers.mean_square))(plain, x, y)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(plain), grads)
    helpers.assert_trees_close(nnx.state(model), expected)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model))
    optimizer.update(model, grads)  # eagerly: the latest ones are the parameters
    assert_apart(model, optimizer)


@pytest.mark.parametrize("name", ["prodigy", "cocob", "dog"])
def test_state_of_optax_has_memory_of_its_own(name):
    model = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4))
    optimizer = fsdp_jax.Optimizer(model, getattr(optax.contrib, name)())
    assert_apart(model, optimizer)


@pytest.mark.parametrize("how", ["jit", "born"])
def test_state_made_in_a_jitted_function_has_memory_of_its_own(how):
    def make(model=None):
        model = model or small(helpers.mesh_of(4))
        return model, fsdp_jax.Optimizer(model, keeping())

    given = () if how == "born" else (small(helpers.mesh_of(4)),)
    assert_apart(*nnx.jit(make)(*given))
