"""When a group is gathered, freed and gathered again, and what each step waits for.

`run_regathered` runs a module on gathered parameters and replaces every value that
differentiation would save, and that the parameters alone determine, by a second gather
in backward. What must not live here: modules and Variables; everything is a function of
arrays. What steps wait for is decided in `_ordering`, how gathers wait in `_gather`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from fsdp_jax._collectives import gather_group, on_devices
from fsdp_jax._comm import GroupComm, Static, small_members
from fsdp_jax._compiled import in_one
from fsdp_jax._cotangents import to_shards
from fsdp_jax._dependence import depends_on
from fsdp_jax._evaluate import Asking, evaluate
from fsdp_jax._gather import (
    gather_kept,
    grad_dtypes,
    hold,
    kinds_of,
    own_grads,
    perturbed,
    run_in_turn,
    sort_grads,
)
from fsdp_jax._ordering import Anchors, Log, Ordering, after, floating, is_inexact

Array = jax.Array
Body = Callable[[list[Array], list[Array]], list[Array]]


def zeros_of(zero: Any) -> Array:
    return jnp.zeros(zero.shape, zero.dtype)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What one call of a module waits for, and where it says so.

    Attributes:
        ordering: what its collectives wait for by default.
        log: of the program that the call is part of.
        key: how prefetching modules name this one; None if none does.
        forward_prefetch: keys of the modules gathered with it in forward.
        backward_prefetch: the same in backward.
    """

    ordering: Ordering
    log: Log
    key: str | None = None
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()

    def begin_forward(self, inputs: Sequence[Array]) -> Anchors:
        """Note that the module is called. Returns what its gather waits for."""
        return self.log.begin(
            "forward",
            floating(inputs),
            self.ordering.forward,
            self.key,
            self.forward_prefetch,
        )

    def begin_backward(
        self, shards: list[Array], cotangents: list[Array], first: set[int]
    ) -> tuple[list[Array], list[Array], bool]:
        """Hold the shards back until the gather of backward may start.

        Returns them, the gradients to go on with, and whether to gather in turn.

        Without it XLA:TPU moves all second gathers to the front of backward and puts
        every reduction off to its end: 3478 MiB at the peak instead of 1396 (jax
        0.10.2, libtpu 0.0.42, v5e 4x4, 12 blocks, 740 M parameters). It also keeps XLA
        from merging the second gather with the first one.
        """
        anchors = self.log.begin(
            "backward",
            cotangents,
            self.ordering.backward,
            self.key,
            self.backward_prefetch,
        )
        held, late = hold(shards, anchors, first)
        # Its own gradients go on from behind the barrier, all others stay as they are.
        same = [a is c for a, c in zip(anchors.late, cotangents)]
        own = len(late) == len(cotangents) and all(same)
        return held, late if own else cotangents, anchors.each

    def end_backward(
        self, grads: list[Array | None], input_grads: list[Array | None]
    ) -> tuple[list[Array | None], list[Array | None]]:
        """Hand the input gradients on when the reductions have come far enough."""
        earlier = self.log.reduced()
        self.log.reduce(grads)
        if self.ordering.reduction == "own":
            grads, input_grads = _after_some(grads, input_grads)
        elif self.ordering.reduction == "previous":
            _, input_grads = _after_some(earlier, input_grads)
        return grads, input_grads


def _after_some(
    first: Sequence[Array | None], then: Sequence[Array | None]
) -> tuple[list[Array | None], list[Array | None]]:
    """`after` for lists with gaps."""
    held, done = after(
        [x for x in then if x is not None], [x for x in first if x is not None]
    )
    held, done = iter(held), iter(done)
    return (
        [None if x is None else next(done) for x in first],
        [None if x is None else next(held) for x in then],
    )


@dataclasses.dataclass
class Saved:
    """What backward needs to know of one forward, next to the saved arrays.

    Attributes:
        program: the traced forward: outputs, then everything differentiation saves.
        from_params: per output of `program`: whether the parameters alone give it.
        vjp_tree: structure of the saved values.
        diff_members: positions of the members that are differentiated.
        diff_others: positions of the other arrays that are.
        diff_outputs: positions of the outputs that have gradients.
        full: shapes of the gathered arrays.
        small: positions of the members that are packed, or not cut.
    """

    program: ClosedJaxpr
    from_params: list[bool]
    vjp_tree: Any
    diff_members: list[int]
    diff_others: list[int]
    diff_outputs: list[int]
    full: Sequence[Any]
    small: set[int]

    @functools.cached_property
    def asking(self) -> Asking:
        """The forward, to be run while parameters arrive."""
        return Asking(self.program, range(len(self.full)))

    def large(self, asking: Asking) -> list[int]:
        """The large members that a program reads, in that order."""
        return [i for i in asking.order if i not in self.small]

    @property
    def num_outputs(self) -> int:
        """How many results of `program` are outputs of the body."""
        return len(self.from_params) - self.vjp_tree.num_leaves

    def run(self, full: list[Array], others: list[Array]) -> tuple[list, list]:
        """Run the forward. Returns the outputs, and the arrays to keep for backward."""
        return self.sort(evaluate(self.program, [*full, *others]))

    def sort(self, results: list[Array]) -> tuple[list, list]:
        """Part the results of `program`: outputs, and what to keep for backward."""
        kept = [r for r, p in zip(results, self.from_params) if not p]
        return results[: self.num_outputs], kept[self.num_outputs :]


def run_regathered(
    body: Body,
    shards: Sequence[Array],
    others: Sequence[Array],
    comm: GroupComm,
    schedule: Schedule,
    anchors: Anchors,
    sinks: Sequence[Array | None] = (),
) -> list[Array]:
    """Run `body` on gathered parameters that are freed until backward.

    Everything that differentiating `body` would save is traced; saved values that
    depend on the parameters alone (the gathered arrays, and casts or transposes of
    them) are dropped, and computed again in backward from a second gather. Both gathers
    have the gradient of `gather_kept`, so that gradients of gradients are right too.

    Args:
        body: function of the full arrays and of `others`, returning arrays.
        shards: one array per member of the group.
        others: every other array that `body` reads.
        comm: how the group travels.
        schedule: what the collectives of backward wait for.
        anchors: arrays that the gather of forward waits for.
        sinks: as in `gather_kept`.

    Returns:
        The outputs of `body`.
    """
    sinks = list(sinks) or [None] * len(shards)
    dtypes, kinds = grad_dtypes(shards, sinks), kinds_of(shards)
    waits = (anchors.early, anchors.late)
    no_grads = tuple([None] * len(arrays) for arrays in waits)

    def plain(shards, sinks, others, waits):
        full = gather_kept(shards, comm, None, Anchors(*waits), sinks=sinks)
        return body(full, others)

    def forward(shards, sinks, others, waits):
        diff_members = perturbed(shards, sinks)
        own = own_grads(shards, sinks, comm)
        diff_others = [i for i, o in enumerate(others) if o.perturbed]
        shards, sinks, values, (early, late) = jax.tree.map(
            lambda x: x.value, (shards, sinks, others, waits)
        )
        full = jax.eval_shape(lambda x: gather_group(x, comm), shards)
        saved = trace_forward(body, full, values, diff_members, diff_others, comm)
        first = set(saved.large(saved.asking)[:1])
        held, _ = hold(on_devices(shards, comm), Anchors(early, late), first)
        if anchors.each:
            given = saved.asking, saved.small, held, values, comm
            results = run_in_turn(*given, makes_room=anchors.follows, sinks=sinks)
            outputs, kept = saved.sort(results)
        else:
            outputs, kept = saved.run(gather_kept(held, comm, sinks=sinks), values)
        return outputs, (shards, sinks, kept, Static((saved, own)))

    def backward(residuals, cotangents):
        shards, sinks, arrays, static = residuals
        saved: Saved
        saved, own = static.value
        grads: list[Array | None] = [None] * len(shards)
        other_grads: list[Array | None] = [None] * len(others)
        cotangents = [cotangents[i] for i in saved.diff_outputs]
        real = [c for c in cotangents if not isinstance(c, SymbolicZero)]
        if not real:
            return grads, grads, other_grads, no_grads

        def pull_back(full, arrays, real):
            vjp = rebuild_vjp(saved, full, arrays, [None] * len(others))
            arrived = iter(real)
            return vjp(
                [
                    zeros_of(c) if isinstance(c, SymbolicZero) else next(arrived)
                    for c in cotangents
                ]
            )

        out: Any = None
        asking, first = saved.asking, set(saved.large(saved.asking)[-1:])
        if schedule.ordering.backward == "each":
            traced, out = jax.make_jaxpr(pull_back, return_shape=True)(
                saved.full, arrays, real
            )
            asking = Asking(traced, range(len(shards)))
            first = set(saved.large(asking)[:1])
        here = on_devices(shards, comm)
        held, real, each = schedule.begin_backward(here, real, first)
        if each:
            given = asking, saved.small, held, [*arrays, *real], comm
            results = run_in_turn(*given, "regather", sinks=sinks)
            member_cts, other_cts = jax.tree.unflatten(jax.tree.structure(out), results)
        else:
            full = gather_kept(held, comm, kind="regather", sinks=sinks)
            member_cts, other_cts = pull_back(full, arrays, real)
        for i, ct in zip(saved.diff_members, member_cts, strict=True):
            grads[i] = ct
        for i, ct in zip(saved.diff_others, other_cts, strict=True):
            other_grads[i] = ct
        grads = to_shards(grads, dtypes, comm)
        if comm.defer != "all":  # else there is nothing to wait for
            grads, other_grads = schedule.end_backward(grads, other_grads)
        return *sort_grads(grads, sinks, kinds, own), other_grads, no_grads

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return in_one(run)(list(shards), sinks, list(others), waits)


def trace_forward(
    body: Body,
    full: Sequence[Any],
    others: list[Array],
    diff_members: list[int],
    diff_others: list[int],
    comm: GroupComm,
    num_again: int = 0,
) -> Saved:
    """Trace `body` and its linearization; sort what to keep from what to compute again.

    Args:
        body: as in `run_regathered`.
        full: shapes of the gathered arrays, which do not exist yet.
        others: as in `run_regathered`.
        diff_members: positions in `full` that are differentiated.
        diff_others: positions in `others` that are.
        comm: how the group travels.
        num_again: how many of `others`, at their end, backward has without saving.
    """
    notes: dict[str, Any] = {}

    def program(full, others):
        def differentiated(members, arrays):
            all_full, all_others = list(full), list(others)
            for i, m in zip(diff_members, members):
                all_full[i] = m
            for i, a in zip(diff_others, arrays):
                all_others[i] = a
            outputs = body(all_full, all_others)
            notes["diff"] = [i for i, o in enumerate(outputs) if is_inexact(o)]
            return [outputs[i] for i in notes["diff"]], outputs

        _, vjp, outputs = jax.vjp(
            differentiated,
            [full[i] for i in diff_members],
            [others[i] for i in diff_others],
            has_aux=True,
        )
        saved, notes["tree"] = jax.tree.flatten(vjp)
        return outputs, saved

    closed, shapes = jax.make_jaxpr(program, return_shape=True)(full, others)
    lost = len(others) - num_again
    marks = [False] * len(full) + [True] * lost + [False] * num_again
    depends = depends_on(closed, marks)
    num_outputs = len(shapes[0])
    from_params = [False] * num_outputs + [not d for d in depends[num_outputs:]]
    return Saved(
        closed,
        from_params,
        notes["tree"],
        diff_members,
        diff_others,
        notes["diff"],
        full,
        small_members(full, comm),
    )


def rebuild_vjp(
    saved: Saved, full: list[Array], kept: list[Array], others: Sequence[Array | None]
) -> Callable:
    """Put the linearization together again.

    Args:
        saved: what forward left.
        full: freshly gathered arrays.
        kept: arrays that forward kept.
        others: those that backward has without saving; None in other places.
    """
    again = iter(evaluate(saved.program, [*full, *others], saved.from_params))
    stored = iter(kept)
    leaves = [
        next(again if p else stored) for p in saved.from_params[saved.num_outputs :]
    ]
    return jax.tree.unflatten(saved.vjp_tree, leaves)
