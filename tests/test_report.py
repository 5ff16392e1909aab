"""`comm_report`: counts, bytes, memory and warnings, against formulas in the model.

Counts, dtypes and groups are those of the lowered program; order and memory those of
XLA for CPU, where every collective is synchronous. Other compilers: `test_hlo`.
"""

import functools
import json
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import CommReport, MixedPrecisionPolicy, comm_report
from fsdp_jax.report import GATHER, REDUCE_SCATTER, REGATHER
from tests import helpers


class Net(nnx.Module):
    """An embedding, blocks around skip connections, and a head."""

    def __init__(self, rngs: nnx.Rngs, num_blocks: int) -> None:
        self.embed = nnx.Embed(helpers.VOCABULARY, 16, rngs=rngs)
        self.blocks = nnx.List([helpers.Residual(rngs) for _ in range(num_blocks)])
        self.head = nnx.Linear(16, helpers.VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache  # nothing below runs a step
def make_step(num_blocks: int = 2, wrt: Any = nnx.Param, **kwargs: Any) -> Any:
    """A jitted AdamW step of a sharded model, and its arguments."""
    model = Net(nnx.Rngs(0), num_blocks)
    helpers.shard_blocks(model, mesh=helpers.mesh_of(8), **kwargs)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-3), wrt=wrt)

    @nnx.jit
    def step(model, optimizer, ids):
        loss_and_grads = fsdp_jax.value_and_grad(helpers.next_token_loss, wrt=wrt)
        loss, grads = loss_and_grads(model, ids)
        optimizer.update(model, grads)
        return loss

    return step, model, optimizer, helpers.token_batch()


@pytest.fixture(scope="module")
def report3() -> CommReport:
    """Three blocks, compiled for CPU."""
    return comm_report(*make_step(num_blocks=3))


def groups(report: CommReport, direction: str) -> set[str]:
    return {row.group for row in report.rows if row.direction == direction}


# --- collectives ------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("free", [None, False])
def test_collectives_by_group_as_a_formula_in_the_blocks(num_blocks, free):
    step, *args = make_step(num_blocks, reshard_after_forward=free)
    report = comm_report(step, *args, compiled=False)
    blocks = {f"blocks.{i}" for i in range(num_blocks)}
    # Every parameter is under the packing threshold: one collective per group.
    assert report.count(GATHER) == num_blocks + 1
    assert report.count(REGATHER) == (num_blocks if free is None else 0)
    assert report.count(REDUCE_SCATTER) == num_blocks + 1
    assert report.count("all-reduce") == 1  # the loss
    assert groups(report, GATHER) == {*blocks, "(root)"}
    assert groups(report, REGATHER) == (blocks if free is None else set())
    assert groups(report, REDUCE_SCATTER) == {*blocks, "(root)"}
    assert {row.num_devices for row in report.rows} == {8}
    assert report.warnings == ()


def test_bytes_are_seven_eighths_of_the_parameters_each_way():
    step, model, *args = make_step()
    described = fsdp_jax.describe(model)
    assert all(row.dim is not None for row in described.rows)
    report = comm_report(step, model, *args, compiled=False)
    ideal = described.total_bytes * 7 // 8
    assert report.ideal_gather_bytes == report.ideal_reduce_bytes == ideal
    assert report.wire_bytes(GATHER) == ideal
    assert report.wire_bytes(REDUCE_SCATTER) == ideal
    block = sum(
        int(np.prod(row.shape)) * 4 for row in described.rows if "blocks" in row.path
    )
    assert report.wire_bytes(REGATHER) == block * 7 // 8
    assert sum(r.full_bytes for r in report.rows if r.direction == REGATHER) == block


@pytest.mark.filterwarnings("ignore:.*layers compute in a dtype of their own")  # Embed
def test_the_dtype_on_the_wire_is_the_policys():
    policy = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    step, model, *args = make_step(mp_policy=policy)
    report = comm_report(step, model, *args, compiled=False)
    dtypes = {(row.direction, row.dtype) for row in report.rows}
    assert dtypes == {
        (GATHER, "bf16"),
        (REGATHER, "bf16"),
        (REDUCE_SCATTER, "f32"),
        ("all-reduce", "f32"),
    }
    total = fsdp_jax.describe(model).total_bytes
    assert report.ideal_gather_bytes == report.wire_bytes(GATHER) == total // 2 * 7 // 8
    assert report.ideal_reduce_bytes == total * 7 // 8


def test_abstract_arguments_give_the_same_report():
    step, model, optimizer, ids = make_step()
    args = (model, optimizer, fsdp_jax.shard_batch(ids, model))
    concrete = comm_report(step, *args, compiled=False)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args
    )
    assert comm_report(step, *abstract, compiled=False) == concrete


def test_nothing_runs_and_nothing_is_donated():
    ran = []

    @jax.jit
    def step(x):
        jax.debug.callback(lambda: ran.append(1))
        return x + 1

    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones(8)
    comm_report(step, x)
    comm_report(donating, x)
    jax.effects_barrier()
    assert ran == []
    assert not x.is_deleted()


def test_stages_of_a_gather_add_up_to_the_ideal():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    spec = PartitionSpec(("a", "b"))

    def per_device(w):
        with jax.named_scope("fsdp:gather:w"):
            w = jax.lax.all_gather(w, "b", tiled=True)
            w = jax.lax.all_gather(w, "a", tiled=True)
        with jax.named_scope("fsdp:reduce_scatter:w"):
            w = jax.lax.psum_scatter(w, "a", tiled=True)
            return jax.lax.psum_scatter(w, "b", tiled=True)

    step = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))
    cut = NamedSharding(mesh, spec)
    value = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=cut)
    report = comm_report(step, nnx.Param(value), compiled=False)
    assert [row.count for row in report.rows] == [2, 2]
    assert [row.num_devices for row in report.rows] == [8, 8]
    assert [row.wire_bytes for row in report.rows] == [64 * 4 * 4 * 7 // 8] * 2
    assert report.ideal_gather_bytes == 64 * 4 * 4 * 7 // 8


def loop_step(loop: Any) -> Any:
    """A per-device program around a loop whose body gathers, and its arguments."""
    mesh = helpers.mesh_of(8)

    def per_device(w):
        def body(x):
            with jax.named_scope("fsdp:gather:layer"):
                # Of a shard that changes: XLA would gather another one before the loop.
                full = jax.lax.all_gather(w * x[0, 0], "fsdp", tiled=True)
            return jnp.tanh(x @ full)

        return loop(body, jnp.ones((2, 16)))

    step = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(step), jnp.ones((16, 16))


def test_a_loop_multiplies_by_its_length():
    def scan(body, x):
        return jax.lax.scan(lambda x, _: (body(x), None), x, length=5)[0]

    step, w = loop_step(scan)
    report = comm_report(step, w)
    (row,) = report.rows
    assert (row.group, row.count, row.per_iteration) == ("layer", 5, False)
    assert row.wire_bytes == 5 * 16 * 16 * 4 * 7 // 8
    assert report.schedule is not None
    assert [gather.times for gather in report.schedule.gathers] == [5]
    assert report.schedule.notation == "{Gd}x5"


def test_a_loop_of_unknown_length_counts_one_iteration_and_says_so():
    def until(body, x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, body, x)

    step, w = loop_step(until)
    report = comm_report(step, w)
    (row,) = report.rows
    assert (row.count, row.per_iteration) == (1, True)
    assert row.wire_bytes == 16 * 16 * 4 * 7 // 8
    assert "1 per iteration" in str(report)
    assert report.schedule is not None
    assert [gather.times for gather in report.schedule.gathers] == [None]


def test_both_branches_of_a_condition_count():
    def per_device(w, x):
        def branch(name):
            with jax.named_scope(f"fsdp:gather:{name}"):
                return jnp.sum(jax.lax.all_gather(w, "fsdp", tiled=True))

        return jax.lax.cond(x[0] > 0, lambda: branch("a"), lambda: branch("b") * 2)

    step = jax.shard_map(
        per_device,
        mesh=helpers.mesh_of(8),
        in_specs=(PartitionSpec("fsdp"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    report = comm_report(jax.jit(step), jnp.ones(16), jnp.ones(1))
    assert sorted((r.group, r.count) for r in report.rows) == [("a", 1), ("b", 1)]
    assert report.schedule is not None
    assert {gather.group for gather in report.schedule.gathers} == {"a", "b"}


def test_a_collective_of_your_own_is_user_code():
    mesh = helpers.mesh_of(8)
    step = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "fsdp"),
            mesh=mesh,
            in_specs=PartitionSpec("fsdp"),
            out_specs=PartitionSpec(),
        )
    )
    report = comm_report(step, jnp.ones((16, 2)))
    (row,) = report.rows  # once, though the compiled program has it too
    assert (row.group, row.direction, row.op) == (
        "(user code)",
        "all-reduce",
        "all-reduce",
    )
    assert "psum" in row.op_name
    assert row.wire_bytes == 2 * (2 * 2 * 4) * 7 // 8


def test_what_the_partitioner_puts_in_is_told_apart():
    mesh = helpers.mesh_of(8)
    cut = NamedSharding(mesh, PartitionSpec("fsdp"))
    step = jax.jit(
        lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w), out_shardings=cut
    )
    w = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=cut)
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=cut)
    assert comm_report(step, w, x, compiled=False).rows == ()
    report = comm_report(step, w, x)
    assert {row.group for row in report.rows} == {"(partitioner)"}
    assert {row.num_devices for row in report.rows} == {8}


def orthogonal(x: jax.Array) -> jax.Array:
    """What a matrix optimizer makes of a gradient: products of whole matrices."""
    x = x / jnp.linalg.norm(x)
    for _ in range(2):
        x = 1.5 * x - 0.5 * x @ (x.T @ x)
    return x


def test_the_partitioners_reductions_in_an_optimizer_are_not_the_librarys():
    model = fsdp_jax.fully_shard(
        nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(4)
    )
    tx = optax.stateless(lambda grads, _: jax.tree.map(orthogonal, grads))
    optimizer = fsdp_jax.Optimizer(model, tx)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = fsdp_jax.value_and_grad(lambda m, x: jnp.mean(m(x)))(model, x)
        optimizer.update(model, grads)
        return loss

    report = comm_report(step, model, optimizer, jnp.ones((8, 32)))
    rows = {(r.group, r.direction): r for r in report.rows}
    assert rows["loss", "all-reduce"].full_bytes == 4
    assert rows["(partitioner)", "all-reduce"].full_bytes >= 16 * 16 * 4
    assert report.wire_bytes(GATHER) == report.ideal_gather_bytes
    schedule = report._schedule
    assert schedule is not None
    booked = [t for t in schedule.transfers if "loss" in t.groups]
    assert sum(t.full_bytes - t.partitioner_bytes for t in booked) == 4


@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_gathered_does_not_count_as_ideal(both):
    model = helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)), mesh=helpers.mesh_of(4))
    average = nnx.clone(model)
    moved = jax.tree.map(lambda p: p + 1, nnx.state(average, nnx.Param))
    nnx.update(average, moved)  # arrays of its own

    @nnx.jit
    def step(model, average, x):
        def loss(model, teacher, x):
            return jnp.mean(model(x)) + (jnp.mean(teacher(x)) if both else 0)

        value, grads = fsdp_jax.value_and_grad(loss)(model, average, x)
        pairs = nnx.as_pure(nnx.state(average, nnx.Param)), nnx.as_pure(grads)
        return value, jax.tree.map(lambda p, g: 0.9 * p + g, *pairs)

    x, _ = helpers.regression_batch()
    report = comm_report(step, model, average, x, compiled=False)
    assert report.wire_bytes(GATHER) == report.ideal_gather_bytes
    described = fsdp_jax.describe(model).total_bytes * 3 // 4
    assert report.ideal_gather_bytes == described * (2 if both else 1)


def automatic_step() -> Any:
    """Automatic partitioning of a large matrix whose gradient is wanted whole."""
    mesh = helpers.mesh_of(8)
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    step = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), out_shardings=whole)
    w = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=rows)
    return step, w, x


def test_a_large_all_reduce_is_warned_of():
    report = comm_report(*automatic_step())
    (row,) = report.rows
    assert row.op == "all-reduce" and row.full_bytes == 256 * 128 * 4
    (warning,) = report.warnings
    assert warning.startswith("parameter-sized all-reduce (1 of 0.1 MiB together")
    assert "gradients are reduced whole" in warning


def test_a_group_that_is_never_reduced_is_warned_of():
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("blocks")))
    step, *args = make_step(wrt=frozen)
    report = comm_report(step, *args, compiled=False)
    assert groups(report, REDUCE_SCATTER) == {"(root)"}
    (warning,) = report.warnings
    assert warning.startswith("the gradient of blocks.0, blocks.1 is never reduced")


def test_a_program_that_does_not_communicate_has_no_rows():
    report = comm_report(jax.jit(lambda x: x @ x), jnp.ones((8, 8)))
    assert report.rows == () and report.count() == report.wire_bytes() == 0
    assert report.async_share == 0
    assert "none" in str(report)


# --- memory -----------------------------------------------------------------------


def test_memory_by_kind_is_what_each_device_holds():
    step, model, *args = make_step()
    memory = comm_report(step, model, *args, compiled=False).memory
    at_rest = fsdp_jax.describe(model).bytes_per_device
    assert memory.parameter_bytes == at_rest
    assert memory.moment_bytes == 2 * at_rest + 2 * 4  # AdamW's and NNX's step counters
    assert memory.other_argument_bytes == args[-1].size * 4  # not yet placed: in full
    assert memory.peak_bytes is None and memory.gathered_peak_bytes is None


def test_optax_states_are_moments_and_plain_arrays_are_not():
    params = {"w": jnp.ones((8, 4))}
    state = optax.adam(1e-3).init(params)
    step = jax.jit(lambda params, state, scale: params["w"] * scale)
    memory = comm_report(step, params, state, scale=jnp.ones(()), compiled=False).memory
    assert (memory.parameter_bytes, memory.moment_bytes) == (0, 2 * 8 * 4 * 4 + 4)
    assert memory.other_argument_bytes == 8 * 4 * 4 + 4


def test_a_shared_variable_counts_once():
    model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    step = nnx.jit(lambda a, b: a(jnp.ones((2, 8))) + b(jnp.ones((2, 8))))
    memory = comm_report(step, model, model, compiled=False).memory
    assert memory.parameter_bytes == 8 * 8 * 4


def test_gathered_parameters_and_gradients_while_they_live():
    mesh = helpers.mesh_of(8)

    def per_device(w, x):
        with jax.named_scope("fsdp:gather:w"):
            full = jax.lax.all_gather(w, "fsdp", tiled=True)
        y = jnp.tanh(x @ full)
        grad = x.T @ y
        with jax.named_scope("fsdp:reduce_scatter:w"):
            return jax.lax.psum_scatter(grad, "fsdp", tiled=True)

    spec = PartitionSpec("fsdp")
    step = jax.jit(
        jax.shard_map(per_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    )
    memory = comm_report(step, jnp.ones((64, 64)), jnp.ones((16, 64))).memory
    assert memory.gathered_peak_bytes == 64 * 64 * 4
    assert memory.gradient_peak_bytes == 64 * 64 * 4
    arguments = (8 * 64 + 2 * 64) * 4
    assert memory.argument_bytes == arguments
    assert memory.live_peak_bytes is not None and memory.peak_bytes is not None
    # The gathered matrix and the products; or both matrices, if XLA keeps them apart.
    assert memory.live_peak_bytes >= arguments + 64 * 64 * 4
    assert memory.live_peak_bytes <= memory.peak_bytes


# --- the compiled program ---------------------------------------------------------


def test_order_of_a_step_on_cpu(report3):
    schedule = report3.schedule
    assert schedule is not None and schedule.platform == "cpu"
    assert schedule.is_scheduled
    assert report3.async_share == report3.hidden_share == 0
    assert schedule.num_matmuls > 0
    assert set(schedule.notation) >= {"G", "d", "R", "A"}
    assert not any(gather.is_async for gather in schedule.gathers)
    assert {gather.group for gather in schedule.gathers} == {
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "(root)",
    }


def test_a_compiled_step_is_used_as_it_is():
    step, *args = make_step()
    compiled = step.lower(*args).compile()
    traced = comm_report(step, *args, compiled=False)
    for given in (compiled, compiled.compiled):
        report = comm_report(step, *args, compiled=given)
        assert report.rows == traced.rows
        assert report.schedule is not None and report.schedule.gathers


def fake_compiled(text: str, **sizes: int) -> Any:
    stats = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=40,
        alias_size_in_bytes=30,
        temp_size_in_bytes=7,
        **sizes,
    )
    return SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: stats)


TEXT = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a)
}
"""


def test_the_peak_is_the_compilers_or_else_the_sum_of_all():
    step = jax.jit(lambda x: x)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    given = comm_report(step, x, compiled=fake_compiled(TEXT, peak_memory_in_bytes=105))
    assert given.peak_bytes == given.memory.peak_bytes == 105
    assert comm_report(step, x, compiled=fake_compiled(TEXT)).peak_bytes == 117


# --- what it is used as -----------------------------------------------------------


def test_a_function_that_is_not_jitted_is_refused():
    def train_step(x):
        return x

    with pytest.raises(TypeError, match=r"got 'train_step'. Wrap it first: comm_repo"):
        comm_report(train_step, jnp.ones(8))


@pytest.mark.parametrize("compiled", [True, "yes", lambda: None])
def test_something_else_than_a_compiled_step_is_refused(compiled):
    with pytest.raises(TypeError, match=r"compiled must be None, False, or what step"):
        comm_report(jax.jit(lambda x: x), jnp.ones(8), compiled=compiled)


def test_the_table_tells_totals_memory_and_order(report3, capsys):
    report3.table()
    text = capsys.readouterr().out
    assert text == str(report3)
    words = " ".join(text.split())
    assert "blocks.0 ... blocks.2 (3 groups)" in words
    assert words.count("1.00 x ideal") == 2  # gathers and reduce-scatters
    at_rest = report3.memory.parameter_bytes / 1024
    assert f"at rest parameters {at_rest:.1f} KiB, optimizer state" in words
    assert "0 of 7 gathers" in words or "0 of 4 gathers" in words  # merged by XLA
    assert "compile for the device you train on" in words
    assert max(map(len, text.splitlines())) <= 100


def test_a_table_without_a_compiled_step_says_what_it_lacks():
    step, *args = make_step()
    text = str(comm_report(step, *args, compiled=False))
    assert text.count("unknown: not compiled") == 2


def test_names_with_brackets_are_printed_as_they_are(tmp_path):
    def per_device(x):
        with jax.named_scope("fsdp:gather:layers[bold]<&>"):
            return jax.lax.all_gather(x, "fsdp", tiled=True)

    step = jax.jit(
        jax.shard_map(
            per_device,
            mesh=helpers.mesh_of(8),
            in_specs=PartitionSpec("fsdp"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    report = comm_report(step, jnp.ones(8))
    assert "layers[bold]<&>" in str(report)
    report.timeline(tmp_path / "step.svg")
    words = ElementTree.parse(tmp_path / "step.svg").getroot().itertext()
    assert "layers[bold]<&>" in words


def test_json_holds_every_figure(report3):
    report = report3
    read = json.loads(report.to_json())
    assert len(read["rows"]) == len(report.rows)
    assert read["rows"][0]["wire_bytes"] == report.rows[0].wire_bytes
    assert read["totals"][GATHER] == {
        "count": report.count(GATHER),
        "wire_bytes": report.wire_bytes(GATHER),
    }
    assert read["memory"]["parameter_bytes"] == report.memory.parameter_bytes
    assert report.schedule is not None
    assert read["schedule"]["notation"] == str(report.schedule)
    assert len(read["schedule"]["gathers"]) == len(report.schedule.gathers)
    assert not any(name.startswith("_") for name in read)


def test_the_picture_is_svg_with_a_bar_for_every_collective(report3, tmp_path):
    report = report3
    report.timeline(tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    bars = [title for title in titles if "matmuls beside it" in title]
    assert report.schedule is not None
    num_reduced = report.count(REDUCE_SCATTER) + report.count("all-reduce")
    assert len(bars) == len(report.schedule.gathers) + num_reduced
    words = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"gathers", "compute", "reductions", "blocks.1"} <= set(words)
    assert any(
        w.startswith("gathered parameters in any memory: at most") for w in words
    )
    assert any(w.startswith("alive in main memory: at most") for w in words)
    width = float(root.attrib["width"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, size = float(box.attrib["x"]), float(box.attrib["width"])
        assert x >= 0 and size > 0 and x + size <= width


def test_a_loop_is_drawn_once_with_its_length(tmp_path):
    def scan(body, x):
        return jax.lax.scan(lambda x, _: (body(x), None), x, length=5)[0]

    step, w = loop_step(scan)
    comm_report(step, w).timeline(tmp_path / "step.svg")
    assert "loop x 5" in (tmp_path / "step.svg").read_text()


def test_a_picture_needs_a_compiled_step(tmp_path):
    report = comm_report(jax.jit(lambda x: x), jnp.ones(8), compiled=False)
    with pytest.raises(ValueError, match="there is no schedule"):
        report.timeline(tmp_path / "step.svg")
