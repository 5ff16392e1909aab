"""The local batch in slices: one loop that adds up what each of them gives.

What lives here: the loop, and how its slices' results become one. What must not: how
one slice is differentiated (`_program`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from fsdp_jax import _loss
from fsdp_jax._dependence import depends_on
from fsdp_jax._evaluate import evaluate
from fsdp_jax._means import mean_over_rows
from fsdp_jax._move import memory_space, to_space
from fsdp_jax._spec import dotted
from fsdp_jax._user import Call, Outcome

Array = jax.Array
Parts = tuple[dict[int, Array], dict[int, Array]]


@dataclasses.dataclass(frozen=True)
class Slices:
    """What is cut into slices.

    Attributes:
        count: number of slices.
        arrays: positions of the arrays that are sliced, and the dim of each; others are
            the same for every slice.
        diff_at: position of each differentiated array among all arrays.
    """

    count: int
    arrays: tuple[tuple[int, int], ...]
    diff_at: tuple[int, ...]

    @property
    def diff(self) -> dict[int, int]:
        """Dims of what is sliced, by its position among the differentiated arrays."""
        dims = dict(self.arrays)
        return {i: dims[at] for i, at in enumerate(self.diff_at) if at in dims}

    def cut(self, diff: Sequence[Array], arrays: Sequence[Array]) -> Parts:
        """Arrays `(..., rows, ...)` as `(count, ..., rows / count, ...)`."""

        def cut(x: Array, dim: int) -> Array:
            rows = x.shape[dim] // self.count
            x = x.reshape(*x.shape[:dim], self.count, rows, *x.shape[dim + 1 :])
            return jnp.moveaxis(x, dim, 0)

        return {i: cut(diff[i], dim) for i, dim in self.diff.items()}, {
            at: cut(arrays[at], dim) for at, dim in self.arrays
        }


@dataclasses.dataclass
class _Traced:
    """One slice, traced.

    Attributes:
        closed: results by `(loss, weight), gradients, others`.
        num_loss: how many of them are the loss.
        num_grads: how many are gradients.
        carried: by the position of an array, the result that replaces it.
        diff_at: positions of the differentiated arrays, which are its first inputs.
        num_arrays: how many arrays there are; the next inputs.
        inputs: from parts, state and counts to the inputs of `closed`.
    """

    closed: ClosedJaxpr
    num_loss: int
    num_grads: int
    carried: dict[int, int]
    diff_at: tuple[int, ...]
    num_arrays: int
    inputs: Callable[[Parts, Mapping[int, Array], Any], list[Any]]

    def run(self, parts: Parts, state: Mapping[int, Array], counts: Any, wanted=None):
        """The results of one slice, or the wanted ones without further effects."""
        return evaluate(self.closed, self.inputs(parts, state, counts), wanted)

    def depends(self, marked: Callable[[int, bool], bool]) -> list[bool]:
        """Which results depend on marked inputs, which are known by the position of an
        array, and whether it is the one to differentiate."""
        marks = [marked(at, True) for at in self.diff_at]
        marks += [marked(at, False) for at in range(self.num_arrays)]
        rest = len(self.closed.jaxpr.invars) - len(marks)
        return depends_on(self.closed, [*marks, *[False] * rest], into_loops=True)


def _replaced(arrays: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    return [new.get(i, x) for i, x in enumerate(arrays)]


def over_slices(
    one: Callable,
    call: Call,
    slices: Slices,
    diff: Sequence[Array],
    arrays: Sequence[Array],
    outcome: Callable[[], Outcome],
) -> tuple[Array, list[Array], list[Array]]:
    """Differentiate every slice of the batch and add up.

    Args:
        one: function of the differentiated arrays, of all arrays with one slice of the
            batch, and of what the loss counts; returns the loss in a list, the
            gradients, and every other result. Traced once.
        call: the user's call.
        slices: what is sliced.
        diff: the differentiated arrays; those of the batch whole.
        arrays: all arrays, with the whole local batch.
        outcome: of the call, once `one` was traced.

    Returns:
        The global value; the gradients, summed, those of sliced arrays joined; the
        other results, those of the last slice where they are state, else joined.
    """
    parts = slices.cut(diff, arrays)
    traced = _trace(one, call, slices, diff, arrays, parts, outcome)
    before = {at: arrays[at] for at in traced.carried}
    _check_carried(call, traced, before)
    counts = _counts(call, slices, traced, parts, before)
    num_loss, num_all = traced.num_loss, traced.num_loss + traced.num_grads
    avals = traced.closed.out_avals
    others = [i for i in range(num_all, len(avals)) if i not in traced.carried.values()]
    summed = [i for i in range(traced.num_grads) if i not in slices.diff]

    share = _loss.slices_in(call.request, slices.count)
    spaces = {at: memory_space(x) for at, x in before.items()}

    def step(carry, parts):
        state, sums, total = carry
        results = traced.run(parts, state, counts)
        grads = [g / share if share != 1 else g for g in results[num_loss:num_all]]
        state = {
            at: to_space(results[place], spaces[at])
            for at, place in traced.carried.items()
        }
        sums = [s + grads[i] for s, i in zip(sums, summed)]
        total = jax.tree.map(jnp.add, total, _loss.widened(results[:num_loss]))
        return (state, sums, total), (
            [grads[i] for i in slices.diff],
            [results[i] for i in others],
        )

    grads = avals[num_loss:num_all]
    init = (
        before,
        [jnp.zeros(grads[i].shape, grads[i].dtype) for i in summed],
        _zero_loss(traced),
    )
    (state, sums, total), (of_batch, new) = jax.lax.scan(step, init, parts)
    value, _ = _loss.start(call.request, call.mesh, _as_loss(total), slices.count)
    value = value.astype(avals[0].dtype)
    by_place = {i: g for i, g in zip(summed, sums)}
    by_place |= {
        i: _joined(g, dim) for (i, dim), g in zip(slices.diff.items(), of_batch)
    }
    changes = {*dict(slices.arrays), *traced.carried}
    differs = traced.depends(lambda at, _: at in changes)
    rest = {i: _one_of(call, x, differs[i]) for i, x in zip(others, new)}
    rest |= {place: state[at] for at, place in traced.carried.items()}
    return (
        value,
        [by_place[i] for i in range(traced.num_grads)],
        [rest[i] for i in range(num_all, len(avals))],
    )


def _trace(one, call, slices, diff, arrays, parts, outcome) -> _Traced:
    def inputs(parts, state, counts):
        of_diff, of_arrays = parts
        written = {i: state[at] for i, at in enumerate(slices.diff_at) if at in state}
        of_diff = {**of_diff, **written}
        given = _replaced(diff, of_diff), _replaced(arrays, {**of_arrays, **state})
        return jax.tree.leaves((*given, counts))

    def flat(*leaves):
        return one(*jax.tree.unflatten(tree, leaves))

    weighted = call.request.reduction == "weighted"
    wide = jnp.zeros((), jnp.promote_types(jnp.float32, jnp.result_type(float)))
    counts = (wide, wide) if weighted else wide
    first = jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), parts)
    tree = jax.tree.structure((list(diff), list(arrays), counts))
    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*inputs(first, {}, counts))
    num_loss, num_grads = len(shapes[0]), len(shapes[1])
    carried = {
        at: num_loss + num_grads + place
        for place, at in enumerate(outcome().updates)
        if at is not None
    }
    at = slices.diff_at
    return _Traced(closed, num_loss, num_grads, carried, at, len(arrays), inputs)


def _as_loss(parts: Sequence[Array]) -> Any:
    return tuple(parts) if len(parts) > 1 else parts[0]


def _zero_loss(traced: _Traced) -> list[Array]:
    avals = traced.closed.out_avals[: traced.num_loss]
    return _loss.widened([jnp.zeros(a.shape, a.dtype) for a in avals])


def _check_carried(call: Call, traced: _Traced, before: Mapping[int, Array]) -> None:
    """Raise if a Variable has another shape or dtype after a slice."""
    for at, place in traced.carried.items():
        old, new = jax.typeof(before[at]), traced.closed.out_avals[place]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            name = dotted(call.variables[at].path[1:])
            raise ValueError(
                f"{call.request.who}: f changes {name!r} "
                f"from {old.str_short()} to {new.str_short()}, so the next micro-batch "
                "cannot go on with it. Keep its shape and dtype."
            )


def _counts(call: Call, slices: Slices, traced: _Traced, parts: Parts, before) -> Any:
    """What the loss of each slice counts in the global value.

    For weighted losses that takes the weights of all slices first: a loop that computes
    nothing else, unless they depend on the parameters or on what a slice changes.
    """
    request, mesh = call.request, call.mesh
    if request.reduction != "weighted":
        return jnp.ones(())  # as in `_loss.start`
    _, by_diff, *_ = traced.depends(lambda at, diff: diff)
    loss, weight, *_ = traced.depends(lambda at, diff: at in traced.carried)
    by_state = weight or (by_diff and loss)
    carried = sorted(traced.carried.items(), key=lambda item: item[1])
    carried = carried if by_state else []
    places = {place for _, place in carried}
    wanted = [
        i == 1 or (i == 0 and by_diff) or i in places
        for i in range(len(traced.closed.jaxpr.outvars))
    ]
    nothing = jnp.zeros(())

    def step(carry, parts):
        state, (loss, weight) = carry
        results = iter(traced.run(parts, state, (nothing, nothing), wanted))
        own = [next(results)] if by_diff else [jnp.zeros(loss.shape, loss.dtype)]
        own = _loss.widened([*own, next(results)])
        state = {**state, **{at: next(results) for at, _ in carried}}
        return (state, [loss + own[0], weight + own[1]]), None

    (_, sums), _ = jax.lax.scan(step, (dict(before), _zero_loss(traced)), parts)
    return _loss.start(request, mesh, _as_loss(sums))[1]


def _joined(x: Array, dim: int = 0) -> Array:
    """`(count, ..., rows, ...)` as `(..., count * rows, ...)`."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _one_of(call: Call, x: Array, differs: bool) -> Array:
    """One array of those that the slices returned, `(count, ...)`."""
    if x.ndim > 1:
        return _joined(x)
    if not differs:
        return x[0]
    if jnp.issubdtype(x.dtype, jnp.floating):
        return mean_over_rows(x)
    raise TypeError(
        f"{call.request.who}: f returned a {x.dtype} scalar that differs between "
        "micro-batches. Return it as a float to have it averaged, or with shape (1,) "
        "to have one entry per micro-batch."
    )
