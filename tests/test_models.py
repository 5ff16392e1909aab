"""The models of `examples/models` train and generate as their unsharded twins."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_models
from flax import nnx
from models.decoder import Decoder, DecoderConfig
from models.encoder_decoder import PAD, EncoderDecoder, EncoderDecoderConfig
from models.moe import MixtureOfExperts, MoEConfig, MoETransformer
from models.resnet import ResNet, ResNetConfig
from models.vit import ViT, ViTConfig

import fsdp_jax
from tests import helpers

ROWS, STEPS, NEW_TOKENS = 24, 3, 5
VOCABULARY, CLASSES = 29, 5

# Number of devices, and more arguments for every fully_shard.
SETUPS: list[tuple[int, dict[str, Any]]] = [
    (8, {}),
    (3, {"uneven": "pad"}),
    (8, {"uneven": "pad"}),
]


def compile_fast(f: Callable[..., Any], *args: Any) -> Any:
    """Compile with a third of the time saved, for what does not run long."""
    options: Any = {"xla_backend_optimization_level": 0}
    return nnx.jit(f).lower(*args).compile(options)


def decoder(rngs: nnx.Rngs, axis: str | None) -> Decoder:
    # The stack is cut on its dim 1, whose sizes divide by 3 and by 8.
    return Decoder(DecoderConfig(VOCABULARY, 24, 2, 4, 2, 6, 48), rngs=rngs)


def vit(rngs: nnx.Rngs, axis: str | None) -> ViT:
    return ViT(ViTConfig(8, 4, 3, CLASSES, 16, 1, 2, 24, dropout_rate=0.2), rngs=rngs)


def resnet(rngs: nnx.Rngs, axis: str | None) -> ResNet:
    return ResNet(ResNetConfig(3, CLASSES, (8, 16), 1, batch_axis=axis), rngs=rngs)


def encoder_decoder(rngs: nnx.Rngs, axis: str | None) -> EncoderDecoder:
    return EncoderDecoder(EncoderDecoderConfig(VOCABULARY, 7, 16, 1, 2, 24), rngs=rngs)


def moe(rngs: nnx.Rngs, axis: str | None) -> MoETransformer:
    config = MoEConfig(VOCABULARY, 16, 1, 2, 1, 8, 24, num_experts=5)
    return MoETransformer(config, rngs=rngs)


MAKERS: dict[str, Callable[[nnx.Rngs, str | None], Any]] = {
    f.__name__: f for f in (decoder, vit, resnet, encoder_decoder, moe)
}
GROUPS = {"decoder": 2, "vit": 2, "resnet": 3, "encoder_decoder": 3, "moe": 3}


def make(name: str, axis: str | None = None) -> Any:
    """A model of host arrays: nothing is compiled to make or to shard it."""
    rng = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: MAKERS[name](nnx.Rngs(0), axis))
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(first_value(path, variable, rng))
    return model


def first_value(path: tuple, variable: nnx.Variable, rng: np.random.Generator) -> Any:
    shape = variable.get_raw_value().shape
    if isinstance(variable, nnx.RngKey):
        return jax.random.key(0)
    if isinstance(variable, nnx.RngCount):
        return np.zeros(shape, np.uint32)
    if isinstance(variable, nnx.BatchStat):
        return np.full(shape, path[-1] == "var", np.float32)
    noise = rng.normal(size=shape) * 0.3  # large: no two tokens are likeliest
    return np.asarray(noise + (path[-1] == "scale"), np.float32)


def sharded(name: str, devices: int, how: dict[str, Any]) -> Any:
    shard = train_models.TASKS[name].shard
    return shard(make(name, "fsdp"), mesh=helpers.mesh_of(devices), **how)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    """Token ids `(ROWS, length)`, none of them `PAD`."""
    return np.random.default_rng(seed).integers(1, VOCABULARY, size=(ROWS, length))


def padded(length: int, seed: int) -> np.ndarray:
    """The same with less and less padding: devices hold different numbers of tokens."""
    lengths = 1 + np.arange(ROWS)[:, None] * length // ROWS
    return np.where(np.arange(length) < lengths, tokens(length, seed), PAD)


def batch_for(name: str) -> tuple[np.ndarray, ...]:
    if name == "encoder_decoder":
        return padded(6, 1), padded(5, 2)
    if name in ("vit", "resnet"):
        images = np.random.default_rng(0).normal(size=(ROWS, 8, 8, 3))
        return images.astype(np.float32), np.arange(ROWS) % CLASSES
    return (tokens(6),)


def train(model: Any, value_and_grad: Any, optimizer: Any, name: str) -> list[float]:
    """Losses of steps with decay and clipping; `value_and_grad` of the whole loss."""
    # eps is far above the noise that the bias of a key has for a gradient.
    adamw = optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)
    opt = optimizer(model, optax.chain(optax.clip_by_global_norm(0.5), adamw))

    def step(model: Any, opt: Any, *batch: Any) -> jax.Array:
        loss, grads = value_and_grad(model, *batch)
        opt.update(model, grads)
        return loss

    args = (model, opt, *batch_for(name))
    compiled = compile_fast(step, *args)
    return [float(compiled(*args)) for _ in range(STEPS)]


def with_masks_of(devices: int, loss: Any) -> Any:
    """A loss whose dropout masks are those of the devices, each with its own rows."""

    def mean_loss(model: Any, *batch: jax.Array) -> jax.Array:
        graphdef, keys, rest = nnx.split(model, nnx.RngKey, ...)

        def on_device(index: jax.Array, *rows: jax.Array) -> Any:
            own = jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
            copy = nnx.merge(graphdef, own, rest, copy=True)
            return loss(copy, *rows), nnx.state(copy, nnx.RngCount)

        rows = [x.reshape(devices, -1, *x.shape[1:]) for x in batch]
        losses, counts = jax.vmap(on_device)(jnp.arange(devices), *rows)
        nnx.update(model, jax.tree.map(lambda count: count[0], counts))
        return losses.mean()

    return mean_loss


@functools.cache
def trained_twin(name: str, mask_devices: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and final values of the unsharded model on one device."""
    task, model = train_models.TASKS[name], make(name)
    loss = task.loss
    if mask_devices:
        loss = with_masks_of(mask_devices, loss)
    elif task.reduction == "weighted":

        def loss(model: Any, *batch: Any) -> jax.Array:
            total, weight = task.loss(model, *batch)
            return total / weight

    optimizer = functools.partial(nnx.Optimizer, wrt=nnx.Param)
    losses = train(model, nnx.value_and_grad(loss), optimizer, name)
    return losses, values(model)


def values(model: Any) -> dict[str, Any]:
    """Full arrays of a model by dotted name."""
    if isinstance(model, fsdp_jax.FSDPModule):
        return model.state_dict()
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


PADDED = [(name, *SETUPS[1 + i % 2]) for i, name in enumerate(MAKERS)]
EVEN = [(name, *SETUPS[0]) for name in ("decoder", "resnet", "moe")]


# The quickest of them is in the middle, where a run of one case takes it from.
@pytest.mark.parametrize(("name", "devices", "how"), [*PADDED[:3], *EVEN, *PADDED[3:]])
def test_training_equals_that_of_the_unsharded_twin(name, devices, how):
    task, model = train_models.TASKS[name], sharded(name, devices, how)
    value_and_grad = fsdp_jax.value_and_grad(task.loss, reduction=task.reduction)
    losses = train(model, value_and_grad, fsdp_jax.Optimizer, name)
    expected, final = trained_twin(name, devices if name == "vit" else 0)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    helpers.assert_trees_close(values(model), final)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize(
    ("name", "devices", "how"),
    [(name, *setup) for name in MAKERS for setup in SETUPS[:2]],
)
def test_every_block_is_a_group_and_nothing_large_is_whole(name, devices, how):
    rows = fsdp_jax.describe(sharded(name, devices, how)).rows
    assert len({row.group for row in rows}) == GROUPS[name]
    # A bias of 5 that 8 devices do not divide.
    assert {row.path for row in rows if row.dim is None} <= {"head.bias"}


@pytest.mark.parametrize(
    ("name", "layers", "groups_per_layer", "devices", "how"),
    [("decoder", 2, 1, *SETUPS[0]), ("moe", 1, 2, *SETUPS[1])],
)
def test_a_step_gathers_each_group_twice_and_reduces_it_once(
    name, layers, groups_per_layer, devices, how
):
    loss, model = train_models.TASKS[name].loss, sharded(name, devices, how)
    step = nnx.jit(fsdp_jax.value_and_grad(loss))
    report = fsdp_jax.comm_report(step, model, *batch_for(name), compiled=False)
    groups = layers * groups_per_layer
    assert report.count("forward gather") == groups + 1  # the root's
    assert report.count("backward re-gather") == groups
    assert report.count("reduce-scatter") == groups + 1
    assert report.count() == (groups + 1) + groups + (groups + 1) + 1  # the loss


@pytest.mark.slow
def test_the_decoder_generates_the_same_with_caches():
    devices, how = SETUPS[0]
    prompt = tokens(4)

    def ways(model: Any, prompt: jax.Array) -> Any:
        def generate(model: Any, prompt: jax.Array) -> jax.Array:
            return model.generate(prompt, NEW_TOKENS)

        on_each_device = fsdp_jax.shard_map(generate)
        return generate(model, prompt), on_each_device(model, prompt)

    def plainly(model: Any, prompt: jax.Array) -> Any:
        found = model.generate(prompt, NEW_TOKENS)
        logits = model(jnp.concatenate([prompt, found], axis=1))
        return found, logits[:, prompt.shape[1] - 1 : -1].argmax(-1)

    twin = (make("decoder"), prompt)
    expected, without_cache = compile_fast(plainly, *twin)(*twin)
    np.testing.assert_array_equal(expected, without_cache)
    assert len(np.unique(expected)) > NEW_TOKENS
    args = (sharded("decoder", devices, how), prompt)
    for found in compile_fast(ways, *args)(*args):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_the_encoder_decoder_generates_the_same_with_caches():
    devices, how = SETUPS[1]
    source = padded(6, 1)

    def without_cache(model: Any, source: jax.Array, found: jax.Array) -> jax.Array:
        known = jnp.pad(found[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
        return model.decode(known, model.encode(source), source)

    def generate(model: Any, source: jax.Array) -> jax.Array:
        return model.generate(source, NEW_TOKENS)

    def ways(model: Any, source: jax.Array) -> Any:
        found = fsdp_jax.shard_map(generate)(model, source)
        logits = fsdp_jax.shard_map(without_cache)(model, source, found)
        return generate(model, source), found, logits

    def plainly(model: Any, source: jax.Array) -> Any:
        found = generate(model, source)
        return found, without_cache(model, source, found)

    model = sharded("encoder_decoder", devices, how)
    before = nnx.graphdef(model)
    twin = (make("encoder_decoder"), source)
    expected, expected_logits = compile_fast(plainly, *twin)(*twin)
    np.testing.assert_array_equal(expected, expected_logits.argmax(-1))
    assert len(np.unique(expected)) > NEW_TOKENS
    *found, logits = compile_fast(ways, model, source)(model, source)
    for each in found:
        np.testing.assert_array_equal(each, expected)
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
    assert nnx.graphdef(model) == before  # no cache is left behind


def test_sorted_experts_equal_each_token_by_its_two_best():
    config = MoEConfig(VOCABULARY, 16, 1, 2, 1, 8, 24, num_experts=5)
    layer = MixtureOfExperts(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 6, 16)).astype(np.float32)
    found, losses = compile_fast(MixtureOfExperts.__call__, layer, x)(layer, x)

    state = nnx.to_pure_dict(nnx.state(layer))
    gate, up, down = (np.asarray(state["experts"][n]) for n in ("gate", "up", "down"))
    scores = np.exp(x @ np.asarray(state["router"]["kernel"]))
    expected, shares = np.zeros_like(x), np.zeros((3, 5))
    for row, place in np.ndindex(3, 6):
        token, score = x[row, place], scores[row, place]
        best = np.argsort(score)[-2:]
        for e in best:
            hidden = token @ gate[e]
            hidden = hidden / (1 + np.exp(-hidden)) * (token @ up[e])
            expected[row, place] += score[e] / score[best].sum() * (hidden @ down[e])
            shares[row, e] += 1 / (6 * 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    totals = scores.sum(-1)
    np.testing.assert_allclose(losses["z_loss"], np.mean(np.log(totals) ** 2), 1e-5)
    probabilities = (scores / totals[..., None]).mean(axis=1)
    balance = 5 * (shares * probabilities).sum(axis=1).mean()
    np.testing.assert_allclose(losses["load_balance"], balance, 1e-5)
