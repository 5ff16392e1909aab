"""`fsdp_jax.plan`: topologies, the plan of a step, the command, and every refusal.

Most tests plan for simulated CPU devices that are declared absent (`absent`), so that
they need no compiler but JAX's own; the marked ones compile for real TPUs and GPUs.
"""

import inspect
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import _build, _plan, _report_table, _topology, fully_shard
from fsdp_jax._mesh import MeshInfo
from fsdp_jax.plan import (
    BuildError,
    CompileError,
    MissingCompilerError,
    Plan,
    PlanError,
    TopologyError,
    main,
)
from tests import helpers

ROOT = pathlib.Path(__file__).parent.parent
THIS = f"{pathlib.Path(__file__)}"
GIB = 1024**3

GPU_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": "true"}

# What the compilers said, letter for letter.
OVERFLOWS = {
    "libtpu 0.0.42.1": "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (17.50G) exceeds available HBM (15.75G).",
    "libtpu 0.0.50.1": "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of "
    "memory on HBM, the total memory required for HLO temporaries (17.50G) exceeds "
    "available HBM (15.75G). HLO module: jit_f.\nSee https://openxla.org/xla/errors/"
    "error_1000 for more details.",
    "other units": "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (17920.00M) exceeds available HBM (16515072K).",
    "after layout": "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of "
    "memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded hbm capacity by "
    "1.75G.",
}


# --- builds -----------------------------------------------------------------------


def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = fsdp_jax.value_and_grad(helpers.mean_square)(model, x, y)
    optimizer.update(model, grads)
    return loss


def mesh_over(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), ("fsdp",))


def abstract_model(devices: list[Any]) -> Any:
    model = nnx.eval_shape(lambda: helpers.MLP(nnx.Rngs(0)))
    return helpers.shard_blocks(model, mesh=mesh_over(devices))


def build(devices: list[Any]) -> Any:
    """A training step that donates its state, as a user would write it."""
    model = abstract_model(devices)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-3))
    rows = 2 * len(devices)
    batch = [jax.ShapeDtypeStruct((rows, n), jnp.float32) for n in (16, 8)]
    step = nnx.jit(train_step, donate_argnums=(0, 1))
    return step, (model, optimizer, *fsdp_jax.shard_batch(batch, model))


def build_nano(devices: list[Any]) -> Any:
    """Two transformer blocks of width 256; the batch is not placed."""

    def step(model: Any, optimizer: Any, ids: Any) -> Any:
        loss, grads = fsdp_jax.value_and_grad(helpers.next_token_loss)(model, ids)
        optimizer.update(model, grads)
        return loss

    model = nnx.eval_shape(lambda: helpers.Transformer(nnx.Rngs(0), 256))
    helpers.shard_blocks(model, mesh=mesh_over(devices))
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-3))
    ids = jax.ShapeDtypeStruct((len(devices), 128), jnp.int32)
    return nnx.jit(step, donate_argnums=(0, 1)), (model, optimizer, ids)


def build_undonated(devices: list[Any]) -> Any:
    return nnx.jit(train_step), build(devices)[1]


def build_too_large(devices: list[Any]) -> Any:
    """A product of 64 GiB on each of two devices."""
    sharding = NamedSharding(mesh_over(devices), PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32, sharding=sharding)
    return jax.jit(lambda x: (x @ x.T).sum()), (x,)


def build_far_too_large(devices: list[Any]) -> Any:
    sharding = NamedSharding(mesh_over(devices), PartitionSpec())
    x = jax.ShapeDtypeStruct((2**17, 2**18), jnp.float32, sharding=sharding)
    return jax.jit(lambda x: x @ x.T), (x,)


def build_concrete(devices: list[Any]) -> Any:
    fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh_over(devices))


def build_with_optimizer_of_nnx(devices: list[Any]) -> Any:
    nnx.Optimizer(abstract_model(devices), optax.adam(1e-3), wrt=nnx.Param)


def build_evaluation(devices: list[Any]) -> Any:
    """A `jax.jit` of a state and a numpy array that was not placed."""
    graphdef, state = nnx.split(abstract_model(devices))

    def evaluate(state: Any, x: Any) -> Any:
        return nnx.merge(graphdef, state)(x)

    return jax.jit(evaluate), (state, np.zeros((len(devices), 16), np.float32))


def build_with_random_state(devices: list[Any]) -> Any:
    model = nnx.eval_shape(
        lambda: nnx.Sequential(
            nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        )
    )
    fully_shard(model, mesh=mesh_over(devices))
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return nnx.jit(lambda model, x: model(x)), (model, batch)


# Builds that are refused, and what the sentence must say.


def build_that_raises(devices: list[Any]) -> Any:
    raise KeyError("width")


def build_no_pair(devices: list[Any]) -> Any:
    return 3


def build_three(devices: list[Any]) -> Any:
    return (*build(devices), None)


def build_not_jitted(devices: list[Any]) -> Any:
    return train_step, build(devices)[1]


def build_bare_argument(devices: list[Any]) -> Any:
    return jax.jit(lambda x: x), jnp.ones(3)


def build_sharding_nothing(devices: list[Any]) -> Any:
    return jax.jit(lambda x: x), (jnp.ones(3),)


def build_bad_shapes(devices: list[Any]) -> Any:
    step, (model, optimizer, x, _) = build(devices)
    return step, (model, optimizer, x, jnp.ones((16, 7)))


NOT_A_FUNCTION = 3

REFUSED_BUILDS: list[tuple[Callable, str]] = [
    (build_that_raises, r"build_that_raises raised KeyError: 'width' \(.*test_plan.py"),
    (build_no_pair, r"must return \(step, args\).*returned an object of type int"),
    (build_three, r"must return \(step, args\).*returned a tuple of 3"),
    (build_not_jitted, "not jitted: wrap it in nnx.jit or jax.jit"),
    (build_bare_argument, r"the arguments as a tuple, got .*Array.*\(model,\)"),
    (build_sharding_nothing, "none of which is sharded over the devices"),
    (build_bad_shapes, r"the step cannot be traced: .*Error: .*\(.*helpers.py"),
]


# --- topologies -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chip", "shape"),
    [
        ("v5e:4x4", "v5e", (4, 4)),
        ("v5e:1x1", "v5e", (1, 1)),
        ("v5p:2x2x1", "v5p", (2, 2, 1)),
        ("v6e:16x16", "v6e", (16, 16)),
        ("v4:4x4x4", "v4", (4, 4, 4)),
        ("tpu7x:2x2x1", "tpu7x", (2, 2, 1)),
        ("h100:8", "h100", (8,)),
        ("h100:64", "h100", (64,)),
        ("a100:3", "a100", (3,)),
    ],
)
def test_a_topology_is_read(name, chip, shape):
    topology = _topology.parse(name)
    assert (topology.chip, topology.shape, str(topology)) == (chip, shape, name)
    assert topology.is_gpu == (chip in _topology.GPUS)
    assert topology.hbm_bytes > 10 * 10**9


def test_slices_are_told_of():
    topology = _topology.parse("v5e:16x16", 2)
    assert (topology.num_slices, str(topology)) == (2, "2 x v5e:16x16")


@pytest.mark.parametrize("name", ["v6e-16", "v5litepod-16", "foo:2x2", "", "8", 5])
def test_an_unknown_topology_is_refused_with_examples(name):
    with pytest.raises(TopologyError, match="unknown topology .*v5e:4x4.*h100:8"):
        _topology.parse(name)


@pytest.mark.parametrize(
    ("name", "num_slices", "text"),
    [
        ("v5e:4x4x4", 1, "must have 2 dims, such as v5e:16x16"),
        ("v6e:16", 1, "must have 2 dims"),
        ("v5p:4x4", 1, "must have 3 dims, such as v5p:4x4x4"),
        ("v5e:0x4", 1, "no such slice"),
        ("v5e:32x32", 1, "largest has 256 chips.*--slices"),
        ("v5e:4x4", 0, "num_slices must be at least 1, got 0"),
        ("v5e:4x4", 1.5, "num_slices must be at least 1, got 1.5"),
        ("h100:12", 1, "multiple of 8"),
        ("h100:0", 1, "number of GPUs"),
        ("h100:2x4", 1, "number of GPUs"),
        ("h100:8", 2, "GPUs have no slices.*h100:16"),
    ],
)
def test_a_shape_that_no_machine_has_is_refused(name, num_slices, text):
    with pytest.raises(TopologyError, match=text):
        _topology.parse(name, num_slices)


@pytest.mark.parametrize("gpu", _topology.GPUS.values(), ids=list(_topology.GPUS))
def test_a_gpu_is_described_by_its_published_figures(gpu):
    text = gpu.config()
    fields = dict(re.findall(r'(\w+): ("[^"]*"|\S+)', text))
    assert text.count("{") == text.count("}")
    assert fields["core_count"] == str(gpu.num_cores)
    assert fields["device_memory_size"] == str(gpu.hbm_bytes)
    assert int(fields["shared_memory_per_block_optin"]) < int(
        fields["shared_memory_per_core"]
    )
    assert ("ACCELERATED_FEATURES" in text) == (gpu.capability == (9, 0))


def test_the_environment_of_the_compilers_lasts_for_the_plan_only(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), _topology.environment():
        assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
        raise KeyError
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "extra"), [("v5e:2x2", "tpu-plan"), ("h100:8", "gpu-plan")]
)
def test_a_missing_compiler_names_the_extra(name, extra, monkeypatch, capsys):
    monkeypatch.setattr(_topology, "_installed", lambda module: False)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(MissingCompilerError, match=r"pip install 'fsdp_jax\["):
        fsdp_jax.plan(build, name)
    assert main([f"{THIS}:build", "--topology", name]) == 2
    assert f"pip install 'fsdp_jax[{extra}]'" in one_line(capsys)


@pytest.mark.parametrize("extra", ["tpu-plan", "gpu-plan"])
def test_the_extras_exist(extra):
    assert f"{extra} = [" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("libtpu", "v5e:2x2", "tpu-plan"),
        ("jax-cuda12-plugin", "h100:8", "gpu-plan"),
        ("jax-cuda13-plugin", "h100:8", "gpu-plan"),
    ],
)
def test_a_compiler_of_another_version_is_noticed(package, name, extra, monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    versions = {package: "0.0.1"}
    monkeypatch.setattr(_topology, "_version_of", lambda p: versions.get(p, ""))
    text = _topology.parse(name).misfit()
    assert text.startswith(f"{package} 0.0.1 is not the ")
    assert f"that jax {jax.__version__} asks for" in text and extra in text
    wanted = re.findall(r"not the (\S+) that", text)[0]
    versions[package] = wanted.replace("*", "7")
    assert _topology.parse(name).misfit() == ""
    versions.clear()
    assert _topology.parse(name).misfit() == ""


def test_a_compiler_of_another_version_explains_its_failure(monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("INTERNAL: Mismatched PJRT plugin")

    monkeypatch.setattr(_topology, "_installed", lambda module: True)
    monkeypatch.setattr(_topology, "_version_of", lambda package: "0.0.1")
    monkeypatch.setattr(_topology.topologies, "get_topology_desc", fail)
    for name in ("v5e:2x2", "h100:8"):
        text = r"does not start: .*Mismatched PJRT plugin .* 0\.0\.1 is not the"
        with pytest.raises(MissingCompilerError, match=text):
            fsdp_jax.plan(build, name)


# --- the plan, on simulated devices -----------------------------------------------


@pytest.fixture
def absent(monkeypatch) -> None:
    """Eight simulated devices stand for the absent ones, whatever was asked for."""
    monkeypatch.setattr(_topology.Topology, "devices", lambda self: jax.devices())
    monkeypatch.setattr(MeshInfo, "compile_only", True)


@pytest.fixture
def small_hbm(monkeypatch) -> None:
    """Devices with one KiB of memory."""
    monkeypatch.setattr(_topology.Topology, "hbm_bytes", 1024)


@pytest.fixture
def refusing_compiler(monkeypatch) -> None:
    """A compiler that says at once that the step needs too much."""
    refuse_with(monkeypatch, OVERFLOWS["libtpu 0.0.42.1"])


def refuse_with(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def refuse(self: Any, compiler_options: Any = None) -> None:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)


@pytest.fixture(scope="module")
def planned() -> Plan:
    """The plan of `build` for eight devices, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_topology.Topology, "devices", lambda self: jax.devices())
        patch.setattr(MeshInfo, "compile_only", True)
        return fsdp_jax.plan(build, "v5e:2x4")


def one_line(capsys: pytest.CaptureFixture) -> str:
    """The one line on stderr, after nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fsdp_jax.plan: ") and err.endswith("\n")
    assert err.count("\n") == 1 and "Traceback" not in err
    return err


def parameter_bytes(model: Any, num_devices: int) -> int:
    """Bytes of one device's pieces, all parameters being cut."""
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert all(fsdp_jax.local_shape(p) != p.shape for p in params)
    return sum(p.size * p.dtype.itemsize for p in params) // num_devices


def test_a_plan_tells_memory_by_kind(planned):
    parameters = parameter_bytes(abstract_model(jax.devices()), 8)
    assert planned.parameter_bytes == parameters
    assert planned.moment_bytes == 2 * parameters + 2 * 4  # the two counters of AdamW
    assert planned.other_argument_bytes == 2 * (16 + 8) * 4
    at_rest = (
        planned.parameter_bytes + planned.moment_bytes + planned.other_argument_bytes
    )
    assert planned.working_bytes == planned.peak_bytes - at_rest > 0
    assert planned.fits and planned.hbm_bytes == int(15.75 * GIB)
    assert (planned.topology, planned.num_slices, planned.num_devices) == (
        "v5e:2x4",
        1,
        8,
    )
    assert planned.device_kind == jax.devices()[0].device_kind
    assert planned.compile_seconds > 0
    assert dict(planned.versions)["jax"] == jax.__version__
    assert planned.notes == () or "asks for" in planned.notes[0]


def test_a_plan_has_the_report_of_the_step(planned):
    assert planned.report.count("reduce-scatter") == planned.report.count(
        "forward gather"
    )
    assert planned.report.schedule is not None
    assert planned.async_share == planned.report.async_share is not None
    assert planned.hidden_share == planned.report.hidden_share is not None
    assert (
        planned.gathered_bytes == planned.report.memory.gathered_peak_bytes is not None
    )


def test_a_plan_makes_no_array(absent):
    leaves = jax.tree.leaves(build(jax.devices())[1])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert all(isinstance(leaf.sharding, NamedSharding) for leaf in leaves)


@pytest.mark.parametrize("build", [build_evaluation, build_with_random_state])
def test_steps_of_other_kinds_can_be_planned(build, absent):
    plan = fsdp_jax.plan(build, "v5e:2x4")
    assert plan.fits and plan.moment_bytes == 0 and plan.notes == ()
    assert plan.parameter_bytes > 0 and plan.other_argument_bytes > 0


def test_what_is_not_donated_is_told_of(absent, planned):
    plan = fsdp_jax.plan(build_undonated, "v5e:2x4")
    assert "nothing is donated" in plan.notes[-1]
    assert "nothing is donated" in str(plan)
    assert not any("donated" in note for note in planned.notes)


def test_a_plan_prints_as_a_table(planned):
    text = str(planned)
    assert text.startswith("fits v5e:2x4 (8 devices): needs ")
    for kind in ("parameters", "optimizer state", "other arguments", "peak"):
        assert f"│ {kind} " in text
    assert "reduce-scatter" in text and f"jax {jax.__version__}" in text
    file = io.StringIO()
    planned.table(file)
    assert file.getvalue() == text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_plan_is_one_json_object(planned):
    told = json.loads(planned.to_json())
    assert told["fits"] is True and told["topology"] == "v5e:2x4"
    assert told["peak_bytes"] == planned.peak_bytes
    assert told["versions"]["jax"] == jax.__version__
    assert told["report"] == json.loads(planned.report.to_json())


def test_a_plan_cannot_be_changed(planned):
    with pytest.raises(AttributeError):
        planned.fits = False


def test_a_peak_over_the_memory_does_not_fit(absent, small_hbm):
    plan = fsdp_jax.plan(build, "h100:8")
    assert not plan.fits and plan.peak_bytes > plan.hbm_bytes == 1024
    text = (
        r"^does not fit h100:8 \(8 devices\): needs [\d.]+ KiB, a device has 1.00 KiB"
    )
    assert re.match(text, plan.verdict) and plan.report.schedule is not None


@pytest.mark.parametrize("text", OVERFLOWS.values(), ids=list(OVERFLOWS))
def test_the_compilers_word_that_it_does_not_fit_is_understood(
    text, absent, monkeypatch
):
    refuse_with(monkeypatch, text)
    plan = fsdp_jax.plan(build, "v5e:2x4")
    assert not plan.fits
    assert (plan.peak_bytes, plan.hbm_bytes) == (int(17.5 * GIB), int(15.75 * GIB))
    assert "at least 17.50 GiB, a device has 15.75 GiB" in plan.verdict
    assert plan.parameter_bytes and plan.moment_bytes  # known without compiling
    assert plan.report.count("forward gather") > 0
    assert plan.report.schedule is plan.hidden_share is plan.gathered_bytes is None
    assert "refused after" in str(plan) and json.loads(plan.to_json())["fits"] is False


def test_another_refusal_of_the_compiler_is_an_error(absent, monkeypatch):
    refuse_with(monkeypatch, "RESOURCE_EXHAUSTED: Ran out of memory in space vmem.")
    with pytest.raises(CompileError, match="refused the step: .*space vmem"):
        fsdp_jax.plan(build, "v5e:2x4")


@pytest.mark.parametrize(("build", "text"), REFUSED_BUILDS)
def test_what_cannot_be_planned_is_refused(build, text, absent):
    with pytest.raises(BuildError, match=text):
        fsdp_jax.plan(build, "v5e:2x4")


def test_a_model_on_the_devices_of_this_machine_is_refused():
    with pytest.raises(BuildError, match=r"devices of this machine .*cpu:0"):
        _build.call(build_evaluation, jax.devices())


def test_options_get_the_types_that_the_compilers_take():
    options = {"a": True, "b": "false", "c": 3, "d": "-4", "e": "text"}
    tpu = _plan._options(_topology.parse("v5e:2x2"), options)
    assert tpu == {"a": "true", "b": "false", "c": "3", "d": "-4", "e": "text"}
    gpu = _plan._options(_topology.parse("h100:8"), options)
    assert gpu == {"a": True, "b": False, "c": 3, "d": -4, "e": "text"}
    assert _plan._options(_topology.parse("h100:8"), {}) is None


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (2**44, "16.00 TiB")],
)
def test_bytes_are_readable(size_bytes, text):
    assert _report_table.human(size_bytes, 2) == text


# --- abstract optimizers and batches ----------------------------------------------


def test_an_optimizer_on_absent_devices_has_the_shardings_of_a_real_one(
    absent, monkeypatch
):
    abstract = build(jax.devices())[1][1]
    pairs = dict(jax.tree_util.tree_leaves_with_path(nnx.state(abstract)))
    model = helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)))
    monkeypatch.setattr(MeshInfo, "compile_only", False)
    real = fsdp_jax.Optimizer(model, optax.adamw(1e-3))
    real_pairs = dict(jax.tree_util.tree_leaves_with_path(nnx.state(real)))
    assert list(pairs) == list(real_pairs)
    for path, value in real_pairs.items():
        found = pairs[path]
        assert (found.shape, found.dtype) == (value.shape, value.dtype), path
        assert found.sharding == value.sharding, path


def test_an_optimizer_on_absent_devices_computes_shapes_only(absent):
    adam, initialised = optax.adam(1e-3), []

    def init(params: Any) -> Any:
        initialised.extend(jax.tree.leaves(params))
        return adam.init(params)

    tx = optax.GradientTransformation(init, adam.update)
    optimizer = fsdp_jax.Optimizer(abstract_model(jax.devices()), tx)
    assert initialised and all(isinstance(x, Tracer) for x in initialised)
    assert optimizer.tx is tx


def test_shard_batch_places_shapes_without_making_arrays(mesh8):
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    batch = {
        "x": jax.ShapeDtypeStruct((16, 3), jnp.bfloat16),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
    }
    placed = fsdp_jax.shard_batch(batch, model)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in placed.values())
    assert (placed["x"].shape, placed["x"].dtype) == ((16, 3), jnp.bfloat16)
    assert placed["x"].sharding == NamedSharding(mesh8, PartitionSpec("fsdp"))
    assert placed["n"].sharding == NamedSharding(mesh8, PartitionSpec())
    with pytest.raises(ValueError, match=r"shard_batch: batch has size 3 on dim 0"):
        fsdp_jax.shard_batch(jax.ShapeDtypeStruct((3,), jnp.int32), model)


def test_shard_batch_of_arrays_on_absent_devices_gives_shapes(mesh8, absent):
    model = abstract_model(jax.devices())
    placed = fsdp_jax.shard_batch((np.zeros((8, 6)), 1.0), model)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in placed)
    assert fsdp_jax.local_shape(placed[0]) == (1, 6)


# --- the command ------------------------------------------------------------------


def test_the_command_prints_the_plan(absent, capsys):
    assert main([f"{THIS}:build", "--topology", "v5e:2x4"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("fits v5e:2x4 (8 devices)") and err == ""


def test_the_command_prints_json(absent, capsys):
    arguments = ["tests.test_plan:build", "--topology", "v5e:2x4", "--slices", "2"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is True and told["num_slices"] == 2


def test_the_command_draws_the_schedule(absent, tmp_path, capsys):
    path = tmp_path / "schedule.svg"
    arguments = [f"{THIS}:build", "--topology", "v5e:2x4", "--timeline", str(path)]
    assert main(arguments) == 0
    assert path.read_text().lstrip().startswith("<svg")


def test_a_picture_that_cannot_be_written_is_an_error(absent, tmp_path, capsys):
    path = tmp_path / "no" / "such.svg"
    arguments = [f"{THIS}:build", "--topology", "v5e:2x4", "--timeline", str(path)]
    assert main(arguments) == 2
    assert "such.svg" in one_line(capsys)


def test_the_command_fails_for_a_step_that_does_not_fit(
    absent, refusing_compiler, capsys
):
    assert main([f"{THIS}:build", "--topology", "v5e:2x4", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert err == (
        "fsdp_jax.plan: does not fit v5e:2x4 (8 devices): needs at least 17.50 GiB, a "
        "device has 15.75 GiB.\n"
    )


@pytest.mark.parametrize(
    ("build", "text"),
    [
        ("no_such_module:build", "there is no module 'no_such_module' here"),
        ("no_such_file.py:build", "there is no file no_such_file.py"),
        ("tests.test_plan", "not MODULE:BUILD"),
        ("tests.test_plan:", "not MODULE:BUILD"),
        ("tests.test_plan:nope", "'nope' does not exist in tests.test_plan"),
        ("tests.test_plan:NOT_A_FUNCTION", "'NOT_A_FUNCTION' is no function"),
        ("tests.test_plan:build_no_pair", "must return (step, args)"),
        ("tests.test_plan:build_that_raises", "raised KeyError: 'width'"),
        ("tests.test_plan:build_bad_shapes", "the step cannot be traced"),
    ],
)
def test_the_command_refuses_a_build_in_one_line(build, text, absent, capsys):
    assert main([build, "--topology", "v5e:2x4"]) == 2
    line = one_line(capsys)
    assert text in line and "BuildError" not in line


def test_a_module_that_fails_to_import_is_told_of(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_train.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken_train", str(tmp_path / "broken_train.py")):
        assert main([f"{name}:build", "--topology", "v5e:2x4"]) == 2
        line = one_line(capsys)
        assert (
            "raised ModuleNotFoundError: No module named 'no_such_dependency'" in line
        )
        assert "broken_train.py, line 1" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--topology", "v6e-16"],
        ["--topology", "v5e:4x4x4"],
        ["--topology", "v5e:2x2", "--slices", "0"],
        ["--topology", "v5e:2x2", "--option", "name"],
        ["--topology", "v5e:2x2", "--option", "=value"],
    ],
)
def test_the_command_refuses_bad_arguments_in_one_line(arguments, capsys):
    assert main(["tests.test_plan:build", *arguments]) == 2
    assert one_line(capsys)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    """Run Python in a process of its own, at the root of the repository."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_helps(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and "MODULE:BUILD" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_starts_without_a_warning_and_ends_with_its_status():
    command = ["-W", "error::RuntimeWarning", "-m", "fsdp_jax.plan"]
    done = run(*command, "tests.test_plan:build", "--topology", "v6e-16")
    assert done.returncode == 2
    assert done.stderr.rstrip().splitlines()[-1].startswith("fsdp_jax.plan: unknown")
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "used"), [({}, "cpu"), ({"JAX_PLATFORMS": "tpu"}, "tpu")]
)
def test_the_command_leaves_the_chips_of_the_machine_alone(asked, used):
    code = (
        "from fsdp_jax.plan import main\n"
        "assert main(['tests.test_plan:build', '--topology', 'v6e-16']) == 2\n"
        "import jax; print(jax.config.jax_platforms)\n"
    )
    done = run("-c", code, **asked)
    assert done.stdout.strip() == used, done.stderr


@pytest.mark.slow
def test_plan_is_callable_and_a_module_in_every_order_of_imports():
    orders = [
        "import fsdp_jax; Plan = fsdp_jax.plan.Plan",
        "from fsdp_jax.plan import Plan; import fsdp_jax",
        "import fsdp_jax.plan; from fsdp_jax.plan import Plan",
        "from fsdp_jax import plan; import fsdp_jax; Plan = plan.Plan",
    ]
    code = (
        "assert callable(fsdp_jax.plan) and fsdp_jax.plan.Plan is Plan\n"
        "try:\n    fsdp_jax.plan(None, 'v6e-16')\n"
        "except ValueError as error:\n    print(error)\n"
        "import sys\n"
        "for name in [n for n in sys.modules if n.startswith('fsdp_jax')]:\n"
        "    del sys.modules[name]\n"
    )
    done = run("-c", "\n".join(f"{imports}\n{code}" for imports in orders))
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert sum(line.startswith("unknown topology 'v6e-16'") for line in told) == 4


def test_the_module_is_called_as_the_function():
    called, function = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(target).parameters.values()
        ]
        for target in (fsdp_jax.plan, _plan.plan)
    )
    assert called == function
    module = sys.modules["fsdp_jax.plan"]
    assert fsdp_jax.plan is module and module.plan is _plan.plan
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        fsdp_jax.plam  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_error_of_a_plan_has_one_base():
    for error in (BuildError, CompileError, MissingCompilerError, TopologyError):
        assert issubclass(error, PlanError)


# --- the README's example ---------------------------------------------------------


def save_example(folder: pathlib.Path) -> list[str]:
    """Write the README's example as the file that its command names; the arguments."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"\$ python -m fsdp_jax.plan (.*)", text)
    name = command.split(".py:")[0] + ".py"
    assert code.startswith(f"# {name}\n")
    (folder / name).write_text(code)
    return command.split()


def test_the_example_of_the_readme_is_planned(absent, tmp_path, monkeypatch, capsys):
    arguments = save_example(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("fits v5e:4x4 ")


def test_the_readme_tells_every_chip_and_its_memory():
    text = (ROOT / "README.md").read_text().partition("### Planning")[2]
    for name, chip in _topology.TPUS.items():
        assert f"`{name}:" in text
        assert re.search(rf"\b{chip.hbm_bytes / GIB:.2f}\b", text)
    for name, chip in _topology.GPUS.items():
        assert f"`{name}:" in text
        assert re.search(rf"\b{chip.hbm_bytes // 10**9}\b", text)


# --- real compilers ---------------------------------------------------------------

needs_tpu_compiler = pytest.mark.needs_tpu_compiler
needs_gpu_compiler = pytest.mark.needs_gpu_compiler


@needs_tpu_compiler
def test_a_transformer_is_planned_for_a_tpu():
    plan = fsdp_jax.plan(build_nano, "v5e:2x2")
    assert plan.fits and plan.device_kind == "TPU v5 lite" and plan.num_devices == 4
    model = nnx.eval_shape(lambda: helpers.Transformer(nnx.Rngs(0), 256))
    sizes = [p.size * 4 for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert plan.parameter_bytes == sum(sizes) / 4  # float32, over 4 devices
    assert plan.moment_bytes == 2 * plan.parameter_bytes + 2 * 4
    at_rest = plan.parameter_bytes + plan.moment_bytes + plan.other_argument_bytes
    assert at_rest < plan.peak_bytes < at_rest + 4 * sum(sizes)
    assert plan.report.count("reduce-scatter") == plan.report.count("forward gather")
    assert plan.async_share is not None and plan.async_share > 0.5
    assert "libtpu" in dict(plan.versions)
    assert not any("donated" in note for note in plan.notes)


def build_offloaded(devices: list[Any], policy: Any = None) -> Any:
    """A scanned stack and its optimizer in host memory; the gradients are clipped."""

    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            make = nnx.vmap(lambda rngs: nnx.Linear(2048, 2048, rngs=rngs))
            self.layers = nnx.split_rngs(splits=2)(make)(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return fsdp_jax.scan_layers(self.layers, x, remat=True)

    model: Any = nnx.eval_shape(lambda: Stack(nnx.Rngs(0)))
    fully_shard(
        model.layers,
        mesh=mesh_over(devices),
        shard_placement_fn=lambda _: fsdp_jax.Shard(1),
        offload_policy=policy or fsdp_jax.CPUOffloadPolicy(),
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    optimizer = fsdp_jax.Optimizer(model, tx)
    rows = jax.ShapeDtypeStruct((16 * len(devices), 2048), jnp.float32)
    batch = fsdp_jax.shard_batch((rows, rows), model)
    return nnx.jit(train_step, donate_argnums=(0, 1)), (model, optimizer, *batch)


def assert_rests_on_the_host(plan: Plan) -> None:
    """Parameters and moments of `build_offloaded` count for the host alone."""
    parameters = 2 * (2048 * 2048 + 2048) * 4 // plan.num_devices
    assert plan.host_parameter_bytes == parameters
    assert plan.host_moment_bytes == 2 * parameters
    assert plan.host_other_argument_bytes == plan.parameter_bytes == 0
    assert plan.moment_bytes == 2 * 4  # the counters
    assert plan.other_argument_bytes == 2 * 16 * 2048 * 4
    text = str(plan)
    assert "memory of the host" in text
    assert re.search(r"│ parameters +│ +0 B │", text)
    assert "on host    parameters" in text
    told = json.loads(plan.to_json())
    assert told["host_moment_bytes"] == told["report"]["memory"]["host_moment_bytes"]


def test_host_memory_is_told_apart(absent, planned):
    assert_rests_on_the_host(fsdp_jax.plan(build_offloaded, "v5e:2x4"))
    assert planned.host_parameter_bytes == planned.host_moment_bytes == 0
    assert "host" not in str(planned)


@needs_tpu_compiler
def test_an_offloaded_step_is_planned_for_a_tpu():
    plan = fsdp_jax.plan(build_offloaded, "v5e:2x2")
    assert_rests_on_the_host(plan)
    at_rest = plan.host_parameter_bytes + plan.host_moment_bytes
    none = fsdp_jax.OffloadPolicy()
    plain = fsdp_jax.plan(lambda devices: build_offloaded(devices, none), "v5e:2x2")
    assert plan.peak_bytes < plain.peak_bytes
    assert plan.host_temporary_bytes and plan.host_temporary_bytes < 2 * at_rest
    assert not any("donated" in note for note in plan.notes)
    assert not any(r.group == "(partitioner)" for r in plan.report.rows)


@needs_tpu_compiler
def test_the_example_of_the_readme_is_planned_for_a_tpu(tmp_path, monkeypatch, capsys):
    arguments = save_example(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is True and told["num_devices"] == 16


@needs_tpu_compiler
@pytest.mark.parametrize("name", _topology.TPUS)
def test_the_memory_of_a_tpu_is_what_its_compiler_says(name):
    shape = "2x2" if _topology.TPUS[name].num_dims == 2 else "2x2x1"
    plan = fsdp_jax.plan(build_far_too_large, f"{name}:{shape}")
    assert not plan.fits and plan.peak_bytes > plan.hbm_bytes
    difference = plan.hbm_bytes - _topology.TPUS[name].hbm_bytes
    assert abs(difference) < 0.1 * GIB  # it varies by the version
    assert plan.num_devices == (8 if name == "tpu7x" else 4)


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("name", "slices", "count"), [("v5e:1x1", 1, 1), ("v5e:2x2", 3, 12)]
)
def test_one_chip_and_several_slices_are_topologies(name, slices, count):
    with _topology.environment():
        assert len(_topology.parse(name, slices).devices()) == count


@needs_tpu_compiler
def test_a_slice_that_the_compiler_does_not_know_is_refused(capsys):
    assert main(["tests.test_plan:build", "--topology", "v5e:3x3"]) == 2
    line = one_line(capsys)
    assert "the TPU compiler knows no slice 'v5e:3x3': " in line and "divisible" in line


@needs_tpu_compiler
def test_an_option_that_the_compiler_does_not_know_is_refused(capsys):
    arguments = ["tests.test_plan:build_evaluation", "--topology", "v5e:2x2"]
    assert main([*arguments, "--option", "no_such=true"]) == 2
    assert "No such compile option: 'no_such'" in one_line(capsys)


@needs_tpu_compiler
@pytest.mark.parametrize("build", [build_concrete, build_with_optimizer_of_nnx])
def test_arrays_on_absent_devices_are_refused(build):
    with pytest.raises(
        BuildError, match=r"does not exist \(.*test_plan.py.*eval_shape"
    ):
        fsdp_jax.plan(build, "v5e:2x2")


@needs_tpu_compiler
def test_the_command_needs_no_network_and_is_quiet(tmp_path):
    """In a network namespace of its own: there is no metadata server to be asked."""
    unshare = shutil.which("unshare")
    apart = [unshare or "", "-rn"]
    if not unshare or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("unshare -rn is not permitted here")
    arguments = ["tests.test_plan:build_evaluation", "--topology", "v5e:2x2", "--json"]
    done = subprocess.run(
        [*apart, sys.executable, "-m", "fsdp_jax.plan", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device_kind"] == "TPU v5 lite"
    # What a CUDA plugin says when JAX is imported is not ours.
    ours = [line for line in done.stderr.splitlines() if "TPU" in line or "tpu" in line]
    assert ours == []


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["h100:64", *(f"{gpu}:8" for gpu in _topology.GPUS)])
def test_a_step_is_planned_for_gpus(name):
    plan = fsdp_jax.plan(build, name, compiler_options=GPU_OPTIONS)
    chip, _, count = name.partition(":")
    assert plan.fits and plan.num_devices == int(count)
    assert plan.device_kind == _topology.GPUS[chip].name
    assert plan.hbm_bytes == _topology.GPUS[chip].hbm_bytes
    gathers = plan.report.count("forward gather")  # 64 cut none of these parameters
    assert plan.report.count("reduce-scatter") == gathers
    assert gathers > 0 or name == "h100:64"
    assert any(package.startswith("jax-cuda") for package, _ in plan.versions)


@needs_gpu_compiler
def test_a_step_that_does_not_fit_a_gpu_is_found_by_its_peak(capsys):
    arguments = ["tests.test_plan:build_too_large", "--topology", "h100:2"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out.startswith("does not fit h100:2 (2 devices): needs ")
    assert "at least" not in err and "a device has 74.51 GiB" in err


@pytest.mark.needs_gpu_compiler
def test_a_plan_with_the_measured_options_is_compiled_with_them(monkeypatch):
    seen = []
    wanted = fsdp_jax.compiler_options
    monkeypatch.setattr(
        "fsdp_jax._ordering.compiler_options",
        lambda devices: seen.append(devices) or wanted(devices),
    )
    plan = fsdp_jax.plan(build_nano, "h100:8", compiler_options="measured")
    assert plan.fits and len(seen[0]) == 8 and wanted(seen[0])
