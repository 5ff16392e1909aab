"""Random functions of random models: the unsharded number, or an error of ours.

`FSDP_JAX_EXAMPLES=300 pytest tests/test_random_functions.py` tries more of them. What a
program is made of is in `random_functions`, as is how it is compared; a failure prints
the program, which is Python for `check`.
"""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.random_functions import (
    BY_ROW,
    ENTRIES,
    INSIDE,
    OUTSIDE,
    Program,
    check,
    defined,
)
from tests.random_layers import Layer

EXAMPLES = os.environ.get("FSDP_JAX_EXAMPLES")
# Derivatives of programs from outside, and of parameters inside of them.
HIGHER = True


def mostly(default: Any, *others: Any) -> st.SearchStrategy[Any]:
    """The default, or in half of the cases any of them."""
    return st.one_of(st.just(default), st.sampled_from((default, *others)))


reshards = st.sampled_from([None, True, False, 2])
layers = st.builds(
    Layer,
    kind=st.sampled_from(
        [
            *("linear", "mlp", "scale", "norm", "low rank", "transposed", "rule"),
            *("shared", "reverse", "add gradient", "squash", "stop", "input gradient"),
            *("callback", "scan", "scan_layers", "sow", "stat", "counter", "average"),
            *("cache", "draw"),
        ]
    ),
    wrap=mostly(
        *("none", "nnx.remat", "nnx.jit", "checkpoint", "checkpoint split", "jax.jit"),
        *("vmap", "vmap closure", "cond", "cond of rows", "lax.cond", "switch"),
        *("twice", "linearize", "jvp"),
    ),
    group=mostly(True, False),
    reshard=reshards,
)
aux = st.sampled_from(
    [
        *("mean", "rows", "losses", "half", "integers", "flags", "constant"),
        *("number", "none", "deep"),
    ]
)
extras = st.sampled_from(["scale", "key", "number", "weights", "nothing"])


def programs(higher: bool = HIGHER) -> st.SearchStrategy[Program]:
    """Programs, with derivatives of derivatives of parameters or without."""
    entries = (*ENTRIES, *OUTSIDE) if higher else ENTRIES
    penalties = (*BY_ROW, "param", *INSIDE) if higher else (*BY_ROW, "param")
    return st.builds(
        Program,
        layers=st.lists(layers, min_size=1, max_size=3).map(tuple),
        width=st.sampled_from([8, 6, 5]),
        mesh=st.sampled_from([(2,), (1,), (4,), (8,), (2, 4), (4, 2), (3,)]),
        entry=mostly(*entries),
        run=mostly("nnx.jit", "jax.jit", "eager"),
        reduction=st.sampled_from(["mean", "sum", "weighted"]),
        microbatches=mostly(1, 2, 3),
        rows=st.sampled_from([1, 2]),
        loss=st.sampled_from(["square", "entropy"]),
        forward=mostly(
            *("call", "nnx.remat", "nnx.jit", "checkpoint", "checkpoint split"),
            *("jax.jit", "vmap", "vmap closure", "cond", "cond of rows", "lax.cond"),
            *("switch",),
        ),
        around=mostly("none", "nnx.jit", "nnx.remat"),
        penalty=mostly(*penalties),
        aux=st.lists(aux, max_size=3, unique=True).map(tuple),
        packing=mostly("flat", "tuple", "dataclass", "keywords"),
        extras=st.lists(extras, max_size=3, unique=True).map(tuple),
        argnums=mostly("model", "model and x"),
        wrt=mostly("all", "first"),
        reshard=reshards,
        policy=mostly("none", "bfloat16", "reduce", "offload"),
        uneven=mostly("auto", "pad"),
        place=mostly("none", "largest"),
        packed=mostly(True, False),
        callback=mostly(False, True),
    ).map(defined)


@settings(
    max_examples=int(EXAMPLES or 4),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    phases=[Phase.generate] if EXAMPLES is None else [Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(program=programs())
def test_a_function_of_a_sharded_model_is_that_of_the_unsharded_one(
    program: Program,
) -> None:
    note(f"from tests.random_functions import *; print(check({program!r}))")
    outcome = check(program)
    assert outcome.kind != "wrong", outcome.text
