"""Gather a group and hold its gathers back until what they wait for exists.

What lives here: gathers that differentiate, and running a program while its parameters
arrive. What must not: what is waited for (`_ordering`), and what backward needs of a
forward (`_schedule`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fsdp_jax._collectives import gather_group, on_devices
from fsdp_jax._comm import GroupComm, Static, cast_floating
from fsdp_jax._compiled import in_one
from fsdp_jax._cotangents import InnerGradientError, in_f, to_shards
from fsdp_jax._evaluate import Asking
from fsdp_jax._move import is_away, to_space
from fsdp_jax._ordering import Anchors, Log, after, can_wait, floating

Array = jax.Array


def hold(
    shards: list[Array], anchors: Anchors, first: set[int]
) -> tuple[list[Array], list[Array]]:
    """Hold shards back; those at the positions `first` for the early anchors only.

    Returns:
        The shards, and the late anchors as they come out of the barrier.
    """
    if anchors.early is anchors.late:
        return after(shards, anchors.late)
    early, _ = after([s for i, s in enumerate(shards) if i in first], anchors.early)
    rest = [s for i, s in enumerate(shards) if i not in first]
    rest, late = after(rest, anchors.late)
    sources = iter(early), iter(rest)
    return [next(sources[i not in first]) for i in range(len(shards))], late


def gather_kept(
    shards: Sequence[Array],
    comm: GroupComm,
    log: Log | None = None,
    anchors: Anchors | None = None,
    kind: str = "gather",
    sinks: Sequence[Array | None] = (),
    full: Sequence[Array | None] = (),
) -> list[Array]:
    """Gather a group; in backward reduce-scatter the gradients of the full arrays.

    Members that are not differentiated, or whose gradient is zero for want of use, are
    not reduced.

    Args:
        shards: one array per member of the group.
        comm: how the group travels.
        log: told about the reductions; None if the caller does that.
        anchors: arrays that the gather waits for; the early ones, as it is not known
            what is read first.
        kind: of the gather, for its name in profiles.
        sinks: arrays that receive the gradients of members in place of their shards, as
            far as `comm.defer` lets them be reduced; None for members without.
        full: arrays that were gathered before; None for members without.

    Returns:
        The full arrays.
    """
    waits = anchors.early if anchors is not None else []
    sinks = list(sinks) or [None] * len(shards)
    dtypes, kinds = grad_dtypes(shards, sinks), kinds_of(shards)
    gathered = any(f is not None for f in full)

    def plain(shards, sinks, full, waits):
        if gathered:
            here = on_devices(shards, comm)
            cast = [cast_floating(s, comm.param_dtype) for s in here]
            return [c if f is None else f for c, f in zip(cast, full)]
        return gather_group(after(on_devices(shards, comm), waits)[0], comm, kind)

    def forward(shards, sinks, full, waits):
        needed = Static((perturbed(shards, sinks), own_grads(shards, sinks, comm)))
        values = jax.tree.map(lambda x: x.value, (shards, sinks, full, waits))
        return gather(*values), needed  # itself: gradients of gradients come here

    def backward(needed, cotangents):
        members, own = needed.value
        grads = [
            c if i in members and not isinstance(c, SymbolicZero) else None
            for i, c in enumerate(cotangents)
        ]
        reduced = to_shards(grads, dtypes, comm)
        if log is not None:
            log.reduce(reduced)
        of_shards, of_sinks = sort_grads(reduced, sinks, kinds, own)
        return of_shards, of_sinks, [None] * len(full), [None] * len(waits)

    gather = jax.custom_vjp(plain)
    gather.defvjp(forward, backward, symbolic_zeros=True)
    return in_one(gather)(list(shards), sinks, list(full), waits)


def grad_dtypes(
    shards: Sequence[Array], sinks: Sequence[Array | None]
) -> list[jnp.dtype]:
    """The dtype of each member's gradient: of what receives it."""
    return [s.dtype if k is None else k.dtype for s, k in zip(shards, sinks)]


def refuse_inner(shards: Sequence[Array], comm: GroupComm) -> list[Array]:
    """The shards; raises if the user's function differentiates them itself.

    Of a program that does not say over which devices; and while gradients are left to a
    later call, so that it would get other numbers. Asked of shards as the module holds
    them: behind a barrier all of them look differentiated.

    Raises:
        RuntimeError: when it is differentiated.
    """
    deferred = comm.defer in ("all", "all_reduce")
    if not deferred and not in_f():
        return list(shards)

    def forward(shard, cut):
        if deferred and cut and shard.perturbed:
            raise RuntimeError(
                f"f differentiates with respect to the parameters of module "
                f"{comm.name or 'the root'!r} itself, while their gradients are not "
                "reduced (set_requires_gradient_sync or set_requires_all_reduce is "
                "False), so it would get other numbers. Set gradient sync to True for "
                "this call."
            )
        return shard.value, None

    def backward(_, ct):
        some = not isinstance(ct, SymbolicZero)
        if some and in_f() and comm.mesh.num_devices > 1:
            name = comm.name or "the root"
            raise InnerGradientError(f"the parameters of module {name!r}")
        return (ct if some else None,)

    def one(shard, cut):  # one by one: some members may be frozen
        check = jax.custom_vjp(lambda shard: shard)
        rule = functools.partial(forward, cut=cut)
        check.defvjp(rule, backward, symbolic_zeros=True)
        return check(shard)

    return [one(s, dim is not None) for s, dim in zip(shards, comm.dims, strict=True)]


def perturbed(shards: Sequence[Any], sinks: Sequence[Any]) -> list[int]:
    """Positions of the members whose shard, or sink, is differentiated."""
    pairs = enumerate(zip(shards, sinks, strict=True))
    return [i for i, (s, k) in pairs if s.perturbed or (k is not None and k.perturbed)]


def own_grads(
    shards: Sequence[Any], sinks: Sequence[Any], comm: GroupComm
) -> list[int]:
    """Positions of the members whose shard itself gets a gradient.

    One that has a sink too if somebody else than the program that made the sink
    differentiates it: from outside, to second order. While reductions are left to a
    later call nobody else does, see `refuse_inner`.
    """
    pairs = enumerate(zip(shards, sinks, strict=True))
    return [i for i, (s, k) in pairs if s.perturbed and (k is None or not comm.defer)]


def kinds_of(shards: Sequence[Array]) -> list[tuple[Any, bool]]:
    """Of each shard the dtype, and whether it is in host memory."""
    return [(s.dtype, is_away(s)) for s in shards]


def sort_grads(
    grads: Sequence[Array | None],
    sinks: Sequence[Array | None],
    kinds: Sequence[tuple[Any, bool]],
    own: Sequence[int],
) -> tuple[list[Array | None], list[Array | None]]:
    """The gradients that belong to shards, and those that belong to sinks.

    Args:
        grads: one per member; None for none.
        sinks: as in `gather_kept`.
        kinds: of the shards, as `kinds_of` says; so have their gradients to be.
        own: as `own_grads` says.
    """

    def settled(grad: Array, dtype: Any, away: bool) -> Array:
        grad = grad.astype(dtype)
        return to_space(grad, jax.memory.Space.Host) if away else grad

    of_shards = [
        settled(g, *kind) if g is not None and i in own else None
        for i, (g, kind) in enumerate(zip(grads, kinds, strict=True))
    ]
    of_sinks = [None if k is None else g for g, k in zip(grads, sinks, strict=True)]
    return of_shards, of_sinks


def run_in_turn(
    asking: Asking,
    small: set[int],
    shards: Sequence[Array],
    others: Sequence[Array],
    comm: GroupComm,
    kind: str = "gather",
    makes_room: bool = False,
    sinks: Sequence[Array | None] = (),
) -> list[Array]:
    """Run a traced program while its large parameters are gathered one after the other.

    In the order in which the program reads them, p0, p1, ...: p0 is gathered ahead, by
    what its shard waits for. Small ones that travel together, then p1, start when p0 is
    there. From then on, p[n + 2] starts when p[n + 1] is there and what p[n] was read
    for is computed, so that something is left to compute beside every gather.

    With `makes_room`, and four or more of them, the last one comes one place earlier:
    what remains to be computed is left to p0 of the next module. Nothing was found that
    makes XLA:TPU hold that p0 until here: behind a barrier whose other arrays are used
    no further it started before them.

    Args:
        asking: function of the full arrays, which it asks for, then of `others`.
        small: positions of the members that are not large.
        shards: one array per member of the group.
        others: the other inputs.
        comm: how the group travels.
        kind: of the gathers, for their names in profiles.
        makes_room: whether to leave something to the next module.
        sinks: as in `gather_kept`.

    Returns:
        All results.
    """
    large = [i for i in asking.order if i not in small]
    together = [i for i in range(len(shards)) if i not in large]
    travel = [i for i in asking.order if i in small and comm.dims[i] is not None]
    full: dict[int, Array] = {}
    rest = deque(large)
    makes_room = makes_room and len(large) > 3

    def wait(held: list[Array], waits: list[Array], there: list[int]):
        """Hold arrays back until others, and gathers, are there; both to be used on."""
        places = [i for i, w in enumerate(waits) if can_wait(w)]
        given = [*[waits[i] for i in places], *[full[i] for i in there]]
        held, given = after(held, given)
        full.update(zip(there, given[len(places) :], strict=True))
        passed = dict(zip(places, given))
        return held, [passed.get(i, w) for i, w in enumerate(waits)]

    def start(members: list[int], waits: list[Array], there: list[int]) -> list[Array]:
        held, waits = wait([shards[i] for i in members], waits, there)
        if members:
            own = [sinks[i] for i in members] if sinks else ()
            gathered = gather_kept(held, comm.only(members), kind=kind, sinks=own)
            full.update(zip(members, gathered, strict=True))
        return waits

    def follow(waits: list[Array]) -> list[Array]:
        if not rest:
            return waits
        member = rest.popleft()
        before = large.index(member) - 1
        there = travel if before == 0 and travel else large[before : before + 1]
        return start([member], waits, there if before >= 0 else [])

    def ask(member: int, besides: list[Array]) -> tuple[Array, list[Array]]:
        while member not in full:  # one equation reads several
            besides = follow(besides)
        if makes_room and member == large[-3]:
            besides = follow(besides)
        if makes_room and member == large[-2]:
            while large[-1] not in full:  # read by one equation with those before it
                besides = follow(besides)
            held, _ = wait(floating(besides), [], large[-1:])
            arrived = iter(held)
            besides = [next(arrived) if can_wait(b) else b for b in besides]
        return full[member], besides

    def done(member: int, results: list[Array]) -> list[Array]:
        return follow(results) if member in large else results

    follow([])
    start(together, [], large[:1])
    follow([])
    return asking([*[None] * len(shards), *others], ask, done)
