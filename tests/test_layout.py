"""Shape arithmetic: which dim is cut, what a shard measures, what travels together."""

import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from fsdp_jax import _layout


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((8, 8), 2, 0),
        ((8,), 2, 0),
        ((8, 1024), 8, 0),
        ((16, 4, 4), 8, 0),
        ((3, 3, 16, 32), 8, 3),
        ((3, 3, 32, 16), 8, 2),
        ((3, 8, 16), 8, 2),
        ((3, 16, 8), 8, 1),
        ((50257, 16), 8, 1),
        ((4, 8), 8, 1),
        ((1, 8), 8, 1),
        ((3, 5), 1, 0),
    ],
)
def test_dim_0_is_cut_else_the_largest_that_divides(shape, num_shards, dim):
    assert _layout.choose_dim(shape, num_shards) == (dim - len(shape), "")


@pytest.mark.parametrize(
    ("shape", "num_shards", "reason"),
    [
        ((3,), 8, r"no dim of \(3,\) divides by 8"),
        ((9, 15), 4, r"no dim of \(9, 15\) divides by 4"),
        ((4,), 8, r"no dim of \(4,\) divides by 8"),
        ((0, 8), 8, r"\(0, 8\) has no elements"),
        ((8, 0), 8, r"\(8, 0\) has no elements"),
    ],
)
def test_a_parameter_that_no_dim_divides_stays_whole_and_says_why(
    shape, num_shards, reason
):
    dim, why = _layout.choose_dim(shape, num_shards)
    assert dim is None
    assert re.search(reason, why)


def test_the_chosen_dim_is_the_same_under_more_leading_dims():
    dim, _ = _layout.choose_dim((16, 32), 8)
    assert dim is not None
    stacked = (6, 16, 32)
    assert _layout.shard_shape(stacked, dim, 8) == (6, 2, 32)


@pytest.mark.parametrize(
    ("shape", "dim", "num_shards", "expected"),
    [
        ((8, 8), 0, 2, (4, 8)),
        ((8, 8), -2, 2, (4, 8)),
        ((8,), -1, 2, (4,)),
        ((3, 8), -1, 4, (3, 2)),
        ((3, 8), 1, 4, (3, 2)),
        ((3, 5), None, 4, (3, 5)),
        ((), None, 4, ()),
    ],
)
def test_the_shape_of_a_shard(shape, dim, num_shards, expected):
    assert _layout.shard_shape(shape, dim, num_shards) == expected


def test_the_shards_of_every_cut_parameter_hold_all_of_it():
    sizes = (1, 3, 4, 8, 24)
    for shape in itertools.product(sizes, repeat=2):
        for num_shards in (1, 2, 4, 8):
            dim, reason = _layout.choose_dim(shape, num_shards)
            shard = _layout.shard_shape(shape, dim, num_shards)
            whole = any(s % num_shards == 0 for s in shape)
            assert (dim is not None) == whole == (not reason)
            pieces = num_shards if whole else 1
            assert pieces * math.prod(shard) == math.prod(shape)
            if shape[0] % num_shards == 0:
                assert dim == -2


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((), "float32", 4),
        ((3, 5), "float32", 60),
        ((3, 5), jnp.bfloat16, 30),
        ((4,), np.int8, 4),
        ((0, 4), "float32", 0),
    ],
)
def test_bytes_of_an_array(shape, dtype, expected):
    assert _layout.size_bytes(shape, dtype) == expected


def buckets(shapes, dtypes, threshold_bytes):
    """Members and packing of every bucket, as a set."""
    made = _layout.make_buckets(shapes, dtypes, threshold_bytes)
    return {(b.members, b.packed) for b in made}


def test_small_arrays_share_a_buffer_per_dtype_and_large_ones_go_alone():
    shapes = [(64,), (64, 64), (64,), (64,), (64,), (128, 64)]
    dtypes = ["float32", "float32", jnp.bfloat16, "float32", jnp.bfloat16, "float32"]
    assert buckets(shapes, dtypes, 4 * 64 + 1) == {
        ((0, 3), True),
        ((2, 4), True),
        ((1,), False),
        ((5,), False),
    }


def test_a_single_small_array_is_not_packed():
    assert buckets([(64,), (64, 64)], ["float32"] * 2, 1024) == {
        ((0,), False),
        ((1,), False),
    }


def test_an_array_of_exactly_the_threshold_goes_alone():
    assert buckets([(64,), (64,)], ["float32"] * 2, 256) == {
        ((0,), False),
        ((1,), False),
    }
    assert buckets([(64,), (64,)], ["float32"] * 2, 257) == {((0, 1), True)}


def test_a_threshold_of_zero_packs_nothing():
    assert buckets([(1,), (1,), (1,)], ["float32"] * 3, 0) == {
        ((0,), False),
        ((1,), False),
        ((2,), False),
    }


def test_a_group_without_members_has_no_buckets():
    assert _layout.make_buckets([], [], 1024) == ()


def test_every_member_is_in_one_bucket():
    rng = np.random.default_rng(0)
    dtypes = ["float32", "bfloat16", "float16"]
    for _ in range(50):
        count = int(rng.integers(1, 12))
        shapes = [tuple(rng.integers(1, 40, size=2)) for _ in range(count)]
        kinds = [jnp.dtype(dtypes[i]) for i in rng.integers(0, 3, size=count)]
        made = _layout.make_buckets(shapes, kinds, 1000)
        members = [i for bucket in made for i in bucket.members]
        assert sorted(members) == list(range(count))
        for bucket in made:
            assert len({kinds[i] for i in bucket.members}) == 1
            assert bucket.packed == (len(bucket.members) > 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("divisor", [0.5, 1, 2, 3, 8, 64, 100, 256])
def test_the_parts_of_a_divisor_multiply_to_it(dtype, divisor):
    for count in (1, 8):
        before, after = _layout.divide_factors(jnp.dtype(dtype), divisor, count)
        assert before * after == pytest.approx(divisor)
        if dtype != "float16":
            assert before == 1.0


@pytest.mark.parametrize("count", [2, 8, 64, 256])
@pytest.mark.parametrize("divides", [True, False])
def test_float16_divides_about_half_before_the_sum(count, divides):
    divisor = count if divides else 1
    before, _ = _layout.divide_factors(jnp.dtype("float16"), divisor, count)
    assert math.sqrt(count) <= before <= 2 * math.sqrt(count)
    assert math.log2(before).is_integer()
