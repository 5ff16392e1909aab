"""Two and four real processes on loopback agree with one process.

Each process runs this file as a script. It does every check that needs company in one
go, notes the outcome of each by name, and the tests read the notes: starting a group
of processes takes seconds.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import DataParallelMeshDims, fully_shard, local_shape, shard_batch
from tests import helpers
from tests.flags import xla_flags

ROOT = Path(__file__).parents[1]
TIME_LIMIT = 100.0  # seconds for a whole group, start included
ROWS = 8
STEPS = 3


# --- what every process and the test itself do ------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and a global batch."""

    make_model: Callable[[], Any]
    loss: Callable[..., jax.Array]
    batch: tuple[Any, ...]


def task_of(name: str) -> Task:
    """What a group of processes trains."""
    if name == "mlp":
        batch = helpers.regression_batch(ROWS)
        return Task(lambda: helpers.MLP(nnx.Rngs(0)), helpers.mean_square, batch)
    ids = helpers.token_batch(ROWS, 4)
    return Task(make_transformer, helpers.next_token_loss, (ids,))


def make_transformer() -> Any:
    return helpers.Transformer(nnx.Rngs(0), width=16, num_blocks=1)


def transformation() -> optax.GradientTransformation:
    return optax.adamw(1e-2, eps=1e-3)


def train_steps(
    value_and_grad: Callable, loss: Callable, model: Any, optimizer: Any, *batch: Any
) -> list[float]:
    """Losses of `STEPS` compiled steps."""

    @nnx.jit
    def step(model: Any, optimizer: Any, *batch: Any) -> jax.Array:
        value, grads = value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, *batch)) for _ in range(STEPS)]


# --- one process of a group -------------------------------------------------------


class Notes:
    """Outcomes of named checks, written to a file after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        try:
            yield
            outcome = "ok"
        except (Exception, pytest.fail.Exception):
            outcome = traceback.format_exc()
        self.values[name] = outcome
        self.path.write_text(json.dumps(self.values))


def worker(index: int, count: int, port: int, folder: Path, name: str) -> None:
    """The life of process `index` of `count`."""
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    notes = Notes(folder / f"{index}.json")
    with notes.check("train"):
        model = train(index, count, folder, name)
    if name == "transformer":
        for check in CHECKS:
            with notes.check(check.__name__.removeprefix("check_")):
                check(model, index, count)
    sync("done")


def sync(name: str) -> None:
    """Wait for the other processes."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


def own_rows(array: np.ndarray, index: int, count: int) -> np.ndarray:
    return np.split(array, count)[index]


def to_host(x: jax.Array) -> np.ndarray:
    """The whole array, in every process; all must ask."""
    from jax.experimental import multihost_utils

    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def train(index: int, count: int, folder: Path, name: str) -> Any:
    """Train, leaving losses and final parameters in a file; returns the model."""
    task = task_of(name)
    model = helpers.shard_blocks(task.make_model())
    optimizer = fsdp_jax.Optimizer(model, transformation())
    rows = [own_rows(np.asarray(x), index, count) for x in task.batch]
    batch = shard_batch(rows, model)
    losses = train_steps(fsdp_jax.value_and_grad, task.loss, model, optimizer, *batch)
    final = {name: to_host(x) for name, x in model.state_dict().items()}
    arrays: dict[str, Any] = {"losses": np.array(losses), **final}
    np.savez(folder / f"{index}.npz", **arrays)
    return model


def layer(**kwargs: Any) -> Any:
    """Linear(8, 16), seed 0, over all devices of all processes."""
    return fully_shard(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), **kwargs)


def inputs() -> Any:
    return np.linspace(-1, 1, ROWS * 8, dtype=np.float32).reshape(ROWS, 8)


def expected_output() -> np.ndarray:
    return np.asarray(nnx.Linear(8, 16, rngs=nnx.Rngs(0))(inputs()))


def assert_sharded(model: Any, num_devices: int) -> None:
    assert local_shape(model.kernel) == (8 // num_devices, 16)
    assert not model.kernel.get_raw_value().is_fully_replicated


def check_shard_batch(model: Any, index: int, count: int) -> None:
    host = inputs()
    placed = shard_batch({"x": own_rows(host, index, count), "n": 3}, model)
    assert placed["x"].shape == host.shape
    assert not placed["x"].is_fully_addressable
    np.testing.assert_array_equal(to_host(placed["x"]), host)
    for shard in placed["x"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])
    assert int(placed["n"]) == 3
    again = shard_batch(placed, model)
    assert again["x"] is placed["x"]
    by_column = NamedSharding(placed["x"].sharding.mesh, PartitionSpec(None, "fsdp"))
    other = jax.make_array_from_callback(host.shape, by_column, lambda i: host[i])
    moved = shard_batch(other, model)
    assert moved.sharding == placed["x"].sharding
    np.testing.assert_array_equal(to_host(moved), host)


def check_typed_keys(model: Any, index: int, count: int) -> None:
    keys = jax.random.split(jax.random.key(0), ROWS)
    own = own_rows(np.arange(ROWS), index, count)
    placed = shard_batch({"one": jax.random.key(1), "rows": keys[own]}, model)
    assert placed["one"].dtype == placed["rows"].dtype == keys.dtype
    assert placed["one"].is_fully_replicated
    assert placed["rows"].shape == (ROWS,)
    for name, want in (("one", jax.random.key(1)), ("rows", keys)):
        got = to_host(jax.random.key_data(placed[name]))
        np.testing.assert_array_equal(got, jax.random.key_data(want))


class Noisy(nnx.Module):
    """A layer, a norm and a dropout, 8 in, 16 out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.0, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)) + 2.0)


def check_masks_and_statistics(model: Any, index: int, count: int) -> None:
    """Every device drops other units, and all hold the same mean and counters."""
    model, reference = fully_shard(Noisy(nnx.Rngs(0))), Noisy(nnx.Rngs(0))
    host = inputs()
    x = shard_batch(own_rows(host, index, count), model)
    output = to_host(fsdp_jax.shard_map(lambda model, x: model(x))(model, x))
    pieces = np.split(output == 0, jax.device_count())
    assert len({piece.tobytes() for piece in pieces}) == jax.device_count()
    mean = np.asarray(reference.linear(host)).mean(0)
    got = to_host(model.norm.mean.get_raw_value())
    np.testing.assert_allclose(got, mean, rtol=1e-5, atol=1e-6)
    assert int(model.dropout.rngs.count[...]) == 1


def check_global_view(model: Any, index: int, count: int) -> None:
    """The plain transform and the plain optimizer, on the sharded model."""

    def loss(model: Any, x: Any) -> jax.Array:
        return (model(x) ** 2).mean()

    model, reference = layer(), nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    x = shard_batch(own_rows(inputs(), index, count), model)
    losses, expected = (
        train_steps(
            nnx.value_and_grad,
            loss,
            m,
            nnx.Optimizer(m, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param),
            batch,
        )
        for m, batch in ((model, x), (reference, inputs()))
    )
    np.testing.assert_allclose(losses, expected, 1e-5)
    np.testing.assert_allclose(
        to_host(model.kernel.get_raw_value()), reference.kernel[...], 1e-5, 1e-6
    )
    assert_sharded(model, jax.device_count())


def check_eager_forward(model: Any, index: int, count: int) -> None:
    model = layer()
    x = shard_batch(own_rows(inputs(), index, count), model)
    np.testing.assert_allclose(to_host(model(x)), expected_output(), 1e-5, 1e-6)
    assert_sharded(model, jax.device_count())


def check_eager_gradients(model: Any, index: int, count: int) -> None:
    def loss(model: Any, x: Any) -> jax.Array:
        return (model(x) ** 2).mean()

    model = layer()
    x = shard_batch(own_rows(inputs(), index, count), model)
    value, grads = fsdp_jax.value_and_grad(loss)(model, x)
    reference = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    want, want_grads = nnx.value_and_grad(loss)(reference, inputs())
    np.testing.assert_allclose(float(value), want, 1e-5)
    kernel = grads["kernel"].get_raw_value()
    assert kernel.sharding == model.kernel.get_raw_value().sharding
    np.testing.assert_allclose(
        to_host(kernel), want_grads["kernel"][...], rtol=1e-5, atol=1e-6
    )


def check_shard_map(model: Any, index: int, count: int) -> None:
    model = layer()
    x = shard_batch(own_rows(inputs(), index, count), model)
    run = fsdp_jax.shard_map(lambda model, x: (model(x), model(x).mean()))
    output, mean = run(model, x)
    np.testing.assert_allclose(to_host(output), expected_output(), 1e-5, 1e-6)
    np.testing.assert_allclose(float(mean), expected_output().mean(), 1e-5, 1e-6)


def check_replicas_in_other_processes(model: Any, index: int, count: int) -> None:
    """Each process holds all shards; gradients are summed over the processes."""
    mesh = Mesh(np.array(jax.devices()).reshape(count, -1), ("replicate", "fsdp"))
    task = task_of("mlp")
    model, reference = task.make_model(), task.make_model()
    helpers.shard_blocks(model, mesh=mesh)
    num_shards = jax.device_count() // count
    assert local_shape(model.layers[0].kernel) == (16 // num_shards, 32)
    rows = [own_rows(np.asarray(x), index, count) for x in task.batch]
    losses, expected = (
        train_steps(way.value_and_grad, task.loss, m, kind(m, tx, wrt=nnx.Param), *b)
        for tx in [transformation()]
        for way, kind, m, b in (
            (fsdp_jax, fsdp_jax.Optimizer, model, shard_batch(rows, model)),
            (nnx, nnx.Optimizer, reference, task.batch),
        )
    )
    np.testing.assert_allclose(losses, expected, 1e-5)
    for name, x in model.state_dict().items():
        own = [np.asarray(s.data) for s in x.addressable_shards]
        path = tuple(int(p) if p.isdigit() else p for p in name.split("."))
        want = dict(nnx.to_flat_state(nnx.state(reference)))[path][...]
        np.testing.assert_allclose(np.concatenate(own), want, 1e-5, 1e-6, err_msg=name)


def check_a_batch_beside_another_axis(model: Any, index: int, count: int) -> None:
    """Processes along a tensor parallel axis bring the same rows."""
    mesh = Mesh(np.array(jax.devices()).reshape(count, -1), ("tp", "fsdp"))
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    for v in (model.kernel, model.bias):
        value, by_tp = np.asarray(v[...]), NamedSharding(mesh, PartitionSpec("tp"))
        v.set_raw_value(
            jax.make_array_from_callback(value.shape, by_tp, value.__getitem__)
        )
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("fsdp"))
    assert local_shape(model.kernel) == (8 // jax.device_count(), 16)
    x = shard_batch(inputs()[:2], model)
    assert x.shape == (2, 8)
    output = to_host(fsdp_jax.shard_map(lambda model, x: model(x))(model, x))
    np.testing.assert_allclose(output, expected_output()[:2], 1e-5, 1e-6)


def check_unshard_and_reshard(model: Any, index: int, count: int) -> None:
    model = layer()
    before = to_host(model.kernel.get_raw_value())
    for asynchronous in (False, True):
        handle = model.unshard(async_op=asynchronous)
        if handle is not None:
            assert_sharded(model, jax.device_count())
            handle.wait()
        assert local_shape(model.kernel) == (8, 16)
        np.testing.assert_array_equal(to_host(model.kernel.get_raw_value()), before)
        model.reshard()
        assert_sharded(model, jax.device_count())
        np.testing.assert_array_equal(to_host(model.kernel.get_raw_value()), before)


def check_a_number_of_forwards(model: Any, index: int, count: int) -> None:
    model = layer(reshard_after_forward=2)
    x = shard_batch(own_rows(inputs(), index, count), model)
    model(x)
    assert local_shape(model.kernel) == (8, 16)
    output = model(x)
    assert_sharded(model, jax.device_count())
    np.testing.assert_allclose(to_host(output), expected_output(), 1e-5, 1e-6)


def check_keeping_after_forward(model: Any, index: int, count: int) -> None:
    model = layer(reshard_after_forward=False)
    x = shard_batch(own_rows(inputs(), index, count), model)
    model(x)
    assert local_shape(model.kernel) == (8, 16)
    model.reset_iter_state()
    assert_sharded(model, jax.device_count())


def check_state_dict(model: Any, index: int, count: int) -> None:
    names = list(model.state_dict())
    assert names == list(helpers.shard_blocks(make_transformer()).state_dict())
    assert "blocks.0.up.kernel" in names
    for name, x in model.state_dict().items():
        assert isinstance(x, jax.Array), name
        assert not x.is_fully_addressable, name
        assert x.addressable_shards[0].data.shape == local_shape(x), name


def check_load_state_dict(model: Any, index: int, count: int) -> None:
    """From full host arrays, those of process 0 and those of others alike."""
    model = layer()
    full = {
        "bias": np.arange(16, dtype=np.float32),
        "kernel": np.arange(128, dtype=np.float32).reshape(8, 16),
    }
    for state in (full, layer().state_dict(), full):
        model.load_state_dict(state)
    assert_sharded(model, jax.device_count())
    for shard in model.kernel.get_raw_value().addressable_shards:
        np.testing.assert_array_equal(
            np.asarray(shard.data), full["kernel"][shard.index]
        )
    x = shard_batch(own_rows(inputs(), index, count), model)
    want = inputs() @ full["kernel"] + full["bias"]
    np.testing.assert_allclose(to_host(model(x)), want, 1e-5, 1e-5)


def check_writing_a_parameter(model: Any, index: int, count: int) -> None:
    model = layer()
    model.kernel[...] = np.full((8, 16), 2, np.float32)
    model.bias.set_value(np.ones(16, np.float32))
    assert_sharded(model, jax.device_count())
    x = shard_batch(own_rows(inputs(), index, count), model)
    want = 2 * inputs().sum(1, keepdims=True) + np.ones(16)
    np.testing.assert_allclose(to_host(model(x)), want, 1e-5, 1e-5)


def check_birth_in_jit(model: Any, index: int, count: int) -> None:
    model = nnx.jit(layer)()
    assert_sharded(model, jax.device_count())
    want = nnx.Linear(8, 16, rngs=nnx.Rngs(0)).kernel[...]
    np.testing.assert_array_equal(to_host(model.kernel.get_raw_value()), want)


def check_birth_without_values(model: Any, index: int, count: int) -> None:
    model = fully_shard(nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))))
    full = {"bias": np.ones(16, np.float32), "kernel": np.ones((8, 16), np.float32)}
    model.load_state_dict(full)
    assert_sharded(model, jax.device_count())


def check_reports(model: Any, index: int, count: int) -> None:
    """Printing in one process alone neither waits for the others nor fetches."""
    if index == count - 1:
        description = fsdp_jax.describe(model)
        assert description.num_shards == jax.device_count()
        assert "blocks.0 (Block)" in str(description)
        rows = {row.path: row for row in description.rows}
        kernel = model.blocks[0].up.kernel
        assert rows["blocks.0.up.kernel"].local_shape == local_shape(kernel)
        assert local_shape(kernel) == (16 // jax.device_count(), 32)
        for text in (repr(model), str(model), repr(kernel), repr(model.state_dict())):
            assert "32" in text
        assert len(model.state_dict()) == len(rows)
        assert "kernel" in repr(nnx.state(model))
    sync("reports")


def check_pickle(model: Any, index: int, count: int) -> None:
    for pickled in (model, model.head.kernel):
        with pytest.raises(RuntimeError, match="kernel|bias|embedding") as caught:
            pickle.dumps(pickled)
        assert "processes" in str(caught.value)
        assert "state_dict" in str(caught.value)


def check_rows_that_do_not_divide(model: Any, index: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"batch\['x'\] has 3 rows.* 2 devices"):
        shard_batch({"x": np.ones((3, 8), np.float32)}, model)
    step = fsdp_jax.value_and_grad(helpers.next_token_loss)
    with pytest.raises(ValueError, match="argument 'ids' has size 3 on dim 0.*devices"):
        step(model, np.ones((3, 4), np.int32))
    sync("rows")


def check_uneven_rows(model: Any, index: int, count: int) -> None:
    """A loader that ends earlier in one process is noticed before anything hangs."""
    rows = 2 * (index + 1)
    with pytest.raises(ValueError, match=r"batch\['x'\].*rows.*process"):
        shard_batch({"x": np.ones((rows, 8), np.float32)}, model)


def check_padding(model: Any, index: int, count: int) -> None:
    plain: Any = nnx.Linear(8, 13, rngs=nnx.Rngs(0))
    odd: Any = nnx.Linear(8, 13, rngs=nnx.Rngs(0))
    fully_shard(odd, uneven="pad", shard_placement_fn=lambda _: fsdp_jax.Shard(-1))
    assert odd.kernel.shape == (8, 13)
    assert local_shape(odd.kernel) == (8, -(-13 // jax.device_count()))
    np.testing.assert_array_equal(to_host(odd.kernel[...]), plain.kernel[...])
    odd.bias[...] = np.arange(13, dtype=np.float32)
    plain.bias[...] = np.arange(13, dtype=np.float32)
    x = shard_batch(own_rows(inputs(), index, count), odd)
    np.testing.assert_allclose(to_host(odd(x)), plain(inputs()), 1e-5, 1e-6)
    tx = optax.adamw(1e-2, eps=1e-3)
    ours = fsdp_jax.Optimizer(odd, tx)
    twins = nnx.Optimizer(plain, tx, wrt=nnx.Param)

    def loss(m: Any, x: Any) -> Any:
        return (m(x) ** 2).mean()

    ours.update(odd, fsdp_jax.grad(loss)(odd, x))
    twins.update(plain, nnx.grad(loss)(plain, jax.numpy.asarray(inputs())))
    state = odd.state_dict()
    np.testing.assert_allclose(to_host(state["kernel"]), plain.kernel[...], 1e-5, 1e-6)
    np.testing.assert_allclose(to_host(state["bias"]), plain.bias[...], 1e-5, 1e-6)
    odd.load_state_dict({name: to_host(x) for name, x in state.items()})
    if index == 0:  # fetches nothing of the others
        assert "(8, 13)" in repr(odd)


def check_check(model, index, count):
    from jax.experimental import multihost_utils

    batch = [own_rows(np.asarray(x), index, count) for x in helpers.regression_batch()]
    net = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))

    def loss(model, x, y, weights):
        table = jax.numpy.tile(weights, 8 // len(weights))
        return jax.numpy.mean((model(x) - y) ** 2 * table)

    batch = shard_batch(tuple(batch), net)
    report = fsdp_jax.check(net, loss, *batch, np.arange(8.0, dtype=np.float32))
    assert report.ok
    assert {row.rule for row in report.rows} == {"cut argument"}
    told = np.frombuffer(report.to_json().encode(), np.uint8).astype(np.int32)
    everyone = multihost_utils.process_allgather(told)
    assert (everyone == told).all()


CHECKS = [
    check_check,
    check_padding,
    check_shard_batch,
    check_typed_keys,
    check_masks_and_statistics,
    check_global_view,
    check_eager_forward,
    check_eager_gradients,
    check_shard_map,
    check_replicas_in_other_processes,
    check_a_batch_beside_another_axis,
    check_unshard_and_reshard,
    check_a_number_of_forwards,
    check_keeping_after_forward,
    check_state_dict,
    check_load_state_dict,
    check_writing_a_parameter,
    check_birth_in_jit,
    check_birth_without_values,
    check_reports,
    check_pickle,
    check_rows_that_do_not_divide,
    check_uneven_rows,
]


# --- the groups, and the tests that read their notes ------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_group(folder: Path, count: int, devices: int, name: str) -> None:
    """Run `count` processes with some devices each; ends them all within the limit."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    environment = kept | {
        "XLA_FLAGS": xla_flags(devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    port = free_port()
    what = [str(count), str(port), str(folder), name]
    script = "import sys; from tests import test_processes; test_processes.main()"
    processes = []
    try:
        for index in range(count):
            with open(folder / f"{index}.txt", "wb") as log:
                command = [sys.executable, "-W", "error", "-c", script, str(index)]
                processes.append(
                    subprocess.Popen(
                        [*command, *what],
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        deadline = time.monotonic() + TIME_LIMIT
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def main() -> None:
    """Entry of one process."""
    index, count, port, folder, name = sys.argv[1:]
    worker(int(index), int(count), int(port), Path(folder), name)


def outcome(folder: Path, index: int, name: str) -> str:
    """What process `index` noted of a check, or why there is nothing."""
    notes = folder / f"{index}.json"
    values = json.loads(notes.read_text()) if notes.exists() else {}
    log = (folder / f"{index}.txt").read_text(errors="replace")[-3000:]
    return values.get(name, f"not reached after {list(values)}; its output:\n{log}")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notes of two processes with two devices each that did every check."""
    folder = tmp_path_factory.mktemp("two")
    run_group(folder, count=2, devices=2, name="transformer")
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notes of four processes with one device each that trained."""
    folder = tmp_path_factory.mktemp("four")
    run_group(folder, count=4, devices=1, name="mlp")
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Notes of two processes with one device each that trained."""
    folder = tmp_path_factory.mktemp("pair")
    run_group(folder, count=2, devices=1, name="mlp")
    return folder


@pytest.mark.parametrize(
    ("group", "count", "name"),
    [
        pytest.param("two", 2, "transformer", marks=pytest.mark.slow),
        pytest.param("four", 4, "mlp", marks=pytest.mark.slow),
        ("pair", 2, "mlp"),
    ],
)
def test_processes_that_train_on_their_own_rows_agree_with_one(
    request, group, count, name
):
    folder = request.getfixturevalue(group)
    task = task_of(name)
    model = task.make_model()
    optimizer = nnx.Optimizer(model, transformation(), wrt=nnx.Param)
    losses = train_steps(nnx.value_and_grad, task.loss, model, optimizer, *task.batch)
    flat = nnx.to_flat_state(nnx.state(model))
    final = {".".join(map(str, path)): np.asarray(v[...]) for path, v in flat}
    assert losses[-1] < losses[0]
    for index in range(count):
        text = outcome(folder, index, "train")
        assert text == "ok", f"process {index}:\n{text}"
        got = dict(np.load(folder / f"{index}.npz"))
        np.testing.assert_allclose(got.pop("losses"), losses, rtol=1e-5)
        assert list(got) == list(final)
        for key, value in final.items():
            np.testing.assert_allclose(got[key], value, 1e-5, 1e-6, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", [c.__name__.removeprefix("check_") for c in CHECKS])
def test_in_every_process(two, name):
    for index in range(2):
        text = outcome(two, index, name)
        assert text == "ok", f"process {index}:\n{text}"
