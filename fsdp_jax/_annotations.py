"""Shardings that model code asks for in a per-device program: refused with advice.

Also whatever else JAX refuses there and asks to be told of. What must not live here:
exceptions of the user's own code, which pass as they are.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import flax
import jax
import optax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax._callees import equations_inside

_LIBRARIES = tuple(str(Path(str(m.__file__)).parent) for m in (jax, flax))
_OWN = (
    *_LIBRARIES,
    str(Path(str(optax.__file__)).parent),
    str(Path(__file__).parent),
    contextlib.__file__,
)
_HIDDEN = "JAX has removed its internal frames"

_HIJAX = "VariableEffect"  # of Flax: a value that changes in place

# Where equations hold the shardings that were asked for.
_ASKED = {"sharding_constraint": ("sharding",)}
_ASKED |= dict.fromkeys(("jit", "pjit"), ("in_shardings", "out_shardings"))

# What JAX 0.10 to 0.12 and Flax 0.12 say of axes that a program is manual over.
_SPEC = re.compile(
    r"of type Auto or Manual|can only refer to Auto axes|contains a manual axes"
    r"|implies that array axis \d+ is partitioned"
)
_OF_MESH = re.compile("Context mesh .* should match the mesh of sharding", re.S)
_NO_MESH = re.compile(r"non-empty mesh in context if you are passing `?PartitionSpec")
_RETYPED = re.compile("Going from `?Manual")
_MAPPED = re.compile("context mesh .* should match the mesh passed to shard_map", re.S)
_MADE = re.compile("Mesh must have all axes as Explicit or all axes as Auto")
_CUT = re.compile("sharded on `?Explicit`? axes")
_REPORT = re.compile(r"file a bug|open an? (issue|feature)|/jax/issues")


@contextlib.contextmanager
def refused(who: str, axes: Sequence[str]) -> Iterator[None]:
    """Say in our words what JAX refuses because the program is manual over axes.

    Args:
        who: the function that runs the program.
        axes: the data axes.

    Raises:
        ValueError: an annotation names a data axis.
        NotImplementedError: anything else that JAX asks to be told of.
    """
    try:
        yield
    except Exception as error:
        ours = _translated(error, who, axes)
        if ours is None:
            raise
        raise ours from error


def check(closed: ClosedJaxpr, who: str, axes: Sequence[str]) -> None:
    """Raise if an annotation in a traced program names a data axis.

    JAX would say so when the program is compiled.

    Raises:
        ValueError: one does.
        NotImplementedError: the program makes Variables of a kind that it cannot hold.
    """
    if any(type(effect).__name__ == _HIJAX for effect in closed.effects):
        raise NotImplementedError(
            f"{who}: f makes Variables with hijax=True, which the program of one "
            "device cannot hold. Make them under nnx.var_defaults(hijax=False)."
        )
    for eqn in equations_inside(closed):
        asked = _ASKED.get(eqn.primitive.name, ())
        for sharding in jax.tree.leaves([eqn.params[key] for key in asked]):
            if isinstance(sharding, NamedSharding):
                named = [a for a in axes if a in _names(sharding.spec)]
                if named:
                    raise ValueError(_of_spec(who, named, place_of(eqn)))


def _names(spec: PartitionSpec) -> set[object]:
    return {
        name
        for entry in spec
        for name in (entry if isinstance(entry, tuple) else (entry,))
    }


def _translated(error: Exception, who: str, axes: Sequence[str]) -> Exception | None:
    text = str(error)
    if not isinstance(
        error, (ValueError, NotImplementedError, TypeError, RuntimeError)
    ):
        return None
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    hidden = any(_HIDDEN in note for note in getattr(error, "__notes__", ()))
    if not hidden and not frames[-1].startswith(_LIBRARIES):
        return None
    place = _place(error)
    here = f"in the program of one device, which is manual over {list(axes)}"
    if _RETYPED.search(text):
        return NotImplementedError(
            f"{who}: jax.sharding.auto_axes or explicit_axes is called at {place}, "
            f"{here}: those axes cannot become Auto or Explicit there. Call the "
            "function that it wraps, which computes on this device's rows, or wrap "
            "what is outside of f. In code that also runs on global arrays, ask "
            "jax.sharding.get_abstract_mesh().manual_axes."
        )
    if _MAPPED.search(text):
        return ValueError(
            f"{who}: jax.shard_map is called at {place}, {here}. Call the mapped "
            "function itself: it sees this device's rows, and collectives over "
            f"{list(axes)} work in it."
        )
    if _MADE.search(text):
        return ValueError(
            f"{who}: a Variable that has a sharding (out_sharding) is made at {place}, "
            f"{here}. Make the module outside of f, or without one."
        )
    if _CUT.search(text):
        return ValueError(
            f"{who}: an array that is cut over mesh axes is used or made at {place}, "
            f"{here}. Pass it as an argument of f, and leave jax.device_put and "
            "jax.sharding.reshard onto this mesh out of f."
        )
    if _OF_MESH.search(text) or _NO_MESH.search(text):
        return ValueError(
            f"{who}: a sharding on a whole mesh is asked for at {place}, {here}. An "
            "array there is this device's rows: leave the sharding out, or give a "
            f"PartitionSpec (no NamedSharding) without {list(axes)} to an operation of "
            "jax.numpy (out_sharding=) or jax.lax.with_sharding_constraint."
        )
    if _SPEC.search(text):
        named = [a for a in axes if re.search(rf"\b{re.escape(a)}\b", text)]
        if named:
            return ValueError(_of_spec(who, named, place))
    if _REPORT.search(text):
        return NotImplementedError(
            f"{who}: JAX cannot do what {place} asks for {here} "
            f"({type(error).__name__}, see above). Do it outside of f."
        )
    return None


def _of_spec(who: str, named: Sequence[str], place: str) -> str:
    return (
        f"{who}: a sharding at {place} names the mesh axis "
        f"{', '.join(map(repr, named))}, in the program of one device, which that axis "
        "has already cut the batch for. An array there is this device's rows, so that "
        f"there is nothing to ask for: leave {', '.join(map(repr, named))} out of the "
        "spec (names of other axes, such as tensor parallel ones, may stay). In code "
        "that also runs on global arrays, leave out what is in "
        "jax.sharding.get_abstract_mesh().manual_axes."
    )


def place_of(eqn: JaxprEqn) -> str:
    """The line of the user's code that an equation came from."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):  # innermost first
        if not frame.file_name.startswith(_OWN):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return source_info_util.summarize(eqn.source_info)


def _place(error: Exception) -> str:
    """The line of the user's code that an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_OWN)]
    found = own[-1] if own else frames[-1]
    return f"{found.filename}:{found.lineno} ({found.name})"
