"""What gathers and reductions wait for: a policy per platform, and the log behind it.

What lives here: `Ordering`, and `Log`, which remembers during one trace which arrays
the modules before received. What must not: moving anything (`_collectives`), and how a
call is differentiated (`_schedule`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.ref import AbstractRef

from fsdp_jax._compiled import traces
from fsdp_jax._move import is_away

Array = jax.Array
_WAITS = {
    "forward": ("free", "own", "first", "each", "previous"),
    "backward": ("own", "first", "each", "previous"),
    "reduction": ("free", "own", "previous"),
}


@dataclasses.dataclass(frozen=True)
class Ordering:
    """What the collectives of a group wait for.

    Gradients do not depend on it but for the rounding of what XLA fuses otherwise. It
    has its full meaning for modules that are freed after forward: where gathered
    parameters are kept, and in evaluation, "first" and "each" are "previous", and a
    kept module's backward waits for nothing. `scan_layers` has an order of its own.

    The order is carried by `jax.lax.optimization_barrier` over arrays that the step
    computes anyway: on XLA:TPU an order that hangs on scalars made of them did not
    hold. Prefetch setters go before what is said here.

    Attributes:
        forward: the gather before forward starts at any time ("free"), when the
            module's own input exists ("own"), or when that of the module called before
            it does ("previous": a look-ahead of one group). "first" is "own", but
            "previous" for the large parameter that the module reads first, so that its
            compute can begin at once. "each" is "first", and the other large parameters
            follow one after the other, each while the module computes with the one
            before it: on a chip where one gather runs at a time, all of them have
            compute beside them. What one equation reads, such as a call of `jax.jit`,
            is gathered before it.
        backward: the second gather starts when the gradient of the module's own output
            exists ("own"), or when that of the module called after it does
            ("previous"); "first" and "each" as in forward.
        reduction: the gradient of a module's input is handed on at any time ("free"),
            once its own gradients are reduce-scattered ("own"), or once those of the
            module that came before it in backward are ("previous": the full gradients
            of at most two groups exist at one time).

    Raises:
        ValueError: a word that is not listed.

    Source: README, "The schedule"; measured in benchmarks/README.md.
    """

    forward: Literal["free", "own", "first", "each", "previous"] = "free"
    backward: Literal["own", "first", "each", "previous"] = "own"
    reduction: Literal["free", "own", "previous"] = "free"

    def __post_init__(self) -> None:
        for field, words in _WAITS.items():
            value = getattr(self, field)
            if value not in words:
                raise ValueError(
                    f"Ordering: {field} must be one of {words}, got {value!r}."
                )


# Each chosen by measurement: benchmarks/README.md, "Orderings".
ORDERINGS = {
    "tpu": Ordering(forward="each", backward="each", reduction="own"),
    "gpu": Ordering(forward="free", backward="first", reduction="own"),
    "cpu": Ordering(forward="free", backward="own", reduction="free"),
}


def ordering_for(platform: str) -> Ordering:
    """The measured ordering of a platform, as a device of it names the platform.

    Of one that was not measured: the default.
    """
    name = "gpu" if platform in ("cuda", "rocm") else platform
    return ORDERINGS.get(name, Ordering())


# TPU v5e overlaps its gathers with compute as it is. v5p and v6e need their SparseCores
# for that; libtpu 0.0.50 refuses the fusion that v5e uses there, as unsafe. Measured in
# benchmarks/README.md.
_SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_all_gather_offload_tracing": "true",
    "xla_tpu_enable_reduce_scatter_offload_tracing": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": "false",
}
_TPU_OPTIONS = {"TPU v6 lite": _SPARSE_CORE, "TPU v5": _SPARSE_CORE}
_GPU_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # A combined gather waits for the last of what it combines, a reduction likewise.
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    # Gathers start while reductions are in flight.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


def compiler_options(devices: Sequence[Any] | None = None) -> dict[str, Any]:
    """Options of XLA that let collectives run while a step computes.

    Pass them to `step.lower(*args).compile(...)`, of an `nnx.jit` too, or to
    `jax.jit(step, compiler_options=...)`; nothing is set otherwise. What they do to a
    step is in benchmarks/README.md.

    Args:
        devices: those that the step runs on; all of the job by default.

    Returns:
        Names and values, of the type that the platform's compiler takes. Empty where
        its own settings were measured to be as good: TPU v5e, CPU.

    Source: README, "The schedule".
    """
    device = (jax.devices() if devices is None else list(devices))[0]
    if device.platform in ("gpu", "cuda", "rocm"):
        return dict(_GPU_OPTIONS)
    if device.platform == "tpu":
        return dict(_TPU_OPTIONS.get(device.device_kind, {}))
    return {}


@dataclasses.dataclass(frozen=True)
class Event:
    """A module began its forward or its backward.

    Attributes:
        trace: the trace that it happened in, to which `arrays` belong.
        arrays: what it received: inputs, or gradients of outputs.
        prefetches: keys of the modules whose gathers may start with it.
    """

    trace: Any
    arrays: list[Array]
    prefetches: tuple[str, ...]


class Anchors(NamedTuple):
    """Arrays that a gather waits for.

    Attributes:
        early: for what the module reads first.
        late: for everything else.
        each: whether large parameters are gathered one after the other.
        follows: whether a module before this one was run by the same code, so that one
            is to be expected after it too.
    """

    early: list[Array]
    late: list[Array]
    each: bool = False
    follows: bool = False


class Log:
    """What happened so far in one per-device program.

    Arrays of one trace mean nothing in another (a loop body, a branch, a
    recomputation), so every question is answered from the events of the trace that
    asks.
    """

    def __init__(self) -> None:
        self._begun: dict[str, list[Event]] = {"forward": [], "backward": []}
        self._reduced: list[tuple[Any, list[Array]]] = []
        self._contexts: dict[str, Log] = {}

    def of(self, context: str | None) -> Log:
        """The log of modules that share a context of their own; None: this one."""
        return self if context is None else self._contexts.setdefault(context, Log())

    def clear(self) -> None:
        """Forget all. What was traced may keep the log, but shall not keep arrays."""
        for inner in self._contexts.values():
            inner.clear()
        for events in self._begun.values():
            events.clear()
        self._reduced.clear()

    def begin(
        self,
        direction: Literal["forward", "backward"],
        arrays: Sequence[Array],
        wait: str,
        key: str | None,
        prefetches: tuple[str, ...],
    ) -> Anchors:
        """Note that a module begins. Returns what its gather has to wait for.

        Args:
            direction: which way.
            arrays: what the module received.
            wait: by default: a word of `Ordering`.
            key: of the module; None if no other one prefetches it.
            prefetches: keys of those that it prefetches itself.
        """
        trace, events = get_opaque_trace_state(), self._begun[direction]
        earlier = [e for e in events if e.trace == trace]
        events.append(Event(trace, list(arrays), prefetches))
        for event in earlier:
            if key is not None and key in event.prefetches:
                return Anchors(event.arrays, event.arrays)
        own = list(arrays)
        previous = earlier[-1].arrays if earlier else []
        if direction == "backward":
            previous = previous or own  # never before there is a gradient
        return {
            "free": Anchors([], []),
            "own": Anchors(own, own),
            "first": Anchors(previous, own),
            "each": Anchors(previous, own, True, bool(earlier)),
            "previous": Anchors(previous, previous),
        }[wait]

    def reduced(self) -> list[Array]:
        """Gradient shards of the module that was last in backward."""
        trace = get_opaque_trace_state()
        return next((a for t, a in reversed(self._reduced) if t == trace), [])

    def reduce(self, grads: Sequence[Array | None]) -> None:
        """Note the gradient shards of a module."""
        shards = [g for g in grads if g is not None]
        if shards:
            self._reduced.append((get_opaque_trace_state(), shards))


_LOG: ContextVar[Log | None] = ContextVar("fsdp_jax_log", default=None)


@contextlib.contextmanager
def log() -> Iterator[Log]:
    """The log of the program being traced; the outermost block starts it."""
    if (found := _LOG.get()) is not None:
        yield found
        return
    started = Log()
    token = _LOG.set(started)
    try:
        yield started
    finally:
        _LOG.reset(token)
        started.clear()


def after(
    held: Sequence[Array], arrays: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """Hold `held` back until `arrays` exist. Returns both, to be used from here on."""
    if not held or not arrays:
        return list(held), list(arrays)
    return jax.lax.optimization_barrier((list(held), list(arrays)))


def is_inexact(x: Any) -> bool:
    """Whether an array can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def can_wait(x: Any) -> bool:
    """Whether a barrier may take a value: a floating array in device memory."""
    is_reference = isinstance(jax.typeof(x), AbstractRef)
    return is_inexact(x) and not is_away(x) and not is_reference


def floating(arrays: Sequence[Array]) -> list[Array]:
    """Those that something computed: token ids and the like exist from the start."""
    return [a for a in arrays if can_wait(a)]


_CHECKPOINT = "checkpoint / remat"
_REMAT3 = "remat3"  # the same with jax_remat3
_LOOPS = ("scan", "while_body", "fori_loop")


def in_checkpoint() -> bool:
    """Whether the code being traced runs inside of `jax.checkpoint` or `nnx.remat`.

    A loop inside of the checkpoint does not count: its recomputation would save what
    every iteration gathers, the whole stack.

    Traces say what they were made for under private names; tests/test_remat.py pins
    them. Without them the answer is False, and a block inside of a checkpoint is
    gathered twice in backward instead of once.
    """
    for trace in traces():
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        made_for = getattr(info, "traced_for", None)
        if made_for in (_CHECKPOINT, _REMAT3, *_LOOPS):
            return made_for not in _LOOPS
    return False
