"""A scan over stacked layers that gathers one layer ahead, forward and backward.

What lives here: the loop as a function of arrays. What must not: modules (`_scan`), and
how one layer is linearized (`_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fsdp_jax._collectives import gather_group
from fsdp_jax._comm import GroupComm, Static
from fsdp_jax._compiled import in_one
from fsdp_jax._cotangents import to_shards
from fsdp_jax._gather import (
    gather_kept,
    grad_dtypes,
    kinds_of,
    own_grads,
    perturbed,
    sort_grads,
)
from fsdp_jax._ordering import Log, is_inexact
from fsdp_jax._raw_reads import SCOPE
from fsdp_jax._schedule import Body, rebuild_vjp, trace_forward, zeros_of

Array = jax.Array


@jax.named_scope(SCOPE)
def _layer(stacked: Sequence[Any], k: Array | int) -> list[Any]:
    return jax.tree.map(
        lambda a: jax.lax.dynamic_index_in_dim(a, k, keepdims=False), list(stacked)
    )


def run_layers(
    body: Body,
    shards: Sequence[Array],
    stacked: Sequence[Array],
    carry: Sequence[Array],
    consts: Sequence[Array],
    comm: GroupComm,
    log: Log,
    sinks: Sequence[Array | None] = (),
) -> list[Array]:
    """Run `body` once per layer; the next layer is gathered while one computes.

    Forward gathers the last layer once more than it needs: backward begins with that
    copy. The last gather of backward is not used either. What differentiating `body`
    would save and the parameters or `consts` determine is computed again in backward.

    Args:
        body: function of one layer's full arrays and of one layer of `stacked`, the
            carry and `consts`, in this order; returns arrays per layer, then the carry.
        shards: one array per member of the group, `(layers, ...)`.
        stacked: other arrays that every layer has its own of, `(layers, ...)`.
        carry: what one layer hands to the next.
        consts: what every layer reads.
        comm: how a layer of the group travels.
        log: told about the reductions.
        sinks: as in `gather_kept`, `(layers, ...)` each.

    Returns:
        The arrays per layer, `(layers, ...)`, then the carry after the last one.
    """
    num_layers, num_carry = shards[0].shape[0], len(carry)
    sinks = list(sinks) or [None] * len(shards)
    dtypes, kinds = grad_dtypes(shards, sinks), kinds_of(shards)

    def gather(shards, sinks, k, kind="gather"):
        own = _layer(sinks, k)
        return gather_kept(_layer(shards, k), comm, kind=kind, sinks=own)

    def loop(layer, shards, sinks, stacked, carry):
        steps = jnp.arange(num_layers)  # made anew in each trace: backward is another

        def step(state, x):
            (carry, full), (k, own) = state, x
            after = jnp.minimum(k + 1, num_layers - 1)
            coming = gather(shards, sinks, after)
            carry, out = layer(full, own, carry)
            return (carry, coming), out

        first = gather(shards, sinks, 0)
        return jax.lax.scan(step, (list(carry), first), (steps, list(stacked)))

    def plain(shards, sinks, stacked, carry, consts):
        def layer(full, own, carry):
            results = body(full, [*own, *carry, *consts])
            return results[len(results) - num_carry :], results[: -num_carry or None]

        (carry, _), out = loop(layer, shards, sinks, stacked, carry)
        return [*out, *carry]

    def forward(shards, sinks, stacked, carry, consts):
        diff_members = perturbed(shards, sinks)
        own_members = own_grads(shards, sinks, comm)
        some = bool(diff_members) or any(
            x.perturbed for x in (*stacked, *carry, *consts)
        )
        marks = [
            *[x.perturbed for x in stacked],
            *[some and is_inexact(x.value) for x in carry],
            *[x.perturbed for x in consts],
        ]
        shards, sinks, stacked, carry, consts = jax.tree.map(
            lambda x: x.value, (shards, sinks, stacked, carry, consts)
        )
        saved = trace_forward(
            body,
            jax.eval_shape(lambda s: gather_group(_layer(s, 0), comm), shards),
            [*jax.eval_shape(lambda s: _layer(s, 0), stacked), *carry, *consts],
            diff_members,
            [i for i, mark in enumerate(marks) if mark],
            comm,
            num_again=len(consts),
        )

        def layer(full, own, carry):
            results, kept = saved.run(full, [*own, *carry, *consts])
            at = len(results) - num_carry
            return results[at:], (results[:at], kept)

        (carry, last), (out, kept) = loop(layer, shards, sinks, stacked, carry)
        note = Static((saved, own_members))
        return [*out, *carry], (shards, sinks, kept, consts, last, note)

    def backward(residuals, cotangents):
        shards, sinks, kept, consts, last, static = residuals
        saved, own_members = static.value
        cotangents = [
            zeros_of(c) if isinstance(c, SymbolicZero) else c for c in cotangents
        ]
        num_out, at = len(cotangents) - num_carry, len(stacked)
        own_at = [i for i in saved.diff_others if i < at]
        consts_at = [i for i in saved.diff_others if i >= at + num_carry]
        out_diff = [i for i in saved.diff_outputs if i < num_out]
        carry_diff = [i - num_out for i in saved.diff_outputs if i >= num_out]

        def step(state, x):
            (carry_cts, sums, full), (k, kept, out_cts) = state, x
            before = jnp.maximum(k - 1, 0)
            coming = gather(shards, sinks, before, "regather")
            given = [*[None] * (at + num_carry), *consts]
            vjp = rebuild_vjp(saved, full, kept, given)
            member_cts, other_cts = vjp([*out_cts, *carry_cts])
            by_place = dict(zip(saved.diff_others, other_cts, strict=True))
            grads: list[Array | None] = [None] * len(shards)
            for i, ct in zip(saved.diff_members, member_cts, strict=True):
                grads[i] = ct
            carry_cts = [by_place[at + i] for i in carry_diff]
            sums = [s + by_place[i] for s, i in zip(sums, consts_at)]
            own_cts = [by_place[i] for i in own_at]
            reduced = to_shards(grads, dtypes, comm)
            return (carry_cts, sums, coming), (reduced, own_cts)

        init = (
            [cotangents[num_out + i] for i in carry_diff],
            [jnp.zeros_like(consts[i - at - num_carry]) for i in consts_at],
            last,
        )
        xs = (jnp.arange(num_layers), kept, [cotangents[i] for i in out_diff])
        (carry_cts, sums, _), (reduced, own_cts) = jax.lax.scan(
            step, init, xs, reverse=True
        )
        if comm.defer != "all":
            log.reduce(reduced)
        return (
            *sort_grads(reduced, sinks, kinds, own_members),
            _spread(own_cts, own_at, len(stacked)),
            _spread(carry_cts, carry_diff, num_carry),
            _spread(sums, [i - at - num_carry for i in consts_at], len(consts)),
        )

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return in_one(run)(list(shards), sinks, list(stacked), list(carry), list(consts))


def _spread(arrays: list[Array], places: list[int], length: int) -> list[Array | None]:
    """A list with the arrays at their places and None elsewhere."""
    found = dict(zip(places, arrays, strict=True))
    return [found.get(i) for i in range(length)]
