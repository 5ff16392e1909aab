"""Linen modules inside NNX models (`nnx.bridge.ToNNX`).

What must not live here: models that are Linen as a whole (`linen`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from fsdp_jax import _functional
from fsdp_jax._managed import install, spec_of
from fsdp_jax._param import manage, release
from fsdp_jax._state import is_sharded


@contextmanager
def as_linen_expects(module: Any) -> Iterator[None]:
    """Within the block Linen modules in `module` get their parameters as plain arrays.

    Those of inner sharded modules do when these are called.

    `ToNNX` finds the collection of a Variable by its class, which is another one for a
    managed parameter, and hands its metadata on to Linen, which would ask XLA for the
    sharding that they name (`nn.with_partitioning`), inside a per-device program too.
    """
    found: dict[int, nnx.Variable] = {}
    for _, node in _functional.walk(module, stop=is_sharded):
        gathered = node is module or not is_sharded(node)
        if gathered and isinstance(node, nnx.bridge.ToNNX):
            inside = [v for _, v in _functional.walk(node)]
            found.update((id(v), v) for v in inside if isinstance(v, nnx.Variable))
    variables = [v for v in found.values() if not isinstance(v, nnx.RngState)]
    before = [(v, dict(v._var_metadata), spec_of(v)) for v in variables]
    for variable, metadata, spec in before:
        if spec is not None:
            release(variable, variable.get_raw_value(), None, dict(metadata))
        for name in set(metadata) - nnx.Variable.required_metadata:
            variable._var_metadata.pop(name, None)
    try:
        yield
    finally:
        for variable, metadata, spec in before:
            if spec is not None:
                value = variable.get_raw_value()
                install(variable, jax.ShapeDtypeStruct(value.shape, value.dtype))
                manage(variable, spec)
                install(variable, value)
            variable._var_metadata.update(metadata)
