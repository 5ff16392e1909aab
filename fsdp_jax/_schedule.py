"""When a group is gathered, freed and gathered again, and what each step waits for.

Two ways to run a module on its gathered parameters inside a per-device program:
`gather_kept` leaves them to the differentiation, which saves them for backward;
`run_regathered` replaces every saved value that the parameters alone determine by a
second gather in backward. What must not live here: modules and Variables; everything
is a function of arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fsdp_jax._collectives import GroupComm, Static, gather_group, scatter_group
from fsdp_jax._dependence import depends_on, evaluate

Array = jax.Array
Body = Callable[[list[Array], list[Array]], list[Array]]


def _zeros(zero: Any) -> Array:
    return jnp.zeros(zero.shape, zero.dtype)


def _is_inexact(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def gather_kept(shards: Sequence[Array], comm: GroupComm) -> list[Array]:
    """Gather a group; in backward reduce-scatter the gradients of the full arrays.

    Members that are not differentiated, or whose gradient is zero for want of use, are
    not reduced.

    Args:
        shards: one array per member of the group.
        comm: how the group travels.

    Returns:
        The full arrays.
    """
    dtypes = [s.dtype for s in shards]

    def plain(shards):
        return gather_group(shards, comm)

    def forward(shards):
        needed = Static([s.perturbed for s in shards])
        return gather_group([s.value for s in shards], comm), needed

    def backward(needed, cotangents):
        grads = [
            None if isinstance(c, SymbolicZero) or not n else c
            for n, c in zip(needed.value, cotangents, strict=True)
        ]
        return (scatter_group(grads, dtypes, comm),)

    gather = jax.custom_vjp(plain)
    gather.defvjp(forward, backward, symbolic_zeros=True)
    return gather(list(shards))


@dataclasses.dataclass
class _Saved:
    """What backward needs to know of one forward, next to the saved arrays.

    Attributes:
        program: the traced forward: outputs, then everything differentiation saves.
        from_params: per output of `program`: whether the parameters alone give it.
        vjp_tree: structure of the saved values.
        diff: differentiated members, others and outputs, by position.
    """

    program: ClosedJaxpr
    from_params: list[bool]
    vjp_tree: Any
    diff_members: list[int]
    diff_others: list[int]
    diff_outputs: list[int]


def run_regathered(
    body: Body, shards: Sequence[Array], others: Sequence[Array], comm: GroupComm
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

    Returns:
        The outputs of `body`.
    """
    dtypes = [s.dtype for s in shards]

    def plain(shards, others):
        return body(gather_kept(shards, comm), others)

    def forward(shards, others):
        full = gather_kept([s.value for s in shards], comm)
        values = [o.value for o in others]
        diff_members = [i for i, s in enumerate(shards) if s.perturbed]
        diff_others = [i for i, o in enumerate(others) if o.perturbed]
        outputs, arrays, saved = _trace_forward(
            body, full, values, diff_members, diff_others
        )
        return outputs, ([s.value for s in shards], arrays, Static(saved))

    def backward(residuals, cotangents):
        shards, arrays, static = residuals
        saved: _Saved = static.value
        grads: list[Array | None] = [None] * len(shards)
        other_grads: list[Array | None] = [None] * len(others)
        cotangents = [cotangents[i] for i in saved.diff_outputs]
        real = [c for c in cotangents if not isinstance(c, SymbolicZero)]
        if not real:
            return grads, other_grads
        shards, real = _after(shards, real)
        full = gather_kept(shards, comm)
        vjp = _rebuild_vjp(saved, full, arrays, len(others))
        arrived = iter(real)
        cotangents = [
            _zeros(c) if isinstance(c, SymbolicZero) else next(arrived)
            for c in cotangents
        ]
        member_cts, other_cts = vjp(cotangents)
        for i, ct in zip(saved.diff_members, member_cts, strict=True):
            grads[i] = ct
        for i, ct in zip(saved.diff_others, other_cts, strict=True):
            other_grads[i] = ct
        return scatter_group(grads, dtypes, comm), other_grads

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(list(shards), list(others))


def _after(shards: list[Array], arrays: list[Array]) -> tuple[list, list]:
    """Hold the shards back until `arrays` exist, so that a gather cannot start sooner.

    Without it XLA:TPU moves all second gathers to the front of backward and puts every
    reduction off to its end: 3478 MiB at the peak instead of 1396 (jax 0.10.2, libtpu
    0.0.42, v5e 4x4, 12 blocks, 740 M parameters). The order has to hang on arrays;
    scalars made of them did not hold.
    """
    return jax.lax.optimization_barrier((shards, arrays))


def _trace_forward(
    body: Body,
    full: list[Array],
    others: list[Array],
    diff_members: list[int],
    diff_others: list[int],
) -> tuple[list[Array], list[Array], _Saved]:
    """Run `body` and its linearization; sort what to keep from what to compute again.

    Returns:
        The outputs of `body`, the saved arrays that must be kept, and the rest of what
        backward needs.
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
            notes["diff"] = [i for i, o in enumerate(outputs) if _is_inexact(o)]
            rest = [o for o in outputs if not _is_inexact(o)]
            return [outputs[i] for i in notes["diff"]], rest

        outputs, vjp, rest = jax.vjp(
            differentiated,
            [full[i] for i in diff_members],
            [others[i] for i in diff_others],
            has_aux=True,
        )
        saved, notes["tree"] = jax.tree.flatten(vjp)
        return outputs, rest, saved

    closed, shapes = jax.make_jaxpr(program, return_shape=True)(full, others)
    num_diff, num_rest = len(shapes[0]), len(shapes[1])
    results = jaxpr_as_fun(closed)(*full, *others)
    depends = depends_on(closed, [False] * len(full) + [True] * len(others))
    num_outputs = num_diff + num_rest
    from_params = [False] * num_outputs + [not d for d in depends[num_outputs:]]
    kept = [
        r for r, p in zip(results[num_outputs:], from_params[num_outputs:]) if not p
    ]
    outputs: list[Any] = [None] * num_outputs
    is_diff = set(notes["diff"])
    for i, r in zip(notes["diff"], results[:num_diff]):
        outputs[i] = r
    others_at = [i for i in range(num_outputs) if i not in is_diff]
    for i, r in zip(others_at, results[num_diff:num_outputs]):
        outputs[i] = r
    saved = _Saved(
        closed, from_params, notes["tree"], diff_members, diff_others, notes["diff"]
    )
    return outputs, kept, saved


def _rebuild_vjp(
    saved: _Saved, full: list[Array], kept: list[Array], num_others: int
) -> Callable:
    """Put the linearization together again from a fresh gather and the kept arrays."""
    again = iter(
        evaluate(saved.program, [*full, *[None] * num_others], saved.from_params)
    )
    stored = iter(kept)
    num_outputs = len(saved.from_params) - saved.vjp_tree.num_leaves
    leaves = [next(again if p else stored) for p in saved.from_params[num_outputs:]]
    return jax.tree.unflatten(saved.vjp_tree, leaves)
