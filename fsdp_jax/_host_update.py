"""An optax update that runs where the optimizer state rests: on the host.

What must not live here: which state rests where (`_param`), and the optimizer class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.experimental import compute_on
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from fsdp_jax._callees import is_plain
from fsdp_jax._compiled import compiled
from fsdp_jax._evaluate import evaluate, with_outputs
from fsdp_jax._move import is_away
from fsdp_jax._raw_reads import ELEMENTWISE

Array = jax.Array

# One name for both: jax 0.12 gave compute_on the signature of compute_on2.
_compute_on: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on


def on_host(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation that updates on the host what rests in pinned host memory.

    What reduces whole arrays to a scalar, such as a global norm, needs other devices:
    it runs on the devices before, one array at a time. An update that does anything
    else than reducing and elementwise operations (a matrix product) runs on the
    devices as a whole. So does what concerns arrays in device memory only.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, treedef = jax.tree.flatten((updates, state, params, extra))
        if any(isinstance(x, Tracer) for x in leaves):
            return run(leaves, treedef)
        # Eagerly, operations on arrays in different memories would not mix.
        return jitted(leaves, treedef)

    def run(leaves: list[Array], treedef: Any) -> Any:
        def flat(*leaves):
            grads, state, params, extra = jax.tree.unflatten(treedef, leaves)
            results = tx.update(grads, state, params, **extra)
            out, notes["tree"] = jax.tree.flatten(results)
            notes["updates"] = len(jax.tree.leaves(results[0]))
            return out

        notes: dict[str, Any] = {}
        avals = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        closed = jax.make_jaxpr(flat)(*avals)
        inlined = jax.make_jaxpr(lambda *xs: evaluate(closed, xs, into=is_plain))(
            *avals
        )
        grads, state, params, _ = jax.tree.unflatten(treedef, leaves)
        at, out = notes["updates"], closed.out_avals
        like = grads if params is None else params
        away = _places(jax.tree.leaves(like), out[:at])
        away += _places(jax.tree.leaves(state), out[at:])
        return jax.tree.unflatten(notes["tree"], _run(inlined, leaves, away))

    jitted = compiled(run, static_argnums=1)
    return optax.GradientTransformationExtraArgs(tx.init, update)


def _places(before: Sequence[Array], after: Sequence[Any]) -> list[bool]:
    """Whether each new array belongs into host memory: where the old one is.

    By their order: a state may come back as a list for a tuple, and NNX makes a mapping
    of either.
    """
    if [x.shape for x in before] != [getattr(x, "shape", None) for x in after]:
        return [False] * len(after)
    return [is_away(x) for x in before]


def _run(closed: ClosedJaxpr, leaves: list[Array], away: list[bool]) -> list[Array]:
    """Evaluate an update.

    Args:
        closed: the update, without calls in it.
        leaves: its inputs.
        away: per result, whether it belongs into host memory. Scalars do not: a counter
            that is sent there comes back in device memory.
    """
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def to(space: Any, xs: Sequence[Array]) -> list[Array]:
        return [jax.device_put(x, space) for x in xs]

    reductions = [e for e in closed.jaxpr.eqns if _reduces(e)]
    scalars = [v for e in reductions for v in e.outvars]
    if not all(_reduces(e) or _is_elementwise(e) for e in closed.jaxpr.eqns):
        results = evaluate(closed, to(device, leaves))
        return [to(host, [x])[0] if a else x for x, a in zip(results, away)]
    known = evaluate(
        with_outputs(closed, scalars), to(device, leaves), [True] * len(scalars)
    )

    def part(wanted: list[bool], args: Sequence[Array]) -> list[Array]:
        # As if they were on a device: in host memory they do not mix with constants.
        args = to(device, args)
        given = dict(zip(scalars, args[len(leaves) :], strict=True))
        return evaluate(closed, args[: len(leaves)], wanted, given)

    here = iter(part([not a for a in away], [*leaves, *known]))
    there = iter(())
    if any(away):
        on_host: Callable = _compute_on(
            lambda *args: part(away, args),
            compute_type="device_host",
            out_memory_spaces=[host] * sum(away),
        )
        there = iter(on_host(*leaves, *known))
    return [next(there if a else here) for a in away]


def _reduces(eqn: JaxprEqn) -> bool:
    """Whether an equation makes scalars of whole arrays."""
    whole = any(isinstance(v, Var) and _ndim(v) for v in eqn.invars)
    return whole and not any(_ndim(v) for v in eqn.outvars)


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether every element follows from the elements in the same place."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":  # of a scalar
        return not any(isinstance(v, Var) and _ndim(v) for v in eqn.invars)
    return name in ELEMENTWISE


def _ndim(var: Var) -> int:
    return len(getattr(var.aval, "shape", ()))
