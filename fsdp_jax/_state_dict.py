"""State dicts: dotted names to arrays, and writing such arrays back.

What lives here: the checks of `load_state_dict`. What must not: files and formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fsdp_jax import _functional
from fsdp_jax._managed import install, spec_of
from fsdp_jax._move import move
from fsdp_jax._param import check_own_trace
from fsdp_jax._spec import dotted
from fsdp_jax._state import state_of


def state_dict(module: Any) -> dict[str, Any]:
    """Dotted names to arrays, in the order of `nnx.state`."""
    flat = nnx.to_flat_state(nnx.state(module, graph=True))
    return {dotted(path): at_rest(value) for path, value in flat}


def at_rest(value: Any) -> Any:
    """The array of a Variable, managed ones in their resting layout."""
    if not isinstance(value, nnx.Variable):
        return value
    raw, spec = value.get_raw_value(), spec_of(value)
    if spec is None or spec.is_shard(raw):
        return raw
    if not spec.padding:
        return move(raw, spec.sharding(raw.ndim))
    own = value.get_value()
    return move(own, spec.unpadded_sharding(own.shape))


def load_state_dict(module: Any, state_dict: Any, strict: bool) -> IncompatibleKeys:
    """Check every name and value, then write them."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "load_state_dict: expected a mapping of names to arrays, got "
            f"{type(state_dict).__name__}."
        )
    variables = {
        dotted(p): v for p, v in _functional.walk(module) if isinstance(v, nnx.Variable)
    }
    missing = [n for n in variables if n not in state_dict]
    unexpected = [n for n in state_dict if n not in variables]
    if strict and (missing or unexpected):
        raise ValueError(
            f"load_state_dict: missing names {missing}, unexpected names {unexpected}. "
            "Pass strict=False to load the others."
        )
    writes = []
    for name, variable in variables.items():
        if name in state_dict:
            writes.append((variable, _checked(name, variable, state_dict[name])))
    mesh = state_of(module).mesh
    probe = jnp.zeros(())  # traced where whatever is placed would be
    for variable, value in writes:
        for x in (value, probe):
            check_own_trace(variable, x, "load_state_dict")
    for variable, value in writes:
        if hasattr(value, "ndim"):
            spec, target = spec_of(variable), mesh.sharding(value.ndim, None)
            value = spec.settled(value) if spec else move(value, target)
        install(variable, value)
    return IncompatibleKeys(missing, unexpected)


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict(strict=False)` left alone, as in PyTorch.

    Attributes:
        missing_keys: names that the module has and the mapping has not.
        unexpected_keys: names that the mapping has and the module has not.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def _checked(name: str, variable: nnx.Variable, value: Any) -> Any:
    """A value for a Variable, or the error that says why it is none."""
    old = variable.get_raw_value()
    if isinstance(value, nnx.Variable):
        managed = spec_of(value) is not None
        value = value.get_value() if managed else value.get_raw_value()
    if not hasattr(old, "shape"):  # a Python value, or None
        return value
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"load_state_dict: {name!r} is a {type(value).__name__}, not an array."
        )
    keys = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
    if keys and value.dtype == jnp.uint32 and not isinstance(old, jax.ShapeDtypeStruct):
        # What jax.random.key_data gives: files cannot hold keys.
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(old))
    if tuple(value.shape) != tuple(variable.shape):
        raise ValueError(
            f"load_state_dict: {name!r} has shape {tuple(value.shape)}, the module "
            f"needs the full shape {tuple(variable.shape)}."
        )
    if isinstance(value, np.ndarray):
        value = value.copy()  # JAX may keep the buffer, which the caller may reuse
    if value.dtype == old.dtype:
        return value
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in (value, old)]
    if not all(floating):
        raise ValueError(
            f"load_state_dict: {name!r} has dtype {value.dtype}, the module holds "
            f"{old.dtype}. Only floating values are cast; convert it first."
        )
    return value.astype(old.dtype)
