"""The user's `build` of a plan: calling it, checking what it returns.

What lives here: everything about `(step, args)` before it is lowered, and telling of an
error in the user's code. What must not: compilers and topologies.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from fsdp_jax._mesh import MeshInfo
from fsdp_jax._topology import PlanError

# From a list of `jax.Device` to the step and its arguments.
Build = Callable[[list[Any]], tuple[Any, Sequence[Any]]]
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_THE_USERS = ("<", f"{Path(__file__).parent}{os.sep}", *_INSTALLED)


class BuildError(PlanError, TypeError):
    """The user's `build`, or the step that it returned, cannot be planned."""


def call(build: Build, devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Call the user's function and check what it returns."""
    name = getattr(build, "__name__", "build")
    try:
        result = build(list(devices))
    except (Exception, SystemExit) as error:
        if "compile-only client" in str(error):
            raise BuildError(
                f"{name} made an array on a device that does not exist"
                f"{_place(error)}: make the model in nnx.eval_shape, the optimizer "
                "with fsdp_jax.Optimizer, and the batch of jax.ShapeDtypeStruct."
            ) from error
        raise BuildError(f"{name} raised {told(error)}") from error
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise BuildError(
            f"{name} must return (step, args), the jitted step and its arguments, but "
            f"returned {_kind(result)}."
        )
    step, args = result
    if not hasattr(step, "lower"):
        raise BuildError(
            f"{name} returned {_kind(step)} as the step, which is not jitted: wrap it "
            "in nnx.jit or jax.jit."
        )
    if not isinstance(args, tuple | list):
        raise BuildError(
            f"{name} must return the arguments as a tuple, got {_kind(args)}; a single "
            "one is written (model,)."
        )
    _check_devices(name, args)
    return step, tuple(args)


def _check_devices(name: str, args: Sequence[Any]) -> None:
    """Raise unless something is sharded over the absent devices, and nothing else."""
    meshes = {s.mesh for s in _shardings(args) if isinstance(s.mesh, Mesh)}
    for mesh in meshes:
        if not MeshInfo(mesh, ()).compile_only:
            raise BuildError(
                f"{name} sharded over the devices of this machine "
                f"({mesh.devices.flat[0]}, ...): give fully_shard a mesh of the "
                "devices that it is called with."
            )
    if not meshes:
        raise BuildError(
            f"{name} returned arguments none of which is sharded over the devices that "
            "it was given: give fully_shard a mesh of them."
        )


def _shardings(args: Any) -> Iterator[NamedSharding]:
    """The shardings of all arrays among the arguments, in modules and outside."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield sharding


def _kind(value: Any) -> str:
    """What a value is, for an error text."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"an object of type {type(value).__name__}"


def told(error: BaseException) -> str:
    """Type, text and place of an error in the user's code, in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 600 else f"{text[:600]} ..."
    return f"{type(error).__name__}: {text}{_place(error)}"


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code that an error went through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
