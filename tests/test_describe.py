"""describe: the rows, the totals, the printed table, and where it works."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, Shard, describe, fully_shard
from tests import helpers


class Mixed(nnx.Module):
    """Parameters that rest in every way there is."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(16, 8, rngs=rngs)
        self.conv = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.odd = nnx.Linear(3, 5, rngs=rngs, param_dtype=jnp.bfloat16)
        self.ignored = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.empty = nnx.Param(jnp.zeros((0, 8)))
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def mixed(mesh: Mesh) -> Any:
    """The inner layer is a group of its own, the rest is the root's."""
    model = Mixed(nnx.Rngs(0))
    fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params=nnx.PathContains("ignored"))


def by_path(model: Any) -> dict[str, Any]:
    return {row.path: row for row in describe(model).rows}


def rendered(description: Any, width: int = 160) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(description)
    return capture.get()


# --- rows -------------------------------------------------------------------------


def test_one_row_per_parameter_in_the_order_of_the_state(mesh8):
    model = mixed(mesh8)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    names = [".".join(map(str, path)) for path, _ in flat]
    assert [row.path for row in describe(model).rows] == names
    assert len(names) == 10


def test_a_row_says_shape_shard_dim_dtype_group_and_bytes(mesh8):
    row = by_path(mixed(mesh8))["inner.kernel"]
    assert row.shape == (16, 8)
    assert row.local_shape == (2, 8)
    assert row.dim == 0
    assert row.dtype == "float32"
    assert row.group == "inner (Linear)"
    assert row.bytes_per_device == 2 * 8 * 4
    assert row.reason == ""


@pytest.mark.parametrize(
    ("make", "path", "local", "dim"),
    [
        (lambda r: nnx.Linear(16, 32, rngs=r), "kernel", (2, 32), 0),
        (lambda r: nnx.Linear(3, 32, rngs=r), "kernel", (3, 4), 1),
        (lambda r: nnx.Conv(16, 32, (3, 3), rngs=r), "kernel", (3, 3, 16, 4), 3),
        (lambda r: nnx.Conv(32, 16, (3, 3), rngs=r), "kernel", (3, 3, 4, 16), 2),
        (lambda r: nnx.Embed(50257, 16, rngs=r), "embedding", (50257, 2), 1),
        (lambda r: nnx.LayerNorm(16, rngs=r), "scale", (2,), 0),
        (
            lambda r: nnx.MultiHeadAttention(4, 16, decode=False, rngs=r),
            "query.kernel",
            (2, 4, 4),
            0,
        ),
    ],
    ids=["linear", "dim 1", "conv", "conv wide in", "embed", "norm", "attention"],
)
def test_the_dim_that_is_cut_is_reported(mesh8, make, path, local, dim):
    model = fully_shard(make(nnx.Rngs(0)), mesh=mesh8)
    row = by_path(model)[path]
    assert (row.local_shape, row.dim) == (local, dim)
    variable = model
    for part in path.split("."):
        variable = getattr(variable, part)
    assert fsdp_jax.local_shape(variable) == local
    assert row.shape == variable.get_raw_value().shape


def test_a_placement_is_reported(mesh8):
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    fully_shard(layer, mesh=mesh8, shard_placement_fn=lambda v: Shard(-1))
    row = by_path(layer)["kernel"]
    assert (row.dim, row.local_shape) == (1, (16, 1))


def test_a_whole_parameter_says_why(mesh8):
    rows = by_path(mixed(mesh8))
    odd, ignored, empty = (
        rows[name] for name in ("odd.kernel", "ignored.kernel", "empty")
    )
    assert odd.reason == "no dim of (3, 5) divides by 8"
    assert (odd.group, odd.dtype) == ("Mixed", "bfloat16")
    assert "ignored" in ignored.reason
    assert ignored.group == "-"
    assert empty.reason == "shape (0, 8) has no elements"
    for row in (odd, ignored, empty):
        assert row.dim is None
        assert row.local_shape == row.shape
    assert odd.bytes_per_device == 3 * 5 * 2
    assert ignored.bytes_per_device == 8 * 8 * 4
    assert empty.bytes_per_device == 0


def test_rows_of_parameters_that_are_cut_have_no_reason(mesh8):
    for row in describe(mixed(mesh8)).rows:
        assert (row.dim is None) == bool(row.reason), row.path


def test_groups_carry_path_and_original_class(transformer, mesh8):
    model = helpers.shard_blocks(transformer, mesh=mesh8)
    groups = {row.path: row.group for row in describe(model).rows}
    for path, group in groups.items():
        block = path.startswith("blocks.")
        want = f"blocks.{path.split('.')[1]} (Block)" if block else "Transformer"
        assert group == want, path
    assert len(set(groups.values())) == 3


def test_a_policy_does_not_change_what_rests(mesh8):
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    policy = MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    row = by_path(fully_shard(layer, mesh=mesh8, mp_policy=policy))["kernel"]
    assert (row.dtype, row.bytes_per_device) == ("float32", 64)


def test_a_tied_parameter_is_one_row(mesh8):
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(self.a(x))

    description = describe(fully_shard(Tied(), mesh=mesh8))
    assert [row.path for row in description.rows] == ["a.kernel"]
    assert description.total_bytes == 8 * 8 * 4


# --- totals -----------------------------------------------------------------------


def test_totals_add_up(mlp, mesh8):
    model = helpers.shard_blocks(mlp, mesh=mesh8)
    description = describe(model)
    sizes = [(16, 32), (32,), (32, 16), (16,), (16, 8), (8,)]
    total = sum(4 * shape[0] * (*shape, 1)[1] for shape in sizes)
    assert description.num_shards == 8
    assert description.total_bytes == total
    assert description.bytes_per_device == total // 8
    assert description.largest_group_bytes == 4 * (32 * 16 + 32)
    arrays = [v.addressable_shards[0].data for v in model.state_dict().values()]
    assert description.bytes_per_device == sum(x.nbytes for x in arrays)


def test_totals_count_whole_and_ignored_parameters_in_full(mesh8):
    model = mixed(mesh8)
    description = describe(model)
    rows = description.rows
    assert description.bytes_per_device == sum(r.bytes_per_device for r in rows)
    params = nnx.state(model, nnx.Param)
    assert description.total_bytes == sum(x.nbytes for x in jax.tree.leaves(params))
    conv, odd, norm = 4 * (9 * 3 * 32 + 32), 2 * (15 + 5), 4 * 16
    assert description.largest_group_bytes == conv + odd + norm


def test_one_device_holds_everything():
    layer = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=helpers.mesh_of(1))
    description = describe(layer)
    assert description.num_shards == 1
    assert description.bytes_per_device == description.total_bytes == 4 * (128 + 8)


# --- the printed table ------------------------------------------------------------


def test_the_table_names_every_column_every_parameter_and_ends_with_totals(mesh8):
    model = mixed(mesh8)
    text = str(describe(model))
    lines = [line for line in text.splitlines() if line.strip(" ─━┄└┘┗┛┴┻│┃")]
    assert "8 devices" in lines[0]
    header = " ".join(lines[1:3])
    for column in ("path", "shape", "shard", "dim", "dtype", "group", "bytes", "why"):
        assert column in header
    for row in describe(model).rows:
        line = next(line for line in lines if f" {row.path} " in line)
        for cell in (row.shape, row.local_shape, row.dtype, row.group):
            assert str(cell) in line
        assert ("whole" in line) == (row.dim is None)
    assert "total (10)" in lines[-1]
    description = describe(model)
    assert f"{description.total_bytes:,}" in lines[-1]
    assert f"{description.bytes_per_device:,}" in lines[-1]
    assert f"{description.largest_group_bytes:,}" in lines[-1]


def test_the_text_is_plain_and_stable(mesh8, capsys, monkeypatch):
    model = mixed(mesh8)
    text = str(describe(model))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 160
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(describe(model)) == text
    print(describe(model))
    assert capsys.readouterr().out == text + "\n"


def test_rich_renders_the_same_table(mesh8):
    description = describe(mixed(mesh8))
    assert rendered(description) == str(description)
    narrow = rendered(description, width=100)
    assert max(map(len, narrow.splitlines())) <= 100
    assert "total" in narrow


def test_brackets_in_names_are_not_taken_for_markup(mesh8):
    class Named(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.Dict({"[red]": nnx.Linear(8, 8, rngs=nnx.Rngs(0))})

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.parts["[red]"](x)

    model = fully_shard(Named(), mesh=mesh8)
    assert "parts.[red].kernel" in str(describe(model))
    assert "parts.[red].kernel" in rendered(describe(model))


# --- where it works ---------------------------------------------------------------


def test_unsharded_at_present_is_reported(mlp, mesh8):
    model = helpers.shard_blocks(mlp, mesh=mesh8)
    before = describe(model)
    model.layers[0].unshard()
    rows = by_path(model)
    row = rows["layers.0.kernel"]
    assert row.reason == "unsharded at present"
    assert row.local_shape == row.shape == (16, 32)
    assert row.bytes_per_device == 4 * 16 * 32
    assert rows["layers.1.kernel"].reason == ""
    assert "unsharded at present" in str(describe(model))
    model.layers[0].reshard()
    assert describe(model) == before


@pytest.mark.parametrize("where", ["nnx.jit", "eval_shape", "shard_map", "grad"])
def test_it_says_the_same_inside_a_program(mlp, mesh8, where):
    model = helpers.shard_blocks(mlp, mesh=mesh8)
    x, y = helpers.regression_batch(8)
    seen = []

    def f(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append(describe(model))
        return helpers.mean_square(model, x, y)

    run = {
        "nnx.jit": nnx.jit,
        "eval_shape": lambda f: lambda *args: nnx.eval_shape(f, *args),
        "shard_map": fsdp_jax.shard_map,
        "grad": fsdp_jax.value_and_grad,
    }[where](f)
    run(model, x, y)
    assert seen == [describe(model)]


def test_it_says_the_same_of_an_abstract_model(mesh8):
    model = nnx.eval_shape(lambda: helpers.MLP(nnx.Rngs(0)))
    helpers.shard_blocks(model, mesh=mesh8)
    concrete = helpers.shard_blocks(helpers.MLP(nnx.Rngs(0)), mesh=mesh8)
    assert describe(model) == describe(concrete)
    assert str(describe(model)) == str(describe(concrete))


def test_no_value_is_read(mlp, mesh8):
    model = helpers.shard_blocks(mlp, mesh=mesh8)
    before = describe(model)
    for value in model.state_dict().values():
        value.delete()
    assert describe(model) == before


def test_a_plain_parent_reports_all_its_roots_and_what_is_in_no_group(mesh8):
    class Parent(nnx.Module):
        def __init__(self) -> None:
            self.encoder = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
            self.decoder = fully_shard(nnx.Linear(8, 16, rngs=nnx.Rngs(1)), mesh=mesh8)
            self.scale = nnx.Param(jnp.ones(8))

    description = describe(Parent())
    groups = {row.path: row.group for row in description.rows}
    assert groups == {
        "decoder.bias": "decoder (Linear)",
        "decoder.kernel": "decoder (Linear)",
        "encoder.bias": "encoder (Linear)",
        "encoder.kernel": "encoder (Linear)",
        "scale": "-",
    }
    assert description.rows[-1].bytes_per_device == 8 * 4
    assert description.rows[-1].reason
    assert description.largest_group_bytes == 4 * (8 * 16 + 16)


@pytest.mark.parametrize("way", ["eager", "nnx.jit", "shard_map"])
def test_a_model_can_be_printed_anywhere(mesh8, way):
    model = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), mesh=mesh8)
    seen: list[str] = []

    def f(model: Any) -> None:
        seen.append(repr(model) + str(model) + repr(model.kernel))

    run = {"eager": lambda f: f, "nnx.jit": nnx.jit, "shard_map": fsdp_jax.shard_map}
    run[way](f)(model)
    assert "LinearFSDPModule" in seen[0]
    assert "kernel" in seen[0]


# --- errors -----------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, {"model": 1}])
def test_it_needs_a_sharded_module(wrong):
    text = "describe: no argument .* fully_shard .*Shard the model first"
    with pytest.raises(ValueError, match=text):
        describe(wrong)
    with pytest.raises(ValueError, match=text):
        describe(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_modules_on_different_meshes_raise(mesh8):
    models = nnx.List(
        [
            fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh)
            for mesh in (mesh8, helpers.mesh_of(4))
        ]
    )
    with pytest.raises(ValueError, match="describe: .* 2 different meshes"):
        describe(models)
