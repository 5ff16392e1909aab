"""Identical steps trace and compile once, whatever surrounds them.

Traces are counted in the user's function, which Python runs once per trace; compiles
through `jax.monitoring`, so that nothing compiled anywhere goes unseen. The number of
entries in a dispatch cache says less: typed keys, Explicit axes and one device take a
second entry, because equivalent shardings are spelled differently there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

COMPILED = "/jax/core/compile/backend_compile_duration"
TRACED = "/jax/core/compile/jaxpr_trace_duration"
_events: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def listening() -> None:
    """Record the events of JAX from here on; JAX has no public way to stop."""
    if not _events:
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, duration_secs, **kwargs: _events.append(event)
        )
        _events.append("listening")


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often JAX compiled and traced anything in the block."""
    start, counts = len(_events), {"compiles": -1, "traces": -1}
    yield counts
    seen = _events[start:]
    counts.update(compiles=seen.count(COMPILED), traces=seen.count(TRACED))


class Noisy(nnx.Module):
    """Two linear layers, Dropout and BatchNorm between them, and a call counter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(self.norm(self.first(x))))


def counting_loss() -> tuple[Callable[..., jax.Array], list[int]]:
    """A loss, and a list that grows by one whenever Python runs it."""
    traces: list[int] = []

    def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        traces.append(1)
        return helpers.mean_square(model, x, y)

    return loss, traces


def cache_size(jitted: Any) -> int:
    """Entries in the dispatch cache of an `nnx.jit` function."""
    return jitted.jitted_fn._cache_size()


def noisy(mesh: Any) -> Any:
    model = Noisy(nnx.Rngs(0))
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mlp(mesh: Any) -> Any:
    return helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)), mesh=mesh)


def explicit_mesh(num_devices: int) -> Any:
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("fsdp",), devices=devices)


@pytest.mark.parametrize(
    ("make", "mesh", "donate"),
    [
        (mlp, lambda: helpers.mesh_of(4), False),
        (noisy, lambda: helpers.mesh_of(4), False),
        (noisy, lambda: helpers.mesh_of(4), True),
        (mlp, lambda: helpers.mesh_of(1), True),
        (mlp, lambda: explicit_mesh(2), False),
    ],
    ids=["mlp", "noisy", "donated", "one device", "explicit"],
)
def test_three_jitted_steps_trace_and_compile_once(make, mesh, donate):
    model = make(mesh())
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    x, y = fsdp_jax.shard_batch(helpers.regression_batch(), model)
    loss, traces = counting_loss()

    def step(model, optimizer, x, y):
        value, grads = fsdp_jax.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        return value

    jitted = nnx.jit(step, donate_argnums=(0, 1) if donate else ())
    losses = [jitted(model, optimizer, x, y)]
    assert len(traces) == 1
    with counted() as counts:
        losses += [jitted(model, optimizer, x, y) for _ in range(2)]
        jax.block_until_ready(losses)
    assert len(traces) == 1
    assert counts == {"compiles": 0, "traces": 0}
    assert len({float(value) for value in losses}) == 3


def test_pure_steps_with_donation_compile_once():
    model = noisy(helpers.mesh_of(2))
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))
    x, y = fsdp_jax.shard_batch(helpers.regression_batch(), model)
    loss, traces = counting_loss()
    graphdef, state = nnx.split((model, optimizer))

    def step(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)
        value, grads = fsdp_jax.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        return value, nnx.state((model, optimizer))

    jitted = jax.jit(step, donate_argnums=0)
    value, state = jitted(state, x, y)
    with counted() as counts:
        for _ in range(2):
            value, state = jitted(state, x, y)
        value.block_until_ready()
    assert len(traces) == 1
    assert counts == {"compiles": 0, "traces": 0}


@pytest.mark.parametrize("make", [noisy, mlp])
def test_eager_gradients_compile_once_for_all_steps_and_models(make):
    mesh = helpers.mesh_of(2)
    loss, traces = counting_loss()
    x, y = helpers.regression_batch()
    models = [make(mesh) for _ in range(2)]
    value_and_grad = fsdp_jax.value_and_grad(loss)
    value_and_grad(models[0], x, y)
    with counted() as counts:
        for model in (*models, *models):
            value_and_grad(model, x, y)
        fsdp_jax.value_and_grad(loss)(models[1], x, y)
    assert len(traces) == 6  # a call traces: what the loss closes over may have changed
    assert counts["compiles"] == 0


def test_two_fresh_models_share_one_jitted_step():
    mesh = helpers.mesh_of(2)
    loss, traces = counting_loss()
    x, y = fsdp_jax.shard_batch(helpers.regression_batch(), mlp(mesh))
    step = nnx.jit(lambda model, x, y: fsdp_jax.value_and_grad(loss)(model, x, y))
    for _ in range(2):
        step(mlp(mesh), x, y)
    assert len(traces) == 1
    assert cache_size(step) == 1


def test_a_forward_outside_does_not_make_a_step_compile_again():
    model = mlp(helpers.mesh_of(2))
    loss, traces = counting_loss()
    x, y = fsdp_jax.shard_batch(helpers.regression_batch(), model)
    step = nnx.jit(lambda model, x, y: fsdp_jax.value_and_grad(loss)(model, x, y))
    step(model, x, y)
    model(x)
    model.unshard()
    model.reshard()
    model.reset_iter_state()
    model.load_state_dict(model.state_dict())
    step(model, x, y)
    assert len(traces) == 1
    assert cache_size(step) == 1


def test_turning_a_knob_traces_again():
    model = mlp(helpers.mesh_of(2))
    loss, traces = counting_loss()
    x, y = helpers.regression_batch()
    f = nnx.jit(lambda model, x, y: fsdp_jax.value_and_grad(loss)(model, x, y))
    for turn in (
        lambda: model.set_reshard_after_forward(False),
        lambda: model.set_packing_threshold_bytes(0),
        lambda: model.set_reshard_after_forward(True, recurse=False),
    ):
        before = len(traces)
        turn()
        f.lower(model, x, y)
        assert len(traces) == before + 1
    f.lower(model, x, y)
    assert len(traces) == before + 1


def test_evaluation_compiles_once():
    model = mlp(helpers.mesh_of(2))
    traces = []
    x, _ = helpers.regression_batch()

    def forward(model, x):
        traces.append(1)
        return model(x)

    evaluate = fsdp_jax.shard_map(forward)
    evaluate(model, x)
    with counted() as counts:
        for _ in range(2):
            evaluate(model, x)
    assert len(traces) == 3
    assert counts["compiles"] == 0
    with counted() as counts:
        evaluate(model, jnp.concatenate([x, x]))
    assert len(traces) == 4
    assert counts["compiles"] >= 1 and counts["traces"] >= 1  # the counts do count
