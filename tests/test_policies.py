"""The policies a user writes down: frozen, checked when made, equal by content."""

import dataclasses
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

import fsdp_jax
from fsdp_jax import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Shard,
)

POLICIES = [
    MixedPrecisionPolicy(jnp.bfloat16),
    OffloadPolicy(),
    CPUOffloadPolicy(),
    DataParallelMeshDims("fsdp"),
    Shard(1),
]


def name_of_type(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("policy", POLICIES, ids=name_of_type)
def test_policies_cannot_be_changed(policy):
    field = next((f.name for f in dataclasses.fields(policy)), "anything")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, field, None)


@pytest.mark.parametrize("policy", POLICIES, ids=name_of_type)
def test_policies_are_equal_and_hash_by_content(policy):
    again = dataclasses.replace(policy)
    assert again is not policy
    assert again == policy
    assert hash(again) == hash(policy)


@pytest.mark.parametrize("policy", POLICIES, ids=name_of_type)
def test_policies_survive_pickling(policy):
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        (
            MixedPrecisionPolicy,
            {
                "param_dtype": None,
                "reduce_dtype": None,
                "output_dtype": None,
                "cast_forward_inputs": True,
            },
        ),
        (OffloadPolicy, {}),
        (CPUOffloadPolicy, {"pin_memory": True}),
        (DataParallelMeshDims, {"shard": None, "replicate": None}),
        (Shard, {"dim": inspect.Parameter.empty}),
    ],
)
def test_fields_have_the_documented_names_order_and_defaults(policy, fields):
    parameters = inspect.signature(policy).parameters
    assert {name: p.default for name, p in parameters.items()} == fields
    assert list(parameters) == list(fields)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize(
    "spelling", [jnp.bfloat16, "bfloat16", jnp.dtype(jnp.bfloat16)], ids=repr
)
def test_every_spelling_of_a_dtype_is_the_same_policy(field, spelling):
    policy = MixedPrecisionPolicy(**{field: spelling})
    assert policy == MixedPrecisionPolicy(**{field: jnp.bfloat16})
    assert hash(policy) == hash(MixedPrecisionPolicy(**{field: jnp.bfloat16}))
    assert getattr(policy, field) == jnp.bfloat16


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize(
    ("value", "error", "found"),
    [
        ("no such dtype", TypeError, "'no such dtype'"),
        (3, TypeError, "3"),
        (object, ValueError, "object"),
        (jnp.int8, ValueError, "int8"),
        (bool, ValueError, "bool"),
        (jnp.complex64, ValueError, "complex64"),
    ],
)
def test_a_dtype_that_is_not_floating_is_refused_by_name(field, value, error, found):
    with pytest.raises(error, match=f"{field}={found} is not a"):
        MixedPrecisionPolicy(**{field: value})


def test_a_64_bit_dtype_is_refused_while_64_bit_types_are_off():
    with pytest.raises(ValueError, match=r"param_dtype=float64.*jax_enable_x64"):
        MixedPrecisionPolicy("float64")
    with jax.enable_x64(True):
        assert MixedPrecisionPolicy("float64").param_dtype == jnp.dtype("float64")


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_cast_forward_inputs_must_be_a_bool(value):
    with pytest.raises(TypeError, match=f"cast_forward_inputs.*{value!r}"):
        MixedPrecisionPolicy(cast_forward_inputs=value)


def test_the_offload_policies_are_related_as_base_and_subclass():
    assert issubclass(CPUOffloadPolicy, OffloadPolicy)
    assert CPUOffloadPolicy(False).pin_memory is False
    assert CPUOffloadPolicy() != OffloadPolicy()


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_pin_memory_must_be_a_bool(value):
    with pytest.raises(TypeError, match=f"pin_memory.*{value!r}"):
        CPUOffloadPolicy(pin_memory=value)


@pytest.mark.parametrize(
    ("dims", "shard", "replicate"),
    [
        (DataParallelMeshDims("x"), ("x",), ()),
        (DataParallelMeshDims(("x", "y")), ("x", "y"), ()),
        (DataParallelMeshDims("x", "y"), ("x",), ("y",)),
        (DataParallelMeshDims(None, ("x", "y")), (), ("x", "y")),
    ],
)
def test_mesh_dims_read_as_tuples_of_names(dims, shard, replicate):
    assert dims.shard_names == shard
    assert dims.replicate_names == replicate


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({}, ValueError, "at least one of shard and replicate"),
        ({"shard": ()}, ValueError, "shard is an empty tuple"),
        ({"replicate": ()}, ValueError, "replicate is an empty tuple"),
        ({"shard": ("a", "a")}, ValueError, "shard names an axis twice"),
        ({"shard": "x", "replicate": ("y", "x")}, ValueError, "'x' is named in both"),
        ({"shard": 0}, TypeError, "shard must be an axis name.*0"),
        ({"shard": ["x"]}, TypeError, r"shard must be an axis name.*\['x'\]"),
        ({"shard": "x", "replicate": (1,)}, TypeError, "replicate must be an axis"),
    ],
)
def test_bad_mesh_dims_are_refused_by_name(fields, error, text):
    with pytest.raises(error, match=text):
        DataParallelMeshDims(**fields)


@pytest.mark.parametrize("dim", ["0", None, 1.0, True])
def test_a_placement_takes_an_integer_dim(dim):
    with pytest.raises(TypeError, match=f"dim must be an int, got {dim!r}"):
        Shard(dim)


def test_fully_shard_has_the_documented_arguments_and_defaults():
    parameters = inspect.signature(fsdp_jax.fully_shard).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "module": inspect.Parameter.empty,
        "mesh": None,
        "reshard_after_forward": None,
        "shard_placement_fn": None,
        "mp_policy": MixedPrecisionPolicy(),
        "offload_policy": OffloadPolicy(),
        "ignored_params": None,
        "dp_mesh_dims": None,
        "uneven": "auto",
    }
    assert list(parameters)[:3] == ["module", "mesh", "reshard_after_forward"]
    kinds = [p.kind for p in parameters.values()]
    assert kinds[1:] == [inspect.Parameter.KEYWORD_ONLY] * 8
