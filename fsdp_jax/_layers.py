"""A scan over stacked layers that gathers one layer ahead, forward and backward.

What lives here: the loop as a function of arrays. What must not: modules (`_scan`), and
how one layer is linearized (`_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fsdp_jax._collectives import GroupComm, Static, gather_group, scatter_group
from fsdp_jax._gather import gather_kept
from fsdp_jax._ordering import Log, is_inexact
from fsdp_jax._schedule import Body, rebuild_vjp, trace_forward, zeros_of

Array = jax.Array


def _layer(stacked: Sequence[Array], k: Array | int) -> list[Array]:
    return [jax.lax.dynamic_index_in_dim(a, k, keepdims=False) for a in stacked]


def run_layers(
    body: Body,
    shards: Sequence[Array],
    stacked: Sequence[Array],
    carry: Sequence[Array],
    consts: Sequence[Array],
    comm: GroupComm,
    log: Log,
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

    Returns:
        The arrays per layer, `(layers, ...)`, then the carry after the last one.
    """
    num_layers, num_carry = shards[0].shape[0], len(carry)
    dtypes = [s.dtype for s in shards]

    def loop(layer, shards, stacked, carry):
        steps = jnp.arange(num_layers)  # made anew in each trace: backward is another

        def step(state, x):
            (carry, full), (k, own) = state, x
            after = jnp.minimum(k + 1, num_layers - 1)
            coming = gather_kept(_layer(shards, after), comm)
            carry, out = layer(full, own, carry)
            return (carry, coming), out

        first = gather_kept(_layer(shards, 0), comm)
        return jax.lax.scan(step, (list(carry), first), (steps, list(stacked)))

    def plain(shards, stacked, carry, consts):
        def layer(full, own, carry):
            results = body(full, [*own, *carry, *consts])
            return results[len(results) - num_carry :], results[: -num_carry or None]

        (carry, _), out = loop(layer, shards, stacked, carry)
        return [*out, *carry]

    def forward(shards, stacked, carry, consts):
        some = any(x.perturbed for x in (*shards, *stacked, *carry, *consts))
        marks = [
            *[x.perturbed for x in stacked],
            *[some and is_inexact(x.value) for x in carry],
            *[x.perturbed for x in consts],
        ]
        diff_members = [i for i, s in enumerate(shards) if s.perturbed]
        shards, stacked, carry, consts = (
            [x.value for x in arrays] for arrays in (shards, stacked, carry, consts)
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

        (carry, last), (out, kept) = loop(layer, shards, stacked, carry)
        return [*out, *carry], (shards, kept, consts, last, Static(saved))

    def backward(residuals, cotangents):
        shards, kept, consts, last, static = residuals
        saved = static.value
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
            coming = gather_kept(_layer(shards, before), comm, kind="regather")
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
            reduced = scatter_group(grads, dtypes, comm)
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
        log.reduce(reduced)
        return (
            reduced,
            _spread(own_cts, own_at, len(stacked)),
            _spread(carry_cts, carry_diff, num_carry),
            _spread(sums, [i - at - num_carry for i in consts_at], len(consts)),
        )

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(list(shards), list(stacked), list(carry), list(consts))


def _spread(arrays: list[Array], places: list[int], length: int) -> list[Array | None]:
    """A list with the arrays at their places and None elsewhere."""
    found = dict(zip(places, arrays, strict=True))
    return [found.get(i) for i in range(length)]
