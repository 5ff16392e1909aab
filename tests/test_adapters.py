"""Tied, frozen and ignored parameters, adapters, and averaged weights, while training.

Each against the unsharded twin, stepped by `nnx.value_and_grad` and `nnx.Optimizer`.
What `fully_shard` itself says of tied and ignored parameters is in `test_init` and
`test_init_errors`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

TX = optax.adamw(1e-2, eps=1e-3)
Loss = Callable[..., jax.Array]


def make_steps(
    value_and_grad: Callable[..., Any], loss: Loss, wrt: Any = nnx.Param, **jit: Any
) -> Callable[..., Any]:
    """A jitted step that returns loss, gradients and their norm."""
    if value_and_grad is nnx.value_and_grad:
        differentiate = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))
    else:
        differentiate = value_and_grad(loss, wrt=wrt)

    @functools.partial(nnx.jit, **jit)
    def step(model, optimizer, *batch):
        value, grads = differentiate(model, *batch)
        norm = fsdp_jax.global_norm(grads)
        optimizer.update(model, grads)
        return value, grads, norm

    return step


def assert_trains_like(
    model: Any,
    twin: Any,
    loss: Loss,
    batch: tuple[Any, ...],
    *,
    wrt: Any = nnx.Param,
    tx: optax.GradientTransformation = TX,
    steps: int = 3,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Any:
    """Train both, comparing losses, gradients, norms and what becomes of the models.

    Returns:
        The optimizer of the sharded model.
    """
    optimizer = fsdp_jax.Optimizer(model, tx, wrt=wrt)
    plain = nnx.Optimizer(twin, tx, wrt=wrt)
    step = make_steps(fsdp_jax.value_and_grad, loss, wrt)
    plain_step = make_steps(nnx.value_and_grad, loss, wrt)
    for _ in range(steps):
        got, want = step(model, optimizer, *batch), plain_step(twin, plain, *batch)
        helpers.assert_trees_close(got, want, rtol=rtol, atol=atol)
    helpers.assert_trees_close(model, twin, rtol=rtol, atol=atol)
    return optimizer


def moments(optimizer: Any) -> set[str]:
    """Dotted names of the parameters that have a moment."""
    state = nnx.to_flat_state(nnx.state(optimizer))
    mu = [path[path.index("mu") + 1 :] for path, _ in state if "mu" in path]
    return {".".join(map(str, path)) for path in mu}


def values(model: Any) -> dict[str, np.ndarray]:
    """Host copies of the parameters by dotted name."""
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(p[...]) for path, p in params}


def mean_square(m: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(m(x).astype(jnp.float32) ** 2)


def inputs() -> jax.Array:
    """An `(8, 8)` batch."""
    return jax.random.normal(jax.random.key(1), (8, 8))


# --- tied parameters --------------------------------------------------------------


class Tied(nnx.Module):
    """Embedding and head are one table, and two layers share a kernel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Embed(16, 8, rngs=rngs)
        self.down.kernel = self.up.kernel
        self.head.embedding = self.embed.embedding

    def __call__(self, ids: jax.Array) -> jax.Array:
        h = jnp.tanh(self.up(self.embed(ids)))
        return self.head.attend(jnp.tanh(self.down(h)))


def next_token(m: Any, ids: jax.Array) -> jax.Array:
    logits = m(ids)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


NAMES = {"embed.embedding", "down.kernel", "up.bias", "down.bias"}


def test_a_tied_parameter_travels_once_and_sums_its_gradients(mesh8):
    ids = helpers.token_batch(8) % 16
    twin, model = Tied(nnx.Rngs(0)), Tied(nnx.Rngs(0))
    model: Any = fully_shard(model, mesh=mesh8, reshard_after_forward=True)
    model.set_packing_threshold_bytes(0)  # a collective for each parameter
    optimizer = assert_trains_like(model, twin, next_token, (ids,))
    assert model.embed.embedding is model.head.embedding
    assert model.up.kernel is model.down.kernel
    assert set(values(model)) == set(model.state_dict()) == moments(optimizer)
    assert moments(optimizer) == NAMES
    step = fsdp_jax.value_and_grad(next_token)
    counts = helpers.count_collectives(helpers.lowered_text(step, model, ids))
    assert counts["reduce_scatter"] == len(NAMES)
    assert counts["all_gather"] == len(NAMES) + 2  # backward reads no bias


# --- adapters ---------------------------------------------------------------------


class Adapted(nnx.Module):
    """Blocks of a linear layer with an adapter and one without; a wrapped head."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        how: Any = {"rngs": rngs, "param_dtype": dtype}
        lora: Any = {"lora_rank": 2, "lora_param_dtype": jnp.float32}
        self.ups = nnx.List([nnx.LoRALinear(8, 16, **lora, **how) for _ in "ab"])
        self.downs = nnx.List([nnx.Linear(16, 8, **how) for _ in "ab"])
        head = nnx.Linear(8, 8, **how)
        self.head = nnx.LoRA(8, 2, 8, base_module=head, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for up, down in zip(self.ups, self.downs):
            x = x + down(jnp.tanh(up(x)))
        return self.head(x)


ADAPTERS = {f"ups.{i}.lora.lora_{ab}" for i in (0, 1) for ab in "ab"}
ADAPTERS |= {"head.lora_a", "head.lora_b"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_adapters_are_trained_reduced_and_remembered(mesh8, dtype):
    twin, model = (Adapted(nnx.Rngs(0), dtype) for _ in range(2))
    for layer in [*model.ups, *model.downs]:
        fully_shard(layer, mesh=mesh8, reshard_after_forward=True)
    fully_shard(model, mesh=mesh8)
    before = values(model)
    low: Any = {"rtol": 2e-2, "atol": 2e-3} if dtype == jnp.bfloat16 else {}
    optimizer = assert_trains_like(
        model, twin, mean_square, (inputs(),), wrt=nnx.LoRAParam, **low
    )
    assert moments(optimizer) == ADAPTERS
    for name, value in values(model).items():
        same = np.array_equal(value, before[name])
        assert same == (name not in ADAPTERS), name
        assert value.dtype == (jnp.float32 if name in ADAPTERS else dtype), name
    step = fsdp_jax.value_and_grad(mean_square, wrt=nnx.LoRAParam)
    report = fsdp_jax.comm_report(nnx.jit(step), model, inputs(), compiled=False)
    reduced = {
        r.group: (r.dtype, r.full_bytes)
        for r in report.rows
        if r.direction == "reduce-scatter"
    }
    up, head = 4 * (8 * 2 + 2 * 16), 4 * (8 * 2 + 2 * 8)  # bytes of the adapters alone
    want = {"ups.0": ("f32", up), "ups.1": ("f32", up), "(root)": ("f32", head)}
    assert reduced == want


def matmuls(f: Callable[..., Any], *args: Any) -> int:
    """How many matrix products a function computes."""
    equations = helpers.equations_of(f, *args)
    return sum(e.primitive.name == "dot_general" for e in equations)


@pytest.mark.parametrize("asked", [None, True, False])
def test_gradients_of_frozen_parameters_are_not_computed(mesh8, asked):
    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))
    twin = Adapted(nnx.Rngs(0))
    model = Adapted(nnx.Rngs(0))
    fully_shard([*model.ups, *model.downs], mesh=mesh8, reshard_after_forward=asked)
    fully_shard(model, mesh=mesh8, reshard_after_forward=asked)
    plain = nnx.value_and_grad(mean_square, argnums=nnx.DiffState(0, wrt))
    every = matmuls(nnx.value_and_grad(mean_square), twin, inputs())
    want = matmuls(plain, twin, inputs())
    step = fsdp_jax.value_and_grad(mean_square, wrt=wrt)
    assert matmuls(step, model, inputs()) == want < every
    counts = helpers.count_collectives(helpers.lowered_text(step, model, inputs()))
    assert counts["reduce_scatter"] == 1
    assert counts["all_gather"] == 5 + (asked is True)  # only the head's is read twice


# --- what is trained may change ---------------------------------------------------


class Net(nnx.Module):
    """A body and a head, with a scale that can be told to stay whole."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(8, 16, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)
        self.scale = Scale(jnp.linspace(0.5, 1.5, 8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.body(x))) * self.scale[...]


class Scale(nnx.Param):
    """A kind of parameter of the user's own."""


def make(mesh: Any, **kwargs: Any) -> Any:
    model = Net(nnx.Rngs(0))
    fully_shard(model.body, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


HEAD = nnx.All(nnx.Param, nnx.PathContains("head"))


@pytest.mark.slow
def test_the_trained_parameters_may_change_between_steps(mesh8):
    twin, model = Net(nnx.Rngs(0)), make(mesh8, reshard_after_forward=True)
    for wrt in (HEAD, nnx.Not(HEAD), nnx.Param):  # what was frozen is trained, then all
        before = values(model)
        assert_trains_like(model, twin, mean_square, (inputs(),), wrt=wrt, steps=1)
        chosen = nnx.to_flat_state(nnx.state(model, wrt)).paths
        trained = {".".join(map(str, path)) for path in chosen}
        after = values(model)
        assert {n for n in after if not np.array_equal(after[n], before[n])} == trained


def test_an_optimizer_may_update_fewer_parameters_than_have_gradients(mesh8):
    twin, model = Net(nnx.Rngs(0)), make(mesh8)
    optimizer = fsdp_jax.Optimizer(model, TX, wrt=HEAD)
    plain = nnx.Optimizer(twin, TX, wrt=HEAD)
    before = values(model)
    for _ in range(2):
        optimizer.update(model, fsdp_jax.grad(mean_square)(model, inputs()))
        plain.update(twin, nnx.jit(nnx.grad(mean_square))(twin, inputs()))
    helpers.assert_trees_close(model, twin)
    np.testing.assert_array_equal(model.body.kernel[...], before["body.kernel"])


def is_head(params: Any, yes: Any = True, no: Any = False) -> Any:
    def label(path: Any, _: Any) -> Any:
        return yes if "head" in jax.tree_util.keystr(path) else no

    return jax.tree_util.tree_map_with_path(label, params)


def test_labels_and_masks_of_optax_find_sharded_parameters(mesh8):
    groups: Any = {"head": optax.adam(1e-2, eps=1e-3), "rest": optax.set_to_zero()}
    labels = functools.partial(is_head, yes="head", no="rest")
    decay = optax.masked(optax.add_decayed_weights(0.1), is_head)
    tx = optax.chain(optax.multi_transform(groups, labels), decay, optax.scale(0.5))
    twin, model = Net(nnx.Rngs(0)), make(mesh8)
    before = values(model)
    optimizer = assert_trains_like(model, twin, mean_square, (inputs(),), tx=tx)
    for path, moment in nnx.to_flat_state(nnx.state(optimizer)):
        value = moment.get_raw_value()
        if isinstance(value, jax.Array) and value.ndim:
            assert "head" in path
            assert fsdp_jax.local_shape(value)[0] * 8 == value.shape[0], path
    np.testing.assert_array_equal(model.body.kernel[...], before["body.kernel"])


# --- averaged weights -------------------------------------------------------------


def average(mean: Any, model: Any) -> None:
    """Move an average towards a model."""
    new = jax.tree.map(
        lambda a, p: 0.9 * a + 0.1 * p,
        nnx.state(mean, nnx.Param),
        nnx.state(model, nnx.Param),
    )
    nnx.update(mean, new)


def one_step(value_and_grad: Any, model: Any, optimizer: Any, x: jax.Array) -> Any:
    value, grads = value_and_grad(mean_square)(model, x)
    optimizer.update(model, grads)
    return value


def donating_all(model: Any, optimizer: Any, mean: Any) -> Any:
    """Model, optimizer and average in one step that takes over their memory."""

    @functools.partial(nnx.jit, donate_argnums=(0, 1, 2))
    def step(model, optimizer, mean, x):
        value = one_step(fsdp_jax.value_and_grad, model, optimizer, x)
        average(mean, model)
        return value

    return lambda x: step(model, optimizer, mean, x)


def donating_the_model(model: Any, optimizer: Any, mean: Any) -> Any:
    """The average is moved outside of the step."""

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, x):
        return one_step(fsdp_jax.value_and_grad, model, optimizer, x)

    def run(x):
        value = step(model, optimizer, x)
        average(mean, model)
        return value

    return run


def donating_states(model: Any, optimizer: Any, mean: Any) -> Any:
    """Through `jax.jit`, split and merge."""

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(graphdef, state, x):
        model, optimizer, mean = nnx.merge(graphdef, state)
        value = one_step(fsdp_jax.value_and_grad, model, optimizer, x)
        average(mean, model)
        return value, nnx.state((model, optimizer, mean))

    def run(x):
        nodes = (model, optimizer, mean)
        graphdef, state = nnx.split(nodes)
        value, state = step(graphdef, state, x)
        nnx.update(nodes, state)
        return value

    return run


def buffers(model: Any) -> set[int]:
    """Addresses of all device memory that a model holds."""
    return {
        piece.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(nnx.state(model))
        for piece in x.addressable_shards
    }


@functools.cache
def averaged_twin() -> tuple[list[float], Any, Any]:
    """Losses, model and average of three steps without sharding."""
    model = Net(nnx.Rngs(0))
    optimizer, mean = nnx.Optimizer(model, TX, wrt=nnx.Param), nnx.clone(model)
    step = nnx.jit(functools.partial(one_step, nnx.value_and_grad))
    losses = []
    for _ in range(3):
        losses.append(float(step(model, optimizer, inputs())))
        average(mean, model)
    return losses, model, mean


@pytest.mark.parametrize(
    "make_step", [donating_all, donating_the_model, donating_states]
)
def test_an_average_of_the_weights_survives_donation(mesh8, make_step):
    losses, twin, mean_of_twin = averaged_twin()
    model = make(mesh8)
    mean = nnx.clone(model, arrays=True)
    assert not buffers(mean) & buffers(model)
    step = make_step(model, fsdp_jax.Optimizer(model, TX), mean)
    got = [float(step(inputs())) for _ in range(3)]
    np.testing.assert_allclose(got, losses, 1e-5)
    helpers.assert_trees_close(mean, mean_of_twin)
    helpers.assert_trees_close(model, twin)
    assert not buffers(mean) & buffers(model)
    states = (jax.tree.leaves(nnx.state(m)) for m in (mean, model))
    assert all(a.sharding == b.sharding for a, b in zip(*states, strict=True))


def test_averaged_weights_are_swapped_in_for_an_evaluation(mesh8):
    model, other = make(mesh8), Net(nnx.Rngs(5))
    mean = nnx.clone(model, arrays=True)
    nnx.update(mean, nnx.as_pure(nnx.state(other)))
    evaluate = nnx.jit(fsdp_jax.shard_map(lambda m, x: m(x)))
    kept = nnx.as_pure(nnx.state(model, nnx.Param))
    nnx.update(model, nnx.state(mean, nnx.Param))
    np.testing.assert_allclose(evaluate(model, inputs()), other(inputs()), 1e-5, 1e-6)
    nnx.update(model, kept)
    np.testing.assert_allclose(
        evaluate(model, inputs()), Net(nnx.Rngs(0))(inputs()), 1e-5, 1e-6
    )
    assert fsdp_jax.local_shape(model.head.kernel) == (2, 8)


# --- ignored parameters -----------------------------------------------------------

IGNORED = {
    "Variables": (lambda m: [m.head.kernel], {"head.kernel"}),
    "path": (lambda m: nnx.PathContains("bias"), {"body.bias", "head.bias"}),
    "type": (lambda m: Scale, {"scale"}),
}


@functools.cache
def trained_twin() -> tuple[list[Any], Any]:
    """Three steps without sharding, and the model after them."""
    twin = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(twin, TX, wrt=nnx.Param)
    step = make_steps(nnx.value_and_grad, mean_square)
    return [step(twin, optimizer, inputs()) for _ in range(3)], twin


@pytest.mark.parametrize("how", IGNORED)
def test_ignored_parameters_train_whole_and_alike_everywhere(mesh8, how):
    ignored, names = IGNORED[how]
    model = Net(nnx.Rngs(0))
    where: Any = {"mesh": mesh8, "ignored_params": ignored(model)}
    fully_shard([model.body, model], **where)
    optimizer = fsdp_jax.Optimizer(model, TX)
    step = make_steps(fsdp_jax.value_and_grad, mean_square)
    want, twin = trained_twin()
    got = [step(model, optimizer, inputs()) for _ in want]
    helpers.assert_trees_close(got, want)
    helpers.assert_trees_close(model, twin)
    whole = set()
    for path, variable in nnx.to_flat_state(nnx.state((model, optimizer))):
        value = variable.get_raw_value()
        if value.ndim and value.sharding.is_fully_replicated:
            name = ".".join(map(str, path))
            whole |= {n for n in values(model) if name.endswith("." + n)}
            copies = [np.asarray(piece.data) for piece in value.addressable_shards]
            assert len(copies) == 8
            assert all(np.array_equal(copy, copies[0]) for copy in copies), name
    assert whole == names
