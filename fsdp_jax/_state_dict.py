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
from fsdp_jax._spec import by_name
from fsdp_jax._state import check_variables, state_of
from fsdp_jax._threads import locked


@locked
def state_dict(module: Any) -> dict[str, Any]:
    """Dotted names to arrays, in the order of `nnx.state`."""
    flat = nnx.to_flat_state(nnx.state(module, graph=True))
    return {n: at_rest(v) for n, (_, v) in by_name(flat, "state_dict").items()}


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


@locked
def load_state_dict(module: Any, state_dict: Any, strict: bool) -> IncompatibleKeys:
    """Check every name and value, then write them."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "load_state_dict: expected a mapping of names to arrays, got "
            f"{type(state_dict).__name__}."
        )
    check_variables(module, "load_state_dict")
    walked = _functional.walk(module)
    found = by_name(
        ((p, v) for p, v in walked if isinstance(v, nnx.Variable)), "load_state_dict"
    )
    variables = {name: v for name, (_, v) in found.items()}
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
    placed = [_placed(mesh, variable, value) for variable, value in writes]
    for (variable, _), value in zip(writes, placed, strict=True):
        install(variable, value)
    return IncompatibleKeys(missing, unexpected)


def _placed(mesh: Any, variable: nnx.Variable, value: Any) -> Any:
    if not hasattr(value, "ndim"):
        return value
    spec, whole = spec_of(variable), mesh.sharding(value.ndim, None)
    return spec.settled(value) if spec else move(value, whole)


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
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"load_state_dict: {name!r} is a ShapeDtypeStruct, a shape without values."
        )
    is_key, given_key = _is_key(old), _is_key(value)
    if is_key and value.dtype == jnp.uint32:
        value = _as_keys(name, value, old)
    elif given_key and old.dtype == jnp.uint32:
        value = jax.random.key_data(value)  # of a key as older code holds it
    if tuple(value.shape) != tuple(variable.shape):
        raise ValueError(
            f"load_state_dict: {name!r} has shape {tuple(value.shape)}, the module "
            f"needs the full shape {tuple(variable.shape)}."
        )
    if isinstance(value, np.ndarray):
        value = value.copy()  # JAX may keep the buffer, which the caller may reuse
    if value.dtype == old.dtype:
        return value
    if is_key and _is_key(value):
        raise ValueError(
            f"load_state_dict: {name!r} is of the implementation {value.dtype}, the "
            f"module holds {old.dtype}. Make its keys with that implementation."
        )
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in (value, old)]
    if not all(floating):
        raise ValueError(
            f"load_state_dict: {name!r} has dtype {value.dtype}, the module holds "
            f"{old.dtype}. Only floating values are cast; convert it first."
        )
    return value.astype(old.dtype)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_keys(name: str, value: Any, old: Any) -> Any:
    """The keys of which `value` is the data; files cannot hold keys.

    Args:
        name: for the error text.
        value: what `jax.random.key_data` gave.
        old: keys of the same implementation, or their shape.
    """
    keys = jax.ShapeDtypeStruct(old.shape, old.dtype)
    needed = jax.eval_shape(jax.random.key_data, keys).shape
    if tuple(value.shape) != needed:
        raise ValueError(
            f"load_state_dict: {name!r} has shape {tuple(value.shape)}, the module "
            f"needs random keys of shape {tuple(old.shape)} and dtype {old.dtype}, or "
            f"their data, of shape {needed}."
        )
    found: list[Any] = []
    jax.eval_shape(lambda k: found.append(jax.random.key_impl(k)), keys)  # any value
    return jax.random.wrap_key_data(value, impl=found[0])
