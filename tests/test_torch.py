"""The same weights and batches give the gradients that PyTorch's `fully_shard` gives.

`torch_reference.py` runs every case of `CASES` on four PyTorch processes, in one go;
here the same case runs on four simulated devices. Rank `r` of PyTorch has the rows that
device `r` has.
"""

import dataclasses
import functools
import json
import operator
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.needs_torch

SCRIPT = Path(__file__).parent / "torch_reference.py"
TIME_LIMIT = 120.0  # seconds for all cases, start included
RANKS = 4
ROWS = 3  # of each rank

BF16 = {"param_dtype": "bfloat16"}
BF16_REDUCED_IN_F32 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
SYNC = "set_requires_gradient_sync"
ALL_REDUCE = "set_requires_all_reduce"
FACTORS = {"blocks.0": 8.0, "": 1.0}  # "" is the root's own group alone


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, and the micro-batches whose gradients it adds up.

    Attributes:
        model: `"mlp"`, or `"linear"` for a layer whose gradient is its input.
        batches: A number of random micro-batches, or each one's input on each rank.
        hsdp: Two replicas of two shards, not four shards.
        policy: Dtypes of the `MixedPrecisionPolicy`.
        held: The method that turns communication off for all batches but the last.
        factors: What the sum of a module's own group is divided by, by path.
        expected: The value of the whole gradient.
    """

    model: str = "mlp"
    batches: int | list[list[float]] = 1
    hsdp: bool = False
    policy: dict[str, str] = dataclasses.field(default_factory=dict)
    held: str | None = None
    factors: dict[str, float] = dataclasses.field(default_factory=dict)
    expected: float | None = None


MLP_CASES = {
    "default": Case(),
    "added by hand": Case(batches=3),
    "without sync": Case(batches=3, held=SYNC),
    "HSDP": Case(hsdp=True),
    "HSDP without sync": Case(batches=3, hsdp=True, held=SYNC),
    "HSDP without all-reduce": Case(batches=3, hsdp=True, held=ALL_REDUCE),
    "factors": Case(factors=FACTORS),
    "HSDP with factors": Case(hsdp=True, factors=FACTORS),
    "factors without sync": Case(batches=3, held=SYNC, factors=FACTORS),
}
BF16_CASES = {
    "bfloat16": Case(policy=BF16_REDUCED_IN_F32),
    "bfloat16 without sync": Case(policy=BF16_REDUCED_IN_F32, held=SYNC, batches=3),
}


def exact(batches: list[list[float]], expected: float, **kwargs: Any) -> Case:
    """A case with a gradient that can be worked out by hand."""
    return Case("linear", batches, expected=expected, **kwargs)


RAMPS = [[value * rank for rank in (1.0, 2.0, 3.0, 4.0)] for value in (1, 10, 100)]
# bfloat16 has no 257: a sum in it loses the 1.
LARGE_AND_SMALL = [[value] * RANKS for value in (256.0, 1.0, -256.0)]
EXACT_CASES = {
    "mean of ranks": exact(RAMPS[:1], 2.5),
    "second backward": exact([RAMPS[0], RAMPS[0]], 5.0),
    "ramps without sync": exact(RAMPS, 277.5, held=SYNC),
    "sum of ranks": exact(RAMPS[:1], 10.0, factors={"": 1.0}),
    "float16 mean": exact([[3e4] * RANKS], 3e4, policy={"reduce_dtype": "float16"}),
    "sum over ranks in float32": exact(
        [[256.0, 1.0, 1.0, 1.0]], 64.75, policy=BF16_REDUCED_IN_F32
    ),
    "float32 shards": exact(LARGE_AND_SMALL, 1.0, policy=BF16),
    "held in bfloat16": exact(LARGE_AND_SMALL, 0.0, policy=BF16, held=SYNC),
    "held in float32": exact(
        LARGE_AND_SMALL, 1.0, policy=BF16_REDUCED_IN_F32, held=SYNC
    ),
    "HSDP ramps": exact(RAMPS[:1], 2.5, hsdp=True),
    "HSDP ramps without all-reduce": exact(RAMPS, 277.5, hsdp=True, held=ALL_REDUCE),
    "HSDP held in bfloat16": exact(
        LARGE_AND_SMALL, 0.0, policy=BF16, hsdp=True, held=ALL_REDUCE
    ),
    "HSDP held in float32": exact(
        LARGE_AND_SMALL, 1.0, policy=BF16_REDUCED_IN_F32, hsdp=True, held=ALL_REDUCE
    ),
}
CASES = MLP_CASES | BF16_CASES | EXACT_CASES


# --- models, weights and batches --------------------------------------------------


class Block(nnx.Module):
    """Two linear layers around a skip connection, 8 wide."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class MLP(nnx.Module):
    """Two blocks, a scale and a head, 8 in, 4 out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.scale = nnx.Param(jnp.ones(8))
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale[...])


def make_model(case: Case) -> Any:
    """The model of a case, not sharded; no parameter has a special value."""
    if case.model == "mlp":
        model = MLP(nnx.Rngs(0))
    else:
        model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        noise = rng.normal(scale=0.3, size=variable.shape)
        variable.set_value(variable[...] + noise.astype(np.float32))
    return model


def in_torch_terms(state: Any) -> dict[str, np.ndarray]:
    """Arrays by PyTorch's names; kernels `(in, out)` as its weights `(out, in)`."""
    named = {".".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(state)}
    return {k.replace("kernel", "weight"): np.asarray(v).T for k, v in named.items()}


def batches_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and factors of the outputs, `(batches, rows of all ranks, width)`."""
    if isinstance(case.batches, int):
        rng = np.random.default_rng(2)
        shape = (case.batches, RANKS * ROWS)
        x, y = rng.normal(size=(*shape, 8)), rng.normal(0, 0.1, (*shape, 4))
    else:
        x = np.repeat(np.array(case.batches)[..., None], 4, axis=-1)
        y = np.ones_like(x)
    return x.astype(np.float32), y.astype(np.float32)


# --- the two libraries ------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Losses and gradients of PyTorch, by case and name."""
    folder = tmp_path_factory.mktemp("torch")
    cases = {name: dataclasses.asdict(case) for name, case in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    inputs = {}
    for name, case in CASES.items():
        inputs[f"{name}.x"], inputs[f"{name}.y"] = batches_of(case)
        weights = in_torch_terms(nnx.state(make_model(case)))
        inputs |= {f"{case.model}/{key}": value for key, value in weights.items()}
    np.savez(folder / "inputs.npz", **inputs)
    run_script(folder)
    return dict(np.load(folder / "outputs.npz"))


def run_script(folder: Path) -> None:
    """Run PyTorch's half; its processes end within the limit."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output[-5000:]


def sharded_model(case: Case) -> Any:
    """The model of a case, a group for each block and one for what is left."""
    devices = np.array(jax.devices()[:RANKS])
    if case.hsdp:
        mesh = Mesh(devices.reshape(2, 2), ("replicate", "shard"))
    else:
        mesh = Mesh(devices, ("fsdp",))
    dtypes: Any = {key: jnp.dtype(name) for key, name in case.policy.items()}
    policy = MixedPrecisionPolicy(**dtypes)
    model = make_model(case)
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    groups: dict[str, Any] = {
        ".".join(map(str, path)): module for path, module in nnx.iter_modules(model)
    }
    for path, factor in case.factors.items():
        groups[path].set_gradient_divide_factor(factor)
    return model


def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return (model(x) * y).sum()


def run(case: Case) -> tuple[jax.Array, Any]:
    """Loss of the last micro-batch, gradients of all of them."""
    step = fsdp_jax.value_and_grad(loss_fn)
    model = sharded_model(case)
    *first, last = zip(*batches_of(case))
    if case.held:
        pending = held_gradients(case.held, model, first)
        return step(model, *last, pending=pending)
    results = [step(model, *batch) for batch in (*first, last)]
    add = functools.partial(jax.tree.map, jnp.add)
    return results[-1][0], functools.reduce(add, [grads for _, grads in results])


def held_gradients(held: str, model: Any, batches: list[Any]) -> Any:
    """The sum of what is not communicated while `held` is off; it is on again after."""
    step = fsdp_jax.value_and_grad(loss_fn)
    getattr(model, held)(False)
    pending = [step(model, *batch)[1] for batch in batches]
    assert all(isinstance(p, fsdp_jax.PendingGradients) for p in pending)
    getattr(model, held)(True)
    return functools.reduce(operator.add, pending)


def gradients_in(reference: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """What PyTorch found in a case, without the loss."""
    found = {k.partition("/"): v for k, v in reference.items()}
    return {k: v for (case, _, k), v in found.items() if case == name and k != "loss"}


# --- side by side -----------------------------------------------------------------


@pytest.mark.parametrize("name", MLP_CASES)
def test_float32_gradients_are_those_of_pytorch(name, reference):
    loss, grads = run(CASES[name])
    np.testing.assert_allclose(loss, reference[f"{name}/loss"], rtol=1e-5)
    assert_close(in_torch_terms(grads), gradients_in(reference, name))


@pytest.mark.parametrize("name", [k for k, case in MLP_CASES.items() if case.held])
def test_what_is_held_can_be_reduced_without_a_batch(name, reference):
    case = CASES[name]
    model = sharded_model(case)
    pending = held_gradients(str(case.held), model, list(zip(*batches_of(case))))
    grads = model.synchronize_gradients(pending)
    assert_close(in_torch_terms(grads), gradients_in(reference, name))


@pytest.mark.parametrize("name", EXACT_CASES)
def test_exact_gradients_are_those_of_pytorch(name, reference):
    (theirs,) = gradients_in(reference, name).values()
    _, grads = run(CASES[name])
    (ours,) = in_torch_terms(grads).values()
    np.testing.assert_array_equal(theirs, np.full((4, 4), CASES[name].expected))
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "in_float32"),
    [("bfloat16", "default"), ("bfloat16 without sync", "without sync")],
)
def test_bfloat16_gradients_are_those_of_pytorch_but_for_rounding(
    name, in_float32, reference
):
    float32 = gradients_in(reference, in_float32)
    theirs = gradients_in(reference, name)
    ours = in_torch_terms(run(CASES[name])[1])
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype == np.float32
        assert distance(ours[key], value) < 3e-2, key
        for rounded in (ours[key], value):  # so the blocks did compute in bfloat16
            assert distance(rounded, float32[key]) > 1e-4, key


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, 1e-5, 1e-6, err_msg=key)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Relative distance of two arrays in the Euclidean norm."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
