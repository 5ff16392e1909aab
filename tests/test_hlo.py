"""Reading compiled text: what each form of a collective is taken for."""

import pytest

from fsdp_jax import _figures
from fsdp_jax._hlo import Module, group_size, parse_shape
from fsdp_jax._hlo_collectives import (
    GATHER,
    PARTITIONER,
    REDUCE_SCATTER,
    REGATHER,
    is_written,
    ring_bytes,
    scopes_of,
)
from fsdp_jax._hlo_schedule import read_schedule
from fsdp_jax._stablehlo import Written
from tests.hlo_excerpts import (
    FUSED,
    GPU,
    REDUCED,
    SCATTERED,
    SPARSECORE,
    WINDOWED,
    WRAPPED,
)

GATHER_NAME = "jit(step)/shard_map/jvp(fsdp:gather:blocks.1)/all_gather"
AGAIN_NAME = "jit(step)/shard_map/transpose(jvp(fsdp:regather:blocks.1))/all_gather"
SCATTER_NAME = (
    "jit(step)/shard_map/transpose(jvp(fsdp:reduce_scatter:blocks.1))/reduce_scatter"
)


def only_transfer(text):
    (transfer,) = read_schedule(text).transfers
    return transfer


def test_a_gather_fused_with_a_matmul_is_in_flight_beside_it():
    schedule = read_schedule(FUSED)
    (gather,) = schedule.transfers
    assert (gather.groups, gather.direction) == (("blocks.1",), REGATHER)
    assert gather.is_async and gather.matmuls == 1 and gather.cycles == 10168
    assert (gather.dtype, gather.num_devices) == ("bf16", 4)
    assert gather.full_bytes == 512 * 2048 * 2
    assert gather.wire_bytes == 384 * 2048 * 2
    assert _figures.notation(schedule) == "(~)"


def test_the_gathered_array_is_alive_from_start_to_its_last_use():
    schedule = read_schedule(FUSED)
    assert schedule.gathered_bytes == (512 * 2048 * 2,) * 3
    # Arguments for the whole program, and the product of the matmul at its position.
    arguments = 2 * (128 * 2048 + 256 * 512 + 512 * 2048)
    assert schedule.live_bytes == (arguments, arguments + 2 * 256 * 2048, arguments)


@pytest.mark.parametrize(
    ("device_kind", "share"),
    [
        ("TPU v5 lite", 10168 / 1.5e9 / (384 * 2048 * 2 / 0.9e11)),
        ("TPU v5p", 10168 / 1.75e9 / (384 * 2048 * 2 / 1.8e11)),
        ("cpu", 1.0),
    ],
)
def test_compute_hides_a_gather_as_long_as_it_lasts(device_kind, share):
    schedule = read_schedule(FUSED)
    basis = _figures.hide(schedule, device_kind)
    assert schedule.transfers[0].hidden_share == pytest.approx(share)
    assert ("GB/s" in basis) == device_kind.startswith("TPU")


def test_compute_hides_one_gather_at_a_time():
    lines = [str(line) for line in SPARSECORE.splitlines()]
    start, done = (
        next(x for x in lines if f" call-{w}(" in x) for w in ("start", "done")
    )
    second = [x.replace(".106.", ".107.").replace("ROOT ", "") for x in (start, done)]
    lines.insert(lines.index(start) + 1, second[0])
    lines.insert(lines.index(done), second[1])
    twice = "\n".join(lines)
    schedule = read_schedule(twice)
    assert [t.cycles for t in schedule.transfers] == [7000, 7000]
    _figures.hide(schedule, "TPU v5 lite")
    wire = 384 * 1024 * 2 / 0.9e11 * 1.5e9
    shares = [t.hidden_share for t in schedule.transfers]
    assert shares == pytest.approx([7000 / wire, 0])


def test_a_fused_reduce_scatter_is_one_and_takes_its_name_from_what_reads_it():
    schedule = read_schedule(SCATTERED)
    scatters = [t for t in schedule.transfers if t.op == "reduce-scatter"]
    assert [t.groups for t in scatters] == [("blocks.1",)] * 2
    assert [t.direction for t in scatters] == [REDUCE_SCATTER] * 2
    assert [t.form for t in scatters] == ["fused", ""]
    full = [4096 * 1024 * 2, 1024 * 1024 * 2]
    assert [t.full_bytes for t in scatters] == full
    assert [t.wire_bytes for t in scatters] == [size * 3 // 4 for size in full]


def test_the_permutation_that_mends_a_padded_scatter_is_not_counted():
    schedule = read_schedule(SCATTERED)
    assert [t.form for t in schedule.transfers] == ["fused", "fix-up", ""]
    multiplied = SCATTERED.replace("slice(%fusion.6), slice", "dot(%fusion.6), slice")
    last = _figures.reductions_after_matmul(read_schedule(multiplied))
    assert [t.form for t in last] == [""]
    assert _figures.notation(schedule) == "RR"


def test_a_call_on_the_sparse_core_is_in_flight_beside_a_matmul():
    gather = only_transfer(SPARSECORE)
    assert (gather.groups, gather.direction) == (("blocks.1",), GATHER)
    assert gather.form == "sparsecore"
    assert gather.is_async and gather.matmuls == 1 and gather.cycles == 7000


@pytest.mark.parametrize("sync", ["true", "false"])
def test_a_start_and_a_done_are_asynchronous_unless_the_compiler_says_otherwise(sync):
    schedule = read_schedule(GPU.replace("SYNC", sync))
    gather = schedule.transfers[0]
    assert gather.full_bytes == 1024 * 1024 * 2
    assert gather.is_async == (sync == "false")
    assert gather.matmuls == (sync == "false")
    signs = {"true": "Gdd<>", "false": "(d)d<>"}
    assert _figures.notation(schedule) == signs[sync]
    # The result from start to last use; the shard it is made from is an argument.
    assert max(schedule.gathered_bytes) == 1024 * 1024 * 2


def test_a_joined_collective_counts_every_array_and_group():
    scatter = read_schedule(GPU.replace("SYNC", "false")).transfers[1]
    assert scatter.groups == ("blocks.0", "blocks.1")
    assert scatter.direction == REDUCE_SCATTER
    assert scatter.shapes == ((1024, 512), (1024, 1024))
    assert scatter.full_bytes == 1024 * (512 + 1024) * 2


def test_a_wrapped_collective_is_found_in_its_computation():
    gather = only_transfer(WRAPPED)
    assert gather.groups == ("blocks.1",) and gather.num_devices == 4
    assert gather.is_async and gather.matmuls == 1
    assert _figures.notation(read_schedule(WRAPPED)) == "(d)d"


STAGED = f"""\
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (a: f32[2,8]) -> f32[8,8] {{
  %a = f32[2,8]{{1,0}} parameter(0)
  %all-gather-start.1 = (f32[2,8]{{1,0}}, f32[4,8]{{1,0}}) all-gather-start(%a), replica_groups=[2,2]<=[4], dimensions={{0}}, metadata={{op_name="{GATHER_NAME}"}}
  %dot.1 = f32[2,2]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %all-gather-done.1 = f32[4,8]{{1,0}} all-gather-done(%all-gather-start.1)
  %all-gather-start.2 = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) all-gather-start(%all-gather-done.1), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={{0}}, metadata={{op_name="{GATHER_NAME}"}}
  %dot.2 = f32[2,2]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  ROOT %all-gather-done.2 = f32[8,8]{{1,0}} all-gather-done(%all-gather-start.2)
}}
"""  # noqa: E501


def test_a_gather_of_what_another_gathered_ends_by_itself():
    schedule = read_schedule(STAGED)
    assert [t.matmuls for t in schedule.transfers] == [1, 1]
    assert [t.wire_bytes for t in schedule.transfers] == [64, 128]
    assert _figures.notation(schedule) == "(d)(d)"


def test_a_matmul_cut_into_windows_is_a_loop_of_the_partitioner():
    schedule = read_schedule(WINDOWED)
    (permute,) = schedule.transfers
    assert (permute.groups, permute.direction) == ((PARTITIONER,), REDUCE_SCATTER)
    assert permute.times == 4  # two steps of a counter to 8
    assert permute.total_bytes == 4 * 128 * 2048 * 2
    assert permute.is_async and permute.matmuls == 1
    assert _figures.notation(schedule) == "{<d>}x4"


def test_a_loop_of_unknown_length_says_so():
    text = WINDOWED.replace("direction=LT", "direction=NE")
    (permute,) = read_schedule(text).transfers
    assert permute.times is None
    assert _figures.notation(read_schedule(text)) == "{<d>}x?"


# The compiler moves an argument to fast memory and back while a product is made.
COPIED = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %copy-start.1 = (f32[8,8]{1,0:S(1)}, f32[8,8]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %dot.1 = f32[8,8]{1,0} dot(%a, %a)
  %copy-done.1 = f32[8,8]{1,0:S(1)} copy-done(%copy-start.1)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%copy-done.1, %dot.1)
}
"""


def test_a_copy_to_fast_memory_takes_no_main_memory():
    live = read_schedule(COPIED).live_bytes
    assert live == (256, 512, 768)


def test_a_result_in_the_memory_of_a_donated_argument_counts_once():
    aliased = "is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }"
    live = read_schedule(COPIED.replace("is_scheduled=true", aliased)).live_bytes
    assert live == (256, 512, 512)


def written(group, *shape):
    size = 2 * shape[0] * shape[1]
    return Written(
        op="reduce-scatter",
        group=group,
        direction=REDUCE_SCATTER,
        op_name="",
        dtype="bf16",
        shapes=(shape,),
        full_bytes=size,
        wire_bytes=size * 3 // 4,
        num_devices=4,
        replicas="",
        times=1,
    )


def test_a_nameless_reduction_is_named_by_the_shapes_that_it_moves():
    schedule = read_schedule(REDUCED)
    (reduction,) = schedule.transfers
    assert reduction.groups == ("(unnamed)",)
    groups = [written("blocks.0", 512, 256), written("blocks.1", 256, 512)]
    _figures.name_by_shape(schedule.transfers, groups)
    assert reduction.groups == ("blocks.0", "blocks.1")
    assert reduction.direction == REDUCE_SCATTER
    assert len(_figures.reductions_after_matmul(schedule)) == 1
    assert _figures.count_groups(_figures.reductions_after_matmul(schedule)) == 2


def test_a_nameless_reduction_of_a_program_that_wrote_none_is_the_partitioners():
    schedule = read_schedule(REDUCED)
    _figures.name_by_shape(schedule.transfers, [])
    assert schedule.transfers[0].groups == (PARTITIONER,)


def test_gradients_are_alive_until_they_are_reduced():
    schedule = read_schedule(SCATTERED)
    first = 4096 * 1024 * 2  # an argument, so until the end
    assert schedule.gradient_bytes[0] == first
    assert max(schedule.gradient_bytes) > first


def test_long_runs_are_counted():
    assert _figures._shorten("GGGGGG(~)()()()()()()d") == "GGGG...(6)(~)()()()()...(6)d"
    assert _figures._shorten("{}x4 ddd{{}x2 }x? G") == "dddG"


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", 2),
        ("replica_groups={}", 16),
    ],
)
def test_every_way_to_write_replica_groups_is_read(text, devices):
    assert group_size(text, 16) == devices


@pytest.mark.parametrize(
    ("shape", "size", "held", "space"),
    [
        ("f32[3,5]{1,0}", 60, 60, 0),
        ("bf16[16,1,256]{2,1,0:T(2,128)(2,1)S(1)}", 8192, 16384, 1),
        ("f32[5,100]{1,0:T(8,128)}", 2000, 4096, 0),
        ("f32[5,100]{0,1:T(8,128)}", 2000, 104 * 128 * 4, 0),
        ("pred[7]{0}", 7, 7, 0),
        ("s4[7]{0}", 4, 4, 0),
        ("f8e4m3fn[6]{0}", 6, 6, 0),
        ("token[]", 0, 0, 0),
    ],
)
def test_bytes_of_a_shape(shape, size, held, space):
    ((leaf,),) = parse_shape(shape)
    assert (leaf.size_bytes, leaf.held_bytes, leaf.space) == (size, held, space)


def test_elements_of_a_nested_tuple():
    elements = parse_shape("((f32[2]{0}, token[]), (bf16[4,2]{1,0}), u32[])")
    assert [[leaf.dtype for leaf in e] for e in elements] == [
        ["f32", "token"],
        ["bf16"],
        ["u32"],
    ]


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        (GATHER_NAME, [("blocks.1", GATHER)]),
        (AGAIN_NAME, [("blocks.1", REGATHER)]),
        (SCATTER_NAME, [("blocks.1", REDUCE_SCATTER)]),
        ("jit(f)/shard_map/fsdp:gather:/all_gather", [("(root)", GATHER)]),
        ("jit(f)/checkpoint/rematted_computation/fsdp:gather:a/x", [("a", REGATHER)]),
        ("jit(f)/psum", []),
    ],
)
def test_the_scope_of_a_name(name, scopes):
    assert scopes_of(name) == scopes


def test_a_name_tells_who_wrote_a_collective():
    assert is_written("jit(step)/shard_map/psum")
    assert is_written("jit(step)/shard_map/psum_invariant")
    assert is_written("jit(step)/transpose(jvp(f))/reduce_scatter")
    assert not is_written("jit(step)/transpose(jvp())/dot_general")
    assert not is_written("jit(step)/reduce_sum")


@pytest.mark.parametrize(
    ("op", "size"),
    [
        ("all-gather", 600),
        ("reduce-scatter", 600),
        ("all-reduce", 1200),
        ("all-to-all", 600),
        ("collective-permute", 800),
    ],
)
def test_bytes_on_the_wire_of_a_ring(op, size):
    assert ring_bytes(op, 800, 4) == size


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="it has no ENTRY"):
        Module("module @jit_step {}")
